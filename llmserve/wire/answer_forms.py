"""The forms of engines' answers: where the token counts are, how a stream ends, and what an error looks like.

A form belongs to an endpoint (gateway/endpoints.py), and a call carries the form of its answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from llmserve.errors import RequestError
from llmserve.request import Call
from llmserve.wire.error_objects import ErrorObject, error_in
from llmserve.wire.event_stream import Count, ToolsFilter, Usage, UsageFilter, usage_of, was_cut, was_given_up
from llmserve.wire.lenient_json import count_of, read
from llmserve.wire.tool_calls import SOME, Called, calls_of_blocks, calls_of_chat, calls_of_items
from llmserve.wire.typed_events import EventReader, Message, MessageReader, Response, ResponseReader

TAIL_BYTES = 4 << 10  # at the end of a large answer, where its counts are
DECODED_BYTES_MAX = 1 << 20  # of an answer without generated text
PROMPT_TOKENS = re.compile(rb'"(?:prompt|input|total)_tokens"\s*:\s*(\d{1,12})\b')


class WholeAnswer(msgspec.Struct, frozen=True):
    """What is read of an answer that is not streamed. cut : it ran into a limit.  failed : the engine gave it up

    called : calls of tools
    """

    usage: Usage
    cut: bool = False
    response_id: str = ""
    failed: bool = False
    called: Called = ()


class StreamReader(Protocol):
    """Forwards a stream in whole events and reads it; see UsageFilter and Passing."""

    in_parts: bool
    began: bool
    cut: bool
    response_id: str
    stalled: bool
    events: int
    over: bool
    failed: ErrorObject | None
    failed_data: bytes
    failed_event: bytes
    called: Called

    @property
    def ended(self) -> bool: ...

    @property
    def output_tokens(self) -> int: ...

    @property
    def counted(self) -> bool: ...

    @property
    def prompt_tokens(self) -> int | None: ...

    @property
    def cached_tokens(self) -> int | None: ...

    def passes(self, chunk: bytes) -> bool: ...

    def feed(self, chunk: bytes) -> bytes: ...

    def take_comments(self) -> bytes: ...

    def end(self) -> bytes | None: ...

    def flush(self) -> bytes: ...

    def release(self) -> bytes: ...


class Silence(msgspec.Struct, frozen=True):
    """A stream in which nothing is written for a while.

    comment  what people are told, one line
    began    the client has got bytes of the engine
    reader   of the engine's stream; None: it has not begun
    counts_events  the client takes events of any type at any place, and comments are no sign of life to it
    """

    comment: bytes
    began: bool = False
    reader: StreamReader | None = None
    counts_events: bool = False


def comment_alone(silence: Silence) -> bytes:
    """A comment without an empty line behind it: there some clients see an event without data, which is no JSON.

    openai-go did so with each such line, openai-python does behind an event with an id.
    """
    return b": %b\n" % silence.comment


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the answers of an endpoint are read, and its errors written.

    name         of what an answer is, in errors
    whole        reads a body; None: the body is no such answer
    stream       makes the reader of a stream, for a call and its receipt (b"": none)
    error        the body of an error
    last_events  ends a stream by an error: of an error's body, the last bytes
    done         ends a stream behind an error of the engine
    takes_priority  whether vLLM takes the field `priority` there
    keep_alive   what is written into a silent stream; see Silence
    """

    name: str
    whole: Callable[[bytes], WholeAnswer | None]
    stream: Callable[[Call, bytes], StreamReader]
    error: Callable[[RequestError], dict[str, Any]]
    last_events: Callable[[dict[str, Any]], bytes]
    done: bytes = b""
    takes_priority: bool = False
    keep_alive: Callable[[Silence], bytes] = comment_alone


# ---- errors ---------------------------------------------------------------------------------------------------------


def openai_error(error: RequestError) -> dict[str, Any]:
    return error.body()


ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of Anthropic's errors by status; of others: 4xx invalid_request_error, 5xx api_error."""


