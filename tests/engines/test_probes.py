"""Probes of engines: what says that an engine is healthy, and what does not say that it is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engines.lying import Answering, LyingEngine, http
from front import Front, StartFront, until

from llmserve.errors import ConfigError
from llmserve.scheduling.messages import EngineLost
from llmserve.settings.tree import EngineConfig, LiveConfig

GOOD = b'{"choices": [], "usage": {"completion_tokens": 3}}'
TOKEN = b'data: {"choices": [{"delta": {"content": "tok"}, "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


async def hang(writer: asyncio.StreamWriter) -> None:
    await writer.wait_closed()


def asked(engine: LyingEngine, path: str) -> int:
    return sum([head.startswith(f"GET {path} ".encode()) for head in engine.heads])


async def probes(engine: LyingEngine, count: int) -> None:
    """Wait for so many further probes."""
    before = asked(engine, "/v1/models")
    await until(lambda: asked(engine, "/v1/models") >= before + count)


async def start(start_front: StartFront, engine: LyingEngine, *, wait: bool = True, **live: Any) -> Front:
    return await start_front(
        engine.url,
        engines=EngineConfig(engine=(engine.url,), slots=4),
        scheduling={"engine_wait_s": 0.1},
        live=LiveConfig(probe_every_s=0.02, **live),
        wait=wait,
    )


@pytest.mark.parametrize("status", [202, 204, 301, 302, 307, 400, 401, 403, 404, 405, 410, 418, 429, 501])
async def test_the_list_of_models_is_enough_where_the_path_of_probes_says_nothing(
    status: int, start_front: StartFront
) -> None:
    answer = f"HTTP/1.1 {status} So\r\nconnection: close\r\nlocation: /v1\r\n\r\n".encode()
    async with LyingEngine(http(GOOD), probes={"/health": answer}) as engine:
        front = await start(start_front, engine)
        await probes(engine, 4)
        async with front.post() as response:
            assert response.status == 200
        if status < 300 or status == 429:
            assert asked(engine, "/health") > 1
        else:
            assert asked(engine, "/health") == 1, "it is asked for no more"


@pytest.mark.parametrize("status", [500, 502, 503, 504, 599])
async def test_an_engine_that_says_that_it_is_not_healthy_gets_no_requests(
    status: int, start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    answer = http(b'{"error": "Loading model"}', status=f"{status} So")
    async with LyingEngine(http(GOOD), probes={"/health": answer}) as engine:
        front = await start(start_front, engine, wait=False)
        await until(lambda: f"is not healthy: /health answers {status}" in caplog.text)
        async with front.post() as response:
            assert response.status == 503
        engine._probes["/health"] = http(b"")
        await until(lambda: all(front.cluster.engines_ready.values()))


async def test_an_engine_whose_health_costs_money_is_asked_whether_it_is_alive(start_front: StartFront) -> None:
    """LiteLLM's /health has each model answer; what it lists says that another path does not."""
    listed = b'{"paths": {"/health": {}, "/health/liveliness": {}, "/v1/chat/completions": {}}}'
    told = {"/openapi.json": http(listed), "/health/liveliness": http(b'"I\'m alive!"')}
    async with LyingEngine(http(GOOD), probes=told) as engine:
        front = await start(start_front, engine)
        await probes(engine, 4)
        assert (asked(engine, "/health"), asked(engine, "/health/liveliness") > 1) == (0, True)
        engine._probes["/health/liveliness"] = http(b'{"status": "shutting_down"}', status="503 So")
        await until(lambda: not any(front.cluster.engines_ready.values()))


async def test_a_server_whose_description_is_late_is_not_asked_about_its_health_before(
    start_front: StartFront,
) -> None:
    listed = b'{"paths": {"/health/liveliness": {}}}'
    told: dict[str, Any] = {"/openapi.json": hang, "/health/liveliness": http(b"alive")}
    async with LyingEngine(http(GOOD), probes=told) as engine:
        await start(start_front, engine, probe_s=1.0)
        engine._probes["/openapi.json"] = http(listed)
        await until(lambda: asked(engine, "/health/liveliness") > 1)
        assert asked(engine, "/health") == 0


async def test_a_server_whose_description_never_comes_is_asked_about_its_health(start_front: StartFront) -> None:
    async with LyingEngine(http(GOOD), probes={"/openapi.json": hang}) as engine:
        front = await start(start_front, engine, probe_s=1.0)
        await until(lambda: asked(engine, "/health") > 1)
        assert asked(engine, "/openapi.json") == 3
        assert all(front.cluster.engines_ready.values())


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/health/ready?deep=0"])
async def test_the_path_of_probes_is_a_setting(path: str, start_front: StartFront) -> None:
    told: dict[str, Any] = {"/health": http(b"", status="503 So")}
    if path != "/v1/models":
        told[path] = http(b"")
    async with LyingEngine(http(GOOD), probes=told) as engine:
        front = await start(start_front, engine, probe_path=path)
        await probes(engine, 3)
        assert (asked(engine, "/health"), asked(engine, path) > 1) == (0, True)
        if path != "/v1/models":
            engine._probes[path] = http(b"", status="503 So")
            await until(lambda: not any(front.cluster.engines_ready.values()))


@pytest.mark.parametrize(
    "path", ["", "health", "/a b", "/\n", "http://a/health", "/\N{LATIN SMALL LETTER E WITH ACUTE}"]
)
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="probe_path"):
        LiveConfig(probe_path=path)


