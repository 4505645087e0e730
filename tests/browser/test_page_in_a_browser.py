"""The page for people, in a real browser without a screen: Debian's chromium, driven by playwright."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from batch_client import client_of, create, ended, jsonl, request
from front import StartFront
from playwright.async_api import Browser, Page, async_playwright, expect
from tool_engine import ToolEngine, turn

from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.tree import LiveConfig, ServerConfig
from llmserve.web.page import FILES

CHROMIUM = shutil.which("chromium")
BYTES_MAX = 100_000  # of the whole page
WAIT_MS = 30_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


async def opened(browser: Browser, url: str, **options: object) -> tuple[Page, list[str], list[str]]:
    """The page, the URLs that it asks for, and what it complains of."""
    page = await browser.new_page(**options)  # type: ignore[arg-type]
    page.set_default_timeout(WAIT_MS)
    asked: list[str] = []
    troubles: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    await page.goto(url)
    return page, asked, troubles


def test_the_page_is_small() -> None:
    folder = Path(__file__).parents[2] / "llmserve" / "web" / "static"
    assert {name for name, _ in FILES.values()} == {path.name for path in folder.iterdir()}
    assert sum(path.stat().st_size for path in folder.iterdir()) < BYTES_MAX


async def test_it_opens_and_shows_a_request_as_it_runs_and_ends(start_front: StartFront, browser: Browser) -> None:
    async with FakeEngine(step_s=0.05, slots=1) as engine:
        front = await start_front(engine, slots=1)
        page, asked, troubles = await opened(browser, front.url)
        await expect(page.locator("#state")).to_contain_text("1 of 1 engines ready", timeout=WAIT_MS)
        tiles = page.locator("#tiles")
        await expect(tiles).to_contain_text("0 / 1")
        asking = [asyncio.ensure_future(front.post(max_tokens=80).__aenter__()) for _ in range(2)]
        await expect(tiles).to_contain_text("1 / 1", timeout=WAIT_MS)
        await expect(page.locator("#models")).to_contain_text("fake", timeout=WAIT_MS)  # one waits
        for answer in asking:
            assert (await answer).status == 200
        await expect(page.locator("#models")).to_contain_text("nobody", timeout=WAIT_MS)
        await expect(tiles).to_contain_text("0 / 1", timeout=WAIT_MS)
        assert all(url.startswith((front.url, "data:")) for url in asked)
        assert troubles == []


async def test_a_chat_shows_the_answer_and_its_receipt(start_front: StartFront, browser: Browser) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        page, _, troubles = await opened(browser, front.url)
        await expect(page.locator("#model option")).to_have_count(1, timeout=WAIT_MS)
        await page.locator("#prompt").fill("Count from 1 to 5.")
        await page.locator("#prompt").press("Control+Enter")
        await expect(page.locator("#receipt")).to_contain_text("whole answer after", timeout=WAIT_MS)
        receipt = await page.locator("#receipt").inner_text()
        assert "in the queue" in receipt
        assert "engine 127.0.0.1" in receipt
        assert (await page.locator("#answer").inner_text()).strip()
        assert troubles == []


async def test_it_survives_an_engines_death_and_the_servers(start_front: StartFront, browser: Browser) -> None:
    async with FakeEngine() as other:
        async with FakeEngine() as engine:
            front = await start_front(engine, other)
            page, _, _ = await opened(browser, front.url)
            await expect(page.locator("#state")).to_contain_text("2 of 2 engines ready", timeout=WAIT_MS)
        await expect(page.locator("#state")).to_contain_text("1 of 2 engines ready", timeout=WAIT_MS)
        await expect(page.locator("#engines .bad")).to_contain_text("down")
    await expect(page.locator("#state")).to_contain_text("0 of 2 engines ready", timeout=WAIT_MS)


async def test_with_keys_the_page_asks_for_the_admin_key(
    start_front: StartFront, browser: Browser, tmp_path: Path
) -> None:
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("alice: sk-alice\n")
    admin.write_text("sk-admin\n")
    for path in (keys, admin):
        path.chmod(0o600)
    async with FakeEngine() as engine:
        front = await start_front(
            engine, server=ServerConfig(port=0, api_key_file=str(keys), admin_key_file=str(admin))
        )
        page, _, _ = await opened(browser, front.url)
        await expect(page.locator("#admin-key")).to_be_visible(timeout=WAIT_MS)
        await expect(page.locator("#live")).to_be_hidden()
        await page.locator("#admin-key").fill("wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#admin-note")).to_contain_text("refuses", timeout=WAIT_MS)
        await page.locator("#admin-key").fill("sk-admin")
        await page.keyboard.press("Enter")
        await expect(page.locator("#state")).to_contain_text("1 of 1 engines ready", timeout=WAIT_MS)
        await page.locator("#api-key").fill("sk-alice")
        await page.keyboard.press("Tab")
        await expect(page.locator("#model option")).to_have_count(1, timeout=WAIT_MS)


async def test_batch_jobs_are_summed_by_status(start_front: StartFront, browser: Browser, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0.05, slots=1) as engine:
        front = await start_front(engine, slots=1, server=ServerConfig(port=0, state=str(tmp_path)))
        page, _, troubles = await opened(browser, front.url)
        await expect(page.locator("#jobs")).to_contain_text("no batches", timeout=WAIT_MS)
        client = client_of(front.url)
        long = await create(client, jsonl([request(number, max_tokens=100) for number in range(400)]))
        await expect(page.locator("#jobs tr")).to_have_text(["in progress1"], timeout=WAIT_MS)
        await expect(page.locator("#jobs-note")).to_contain_text("lines wait, about", timeout=WAIT_MS)
        await client.batches.cancel(long.id)
        done = await ended(client, await create(client, jsonl([request(0)])))
        assert done.status == "completed"
        await expect(page.locator("#jobs tr")).to_have_text(["completed1", "cancelled1"], timeout=WAIT_MS)
        await expect(page.locator("#jobs-note")).to_contain_text("0 lines wait", timeout=WAIT_MS)
        assert troubles == []


@pytest.mark.parametrize("width", [360, 1200])
async def test_programs_are_a_timeline_also_with_hundreds_and_on_a_phone(
    start_front: StartFront, browser: Browser, width: int
) -> None:
    """Half of the programs run or are held; the others wait for room in the engine's cache."""
    async with ToolEngine(step_s=0.05, slots=400, tokens_max=30_000) as engine:
        front = await start_front(engine, slots=400)
        page, _, troubles = await opened(browser, front.url, viewport={"width": width, "height": 800})
        await expect(page.locator("#state")).to_contain_text("1 of 1 engines ready", timeout=WAIT_MS)
        await expect(page.locator("#programs-panel")).to_be_hidden()
        await turn(front, "first", 2)
        agents = [
            asyncio.create_task(turn(front, f"s{number}", 40, tool_s=0.1 * (number % 20), words=250, tokens=40))
            for number in range(250)
        ]
        note = page.locator("#programs-note")
        await expect(note).to_have_text(re.compile(r"[1-9]\d* run, [1-9]\d* held, [1-9]\d* wait now"), timeout=WAIT_MS)
        await expect(note).to_contain_text("are not shown")
        await page.locator("#programs-panel summary").click()
        await expect(page.locator("#program-list tbody tr").first).to_contain_text("s")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        await expect(page.locator("#engines tbody")).to_contain_text("% of 30,000")
        for agent in agents:
            agent.cancel()
        await asyncio.gather(*agents, return_exceptions=True)
        assert troubles == []


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_a_phone_needs_no_sideways_scrolling(start_front: StartFront, browser: Browser, scheme: str) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        page, _, troubles = await opened(
            browser, front.url, viewport={"width": 360, "height": 740}, color_scheme=scheme
        )
        await expect(page.locator("#state")).to_contain_text("1 of 1 engines ready", timeout=WAIT_MS)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(20, 23, 26)") == (scheme == "dark")
        assert troubles == []


