"""Reads an answer's token counts, and whether the answer hit a limit, from its bytes without re-encoding.

Passing is what all readers of event streams have in common: which bytes may go to a client, and when.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

from llmserve.wire.error_objects import ErrorObject, error_in
from llmserve.wire.lenient_json import COUNT_BOUND, read
from llmserve.wire.tool_calls import CALLS_MAX, Called, calls_of_chat

EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")
EVENT_END = re.compile(rb"(?>\r\n|[\r\n])(?:\r\n|[\r\n])")  # lines end with LF, CR LF or CR, also in mixtures
FINISHED = re.compile(rb'"finish_reason"\s*:\s*"[^"]')  # generated text never matches: its quotes are escaped
CUT = re.compile(rb'"finish_reason"\s*:\s*"length"')
DONE = re.compile(rb"(?:^|[\r\n]|\xef\xbb\xbf)data: ?\[DONE\]")
BOM = b"\xef\xbb\xbf"  # a stream may begin with it
FAILED = re.compile(rb'"finish_reason"\s*:\s*"(?:error|abort)"')
ERROR_EVENT = re.compile(rb"(?<![^\r\n])event: ?error\s*(?:[\r\n]|$)")
PING = re.compile(
    rb'"type"\s*:\s*"(?:ping|keep[-_]?alive|heartbeat)"'
    rb"|(?<![^\r\n])event: ?(?:ping|keep[-_]?alive|heartbeat)\s*(?:[\r\n]|$)"
)
HOLLOW = re.compile(rb'\{\s*(?:"\w+"\s*:\s*(?:null|""|\[\]|\{\}|"assistant")\s*,?\s*)*\}')  # a delta without content
PARTIAL_BYTES_MAX = 1 << 20
HELD_BYTES_MAX = 64 << 10  # before the first content
ERROR_CHARS_MAX = 1000


Count = Annotated[int, Meta(ge=0, lt=COUNT_BOUND)]


class Usage(msgspec.Struct, frozen=True):
    """Token counts of an engine; None where the engine sends none that makes sense.

    cached_tokens : those of the prompt that the engine had in its cache
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    @staticmethod
    def sensible(prompt_tokens: int | None, completion_tokens: int | None, cached_tokens: int | None) -> Usage:
        """Counts as an engine tells them. A prompt has no more cached tokens than tokens."""
        if cached_tokens is not None and prompt_tokens is not None and cached_tokens > prompt_tokens:
            cached_tokens = None
        return Usage(prompt_tokens, completion_tokens, cached_tokens)


class PromptDetails(msgspec.Struct):
    """`prompt_tokens_details` of a completion, and `input_tokens_details` of a response."""

    cached_tokens: Count | None = None


class _CompletionUsage(msgspec.Struct):
    """`usage` of a completion. prompt_cache_hit_tokens : of DeepSeek"""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None
    prompt_cache_hit_tokens: Count | None = None


class _Timings(msgspec.Struct):
    """`timings` of llama.cpp. cache_n : tokens of the prompt that were in its cache"""

    cache_n: Count | None = None


class _Counted(msgspec.Struct, kw_only=True):
    usage: _CompletionUsage | None = None
    timings: _Timings | None = None

    @property
    def counts(self) -> Usage | None:
        """None: there is no usage."""
        usage = self.usage
        if usage is None:
            return None
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
        if cached is None:
            cached = usage.prompt_cache_hit_tokens
        if cached is None and self.timings is not None:
            cached = self.timings.cache_n
        return Usage.sensible(usage.prompt_tokens, usage.completion_tokens, cached)


class _Event(_Counted, kw_only=True):
    choices: list[msgspec.Raw] | None = None


class _Completion(_Counted, kw_only=True):
    choices: list[msgspec.Raw] | None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


class _Choices(msgspec.Struct):
    choices: list[_Choice] | None = None


class _OpeningChoice(_Choice):
    delta: msgspec.Raw = msgspec.Raw(b"")
    text: str = ""

    @property
    def has_content(self) -> bool:
        delta = bytes(self.delta)
        return bool(self.text or self.finish_reason or (delta and HOLLOW.fullmatch(delta) is None))


class _Opening(msgspec.Struct):
    choices: list[_OpeningChoice] | None = None


class _Closing(msgspec.Struct):
    """What engines write into the last event of a stream: the fingerprint (vLLM), the times (llama.cpp)."""

    system_fingerprint: msgspec.Raw = msgspec.Raw(b"")
    timings: msgspec.Raw = msgspec.Raw(b"")


CLOSING = (("system_fingerprint", b'"'), ("timings", b"{"))
"""The fields of _Closing, and how a value begins that is worth keeping."""


