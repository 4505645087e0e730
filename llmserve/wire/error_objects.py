"""What an engine's error says, in any of the forms that engines use, and what follows from it.

Engines, and gateways in front of them, report errors under a status of their own, but also within an answer of status
200: as the whole body, or as an event of a stream. The object is OpenAI's (`{"error": {...}}`), a string instead,
Anthropic's (`"type": "error"`), older vLLM's (`"object": "error"`), FastAPI's (`{"detail": ...}`) or a response that
`failed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from typing import Literal, NamedTuple

import msgspec

from llmserve.wire.lenient_json import count_of, read, text_of

ErrorKind = Literal["client", "busy", "model", "key", "missing", "engine"]
"""client   the request is at fault, and no engine would answer it
busy     the engine takes no more requests now
model    the engine does not have the model
key      the engine refuses this server's key
missing  something is not there: the model, or what the client has named
engine   the engine has failed
"""

ERROR_BYTES_MAX = 64 << 10
BUSY_STATUSES = (429, 503, 529)
MILLISECONDS = re.compile(rb"\d{1,12}(?:\.\d*)?")
KEY_STATUSES = (401, 403, 407)  # they speak of the key that this server sends, never of the client's
_EMPTY = (b"", b"null", b"[]", b"{}", b'""', b"false")
_WORDS: tuple[tuple[ErrorKind, re.Pattern[str]], ...] = (
    ("model", re.compile("model(?:isnot|not|doesnot)|nosuchmodel|unknownmodel")),
    ("key", re.compile("authenticat|unauthori[sz]ed|permission|apikey|forbidden|accessdenied")),
    ("busy", re.compile("ratelimit|toomanyrequests|overload|unavailable|capacity|quota|throttl|exhausted|queuefull")),
)
_CLIENT_WORDS = re.compile(
    "badrequest|invalid(?:request|prompt|param|value|argument|type|input|image|json|body|function|tool)"
    "|contextlength|unprocessable|validation|contentpolicy|contentfilter|toolarge|unsupported|notfound"
)
_NO_LETTER = re.compile("[^a-z0-9]")


class ErrorObject(msgspec.Struct, frozen=True):
    """status : that it speaks of, or that follows from its words.  by_words : the kind does"""

    kind: ErrorKind
    status: int
    message: str = ""
    by_words: bool = False


class Verdict(NamedTuple):
    """What follows from an error. fault, refused : as in RequestEnded; neither: it is the client's own error"""

    fault: bool
    refused: bool


class _Inner(msgspec.Struct):
    type: str = ""
    message: str = ""
    code: msgspec.Raw = msgspec.Raw(b"")
    status: msgspec.Raw = msgspec.Raw(b"")


class _Failed(msgspec.Struct):
    status: str = ""
    error: _Inner | None = None


class _Told(_Inner):
    object: str = ""
    error: msgspec.Raw = msgspec.Raw(b"")
    errors: msgspec.Raw = msgspec.Raw(b"")
    detail: msgspec.Raw = msgspec.Raw(b"")
    response: _Failed | None = None
    # what answers hold
    choices: msgspec.Raw = msgspec.Raw(b"")
    data: msgspec.Raw = msgspec.Raw(b"")
    output: msgspec.Raw = msgspec.Raw(b"")
    content: msgspec.Raw = msgspec.Raw(b"")
    results: msgspec.Raw = msgspec.Raw(b"")
    text: msgspec.Raw = msgspec.Raw(b"")

    @property
    def holds_something(self) -> bool:
        held = (self.choices, self.data, self.output, self.content, self.results, self.text)
        return any(bytes(raw) not in _EMPTY for raw in held)


def may_be_error(body: bytes) -> bool:
    """Whether a whole answer must be looked at. Generated text never matches: its quotes are escaped."""
    if len(body) > ERROR_BYTES_MAX:
        return False
    return body.find(b'"error') >= 0 or body.find(b'"detail"') >= 0 or body.find(b'"code"') >= 0


def is_error_body(data: bytes) -> bool:
    """Whether clients of OpenAI's or Anthropic's find the error in this object."""
    told = read(_Told, data)
    return told is not None and bytes(told.error).startswith(b"{")


