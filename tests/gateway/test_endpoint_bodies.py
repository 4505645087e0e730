"""What is read of the bodies of endpoints beside completions: leniently, within limits, with clear errors."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.errors import BadRequest
from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.parse import parse_call
from llmserve.request import Call

NAMES = (
    *("model", "input", "messages", "system", "tools", "stream", "instructions", "max_tokens", "max_output_tokens"),
    *("content", "text", "type", "role", "output", "documents", "query", "tokens", "prompt", "stop_sequences"),
    *("previous_response_id", "format", "temperature", "service_tier", "priority"),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("tool_result")
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)


def parse(path: str, **fields: Any) -> Call:
    return parse_call(path, json.dumps({"model": "m", **fields}).encode(), BodyLimits(prompt_chars_max=1000))


@given(path=st.sampled_from(sorted(ENDPOINTS)), fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
@settings(max_examples=300)
def test_any_body_is_read_or_refused(path: str, fields: dict[str, Any]) -> None:
    data = json.dumps({"model": "m", **fields}).encode()
    with contextlib.suppress(BadRequest):
        call = parse_call(path, data, BodyLimits(prompt_chars_max=1000))
        assert call.wire.form is ENDPOINTS[path].form
        assert call.bounds.prompt_ids >= 0


@given(path=st.sampled_from(sorted(ENDPOINTS)), data=st.binary(max_size=200), boundary=st.sampled_from(["x", "", "é"]))
def test_any_bytes_are_read_or_refused(path: str, data: bytes, boundary: str) -> None:
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    for body in (data, b"--x\r\n" + data + b"\r\n--x--"):
        with contextlib.suppress(BadRequest):
            parse_call(path, body, BodyLimits(prompt_chars_max=1000), headers=headers)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"input": "x" * 1001}, "input"),
        ("/v1/responses", {"max_output_tokens": {}}, "max_output_tokens"),
        ("/v1/responses", {"input": "x", "priority": "soon"}, "priority"),
        ("/v1/messages", {"max_tokens": 5}, "messages"),
        ("/v1/messages", {"messages": []}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 1001}]}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user"}], "stop_sequences": ["x"] * 65}, "stop_sequences"),
        ("/v1/embeddings", {"input": "x" * 1001}, "input"),
        ("/v1/embeddings", {"input": list(range(1001))}, "input"),
        ("/v1/embeddings", {"model": 7}, "model"),
        ("/v1/responses", {"input": [{}] * 8193}, "input"),
        ("/v1/messages", {"messages": [{"role": "user"}] * 8193}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user"}], "tools": [{}] * 1025}, "tools"),
    ],
)
def test_the_wrong_field_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as wrong:
        parse(path, **fields)
    assert wrong.value.param == param


@pytest.mark.parametrize(("input_", "ids"), [("four", 0), ([1, 2, 3], 3), ([[1, 2], [3]], 3), ([], 1), (["a", "b"], 0)])
def test_token_ids_of_an_embedding_are_counted(input_: Any, ids: int) -> None:
    assert parse("/v1/embeddings", input=input_).bounds.prompt_ids == ids


def test_what_a_response_goes_on_from_is_kept() -> None:
    call = parse("/v1/responses", input="x", previous_response_id="resp-1", service_tier="flex", priority=2)
    assert (call.previous, call.tier, call.priority, call.bounds.choices) == ("resp-1", "flex", 2, 1)
