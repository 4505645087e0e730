"""What engines' errors say, in the forms of many servers."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from typing import Any

import pytest

from llmserve.wire.error_objects import Verdict, asked_rest_s, error_in, judge, may_be_error, retry_after_s
from llmserve.wire.event_stream import error_of_event

CLIENT, ENGINE, BUSY = Verdict(False, False), Verdict(True, False), Verdict(False, True)
BUSY_FAULT = KEY = Verdict(True, True)

TOLD: tuple[tuple[str, Any, Verdict], ...] = (
    ("vLLM", {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}, ENGINE),
    ("older vLLM", {"object": "error", "message": "no", "type": "BadRequestError", "param": None, "code": 400}, CLIENT),
    ("older vLLM, without a code", {"object": "error", "message": "dead", "type": "internal_error"}, ENGINE),
    ("a string", {"error": "CUDA out of memory"}, ENGINE),
    ("TGI", {"error": "Model is overloaded", "error_type": "overloaded"}, ENGINE),
    ("a string and a code", {"error": "slow down", "code": 429}, BUSY),
    ("a code as text", {"error": {"message": "slow down", "code": "429"}}, BUSY),
    ("OpenAI's busy", {"error": {"message": "x", "type": "requests", "code": "rate_limit_exceeded"}}, BUSY),
    ("OpenAI's client", {"error": {"message": "x", "type": "invalid_request_error", "code": None}}, CLIENT),
    ("a too long prompt", {"error": {"message": "x", "code": "context_length_exceeded"}}, CLIENT),
    ("Anthropic's busy", {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, BUSY),
    ("Anthropic's fault", {"type": "error", "error": {"type": "api_error", "message": "x"}}, ENGINE),
    ("Anthropic's client", {"type": "error", "error": {"type": "invalid_request_error", "message": "x"}}, CLIENT),
    ("Anthropic's key", {"type": "error", "error": {"type": "authentication_error", "message": "x"}}, KEY),
    ("a bare error", {"type": "error"}, ENGINE),
    ("FastAPI", {"detail": "Internal Server Error"}, ENGINE),
    (
        "FastAPI's check",
        {"detail": [{"loc": ["body", "messages"], "msg": "field required", "type": "missing"}]},
        CLIENT,
    ),
    ("a list of errors", {"errors": [{"message": "upstream"}]}, ENGINE),
    ("a status beside", {"message": "no healthy upstream", "status": 503}, BUSY_FAULT),
    ("Google's", {"error": {"code": 503, "message": "x", "status": "UNAVAILABLE"}}, BUSY_FAULT),
    ("no such model", {"error": {"message": "no", "code": "model_not_found"}}, BUSY),
    ("a response that failed", {"object": "response", "status": "failed", "error": {"code": "server_error"}}, ENGINE),
    (
        "an event of a response that failed",
        {"type": "response.failed", "response": {"status": "failed", "error": {"code": "rate_limit_exceeded"}}},
        BUSY,
    ),
    ("a prompt that a response cannot have", {"type": "error", "code": "invalid_prompt", "message": "x"}, CLIENT),
)
NONE: tuple[Any, ...] = (
    {"choices": [{"message": {"content": "x"}}], "error": None},
    {"choices": [{"message": {"content": '{"error": {}}'}}]},
    {"object": "response", "status": "completed", "error": None, "output": []},
    {"object": "list", "data": [{"embedding": [1.0]}], "error": {"message": "one input was cut"}},
    {"choices": []},
    {"type": "message", "content": []},
    {"message": "hello"},
    {"detail": "high", "text": "spoken"},
    [],
)


@pytest.mark.parametrize(("name", "body", "verdict"), TOLD, ids=[name for name, *_ in TOLD])
def test_an_error_under_status_200_is_judged_by_what_it_says(name: str, body: Any, verdict: Verdict) -> None:
    data = json.dumps(body).encode()
    error = error_in(data)
    assert error is not None
    assert judge(200, error, names_model=False) == verdict
    assert 400 <= error.status <= 599
    assert error_of_event(b"data: " + data + b"\n\n") is not None
    assert may_be_error(data) or name == "a status beside"


@pytest.mark.parametrize("body", NONE)
def test_an_answer_is_no_error(body: Any) -> None:
    assert error_in(json.dumps(body).encode()) is None


def test_an_error_counts_in_an_event_whatever_else_is_there() -> None:
    chunk = {"error": {"code": 502}, "choices": [{"delta": {"content": ""}, "finish_reason": "error"}]}
    assert error_of_event(b"data: " + json.dumps(chunk).encode() + b"\n\n") is not None
    assert error_of_event(b'data: {"choices": [{"delta": {}, "finish_reason": "abort"}]}\n\n') is not None
    assert error_of_event(b"event: error\ndata: it broke\n\n") is not None
    assert error_of_event(b'data: {"choices": [{"delta": {"content": "error"}}]}\n\n') is None


@pytest.mark.parametrize(
    ("status", "body", "names_model", "verdict"),
    [
        (500, {}, False, ENGINE),
        (500, {"error": {"type": "invalid_request_error"}}, False, CLIENT),
        (500, {"error": {"type": "invalid_request_error", "code": 500}}, False, ENGINE),
        (502, {}, False, ENGINE),
        (503, {}, False, BUSY_FAULT),
        (529, {}, False, BUSY_FAULT),
        (429, {}, False, BUSY),
        (408, {}, False, ENGINE),
        (400, {}, False, CLIENT),
        (400, {"error": {"type": "rate_limit_error"}}, False, BUSY),
        (400, {"error": {"code": "model_not_found"}}, False, BUSY),
        (422, {"detail": []}, False, CLIENT),
        (404, {}, False, CLIENT),
        (404, {}, True, BUSY),
    ],
)
def test_a_status_is_judged_with_what_the_body_says(
    status: int, body: Any, names_model: bool, verdict: Verdict
) -> None:
    assert judge(status, error_in(json.dumps(body).encode()), names_model=names_model) == verdict


def test_retry_after_is_a_number_or_a_date() -> None:
    now_s = time.time()
    assert [retry_after_s(text, now_s) for text in ("7", "0.5", "soon", "", "-3")] == [7.0, 0.5, 0.0, 0.0, 0.0]
    assert 58.0 < retry_after_s(formatdate(now_s + 60, usegmt=True), now_s) <= 60.0
    assert retry_after_s(formatdate(now_s - 60, usegmt=True), now_s) <= 0.0


def test_retry_after_in_milliseconds_is_more_exact_and_what_is_no_number_is_not_read() -> None:
    def asked(retry_after: str | None, *values: bytes) -> float | None:
        return asked_rest_s(retry_after, [(b"x-other", b"1"), *[(b"retry-after-ms", value) for value in values]], 0.0)

    assert [asked("1", b"170"), asked(None, b" 2500 "), asked("1", b"1.5")] == [0.17, 2.5, 0.0015]
    assert [asked("1", b"soon"), asked("1", b"-5"), asked("1", b"inf"), asked("1")] == [1.0] * 4
    assert asked(None) is None