def error_in(data: bytes, *, partial: bool = False) -> ErrorObject | None:
    """The error that an object is; None: it is none, or an answer beside which an error is told.

    partial : the object is an event of a stream, where an error counts whatever else the event holds
    """
    told = read(_Told, data)
    if told is None:
        return None
    error, detail = bytes(told.error), bytes(told.detail)
    if told.response is not None and (told.type == "response.failed" or told.response.status == "failed"):
        return _object_of(told.response.error or _Inner())
    if told.holds_something and not (partial and error not in _EMPTY):
        return None
    if error not in _EMPTY:
        inner = read(_Inner, error)
        return _object_of(inner if inner is not None else _Inner(message=text_of(error) or ""), told)
    if told.type == "error" or told.object == "error" or bytes(told.errors) not in _EMPTY:
        return _object_of(told)
    if detail not in _EMPTY:  # a list of what FastAPI finds wrong in a request, or a text
        if detail.startswith(b"["):
            return ErrorObject("client", 422, "the request is not valid")
        return _object_of(_Inner(message=text_of(detail) or ""), told)
    if told.message and (_number(told.code) or _number(told.status)):
        return _object_of(told)
    return None


def _object_of(inner: _Inner, outer: _Inner | None = None) -> ErrorObject:
    """The error by what it says itself, or else by what is said beside it."""
    for told in (inner, outer) if outer is not None else (inner,):
        words = [_NO_LETTER.sub("", word.lower()) for word in (told.type, _text(told.code), _text(told.status))]
        number = _number(told.code) or _number(told.status)
        for kind, pattern in _WORDS:
            if any(pattern.search(word) for word in words):
                status = {"model": 404, "key": 401, "busy": 429}[kind]
                return ErrorObject(kind, number or status, inner.message, by_words=True)
        if number:
            return ErrorObject(kind_of_status(number), number, inner.message)
        if any(_CLIENT_WORDS.search(word) for word in words):
            return ErrorObject("client", 400, inner.message, by_words=True)
    return ErrorObject("engine", 502, inner.message)


def _text(raw: msgspec.Raw) -> str:
    return text_of(bytes(raw)) or ""


def _number(raw: msgspec.Raw) -> int:
    """A status of an error; 0: it is none."""
    number = count_of(bytes(raw)) or 0
    return number if 400 <= number <= 599 else 0


def retry_after_s(text: str, unix_s: float) -> float:
    """The seconds of a Retry-After, which is a number or a date; 0 for what is neither, or has passed."""
    try:
        return max(0.0, float(text)) if text.strip()[:1].isdigit() else parsedate_to_datetime(text).timestamp() - unix_s
    except (ValueError, TypeError, OverflowError):
        return 0.0


def asked_rest_s(retry_after: str | None, headers: Iterable[tuple[bytes, bytes]], unix_s: float) -> float | None:
    """For how long an answer asks not to be asked again; None: it does not. OpenAI's `retry-after-ms` is more exact.

    headers : further ones of the answer, with lower-case names
    """
    for name, value in headers:
        if name == b"retry-after-ms" and MILLISECONDS.fullmatch(value.strip()):
            return float(value) / 1e3
    return None if retry_after is None else retry_after_s(retry_after, unix_s)


def kind_of_status(status: int) -> ErrorKind:
    if status in BUSY_STATUSES:
        return "busy"
    if status in KEY_STATUSES:
        return "key"
    if status == 404:
        return "missing"
    return "engine" if status >= 500 or status == 408 else "client"  # 408: the engine got no whole request


def judge(status: int, error: ErrorObject | None, *, names_model: bool) -> Verdict:
    """What follows from an error. status : of the answer.  names_model : what is missing can only be the model

    What the object says goes before the status: a client's error under 500 is the client's.
    """
    kind = kind_of_status(status) if status >= 400 else "engine"
    if error is not None:
        if status < 400 or (kind in ("client", "missing") and error.kind in ("busy", "model")):
            kind, status = error.kind, error.status
        elif kind == "engine" and error.kind == "client" and error.by_words:
            kind = "client"
    if kind == "missing":
        kind = "model" if names_model else "client"
    if kind == "client":
        return Verdict(fault=False, refused=False)
    return Verdict(fault=kind in ("engine", "key") or status >= 500, refused=kind != "engine")
