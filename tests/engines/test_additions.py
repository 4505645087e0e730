"""Engines that refuse what the front-end adds to a body, and engines that do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from front import Front, StartFront, until

from llmserve.settings.tree import EngineConfig, LiveConfig, ServerConfig

STREAM = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n' * 3
END = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


class Strict:
    """An engine that refuses bodies. refuses : says why; "" for no reason, None for an answer"""

    def __init__(self, refuses: Callable[[dict[str, Any]], str | None], status: int = 400) -> None:
        self.refuses, self.status = refuses, status
        self.bodies: list[bytes] = []
        self.url = ""
        self.up = True

    @property
    def fields(self) -> list[set[str]]:
        """The fields of the bodies so far that clients have not sent."""
        return [{"stream_options", "priority"} & json.loads(body).keys() for body in self.bodies]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not self.up:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if request.method == "GET":
            models = {"data": [{"id": "fake"}, {"id": "other"}]}
            return web.json_response(models) if request.path == "/v1/models" else web.Response(status=404)
        self.bodies.append(await request.read())
        body = json.loads(self.bodies[-1])
        why = self.refuses(body)
        if why is not None:
            return web.json_response({"error": {"message": why, "code": "wrong"}}, status=self.status)
        if not body.get("stream"):
            return web.json_response({"choices": [], "usage": {"completion_tokens": 3}})
        usage = USAGE if body.get("stream_options", {}).get("include_usage") else b""
        return web.Response(body=STREAM + END + usage + DONE, content_type="text/event-stream")


@asynccontextmanager
async def serving(engine: Strict) -> AsyncIterator[Strict]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.answer)
    async with TestServer(app) as server:
        engine.url = str(server.make_url("")).rstrip("/")
        yield engine


async def ask(front: Front, **fields: Any) -> tuple[int, bytes]:
    async with front.post(**{"stream": True, **fields}) as response:
        return response.status, await response.read()


def ended_tokens(front: Front) -> list[float]:
    return [step.event.output_tokens for step in front.cluster.journal.steps if hasattr(step.event, "output_tokens")]


def unless_absent(*fields: str, why: str = "no") -> Callable[[dict[str, Any]], str | None]:
    return lambda body: why if set(fields) & body.keys() else None


@pytest.mark.parametrize("status", [400, 422, 501])
@pytest.mark.parametrize("why", ["unknown field stream_options", ""])
async def test_an_engine_that_refuses_what_was_added_is_asked_without_and_remembered(
    status: int, why: str, start_front: StartFront
) -> None:
    async with serving(Strict(unless_absent("stream_options", why=why), status)) as engine:
        front = await start_front(engine.url)
        for _ in range(3):
            assert await ask(front) == (200, STREAM + END + DONE)
        assert engine.fields == [{"stream_options"}, set(), set(), set()]
        plain = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        assert json.loads(engine.bodies[-1]) == plain
        assert ended_tokens(front) == [4.0] * 3, "events are counted where the engine does not count"


async def test_the_clients_own_fault_is_passed_on_and_nothing_is_remembered(start_front: StartFront) -> None:
    async with serving(Strict(lambda body: "too hot" if body.get("temperature") == 2 else None)) as engine:
        front = await start_front(engine.url)
        status, body = await ask(front, temperature=2)
        assert (status, json.loads(body)["error"]) == (400, {"message": "too hot", "code": "wrong"})
        assert engine.fields == [{"stream_options"}, set()]
        assert await ask(front) == (200, STREAM + END + DONE)
        assert ended_tokens(front)[-1] == 3.0, "the engine's count"
        assert (await ask(front, temperature=2))[0] == 400
        assert engine.fields[2:] == [{"stream_options"}] * 2, "the engine takes it: a refusal is the client's"


async def test_what_the_client_sends_itself_is_never_left_out(start_front: StartFront) -> None:
    async with serving(Strict(unless_absent("stream_options"))) as engine:
        front = await start_front(engine.url)
        for _ in range(2):
            status, _ = await ask(front, stream_options={"include_usage": True})
            assert status == 400
        assert engine.fields == [{"stream_options"}] * 2


async def test_options_of_the_client_are_as_it_sent_them_where_the_engine_refuses_more(start_front: StartFront) -> None:
    def refuses(body: dict[str, Any]) -> str | None:
        return "no" if "include_usage" in body.get("stream_options", {}) else None

    async with serving(Strict(refuses)) as engine:
        front = await start_front(engine.url)
        sent = {"metadata": {"stream_options": {"a": 1}}, "stream_options": {"continuous_usage_stats": True}}
        assert (await ask(front, **sent))[0] == 200
        assert json.loads(engine.bodies[-1])["stream_options"] == {"continuous_usage_stats": True}
        assert json.loads(engine.bodies[-1])["metadata"] == {"stream_options": {"a": 1}}


@pytest.mark.parametrize("options", [None, {"x": 1}])
@pytest.mark.parametrize("first", [True, False])
async def test_behind_another_name_the_body_is_the_clients_too(
    options: Any, first: bool, start_front: StartFront
) -> None:
    """`first` : the model, whose name is exchanged, comes before what was added."""
    async with serving(
        Strict(lambda body: "no" if "include_usage" in (body.get("stream_options") or {}) else None)
    ) as engine:
        front = await start_front(engine.url, engines=EngineConfig(engine=(engine.url,), alias=("a=other",)))
        fields = {"model": "a", "messages": [{"role": "user", "content": "a"}], "stream": True}
        if options is not None:
            fields = {**fields, "stream_options": options} if first else {"stream_options": options, **fields}
        async with front.session.post(front.url + "/v1/chat/completions", json=fields) as response:
            assert response.status == 200
        assert json.loads(engine.bodies[-1]) == {**fields, "model": "other"}


@pytest.mark.parametrize(
    ("refused", "fields"),
    [
        ("priority", [{"priority", "stream_options"}, {"stream_options"}, {"stream_options"}]),
        ("stream_options", [{"priority", "stream_options"}, {"stream_options"}, set(), {"priority"}]),
    ],
)
async def test_of_two_added_fields_the_one_that_is_refused_is_found(
    refused: str, fields: list[set[str]], start_front: StartFront
) -> None:
    async with serving(Strict(unless_absent(refused))) as engine:
        config = EngineConfig(engine=(engine.url,), slots=2, engine_priority=True)
        front = await start_front(engine.url, engines=config, scheduling={"order": "fffs"})
        for _ in range(2):
            assert (await ask(front))[0] == 200
        assert engine.fields == fields


async def test_an_answer_that_is_not_streamed_may_be_refused_for_its_turn(start_front: StartFront) -> None:
    async with serving(Strict(unless_absent("priority"), 422)) as engine:
        config = EngineConfig(engine=(engine.url,), slots=2, engine_priority=True)
        front = await start_front(engine.url, engines=config, scheduling={"order": "fffs"})
        for _ in range(2):
            assert (await ask(front, stream=False))[0] == 200
        assert engine.fields == [{"priority"}, set(), set()]


async def test_models_of_one_engine_may_differ(start_front: StartFront) -> None:
    async with serving(
        Strict(lambda body: "no" if body["model"] == "other" and "stream_options" in body else None)
    ) as engine:
        front = await start_front(engine.url)
        for model in ("other", "fake", "other", "fake"):
            assert (await ask(front, model=model))[0] == 200
        assert engine.fields == [{"stream_options"}, set(), {"stream_options"}, set(), {"stream_options"}]


async def test_an_engine_that_was_gone_is_asked_anew(start_front: StartFront) -> None:
    async with serving(Strict(unless_absent("stream_options"))) as engine:
        front = await start_front(engine.url, live=LiveConfig(probe_every_s=0.02, probes_failed_max=1))
        assert (await ask(front))[0] == 200
        engine.up = False
        await until(lambda: not any(front.cluster.engines_ready.values()))
        engine.up, engine.refuses = True, lambda body: None
        await until(lambda: all(front.cluster.engines_ready.values()))
        assert (await ask(front))[0] == 200
        assert engine.fields == [{"stream_options"}, set(), {"stream_options"}]


async def test_a_request_that_is_asked_again_counts_once_and_can_be_left(start_front: StartFront) -> None:
    left = asyncio.Event()

    async def hang_when_plain(request: web.Request) -> web.StreamResponse:
        if request.method == "POST" and b"stream_options" not in await request.read():
            left.set()
            await asyncio.sleep(30.0)
        return await engine.answer(request)

    engine = Strict(unless_absent("stream_options"))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hang_when_plain)
    async with TestServer(app) as server:
        front = await start_front(str(server.make_url("")).rstrip("/"))
        asking = asyncio.ensure_future(ask(front))
        await left.wait()
        (handle,) = front.cluster.fleet.handles.values()
        assert len(handle.running) == 1
        asking.cancel()
        await until(lambda: not handle.running)


async def test_a_gateway_hands_the_refusal_of_a_groups_engine_to_the_group(
    start_front: StartFront, tmp_path: Any
) -> None:
    key = tmp_path / "gateway"
    key.write_text("gateway: a-long-key-of-gateways")
    async with serving(Strict(unless_absent("stream_options"))) as engine:
        group = await start_front(engine.url, server=ServerConfig(port=0, gateway_key_file=str(key)))
        config = EngineConfig(engine=(group.url,), engines_are_groups=True, engine_api_key="a-long-key-of-gateways")
        gateway = await start_front(engines=config)
        for _ in range(2):
            assert await ask(gateway) == (200, STREAM + END + DONE)
        assert engine.fields[-1] == set()