def usage_of(body: bytes) -> Usage | None:
    """Return the `usage` of a whole answer, without counts that make no sense; None if it is no completion.

    A completion is an object with a list of choices, or null instead, whatever the choices are.
    """
    completion = read(_Completion, body)
    return None if completion is None else completion.counts or Usage()


def was_cut(body: bytes) -> bool:
    """Whether a whole answer, or one of its choices, ended at a token limit."""
    return CUT.search(body) is not None


def was_given_up(body: bytes) -> bool:
    """Whether the engine gave up a whole answer, or one of its choices."""
    return FAILED.search(body) is not None


class Says(Enum):
    """What an event says before the first content."""

    NOTHING = 0  # a comment, an empty event, a ping: not even that the engine works
    BEGINS = 1  # the engine works, and has generated nothing yet
    CONTENT = 2


class Passing:
    """Passes the whole events of a stream: an incomplete event waits for its rest, for at most 1 MiB.

    Nothing passes before the first event with content: until then another engine may give the answer. Nothing passes
    behind an error.

    in_parts  an event was too large to wait for its rest: nothing may be written between the pieces that pass
    began     content has come
    stalled   the last feed brought nothing that shows that the engine works. Whoever has read this sets it back
    failed    what the event of an error says; that event passes only after content.  failed_data : its data
    failed_event  the event itself, behind what was held back before it
    called    calls of tools in the answer
    events    with content, so far
    over      the marker of the end has passed: what follows is nobody's answer
    """

    called: Called = ()

    def __init__(self) -> None:
        self.in_parts = self.began = self.stalled = self.over = False
        self.failed: ErrorObject | None = None
        self.failed_data = self.failed_event = b""
        self.events = 0
        self._partial = self._held = b""
        self._only_comments = True  # in what is held back

    def take_comments(self) -> bytes:
        """What is held back, if it is only comments and the like, which may pass before the answer begins."""
        if not self._only_comments:
            return b""
        comments, self._held = self._held, b""
        return comments

    def passes(self, chunk: bytes) -> bool:
        """Whether bytes from the engine are plain events, which pass as they are. Else nothing is noted of them: `feed`
        must read them.
        """
        return self.began and not self._partial and chunk.endswith(EVENT_ENDS) and self._plain(chunk)

    def feed(self, chunk: bytes) -> bytes:
        """Add bytes from the engine. Returns the bytes that may go to the client now."""
        if self.began and not self._partial and chunk.endswith(EVENT_ENDS):  # most chunks are whole events
            return self._pass(chunk)
        data, self._partial, in_parts = whole_events(self._partial + chunk if self._partial else chunk)
        if in_parts:
            self.in_parts = self.began = True
            data, self._held = self._held + data, b""
        if not data:
            self.stalled = self._partial.lstrip().startswith(b":")
            return b""
        passed = self._pass(data) if self.began else self._open(data)
        if in_parts:
            self.stalled = False
        return passed

    def end(self) -> bytes | None:
        """Note that nothing more comes: an error at the end may lack its empty line.

        Returns the body of an engine that has not streamed, but answered with one object; None: it has streamed.
        """
        body = self._held + self._partial
        if not self.began and body.lstrip().startswith(b"{"):
            return body
        if self.failed is None and self._partial:
            self._look_for_error(self._partial)
        return None

    def _look_for_error(self, event: bytes) -> bool:
        self.failed = error_of_event(event)
        if self.failed is not None:
            self.failed_data, self.failed_event = data_of(event).strip(), self._held + event
            self.stalled = False
        return self.failed is not None

    def flush(self) -> bytes:
        """Return the rest at the end of a stream, with an event that lacks its final empty line."""
        rest, self._held, self._partial = self._held + self._partial, b"", b""
        self.began = True
        return self._pass(rest) + self.release() if rest else self.release()

    def release(self) -> bytes:
        """Return the delayed event, if any. For an interrupted stream, whose incomplete event must not pass."""
        return b""

    def _open(self, data: bytes) -> bytes:
        """Hold events back until there is one with content."""
        self.stalled = True
        place = 0
        for event in events_of(data):
            if self._look_for_error(event):
                return b""
            says = self._says(event)
            self.stalled = self.stalled and says is Says.NOTHING
            full = len(self._held) + len(event) > HELD_BYTES_MAX
            if says is Says.CONTENT or (full and says is Says.BEGINS):
                held, self._held, self.began = self._held, b"", True
                return self._pass(held + data[place:])
            place += len(event)
            if not full:
                self._held += event
                self._only_comments = self._only_comments and says is Says.NOTHING
        return b""

    def _says(self, event: bytes) -> Says:
        return Says.NOTHING if not data_of(event).strip() or is_ping(event) else Says.CONTENT

    def _pass(self, data: bytes) -> bytes:
        """Read events, and return what may pass of them."""
        return data if self._plain(data) else self._pass_each(data)

    def _plain(self, data: bytes) -> bool:
        """Whether whole events are content and nothing else. Then they are counted, and there is no more to read."""
        return False

    def _pass_each(self, data: bytes) -> bytes:
        """Read events one by one, and return what may pass of them."""
        raise NotImplementedError


