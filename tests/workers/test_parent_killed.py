"""The process that has started all others is killed."""

from __future__ import annotations

import asyncio

import aiohttp
import psutil
from many_processes import metric, until
from server_process import Server, all_ended

from llmserve.engines.timed.server import FakeEngine


async def test_what_runs_is_answered_and_all_processes_end_where_the_parent_is_killed() -> None:
    async with FakeEngine(slots=2, step_s=0.02) as engine, aiohttp.ClientSession() as session:
        server = await asyncio.to_thread(Server, "--workers", "2", "--engine", engine.url, "--slots", "1")
        try:
            children = psutil.Process(server.process.pid).children()
            assert len(children) == 3

            async def answer() -> str:
                body = {"model": "fake", "prompt": "hello", "max_tokens": 60, "stream": True}
                async with session.post(f"{server.url}/v1/completions", json=body) as response:
                    return await response.text()

            answers = [asyncio.create_task(answer()) for _ in range(2)]  # one of them waits

            async def one_waits() -> bool:
                in_bins = await metric(session, server, "llmserve_bin_requests")
                return in_bins + await metric(session, server, "llmserve_formed_requests") == 1

            await until(one_waits)
            server.process.kill()
            texts = await asyncio.gather(*answers)
            assert all(text.endswith("data: [DONE]\n\n") for text in texts)
            assert await asyncio.to_thread(all_ended, children, 30.0)
        finally:
            server.close()
