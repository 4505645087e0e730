"""Reads an answer's token counts, and whether the answer hit a limit, from its bytes without re-encoding."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from llmserve.engines.lenient_json import COUNT_BOUND, read

EVENT_END = re.compile(rb"(?>\r\n|[\r\n])(?:\r\n|[\r\n])")  # lines end with LF, CR LF or CR, also in mixtures
FINISHED = re.compile(rb'"finish_reason"\s*:\s*"[^"]')  # generated text never matches: its quotes are escaped
CUT = re.compile(rb'"finish_reason"\s*:\s*"length"')
DONE = re.compile(rb"(?:^|[\r\n]|\xef\xbb\xbf)data: ?\[DONE\]")
BOM = b"\xef\xbb\xbf"  # a stream may begin with it
PARTIAL_BYTES_MAX = 1 << 20


Count = Annotated[int, Meta(ge=0, lt=COUNT_BOUND)]


class Usage(msgspec.Struct, frozen=True):
    """Token counts of an engine; None where the engine sends none that makes sense."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _Event(msgspec.Struct):
    usage: Usage | None = None
    choices: list[msgspec.Raw] | None = None


class _Completion(msgspec.Struct):
    choices: list[msgspec.Raw] | None
    usage: Usage | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


class _Choices(msgspec.Struct):
    choices: list[_Choice] | None = None


class _Signed(msgspec.Struct):
    system_fingerprint: msgspec.Raw = msgspec.Raw(b"")


def usage_of(body: bytes) -> Usage | None:
    """Return the `usage` of a whole answer, without counts that make no sense; None if it is no completion.

    A completion is an object with a list of choices, or null instead, whatever the choices are.
    """
    completion = read(_Completion, body)
    return None if completion is None else completion.usage or Usage()


def was_cut(body: bytes) -> bool:
    """Whether a whole answer, or one of its choices, ended at a token limit."""
    return CUT.search(body) is not None


class UsageFilter:
    """Forwards an event stream and reads its token counts.

    strip    remove the event that carries only usage: llmserve requested the event, the client did not. vLLM writes
             its `system_fingerprint` into the last event, which is then the removed one. The filter therefore delays
             the event with the finish_reason until the next event, and moves the fingerprint of a removed event into
             the delayed event, where vLLM would have written the fingerprint.
    choices  answers in the stream. Several answers end at different times: no event is delayed, and the fingerprint
             is lost.

    receipt  a JSON object, added to each event with a finish_reason as its field `llmserve`; b"": none

    All other bytes pass unchanged. Only whole events pass: an incomplete event waits for its rest (at most 1 MiB).
    `output_tokens` is the engine's count, or else the number of events with content; `prompt_tokens` is the engine's
    count or None; `cut`: the answer ended at a token limit; `ended`: the answer has reached its end. `in_parts`: an
    event was too large to wait for its rest, so that nothing may be written between the pieces that pass.
    """

    response_id = ""  # clients ask for no completion again

    def __init__(self, *, strip: bool, choices: int = 1, receipt: bytes = b"") -> None:
        self._strip = strip
        self._receipt = receipt
        self.in_parts = False
        self._choices = choices
        self._delays_last = strip and choices == 1
        self._delayed = b""
        self._partial = b""
        self._events = 0
        self._usage = Usage()
        self._finished: set[int] = set()  # choices whose finish_reason has passed
        self._done = False  # [DONE] has passed
        self.cut = False

    @property
    def ended(self) -> bool:
        """Whether a finish_reason of each choice or [DONE] has come: else the engine has ended in mid-answer."""
        if self._done or DONE.search(self._partial) is not None:
            return True
        return len(self._finished | _finished_by(self._partial, self._choices)) >= self._choices

    @property
    def output_tokens(self) -> int:
        count = self._usage.completion_tokens
        return count if count is not None else self._events

    @property
    def prompt_tokens(self) -> int | None:
        return self._usage.prompt_tokens

    def feed(self, chunk: bytes) -> bytes:
        """Add bytes from the engine. Returns the bytes that may go to the client now."""
        data, self._partial, in_parts = whole_events(self._partial + chunk if self._partial else chunk)
        self.in_parts = self.in_parts or in_parts
        return self._pass(data)

    def flush(self) -> bytes:
        """Return the rest at the end of a stream: the delayed event, and an event without a final empty line."""
        rest, self._partial = self._partial, b""
        return self._pass(rest) + self.release()

    def release(self) -> bytes:
        """Return the delayed event, if any. For an interrupted stream, whose incomplete event must not pass."""
        delayed, self._delayed = self._delayed, b""
        return delayed

    def _pass(self, data: bytes) -> bytes:
        # `find` takes half the time of `in`.
        if not self._delayed and data.find(b'"usage"') < 0 and FINISHED.search(data) is None:
            self._events += data.count(b"data:")
            if data.find(b"[DONE]") >= 0:
                self._note_done(data)
            return data
        ends = [*(match.end() for match in EVENT_END.finditer(data)), len(data)]
        return b"".join([self._pass_event(data[start:end]) for start, end in pairwise([0, *ends]) if start < end])

    def _pass_event(self, event: bytes) -> bytes:
        is_usage = self._is_usage(event)
        self._events += event.count(b"data:") - is_usage
        if b"[DONE]" in event:
            self._note_done(event)
        delayed = self.release()
        if is_usage and self._strip:
            return _signed(delayed, event) if delayed else b""
        if FINISHED.search(event) is None:
            return delayed + event
        self._finished |= _finished_by(event, self._choices)
        self.cut = self.cut or was_cut(event)
        if self._receipt:
            event = _with_field(event, b"llmserve", self._receipt)
        if not self._delays_last:
            return delayed + event
        self._delayed = event
        return delayed

    def _note_done(self, events: bytes) -> None:
        """Note [DONE], unless it is a part of a text: it ends the answer, and is no event with content."""
        done = len(DONE.findall(events))
        self._events -= done
        self._done = self._done or done > 0

    def _is_usage(self, event: bytes) -> bool:
        """Whether the event carries usage and no choice. Stores the event's counts."""
        if b'"usage"' not in event:
            return False
        answer = read(_Event, data_of(event))
        if answer is None or answer.usage is None:
            return False
        if answer.usage.completion_tokens is not None:
            self._usage = answer.usage
        return not answer.choices


