"""A conversation as Claude Code has it with /v1/messages, with tool calls of each kind, after the API's reference."""

from __future__ import annotations

import json

from gateway.agent_turns import Fields, Turn, stream_of

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
    {"name": "mcp__docs__search", "description": "", "input_schema": {"type": "object"}, "defer_loading": True},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"type": "web_fetch_20250910", "name": "web_fetch", "citations": {"enabled": True}},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
]
ASKED: Fields = {
    "role": "user",
    "content": [{"type": "text", "text": "<system-reminder/>"}, {"type": "text", "text": "Fix é"}],
}
THOUGHT: Fields = {"type": "thinking", "thinking": "I should look.", "signature": "EqQBCgIYAhIM"}
REDACTED: Fields = {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix" * 20}
SERVED: list[Fields] = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "exit codes"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [
            {
                "type": "web_search_result",
                "url": "https://docs.invalid/",
                "title": '"type": "message_stop"',
                "encrypted_content": "EqgfCioIARgBIiQ3YTAw" * 30,
                "page_age": None,
            }
        ],
    },
    {"type": "server_tool_use", "id": "srvtoolu_2", "name": "web_fetch", "input": {"url": "https://docs.invalid/"}},
    {
        "type": "web_fetch_tool_result",
        "tool_use_id": "srvtoolu_2",
        "content": {"type": "web_fetch_tool_result_error", "error_code": "url_not_accessible"},
    },
    {"type": "server_tool_use", "id": "srvtoolu_3", "name": "bash_code_execution", "input": {"command": "ls"}},
    {
        "type": "bash_code_execution_tool_result",
        "tool_use_id": "srvtoolu_3",
        "content": {"type": "bash_code_execution_result", "stdout": "a.py\n", "stderr": "", "return_code": 0},
    },
    {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "search", "server_name": "docs", "input": {"q": "é"}},
    {
        "type": "mcp_tool_result",
        "tool_use_id": "mcptoolu_1",
        "is_error": False,
        "content": [{"type": "text", "text": "found nothing"}],
    },
]
"""Tools that the engine's side runs: their uses and results are in one answer."""
USES: list[Fields] = [
    {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "pytest -q"}},
    {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {}},
    {"type": "tool_use", "id": "toolu_3", "name": "mcp__docs__search", "input": {"q": '"error"'}},
    {"type": "tool_use", "id": "toolu_4", "name": "Edit", "input": {"old_string": "x = 1\n", "new_string": "x = 2\n"}},
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
    {
        "type": "tool_result",
        "tool_use_id": "toolu_3",
        "content": [{"type": "tool_reference", "tool_name": "mcp__docs__search"}],
    },
    {"type": "tool_result", "tool_use_id": "toolu_4"},
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


CITED: Fields = {
    "type": "web_search_result_location",
    "url": "https://docs.invalid/",
    "cited_text": "\n\n",
    "encrypted_index": "Eo8BCioIAhgB",
}
IN_PIECES = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", '{"command": "pyt', '"}')]
DELTAS: dict[str, list[Fields]] = {
    "thinking": [{"type": "thinking_delta", "thinking": "I should"}, {"type": "signature_delta", "signature": "Eq"}],
    "text": [
        {"type": "text_delta", "text": '"type": "message_stop"'},
        {"type": "citations_delta", "citation": CITED},
        {"type": "text_delta", "text": "\n\n"},
    ],
    "tool_use": IN_PIECES,
    "server_tool_use": IN_PIECES,
    "mcp_tool_use": IN_PIECES,
}


def claude_stream(blocks: list[Fields], tokens: int, stop: str) -> bytes:
    usage = {"input_tokens": 12, "cache_read_input_tokens": 800, "cache_creation_input_tokens": 88, "output_tokens": 1}
    begun = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    events: list[Fields] = [
        {"type": "message_start", "message": {**begun, "stop_sequence": None, "usage": usage}},
        {"type": "ping"},
    ]
    for index, block in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [{"type": "content_block_delta", "index": index, "delta": d} for d in DELTAS.get(block["type"], ())]
        events.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": stop, "stop_sequence": None}
    events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": tokens}})
    return stream_of([*events, {"type": "message_stop"}])


CLAUDE_SECOND = [
    ASKED,
    {"role": "assistant", "content": [THOUGHT, REDACTED, *SERVED, *USES]},
    {"role": "user", "content": RESULTS},
]
PROBE: Fields = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
PROBED: Fields = {
    "id": "msg_0",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "#"}],
    "stop_reason": "max_tokens",
    "stop_sequence": None,
    "usage": {"input_tokens": 8, "output_tokens": 1},
}
COUNT: Fields = {"model": "m", "messages": CLAUDE_SECOND, "system": CLAUDE_SYSTEM, "tools": CLAUDE_TOOLS}
CLAUDE = [
    Turn("/v1/messages?beta=true", json.dumps(PROBE).encode(), json.dumps(PROBED).encode(), 1),
    Turn(
        "/v1/messages?beta=true",
        claude([ASKED]),
        claude_stream([THOUGHT, REDACTED, {"type": "text", "text": ""}, *SERVED, *USES], 120, "tool_use"),
        120,
    ),
    Turn("/v1/messages/count_tokens?beta=true", json.dumps(COUNT).encode(), b'{"input_tokens": 900}', 0),
    Turn(
        "/v1/messages?beta=true",
        claude(CLAUDE_SECOND),
        claude_stream([{"type": "text", "text": ""}], 20, "end_turn"),
        20,
    ),
]
