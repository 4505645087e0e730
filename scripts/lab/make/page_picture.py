"""Takes the picture of the page in the guide: a run of the demo model, with its own answers and the demo predictor.

    python scripts/lab page_picture --output docs/guide/page.png

Clients ask questions of the model's training distribution, at random times, and a batch job has more of them. Then
somebody chats on the page, in Debian's chromium.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path

import numpy as np
from kit.arguments import parser_of
from kit.client import add_batch, ask, body_of, session_of
from kit.progress import log
from kit.servers import front_end

from make import demo_corpus

WIDTH, HEIGHT = 1180, 1500
SEED = 1


async def load(url: str, rate_per_s: float) -> None:
    """Ask at random times until the task is cancelled."""
    rng = np.random.default_rng(SEED)
    prompts = demo_corpus.prompts(10_000, SEED)
    async with session_of() as session, asyncio.TaskGroup() as asking:
        for prompt in prompts:
            asking.create_task(ask(session, url, body_of(prompt, temperature=1, stream=True)))
            await asyncio.sleep(rng.exponential(1.0 / rate_per_s))


async def add_questions(url: str, lines: int) -> None:
    """Make a batch job of this many questions."""
    prompts = demo_corpus.prompts(lines, SEED + 1)
    bodies = [body_of(prompt, temperature=1) for prompt in prompts]
    async with session_of() as session:
        await add_batch(session, url, bodies)


async def take(url: str, executable: str, seconds: float, output: Path) -> None:
    """Open the page, wait, chat, and take the picture."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        await page.goto(url)
        await page.locator("#live").wait_for(state="visible")
        await asyncio.sleep(seconds)
        await page.locator("#prompt").fill("Count from 1 to 20.")
        await page.locator("#send").click()
        await page.get_by_text("whole answer after").wait_for(timeout=60_000)
        await page.screenshot(path=output, full_page=True)
        await browser.close()


async def run(rate_per_s: float, lines: int, seconds: float, executable: str, output: Path) -> None:
    with tempfile.TemporaryDirectory() as state:
        async with front_end("with the demo model", "--state", state) as server:
            log(f"the page is at {server.url}")
            loading = asyncio.create_task(load(server.url, rate_per_s))
            await add_questions(server.url, lines)
            await take(server.url, executable, seconds, output)
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rate-per-s", type=float, default=2.0, help="of questions, besides the batch job")
    parser.add_argument("--lines", type=int, default=300, help="of the batch job")
    parser.add_argument("--seconds", type=float, default=100.0, help="for which the page is open before the chat")
    parser.add_argument("--browser", default=shutil.which("chromium"), help="the executable")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    asyncio.run(run(args.rate_per_s, args.lines, args.seconds, args.browser, args.output))
