"""The endpoints that are passed to engines. To add one, add an entry to the table.

An entry says how the body is read and what form the answer has. Everything else is the same for all: keys, limits, fair
shares, the queue, retries, the receipt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from llmserve.gateway.agent_bodies import MessagesBody, ResponseBody
from llmserve.gateway.bodies import ChatBody, CompletionBody
from llmserve.gateway.prompts import ReadPrompt, read_chat, read_completion, read_messages, read_response
from llmserve.wire.answer_forms import COMPLETION, MESSAGE, MESSAGE_PROMPT, PROMPT, RESPONSE, AnswerForm

TRACED = ("x-request-id", "traceparent", "tracestate")  # vLLM names answers and spans by these headers
ANTHROPIC = (*TRACED, "anthropic-version", "anthropic-beta")
AUDIO_BYTES_PER_TOKEN = 640  # 16 kHz, 16 bits, 50 frames a second: the encoder of Whisper on a plain WAV file

AnswerBody = ChatBody | CompletionBody | ResponseBody | MessagesBody


class Answers(msgspec.Struct, frozen=True):
    """JSON that asks for generated text, whose length is predicted. read : finds the prompt in the body"""

    decoder: msgspec.json.Decoder[Any]
    read: Callable[[Any, tuple[str, ...], int | None], ReadPrompt]


class PromptFields(msgspec.Struct, frozen=True):
    """JSON with a prompt, or several, in these fields. No text is generated."""

    fields: tuple[str, ...]
    decoder: msgspec.json.Decoder[Any]

    @property
    def field(self) -> str:
        return self.fields[0]


class FormFile(msgspec.Struct, frozen=True):
    """multipart/form-data with a file as the prompt. Its text is not predicted: it follows from the file."""

    field: str
    bytes_per_token: int


class Endpoint(msgspec.Struct, frozen=True):
    """headers : of the client that are sent to the engine"""

    path: str
    reads: Answers | PromptFields | FormFile
    form: AnswerForm
    headers: tuple[str, ...] = TRACED

    @property
    def takes_bare_key(self) -> bool:
        """Whether the client's key may come as `x-api-key`, as Anthropic's does."""
        return self.headers is ANTHROPIC


def prompt(*fields: str) -> PromptFields:
    raw = [(field, Raw, Raw()) for field in fields]
    body = msgspec.defstruct("PromptBody", [("model", str | None, None), *raw])
    return PromptFields(fields, msgspec.json.Decoder(body))


_RERANK, _SCORE = prompt("documents", "query"), prompt("text_1", "text_2", "queries", "documents", "data_1", "data_2")
_AUDIO = FormFile("file", AUDIO_BYTES_PER_TOKEN)

ENDPOINTS: dict[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", Answers(msgspec.json.Decoder(ChatBody), read_chat), COMPLETION),
        Endpoint("/v1/completions", Answers(msgspec.json.Decoder(CompletionBody), read_completion), COMPLETION),
        Endpoint("/v1/responses", Answers(msgspec.json.Decoder(ResponseBody), read_response), RESPONSE),
        Endpoint("/v1/messages", Answers(msgspec.json.Decoder(MessagesBody), read_messages), MESSAGE, ANTHROPIC),
        Endpoint("/v1/messages/count_tokens", prompt("messages", "system", "tools"), MESSAGE_PROMPT, ANTHROPIC),
        Endpoint("/v1/embeddings", prompt("input", "messages"), PROMPT),
        Endpoint("/v1/moderations", prompt("input"), PROMPT),
        Endpoint("/rerank", _RERANK, PROMPT),
        Endpoint("/v1/rerank", _RERANK, PROMPT),
        Endpoint("/score", _SCORE, PROMPT),
        Endpoint("/v1/score", _SCORE, PROMPT),
        Endpoint("/tokenize", prompt("prompt", "messages", "tools"), PROMPT),
        Endpoint("/detokenize", prompt("tokens"), PROMPT),
        Endpoint("/v1/audio/transcriptions", _AUDIO, PROMPT),
        Endpoint("/v1/audio/translations", _AUDIO, PROMPT),
    )
}
"""By path."""

BATCH_PATHS = tuple([path for path, endpoint in ENDPOINTS.items() if not isinstance(endpoint.reads, FormFile)])
"""Those of which a line of a batch may be."""
