"""Conversations as Codex (/v1/responses) and Claude Code (/v1/messages) have them, with tool calls of each kind.

The bodies and events follow the public references of both APIs. An engine that knows what comes next plays its part:
what it gets must be what the agent sent, and what the agent gets must be what the engine sent, in odd pieces.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from front import Front, StartFront

from llmserve.api.parse import parse_call
from llmserve.scheduling.messages import RequestEnded

PIECE = 97  # bytes: events are cut anywhere
Fields = dict[str, Any]


def stream_of(events: list[Fields], *, numbered: bool = False) -> bytes:
    lines = []
    for number, event in enumerate(events):
        event = {**event, "sequence_number": number} if numbered else event
        lines.append(f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n")
    return "".join(lines).encode()


# ---- Codex ----------------------------------------------------------------------------------------------------------

SHELL: Fields = {
    "type": "function",
    "name": "shell",
    "strict": False,
    "description": "Runs a shell command",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "type": {"enum": ["error"]}},
        "required": ["command"],
    },
}
PATCH: Fields = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'},
}
CODEX_TOOLS: Any = [SHELL, PATCH, {"type": "local_shell"}, {"type": "web_search"}]
CONTEXT = "<environment_context>\n  <cwd>/src</cwd>\n</environment_context>"
QUESTION = 'Fix the failing test; it says «type»: "response.completed"'
CODEX_FIRST: list[Any] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you delete."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": CONTEXT}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
]
REASONING: Fields = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [{"type": "summary_text", "text": "**Looking**"}],
    "content": None,
    "encrypted_content": "gAAAAABo" * 40,
}
CALLS: list[Fields] = [
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "shell",
        "arguments": '{"command":["bash","-lc","pytest -q"]}',
    },
    {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "call_id": "call_2",
        "name": "apply_patch",
        "input": "*** Begin Patch\n*** Update File: a.py\n-x = 1\n+x = 2\n*** End Patch",
    },
    {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "call_3",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "pytest exit codes"},
    },
]
OUTPUTS: list[Fields] = [
    {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"1 failed","metadata":{"exit_code":1}}'},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Success. Updated a.py"},
    {
        "type": "function_call_output",
        "call_id": "call_3",
        "output": [
            {"type": "input_text", "text": "a.py"},
            {"type": "input_image", "image_url": "data:image/png;base64,AA"},
        ],
    },
]


def codex(items: list[Any]) -> bytes:
    body = {
        "model": "m",
        "instructions": "You are Codex, a coding agent.",
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-7f",
        "text": {"verbosity": "medium"},
    }
    return json.dumps(body).encode()


def response(status: str, output: list[Any], tokens: int | None) -> Fields:
    usage = None if tokens is None else {"input_tokens": 900, "output_tokens": tokens, "total_tokens": 900 + tokens}
    told = {"id": "resp_1", "object": "response", "created_at": 1, "status": status, "model": "m", "output": output}
    return {**told, "tools": CODEX_TOOLS, "usage": usage, "incomplete_details": None, "error": None}


def codex_stream(output: list[Fields], tokens: int) -> bytes:
    events: list[Fields] = [
        {"type": "response.created", "response": response("in_progress", [], None)},
        {"type": "response.in_progress", "response": response("in_progress", [], None)},
    ]
    for index, item in enumerate(output):
        at = {"output_index": index, "item_id": item.get("id", "msg_1")}
        events.append({"type": "response.output_item.added", "output_index": index, "item": item})
        if item["type"] == "function_call":
            for piece in ('{"command":["bash",', '"-lc","pytest -q"]}'):
                events.append({"type": "response.function_call_arguments.delta", **at, "delta": piece})
            events.append({"type": "response.function_call_arguments.done", **at, "arguments": item["arguments"]})
        elif item["type"] == "custom_tool_call":
            events.append({"type": "response.custom_tool_call_input.delta", **at, "delta": item["input"]})
        elif item["type"] == "message":
            text = item["content"][0]["text"]
            events.append({"type": "response.output_text.delta", **at, "content_index": 0, "delta": text})
        elif item["type"] == "reasoning":
            events.append({"type": "response.reasoning_summary_text.delta", **at, "delta": "**Looking**"})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": response("completed", output, tokens)})
    return stream_of(events, numbered=True)


SAID: Fields = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "content": [{"type": "output_text", "text": 'Done: {"type":"response.failed"} is gone.\n\ndata: [DONE]\n\n'}],
}
CODEX_SECOND = [*CODEX_FIRST, REASONING, *CALLS, *OUTPUTS]
CODEX = [
    (codex(CODEX_FIRST), codex_stream([REASONING, *CALLS], 210)),
    (codex(CODEX_SECOND), codex_stream([SAID], 35)),
]

# ---- Claude Code ----------------------------------------------------------------------------------------------------

CACHED: Fields = {"cache_control": {"type": "ephemeral"}}
CLAUDE_SYSTEM: list[Fields] = [
    {"type": "text", "text": "You are Claude Code.", **CACHED},
    {"type": "text", "text": "Be concise.", **CACHED},
]
CLAUDE_TOOLS: list[Fields] = [
    {
        "name": "Bash",
        "description": "Runs a command",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
    {"name": "Read", "description": "Reads a file", "input_schema": {"type": "object", "properties": {}}, **CACHED},
]
ASKED: Fields = {
    "role": "user",
    "content": [{"type": "text", "text": "<system-reminder/>"}, {"type": "text", "text": "Fix é"}],
}
THOUGHT: Fields = {"type": "thinking", "thinking": "I should look.", "signature": "EqQBCgIYAhIM"}
USES: list[Fields] = [
    {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "pytest -q"}},
    {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {}},
]
RESULTS: list[Fields] = [
    {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": "1 failed"},
    {
        "type": "tool_result",
        "tool_use_id": "toolu_2",
        "content": [
            {"type": "text", "text": "x = 1"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
        ],
        **CACHED,
    },
]


def claude(messages: list[Fields]) -> bytes:
    body = {
        "model": "m",
        "max_tokens": 32_000,
        "system": CLAUDE_SYSTEM,
        "messages": messages,
        "tools": CLAUDE_TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "metadata": {"user_id": "user_1_account__session_2"},
        "stream": True,
    }
    return json.dumps(body, ensure_ascii=False).encode()


def claude_stream(blocks: list[Fields], tokens: int, stop: str) -> bytes:
    usage = {"input_tokens": 12, "cache_read_input_tokens": 800, "cache_creation_input_tokens": 88, "output_tokens": 1}
    begun = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    events: list[Fields] = [
        {"type": "message_start", "message": {**begun, "stop_sequence": None, "usage": usage}},
        {"type": "ping"},
    ]
    deltas = {
        "thinking": [
            {"type": "thinking_delta", "thinking": "I should"},
            {"type": "signature_delta", "signature": "Eq"},
        ],
        "text": [{"type": "text_delta", "text": '"type": "message_stop"'}, {"type": "text_delta", "text": "\n\n"}],
        "tool_use": [{"type": "input_json_delta", "partial_json": piece} for piece in ("", '{"command": "pyt', '"}')],
    }
    for index, block in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [{"type": "content_block_delta", "index": index, "delta": d} for d in deltas[block["type"]]]
        events.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": stop, "stop_sequence": None}
    events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": tokens}})
    return stream_of([*events, {"type": "message_stop"}])


CLAUDE_SECOND = [ASKED, {"role": "assistant", "content": [THOUGHT, *USES]}, {"role": "user", "content": RESULTS}]
CLAUDE = [
    (claude([ASKED]), claude_stream([THOUGHT, *USES], 120, "tool_use")),
    (claude(CLAUDE_SECOND), claude_stream([{"type": "text", "text": ""}], 20, "end_turn")),
]

CONVERSATIONS = {
    "/v1/responses": (CODEX, [210, 35]),
    "/v1/messages": (CLAUDE, [120, 20]),
}


# ---- the engine that knows what comes next --------------------------------------------------------------------------


@asynccontextmanager
async def playing(path: str, turns: list[tuple[bytes, bytes]]) -> AsyncIterator[tuple[str, list[tuple[bytes, Any]]]]:
    """An engine's URL, and what it gets: bodies and headers."""
    got: list[tuple[bytes, Any]] = []

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def answer(request: web.Request) -> web.StreamResponse:
        got.append((await request.read(), request.headers.copy()))
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        data = turns[len(got) - 1][1]
        for start in range(0, len(data), PIECE):
            await response.write(data[start : start + PIECE])
        return response

    app = web.Application(client_max_size=1 << 24)
    app.router.add_get("/v1/models", models)
    app.router.add_post(path, answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")), got


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_a_conversation_with_tools_passes_unchanged(start_front: StartFront, path: str) -> None:
    turns, tokens = CONVERSATIONS[path]
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    async with playing(path, turns) as (url, got):
        front = await start_front(url)
        for asked, answered in turns:
            async with front.session.post(f"{front.url}{path}?beta=true", data=asked, headers=headers) as response:
                assert response.status == 200
                assert await response.read() == answered
    assert [body for body, _ in got] == [asked for asked, _ in turns]
    if path == "/v1/messages":
        assert all(headers.items() <= dict(sent).items() for _, sent in got)
    assert output_tokens(front) == tokens
    sizes = front.cluster.prompt_tokens.state()["sums"]
    assert sizes[0][1] == pytest.approx(2 * 900, rel=0.01)  # with what is in the prompt cache


def output_tokens(front: Front) -> list[float]:
    return [step.event.output_tokens for step in front.cluster.journal.steps if isinstance(step.event, RequestEnded)]


@pytest.mark.parametrize(
    ("path", "data", "text", "system"),
    [
        ("/v1/responses", CODEX[1][0], QUESTION, "Ask before you delete."),
        ("/v1/messages", CLAUDE[1][0], "<system-reminder/> Fix é", "You are Claude Code. Be concise."),
    ],
)
def test_the_predictor_gets_what_the_user_asked_and_not_what_tools_said(
    path: str, data: bytes, text: str, system: str
) -> None:
    call = parse_call(path, data, prompt_chars_max=100_000)
    assert (call.prompt.text, call.prompt.system) == (text, system)
    assert call.prompt.tools == len(json.loads(data)["tools"])
    assert call.prompt.history_characters > 10


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_a_stream_without_its_end_is_an_error(start_front: StartFront, path: str) -> None:
    (asked, answered), _ = CONVERSATIONS[path][0]
    events = answered.split(b"\n\n")
    async with playing(path, [(asked, b"\n\n".join(events[:-2]) + b"\n\n")]) as (url, _):
        front = await start_front(url)
        async with front.session.post(front.url + path, data=asked) as response:
            told = await response.read()
    assert told.startswith(b"\n\n".join(events[:-2]) + b"\n\nevent: error\ndata: {")