def is_plain(event: bytes) -> bool:
    """Whether the event is one of choices for certain, no error, end or ping. Most events are, which costs no time."""
    if event.find(b'"choices"') < 0 or not event.startswith(b"data:"):
        return False
    return event.find(b"error") < 0 and event.find(b'"abort"') < 0


def is_ping(event: bytes) -> bool:
    may_be = event.find(b"ping") >= 0 or event.find(b"alive") >= 0 or event.find(b"heartbeat") >= 0
    return may_be and PING.search(event) is not None


def events_of(data: bytes) -> Iterator[bytes]:
    """The events one by one, each with its empty line. The data is read no further than the caller asks."""
    place = 0
    if data.find(b"\r") < 0:  # many times as fast as the expression
        while (end := data.find(b"\n\n", place) + 2) > 1:
            yield data[place:end]
            place = end
    else:
        for match in EVENT_END.finditer(data):
            yield data[place : match.end()]
            place = match.end()
    if place < len(data):
        yield data[place:]


def error_of_event(event: bytes) -> ErrorObject | None:
    """What the event of an error says; None: it is another event."""
    if is_plain(event):
        return None
    data = data_of(event)
    if (error := error_in(data, partial=True)) is not None:
        return error
    if event.find(b"event:") >= 0 and ERROR_EVENT.search(event) is not None:
        return ErrorObject("engine", 502, data.decode(errors="replace")[:ERROR_CHARS_MAX])
    return ErrorObject("engine", 502, "the engine has aborted the answer") if FAILED.search(event) else None


class UsageFilter(Passing):
    """Forwards an event stream and reads its token counts.

    strip    remove the event that carries only usage: llmserve requested the event, the client did not. vLLM writes
             its `system_fingerprint` into the last event, llama.cpp its `timings`; the last event is then the removed
             one. The filter therefore delays the event with the finish_reason until the next event, and moves these
             fields of a removed event into the delayed event, where the engine would have written them.
    choices  answers in the stream. Several answers end at different times: no event is delayed, and these fields
             are lost.

    receipt  a JSON object, added to each event with a finish_reason as its field `llmserve`; b"": none. The event of a
             single answer is delayed, too, so that the receipt has the cached tokens of the usage behind it

    All other bytes pass unchanged.
    `output_tokens` is the engine's count (`counted`), or else the number of events with choices; `prompt_tokens` and
    `cached_tokens` are the engine's counts or None; `cut`: the answer ended at a token limit; `ended`: the answer has
    reached its end.
    """

    response_id = ""  # clients ask for no completion again

    def __init__(self, *, strip: bool, choices: int = 1, receipt: bytes = b"") -> None:
        super().__init__()
        self._strip = strip
        self._receipt = receipt
        self._choices = choices
        self._delays_last = (strip or bool(receipt)) and choices == 1
        self._delayed = b""
        self._usage = Usage()
        self._finished: set[int] = set()  # choices whose finish_reason has passed
        self.cut = False

    @property
    def ended(self) -> bool:
        """Whether a finish_reason of each choice or [DONE] has come: else the engine has ended in mid-answer."""
        if self.over or DONE.search(self._partial) is not None:
            return True
        return len(self._finished | _finished_by(self._partial, self._choices)) >= self._choices

    @property
    def output_tokens(self) -> int:
        count = self._usage.completion_tokens
        return count if count is not None else self.events

    @property
    def counted(self) -> bool:
        return self._usage.completion_tokens is not None

    @property
    def prompt_tokens(self) -> int | None:
        return self._usage.prompt_tokens

    @property
    def cached_tokens(self) -> int | None:
        return self._usage.cached_tokens

    def release(self) -> bytes:
        delayed, self._delayed = self._delayed, b""
        return self._receipted(delayed) if delayed and self._receipt else delayed

    def _receipted(self, event: bytes) -> bytes:
        """The event with the receipt, and what is known of the engine's cache by now."""
        receipt = self._receipt
        if (cached := self._usage.cached_tokens) is not None:
            receipt = _with_field(receipt, b"cached_tokens", b"%d" % cached)
        return _with_field(event, b"llmserve", receipt)

    def _says(self, event: bytes) -> Says:
        if event.find(b'"choices"') < 0:
            return super()._says(event)
        chunk = read(_Opening, data_of(event))
        if chunk is None or any(choice.has_content for choice in chunk.choices or ()):
            return Says.CONTENT
        return Says.BEGINS

    def _plain(self, data: bytes) -> bool:
        # `find` takes half the time of `in`. An event without choices is an error, the end or a comment.
        events = data.count(b"data:")
        if (
            events
            and data.count(b'"choices"') == events
            and not self._delayed
            and data.find(b'"usage"') < 0
            and data.find(b"error") < 0
            and FINISHED.search(data) is None
        ):
            self.events += events
            return True
        return False

    def _pass_each(self, data: bytes) -> bytes:
        self.stalled = True
        passed = []
        for event in events_of(data):
            passed.append(self._pass_event(event))
            if self.failed is not None or self.over:
                break
        return b"".join(passed)

    def _pass_event(self, event: bytes) -> bytes:
        is_usage = is_done = False
        if not is_plain(event):
            if Passing._says(self, event) is Says.NOTHING and not self.in_parts:
                return self.release() + event
            if self._look_for_error(event):
                return self.release() + event
            is_done = DONE.search(event) is not None
            self.over = self.over or is_done
        if event.find(b'"usage"') >= 0:
            is_usage = self._is_usage(event)
        self.stalled = False
        self.events += not (is_usage or is_done)
        delayed = self.release()
        if is_usage and self._strip:
            return _closed(delayed, event) if delayed else b""
        if FINISHED.search(event) is None:
            return delayed + event
        self._finished |= _finished_by(event, self._choices)
        self.cut = self.cut or was_cut(event)
        if not self._delays_last:
            return delayed + (self._receipted(event) if self._receipt else event)
        self._delayed = event
        return delayed

    def _is_usage(self, event: bytes) -> bool:
        """Whether the event carries usage and no choice. Stores the event's counts."""
        answer = read(_Event, data_of(event))
        counts = answer.counts if answer is not None else None
        if answer is None or counts is None:
            return False
        if counts.completion_tokens is not None:
            self._usage = counts
        return not answer.choices


