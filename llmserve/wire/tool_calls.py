"""The calls of tools in an answer: which tools the client runs before it comes back, and by which ids it names them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from llmserve.wire.lenient_json import read

CALLS_MAX = 16  # of an answer that are kept
NAMES_MAX = 4  # tools of an answer that are told
CHARS_MAX = 64  # of a tool's name
ID_CHARS_MAX = 128

SOME = re.compile(rb'"tool_calls"\s*:\s*\[\s*\{')  # text never matches: its quotes are escaped


class ToolCall(NamedTuple):
    name: str
    id: str


Called = tuple[ToolCall, ...]


def names_of(called: Called) -> tuple[str, ...]:
    """The tools, each once, bounded: a model may write any name."""
    return tuple(dict.fromkeys([call.name[:CHARS_MAX] for call in called]))[:NAMES_MAX]


def ids_of(called: Called) -> tuple[str, ...]:
    return tuple([call.id for call in called if 0 < len(call.id) <= ID_CHARS_MAX])


# ---- chat completions -----------------------------------------------------------------------------------------------


class _Function(msgspec.Struct):
    name: str | None = None


class _ToolCall(msgspec.Struct):
    id: str | None = None
    function: _Function | None = None


class _Said(msgspec.Struct):
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    """delta : in a stream; message : in a whole answer"""

    delta: _Said | None = None
    message: _Said | None = None


class _Chat(msgspec.Struct):
    choices: list[_Choice] | None = None


def calls_of_chat(data: bytes) -> Called:
    """The calls that an answer, or an event of a stream, names."""
    chat = read(_Chat, data)
    said = [
        said for choice in (chat.choices if chat is not None else None) or () for said in (choice.delta, choice.message)
    ]
    calls = [call for one in said if one is not None for call in one.tool_calls or ()]
    named = [ToolCall(call.function.name, call.id or "") for call in calls if call.function and call.function.name]
    return tuple(named[:CALLS_MAX])


# ---- responses and messages -----------------------------------------------------------------------------------------


class Item(msgspec.Struct):
    """An item of a response's output. name : some tools have none. call_id : of what the client runs"""

    type: str = ""
    name: str | None = None
    call_id: str | None = None


class Block(msgspec.Struct):
    """A block of a message."""

    type: str = ""
    name: str | None = None
    id: str | None = None


def calls_of_items(items: Iterable[Item]) -> Called:
    calls = [item for item in items if item.type.endswith("_call") and item.call_id]
    return tuple(
        [ToolCall(item.name or item.type.removesuffix("_call"), item.call_id or "") for item in calls][:CALLS_MAX]
    )


def calls_of_blocks(blocks: Iterable[Block]) -> Called:
    return tuple(
        [ToolCall(block.name or "", block.id or "") for block in blocks if block.type == "tool_use"][:CALLS_MAX]
    )
