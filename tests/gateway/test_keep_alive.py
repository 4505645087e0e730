"""Bytes while a stream waits: comments, errors as events, the receipt in the last chunk, and a proxy that is strict."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from engines.lying import Answering, LyingEngine, http
from front import Front, StartFront, through_relays_too, until
from npm_clients import from_npm
from pydantic import SecretStr
from tap import tapping

from llmserve.engines.timed.answer import FakeAnswer, events
from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.estimates.estimator import QueuePosition
from llmserve.gateway.keep_alive import comment_of
from llmserve.settings.tree import LiveConfig
from llmserve.wire.answer_forms import error_of_body
from llmserve.wire.event_stream import PARTIAL_BYTES_MAX, UsageFilter

MESSAGES: Any = [{"role": "user", "content": "hello"}]
SOON = {"live": LiveConfig(probe_every_s=0.05, keep_alive_s=0.1)}


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def read(front: Front, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, bytes]:
    async with front.post(stream=True, headers=headers, **fields) as response:
        return response.status, await response.read()


def comments(stream: bytes) -> list[str]:
    return re.findall(r"^: (.*)$", stream.decode(), re.M)


def data(stream: bytes) -> list[Any]:
    """The events by the rules of the standard: blocks between empty lines, without their comments."""
    blocks = [re.sub(rb"(?m)^(?::|event:).*\n?", b"", block) for block in stream.split(b"\n\n")]
    texts = [block.removeprefix(b"data: ") for block in blocks if block]
    return [text if text == b"[DONE]" else json.loads(text) for text in texts]


@asynccontextmanager
async def busy(front: Front, engine: FakeEngine, tokens: int = 40) -> AsyncIterator[None]:
    """While a request holds the engine's only slot."""
    running = asyncio.ensure_future(read(front, max_tokens=tokens))
    await until(lambda: engine.running == 1)
    yield
    await running


@through_relays_too
async def test_a_stream_that_waits_gets_its_place_and_then_its_answer_unharmed(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.02) as engine:
        front = await start_front(engine, slots=1, **SOON)
        async with busy(front, engine):
            first, second = await asyncio.gather(read(front, max_tokens=3), read(front, max_tokens=3))
        quick = await read(front, max_tokens=3)
    assert first[0] == 200
    assert comments(first[1])[0].startswith("position 1")
    assert comments(second[1])[0].startswith("position 2")
    assert not comments(quick[1]), "nothing was silent for long"
    contents = [[event["choices"][0]["delta"] for event in data(stream)[:-1]] for _, stream in (first, second, quick)]
    assert contents[0] == contents[1] == contents[2]


async def openai_pieces(url: str) -> list[Any]:
    stream = await client(url).chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5, stream=True)
    return [chunk.choices[0].delta.content async for chunk in stream]


async def anthropic_pieces(url: str) -> list[Any]:
    claude = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
    async with claude.messages.stream(model="fake", max_tokens=5, messages=MESSAGES) as stream:
        return [piece async for piece in stream.text_stream]


async def langchain_pieces(url: str) -> list[Any]:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="fake", base_url=f"{url}/v1", api_key=SecretStr("none"), max_retries=0, max_tokens=5)
    return [chunk.content async for chunk in chat.astream("hello")]


async def litellm_pieces(url: str) -> list[Any]:
    import litellm

    common: Any = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 5, "num_retries": 0}
    stream = await litellm.acompletion(model="hosted_vllm/fake", messages=MESSAGES, stream=True, **common)
    return [chunk.choices[0].delta.content async for chunk in stream]


