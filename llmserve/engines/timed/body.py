"""What the fake engine reads of a request, of every endpoint."""

from __future__ import annotations

import msgspec


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class FakeBody(msgspec.Struct):
    """The fields of a request that an engine without a model reads."""

    model: str | None = None
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    documents: msgspec.Raw = msgspec.Raw(b"")
    tokens: msgspec.Raw = msgspec.Raw(b"")
    text_2: msgspec.Raw = msgspec.Raw(b"")
    previous_response_id: str | None = None
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_output_tokens or self.max_tokens

    @property
    def prompts(self) -> bytes:
        fields = (self.messages, self.prompt, self.input, self.documents, self.tokens, self.text_2)
        return next((bytes(field) for field in fields if field), b"")

    @property
    def inputs(self) -> int:
        """Number of texts."""
        prompts = self.prompts
        return len(msgspec.json.decode(prompts, type=list[msgspec.Raw])) if prompts.startswith(b"[") else 1