def _finished_by(event: bytes, choices: int) -> set[int]:
    """The choices, of so many in the stream, that have a finish_reason in the event, which may lack its end."""
    if FINISHED.search(event) is None:
        return set()
    if choices == 1:
        return {0}
    answer = read(_Choices, data_of(event)) or _Choices()
    return {choice.index for choice in answer.choices or () if choice.finish_reason}


def _signed(event: bytes, usage: bytes) -> bytes:
    """Append the usage event's system_fingerprint to an event, unless the event has one or the usage event has none."""
    if b'"system_fingerprint"' not in usage or b'"system_fingerprint"' in event:
        return event
    signed = read(_Signed, data_of(usage)) or _Signed()
    fingerprint = bytes(signed.system_fingerprint)
    if not fingerprint.startswith(b'"'):
        return event
    return _with_field(event, b"system_fingerprint", fingerprint)


def _with_field(event: bytes, name: bytes, value: bytes) -> bytes:
    """Append a field to an event of one JSON object."""
    end = event.rfind(b"}")
    return event if end < 0 else b'%b,"%b":%b%b' % (event[:end], name, value, event[end:])


def whole_events(data: bytes) -> tuple[bytes, bytes, bool]:
    """What may pass now, the incomplete event that waits for its rest, and whether it was too large to wait."""
    if data.endswith((b"\n\n", b"\n\r\n", b"\r\r")):
        return data, b"", False
    end = events_end(data)
    if len(data) - end <= PARTIAL_BYTES_MAX:
        return data[:end], data[end:], False
    return data, b"", True


def events_end(data: bytes) -> int:
    """Where the last whole event ends; 0 without one. A CR at the end of the data may be the half of a line's end."""
    end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3, data.rfind(b"\r\r") + 2)
    mixed = data.rfind(b"\n\r", 0, len(data) - 1) + 2
    if mixed > end and data[mixed] != ord("\n"):
        end = mixed
    elif data.startswith(b"\n", end):  # of a CR LF that ends the empty line behind a CR
        end += 1
    return 0 if end < 3 else end


def data_of(event: bytes) -> bytes:
    """The data of an event, without its other lines."""
    return b"".join(line[5:] for line in event.removeprefix(BOM).splitlines() if line.startswith(b"data:"))
