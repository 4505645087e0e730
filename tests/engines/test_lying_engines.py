"""Engines that break HTTP, OpenAI's format, or their promises: what clients get, and what stays behind."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass
from typing import Any

import pytest
from engines.lying import Answering, LyingEngine, chunked, dripping, endless, http
from front import Front, StartFront, until

from llmserve.engines.timed.server import FakeEngine
from llmserve.http.client import HEAD_BYTES_MAX
from llmserve.scheduling.messages import RequestEnded
from llmserve.settings.tree import EngineConfig

GOOD = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}'
TOKEN = b'data: {"choices": [{"delta": {"content": "tok"}, "finish_reason": null}]}\n\n'
FINISH = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
EVENTS = "content-type: text/event-stream\r\n"


@dataclass(frozen=True)
class Case:
    """What an engine sends, and what a client gets. The end is an error's code, or "done"."""

    name: str
    answer: bytes | Answering
    status: int = 502
    end: str = "engine_failed"
    stream: bool = False
    closes: bool = True
    elsewhere: bool = True  # with a second, good engine the request is answered
    answer_s: float = 0.6


CASES = (
    # heads
    Case("nothing at all", b""),
    Case("no HTTP", b"SSH-2.0-OpenSSH_9.6\r\n"),
    Case("status 000", http(GOOD, status="000 Zero")),
    Case("status 600", http(GOOD, status="600 Six")),
    Case("status 999", http(GOOD, status="999 Nine")),
    Case("status 101", http(GOOD, "upgrade: websocket", "connection: upgrade", status="101 Switching Protocols")),
    Case("101 in mid-air", b"HTTP/1.1 101 Switching Protocols\r\n\r\n"),
    Case("a redirect", http(b"", "location: http://169.254.169.254/", status="302 Found")),
    Case("not modified", b"HTTP/1.1 304 Not Modified\r\n\r\n"),
    Case("no content", b"HTTP/1.1 204 No Content\r\n\r\n"),
    Case("a content-type with a vertical tab", http(GOOD, "content-type: a\x0bb")),
    Case("a content-type with NUL", http(GOOD, "content-type: a\0b")),
    Case("a head of 100 KB in one field", http(GOOD, "x-long: " + "x" * 100_000)),
    Case("a head of many fields", http(GOOD, *[f"x-{number}: {'y' * 90}" for number in range(2_000)])),
    Case("a head without end", endless(b"HTTP/1.1 200 OK\r\n", b"x-more: " + b"y" * 5_000 + b"\r\n")),
    Case("a field without end", endless(b"HTTP/1.1 200 OK\r\nx-more: ", b"y" * 5_000)),
    Case("interim answers without end", endless(b"", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 100)),
    Case("a length below zero", b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n" + GOOD),
    Case("no number as a length", b"HTTP/1.1 200 OK\r\ncontent-length: \r\n\r\n" + GOOD),
    Case("a length beyond all numbers", b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 30 + b"\r\n\r\n" + GOOD),
    Case("two lengths", http(GOOD, "content-length: 5")),
    Case("a length and chunks", chunked(GOOD, headers="content-length: 5\r\n")),
    Case("gzip", http(gzip.compress(GOOD), "content-encoding: gzip"), elsewhere=False),
    Case("a packing beside none", http(gzip.compress(GOOD), "content-encoding: identity, GZIP"), elsewhere=False),
    Case("an error in gzip", http(gzip.compress(b"{}"), "content-encoding: gzip", status="400 Bad Request")),
    Case("gzip as transfer-encoding", chunked(GOOD, headers="transfer-encoding: gzip\r\n")),
    # whole answers
    Case("an empty body", http(b"")),
    Case("HTML", http(b"<html>welcome</html>", "content-type: text/html")),
    Case("half a JSON", http(GOOD[:40]), elsewhere=False),
    Case("JSON without choices", http(b'{"error": {"message": "no core", "code": "core_dead"}}'), end="core_dead"),
    Case("choices that are no list", http(b'{"choices": 3}'), elsewhere=False),
    Case("a list", http(b"[]"), elsewhere=False),
    Case("JSON of a hundred thousand levels", http(b'{"choices": ' + b"[" * 100_000), elsewhere=False),
    Case("a body shorter than its length", http(GOOD)[:-10]),
    Case(
        "a body announced with 600 MB", b"HTTP/1.1 200 OK\r\ncontent-length: 600000000\r\n\r\n" + GOOD, elsewhere=False
    ),
    Case(
        "a body without end",
        endless(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 1_000_000),
        elsewhere=False,
        answer_s=60.0,
    ),
    Case(
        "chunks without end",
        endless(chunked(end=False), b"f4240\r\n" + b"x" * 1_000_000 + b"\r\n"),
        elsewhere=False,
        answer_s=60.0,
    ),
    Case("a trailer without end", endless(chunked(GOOD, end=False) + b"0\r\nx-more: ", b"y" * 5_000)),
    Case("an extension of a chunk without end", endless(chunked(end=False) + b"5;x=", b"y" * 5_000)),
    Case("no size of a chunk", chunked(end=False) + b"zz\r\n"),
    Case("a 500 without end", endless(b"HTTP/1.1 500 Oops\r\n\r\n", b"x" * 1_000_000)),
    Case("a 400 without end", endless(b"HTTP/1.1 400 Bad\r\n\r\n", b"x" * 1_000_000)),
    Case(
        "a drip",
        dripping(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n", b"x", 0.02),
        504,
        "engine_timeout",
        elsewhere=False,
    ),
    Case(
        "a dripping head",
        dripping(b"HTTP/1.1 200 OK\r\nx-slow: ", b"x", 0.02),
        504,
        "engine_timeout",
        elsewhere=False,
    ),
    # statuses
    Case("401", http(b"{}", status="401 Unauthorized"), end="engine_auth"),
    Case("403", http(b"{}", status="403 Forbidden"), end="engine_auth"),
    Case("408", http(b'{"error": {"code": "slow"}}', status="408 Timeout"), 408, "slow"),
    Case("501", http(b'{"error": {"code": "no"}}', status="501 Not Implemented"), 501, "no"),
    Case("507", http(b'{"error": {"code": "full"}}', status="507 Insufficient Storage"), 507, "full"),
    Case("529", http(b'{"error": {"code": "busy"}}', status="529 Site Overloaded"), 529, "busy"),
    Case("599", http(b'{"error": {"code": "far"}}', status="599 Far"), 599, "far"),
    Case("429", http(b'{"error": {"code": "later"}}', status="429 Too Many"), 429, "later", elsewhere=False),
    Case("400", http(b'{"error": {"code": "wrong"}}', status="400 Bad"), 400, "wrong", elsewhere=False),
    # streams
    Case("a stream of nothing", chunked(headers=EVENTS), stream=True),
    Case("a stream of HTML", chunked(b"<html>\n\n</html>", headers="content-type: text/html\r\n"), stream=True),
    Case("a stream that is an error", http(b'{"error": {"message": "x", "code": "y"}}'), end="y", stream=True),
    Case("a stream that ends in mid-answer", chunked(TOKEN, TOKEN, headers=EVENTS), 200, stream=True, elsewhere=False),
    Case(
        "a stream that ends in mid-event",
        chunked(TOKEN, FINISH[:20], headers=EVENTS),
        200,
        stream=True,
        elsewhere=False,
    ),
    Case(
        "a stream of HTTP/1.0 closed in mid-answer",
        b"HTTP/1.0 200 OK\r\n\r\n" + TOKEN,
        200,
        stream=True,
        elsewhere=False,
    ),
    Case("a stream cut in a chunk", chunked(TOKEN, end=False) + b"99\r\nda", 200, stream=True, elsewhere=False),
    Case(
        "a stream that drips",
        dripping(chunked(TOKEN, end=False), b"1\r\n:\r\n", 0.02),
        200,
        "engine_timeout",
        stream=True,
        elsewhere=False,
    ),
)

HONEST = (
    Case("a good answer", http(GOOD), 200, "done"),
    Case("a good answer, and the connection stays", http(GOOD), 200, "done", closes=False),
    Case("a good answer, and then another", http(GOOD) + http(GOOD), 200, "done", closes=False),
    Case("a good answer in chunks", chunked(GOOD[:30], GOOD[30:]), 200, "done"),
    Case("a good answer with a trailer", chunked(GOOD)[:-2] + b"content-encoding: gzip\r\n\r\n", 200, "done"),
    Case("an answer that ends with the connection", b"HTTP/1.1 200 OK\r\n\r\n" + GOOD, 200, "done"),
    Case("HTTP/1.0", b"HTTP/1.0 200 OK\r\n\r\n" + GOOD, 200, "done"),
    Case("lines that end with LF", http(GOOD).replace(b"\r\n", b"\n"), 200, "done"),
    Case("no reason", http(GOOD, status="200"), 200, "done"),
    Case(
        "interim answers",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + http(GOOD),
        200,
        "done",
    ),
    Case("created", http(GOOD, status="201 Created"), 200, "done"),
    Case("content-encoding identity", http(GOOD, "content-encoding: identity"), 200, "done"),
    *[
        Case(f"content-encoding {coding}", http(GOOD, f"content-encoding: {coding}"), 200, "done")
        for coding in ("none", "utf-8", "", "Identity, identity")
    ],
    Case("a content-type of \\xff\\xfe", http(GOOD, "content-type: \xff\xfe"), 200, "done"),
    Case("an empty content-type", http(GOOD, "content-type:"), 200, "done"),
    Case("a stream", chunked(TOKEN, FINISH, DONE, headers=EVENTS), 200, "done", stream=True),
    Case("a stream without [DONE]", chunked(TOKEN, FINISH, headers=EVENTS), 200, "done", stream=True),
    Case(
        "a stream without finish_reason", chunked(TOKEN, b"data:[DONE]\n\n", headers=EVENTS), 200, "done", stream=True
    ),
    Case(
        "a stream without a last empty line", chunked(TOKEN, FINISH.rstrip(), headers=EVENTS), 200, "done", stream=True
    ),
    Case("a whole answer instead of a stream", http(GOOD), 200, "done", stream=True),
    Case("a stream of HTTP/1.0", b"HTTP/1.0 200 OK\r\n\r\n" + TOKEN + FINISH + DONE, 200, "done", stream=True),
)


USAGE = b'"usage": {"completion_tokens": 3}'
ODD = (  # answers that no strict parser takes
    b'{"choices": [{"logprob": -Infinity}, NaN], %b}',
    b'{"choices": [{"message": {"content": "\\ud83d \x01 \xff"}}], %b}',
    b'\xef\xbb\xbf {"choices": null, "usage": {}, %b} and more',
    b'{"choices": [' + b"[" * 985 + b"]" * 985 + b"], %b}",
    b'{"choices": [], "x": NaN, "usage": {"completion_tokens": "3.0", "prompt_tokens": 1' + b"0" * 400 + b"}}",
)
ODD_EVENTS = (
    TOKEN.replace(b'"tok"', b'"\\ud83d \x01 \xff"') + FINISH + DONE,
    b"\xef\xbb\xbf" + TOKEN + b"data: this is no JSON\n\n" + FINISH + DONE,
    TOKEN + b'data: {"choices": [' + b"[" * 985 + b"]" * 985 + b"]}\n\n" + FINISH + DONE,
    b"\xef\xbb\xbf" + (TOKEN + FINISH + DONE).replace(b"\n", b"\r"),
    TOKEN.replace(b"\n", b"\r\n") + TOKEN.replace(b"\n", b"\r") + FINISH + DONE.replace(b"\n", b"\r"),
    TOKEN.replace(b"null", b'""') + FINISH.replace(b"{}", b'{"x": NaN}') + DONE,
)


@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
async def test_an_odd_answer_passes_byte_for_byte_and_is_asked_for_once(
    body: bytes, start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    told = body % USAGE if b"%b" in body else body
    async with LyingEngine(http(told)) as engine:
        front = await start_front(engine.url, engines=settings(engine))
        for _ in range(6):
            async with front.post() as response:
                assert (response.status, await response.read()) == (200, told)
        assert len(engine.requests) == 6
        await check_nothing_is_left(front, caplog)
        ends = [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestEnded)]
        assert [(end.outcome, end.output_tokens, end.fault) for end in ends] == [("completed", 3.0, False)] * 6


@pytest.mark.parametrize("events", ODD_EVENTS, ids=range(len(ODD_EVENTS)))
async def test_odd_events_pass_byte_for_byte(
    events: bytes, start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with LyingEngine(chunked(events, headers=EVENTS)) as engine:
        front = await start_front(engine.url, engines=settings(engine))
        async with front.post(stream=True) as response:
            assert (response.status, await response.read()) == (200, events)
        assert len(engine.requests) == 1
        await check_nothing_is_left(front, caplog)


async def ask(front: Front, *, stream: bool = False) -> tuple[int, str]:
    """Send a request; return the status, and an error's code or "done"."""
    async with front.post(stream=stream) as response:
        body = await response.read()
    events = [line.removeprefix(b"data:").strip() for line in body.split(b"\n\n")]
    errors = [json.loads(event)["error"] for event in events if event.startswith(b'{"error"')]
    return response.status, str(errors[-1]["code"]) if errors else "done"


def settings(*engines: LyingEngine | FakeEngine, answer_s: float = 0.6) -> EngineConfig:
    return EngineConfig(engine=tuple(engine.url for engine in engines), slots=4, engine_answer_s=answer_s)


async def check_nothing_is_left(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    await until(lambda: not front.cluster.scheduler.requests)
    assert front.cluster.calls.empty.is_set()
    assert all(not handle.running for handle in front.cluster.fleet.handles.values())
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert all(record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.parametrize("case", [*CASES, *HONEST], ids=lambda case: case.name)
async def test_a_client_gets_a_clean_answer_whatever_the_engine_sends(
    case: Case, start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with LyingEngine(case.answer, closes=case.closes) as engine:
        front = await start_front(engine.url, engines=settings(engine, answer_s=case.answer_s))
        status, end = await ask(front, stream=case.stream)
        assert (status // 100 * 100 if case in HONEST else status, end) == (case.status, case.end)
        assert engine.requests
        await check_nothing_is_left(front, caplog)
        ends = [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestEnded)]
        assert ends[-1].outcome == ("completed" if case.end == "done" else "failed")
        assert (end == "done") == (ends[-1].output_tokens > 0)


@pytest.mark.parametrize("case", [case for case in CASES if case.elsewhere], ids=lambda case: case.name)
async def test_what_is_the_engines_fault_is_answered_by_another_engine(
    case: Case, start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with LyingEngine(case.answer, closes=case.closes) as engine, FakeEngine(step_s=0.001) as good:
        front = await start_front(engine.url, good.url, engines=settings(engine, good, answer_s=30.0))
        asked = [ask(front, stream=case.stream) for _ in range(6)]  # more than one engine has slots
        assert await asyncio.gather(*asked) == [(200, "done")] * 6
        await check_nothing_is_left(front, caplog)
        ends = [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestEnded)]
        assert any(end.fault and end.retryable for end in ends)


async def test_the_largest_answer_is_a_setting_that_its_error_names(start_front: StartFront) -> None:
    for limit, end in ((len(GOOD), "done"), (len(GOOD) - 1, "engine_failed")):
        async with LyingEngine(http(GOOD)) as engine:
            config = EngineConfig(engine=(engine.url,), engine_answer_bytes_max=limit)
            front = await start_front(engine.url, engines=config)
            async with front.post() as response:
                told = await response.json()
            assert len(engine.requests) == 1
        assert ("choices" in told) is (end == "done")
        assert end == "done" or "--engine-answer-bytes-max" in told["error"]["message"]


async def test_headers_lose_what_is_not_printable(start_front: StartFront) -> None:
    answer = http(b"{}", "content-type: text/plain\xff", "retry-after: 17\xff", status="400 Bad")
    async with LyingEngine(answer) as engine:
        front = await start_front(engine.url, engines=settings(engine))
        async with front.post() as response:
            headers = response.headers
    assert (headers["content-type"], headers["retry-after"]) == ("text/plain", "17")


async def test_a_key_that_is_refused_is_logged_once_and_never_the_clients_own_401(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with LyingEngine(http(b"{}", status="401 Unauthorized")) as engine:
        front = await start_front(engine.url, engines=settings(engine), scheduling={"retries_max": 0})
        assert [await ask(front) for _ in range(3)] == [(502, "engine_auth")] * 3
    assert sum("--engine-api-key" in record.getMessage() for record in caplog.records) == 1


async def test_nothing_is_learnt_from_a_stream_that_ends_in_mid_answer(start_front: StartFront) -> None:
    async with LyingEngine(chunked(TOKEN, headers=EVENTS)) as engine:
        front = await start_front(engine.url, engines=settings(engine))
        learnt: list[float] = []
        front.cluster.calls.on_answered.append(lambda in_flight, tokens: learnt.append(tokens))
        assert await ask(front, stream=True) == (200, "engine_failed")
        engine.answer = chunked(TOKEN, FINISH, headers=EVENTS)
        assert await ask(front, stream=True) == (200, "done")
        await until(lambda: not front.cluster.scheduler.requests)
    assert learnt == [2.0]


def test_the_limit_of_a_head_is_64_kib() -> None:
    assert HEAD_BYTES_MAX == 65_536


# ---- probes ----


@pytest.mark.parametrize(
    "probes",
    [
        {"/v1/models": http(gzip.compress(b" " * 50_000_000), "content-encoding: gzip")},
        {"/v1/models": endless(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 100_000)},
        {"/v1/models": http(b" " * (2 << 20))},
        {"/v1/models": http(b"\xff\xfe")},
        {"/v1/models": http(b'{"data": ' + b"[" * 100_000)},
        {"/v1/models": http(b'{"data": 7}')},
        {"/v1/models": http(b"[NaN")},
        {"/v1/models": http(b'{"error": "none"}')},
        {"/v1/models": http(b"", "location: /", status="302 Found")},
        {"/health": http(b"", status="101 Switching Protocols")},
        {"/health": http(b"", status="000 Zero")},
        {"/health": b"SSH-2.0-OpenSSH_9.6\r\n"},
    ],
    ids=range(12),
)
async def test_an_engine_whose_probe_is_senseless_is_not_healthy(
    probes: dict[str, Any], start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with LyingEngine(http(GOOD), probes=probes) as engine:
        brief = {"scheduling": {"engine_wait_s": 0.1}}
        front = await start_front(engine.url, engines=settings(engine), wait=False, **brief)
        await until(lambda: any("engine 127" in record.getMessage() for record in caplog.records))
        assert (await ask(front))[0] == 503
        await check_nothing_is_left(front, caplog)


@pytest.mark.parametrize(
    "listed",
    [
        b'{"data": [{"id": 7}, null, {}, "", {"id": null}, {"id": "fake", "created": NaN}, {"id": ["fake"]}, [], 3]}',
        b'\xef\xbb\xbf{"object": "list", "data": [{"id": "fake", "meta": "\\ud83d"}]} \n',
        b'{"models": [{"name": "fake", "model": "fake", "size": 1' + b"0" * 400 + b"}]}",
        b'{"data": null, "models": [{"id": "fake"}]}',
        b'[{"id": "fake"}, {"id": "fake"}]',
        b'["fake"]',
        b'{"data": [{"id": "fake", "x": NaN}' + b', {"object": "model", "x": "%b"}' % (b"y" * 50) * 2_000 + b"]}",
        b'{"data": [{"id": "fake"}, {"x": ' + b"[" * 985 + b"]" * 985 + b"}]}",
    ],
    ids=range(8),
)
async def test_an_odd_list_of_models_has_those_that_it_names(
    listed: bytes, start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with LyingEngine(http(GOOD), probes={"/v1/models": http(listed)}) as engine:
        front = await start_front(engine.url, engines=settings(engine))
        assert "fake" in front.cluster.models
        assert await ask(front) == (200, "done")
        await check_nothing_is_left(front, caplog)


@pytest.mark.parametrize("value", ["+Inf", "NaN", "-1", "1e308", "1e400", "-Inf", "99999999999", "x", "\xff"])
async def test_senseless_metrics_are_unknown_and_cost_no_engine(
    value: str, start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    text = f'vllm:num_requests_running {value}\nvllm:cache_config_info{{kv_cache_size_tokens="{"9" * 5_000}"}} 1.0\n'
    async with LyingEngine(http(GOOD), probes={"/metrics": http(text.encode())}) as engine:
        front = await start_front(engine.url, engines=settings(engine))
        assert await ask(front) == (200, "done")
        (handle,) = front.cluster.fleet.handles.values()
        assert handle.info.tokens_max is None
        await check_nothing_is_left(front, caplog)


@pytest.mark.parametrize("listed", [b"", b"<html>", b"[]", b'{"paths": 3}', b'{"paths": {}', b"\xff", b"[" * 100_000])
async def test_a_senseless_list_of_endpoints_is_no_list(
    listed: bytes, start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with LyingEngine(http(GOOD), probes={"/openapi.json": http(listed)}) as engine:
        front = await start_front(engine.url, engines=settings(engine))
        assert await ask(front) == (200, "done")
        (handle,) = front.cluster.fleet.handles.values()
        assert handle.endpoints.told is None
        await check_nothing_is_left(front, caplog)


@pytest.mark.parametrize("length", ["-1", "0", "3e9", "99999999999", "1e400", '"long"', "true", "[1]", "9" * 400])
async def test_a_senseless_context_is_unknown(
    length: str, start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    models = f'{{"data": [{{"id": "fake", "max_model_len": {length}}}]}}'.encode()
    async with LyingEngine(chunked(TOKEN, FINISH, headers=EVENTS), probes={"/v1/models": http(models)}) as engine:
        front = await start_front(engine.url, engines=settings(engine))
        assert front.cluster.models["fake"].context_tokens is None
        assert await ask(front, stream=True) == (200, "done")
        await check_nothing_is_left(front, caplog)


async def test_model_ids_that_forge_lines_of_the_log_are_not_served_and_named_once(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    ids = ["fake", "\x1b[31mred\nINFO forged line", "a\u202eb", "", "x" * 257, "y" * 256]
    models = json.dumps({"data": [{"id": id_} for id_ in ids]}).encode()
    async with LyingEngine(http(GOOD), probes={"/v1/models": http(models)}) as engine:
        front = await start_front(engine.url, engines=settings(engine))
        assert sorted(front.cluster.models) == ["fake", "y" * 256]
        (handle,) = front.cluster.fleet.handles.values()
        for _ in range(3):
            await handle.engine.probe()
        assert sum("not served" in record.getMessage() for record in caplog.records) == 1
        await check_nothing_is_left(front, caplog)
