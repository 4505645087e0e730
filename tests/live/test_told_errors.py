"""What an engine says counts, not its status line: errors within answers, refusals, and who answers instead."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from batch_client import client_of, create, ended, jsonl, request, rows
from engines.lying import LyingEngine, chunked, dripping, http
from front import Front, StartFront, through_relays_too, until

from llmserve.engines.timed.answer import FakeAnswer, whole_stream
from llmserve.engines.timed.server import FakeEngine
from llmserve.scheduling.messages import RequestEnded
from llmserve.settings.tree import EngineConfig, ServerConfig

EVENTS = "content-type: text/event-stream\r\n"
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
WHOLE = (*STREAMED, "/v1/embeddings")
DONE = b"data: [DONE]\n\n"


def event(body: Any, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(body).encode() + b"\n\n"


OPENAI = event({"error": {"message": "EngineCore died", "code": 500}})
ANTHROPIC = event({"type": "error", "error": {"type": "api_error", "message": "died"}}, "error")
FAILED = event({"type": "response.failed", "response": {"status": "failed", "error": {"code": "server_error"}}})
OPENING = {  # what comes before any content
    "/v1/chat/completions": event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
    "/v1/completions": b"data:\n\n",
    "/v1/responses": event({"type": "response.created", "response": {"id": "r", "status": "in_progress"}}),
    "/v1/messages": event({"type": "message_start", "message": {"usage": {"input_tokens": 3}}})
    + event({"type": "ping"}),
}
CONTENT = {
    "/v1/chat/completions": event({"choices": [{"index": 0, "delta": {"content": "hi"}}]}),
    "/v1/completions": event({"choices": [{"index": 0, "text": "hi"}]}),
    "/v1/responses": event({"type": "response.output_text.delta", "delta": "hi"}),
    "/v1/messages": event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}}),
}
ERRORS: dict[str, tuple[bytes, ...]] = {
    "/v1/chat/completions": (OPENAI, event({"error": "boom"}), event({"object": "error", "message": "x"}), ANTHROPIC),
    "/v1/completions": (OPENAI, event({"detail": "boom"}), b"event: error\ndata: boom\n\n"),
    "/v1/responses": (FAILED, event({"type": "error", "code": "server_error", "message": "x"}, "error"), OPENAI),
    "/v1/messages": (ANTHROPIC, OPENAI),
}
CASES = [(path, error) for path in STREAMED for error in ERRORS[path]]


def body_of(path: str, *, stream: bool) -> dict[str, Any]:
    prompt = {"/v1/chat/completions": "messages", "/v1/messages": "messages", "/v1/completions": "prompt"}
    name = prompt.get(path, "input")
    value = [{"role": "user", "content": "hello"}] if name == "messages" else "hello"
    return {"model": "fake", name: value, "max_tokens": 5, **({"stream": True} if stream else {})}


async def ask(front: Front, path: str, *, stream: bool = False) -> tuple[int, bytes]:
    async with front.session.post(front.url + path, json=body_of(path, stream=stream)) as response:
        return response.status, await response.read()


def settings(*engines: LyingEngine | FakeEngine, **more: Any) -> EngineConfig:
    return EngineConfig(engine=tuple(engine.url for engine in engines), **{"slots": 4, **more})


async def ends(front: Front) -> list[RequestEnded]:
    await until(lambda: not front.cluster.scheduler.requests)
    return [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestEnded)]


def learnt(front: Front) -> list[float]:
    lengths: list[float] = []
    front.cluster.calls.on_answered.append(lambda in_flight, tokens: lengths.append(tokens))
    return lengths


# ---- streams ----


@through_relays_too
@pytest.mark.parametrize(("path", "error"), CASES)
async def test_an_error_before_any_content_runs_elsewhere_and_is_the_engines_fault(
    path: str, error: bytes, start_front: StartFront
) -> None:
    told = b": starting\n\n" + OPENING[path] + error + DONE
    async with LyingEngine(chunked(told, headers=EVENTS)) as bad, FakeEngine(step_s=0.001) as good:
        front = await start_front(engines=settings(bad, good))
        answers = await asyncio.gather(*[ask(front, path, stream=True) for _ in range(6)])
        assert [status for status, _ in answers] == [200] * 6
        assert not any(b"error" in body for _, body in answers)
        ended = await ends(front)
        assert bad.requests
        faults = [end for end in ended if end.engine in bad.url]
        assert {(end.outcome, end.fault, end.retryable) for end in faults} == {("failed", True, True)}


@pytest.mark.parametrize(("path", "error"), CASES)
async def test_an_error_behind_content_is_passed_on_and_cut_there_and_teaches_nothing(
    path: str, error: bytes, start_front: StartFront
) -> None:
    told = OPENING[path] + CONTENT[path] + error
    async with LyingEngine(chunked(told + CONTENT[path], headers=EVENTS)) as bad, FakeEngine(step_s=0.001) as good:
        front = await start_front(bad.url, engines=settings(bad))
        lengths = learnt(front)
        done = DONE if "completions" in path else b""
        assert await ask(front, path, stream=True) == (200, told + done)
        (end,) = await ends(front)
        assert (end.outcome, end.fault, end.retryable) == ("failed", True, False)
        assert not lengths
        assert not good.bodies


async def test_the_error_of_every_engine_gets_its_own_status(start_front: StartFront) -> None:
    async with LyingEngine(chunked(OPENAI, DONE, headers=EVENTS)) as engine:
        front = await start_front(engines=settings(engine))
        status, body = await ask(front, STREAMED[0], stream=True)
        assert (status, json.loads(body)["error"]["message"]) == (500, "EngineCore died")


async def test_a_clients_error_that_no_client_would_read_gets_a_status(start_front: StartFront) -> None:
    """Clients skip the field `error` of an event, which llama.cpp's servers of 2025 write."""
    said = b'error: {"code":400,"message":"the prompt is too long","type":"invalid_request_error"}\n\n' + DONE
    async with (
        LyingEngine(chunked(said, headers=EVENTS)) as engine,
        LyingEngine(chunked(said, headers=EVENTS)) as other,
    ):
        front = await start_front(engines=settings(engine, other))
        status, body = await ask(front, STREAMED[0], stream=True)
        assert (status, json.loads(body)["error"]["message"]) == (400, "the prompt is too long")
        assert len(engine.requests) + len(other.requests) == 1


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_client_under_status_200_is_passed_on_and_not_repeated(
    path: str, stream: bool, start_front: StartFront
) -> None:
    told = {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}}
    answer = chunked(event(told), headers=EVENTS) if stream else http(json.dumps(told).encode())
    async with LyingEngine(answer) as engine, LyingEngine(answer) as other:
        front = await start_front(engines=settings(engine, other))
        status, body = await ask(front, path, stream=stream)
        if stream:  # as the engine tells it, and as it would without us
            assert (status, body) == (200, event(told) + (DONE if "completions" in path else b""))
        else:
            assert (status, json.loads(body)) == (400, told)
        assert len(engine.requests) + len(other.requests) == 1
        (end,) = await ends(front)
        assert (end.outcome, end.fault) == ("failed", False)


