"""Which tools an answer calls, in each form: whole answers, and streams in any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from calls import a_call
from gateway.claude_conversation import CLAUDE
from gateway.codex_conversation import CODEX

from llmserve.wire.answer_forms import COMPLETION, MESSAGE, RESPONSE, AnswerForm
from llmserve.wire.tool_calls import CALLS_MAX, CHARS_MAX, NAMES_MAX, ToolCall, ids_of, names_of
from predictor.prompt import Prompt


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def call(index: int, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}


STREAM = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": 'I call "tool_calls" with a "name"'}),
    chunk(call(0, id="c1", type="function", function={"name": "shell", "arguments": ""})),
    chunk(call(0, function={"arguments": '{"name": "x"}'})),
    chunk(call(1, id="c2", type="function", function={"name": "edit", "arguments": "{}"})),
    chunk({}, "tool_calls"),
    b"data: [DONE]\n\n",
]


def read(form: AnswerForm, stream: bytes, size: int, tools: int = 1) -> tuple[ToolCall, ...]:
    reader = form.stream(a_call("/v1/any", b"", Prompt("", tools=tools), stream=True, choices=1), b"")
    for start in range(0, len(stream), size):
        reader.feed(stream[start : start + size])
    reader.end()
    reader.flush()
    return reader.called


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_calls_in_a_stream_of_a_chat(size: int) -> None:
    assert read(COMPLETION, b"".join(STREAM), size) == (ToolCall("shell", "c1"), ToolCall("edit", "c2"))


def test_a_stream_without_tools_is_not_looked_at() -> None:
    assert read(COMPLETION, b"".join(STREAM), 100, tools=0) == ()


@pytest.mark.parametrize("size", [1, 300, 1_000_000])
def test_calls_in_the_streams_of_coding_agents(size: int) -> None:
    claude = read(MESSAGE, CLAUDE[1].answered, size)
    assert [one.name for one in claude] == ["Bash", "Read", "mcp__docs__search", "Edit"]
    assert claude[0].id == "toolu_1"
    codex = read(RESPONSE, CODEX[0].answered, size)
    assert ToolCall("shell", "call_1") in codex
    assert ToolCall("local_shell", "call_3") in codex
    assert not {"web_search", "mcp"} & {one.name for one in codex}, "the engine's side runs these"
    assert read(MESSAGE, CLAUDE[3].answered, size) == read(RESPONSE, CODEX[1].answered, size) == ()


def whole(form: AnswerForm, answer: dict[str, Any]) -> tuple[ToolCall, ...]:
    told = form.whole(json.dumps(answer).encode())
    assert told is not None
    return told.called


def test_calls_in_whole_answers() -> None:
    made = [{"id": "c1", "type": "function", "function": {"name": "shell", "arguments": "{}"}}]
    assert whole(COMPLETION, {"choices": [{"message": {"tool_calls": made}}]}) == (ToolCall("shell", "c1"),)
    assert whole(COMPLETION, {"choices": [{"message": {"content": "hi", "tool_calls": []}}]}) == ()
    block = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {}}
    assert whole(MESSAGE, {"type": "message", "content": [{"type": "text"}, block]}) == (ToolCall("Bash", "t1"),)
    item = {"type": "function_call", "call_id": "c1", "name": "shell"}
    answer = {"object": "response", "output": [{"type": "message"}, item, {"type": "web_search_call"}]}
    assert whole(RESPONSE, answer) == (ToolCall("shell", "c1"),)


@pytest.mark.parametrize("odd", [None, "x", [None], [{}], [{"function": None}], [{"function": {"name": 3}}]])
def test_odd_calls_are_none(odd: Any) -> None:
    assert whole(COMPLETION, {"choices": [{"message": {"tool_calls": odd}}]}) == ()


def test_what_a_model_writes_as_names_is_bounded() -> None:
    made = [{"id": "i" * 200, "function": {"name": f"{i}" * 100}} for i in range(99)]
    called = whole(COMPLETION, {"choices": [{"message": {"tool_calls": made}}]})
    assert len(called) == CALLS_MAX
    assert (len(names_of(called)), max(map(len, names_of(called))), ids_of(called)) == (NAMES_MAX, CHARS_MAX, ())
