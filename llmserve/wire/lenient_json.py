"""Reads JSON of engines: strictly and fast where it is well formed, else only the fields that are wanted.

Engines write NaN, half surrogates, raw control characters, bytes before and after the object, counts as strings:
Python's own `json` writes and reads most of these. What nobody here needs to understand must cost nobody an answer. So
when the fast decoder refuses some bytes, a scanner finds the members that the type has, and skips everything between
them without judging it. It counts brackets instead of calling itself, so that no nesting is too deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

SCANNED_BYTES_MAX = 128 << 10  # a few ms, at worst 0.2 s; of more only the beginning and the end are looked at
END_BYTES = 4 << 10  # of each, where names and counts are
COUNT_BOUND = 1 << 31  # no count of tokens is as large

_OPENING = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*([\[{])")
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'  # any bytes between two quotes, also raw control characters
_PLAIN = rb'[^"\[\]{}]++|' + _STRING
_FLAT = rb"[\[{](?:" + _PLAIN + rb")*+[\]}]"
_LOW = rb"[\[{](?:" + _PLAIN + rb"|" + _FLAT + rb")*+[\]}]"  # skipped as a whole, to save turns of the loop
_MEMBER = re.compile(rb"[\[\]{}:,]|" + _STRING + rb'|"', re.S)  # the last: of a string without an end
_NESTED = re.compile(rb"(?:" + _PLAIN + rb"|" + _LOW + rb")*+([\[\]{}])", re.S)
_NUMBER = re.compile(rb'[ \t\r\n]*+("?+)[ \t]*+(\d{1,400}(?:\.\d{0,400})?(?:[eE]\+?\d{1,3})?)[ \t]*+\1[ \t\r\n]*+')
_ABSENT: Any = object()
BOOLS = {b"true": True, b"false": False}

Struct = TypeVar("Struct", bound=msgspec.Struct)
Reading = Callable[[bytes], Any]
"""Reads the bytes of one value; _ABSENT when they are no such value."""
Finding = Callable[[bytes, dict[str, Reading]], dict[str, Any] | None]


def read(kind: type[Struct], data: bytes, scanned_bytes_max: int = SCANNED_BYTES_MAX) -> Struct | None:
    """The object in `data`, with the members that make sense; None: it is none, breaks off, or lacks a required member.

    kind : a struct of bool, int, str, Raw, other structs, lists of them, and None. An int is a count up to 2^31 - 1.
    Raises nothing.
    """
    try:
        decoded: Struct = _decoder(kind).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = _struct(kind, _found if len(data) <= scanned_bytes_max else _found_in_ends)(data)
        return value if isinstance(value, kind) else None
    return decoded


@cache
def _decoder(kind: type[Struct]) -> msgspec.json.Decoder[Struct]:
    return msgspec.json.Decoder(kind)


# ---- values ---------------------------------------------------------------------------------------------------------


def count_of(raw: bytes) -> int | None:
    """A count in any spelling: 12, 12.0, 1.2e1 or one of these in quotes. None: no count, or an absurd one."""
    number = _NUMBER.fullmatch(raw)
    if number is None:
        return None
    value = float(number[2])
    return int(value) if value < COUNT_BOUND else None


def text_of(raw: bytes) -> str | None:
    """The text of a string, each half surrogate as a question mark; None: no string."""
    try:
        text = json.loads(raw.decode(errors="replace"), strict=False)
    except (ValueError, RecursionError):
        return None
    return text.encode(errors="replace").decode() if isinstance(text, str) else None


def members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The members of an object as they come, the last with the name "" and no bytes once the object has ended.

    Of a list the items, likewise; they have no names. Nothing, if it is neither.
    """
    opening = _OPENING.match(data)
    if opening is None:
        return
    place = begun = opening.end()
    depth, name, text, is_object = 1, "", b"", opening[1] == b"{"
    while (found := _MEMBER.search(data, place) if depth == 1 else _NESTED.match(data, place)) is not None:
        place, mark = found.end(), found[0][-1:]
        if mark in b"[{":
            depth += 1
        elif mark in b"]}":
            depth -= 1
        elif found[0] == b'"':
            return
        elif mark == b'"':
            text = found[0]
        elif mark == b":" and is_object:
            name, text, begun = text_of(text) or "", b"", place
        if depth == 0 or (depth == 1 and mark == b","):
            if value := data[begun : found.start()].strip():
                yield name, value
            name, begun = "", place
        if depth == 0:
            yield "", b""
            return


