"""JSON as others send it: how deep it is nested, what other writers spell differently, and where it is wrong.

msgspec reads strictly, and how deep its decoder goes depends on the caller's stack. So nesting is counted here, over
bytes. What Python's json writes beyond JSON is read in a copy of the same length: the text itself stays as it came.
"""

from __future__ import annotations

import json
import math
import re
from typing import NamedTuple

import numpy as np

NESTING_MAX = 128  # lists and objects within each other. Python's own limit is 1,000 calls, of which a caller has some
EXPLAINED_BYTES_MAX = 1 << 20  # of a longer text only the place of an error is told, and nothing is replaced
SHORT_BYTES = 512  # of a text in which counting costs less than leaving out
BLOCK_BYTES = 1 << 16  # whose brackets are looked at in one step
BOM = b"\xef\xbb\xbf"

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1

# ---- nesting -------------------------------------------------------------------------------------------------------


def is_too_deep(data: bytes) -> bool:
    """Whether lists and objects are nested more than NESTING_MAX deep. Takes any bytes, and never recurses."""
    if len(data) <= SHORT_BYTES and data.count(b"[") + data.count(b"{") <= NESTING_MAX:
        return False
    marks = data.translate(None, _NOT_STRUCTURE)
    if _opened(marks) <= NESTING_MAX:
        return False
    if b"\\" in data:  # some quotes may be escaped
        marks = structure(data)
    return not _is_flat(marks) and _depth_exceeds(marks, NESTING_MAX)


def _opened(marks: bytes) -> int:
    return marks.count(b"[") + marks.count(b"{")


def _is_flat(marks: bytes) -> bool:
    """Whether the nesting is clearly within the limit: almost every text is. A pass takes away two levels at most."""
    for passes in range(1, 9):
        marks = marks.replace(b"[]", b"").replace(b"{}", b"").replace(b'""', b"")
        if _opened(marks) <= NESTING_MAX - 2 * passes:
            return True
    return False


def _depth_exceeds(marks: bytes, most: int) -> bool:
    depth, quotes = 0, 0
    for start in range(0, len(marks), BLOCK_BYTES):
        block = np.frombuffer(marks, np.uint8, min(BLOCK_BYTES, len(marks) - start), start)
        within = quotes + np.cumsum(block == ord('"'))  # an odd number: within a string
        depths = depth + np.cumsum(np.where(within % 2, 0, _STEP[block]))
        if depths.max() > most:
            return True
        depth, quotes = int(depths[-1]), int(within[-1])
    return False


def structure(data: bytes) -> bytes:
    """The brackets of a text, and the quotes of those strings that hold brackets.

    In a run of backslashes each pair is one character. So without pairs, a backslash before a quote escapes it.
    """
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return data.translate(None, _NOT_STRUCTURE).replace(b'""', b"")


# ---- spellings -----------------------------------------------------------------------------------------------------

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_NO_NUMBER = re.compile(_STRING + rb"|NaN|-?Infinity", re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|\\u[dD][c-fC-F][0-9a-fA-F]{2}")


def without_bom(data: bytes) -> bytes:
    """The text without a byte order mark at its start, which PowerShell writes, and which few engines skip."""
    return data[len(BOM) :] if data.startswith(BOM) else data


def readable(data: bytes) -> bytes:
    """The text in a form that a strict decoder reads, of the same length, so that every place stays where it is.

    As readable_numbers, and half surrogates become U+FFFD.
    """
    data = readable_numbers(data)
    halves = half_surrogates(data) if len(data) <= EXPLAINED_BYTES_MAX else []
    if not halves:
        return data
    changed = bytearray(data)
    for half in halves:
        changed[half : half + 6] = b"\\ufffd"
    return bytes(changed)


def readable_numbers(data: bytes) -> bytes:
    """The text, of the same length, with an empty list for each NaN and infinity, which Python's json writes and reads.

    A list is no number either. A text without any, or of more than EXPLAINED_BYTES_MAX, is returned as it is.
    """
    if len(data) > EXPLAINED_BYTES_MAX or (b"NaN" not in data and b"Infinity" not in data):
        return data
    return _NO_NUMBER.sub(_no_number, data)


def _no_number(match: re.Match[bytes]) -> bytes:
    text = match[0]
    return text if text.startswith(b'"') else b"[" + b" " * (len(text) - 2) + b"]"


def half_surrogates(data: bytes) -> list[int]:
    r"""Where escapes such as \ud83d stand without their other half."""
    return [
        match.start() for match in _SURROGATE.finditer(data) if match[1] is None and _is_escape(data, match.start())
    ]


def _is_escape(data: bytes, backslash: int) -> bool:
    """Whether this backslash is not escaped itself."""
    before = backslash
    while before and data[before - 1] == ord("\\"):
        before -= 1
    return (backslash - before) % 2 == 0


# ---- counts and flags ----------------------------------------------------------------------------------------------

Scalar = int | float | str | bool | None
"""A value of any type but a list or an object: numbers and flags are spelled in many ways that engines understand."""

COUNT_MAX = 2**31 - 1  # what is larger counts as this
COUNT_CHARS_MAX = 32
TRUE, FALSE = frozenset(("true", "t", "1", "yes", "y", "on")), frozenset(("false", "f", "0", "no", "n", "off"))


def count_of(value: Scalar) -> int | None:
    """The whole number that engines read: 100, 100.0, "100", " 100.0", true. None for anything else.

    At most COUNT_MAX, and at least its negative.
    """
    if type(value) is int:
        return value if -COUNT_MAX <= value <= COUNT_MAX else COUNT_MAX if value > 0 else -COUNT_MAX
    if isinstance(value, str):
        try:
            value = float(value) if len(value) <= COUNT_CHARS_MAX and value.isascii() else math.nan
        except ValueError:
            return None
    if value is None or not (math.isfinite(value) and value == math.floor(value)):
        return None
    return int(max(-COUNT_MAX, min(COUNT_MAX, value)))


def truth_of(value: Scalar) -> bool | None:
    """The flag that engines read: true, 1, "true", "on". None for anything else."""
    if isinstance(value, str):
        text = value.strip().lower()
        return True if text in TRUE else False if text in FALSE else None
    return bool(value) if value in (0, 1) else None


# ---- errors --------------------------------------------------------------------------------------------------------

_BYTE = re.compile(r" \(byte (\d+)\)$")
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{},]', re.DOTALL)