@pytest.mark.parametrize("path", STREAMED)
async def test_what_comes_before_content_passes_unchanged_with_it(path: str, start_front: StartFront) -> None:
    rest = whole_stream(FakeAnswer("fake", path, 5, 7, id="r")) if path != STREAMED[0] else CONTENT[path] + DONE
    told = b": one\n\n: two\n\n" + OPENING[path] + b"\n" + rest
    async with LyingEngine(chunked(told[:9], told[9:60], told[60:], headers=EVENTS)) as engine:
        front = await start_front(engines=settings(engine))
        body = {**body_of(path, stream=True), "stream_options": {"include_usage": True}}
        async with front.session.post(front.url + path, json=body) as response:
            assert await response.read() == told


# ---- whole answers ----


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize(
    "told",
    [
        {"error": {"message": "EngineCore died", "code": 500}},
        {"error": "boom"},
        {"object": "error", "message": "boom", "code": 500},
        {"detail": "boom"},
        {"type": "error", "error": {"type": "api_error", "message": "boom"}},
    ],
)
async def test_a_whole_answer_that_is_an_error_runs_elsewhere(path: str, told: Any, start_front: StartFront) -> None:
    async with LyingEngine(http(json.dumps(told).encode())) as bad, FakeEngine(step_s=0.001) as good:
        front = await start_front(engines=settings(bad, good))
        answers = await asyncio.gather(*[ask(front, path) for _ in range(6)])
        assert [(status, b'"error"' in body) for status, body in answers] == [(200, False)] * 6
        assert bad.requests
        assert any(end.fault for end in await ends(front))