class ToolsFilter(UsageFilter):
    """As UsageFilter, and reads which tools the answer calls: for requests that offer tools."""

    def _plain(self, data: bytes) -> bool:
        return not _names_tool(data) and super()._plain(data)

    def _pass_each(self, data: bytes) -> bytes:
        if _names_tool(data):
            for event in events_of(data):
                if _names_tool(event) and len(self.called) < CALLS_MAX:
                    self.called += calls_of_chat(data_of(event))
        return super()._pass_each(data)


def _names_tool(data: bytes) -> bool:
    """Whether a call of a tool may begin here: its first event has the name."""
    return data.find(b'"tool_calls"') >= 0 and data.find(b'"name"') >= 0


def _finished_by(event: bytes, choices: int) -> set[int]:
    """The choices, of so many in the stream, that have a finish_reason in the event, which may lack its end."""
    if FINISHED.search(event) is None:
        return set()
    if choices == 1:
        return {0}
    answer = read(_Choices, data_of(event)) or _Choices()
    return {choice.index for choice in answer.choices or () if choice.finish_reason}


def _closed(event: bytes, usage: bytes) -> bytes:
    """Append to an event the closing fields of the usage event that it lacks."""
    closing = None
    for name, begin in CLOSING:
        key = b'"%b"' % name.encode()
        if key in usage and key not in event:
            closing = closing or read(_Closing, data_of(usage)) or _Closing()
            value = bytes(getattr(closing, name))
            if value.startswith(begin):
                event = _with_field(event, name.encode(), value)
    return event


def _with_field(event: bytes, name: bytes, value: bytes) -> bytes:
    """Append a field to an event of one JSON object."""
    end = event.rfind(b"}")
    return event if end < 0 else b'%b,"%b":%b%b' % (event[:end], name, value, event[end:])


def whole_events(data: bytes) -> tuple[bytes, bytes, bool]:
    """What may pass now, the incomplete event that waits for its rest, and whether it was too large to wait."""
    if data.endswith(EVENT_ENDS):
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
    """The data of an event, without its other lines.

    llama.cpp's servers of 2025 write the object of an error into a field `error` instead.
    """
    if event.startswith(b"data:") and event.find(b"\n\n") == event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[5:-2]
    lines = event.removeprefix(BOM).splitlines()
    data = b"".join([line[5:] for line in lines if line.startswith(b"data:")])
    if not data:
        data = b"".join([b'{"error":%b}' % line[6:] for line in lines if line.startswith(b"error:")][:1])
    return data
