"""The bytes of the fake engine's answers, of each kind of endpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

Fields = dict[str, Any]
Events = tuple[bytes, bytes, bytes]
WORD = "tok "


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """All values that determine an answer's bytes. Equal answers have equal bytes, including the id.

    path     of the endpoint
    tokens   of the answer; 0 for endpoints without generated text
    inputs   texts of the prompt, of an endpoint without generated text
    cut      the answer ends at its limit
    id       of a response that the engine keeps
    cached_tokens  of the prompt, in the engine's cache; None: it does not tell
    """

    model: str
    path: str
    tokens: int
    prompt_tokens: int
    include_usage: bool = False
    cut: bool = False
    inputs: int = 1
    id: str = ""
    cached_tokens: int | None = None

    @property
    def usage(self) -> Fields:
        total = self.prompt_tokens + self.tokens
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens, "total_tokens": total}
        details = {"cached_tokens": self.cached_tokens}
        return usage if self.cached_tokens is None else {**usage, "prompt_tokens_details": details}

    @property
    def text(self) -> str:
        return WORD * self.tokens


@lru_cache(4096)
def whole_body(answer: FakeAnswer) -> bytes:
    return msgspec.json.encode(_BODIES[answer.path](answer))


@lru_cache(1024)
def whole_stream(answer: FakeAnswer) -> bytes:
    opening, token, closing = events(answer)
    return opening + token * answer.tokens + closing


@lru_cache(4096)
def events(answer: FakeAnswer) -> Events:
    """Return a stream's opening events, the event of one token, and the closing events."""
    return _STREAMS[answer.path](answer)


# ---- completions ----------------------------------------------------------------------------------------------------


def _head(answer: FakeAnswer, kind: str) -> Fields:
    chat = answer.path == CHAT
    kind = f"chat.completion{kind}" if chat else "text_completion"
    return {"id": "chatcmpl-fake" if chat else "cmpl-fake", "object": kind, "created": 0, "model": answer.model}