async def npm_pieces(url: str) -> list[Any]:
    """OpenAI's client and the AI SDK, one stream after the other."""
    values = await from_npm("streams", url, "fake")
    assert len(values) == 4
    return [piece for pieces in values for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "streams"),
    [(openai_pieces, 1), (anthropic_pieces, 1), (langchain_pieces, 1), (litellm_pieces, 1), (npm_pieces, 4)],
)
async def test_clients_read_streams_with_comments_as_those_without(
    start_front: StartFront, pieces: Callable[[str], Awaitable[list[Any]]], streams: int
) -> None:
    """The engine computes for so long that each stream gets comments first. The tap counts them."""
    async with FakeEngine(step_s=0.0, prefill_s=0.4) as engine, AsyncExitStack() as stack:
        told = []
        for keep_alive_s in (0.1, 0.0):
            front = await start_front(engine, live=LiveConfig(probe_every_s=0.05, keep_alive_s=keep_alive_s))
            tap = await stack.enter_async_context(tapping(lambda _, url=front.url: url))
            told.append(await pieces(tap.url))
            assert [bool(comments(answer.raw)) for answer in tap.answers] == [keep_alive_s > 0] * streams
    assert told[0] == told[1]
    assert [piece for piece in told[0] if piece] == ["tok "] * 5 * streams


@pytest.mark.parametrize(("pieces", "streams"), [(langchain_pieces, 1), (litellm_pieces, 1), (npm_pieces, 4)])
async def test_other_clients_take_signs_of_life_between_tokens(
    start_front: StartFront, pieces: Callable[[str], Awaitable[list[Any]]], streams: int
) -> None:
    async with FakeEngine(step_s=0.3) as engine, AsyncExitStack() as stack:
        front = await start_front(engine, **SOON)
        tap = await stack.enter_async_context(tapping(lambda _: front.url))
        assert [piece for piece in await pieces(tap.url) if piece] == ["tok "] * 5 * streams
        assert all(len(comments(answer.raw)) > 1 for answer in tap.answers)
        of_responses = [answer.raw for answer in tap.answers if answer.path == "/v1/responses"]
        assert all(b"event: keepalive" in raw for raw in of_responses)


# ---- signs of life for clients that count events ----


def slow_stream(*parts: bytes) -> Answering:
    """The parts of a stream, each after a silence."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for part in parts:
            await asyncio.sleep(0.4)
            writer.write(part)
            await writer.drain()

    return answer


def parts_of(path: str) -> tuple[bytes, bytes]:
    """A stream of two tokens, cut behind the first one."""
    opening, token, closing = events(FakeAnswer("fake", path, 2, 3, id="resp-1"))
    return opening + token, token.replace(b'"sequence_number":4', b'"sequence_number":5') + closing


async def lines_of(front: Front, path: str, agent: str = "a client", **fields: Any) -> list[str]:
    async with front.post(path, {"user-agent": agent}, stream=True, **fields) as response:
        return (await response.read()).decode().splitlines()


async def test_messages_that_wait_get_pings(start_front: StartFront) -> None:
    async with LyingEngine(slow_stream(*parts_of("/v1/messages")), closes=True) as engine:
        front = await start_front(engine.url, **SOON)
        lines = await lines_of(front, "/v1/messages", max_tokens=5)
    pings = [place for place, line in enumerate(lines) if line == "event: ping"]
    assert all(lines[place + 1] == 'data: {"type": "ping"}' and lines[place - 1] == ": running" for place in pings)
    begun = lines.index("event: message_start")
    assert min(pings) < begun < max(pings), "before and within the answer"


@pytest.mark.parametrize(("agent", "early"), [("OpenAI/Python 3.54.0", False), ("codex_cli_rs/0.144.4 (Linux)", True)])
async def test_responses_that_wait_get_an_event_where_the_client_takes_it(
    agent: str, early: bool, start_front: StartFront
) -> None:
    async with LyingEngine(slow_stream(*parts_of("/v1/responses")), closes=True) as engine:
        front = await start_front(engine.url, **SOON)
        lines = await lines_of(front, "/v1/responses", agent, input="hello")
    alive = [place for place, line in enumerate(lines) if line == "event: keepalive"]
    begun = lines.index("event: response.created")
    assert (min(alive) < begun) is early
    assert any(line.startswith(": ") for line in lines[:begun])
    told = [json.loads(lines[place + 1].removeprefix("data: ")) for place in alive]
    before, within = (
        [told[0]] if early else [],
        [event for event, place in zip(told, alive, strict=True) if place > begun],
    )
    assert before in ([], [{"type": "keepalive", "sequence_number": 0}])
    assert within[0] == {"type": "keepalive", "sequence_number": 4}, "of the event before"


async def response_pieces(url: str) -> list[Any]:
    stream = await client(url).responses.create(model="fake", input="hello", stream=True)
    return [event.delta async for event in stream if event.type == "response.output_text.delta"]


async def response_helper_pieces(url: str) -> list[Any]:
    """The helper insists on `response.created` as the first event."""
    async with client(url).responses.stream(model="fake", input="hello") as stream:
        pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert (await stream.get_final_response()).output_text == "".join(pieces)
    return pieces


@pytest.mark.parametrize(
    ("pieces", "path"),
    [
        (response_pieces, "/v1/responses"),
        (response_helper_pieces, "/v1/responses"),
        (anthropic_pieces, "/v1/messages"),
        (openai_pieces, "/v1/chat/completions"),
    ],
)
async def test_official_clients_take_signs_of_life_before_and_within_an_answer(
    pieces: Callable[[str], Awaitable[list[Any]]], path: str, start_front: StartFront
) -> None:
    async with LyingEngine(slow_stream(*parts_of(path)), closes=True) as engine, AsyncExitStack() as stack:
        front = await start_front(engine.url, **SOON)
        tap = await stack.enter_async_context(tapping(lambda _: front.url))
        assert [piece for piece in await pieces(tap.url) if piece] == ["tok ", "tok "]
        assert len(comments(tap.answers[0].raw)) >= 2


async def test_a_comment_behind_an_event_with_an_id_is_no_event(start_front: StartFront) -> None:
    """OpenAI's client takes each empty line behind an id for the end of an event, whose data is then no JSON."""
    first, second = parts_of("/v1/chat/completions")
    async with LyingEngine(slow_stream(b"id: 7\n" + first, second), closes=True) as engine:
        front = await start_front(engine.url, **SOON)
        _, raw = await read(front)
        assert [piece for piece in await openai_pieces(front.url) if piece] == ["tok ", "tok "]
    assert re.search(rb"\n\n: running\n(?:: running\n)*data: ", raw)