async def test_without_an_engine_the_chat_says_so_and_sends_nothing(start_front: StartFront, browser: Browser) -> None:
    async with FakeEngine() as engine:
        url = engine.url
    front = await start_front(url, wait=False)
    page, _, troubles = await opened(browser, front.url)
    await expect(page.locator("#no-model")).to_contain_text("no engine has been up", timeout=WAIT_MS)
    await expect(page.locator("#send")).to_be_disabled()
    assert troubles == []


async def test_a_chat_that_waits_shows_its_place(start_front: StartFront, browser: Browser) -> None:
    async with FakeEngine(step_s=0.05) as engine:
        soon = LiveConfig(probe_every_s=0.05, keep_alive_s=0.2)
        front = await start_front(engine, slots=1, live=soon)
        page, _, _ = await opened(browser, front.url)
        await expect(page.locator("#model option")).to_have_count(1, timeout=WAIT_MS)
        first = asyncio.ensure_future(front.post(max_tokens=4000).__aenter__())
        await expect(page.locator("#tiles")).to_contain_text("1 / 1", timeout=WAIT_MS)
        await page.locator("#prompt").fill("Count from 1 to 5.")
        await page.locator("#prompt").press("Control+Enter")
        await expect(page.locator("#receipt")).to_contain_text("position 1", timeout=WAIT_MS)
        first.cancel()
        await expect(page.locator("#receipt")).to_contain_text("whole answer after", timeout=WAIT_MS)