def anthropic_error(error: RequestError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


DONE_EVENT = b"data: [DONE]\n\n"


def error_of_body(status: int, body: bytes) -> dict[str, Any]:
    """An engine's error answer as the object of an error event. OpenAI's form is kept, other bodies become messages."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        told = None
    if isinstance(told, dict) and isinstance(told.get("error"), dict):
        return told
    error = error_in(body)
    text = (error.message if error is not None else "") or body.decode(errors="replace")
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "param": None, "code": status}}


def _data_and_done(body: dict[str, Any]) -> bytes:
    """As vLLM ends a stream of completions."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n" + DONE_EVENT


def _message_error(body: dict[str, Any]) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode({"type": "error", **body}) + b"\n\n"


def _response_error(body: dict[str, Any]) -> bytes:
    """The event `error` of /v1/responses."""
    error = body.get("error") or {}
    told = {name: error.get(name) for name in ("code", "message", "param")}
    others = {name: value for name, value in body.items() if name != "error"}
    event = {"type": "error", **told, "sequence_number": 0, **others}
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


# ---- signs of life --------------------------------------------------------------------------------------------------


def _ping(silence: Silence) -> bytes:
    """Anthropic's event, which may come at any place. The comment is a line of the event, which clients skip."""
    return comment_alone(silence) + b'event: ping\ndata: {"type": "ping"}\n\n'


def _response_keep_alive(silence: Silence) -> bytes:
    """The event that OpenAI's own server sends in long silences. Clients end idle streams in which only comments come.

    Not before the engine's first event: OpenAI's clients insist on `response.created` there.
    """
    if not (silence.began or silence.counts_events):
        return comment_alone(silence)
    number = silence.reader.sequence_number if isinstance(silence.reader, ResponseReader) else 0
    data = b'{"type":"keepalive","sequence_number":%d}' % number
    return comment_alone(silence) + b"event: keepalive\ndata: %b\n\n" % data


# ---- the forms ------------------------------------------------------------------------------------------------------


def _completion(body: bytes) -> WholeAnswer | None:
    usage = usage_of(body)
    if usage is None:
        return None
    called = calls_of_chat(body) if SOME.search(body) is not None else ()
    return WholeAnswer(usage, was_cut(body), "", was_given_up(body), called)


def _completion_stream(call: Call, receipt: bytes) -> UsageFilter:
    reader = ToolsFilter if call.prompt.tools else UsageFilter
    return reader(strip=call.wire.usage_added, choices=call.bounds.choices, receipt=receipt)


def _response(body: bytes) -> WholeAnswer | None:
    answer = read(Response, body)
    if answer is None or answer.object != "response":
        return None
    usage = answer.usage.counts if answer.usage is not None else Usage()
    called = calls_of_items(answer.output or ())
    return WholeAnswer(usage, answer.cut, answer.id, answer.status == "failed", called)


def _message(body: bytes) -> WholeAnswer | None:
    answer = read(Message, body)
    if answer is None or answer.type != "message":
        return None
    usage, called = answer.usage, calls_of_blocks(answer.content or ())
    return WholeAnswer(usage.counts if usage is not None else Usage(), answer.cut, called=called)


class _PromptUsage(msgspec.Struct):
    prompt_tokens: Count | None = None
    total_tokens: Count | None = None


class _PromptAnswer(msgspec.Struct):
    """What endpoints without generated text say of the prompt's tokens, each in its way."""

    usage: _PromptUsage | None = None
    count: Count | None = None
    input_tokens: Count | None = None


def _prompt(body: bytes) -> WholeAnswer:
    """Read the answer of an endpoint without generated text: any body, perhaps with the prompt's tokens."""
    if len(body) > DECODED_BYTES_MAX:
        found = PROMPT_TOKENS.search(body, len(body) - TAIL_BYTES)
        tokens = count_of(found[1]) if found is not None else None
    else:
        answer = read(_PromptAnswer, body) or _PromptAnswer()  # also subtitles, and other text
        usage = answer.usage or _PromptUsage()
        counts = (usage.prompt_tokens, usage.total_tokens, answer.count, answer.input_tokens)
        tokens = next((count for count in counts if count is not None), None)
    return WholeAnswer(Usage(tokens, 0))


COMPLETION = AnswerForm("completion", _completion, _completion_stream, openai_error, _data_and_done, DONE_EVENT, True)
RESPONSE = AnswerForm(
    "response",
    _response,
    lambda call, receipt: ResponseReader(),
    openai_error,
    _response_error,
    takes_priority=True,
    keep_alive=_response_keep_alive,
)
MESSAGE = AnswerForm(
    "message",
    _message,
    lambda call, receipt: MessageReader(),
    anthropic_error,
    _message_error,
    keep_alive=_ping,
)
PROMPT = AnswerForm("answer", _prompt, lambda call, receipt: EventReader(), openai_error, _data_and_done, DONE_EVENT)
MESSAGE_PROMPT = AnswerForm("answer", _prompt, lambda call, receipt: EventReader(), anthropic_error, _message_error)