async def test_a_quick_refusal_keeps_its_status(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.02) as engine:
        front = await start_front(engine, slots=1, scheduling={"queue_requests_max": 1}, **SOON)
        async with busy(front, engine):
            waiting = asyncio.ensure_future(read(front, max_tokens=2))
            await until(lambda: front.cluster.scheduler.waiting == 1)
            status, body = await read(front)
            assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
            await waiting


async def test_without_keep_alive_nothing_is_said(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.02) as engine:
        front = await start_front(engine, slots=1, live=LiveConfig(probe_every_s=0.05, keep_alive_s=0.0))
        async with busy(front, engine):
            _, stream = await read(front, max_tokens=2)
    assert not comments(stream)


async def test_an_engines_silence_before_and_within_an_answer_is_filled_between_events(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.0, prefill_s=0.4) as engine:
        front = await start_front(engine, **SOON)
        _, computing = await read(front, max_tokens=2)
        engine.fault = Fault("hang", after_tokens=3)
        async with front.post(stream=True, max_tokens=9) as response:
            hanging = b""
            while b"running" not in hanging.rpartition(b"data: ")[2] or b"data: " not in hanging:
                hanging += await response.content.readany()
    assert set(comments(computing)) == {"running"}
    assert data(computing)[-1] == b"[DONE]"
    assert len([event for event in data(hanging) if event["choices"][0]["delta"].get("content")]) == 3


async def test_an_error_of_the_engine_after_a_comment_is_an_event(start_front: StartFront) -> None:
    """The official client raises the error of the event."""

    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.4)
        body = b'{\n "error": {"message": "no such\\nrole", "type": "BadRequestError", "code": 400}\n}'
        writer.write(http(body, "content-type: application/json", status="400 Bad Request"))
        await writer.drain()

    async with LyingEngine(late) as engine:
        front = await start_front(engine.url, **SOON)
        status, stream = await read(front, headers={"x-llmserve-receipt": "true"})
        assert status == 200
        assert comments(stream)
        error, done = data(stream)
        assert (error["error"]["message"], error["error"]["code"], done) == ("no such\nrole", 400, b"[DONE]")
        assert error["llmserve"]["engine"] in engine.url
        with pytest.raises(openai.APIError, match="no such"):
            async for _ in await client(front.url).chat.completions.create(
                model="fake", messages=MESSAGES, stream=True
            ):
                pass


