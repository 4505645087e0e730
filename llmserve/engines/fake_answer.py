"""The bytes of the fake engine's answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """All values that determine an answer's bytes. Equal answers have equal bytes, including the id."""

    model: str
    chat: bool
    tokens: int
    prompt_tokens: int
    include_usage: bool
    finish_reason: str

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens, "total_tokens": total}

    def head(self, kind: str) -> dict[str, object]:
        kind = f"chat.completion{kind}" if self.chat else "text_completion"
        return {"id": "chatcmpl-fake" if self.chat else "cmpl-fake", "object": kind, "created": 0, "model": self.model}


@lru_cache(4096)
def whole_body(answer: FakeAnswer) -> bytes:
    text = "tok " * answer.tokens
    content = {"message": {"role": "assistant", "content": text}} if answer.chat else {"text": text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": answer.finish_reason}
    return msgspec.json.encode({**answer.head(""), "choices": [choice], "usage": answer.usage})


@lru_cache(1024)
def whole_stream(answer: FakeAnswer) -> bytes:
    opening, token, closing = events(answer)
    return opening + token * answer.tokens + closing


@lru_cache(4096)
def events(answer: FakeAnswer) -> tuple[bytes, bytes, bytes]:
    """Return a stream's opening event, the event of one token, and the closing events."""

    def event(fields: dict[str, object]) -> bytes:
        return b"data: " + msgspec.json.encode({**answer.head(".chunk"), **fields}) + b"\n\n"

    def choice(content: dict[str, object], finish_reason: str | None) -> bytes:
        return event({"choices": [{"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}]})

    opening = choice({"delta": {"role": "assistant", "content": ""}}, None) if answer.chat else b""
    token = choice({"delta": {"content": "tok "}} if answer.chat else {"text": "tok "}, None)
    closing = choice({"delta": {}} if answer.chat else {"text": ""}, answer.finish_reason)
    usage = event({"choices": [], "usage": answer.usage}) if answer.include_usage else b""
    return opening, token, closing + usage + b"data: [DONE]\n\n"
