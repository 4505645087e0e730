"""The API over real HTTP: the official client, OpenAI's error format, limits, receipts, metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from front import Front, StartFront, through_relays_too, until

from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.errors import ConfigError
from llmserve.server.serving import serving
from llmserve.settings.tree import ApiConfig, Config, EngineConfig, ServerConfig

MESSAGES: Any = [{"role": "user", "content": "hello"}]


def client(front: Front, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0)


# ---- the official client ----


@through_relays_too
async def test_the_official_client_chats(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        answer = await client(front).chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


@through_relays_too
async def test_the_official_client_streams_without_usage_by_default(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        stream = await client(front).chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5, stream=True)
        chunks = [chunk async for chunk in stream]
    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) == 5


@through_relays_too
async def test_the_official_client_gets_usage_at_the_end_of_a_stream_on_request(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        stream = await client(front).chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


async def test_the_official_client_completes_plain_prompts(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        answer = await client(front).completions.create(model="fake", prompt="once", max_tokens=3)
        stream = await client(front).completions.create(model="fake", prompt="once", max_tokens=3, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream if chunk.choices]
    assert answer.choices[0].text == "".join(texts)


async def test_models_are_listed_and_retrieved(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0, model="org/name") as engine:
        front = await start_front(engine)
        assert [model.id async for model in client(front).models.list()] == ["org/name"]
        assert (await client(front).models.retrieve("org/name")).id == "org/name"
        with pytest.raises(openai.NotFoundError):
            await client(front).models.retrieve("other")


async def test_wrong_input_raises_the_official_clients_exceptions(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        with pytest.raises(openai.BadRequestError) as bad:
            await client(front).chat.completions.create(model="fake", messages=MESSAGES, n=1000)
        with pytest.raises(openai.NotFoundError) as missing:
            await client(front).chat.completions.create(model="other", messages=MESSAGES)
    assert (bad.value.param, bad.value.type) == ("n", "invalid_request_error")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


# ---- transparency ----


@through_relays_too
@pytest.mark.parametrize("stream", [False, True])
async def test_bytes_are_passed_unchanged_in_both_directions(start_front: StartFront, stream: bool) -> None:
    data = b'{"model":"fake","messages":[{"role":"user","content":"h\\u00e9"}], "max_tokens":4, "top_k": 3%s}' % (
        b', "stream":true, "stream_options":{"include_usage":true}' if stream else b""
    )
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with front.session.post(f"{front.url}/v1/chat/completions", data=data) as response:
            through = await response.read()
        assert engine.bodies[-1] == data
        async with front.session.post(f"{engine.url}/v1/chat/completions", data=data) as response:
            direct = await response.read()

    assert through == direct
    assert through.endswith(b"data: [DONE]\n\n") == stream


async def test_what_engines_that_share_the_work_of_a_prompt_tell_each_other_passes(start_front: StartFront) -> None:
    """Where one engine computes prompts and another answers, a proxy between them puts this into the body."""
    remote = b'{"do_remote_decode": true, "do_remote_prefill":false, "remote_block_ids":[1,2], "remote_host":null}'
    data = b'{"model":"fake","prompt":"%b","max_tokens":1, "kv_transfer_params": %b}' % (b"x" * 2_000, remote)
    async with FakeEngine(step_s=0) as one, FakeEngine(step_s=0) as other:
        front = await start_front(one, other)
        for _ in range(2):
            async with front.session.post(f"{front.url}/v1/completions", data=data) as response:
                assert response.status == 200
        assert [*one.bodies, *other.bodies] == [data] * 2


async def test_an_engine_that_goes_by_priority_gets_the_turn_of_each_request(start_front: StartFront) -> None:
    data = b'{"model":"fake","messages":[{"role":"user","content":"{hi}"}],"max_tokens":4, "priority": 7 } '
    async with FakeEngine(step_s=0.005) as engine:
        engines = EngineConfig(engine=(engine.url,), slots=1, look_ahead=3, engine_priority=True)
        front = await start_front(engine, engines=engines, scheduling={"order": "fffs"})
        await asyncio.gather(*[front.session.post(f"{front.url}/v1/chat/completions", data=data) for _ in range(4)])
        bodies = [json.loads(body) for body in engine.bodies]
    assert [{**body, "priority": 7} for body in bodies] == [json.loads(data)] * 4
    assert [body["priority"] for body in bodies] == sorted({body["priority"] for body in bodies})


@through_relays_too
async def test_an_engines_refusal_keeps_its_status_body_and_retry_after(start_front: StartFront) -> None:
    body = b'{"error": {"message":"too hot",  "code": 7}}'

    async def refuse(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "fake"}]})
        return web.Response(status=429, body=body, headers={"content-type": "application/json", "retry-after": "17"})

    app = web.Application()
    app.router.add_route("*", "/v1/{path:.*}", refuse)
    async with TestServer(app) as engine:
        front = await start_front(str(engine.make_url("")))
        async with front.post(stream=True) as response:
            assert (response.status, await response.read()) == (429, body)
            assert response.headers["retry-after"] == "17"


async def test_every_answer_has_its_receipt(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with front.post(max_tokens=3) as response:
            headers = response.headers
    assert headers["x-llmserve-bin"] == "0"
    assert headers["x-llmserve-batch"] == "1"
    assert float(headers["x-llmserve-queue-ms"]) >= 0
    assert headers["x-llmserve-engine"] == engine.url.removeprefix("http://")


async def test_a_clients_request_id_is_returned_and_only_id_and_tracing_headers_reach_the_engine(
    start_front: StartFront,
) -> None:
    headers_seen: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "fake"}]})
        headers_seen.append(request.headers)
        return web.json_response({"choices": [], "usage": {"completion_tokens": 1}})

    app = web.Application()
    app.router.add_route("*", "/v1/{path:.*}", answer)
    tracing = {"X-Request-Id": "job-7", "traceparent": "00-4bf9-00f0-01", "tracestate": "a=b"}
    async with TestServer(app) as engine:
        front = await start_front(str(engine.make_url("")))
        async with front.post(headers={**tracing, "authorization": "Bearer sk-1", "x-other": "1"}) as response:
            assert response.headers["x-request-id"] == "job-7"
        async with front.post(headers={"x-request-id": "x" * 257}) as response:
            assert response.headers["x-request-id"] == "llmserve-2"
    assert {name: headers_seen[0][name] for name in tracing} == tracing
    assert not {"authorization", "x-other"} & {name.lower() for name in headers_seen[0]}
    assert "x-request-id" not in headers_seen[1]


async def test_an_error_after_the_start_has_a_receipt(start_front: StartFront) -> None:
    async def hang_up(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "fake"}]})
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/v1/{path:.*}", hang_up)
    async with TestServer(app) as engine:
        front = await start_front(str(engine.make_url("")), scheduling={"retries_max": 0})
        async with front.post(headers={"x-request-id": "job-7"}) as response:
            assert (response.status, (await error_of(response))["code"]) == (502, "engine_failed")
            assert response.headers["x-request-id"] == "job-7"
            assert response.headers["x-llmserve-engine"] == engine.make_url("").authority


@through_relays_too
@pytest.mark.parametrize("breaks", [False, True])
async def test_a_stream_that_breaks_after_its_last_event_loses_no_event(start_front: StartFront, breaks: bool) -> None:
    """The event with the finish_reason is held back until the usage that llmserve requested."""
    end = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'

    async def stream(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "fake"}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        await response.write(end)
        if breaks:
            assert request.transport is not None
            request.transport.close()
        return response

    app = web.Application()
    app.router.add_route("*", "/v1/{path:.*}", stream)
    async with TestServer(app) as engine:
        front = await start_front(str(engine.make_url("")))
        async with front.post(stream=True) as response:
            events = (await response.read()).split(b"\n\n")
    assert events[1] + b"\n\n" == end
    assert (b'"error"' in events[2]) == breaks


# ---- limits ----


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@through_relays_too
async def test_a_full_queue_is_429_with_retry_after(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.5) as engine:
        front = await start_front(engine, slots=1, scheduling={"queue_requests_max": 1})
        running = [asyncio.ensure_future(front.post(max_tokens=4).__aenter__()) for _ in range(2)]
        await until(lambda: front.cluster.scheduler.waiting == 1)
        async with front.post() as response:
            assert response.status == 429
            assert int(response.headers["retry-after"]) >= 1
            assert (await error_of(response))["code"] == "queue_full"
        for task in running:
            task.cancel()


async def test_no_engine_is_503_with_retry_after(start_front: StartFront) -> None:
    front = await start_front("http://127.0.0.1:9", wait=False, scheduling={"engine_wait_s": 0.1})
    async with front.post() as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) >= 1
        assert (await error_of(response))["code"] == "no_engine"
    async with front.session.get(f"{front.url}/ready") as response:
        assert response.status == 503
    async with front.session.get(f"{front.url}/health") as response:
        assert response.status == 200


async def test_a_body_beyond_the_limit_is_413_and_a_prompt_400(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, limits=ApiConfig(body_bytes_max=2_000, prompt_chars_max=100))
        async with front.post(user="x" * 3_000) as response:
            assert (response.status, (await error_of(response))["code"]) == (413, "body_too_large")
        async with front.post(messages=[{"role": "user", "content": "x" * 101}]) as response:
            assert (response.status, (await error_of(response))["code"]) == (400, "context_length_exceeded")


async def test_a_body_of_several_megabytes_is_accepted(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with front.post(user="x" * 3_000_000, max_tokens=2) as response:
            assert response.status == 200


async def test_unknown_paths_and_methods_have_openais_shape(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with front.session.get(f"{front.url}/v2/nothing") as response:
            assert (response.status, (await error_of(response))["code"]) == (404, "not_found")
        async with front.session.get(f"{front.url}/v1/chat/completions") as response:
            assert (response.status, (await error_of(response))["code"]) == (405, "method_not_allowed")


async def test_a_missing_or_wrong_key_is_401_and_keys_have_limits(start_front: StartFront, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-1\nbob: sk-2\n")
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(
            engine,
            server=ServerConfig(port=0, api_key_file=str(keys)),
            limits=ApiConfig(requests_per_minute_max=1),
        )
        with pytest.raises(openai.AuthenticationError):
            await client(front, "wrong").chat.completions.create(model="fake", messages=MESSAGES)
        async with front.post() as response:
            assert (response.status, (await error_of(response))["code"]) == (401, "invalid_api_key")
        await client(front, "sk-1").chat.completions.create(model="fake", messages=MESSAGES)
        with pytest.raises(openai.RateLimitError) as limited:
            await client(front, "sk-1").chat.completions.create(model="fake", messages=MESSAGES)
        assert limited.value.code == "requests_per_minute"
        await client(front, "sk-2").chat.completions.create(model="fake", messages=MESSAGES)


async def test_a_key_has_a_limit_of_requests_in_progress(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.05) as engine:
        front = await start_front(engine, limits=ApiConfig(concurrent_max=1))
        first = asyncio.ensure_future(
            client(front).chat.completions.create(model="fake", messages=MESSAGES, max_tokens=20)
        )
        await until(lambda: engine.running == 1)
        with pytest.raises(openai.RateLimitError):
            await client(front).chat.completions.create(model="fake", messages=MESSAGES)
        await first
        await client(front).chat.completions.create(model="fake", messages=MESSAGES, max_tokens=1)


@through_relays_too
async def test_a_deadline_that_passes_in_the_queue_is_504_and_costs_no_engine(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.1) as engine:
        front = await start_front(engine, slots=1)
        first = asyncio.ensure_future(
            client(front).chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5)
        )
        await until(lambda: engine.running == 1)
        async with front.post(headers={"x-llmserve-slo-ms": "30"}) as response:
            assert (response.status, (await error_of(response))["code"]) == (504, "deadline_exceeded")
        await first
    assert len(engine.bodies) == 1


async def test_the_deadline_of_the_request_precedes_its_keys_and_its_models(
    start_front: StartFront, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-1\nbatch: sk-2\n")
    async with FakeEngine(step_s=0.1) as engine:
        front = await start_front(
            engine,
            slots=1,
            server=ServerConfig(port=0, api_key_file=str(keys)),
            limits=ApiConfig(slo_ms=("model:fake=30", "key:batch=60000")),
        )

        async def ask(key: str, **headers: str) -> int:
            headers = {"authorization": f"Bearer {key}", **headers}
            async with front.post(headers=headers, max_tokens=3) as response:
                await response.read()
                return int(response.status)

        first = asyncio.ensure_future(ask("sk-2"))
        await until(lambda: engine.running == 1)
        waiting = [ask("sk-1"), ask("sk-2"), ask("sk-1", **{"x-llmserve-slo-ms": "60000"})]
        assert await asyncio.gather(first, *waiting) == [200, 504, 200, 200]


async def test_without_keys_the_server_listens_on_loopback_by_default() -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        async with serving(Config(server=ServerConfig(host="0.0.0.0", port=0))):
            raise AssertionError("it must not start")


async def test_an_unknown_model_is_404_and_the_error_names_the_known_ones(
    start_front: StartFront,
) -> None:
    async with FakeEngine(step_s=0, model="a") as first, FakeEngine(step_s=0, model="b") as second:
        front = await start_front(first, second)
        async with front.post(model="c") as response:
            error = await error_of(response)
            assert (response.status, error["code"]) == (404, "model_not_found")
            assert error["message"] == "there is no model 'c'; this server has a, b"


async def test_a_refused_upload_with_expect_100_closes_its_connection(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, limits=ApiConfig(requests_per_minute_max=1))
        await client(front).chat.completions.create(model="fake", messages=MESSAGES)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.read(), 20)  # until the connection closes
        writer.close()
        assert answer.startswith(b"HTTP/1.1 429")


async def test_a_wrong_method_names_the_right_ones(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with front.session.get(f"{front.url}/v1/completions") as response:
            assert (response.status, response.headers["allow"]) == (405, "POST, OPTIONS")


# ---- clients that leave ----


@through_relays_too
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_aborted_on_the_engine(start_front: StartFront, stream: bool) -> None:
    async with FakeEngine(step_s=0.05) as engine:
        front = await start_front(engine)
        request = asyncio.ensure_future(front.post(max_tokens=1_000, stream=stream).__aenter__())
        await until(lambda: engine.running == 1)
        if stream:
            response = await request
            await response.content.readany()
            response.close()
        request.cancel()
        await until(lambda: engine.running == 0 and not front.cluster.scheduler.requests)


async def test_a_client_that_leaves_the_queue_never_reaches_an_engine(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.02) as engine:
        front = await start_front(engine, slots=1)
        first = asyncio.ensure_future(
            client(front).chat.completions.create(model="fake", messages=MESSAGES, max_tokens=20)
        )
        await until(lambda: engine.running == 1)
        second = asyncio.ensure_future(front.post().__aenter__())
        await until(lambda: front.cluster.scheduler.waiting == 1)
        second.cancel()
        await until(lambda: front.cluster.scheduler.waiting == 0)
        await first
    assert len(engine.bodies) == 1


# ---- metrics ----


async def test_metrics_count_requests_and_outcomes(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        for _ in range(3):
            async with front.post(max_tokens=4) as response:
                await response.read()
        async with front.post(model="other"):
            pass
        await until(lambda: not front.cluster.scheduler.requests)
        async with front.session.get(f"{front.url}/metrics") as response:
            text = await response.text()
    name = engine.url.removeprefix("http://")
    for line in (
        'llmserve_requests_total{outcome="completed"} 3.0',
        f'llmserve_output_tokens_total{{engine="{name}",model="fake"}} 12.0',
        'llmserve_rejections_total{reason="model_not_found"} 1.0',
        f'llmserve_latency_seconds_count{{engine="{name}",model="fake"}} 3.0',
        f'llmserve_waiting_seconds_count{{engine="{name}",model="fake"}} 3.0',
        "llmserve_actual_tokens_sum 12.0",
        f'llmserve_engine_ready{{engine="{name}"}} 1.0',
        'llmserve_bin_requests{bin="0"} 0.0',
    ):
        assert line in text, line


async def test_a_failing_engine_returns_its_own_error_after_the_last_try(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        engine.fault = Fault("500")
        front = await start_front(engine, scheduling={"retries_max": 2})
        async with front.post() as response:
            assert response.status == 500
            assert "error" in await response.json()
    assert len(engine.bodies) == 3


async def test_what_certainly_fits_nowhere_is_refused_and_a_claim_ends_at_the_context(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0, context_tokens=100, tokens_max=60) as engine:
        front = await start_front(engine)
        for fields, param in (({"n": 61}, "n"), ({"n": 129}, "n"), ({"min_tokens": 101}, "min_tokens")):
            async with front.post(**fields) as response:
                error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, param)
        ids = {"prompt": [1] * 40, "max_tokens": 1000}
        claim = {"x-llmserve-predicted-tokens": "1e9"}
        async with front.post("/v1/completions", claim, **ids) as response:
            assert response.headers["x-llmserve-predicted-tokens"] == "60"
        assert len(engine.bodies) == 1