async def test_a_stream_that_began_with_a_comment_runs_again_when_its_engine_fails(start_front: StartFront) -> None:
    """Both engines are silent until the stream has its comment; then one breaks off, and the other answers."""
    failed: list[bytes] = []

    async def fail_first(request: web.Request) -> web.StreamResponse:
        failed.append(await request.read())
        await asyncio.sleep(0.4)
        if len(failed) == 1:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        event = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        return web.Response(body=event, content_type="text/event-stream")

    async def list_models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", fail_first)
    app.router.add_get("/v1/models", list_models)
    async with TestServer(app) as engine:
        front = await start_front(str(engine.make_url("")), **SOON)
        status, stream = await read(front)
    assert (status, len(failed)) == (200, 2)
    assert comments(stream)
    assert [event["choices"][0]["delta"]["content"] for event in data(stream)[:-1]] == ["hi"]


async def test_a_client_that_leaves_after_a_comment_leaves_the_queue(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.02) as engine:
        front = await start_front(engine, slots=1, **SOON)
        async with busy(front, engine):
            async with front.post(stream=True) as response:
                assert (await response.content.readany()).startswith(b": position 1")
            await until(lambda: front.cluster.scheduler.waiting == 0)
            assert engine.running == 1
    assert len(engine.bodies) == 1


# ---- the receipt ----


async def test_the_last_chunk_has_the_receipt_when_the_client_asks(start_front: StartFront) -> None:
    asks = {"x-llmserve-receipt": "true"}
    async with FakeEngine(step_s=0.0) as engine:
        front = await start_front(engine)
        _, asked = await read(front, asks, max_tokens=2, stream_options={"include_usage": True})
        _, plain = await read(front, max_tokens=2)
        async with front.post(headers={"x-llmserve-receipt": "yes"}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "x-llmserve-receipt")
    with_receipt = [event for event in data(asked)[:-1] if "llmserve" in event]
    assert [event["choices"][0]["finish_reason"] for event in with_receipt] == ["length"]
    assert {"bin", "batch", "queue_ms", "engine"} <= set(with_receipt[0]["llmserve"])
    assert b"llmserve" not in plain
    assert all(b"receipt" not in body for body in engine.bodies)


# ---- parts ----


def test_nothing_may_be_written_into_an_event_that_passes_in_parts() -> None:
    usage = UsageFilter(strip=False)
    usage.feed(b'data: {"a":1}\n\ndata: {"b"')
    assert not usage.in_parts, "a small rest waits"
    usage.feed(b"x" * (PARTIAL_BYTES_MAX + 1))
    assert usage.in_parts


def test_a_comment_tells_what_is_known() -> None:
    assert comment_of(QueuePosition(12, 8.2, no_engine=False), running=False) == b"position 12, about 8 s"
    assert comment_of(QueuePosition(12, None, no_engine=False), running=False) == b"position 12"
    assert comment_of(QueuePosition(1, None, no_engine=True), running=False) == b"position 1, waiting for an engine"
    assert comment_of(None, running=True) == b"running"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"object": "error", "message": "older", "code": 400}', "older"),
        (b'{"error": "a text alone"}', "a text alone"),
        (b'{"detail": "FastAPI"}', "FastAPI"),
        (b'\xef\xbb\xbf{"error": {"message": "odd", "logprob": NaN}}', "odd"),
        (b"no JSON \xff", "no JSON \N{REPLACEMENT CHARACTER}"),
        (b"[" * 100_000, "[" * 100_000),
    ],
)
def test_every_body_of_an_error_becomes_an_event(body: bytes, message: str) -> None:
    assert error_of_body(400, body)["error"]["message"] == message