@pytest.mark.parametrize(("probe_s", "ready"), [(30.0, True), (0.05, False)])
async def test_the_time_of_a_probe_is_a_setting(
    probe_s: float, ready: bool, start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.write(http(b""))
        await writer.drain()

    async with LyingEngine(http(GOOD), probes={"/health": late}) as engine:
        front = await start(start_front, engine, wait=ready, probe_s=probe_s)
        if not ready:
            await until(lambda: "/health did not come within 0.05 s, see --probe-s" in caplog.text)
        assert all(front.cluster.engines_ready.values()) is ready


def streaming(piece: bytes, more: asyncio.Event) -> Answering:
    """Pieces one after the other until `more` is set, and then the end."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + TOKEN)
        while not more.is_set():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        writer.write(END)
        await writer.drain()

    return answer


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_an_engine_that_sends_tokens_is_not_lost_because_its_probes_hang(
    path: str, start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    over = asyncio.Event()
    async with LyingEngine(streaming(TOKEN, over), closes=True) as engine:
        front = await start(start_front, engine, probe_s=0.25, probes_failed_max=2)
        (handle,) = front.cluster.fleet.handles.values()
        async with front.post(stream=True) as response:
            engine._probes[path] = hang
            await probes(engine, 5)
            assert (handle.ready, handle.probes_failed) == (True, 0)
            over.set()
            assert (await response.read()).endswith(END)
        assert not any(isinstance(step.event, EngineLost) for step in front.cluster.journal.steps)
        assert caplog.text.count("goes on with its answers, but not with probes") == 1
        await until(lambda: not handle.ready)
        engine._probes[path] = http(b'{"data": [{"id": "fake"}]}')
        await until(lambda: handle.ready)


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_an_engine_is_not_lost_because_probes_hang_while_a_whole_answer_takes_its_usual_time(
    path: str, start_front: StartFront
) -> None:
    answers: list[asyncio.Event] = []

    async def whole(writer: asyncio.StreamWriter) -> None:
        answers.append(asyncio.Event())
        await answers[-1].wait()
        writer.write(http(GOOD))
        await writer.drain()

    async with LyingEngine(whole) as engine:
        front = await start(start_front, engine, probe_s=0.02, probes_failed_max=2)
        (handle,) = front.cluster.fleet.handles.values()

        async def ask() -> int:
            async with front.post() as response:
                return int(response.status)

        for looks in (12, 12, 8):  # the third is as long as the two before, in time if not in probes
            asking, count = asyncio.ensure_future(ask()), len(answers)
            await until(lambda count=count: len(answers) > count)  # type: ignore[misc]
            if looks == 8:
                engine._probes[path] = hang
            await probes(engine, looks)
            assert (handle.ready, handle.hangs) == (True, looks == 8)
            answers[-1].set()
            assert await asking == 200
        assert not any(isinstance(step.event, EngineLost) for step in front.cluster.journal.steps)
        await until(lambda: not handle.ready)  # it answers nothing, and has nothing to do


async def test_an_engine_that_takes_no_connections_is_not_taken_for_busy(start_front: StartFront) -> None:
    """It refuses none either: a machine that is gone."""
    async with LyingEngine(http(GOOD)) as engine:
        front = await start(start_front, engine, probe_s=0.05, probes_failed_max=2)
        (handle,) = front.cluster.fleet.handles.values()
        client = handle.engine._prober._gets._client  # type: ignore[attr-defined]

        async def never(factory: object) -> None:
            await asyncio.Event().wait()

        client._connector.connect = never
        await until(lambda: not handle.ready)
        assert "did not come within" in handle.trouble
        assert not handle.hangs


@pytest.mark.parametrize("piece", [b": ping\n\n", b""], ids=["comments", "silence"])
async def test_what_is_no_token_does_not_keep_an_engine(piece: bytes, start_front: StartFront) -> None:
    over = asyncio.Event()
    async with LyingEngine(streaming(piece, over), closes=True) as engine:
        front = await start(start_front, engine, probe_s=0.05, probes_failed_max=2)
        async with front.post(stream=True) as response:
            engine._probes["/health"] = hang
            assert b"engine_lost" in await response.read()
        over.set()


async def test_an_engine_that_says_that_it_is_not_healthy_is_believed_whatever_it_sends(
    start_front: StartFront,
) -> None:
    over = asyncio.Event()
    async with LyingEngine(streaming(TOKEN, over), closes=True) as engine:
        front = await start(start_front, engine, probes_failed_max=2)
        async with front.post(stream=True) as response:
            engine._probes["/health"] = http(b"", status="503 So")
            assert b"engine_lost" in await response.read()
        over.set()


async def test_what_an_engine_lacks_is_asked_again_once_it_was_gone(start_front: StartFront) -> None:
    async with LyingEngine(http(GOOD), probes={"/health": http(b"", status="403 So")}) as engine:
        front = await start(start_front, engine, probe_s=0.05, probes_failed_max=1)
        await probes(engine, 3)
        assert (asked(engine, "/health"), asked(engine, "/metrics")) == (1, 1)
        models, engine._probes["/v1/models"] = engine._probes["/v1/models"], hang
        await until(lambda: not any(front.cluster.engines_ready.values()))
        engine._probes |= {"/v1/models": models, "/health": http(b"", status="404 So")}
        await until(lambda: all(front.cluster.engines_ready.values()))
        assert (asked(engine, "/health"), asked(engine, "/metrics")) == (2, 2)