async def test_an_answer_that_the_engine_gave_up_is_passed_on_and_teaches_nothing(start_front: StartFront) -> None:
    told = (
        b'{"choices": [{"message": {"content": "hal"}, "finish_reason": "error"}], "usage": {"completion_tokens": 1}}'
    )
    async with LyingEngine(http(told)) as engine:
        front = await start_front(engines=settings(engine))
        lengths = learnt(front)
        assert await ask(front, STREAMED[0]) == (200, told)
        (end,) = await ends(front)
        assert (end.outcome, end.fault, len(engine.requests), lengths) == ("failed", True, 1, [])


# ---- refusals ----


REFUSALS = {
    "429": http(b'{"error": {"message": "full"}}', status="429 Too Many Requests"),
    "429 with a time": http(b"{}", "retry-after: 30", status="429 Too Many Requests"),
    "429 with a date": http(b"{}", "retry-after: Fri, 31 Dec 2100 23:59:59 GMT", status="429 Too Many Requests"),
    "503": http(b"Loading model", status="503 Service Unavailable"),
    "529": http(b"{}", status="529 Overloaded"),
    "404 of the model": http(b'{"error": {"message": "no model fake"}}', status="404 Not Found"),
    "400 of the model": http(b'{"error": {"message": "x", "code": "model_not_found"}}', status="400 Bad Request"),
    "401": http(b"{}", status="401 Unauthorized"),
    "403": http(b"{}", status="403 Forbidden"),
    "200, and busy": http(b'{"error": {"message": "x", "type": "rate_limit_error"}}'),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_replica_that_refuses_costs_no_request_and_draws_no_traffic(name: str, start_front: StartFront) -> None:
    async with LyingEngine(REFUSALS[name]) as bad, FakeEngine(step_s=0.001) as good:
        front = await start_front(engines=settings(bad, good))
        for _ in range(20):
            assert (await ask(front, STREAMED[0]))[0] == 200
        eight = await asyncio.gather(*[ask(front, STREAMED[0]) for _ in range(8)])
        assert [status for status, _ in eight] == [200] * 8
        assert 1 <= len(bad.requests) <= 8


@pytest.mark.parametrize("name", REFUSALS)
async def test_the_only_engines_refusal_is_passed_on_at_once(name: str, start_front: StartFront) -> None:
    async with LyingEngine(REFUSALS[name]) as engine:
        front = await start_front(engines=settings(engine))
        status, _ = await ask(front, STREAMED[0])
        expected = {"401": 502, "403": 502, "200, and busy": 429}.get(name) or int(name[:3])
        assert (status, len(engine.requests)) == (expected, 1)


async def test_a_rest_in_milliseconds_goes_before_one_in_seconds(start_front: StartFront) -> None:
    refusal = http(b"{}", "retry-after: 1", "retry-after-ms: 250", status="429 Too Many Requests")
    async with LyingEngine(refusal) as engine:
        front = await start_front(engines=settings(engine))
        assert (await ask(front, STREAMED[0]))[0] == 429
        assert [end.rest_s for end in await ends(front)] == [0.25]


async def test_of_the_refusals_of_all_engines_the_client_gets_the_one_that_says_when_to_come_again(
    start_front: StartFront,
) -> None:
    when = http(b'{"error": {"message": "later"}}', "retry-after: 7", status="429 Too Many Requests")
    async with (
        LyingEngine(REFUSALS["404 of the model"]) as first,
        LyingEngine(when) as second,
        LyingEngine(REFUSALS["429"]) as third,
        LyingEngine(REFUSALS["401"]) as fourth,
    ):
        engines = (first, second, third, fourth)
        front = await start_front(engines=settings(*engines))
        async with front.post() as response:
            assert (response.status, response.headers["retry-after"]) == (429, "7")
            assert (await response.json())["error"]["message"] == "later"
        assert [len(engine.requests) for engine in engines] == [1] * 4


@through_relays_too
async def test_an_endpoint_that_one_engine_lacks_is_answered_by_the_other(start_front: StartFront) -> None:
    missing = http(b'{"detail": "Not Found"}', status="404 Not Found")
    async with LyingEngine(missing) as bad, FakeEngine(step_s=0.001) as good:
        front = await start_front(engines=settings(bad, good))
        assert [(await ask(front, "/v1/embeddings"))[0] for _ in range(4)] == [200] * 4
        assert len(bad.requests) <= 1


# ---- time ----


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("began", [False, True])
async def test_comments_and_pings_are_silence(path: str, began: bool, start_front: StartFront) -> None:
    chunk = b': still here\n\nevent: ping\ndata: {"type": "ping"}\n\n'
    head = chunked(OPENING[path] + CONTENT[path] * began, end=False, headers=EVENTS)
    async with LyingEngine(dripping(head, b"%x\r\n%b\r\n" % (len(chunk), chunk), 0.02)) as engine:
        front = await start_front(engines=settings(engine, engine_idle_s=0.3, engine_answer_s=60.0))
        async with asyncio.timeout(10.0):
            status, body = await ask(front, path, stream=True)
        assert status == (200 if began else 504)
        assert b"--engine-idle-s" in body
        assert len(engine.requests) == 1, "the engine may still work on it"


@pytest.mark.parametrize("path", STREAMED)
async def test_the_slot_is_free_at_the_end_of_the_answer_not_of_the_connection(
    path: str, start_front: StartFront
) -> None:
    data = chunked(whole_stream(FakeAnswer("fake", path, 5, 7, id="r")), end=False, headers=EVENTS)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(60.0)

    async with LyingEngine(answer) as engine:
        front = await start_front(engines=settings(engine, slots=1))
        async with asyncio.timeout(20.0):
            for _ in range(3):
                assert (await ask(front, path, stream=True))[0] == 200
        assert [end.outcome for end in await ends(front)] == ["completed"] * 3


async def test_a_connection_whose_last_bytes_come_late_is_kept(start_front: StartFront) -> None:
    data = chunked(whole_stream(FakeAnswer("fake", STREAMED[0], 5, 7)), end=False, headers=EVENTS)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with LyingEngine(answer) as engine:
        front = await start_front(engines=settings(engine, slots=1))
        for _ in range(3):
            assert (await ask(front, STREAMED[0], stream=True))[0] == 200
            await asyncio.sleep(0.15)
        probes = [head for head in engine.heads if not head.startswith(b"POST")]  # each has a connection of its own
        assert len(engine.requests) == 3
        assert engine.connections - len(probes) <= 2, "one for the answers, and perhaps that of a probe"


# ---- lines of batches ----


async def run_lines(front: Front, lines: int) -> tuple[str, list[int]]:
    """Run a batch; return its status, and the statuses of the rows of its errors."""
    client = client_of(front.url)
    batch = await ended(client, await create(client, jsonl([request(number) for number in range(lines)])))
    return batch.status, [row["response"]["status_code"] for row in await rows(client, batch.error_file_id)]


async def test_a_line_runs_elsewhere_after_an_error_under_status_200(start_front: StartFront, tmp_path: Path) -> None:
    told = http(b'{"error": {"message": "EngineCore died", "code": 500}}')
    async with LyingEngine(told) as bad, FakeEngine(step_s=0.001) as good:
        front = await start_front(engines=settings(bad, good), server=ServerConfig(port=0, state=str(tmp_path)))
        assert await run_lines(front, 4) == ("completed", [])
        assert bad.requests


async def test_a_line_whose_engine_always_fails_runs_as_often_as_a_request(
    start_front: StartFront, tmp_path: Path
) -> None:
    async with LyingEngine(http(b'{"error": {"message": "EngineCore died", "code": 500}}')) as engine:
        front = await start_front(engines=settings(engine), server=ServerConfig(port=0, state=str(tmp_path)))
        assert await run_lines(front, 1) == ("completed", [500])
        assert len(engine.requests) == 3, "--retries-max, and the first"


async def test_a_line_whose_answer_takes_too_long_runs_once(start_front: StartFront, tmp_path: Path) -> None:
    slow = dripping(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n", b"x", 0.02)
    async with LyingEngine(slow) as engine:
        server = ServerConfig(port=0, state=str(tmp_path))
        front = await start_front(engines=settings(engine, engine_answer_s=0.4), server=server)
        assert await run_lines(front, 1) == ("completed", [504])
        assert len(engine.requests) == 1
