"""Processes of a server that are killed: the others go on, and the next one knows what they do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from many_processes import (
    asked,
    keys_in,
    metric,
    scheduler_and_relays,
    session_of_many,
    started,
    until,
)
from server_process import Server


async def answer(session: aiohttp.ClientSession, server: Server, *, stream: bool, **fields: Any) -> str:
    """'answered', 'lost' (the connection broke), or what was told instead."""
    try:
        async with asked(session, server, stream=stream, **fields) as response:
            text = await response.text()
    except aiohttp.ClientError:
        return "lost"
    if stream:
        return "answered" if text.count("[DONE]") == 1 and "error" not in text else text
    return "answered" if response.status == 200 and json.loads(text)["choices"] else text


def kill_scheduler(server: Server) -> None:
    os.kill(scheduler_and_relays(server)[0].pid, signal.SIGKILL)


@pytest.mark.parametrize("what", ["relay", "scheduler"])
async def test_a_process_that_is_killed_starts_again_and_the_others_go_on(
    engine: str, tmp_path: Path, what: str
) -> None:
    keys_in(tmp_path)
    with started(engine, tmp_path, "--slots", "8") as server:
        scheduler, relays = scheduler_and_relays(server)
        async with session_of_many() as session:
            asking = [
                asyncio.create_task(answer(session, server, stream=number % 2 == 0, max_tokens=100))
                for number in range(24)
            ]
            await asyncio.sleep(0.3)
            os.kill((scheduler if what == "scheduler" else relays[0]).pid, signal.SIGKILL)
            told = set(await asyncio.gather(*asking))
            assert told <= ({"answered"} if what == "scheduler" else {"answered", "lost"})
            again = [answer(session, server, stream=False, max_tokens=100) for _ in range(12)]
            assert set(await asyncio.gather(*again)) == {"answered"}
            assert await metric(session, server, "llmserve_engine_running") == 0
            assert len(psutil.Process(server.process.pid).children()) == 3


async def test_what_runs_holds_its_slots_in_the_next_scheduler_process(engine: str, tmp_path: Path) -> None:
    """Of two slots two answers hold both. What comes then waits until one of them has ended, and no id comes twice."""
    keys_in(tmp_path)
    with started(engine, tmp_path, "--slots", "2") as server:
        async with session_of_many() as session:
            running = [await asked(session, server, stream=True, max_tokens=3000) for _ in range(2)]
            for response in running:
                await response.content.readany()
            kill_scheduler(server)
            late = asyncio.create_task(answer(session, server, stream=False))

            async def is_told() -> bool:
                try:
                    in_bins = await metric(session, server, "llmserve_bin_requests")
                    return in_bins + await metric(session, server, "llmserve_formed_requests") == 1
                except aiohttp.ClientError:
                    return False

            await until(is_told)
            assert await metric(session, server, "llmserve_engine_running") == 2
            assert not late.done()
            names = {response.headers["x-request-id"] for response in running}
            running[0].close()
            assert await late == "answered"
            running[1].close()
            async with asked(session, server) as response:
                assert len(names | {response.headers["x-request-id"]}) == 3

            async def nothing_runs() -> bool:
                return not await metric(session, server, "llmserve_engine_running")

            await until(nothing_runs)


async def test_budgets_are_exact_whenever_the_scheduler_process_is_killed(engine: str, tmp_path: Path) -> None:
    keys_in(tmp_path, bob="tokens_per_month = 1_000_000")
    spent = tmp_path / "usage.sqlite"
    used = 0
    with started(engine, tmp_path, "--slots", "8", "--usage-file", str(spent)) as server:
        async with session_of_many() as session:

            async def one(tokens: int) -> None:
                nonlocal used
                async with asked(session, server, max_tokens=tokens) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                    used += answer["usage"]["total_tokens"]

            asking = [asyncio.create_task(one(tokens)) for tokens in range(1, 80)]
            for _ in range(3):
                await asyncio.sleep(0.4)
                kill_scheduler(server)

                async def is_there() -> bool:
                    try:
                        return await metric(session, server, "llmserve_engine_ready") == 1
                    except (aiohttp.ClientError, ValueError):
                        return False

                await until(is_there)
            await asyncio.gather(*asking)
    with sqlite3.connect(spent) as file:
        ((amount,),) = file.execute("SELECT amount FROM spent").fetchall()
        assert amount == pytest.approx(used, abs=1e-6), "a sum of floats"
        assert file.execute("SELECT * FROM held").fetchall() == []
