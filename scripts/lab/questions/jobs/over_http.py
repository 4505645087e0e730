"""Jobs beside bursts of online requests, over HTTP: the real server, and an AIMD feeder that sends lines to the engine.

The engine is a process that waits as long as answers would take. Times are seconds from the first online request on.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
import numpy as np
from kit.client import add_batch, ask, at_their_times, get_text, session_of
from kit.servers import Server, fake_engine, front_end

from questions.jobs.simulated import Aimd

SLOTS, STEP_S = 32, 0.03
TOKENS_MEAN, SPREAD = 40.0, 0.7  # of answers, log-normal
BURST_S, IDLE_S, CYCLES = 10.0, 10.0, 4  # the first cycle does not count for the times to first tokens
BURST_LOAD, IDLE_SHARE = 0.75, 1.0 / 15.0
JOBS, LINES = 3, 600
END_S = CYCLES * (BURST_S + IDLE_S)
SCRAPE_S = 1.0  # of the feeder
MODEL = "timed"


@dataclass(frozen=True)
class Load:
    """online : (arrival, tokens).  lines : tokens of each job's lines"""

    online: list[tuple[float, int]]
    lines: list[list[int]]


@dataclass
class Seen:
    """spans : (arrival, first token, end) of online requests.  tokens : of lines that ended before END_S"""

    spans: list[tuple[float, float, float]] = field(default_factory=list)
    tokens: int = 0

    @property
    def burst_ttft_s(self) -> list[float]:
        cycle_s = BURST_S + IDLE_S
        return [first - at for at, first, _ in self.spans if at >= cycle_s and at % cycle_s < BURST_S]


def drawn(seed: int) -> Load:
    rng = np.random.default_rng(seed)

    def lengths(count: int) -> list[int]:
        drawn = rng.lognormal(np.log(TOKENS_MEAN) - 0.5 * SPREAD**2, SPREAD, count)
        return [int(length) for length in np.ceil(drawn)]

    most_per_s = BURST_LOAD * SLOTS / (TOKENS_MEAN * STEP_S)
    times_s = np.cumsum(rng.exponential(1.0 / most_per_s, int(2 * most_per_s * END_S)))
    kept = [at_s for at_s in times_s if at_s % (BURST_S + IDLE_S) < BURST_S or rng.random() < IDLE_SHARE]
    kept = [float(at_s) for at_s in kept if at_s < END_S]
    return Load(list(zip(kept, lengths(len(kept)), strict=True)), [lengths(LINES) for _ in range(JOBS)])


def engine() -> AbstractAsyncContextManager[Server]:
    return fake_engine(MODEL, "--slots", str(SLOTS), "--step-s", str(STEP_S))


