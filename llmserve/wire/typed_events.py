"""Reads streams whose events have a type: /v1/responses and /v1/messages. All bytes pass unchanged.

Only whole events pass, so that a comment of the front-end never lands inside one. Of most events only the type is
counted; the few that carry an id, token counts or the end are decoded.
"""

from __future__ import annotations

import re

import msgspec

from llmserve.wire.event_stream import Count, Passing, PromptDetails, Says, Usage, data_of, events_of
from llmserve.wire.lenient_json import count_of, read
from llmserve.wire.tool_calls import CALLS_MAX, Block, Item, calls_of_blocks, calls_of_items

SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})')


class ResponseUsage(msgspec.Struct):
    """`usage` of /v1/responses."""

    input_tokens: Count | None = None
    output_tokens: Count | None = None
    input_tokens_details: PromptDetails | None = None

    @property
    def counts(self) -> Usage:
        details = self.input_tokens_details
        return Usage.sensible(self.input_tokens, self.output_tokens, details.cached_tokens if details else None)


class MessageUsage(msgspec.Struct):
    """`usage` of /v1/messages, where `input_tokens` leaves out the tokens of the prompt cache."""

    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None

    @property
    def counts(self) -> Usage:
        parts = (self.input_tokens, self.cache_read_input_tokens, self.cache_creation_input_tokens)
        prompt = None if self.input_tokens is None else sum([part or 0 for part in parts])
        return Usage.sensible(prompt, self.output_tokens, self.cache_read_input_tokens)


class EventReader(Passing):
    """Passes any event stream; it knows no counts, and a stream that ends is complete. See UsageFilter for the rest.

    response_id : id by which the engine knows the answer; "" for none, or until it has come
    """

    marks = re.compile(rb"(?!)")  # types of the events that are decoded; text never matches: its quotes are escaped
    ends = re.compile(rb"")  # of these the last ones of a stream
    token = b""  # in the type of an event with content

    opens = re.compile(rb"(?!)")  # events in which nothing has been generated yet

    def __init__(self) -> None:
        super().__init__()
        self.cut = False
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.response_id = ""
        self._output_tokens: int | None = None

    @property
    def ended(self) -> bool:
        return self.over or self.ends.search(self._partial) is not None

    @property
    def output_tokens(self) -> int:
        return self.events if self._output_tokens is None else self._output_tokens

    @property
    def counted(self) -> bool:
        return self._output_tokens is not None

    def _says(self, event: bytes) -> Says:
        says = super()._says(event)
        return Says.BEGINS if says is Says.CONTENT and self.opens.search(event) is not None else says

    def _plain(self, data: bytes) -> bool:
        tokens = data.count(self.token) if self.token else 0
        if tokens and self.marks.search(data) is None and data.find(b'"error"') < 0:
            self.events += tokens
            return True
        return False

    def _pass_each(self, data: bytes) -> bytes:
        self.events += data.count(self.token) if self.token else 0
        self.stalled = True
        place = 0
        for event in events_of(data):
            place += len(event)
            self._look(event)
            if self.failed is not None or self.over:
                break
        return data[:place]

    def _look(self, event: bytes) -> None:
        self.stalled = self.stalled and Passing._says(self, event) is Says.NOTHING
        if self.token and event.count(self.token):
            return
        if not self._look_for_error(event) and self.marks.search(event) is not None:
            self._read(data_of(event))
            self.over = self.ends.search(event) is not None

    def _read(self, event: bytes) -> None:
        """Read an event whose type is one of `marks`. It may be a part of a very large one."""

    def _count(self, usage: Usage) -> None:
        self._count_prompt(usage)
        if usage.completion_tokens is not None:
            self._output_tokens = usage.completion_tokens

    def _count_prompt(self, usage: Usage) -> None:
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.cached_tokens is not None:
            self.cached_tokens = usage.cached_tokens


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class Response(msgspec.Struct):
    """An answer of /v1/responses."""

    id: str = ""
    object: str = ""
    status: str = ""
    usage: ResponseUsage | None = None
    incomplete_details: _Incomplete | None = None
    output: list[Item] | None = None

    @property
    def cut(self) -> bool:
        return self.incomplete_details is not None and self.incomplete_details.reason == "max_output_tokens"


class _ResponseEvent(msgspec.Struct):
    type: str = ""
    response: Response | None = None


class ResponseReader(EventReader):
    """Reads a stream of /v1/responses. sequence_number : of the last event that has passed"""

    marks = re.compile(rb'"type"\s*:\s*"response\.(?:created|completed|incomplete)"')
    ends = re.compile(rb'"type"\s*:\s*"response\.(?:completed|incomplete)"')
    opens = re.compile(rb'"type"\s*:\s*"response\.(?:created|queued|in_progress)"')
    token = b'.delta"'
    _last = b""  # bytes that have passed

    def feed(self, chunk: bytes) -> bytes:
        if passed := super().feed(chunk):
            self._last = passed
        return passed

    @property
    def sequence_number(self) -> int:
        numbers = SEQUENCE_NUMBER.findall(self._last)
        return count_of(numbers[-1]) or 0 if numbers else 0

    def _read(self, event: bytes) -> None:
        told = read(_ResponseEvent, event) or _ResponseEvent()
        response = told.response
        if response is not None:
            self.response_id = response.id
            self.cut = self.cut or response.cut
            self.called = calls_of_items(response.output or ())
            if response.usage is not None:
                self._count(response.usage.counts)


class Message(msgspec.Struct):
    """An answer of /v1/messages."""

    type: str = ""
    stop_reason: str | None = None
    usage: MessageUsage | None = None
    content: list[Block] | None = None

    @property
    def cut(self) -> bool:
        return self.stop_reason == "max_tokens"


class _MessageDelta(msgspec.Struct):
    stop_reason: str | None = None


class _MessageEvent(msgspec.Struct):
    type: str = ""
    message: Message | None = None
    delta: _MessageDelta | None = None
    usage: MessageUsage | None = None
    content_block: Block | None = None


class MessageReader(EventReader):
    """Reads a stream of /v1/messages."""

    marks = re.compile(rb'"type"\s*:\s*"(?:message_(?:start|delta|stop)|tool_use)"')
    ends = re.compile(rb'"type"\s*:\s*"message_stop"')
    opens = re.compile(rb'"type"\s*:\s*"(?:message_start"|content_block_start"(?!.*"tool_use"))', re.S)
    token = b'"content_block_delta"'

    def _read(self, event: bytes) -> None:
        told = read(_MessageEvent, event) or _MessageEvent()
        if told.type == "message_start" and told.message is not None and told.message.usage is not None:
            self._count_prompt(told.message.usage.counts)
        elif told.type == "message_delta":
            self.cut = self.cut or (told.delta is not None and told.delta.stop_reason == "max_tokens")
            if told.usage is not None:
                self._count(told.usage.counts)
        elif told.content_block is not None and len(self.called) < CALLS_MAX:
            self.called += calls_of_blocks((told.content_block,))