def _completion(answer: FakeAnswer) -> Fields:
    text = answer.text
    content = {"message": {"role": "assistant", "content": text}} if answer.path == CHAT else {"text": text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length" if answer.cut else "stop"}
    return {**_head(answer, ""), "choices": [choice], "usage": answer.usage}


def _completion_events(answer: FakeAnswer) -> Events:
    def event(fields: Fields) -> bytes:
        return b"data: " + msgspec.json.encode({**_head(answer, ".chunk"), **fields}) + b"\n\n"

    def choice(content: Fields, finish_reason: str | None) -> bytes:
        return event({"choices": [{"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}]})

    chat = answer.path == CHAT
    opening = choice({"delta": {"role": "assistant", "content": ""}}, None) if chat else b""
    token = choice({"delta": {"content": WORD}} if chat else {"text": WORD}, None)
    closing = choice({"delta": {}} if chat else {"text": ""}, "length" if answer.cut else "stop")
    usage = event({"choices": [], "usage": answer.usage}) if answer.include_usage else b""
    return opening, token, closing + usage + b"data: [DONE]\n\n"


# ---- responses and messages -----------------------------------------------------------------------------------------


def _typed(event: Fields) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _response(answer: FakeAnswer, status: str = "") -> Fields:
    """status : "": of the end"""
    ended = "incomplete" if answer.cut else "completed"
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": answer.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }
    return {
        "id": answer.id,
        "object": "response",
        "created_at": 0,
        "status": status or ended,
        "model": answer.model,
        "output": [] if status else [_item(answer, answer.text, "completed")],
        "usage": None if status else usage,
        "incomplete_details": {"reason": "max_output_tokens"} if answer.cut and not status else None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _item(answer: FakeAnswer, text: str, status: str) -> Fields:
    content = [{"type": "output_text", "text": text, "annotations": []}] if text else []
    return {"id": "msg-fake", "type": "message", "role": "assistant", "status": status, "content": content}


def _response_events(answer: FakeAnswer) -> Events:
    at: Fields = {"item_id": "msg-fake", "output_index": 0, "content_index": 0}
    numbers = iter(range(4))

    def event(kind: str, number: int | None = None, **fields: Any) -> bytes:
        return _typed({"type": kind, **fields, "sequence_number": next(numbers) if number is None else number})

    last = 4 + answer.tokens
    part = {"type": "output_text", "text": "", "annotations": []}
    opening = [
        event("response.created", response=_response(answer, "in_progress")),
        event("response.in_progress", response=_response(answer, "in_progress")),
        event("response.output_item.added", output_index=0, item=_item(answer, "", "in_progress")),
        event("response.content_part.added", **at, part=part),
    ]
    end = "response.incomplete" if answer.cut else "response.completed"
    closing = [
        event("response.output_text.done", last, **at, text=answer.text, logprobs=[]),
        event("response.output_item.done", last + 1, output_index=0, item=_item(answer, answer.text, "completed")),
        event(end, last + 2, response=_response(answer)),
    ]
    token = event("response.output_text.delta", 4, **at, delta=WORD, logprobs=[])
    return b"".join(opening), token, b"".join(closing)


def _message(answer: FakeAnswer) -> Fields:
    return {
        "id": "msg-fake",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [{"type": "text", "text": answer.text}],
        "stop_reason": "max_tokens" if answer.cut else "end_turn",
        "stop_sequence": None,
        "usage": _message_usage(answer, answer.tokens),
    }


def _message_usage(answer: FakeAnswer, output_tokens: int) -> Fields:
    """Anthropic counts the tokens of its cache apart from the others of the prompt."""
    cached = answer.cached_tokens
    usage = {"input_tokens": answer.prompt_tokens - (cached or 0), "output_tokens": output_tokens}
    return usage if cached is None else {**usage, "cache_read_input_tokens": cached}


def _message_events(answer: FakeAnswer) -> Events:
    begun = {**_message(answer), "content": [], "stop_reason": None}
    begun["usage"] = _message_usage(answer, 0)
    opening = _typed({"type": "message_start", "message": begun})
    opening += _typed({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    token = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": WORD}}
    stop = {"stop_reason": "max_tokens" if answer.cut else "end_turn", "stop_sequence": None}
    closing = _typed({"type": "content_block_stop", "index": 0})
    closing += _typed({"type": "message_delta", "delta": stop, "usage": {"output_tokens": answer.tokens}})
    return opening, _typed(token), closing + _typed({"type": "message_stop"})


# ---- endpoints without generated text -------------------------------------------------------------------------------


def _listed(answer: FakeAnswer, item: Fields) -> Fields:
    usage = {"prompt_tokens": answer.prompt_tokens, "total_tokens": answer.prompt_tokens}
    data = [{"index": index, **item} for index in range(answer.inputs)]
    return {"id": "fake", "object": "list", "created": 0, "model": answer.model, "data": data, "usage": usage}


def _embeddings(answer: FakeAnswer) -> Fields:
    return _listed(answer, {"object": "embedding", "embedding": [0.5, -0.5]})


def _scores(answer: FakeAnswer) -> Fields:
    return _listed(answer, {"object": "score", "score": 0.5})


def _ranks(answer: FakeAnswer) -> Fields:
    results = [{"index": index, "relevance_score": 0.5} for index in range(answer.inputs)]
    return {"id": "fake", "model": answer.model, "results": results, "usage": {"total_tokens": answer.prompt_tokens}}


def _moderations(answer: FakeAnswer) -> Fields:
    result = {"flagged": False, "categories": {}, "category_scores": {}}
    return {"id": "fake", "model": answer.model, "results": [result] * answer.inputs}


def _tokens(answer: FakeAnswer) -> Fields:
    return {"count": answer.prompt_tokens, "max_model_len": 4096, "tokens": list(range(answer.prompt_tokens))}


CHAT, PLAIN, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
_STREAMS: dict[str, Callable[[FakeAnswer], Events]] = {
    CHAT: _completion_events,
    PLAIN: _completion_events,
    RESPONSES: _response_events,
    MESSAGES: _message_events,
}
_BODIES: dict[str, Callable[[FakeAnswer], Fields]] = {
    CHAT: _completion,
    PLAIN: _completion,
    RESPONSES: _response,
    MESSAGES: _message,
    "/v1/messages/count_tokens": lambda answer: {"input_tokens": answer.prompt_tokens},
    "/v1/embeddings": _embeddings,
    "/v1/score": _scores,
    "/score": _scores,
    "/v1/rerank": _ranks,
    "/rerank": _ranks,
    "/v1/moderations": _moderations,
    "/tokenize": _tokens,
    "/detokenize": lambda answer: {"prompt": WORD * answer.prompt_tokens},
    "/v1/audio/transcriptions": lambda answer: {"text": "a word", "usage": {"type": "duration", "seconds": 1}},
    "/v1/audio/translations": lambda answer: {"text": "a word"},
}
GENERATING = frozenset(_STREAMS)
PATHS = frozenset(_BODIES)
