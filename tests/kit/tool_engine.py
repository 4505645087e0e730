"""An engine without a model whose answers call a tool, and agents that run the tool and come back."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from front import Front

from llmserve.engines.timed.server import FakeEngine

TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {}}}]
LAST = "that is all"


class ToolEngine(FakeEngine):
    """Each whole answer of a chat with tools calls one, until its prompt says LAST."""

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        raw, response = await request.read(), await super()._complete(request)
        if b'"tools"' not in raw or LAST.encode() in raw or not isinstance(response, web.Response):
            return response
        assert isinstance(response.body, bytes)
        answer = msgspec.json.decode(response.body)
        calls = [
            {"id": f"call_{len(self.bodies)}", "type": "function", "function": {"name": "edit", "arguments": "{}"}}
        ]
        answer["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": calls}
        answer["choices"][0]["finish_reason"] = "tool_calls"
        return web.json_response(answer)


async def turn(
    front: Front, session: str, steps: int, *, tool_s: float = 0.0, words: int = 200, tokens: int = 4
) -> list[str]:
    """A turn of an agent, of so many requests. Returns the programs that the answers name."""
    messages: list[Any] = [{"role": "user", "content": f"{session}: " + "word " * words}]
    programs = []
    for number in range(1, steps + 1):
        if number == steps:
            messages[-1]["content"] += f" {LAST}"
        headers = {"x-llmserve-session": session}
        async with front.post(headers=headers, messages=messages, tools=TOOLS, max_tokens=tokens) as response:
            assert response.status == 200, await response.text()
            programs.append(response.headers["x-llmserve-program"])
            said = (await response.json())["choices"][0]["message"]
        for call in said.get("tool_calls") or ():
            await asyncio.sleep(tool_s)
            messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
    return programs
