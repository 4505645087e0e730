"""Tokens of a prompt that were in the engine's cache, in the words of each kind of engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmserve.wire.answer_forms import COMPLETION, MESSAGE, RESPONSE
from llmserve.wire.event_stream import UsageFilter
from llmserve.wire.typed_events import MessageReader, ResponseReader

COUNTS = {"prompt_tokens": 90, "completion_tokens": 7, "total_tokens": 97}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "OpenAI, vLLM, SGLang": {"usage": {**COUNTS, "prompt_tokens_details": {"cached_tokens": 64, "audio_tokens": None}}},
    "DeepSeek": {"usage": {**COUNTS, "prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 26}},
    "llama.cpp": {"usage": COUNTS, "timings": {"cache_n": 64, "prompt_n": 26, "prompt_ms": 12.5}},
}
UNKNOWN: dict[str, dict[str, Any]] = {
    "no word": {"usage": COUNTS},
    "null": {"usage": {**COUNTS, "prompt_tokens_details": None}},
    "null inside": {"usage": {**COUNTS, "prompt_tokens_details": {"cached_tokens": None}}},
    "a list": {"usage": {**COUNTS, "prompt_tokens_details": [64]}},
    "negative": {"usage": {**COUNTS, "prompt_tokens_details": {"cached_tokens": -1}}},
    "more than the prompt": {"usage": {**COUNTS, "prompt_tokens_details": {"cached_tokens": 91}}},
    "timings without it": {"usage": COUNTS, "timings": {"prompt_n": 90}},
    "timings of another kind": {"usage": COUNTS, "timings": "fast"},
}
each_known = pytest.mark.parametrize("fields", COMPLETIONS.values(), ids=COMPLETIONS)
each_unknown = pytest.mark.parametrize("fields", UNKNOWN.values(), ids=UNKNOWN)
TOKEN = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def whole(fields: dict[str, Any]) -> Any:
    answer = COMPLETION.whole(json.dumps({"choices": [{"message": {}}], **fields}).encode())
    assert answer is not None
    return answer.usage


def streamed(fields: dict[str, Any], **how: Any) -> tuple[UsageFilter, bytes]:
    reader = UsageFilter(strip=True, **how)
    passed = reader.feed(TOKEN + LAST) + reader.feed(event({"choices": [], **fields})) + reader.feed(DONE)
    return reader, passed + reader.flush()


@each_known
def test_a_completion_tells_them_in_its_usage(fields: dict[str, Any]) -> None:
    assert (whole(fields).prompt_tokens, whole(fields).cached_tokens) == (90, 64)
    reader, _ = streamed(fields)
    assert (reader.prompt_tokens, reader.output_tokens, reader.cached_tokens) == (90, 7, 64)


@each_unknown
def test_what_makes_no_sense_is_unknown_and_spoils_no_other_count(fields: dict[str, Any]) -> None:
    assert (whole(fields).prompt_tokens, whole(fields).completion_tokens, whole(fields).cached_tokens) == (90, 7, None)
    reader, passed = streamed(fields)
    assert (reader.prompt_tokens, reader.output_tokens, reader.cached_tokens) == (90, 7, None)
    assert passed == TOKEN + LAST + DONE or "timings" in fields


def test_none_in_the_cache_is_not_the_same_as_unknown() -> None:
    assert whole({"usage": {**COUNTS, "prompt_tokens_details": {"cached_tokens": 0}}}).cached_tokens == 0


@pytest.mark.parametrize("strip", [True, False], ids=["without usage", "with usage"])
def test_the_receipt_in_the_last_chunk_has_them_although_the_usage_comes_later(strip: bool) -> None:
    usage = event({"choices": [], **COMPLETIONS["DeepSeek"]})
    reader = UsageFilter(strip=strip, receipt=b'{"bin":0}')
    passed = b"".join([reader.feed(piece) for piece in (TOKEN, LAST, usage, DONE)]) + reader.flush()
    closed = LAST.replace(b"]}\n", b'],"llmserve":{"bin":0,"cached_tokens":64}}\n')
    assert passed == TOKEN + closed + (b"" if strip else usage) + DONE


def test_a_stream_that_tells_none_has_the_receipt_without_them() -> None:
    reader = UsageFilter(strip=False, receipt=b'{"bin":0}')
    passed = reader.feed(TOKEN + LAST) + reader.feed(DONE) + reader.flush()
    assert passed == TOKEN + LAST.replace(b"]}\n", b'],"llmserve":{"bin":0}}\n') + DONE


# ---- responses and messages ----

RESPONDED = {"input_tokens": 90, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 7}
APART = {"input_tokens": 20, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 6, "output_tokens": 7}


def test_a_response_tells_them_in_its_details() -> None:
    response = {"id": "r", "object": "response", "status": "completed", "usage": RESPONDED}
    answer = RESPONSE.whole(json.dumps(response).encode())
    assert answer is not None
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (90, 64)
    reader = ResponseReader()
    reader.feed(event({"type": "response.completed", "response": response}))
    assert (reader.prompt_tokens, reader.cached_tokens) == (90, 64)


def test_a_message_counts_them_apart_from_the_rest_of_the_prompt() -> None:
    answer = MESSAGE.whole(json.dumps({"type": "message", "usage": APART}).encode())
    assert answer is not None
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (90, 64)


def test_a_streamed_message_tells_them_at_its_start_or_at_its_end() -> None:
    start = {"type": "message_start", "message": {"type": "message", "usage": {**APART, "output_tokens": 0}}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}}
    early = MessageReader()
    early.feed(event(start) + event(end))
    assert (early.prompt_tokens, early.cached_tokens, early.output_tokens) == (90, 64, 7)
    # vLLM knows the hits only once the prompt is computed.
    start["message"] = {"type": "message", "usage": {"input_tokens": 90, "output_tokens": 0}}
    late = MessageReader()
    late.feed(event(start) + event({**end, "usage": APART}))
    assert (late.prompt_tokens, late.cached_tokens, late.output_tokens) == (90, 64, 7)