def body(number: int, tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": f"request {number}"}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens}


async def online(load: Load, url: str, session: aiohttp.ClientSession) -> Seen:
    """Send the online requests at their times."""
    seen = Seen()
    begun_s: list[float] = []

    async def one(index: int, due_s: float) -> None:
        at_s, tokens = load.online[index]
        begun_s.append(due_s - at_s)
        first_s: list[float] = []
        data = {**body(index, tokens), "stream": True}
        await ask(session, url, data, on_chunk=lambda _: first_s or first_s.append(time.perf_counter()))
        start_s = due_s - at_s
        seen.spans.append((at_s, first_s[0] - start_s, time.perf_counter() - start_s))

    await at_their_times([at_s for at_s, _ in load.online], one)
    return seen


Lines = Callable[[Load, str, aiohttp.ClientSession], Awaitable[int]]
"""Runs lines until END_S. Returns the tokens of those that have ended."""


async def beside(load: Load, url: str, lines: Lines | None) -> Seen:
    """Send the online requests, and lines beside them."""
    async with session_of() as session:
        running = asyncio.ensure_future(lines(load, url, session)) if lines is not None else None
        seen = await online(load, url, session)
        if running is not None:
            seen.tokens = await running
        return seen


async def aimd(load: Load, url: str, session: aiohttp.ClientSession) -> int:
    """One more line in flight for each that ends; half as many while scrapes find requests that wait in the engine."""
    limit = Aimd(lambda _: 1.0, SCRAPE_S, 4.0 * SLOTS)
    tokens = in_engine = 0
    waiting = [length for lines in reversed(load.lines) for length in reversed(lines)]
    running: set[asyncio.Task[None]] = set()
    end_s, scrape_s = time.monotonic() + END_S, time.monotonic() + SCRAPE_S

    async def line(length: int) -> None:
        nonlocal tokens
        reply = await ask(session, url, body(len(waiting), length))
        tokens += reply.tokens
        limit.answered(in_engine, time.monotonic())

    while time.monotonic() < end_s:
        while waiting and len(running) < int(limit.concurrency):
            task = asyncio.ensure_future(line(waiting.pop()))
            running.add(task)
            task.add_done_callback(running.discard)
        if time.monotonic() >= scrape_s:
            scrape_s += SCRAPE_S
            in_engine = _waiting(await get_text(session, f"{url}/metrics"))
        await asyncio.wait([*running, asyncio.ensure_future(asyncio.sleep(0.05))], return_when="FIRST_COMPLETED")
    for task in running:
        task.cancel()
    return tokens


def _waiting(metrics: str) -> int:
    """Requests that wait in the engine."""
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_waiting")]
    return round(sum([float(line.rsplit(" ", 1)[1]) for line in lines]))


async def batches(load: Load, url: str, session: aiohttp.ClientSession) -> int:
    """Jobs of the server, with windows near, middle and far. They are cancelled at END_S."""
    end_s, ids = time.monotonic() + END_S, []
    for number, lengths in enumerate(load.lines, 1):
        bodies = [body(10_000 * number + line, length) for line, length in enumerate(lengths)]
        ids.append(await add_batch(session, url, bodies, window_s=round(number * END_S)))
    await asyncio.sleep(end_s - time.monotonic())
    return sum([await _cancelled(session, url, batch_id) for batch_id in ids])


async def _cancelled(session: aiohttp.ClientSession, url: str, batch_id: str) -> int:
    """Cancel a batch. Returns the tokens of its answers."""
    async with session.post(f"{url}/v1/batches/{batch_id}/cancel"):
        pass  # a batch that has ended is refused
    while True:
        async with session.get(f"{url}/v1/batches/{batch_id}") as response:
            batch = await response.json()
        if batch["status"] in ("cancelled", "completed", "expired"):
            break
        await asyncio.sleep(0.1)
    if batch["output_file_id"] is None:
        return 0
    answers = (await get_text(session, f"{url}/v1/files/{batch['output_file_id']}/content")).splitlines()
    return sum([json.loads(row)["response"]["body"]["usage"]["completion_tokens"] for row in answers])


async def on_the_engine(load: Load, lines: Lines | None) -> Seen:
    async with engine() as server:
        return await beside(load, server.url, lines)


async def by_the_server(load: Load, lines: Lines | None, *flags: str) -> Seen:
    with tempfile.TemporaryDirectory() as state:
        words = ("--slots", str(SLOTS), "--state", state, *flags)
        async with engine() as server, front_end("jobs", "--engine", server.url, *words) as front:
            return await beside(load, front.url, lines)


def idle_tokens(alone: Seen) -> float:
    """Tokens that lines would get if they ran in every slot that online requests leave until END_S."""
    changes = sorted([(at, 1) for at, _, _ in alone.spans] + [(end, -1) for _, _, end in alone.spans] + [(END_S, 0)])
    levels = np.cumsum([change for _, change in changes])
    spans = zip(pairwise([0.0, *[at for at, _ in changes]]), [0, *levels.tolist()], strict=False)
    return sum([max(0.0, min(end, END_S) - begin) * max(0, SLOTS - level) / STEP_S for (begin, end), level in spans])
