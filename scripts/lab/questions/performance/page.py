"""What the page for people costs: the server's time for a snapshot, its size, and the browser's time.

    python scripts/lab performance.page --output docs/results/page.json

A server with 100 timed engines and 10,000 waiting requests is watched. The snapshot's time is processor time of the
server's own process, of which one page takes one snapshot a second, and more pages the same snapshot. First paint and
the browser's time per snapshot are those of Debian's chromium without a screen (--browser none: without these).
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from kit import ROOT
from kit.arguments import add_results, parser_of
from kit.progress import log
from kit.results import machine, write_json
from kit.tables import show

from llmserve.calls.in_flight import Head, Receipt
from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import RequestError
from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.parse import parse_call
from llmserve.live.cluster import LiveCluster
from llmserve.observe.watch import Watch
from llmserve.server.serving import serving
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.tree import Config, EngineConfig, LiveConfig, ServerConfig

START_S = 120.0
STATIC = ROOT / "llmserve" / "web" / "static"


class Unread:
    """A client that reads nothing."""

    listens = False

    async def writable(self) -> None: ...

    def begin(self, head: Head) -> None: ...

    def write(self, data: bytes) -> bool:
        return False

    def end(self) -> None: ...

    def fail(self, error: RequestError, receipt: Receipt | None) -> None: ...


def fill(cluster: LiveCluster, requests: int) -> None:
    """Queue requests of different texts."""
    for number in range(requests):
        body = {"model": "fake", "messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 4_000}
        call = parse_call("/v1/chat/completions", msgspec.json.encode(body), BodyLimits(prompt_chars_max=10_000))
        cluster.calls.submit(call, Unread())


def snapshot_cost(cluster: LiveCluster, repeats: int) -> dict[str, float]:
    """Median processor milliseconds and bytes of a snapshot."""
    watch = Watch(cluster)
    watch.begin()
    times_ms, size = [], 0
    for _ in range(repeats):
        began_s = time.process_time()
        size = len(msgspec.json.encode(watch.snapshot()))
        times_ms.append((time.process_time() - began_s) * 1e3)
    watch.stop()
    return {"snapshot_ms": statistics.median(times_ms), "snapshot_bytes": size}


async def browser_cost(url: str, executable: str, seconds: float) -> dict[str, float]:
    """First paint (ms), and the browser's script and layout time for each snapshot (ms)."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = await browser.new_page()
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable")
        await page.goto(url)
        await page.locator("#live").wait_for(state="visible")
        paint = await page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")

        async def busy_s() -> float:
            metrics = {
                entry["name"]: entry["value"] for entry in (await session.send("Performance.getMetrics"))["metrics"]
            }
            return float(metrics["ScriptDuration"] + metrics["LayoutDuration"] + metrics["RecalcStyleDuration"])

        before_s = await busy_s()
        await asyncio.sleep(seconds)
        spent_s = await busy_s() - before_s
        await browser.close()
    return {"first_paint_ms": paint, "browser_ms_per_snapshot": spent_s / seconds * 1e3}


async def measure(engines: int, requests: int, repeats: int, browser: str | None, seconds: float) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeEngine(step_s=1.0, slots=1)) for _ in range(engines)]
        config = Config(
            server=ServerConfig(port=0),
            engines=EngineConfig(engine=tuple(fake.url for fake in fakes), slots=1),
            scheduling=SchedulingConfig(queue_requests_max=requests + engines),
            live=LiveConfig(probe_every_s=5.0),
        )
        cluster, url = await stack.enter_async_context(serving(config))
        async with asyncio.timeout(START_S):
            while not all(cluster.engines_ready.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        fill(cluster, requests)
        log(f"{cluster.scheduler.waiting:,} requests wait at {len(cluster.fleet.handles)} engines")
        numbers = snapshot_cost(cluster, repeats)
        if browser is not None:
            numbers |= await browser_cost(url, browser, seconds)
        return numbers


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0, help="for which the browser is watched")
    parser.add_argument("--browser", default=shutil.which("chromium"), help="the executable; none: without a browser")
    add_results(parser)
    args = parser.parse_args()
    browser = None if args.browser in (None, "none") else args.browser
    numbers = asyncio.run(measure(args.engines, args.requests, args.repeats, browser, args.seconds))
    numbers["page_bytes"] = sum(path.stat().st_size for path in STATIC.iterdir())
    cells = [[name, f"{value:,.2f}"] for name, value in numbers.items()]
    show(f"The page, {args.engines} engines, {args.requests:,} requests", ["", ""], cells)
    write_json(args.output, {**machine(), "engines": args.engines, "requests": args.requests, **numbers}, indent=2)
