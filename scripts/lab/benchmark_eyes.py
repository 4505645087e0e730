"""What it costs a request to be seen: processor time of the front-end with the access log and with traces.

    python scripts/lab/benchmark_eyes.py --output docs/results/eyes.json
    python scripts/lab/benchmark_eyes.py --before TREE    # beside the front-end of another checkout, as `before`

Half of the requests stream 16 tokens. The front-ends run side by side in front of one engine and are asked in turn. The
processor time of each is read before and after its turn, so that other work on the machine delays a turn and hardly
changes its time. Medians over the rounds; a ratio is the median of each round's ratio to `off`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
from aiohttp import web
from bench.arguments import add_results, parser_of
from bench.progress import log
from bench.results import in_turn, machine, write_json
from bench.rows import Row
from bench.servers import Server, fake_engine, module, running
from bench.tables import cells, show

BODY = {"model": "fake", "messages": [{"role": "user", "content": "How long is a piece of string?"}], "max_tokens": 16}
CONNECTIONS = 8
VARIANTS = {
    "off": (),
    "access log": ("--access-log",),
    "traces, 1 %": ("--traces-sample", "0.01"),
    "traces, all": ("--traces-sample", "1"),
}


@asynccontextmanager
async def collector() -> AsyncIterator[str]:
    """The URL of a collector that takes all spans and keeps none."""

    async def take(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def cpu_s(server: Server) -> float:
    """Processor seconds of the server so far, in all of its processes."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    times = [child.cpu_times() for child in children]
    return sum(time.user + time.system for time in times)


async def serve(session: aiohttp.ClientSession, server: Server, requests: int) -> float:
    """Processor milliseconds of each request."""
    numbers = iter(range(requests))
    bodies = [json.dumps({**BODY, "stream": streamed}) for streamed in (False, True)]

    async def keep_asking() -> None:
        for number in numbers:
            async with session.post(
                f"{server.url}/v1/chat/completions",
                data=bodies[number % 2],
                headers={"content-type": "application/json"},
            ) as response:
                await response.read()
                assert response.status == 200

    before_s = cpu_s(server)
    await asyncio.gather(*(keep_asking() for _ in range(CONNECTIONS)))
    return 1e3 * (cpu_s(server) - before_s) / requests


async def measure(rounds: int, requests: int, before: Path | None) -> list[Row]:
    times_ms: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(collector())
        engine = await stack.enter_async_context(fake_engine("fake", "--step-s", "0", "--slots", "64"))
        flags = ("--engine", engine.url, "--predictor", "none", "--log-level", "error")
        session = await stack.enter_async_context(aiohttp.ClientSession())
        servers = {}
        cases = {**VARIANTS, **({"before": ()} if before is not None else {})}
        for name, own in cases.items():
            environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
            if name == "before":
                environment["PYTHONPATH"] = str(before)
            command = module("llmserve", "serve", *flags, *own)
            servers[name] = await stack.enter_async_context(
                running(f"llmserve, {name}", command, ready="/ready", environment=environment)
            )
            await serve(session, servers[name], requests)  # what is done once
        for number in range(rounds):
            for name in in_turn(list(servers), number):
                times_ms.setdefault(name, []).append(await serve(session, servers[name], requests))
            log(f"round {number + 1}/{rounds}")
    return [
        Row(
            {"front-end": name},
            {
                "cpu_ms_per_request": statistics.median(times_ms[name]),
                "ratio_to_off": statistics.median(
                    own / off for own, off in zip(times_ms[name], times_ms["off"], strict=True)
                ),
            },
        )
        for name in times_ms
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=1_000, help="in a turn")
    parser.add_argument("--before", type=Path, metavar="TREE", help="another checkout, measured as `before`")
    add_results(parser)
    args = parser.parse_args()
    rows = asyncio.run(measure(args.rounds, args.requests, args.before))
    columns = {
        "front-end": ("front-end", ""),
        "processor ms of a request": ("cpu_ms_per_request", ".3f"),
        "of `off`": ("ratio_to_off", ".3f"),
    }
    show("What it costs to be seen", list(columns), cells(rows, columns))
    written = [{**row.case, **row.numbers} for row in rows]
    write_json(args.output, {**machine(), "rounds": args.rounds, "requests": args.requests, "rows": written}, indent=2)


if __name__ == "__main__":
    main()
