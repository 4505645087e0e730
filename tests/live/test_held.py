"""Requests that come while the only engine starts, restarts or is lost wait for it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections import Counter
from pathlib import Path

import aiohttp
from front import Front, StartFront, until
from live.test_fleet import ask, call, cluster_of, engine_process
from reader import answered

from llmserve.engines.openai import OpenAIEngine
from llmserve.engines.timed.server import FakeEngine
from llmserve.live import journal
from llmserve.request import EngineInfo
from llmserve.scheduling.messages import EngineLost
from llmserve.settings.tree import ApiConfig, LiveConfig, ServerConfig

SOON = {"live": LiveConfig(probe_every_s=0.05, keep_alive_s=0.1)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def assert_replays(front: Front) -> None:
    steps = list(front.cluster.journal.steps)
    assert journal.replay(front.cluster.journal.header, steps) == steps


async def test_killing_and_restarting_the_only_engine_under_50_requests_loses_none(start_front: StartFront) -> None:
    """Half of them are whole answers, half are streams; the slots are held by whole answers when the engine dies."""
    async with engine_process("--step-s", "0.01", "--slots", "8") as engine:
        front = await start_front(engine.url, slots=8, **SOON)
        first = [asyncio.ensure_future(ask(front, stream=False, max_tokens=40)) for _ in range(10)]
        await until(lambda: front.cluster.scheduler.waiting == 2)
        others = [asyncio.ensure_future(ask(front, stream=number % 4 > 0, max_tokens=5)) for number in range(30)]
        await until(lambda: front.cluster.scheduler.waiting == 32)
        assert engine.pid is not None
        os.killpg(engine.pid, signal.SIGKILL)
        await until(lambda: not any(front.cluster.engines_ready.values()))
        late = [asyncio.ensure_future(ask(front, stream=number % 2 == 0, max_tokens=5)) for number in range(10)]
        ends = Counter(await asyncio.gather(*first, *others, *late))
    assert ends == {"done": 50}
    assert_replays(front)


async def test_requests_that_come_while_llmserve_restarts_the_only_engine_wait_for_it() -> None:
    async with engine_process("--step-s", "0.01") as process:
        engine = OpenAIEngine(EngineInfo("e", 4, barrier=False), process.url, restart=process.restart)
        async with cluster_of(engine) as cluster:
            running = asyncio.ensure_future(answered(cluster, call()))
            await until(lambda: bool(cluster.fleet.handles["e"].running))
            cluster.fleet.restart(cluster.fleet.handles["e"])
            later = [asyncio.ensure_future(answered(cluster, call())) for _ in range(5)]
            heads = await asyncio.gather(running, *later)
            events = [step.event for step in cluster.journal.steps]
        await engine.close()
    assert [head.status for head in heads] == [200] * 6
    assert EngineLost("e", planned=True, expected=True) in events


async def test_requests_wait_for_an_engine_that_was_never_up_and_its_models_decide(start_front: StartFront) -> None:
    port = free_port()
    front = await start_front(f"http://127.0.0.1:{port}", wait=False, **SOON)
    served, missing = (asyncio.ensure_future(front.post(model=model).__aenter__()) for model in ("fake", "other"))
    stream = asyncio.ensure_future(front.post(stream=True, max_tokens=3).__aenter__())
    await until(lambda: front.cluster.scheduler.waiting == 3)
    begun = await (await stream).content.readuntil(b"\n")
    assert begun == b": position 2, waiting for an engine\n"
    async with FakeEngine(step_s=0.0, port=port):
        assert (await served).status == 200
        error = (await (await missing).json())["error"]
        assert ((await missing).status, error["code"]) == (404, "model_not_found")
        assert error["message"] == "there is no model 'other'; this server has fake"
        assert (await (await stream).read()).endswith(b"data: [DONE]\n\n")
        async with front.post(model="other") as response:
            assert response.status == 404
    assert_replays(front)


async def test_a_held_stream_that_waited_in_vain_ends_with_an_event_and_a_whole_answer_with_503(
    start_front: StartFront,
) -> None:
    front = await start_front("http://127.0.0.1:9", wait=False, scheduling={"engine_wait_s": 0.5}, **SOON)
    async with front.post() as whole, front.post(stream=True) as stream:
        assert (whole.status, (await whole.json())["error"]["code"]) == (503, "no_engine")
        assert int(whole.headers["retry-after"]) >= 1
        event, done, _ = re.sub(rb"(?m)^:.*\n", b"", await stream.read()).split(b"\n\n")
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "no_engine"
        assert (stream.status, done) == (200, b"data: [DONE]")


async def test_nobody_waits_for_an_engine_that_its_operator_has_drained(
    start_front: StartFront, tmp_path: Path
) -> None:
    (tmp_path / "admin").write_text("ops: secret\n")
    async with FakeEngine(step_s=0.0) as engine:
        front = await start_front(
            engine, server=ServerConfig(port=0, admin_key_file=str(tmp_path / "admin")), limits=ApiConfig(), **SOON
        )
        name = engine.url.removeprefix("http://")
        headers = {"authorization": "Bearer secret"}
        async with front.session.post(f"{front.url}/admin/engines/{name}/drain", headers=headers) as response:
            assert response.status == 200
        async with front.post() as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "no_engine")


async def test_what_is_held_is_bounded_in_number_and_bytes(start_front: StartFront) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    front = await start_front(
        url,
        wait=False,
        scheduling={"queue_requests_max": 2},
        limits=ApiConfig(buffers_bytes_max=300_000),
        **SOON,
    )
    held = [asyncio.ensure_future(front.post(user="x" * size).__aenter__()) for size in (140_000, 10)]
    await until(lambda: front.cluster.scheduler.waiting == 2)
    async with front.post() as response:
        assert (response.status, (await response.json())["error"]["code"]) == (429, "queue_full")
    async with front.post(user="x" * 140_000) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "buffers_full")
    for request in held:
        request.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await until(lambda: not front.cluster.scheduler.requests)


async def test_a_client_that_leaves_does_not_wait_for_the_engine_any_more(start_front: StartFront) -> None:
    port = free_port()
    front = await start_front(f"http://127.0.0.1:{port}", wait=False, **SOON)
    async with aiohttp.ClientSession() as session:
        request = asyncio.ensure_future(
            session.post(f"{front.url}/v1/completions", json={"model": "fake", "prompt": "hello"})
        )
        await until(lambda: front.cluster.scheduler.waiting == 1)
        request.cancel()
        await until(lambda: not front.cluster.scheduler.requests)
    async with FakeEngine(step_s=0.0, port=port) as engine:
        await until(lambda: all(front.cluster.engines_ready.values()))
        assert not engine.bodies
