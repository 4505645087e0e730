"""The lines of an input file, and the rows of output and error files."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from llmserve.errors import RequestError

CUSTOM_ID_CHARS_MAX = 512


class Line(msgspec.Struct, frozen=True):
    """One request of an input file."""

    custom_id: str
    url: str
    body: Raw
    method: str = "POST"


class _Row(msgspec.Struct):
    """The beginning of a row of results."""

    id: str


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class _Body(msgspec.Struct):
    model: str = ""


_ANSWER = msgspec.json.Decoder(_Answer)
_BODY = msgspec.json.Decoder(_Body)
LINE: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_ROW: msgspec.json.Decoder[_Row] = msgspec.json.Decoder(_Row)
EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


def read_line(data: bytes) -> Line:
    """Raises msgspec.DecodeError."""
    return LINE.decode(data)


def model_of(data: bytes) -> str:
    """The model that a line asks for; "" when it names none."""
    try:
        return _BODY.decode(read_line(data).body).model
    except msgspec.DecodeError:
        return ""


def answer_tokens(body: bytes) -> float:
    """The output tokens of an answer; 0 when it does not say."""
    try:
        usage = _ANSWER.decode(body).usage
    except msgspec.MsgspecError:
        return 0.0
    return float(usage.completion_tokens or usage.output_tokens) if usage is not None else 0.0


def row_id(batch_id: str, number: int) -> str:
    """The id of the row of results of a line. number : from 0"""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def answer_row(row: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The row of a request that was answered. row : its id.  body : JSON of the answer, or any text"""
    try:
        shown: Raw = Raw(msgspec.json.format(body, indent=-1))  # a row is one line
    except msgspec.DecodeError:
        shown = Raw(msgspec.json.encode(body.decode(errors="replace")))
    return _row(row, custom_id, {"status_code": status, "request_id": request_id, "body": shown}, None)


def refusal_row(row: str, custom_id: str, request_id: str, error: RequestError) -> bytes:
    """The row of a request that the front-end refused, in the form of an answer."""
    return answer_row(row, custom_id, error.status, request_id, msgspec.json.encode(error.body()))


def expired_row(row: str, custom_id: str) -> bytes:
    """The row of a request that was not executed within the window."""
    return _row(row, custom_id, None, EXPIRED)


def _row(row: str, custom_id: str, response: Any, error: Any) -> bytes:
    return msgspec.json.encode({"id": row, "custom_id": custom_id, "response": response, "error": error}) + b"\n"


def is_expired(row: bytes) -> bool:
    """Whether a row of results says that the request was not executed in time."""
    return not row.endswith(b'"error":null}\n')


def number_of(row: bytes) -> int:
    """The number of the line to which a row of results belongs."""
    head, _, _ = row.partition(b'","custom_id":')
    return int(head.rpartition(b"_")[2])
