"""The lines of an input file, and the rows of output and error files."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from msgspec import Raw

from llmserve.errors import RequestError
from llmserve.wire.json_text import BOM, NESTING_MAX, is_too_deep, readable, without_bom
from llmserve.wire.lenient_json import read
from llmserve.wire.raw_views import place_of

CUSTOM_ID_CHARS_MAX = 512


class Line(msgspec.Struct, frozen=True):
    """A request of an input file."""

    custom_id: str
    url: str
    body: Raw
    method: str = "POST"


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


LINE: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
TOKENS_BOUND = 1 << 31  # no answer has as many
EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


def other_encoding(beginning: bytes) -> str | None:
    """How a file is written that is not UTF-8, by its first bytes: Windows writes such files; None: it may be UTF-8."""
    return "UTF-16" if beginning.startswith((b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{")) else None


def read_line(data: bytes) -> Line:
    """Read what is around a request. The body is checked for its end and its nesting, and not parsed.

    A byte order mark before the line does not count. Raises msgspec.DecodeError.
    """
    data = without_bom(data)
    if is_too_deep(data):
        raise msgspec.DecodeError(f"its lists and objects are nested more than {NESTING_MAX} deep")
    try:
        return LINE.decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        same = readable(data)  # the body is an error of its own request, as it would be online
        if same == data:
            raise
        line = LINE.decode(same)
        return msgspec.structs.replace(line, body=Raw(data[place_of(line.body, same)]))


class _Id(msgspec.Struct):
    custom_id: str = ""


def line_of(data: bytes) -> Line:
    """As `read_line`, for a line that must get a result: an unreadable line has an empty body."""
    try:
        return read_line(data)
    except msgspec.DecodeError:
        found = read(_Id, data)
        return Line(found.custom_id if found is not None else "", "", Raw(b""))


def answer_tokens(body: bytes) -> float:
    """The output tokens of an answer; 0 when it does not say, or says what cannot be."""
    answer = read(_Answer, body)
    usage = answer.usage if answer is not None else None
    tokens = (usage.completion_tokens or usage.output_tokens or 0) if usage is not None else 0
    return float(tokens) if 0 <= tokens < TOKENS_BOUND else 0.0


def row_id(batch_id: str, number: int) -> str:
    """The id of the row of results of a line. number : from 0"""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def answer_row(row: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The row of a request that was answered. row : its id.  body : JSON of the answer, or any text"""
    response = {"status_code": status, "request_id": request_id, "body": _in_one_line(body)}
    return _row(row, custom_id, response, None)


_PIECE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|NaN|-?Infinity|[\r\n]+', re.DOTALL)
_LONG_NUMBER = re.compile(rb"\d{4000}")  # Python reads no number of more than 4,300 digits
_CONTROL = re.compile(rb"[\x00-\x1f]")


def _in_one_line(body: bytes) -> Raw:
    """The body as JSON of one line.

    NaN and infinities become null, control characters become escapes, and bytes that are no UTF-8 become U+FFFD. A body
    that is still no JSON becomes a string, as does a body with deeper nesting or longer numbers than clients can read.
    """
    if not body.isascii():
        body = body.decode(errors="replace").encode()
    if not is_too_deep(body) and _LONG_NUMBER.search(body) is None:
        try:
            return Raw(msgspec.json.format(body, indent=-1))
        except msgspec.DecodeError:
            text = _PIECE.sub(_piece, body.removeprefix(BOM))
            if _is_json(text):
                return Raw(text.strip())
    return Raw(msgspec.json.encode(body.decode(errors="replace")))


def _piece(found: re.Match[bytes]) -> bytes:
    text = found[0]
    if text.startswith(b'"'):
        return _CONTROL.sub(lambda control: b"\\u%04x" % control[0][0], text)
    return b" " if text[:1] in b"\r\n" else b"null"


def _is_json(text: bytes) -> bool:
    """Whether Python's reader takes the text, which is larger than msgspec's: half surrogates are JSON, too."""
    try:
        json.loads(text, parse_int=len, parse_float=len)
    except ValueError:
        return False
    return True


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
    return row.endswith(_EXPIRED_END)


_EXPIRED_END = b'"response":null,"error":' + msgspec.json.encode(EXPIRED) + b"}\n"


def number_of(row: bytes, batch_id: str) -> int:
    """The number of the line to which a row of results belongs. Raises ValueError when it is no row of the batch."""
    head, _, _ = row.partition(b'","custom_id":')
    before, _, number = head.rpartition(b"_")
    if before + b"_" != b'{"id":"' + row_id(batch_id, 0).encode()[:-1]:
        raise ValueError("a row of another batch")
    return int(number)


def is_row(row: bytes) -> bool:
    """Whether a row of results can be read."""
    try:
        json.loads(row)
    except (ValueError, RecursionError):
        return False
    return True
