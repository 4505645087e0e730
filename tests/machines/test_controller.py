"""The controller with real processes on this machine, without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from keepers_here import Here
from msgspec.structs import replace

from llmserve.engines.process import free_port
from llmserve.machines.cluster_file import read_cluster
from llmserve.machines.controller import Controller, Desired
from llmserve.machines.processes import Secrets
from llmserve.planning import HerdGroup, Plan

pytestmark = pytest.mark.slow

START_S = 120.0
TEXT = """
[[engine]]
name = "m"
kind = "timed"
model = "m"
replicas = 3
args = ["--step-s", "0.01", "--slots", "2"]

[[group]]
name = "left"
gpus = 2
models = ["m"]
streams = []

[[group]]
name = "right"
gpus = 1
models = []
streams = [["night", "m"]]

[gateway]
port = {port}
"""


class Running:
    def __init__(self, controller: Controller, here: Here, session: aiohttp.ClientSession) -> None:
        self.controller, self.here, self.session = controller, here, session

    @property
    def url(self) -> str:
        return self.controller.statuses["gateway-0"].url

    async def chat(self, **fields: Any) -> tuple[int, str, str]:
        """Status, engine and text."""
        headers = fields.pop("headers", {})
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}], **fields}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            return response.status, response.headers.get("x-llmserve-engine", ""), await response.text()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(START_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def engine_of(self, name: str) -> str:
        return self.controller.statuses[name].url.removeprefix("http://")


@asynccontextmanager
async def running(tmp_path: Path, text: str = TEXT) -> AsyncIterator[Running]:
    file = tmp_path / "cluster.toml"
    file.write_text(text.replace("{port}", str(free_port())))
    cluster = replace(read_cluster(file), host="127.0.0.1")
    desired = Desired(file=cluster, plan=cluster.first_plan(), secrets=Secrets("sk-d", "sk-e", "sk-a"))
    async with AsyncExitStack() as stack:
        here = Here(tmp_path / "files", "sk-a")
        stack.push_async_callback(here.close)
        controller = Controller(here, desired)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        stepping = asyncio.create_task(controller.run())
        stack.callback(stepping.cancel)
        cluster_running = Running(controller, here, session)
        await cluster_running.until(lambda: controller.is_ready)
        yield cluster_running


async def until_served(cluster: Running, **fields: Any) -> tuple[int, str, str]:
    async with asyncio.timeout(START_S):
        while True:
            answer = await cluster.chat(**fields)
            if answer[0] == 200:
                return answer
            await asyncio.sleep(0.1)


async def test_a_cluster_serves_follows_another_plan_and_survives_kills(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        controller = cluster.controller
        night = {"x-llmserve-stream": "night"}
        _, engine, text = await until_served(cluster, stream=True)
        assert text.endswith("[DONE]\n\n")
        _, at_night, _ = await until_served(cluster, headers=night)
        groups = dict(controller._moves.holders)
        assert sorted(groups.values()) == ["left", "left", "right"]
        own = {cluster.engine_of(worker) for worker, group in groups.items() if group == "left"}
        assert engine in own
        assert at_night not in own, "a stream goes to its own group"

        asking = [asyncio.create_task(cluster.chat(max_tokens=60, stream=True)) for _ in range(12)]
        plan = Plan((HerdGroup("left", 1, ("m",)), HerdGroup("right", 2, (), (("night", "m"),))))
        await asyncio.sleep(0.2)
        await controller.change(replace(controller.desired, plan=plan))
        await cluster.until(lambda: sorted(controller._moves.holders.values()) == ["left", "right", "right"])
        answers = await asyncio.gather(*asking)
        assert [answer[0] for answer in answers] == [200] * 12
        assert all(text.count("tok ") == 60 and "error" not in text for _, _, text in answers), "a move loses nothing"

        before = controller.statuses["group-left"]
        assert before.pid is not None
        waiting = [asyncio.create_task(cluster.chat(max_tokens=20)) for _ in range(6)]
        await asyncio.sleep(0.1)
        os.kill(psutil.Process(before.pid).children()[0].pid, signal.SIGKILL)
        assert [answer[0] for answer in await asyncio.gather(*waiting)] == [200] * 6, "they wait for their group"
        await cluster.until(lambda: controller.statuses["group-left"].restarts == 1)
        assert "SIGKILL" in controller.statuses["group-left"].last_end
        async with asyncio.timeout(START_S):
            while True:
                groups = (await controller.report())["groups"]
                if [(group["waiting"], set(group["engines"])) for group in groups] == [(0, {"vLLM"})] * 2:
                    break
                await asyncio.sleep(0.1)


GROWING = """
[[engine]]
name = "m"
kind = "timed"
model = "m"
replicas_max = 2
args = ["--step-s", "0.02", "--slots", "1"]

[gateway]
port = {port}
"""


async def test_a_queue_that_one_engine_cannot_serve_in_time_starts_another(tmp_path: Path) -> None:
    async with running(tmp_path, GROWING) as cluster:
        await until_served(cluster)
        asking = [asyncio.create_task(cluster.chat(max_tokens=50)) for _ in range(60)]
        await cluster.until(lambda: "m-1" in cluster.controller.statuses and cluster.controller.is_ready)
        answers = await asyncio.gather(*asking)
        assert {status for status, *_ in answers} == {200}
        assert {engine for _, engine, _ in answers} == {cluster.engine_of(name) for name in ("m-0", "m-1")}