# ---- a proxy ----


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
async def test_a_stream_outlives_a_proxys_read_timeout(start_front: StartFront, tmp_path: Path) -> None:
    """The answer begins after 2.5 times the proxy's limit, which a pause of a busy machine does not use up. Without
    keep-alive the proxy cuts it.
    """
    ends = []
    for keep_alive_s in (0.3, 0.0):
        async with FakeEngine(step_s=0.1) as engine:
            live = LiveConfig(probe_every_s=0.05, keep_alive_s=keep_alive_s)
            front = await start_front(engine, slots=1, live=live)
            async with nginx(front.url, tmp_path, read_timeout_s=2) as url, busy(front, engine, tokens=50):
                body = {"model": "fake", "messages": MESSAGES, "max_tokens": 3, "stream": True}
                async with front.session.post(f"{url}/v1/chat/completions", json=body) as response:
                    ends.append((response.status, (await response.read()).endswith(b"data: [DONE]\n\n")))
    assert ends == [(200, True), (504, False)]


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
async def test_a_proxy_as_shipped_passes_each_token_on_at_once(start_front: StartFront, tmp_path: Path) -> None:
    """The engine is silent for ever after three tokens; the proxy would keep them until the end."""
    async with FakeEngine(step_s=0.0) as engine:
        front = await start_front(engine, live=LiveConfig(probe_every_s=0.05, keep_alive_s=0.0))
        engine.fault = Fault("hang", after_tokens=3)
        async with nginx(front.url, tmp_path, read_timeout_s=60) as url:
            body = {"model": "fake", "messages": MESSAGES, "max_tokens": 9, "stream": True}
            async with front.session.post(f"{url}/v1/chat/completions", json=body) as response:
                told = b""
                async with asyncio.timeout(30.0):
                    while told.count(b'"tok ') < 3:
                        told += await response.content.readany()


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        ("", ("no-cache", "no")),
        ("x-accel-buffering: yes", ("no-cache", "yes")),
        ("Cache-Control: no-store", ("no-store", "no")),
        ("x-accel-buffering: \xff", ("no-cache", "no")),
    ],
)
async def test_every_stream_has_headers_for_proxies_and_the_engines_own_go_first(
    start_front: StartFront, sent: str, got: tuple[str, str]
) -> None:
    events = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    async with LyingEngine(http(events, "content-type: text/event-stream", *[sent][: bool(sent)])) as engine:
        front = await start_front(engine.url, **SOON)
        async with front.post(stream=True) as response:
            headers = response.headers
            assert await response.read() == events
        assert (headers["cache-control"], headers["x-accel-buffering"]) == got
        assert len(headers.getall("cache-control")) == len(headers.getall("x-accel-buffering")) == 1


async def test_a_stream_that_begins_with_a_comment_has_them_too(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.02) as engine:
        front = await start_front(engine, slots=1, **SOON)
        async with busy(front, engine), front.post(stream=True, max_tokens=1) as response:
            assert (await response.content.readany()).startswith(b": ")
            assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")


async def test_of_an_engines_headers_those_for_clients_pass(start_front: StartFront) -> None:
    told = (
        "server: nginx/1.2",
        "x-internal-host: a",
        "x-should-retry: false",
        "retry-after-ms: 170",
        "set-cookie: a=b",
    )
    body = b'{"error": {"message": "later"}}'
    async with LyingEngine(http(body, "openai-version: 2020-10-01", *told, status="400 Bad Request")) as engine:
        front = await start_front(engine.url)
        async with front.post() as response:
            headers = response.headers
            assert (response.status, await response.read()) == (400, body)
    assert (headers["x-should-retry"], headers["retry-after-ms"], headers["openai-version"]) == (
        "false",
        "170",
        "2020-10-01",
    )
    assert not {"server", "x-internal-host", "set-cookie"} & {name.lower() for name in headers}


@asynccontextmanager
async def nginx(upstream: str, folder: Path, read_timeout_s: int) -> AsyncIterator[str]:
    """A running nginx in front of a server. Yields its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "nginx.conf"
    config.write_text(
        f"""daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass {upstream}; proxy_read_timeout {read_timeout_s}s; proxy_http_version 1.1; }}
  }}
}}
"""
    )
    process = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(config)])  # noqa: ASYNC220 (it only forks)
    try:
        async with asyncio.timeout(30.0):
            while process.poll() is None and not await _accepts(port):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
