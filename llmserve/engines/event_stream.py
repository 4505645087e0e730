"""Reading how long an answer is, and whether it was cut, on its way through, without re-encoding it."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

EVENT_END = re.compile(rb"(?<=\n)\r?\n")
FINISHED = re.compile(rb'"finish_reason": ?"')  # text never matches: its quotes are escaped
CUT = re.compile(rb'"finish_reason": ?"length"')
PARTIAL_BYTES_MAX = 1 << 20


class Usage(msgspec.Struct, frozen=True):
    """Tokens that an engine has counted; None where it does not tell."""

    prompt_tokens: Annotated[int, Meta(ge=0)] | None = None
    completion_tokens: Annotated[int, Meta(ge=0)] | None = None


class _Answer(msgspec.Struct):
    usage: Usage | None = None
    choices: list[msgspec.Raw] = []


class _Signed(msgspec.Struct):
    system_fingerprint: msgspec.Raw = msgspec.Raw(b"")


def usage_of(body: bytes) -> Usage:
    """`usage` of a whole answer."""
    try:
        return msgspec.json.decode(body, type=_Answer).usage or Usage()
    except msgspec.MsgspecError:
        return Usage()


def was_cut(body: bytes) -> bool:
    """Whether the engine says of a whole answer, or of one of its choices, that it ran into a limit."""
    return CUT.search(body) is not None


class UsageFilter:
    """Passes an event stream through, keeping the counts of tokens that it tells.

    strip: the event that carries nothing but usage was asked for by us, not by the client: it is left out. vLLM signs
    an answer's last event with its `system_fingerprint`, which is then that one. So the event with an answer's
    finish_reason is held until the next; if that is left out, its signature goes where vLLM would have written it.
    choices: answers in the stream. Of several each has its own end, at its own time: nothing is held, and their
    signature is lost.

    All other bytes pass unchanged. Only whole events pass: an incomplete one waits for its rest (a megabyte at most).
    `output_tokens` is the engine's count, or the number of events that carried something where it tells none;
    `prompt_tokens` is its count or None; `cut` says whether the answer ran into a limit.
    """

    def __init__(self, *, strip: bool, choices: int = 1) -> None:
        self._strip = strip
        self._holds = strip and choices == 1
        self._held = b""
        self._partial = b""
        self._events = 0
        self._told = Usage()
        self.cut = False

    @property
    def output_tokens(self) -> int:
        told = self._told.completion_tokens
        return told if told is not None else self._events

    @property
    def prompt_tokens(self) -> int | None:
        return self._told.prompt_tokens

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
        """What is left at the end of a stream: the event held, and one that did not end with an empty line."""
        rest, self._partial = self._partial, b""
        return self._pass(rest) + self.release()

    def release(self) -> bytes:
        """The event held, if any; for a stream that broke off, of which nothing incomplete is to pass."""
        held, self._held = self._held, b""
        return held

    def _pass(self, data: bytes) -> bytes:
        if not self._held and b'"usage"' not in data and FINISHED.search(data) is None:
            self._events += data.count(b"data:") - data.count(b"data: [DONE]")
            return data
        ends = [*(match.end() for match in EVENT_END.finditer(data)), len(data)]
        return b"".join([self._pass_event(data[start:end]) for start, end in pairwise([0, *ends]) if start < end])

    def _pass_event(self, event: bytes) -> bytes:
        is_usage = self._is_usage(event)
        self._events += event.count(b"data:") - event.count(b"data: [DONE]") - is_usage
        held = self.release()
        if is_usage and self._strip:
            return _signed(held, event) if held else b""
        if FINISHED.search(event) is None:
            return held + event
        self.cut = self.cut or was_cut(event)
        if not self._holds:
            return held + event
        self._held = event
        return held

    def _is_usage(self, event: bytes) -> bool:
        """True for the event that carries usage and no choice; remembers its counts."""
        if b'"usage"' not in event:
            return False
        try:
            answer = msgspec.json.decode(_data(event), type=_Answer)
        except msgspec.MsgspecError:
            return False
        if answer.usage is None:
            return False
        if answer.usage.completion_tokens is not None:
            self._told = answer.usage
        return not answer.choices


def _signed(event: bytes, usage: bytes) -> bytes:
    """The event with the usage event's system_fingerprint as its last field, unless it has one or that has none."""
    end = event.rfind(b"}")
    if b'"system_fingerprint"' not in usage or b'"system_fingerprint"' in event or end < 0:
        return event
    fingerprint = bytes(msgspec.json.decode(_data(usage), type=_Signed).system_fingerprint)
    if not fingerprint.startswith(b'"'):
        return event
    return event[:end] + b',"system_fingerprint":' + fingerprint + event[end:]


def _data(event: bytes) -> bytes:
    return b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
