"""A conversation as Codex has it with /v1/responses, with tool calls of each kind, after the API's reference."""

from __future__ import annotations

import json
from typing import Any

from gateway.agent_turns import Fields, Turn, stream_of

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
CODEX_TOOLS: Any = [
    SHELL,
    PATCH,
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "web_search", "external_web_access": False},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "computer_use_preview", "display_width": 800, "display_height": 600, "environment": "linux"},
    {"type": "mcp", "server_label": "docs", "server_url": "https://docs.invalid/mcp", "require_approval": "never"},
    {"type": "namespace", "name": "mcp__docs__", "description": "Documents", "tools": [{**SHELL, "name": "search"}]},
    {"type": "tool_search"},
]
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
    {"type": "function_call", "id": "fc_4", "call_id": "call_4", "name": "update_plan", "arguments": '{"plan":[]}'},
    {
        "type": "function_call",
        "id": "fc_5",
        "call_id": "call_5",
        "name": "search",
        "namespace": "mcp__docs__",
        "arguments": '{"query":"exit \\"codes\\" \\u2603"}',
    },
    {
        "type": "shell_call",
        "id": "sh_1",
        "call_id": "call_6",
        "status": "completed",
        "action": {"commands": ["ls", "pwd"], "timeout_ms": 1000, "max_output_length": 4096},
    },
    {
        "type": "apply_patch_call",
        "id": "apc_1",
        "call_id": "call_7",
        "status": "completed",
        "operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-x = 1\n+x = 2\n"},
    },
    {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["exit codes"], "results": None},
    {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "status": "completed",
        "container_id": "cntr_1",
        "code": "print(1 + 1)",
        "outputs": [{"type": "logs", "logs": "2\n"}],
    },
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBORw0KGgo" * 200},
    {
        "type": "computer_call",
        "id": "cu_1",
        "call_id": "call_8",
        "status": "completed",
        "action": {"type": "click", "button": "left", "x": 1, "y": 2},
        "pending_safety_checks": [],
    },
    {
        "type": "mcp_list_tools",
        "id": "mcpl_1",
        "server_label": "docs",
        "tools": [{"name": "search", "input_schema": {"type": "object"}}],
    },
    {
        "type": "mcp_call",
        "id": "mcp_1",
        "server_label": "docs",
        "name": "search",
        "arguments": '{"query":"codes"}',
        "output": '{"type":"response.completed"}',
        "error": None,
    },
    {
        "type": "mcp_approval_request",
        "id": "mcpr_1",
        "server_label": "docs",
        "name": "delete",
        "arguments": "{}",
    },
    {"type": "tool_search_call", "id": "ts_1", "call_id": "call_9", "arguments": {"query": "calendar"}},
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
    {"type": "function_call_output", "call_id": "call_4", "output": "Plan updated"},
    {"type": "function_call_output", "call_id": "call_5", "output": "aborted"},
    {
        "type": "shell_call_output",
        "call_id": "call_6",
        "output": [{"stdout": "a.py\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    {"type": "apply_patch_call_output", "call_id": "call_7", "status": "failed", "output": "no such file"},
    {
        "type": "computer_call_output",
        "call_id": "call_8",
        "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA"},
    },
    {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": False, "reason": "no"},
    {"type": "tool_search_output", "call_id": "call_9", "execution": "client", "tools": [SHELL]},
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


STEPS = {
    "web_search_call": ("in_progress", "searching", "completed"),
    "file_search_call": ("in_progress", "searching", "completed"),
    "code_interpreter_call": ("in_progress", "interpreting", "completed"),
    "image_generation_call": ("in_progress", "generating", "completed"),
    "mcp_call": ("in_progress", "completed"),
    "mcp_list_tools": ("in_progress", "completed"),
}
"""Of calls that the engine's side makes: the events that tell how far they are."""


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
        elif item["type"] in STEPS:
            events += [{"type": f"response.{item['type']}.{step}", **at} for step in STEPS[item["type"]]]
        if item["type"] == "mcp_call":
            events.append({"type": "response.mcp_call_arguments.delta", **at, "delta": item["arguments"]})
            events.append({"type": "response.mcp_call_arguments.done", **at, "arguments": item["arguments"]})
        elif item["type"] == "code_interpreter_call":
            events.append({"type": "response.code_interpreter_call_code.delta", **at, "delta": item["code"]})
            events.append({"type": "response.code_interpreter_call_code.done", **at, "code": item["code"]})
        elif item["type"] == "image_generation_call":
            partial = {"partial_image_index": 0, "partial_image_b64": item["result"]}
            events.append({"type": "response.image_generation_call.partial_image", **at, **partial})
        elif item["type"] == "custom_tool_call":
            events.append({"type": "response.custom_tool_call_input.delta", **at, "delta": item["input"]})
        elif item["type"] == "message":
            text = item["content"][0]["text"]
            part = {**at, "content_index": 0}
            events.append({"type": "response.content_part.added", **part, "part": {**item["content"][0], "text": ""}})
            events.append({"type": "response.output_text.delta", **part, "delta": text})
            events.append({"type": "response.output_text.done", **part, "text": text})
            events.append({"type": "response.content_part.done", **part, "part": item["content"][0]})
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
    Turn("/v1/responses", codex(CODEX_FIRST), codex_stream([REASONING, *CALLS], 210), 210),
    Turn("/v1/responses", codex(CODEX_SECOND), codex_stream([SAID], 35), 35),
]
