"""Reading how long an answer is, and whether it was cut, on its way through, without re-encoding it."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

EVENT_END = re.compile(rb"(?<=\n)\r?\n")
CUT = re.compile(rb'"finish_reason": ?"length"')  # text never matches: its quotes are escaped
PARTIAL_BYTES_MAX = 1 << 20


class _Usage(msgspec.Struct):
    completion_tokens: Annotated[int, Meta(ge=0)] | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[msgspec.Raw] = []


def completion_tokens(body: bytes) -> int:
    """`usage.completion_tokens` of a whole answer; 0 where it is not told."""
    try:
        usage = msgspec.json.decode(body, type=_Answer).usage
    except msgspec.MsgspecError:
        return 0
    return usage.completion_tokens or 0 if usage is not None else 0


def was_cut(body: bytes) -> bool:
    """Whether the engine says of a whole answer, or of one of its choices, that it ran into a limit."""
    return CUT.search(body) is not None


class UsageFilter:
    """Passes an event stream through, keeping the count of output tokens it tells.

    strip: the event that carries nothing but usage was asked for by us, not by the client: it is left out. All other
    bytes pass unchanged. Only whole events pass, so an incomplete one waits for its rest (a megabyte at most).
    `output_tokens` is the engine's count, or the number of events that carried something where it tells none;
    `cut` says whether the answer ran into a limit.
    """

    def __init__(self, *, strip: bool) -> None:
        self._strip = strip
        self._partial = b""
        self._events = 0
        self._told: int | None = None
        self.cut = False

    @property
    def output_tokens(self) -> int:
        return self._told if self._told is not None else self._events

    def feed(self, chunk: bytes) -> bytes:
        """Bytes that may go on to the client now."""
        data = self._partial + chunk if self._partial else chunk
        self._partial = b""
        if not data.endswith((b"\n\n", b"\n\r\n")):
            cut = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
            cut = 0 if cut < 3 else cut
            if len(data) - cut <= PARTIAL_BYTES_MAX:
                data, self._partial = data[:cut], data[cut:]
        return self._pass(data)

    def flush(self) -> bytes:
        """What is left at the end of a stream that did not end with an empty line."""
        rest, self._partial = self._partial, b""
        return self._pass(rest)

    def _pass(self, data: bytes) -> bytes:
        if b'"length"' in data and was_cut(data):
            self.cut = True
        if b'"usage"' not in data:
            self._events += data.count(b"data:") - data.count(b"data: [DONE]")
            return data
        kept: list[bytes] = []
        start = 0
        for end in [*(match.end() for match in EVENT_END.finditer(data)), len(data)]:
            event = data[start:end]
            start = end
            is_usage = self._is_usage(event)
            self._events += event.count(b"data:") - event.count(b"data: [DONE]") - is_usage
            if not (is_usage and self._strip):
                kept.append(event)
        return b"".join(kept)

    def _is_usage(self, event: bytes) -> bool:
        """True for the event that carries usage and no choice; remembers its count."""
        if b'"usage"' not in event:
            return False
        data = b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
        try:
            answer = msgspec.json.decode(data, type=_Answer)
        except msgspec.MsgspecError:
            return False
        if answer.usage is None:
            return False
        if answer.usage.completion_tokens is not None:
            self._told = answer.usage.completion_tokens
        return not answer.choices
