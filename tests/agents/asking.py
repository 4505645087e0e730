"""Requests of agents, read as the gateway reads them, and the programs to which they are counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.draft import Draft
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.stages import identified, reading
from llmserve.programs.known_programs import KnownPrograms, Member
from llmserve.wire.tool_calls import ids_of

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SHELL: dict[str, Any] = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}


class Asking:
    """Asks as clients do, at times that a test sets. session_from : the setting"""

    def __init__(self, session_from: Sequence[str] = ()) -> None:
        self._read = reading(BodyLimits(), b"secret", session_from)
        self.found = Counter[str]()
        self.programs = KnownPrograms(b"secret", lambda source: self.found.update((source,)))
        self.now_s = 0.0
        self._identify = identified(self.programs, lambda: self.now_s)

    def ask(
        self, asked: Any, path: str = CHAT, headers: Mapping[str, str] | None = None, key: str = "", **fields: Any
    ) -> Draft:
        """A request that runs from now on. asked : the messages or the input, or the whole body"""
        field = "input" if path == RESPONSES else "messages"
        body = asked if isinstance(asked, dict) else {"model": "m", field: asked, **fields}
        draft = Draft(ENDPOINTS[path], headers or {}, body=json.dumps(body).encode(), key=key)
        self._read(draft)
        self._identify(draft)
        return draft

    def asked(self, asked: Any, path: str = CHAT, answer: Any = None, **fields: Any) -> Draft:
        """A request that has ended with this answer."""
        draft = self.ask(asked, path, **fields)
        end(draft, answer)
        return draft


def end(draft: Draft, answer: Any = None) -> None:
    """End a request. answer : the body; None: nothing is read of it"""
    names: tuple[str, ...] = ()
    if answer is not None:
        whole = draft.endpoint.form.whole(json.dumps(answer).encode())
        assert whole is not None, "it is an answer of its endpoint"
        names = (whole.response_id, *ids_of(whole.called))
    if isinstance(draft.member, Member):
        draft.member.left(names)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*ids: str, tool: str = "shell") -> dict[str, Any]:
    made = [{"id": id, "type": "function", "function": {"name": tool, "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(id: str, text: str = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def completion(message: dict[str, Any]) -> dict[str, Any]:
    """The whole answer with this message."""
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


RULES = {"role": "system", "content": "You are an agent. " * 100}