# ---- readings of types ----------------------------------------------------------------------------------------------


@cache
def _struct(kind: type[msgspec.Struct], find: Finding) -> Reading:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    readings = {name: _reading(inspect.type_info(field.type)) for name, field in fields.items()}
    required = {name for name, field in fields.items() if field.required}

    def read_object(data: bytes) -> Any:
        opening = _OPENING.match(data)
        if opening is None or opening[1] != b"{":
            return _ABSENT
        found = find(data, readings)
        if found is None or not required <= found.keys():
            return _ABSENT
        return kind(**{fields[name].name: value for name, value in found.items()})

    return read_object


def _found(data: bytes, readings: dict[str, Reading]) -> dict[str, Any] | None:
    """The members of an object that make sense; of those with one name the last. None: the object has no end."""
    found: dict[str, Any] = {}
    for name, raw in members(data):
        if not raw:
            return found
        if (reading := readings.get(name)) is not None:
            found.pop(name, None)
            if (value := reading(raw)) is not _ABSENT:
                found[name] = value
    return None


def _found_in_ends(data: bytes, readings: dict[str, Reading]) -> dict[str, Any] | None:
    """The same of a large object: members within its first and last bytes, and empty lists for those named between."""
    if not data.endswith((b"}", b"}\n", b"}\r\n")):
        return None
    found = {}
    for name, raw in members(data[:END_BYTES]):
        if name in readings and (value := readings[name](raw)) is not _ABSENT:
            found[name] = value
    for name in readings.keys() - found.keys():
        reading, named = readings[name], re.compile(rb'"' + re.escape(name.encode()) + rb'"[ \t\r\n]*:')
        value = _ABSENT
        for match in named.finditer(data, len(data) - END_BYTES):
            for _, raw in members(b"[" + data[match.end() :]):
                value = reading(raw)
                break
        if value is _ABSENT and named.search(data) is not None:
            value = reading(b"[]")
        if value is not _ABSENT:
            found[name] = value
    return found


def _reading(kind: inspect.Type) -> Reading:
    if isinstance(kind, inspect.UnionType):
        readings = [_reading(one) for one in kind.types]
        return lambda raw: _first(readings, raw)
    if isinstance(kind, inspect.NoneType):
        return lambda raw: None if raw == b"null" else _ABSENT
    if isinstance(kind, inspect.BoolType):
        return lambda raw: BOOLS.get(raw, _ABSENT)
    if isinstance(kind, inspect.IntType):
        return _or_absent(count_of)
    if isinstance(kind, inspect.StrType):
        return _or_absent(text_of)
    if isinstance(kind, inspect.StructType):
        return lambda raw: _struct(kind.cls, _found)(raw)
    if isinstance(kind, inspect.ListType):
        return _items(_reading(kind.item_type))
    assert isinstance(kind, inspect.RawType), f"no reading of {kind}"
    return msgspec.Raw


def _first(readings: list[Reading], raw: bytes) -> Any:
    return next((value for reading in readings if (value := reading(raw)) is not _ABSENT), _ABSENT)


def _or_absent(reading: Callable[[bytes], Any]) -> Reading:
    def read_value(raw: bytes) -> Any:
        value = reading(raw)
        return _ABSENT if value is None else value

    return read_value


def _items(reading: Reading) -> Reading:
    """A list of the items that make sense."""

    def read_list(raw: bytes) -> Any:
        if not raw.startswith(b"["):
            return _ABSENT
        return [value for _, item in members(raw) if item and (value := reading(item)) is not _ABSENT]

    return read_list