class Fault(NamedTuple):
    """What is wrong with a text that is no JSON. path : of the field, such as messages.0.content; "" when unknown"""

    message: str
    path: str = ""


def fault_of(data: bytes, error: Exception) -> Fault:
    """Say in words why the text is no JSON, and where. error : of msgspec, or a UnicodeDecodeError of the whole text"""
    if encoding := _other_encoding(data):
        return Fault(f"the text is {encoding}; JSON is UTF-8")
    if isinstance(error, UnicodeDecodeError):
        fault = f"the byte 0x{error.object[error.start]:02x} is not UTF-8" if error.object else "not UTF-8"
        at = error.start if error.object == data else data.find(bytes(error.object)) + error.start
    elif not data.strip():
        return Fault("the text is empty")
    elif halves := half_surrogates(data[:EXPLAINED_BYTES_MAX]):
        at = halves[0]
        fault = f"{data[at : at + 6].decode()} is half of a surrogate pair"
    else:
        fault, at = _fault_at(data, error)
    path = path_at(data, at)
    return Fault(f"{fault}, {f'in `{path}`, ' if path else ''}{place_of(data, at)}", path)


def _fault_at(data: bytes, error: Exception) -> tuple[str, int]:
    """What is wrong with a text in UTF-8, and at which byte: msgspec's place may be some characters behind."""
    if len(data) <= EXPLAINED_BYTES_MAX and not is_too_deep(data):
        text = data.decode()
        try:
            json.loads(text)
        except json.JSONDecodeError as wrong:
            fault = wrong.msg.removesuffix(" at").removesuffix(" starting")
            return fault[:1].lower() + fault[1:], len(text[: wrong.pos].encode())
        except ValueError:  # an integer of thousands of digits
            pass
    place, words = _BYTE.search(str(error)), str(error).removeprefix("JSON is malformed: ")
    return (_BYTE.sub("", words), min(int(place[1]), len(data))) if place else ("the text ends too early", len(data))


def _other_encoding(data: bytes) -> str:
    """The encoding of a text that is not UTF-8, by its byte order mark or by the zeros of ASCII; "" for no such."""
    for encoding, starts in (
        ("UTF-32", (b"\xff\xfe\0\0", b"\0\0\xfe\xff", b"{\0\0\0", b"\0\0\0{")),
        ("UTF-16", (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{")),
    ):
        if data.startswith(starts):
            return encoding
    return ""


def place_of(data: bytes, at: int) -> str:
    """A byte's place in words, as editors count: in characters."""
    line_start = data.rfind(b"\n", 0, at) + 1
    line, column = data.count(b"\n", 0, at) + 1, len(data[line_start:at].decode(errors="replace")) + 1
    return f"line {line}, column {column} (byte {at})"


def path_at(data: bytes, at: int) -> str:
    """The path of the field in which a byte is, such as messages.0.content; "" when unknown."""
    if at > EXPLAINED_BYTES_MAX:
        return ""
    steps: list[bytes | int] = []
    follows_key = False  # in an object, the next string is a value
    for match in _TOKEN.finditer(data[:at]):
        token = match[0]
        if token.startswith(b'"'):
            if steps and not isinstance(steps[-1], int) and not follows_key:
                steps[-1], follows_key = token[1:-1], True
        elif token in b"[{":
            steps.append(0 if token == b"[" else b"")
            follows_key = False
        elif not steps:
            return ""
        elif token == b",":
            last = steps[-1]
            steps[-1] = last + 1 if isinstance(last, int) else b""
            follows_key = False
        else:
            steps.pop()
            follows_key = bool(steps) and not isinstance(steps[-1], int)
    names = [step.decode(errors="replace") if isinstance(step, bytes) else str(step) for step in steps]
    return ".".join([name for name in names if name])
