"""Streams with every legal spelling of the event format: what we pass, the official client's own decoder reads alike.

FUZZ_CASES=10000 python -m pytest tests/fuzz/test_event_readers.py    (300 cases by default, the same ones each time)
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given, seed, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from llmserve.wire.event_stream import UsageFilter

CASES = int(os.environ.get("FUZZ_CASES", "300"))
LINE_ENDS = ("\n", "\r\n", "\r")
TEXTS = ("a", "", "data: [DONE]", '"finish_reason": "stop"', "\\u00e9", "\u2028 \x85", '{"error": 1}', "x\\ny")
fuzzed = settings(max_examples=CASES, deadline=None, database=None)


@dataclass(frozen=True)
class Event:
    """kind : "text", "finish", "usage", "done", or "comment"; content : of a text"""

    kind: str
    content: str = ""

    @property
    def data(self) -> str:
        choices = [{"index": 0, "delta": {"content": self.content}, "finish_reason": None}]
        if self.kind == "finish":
            choices = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
        if self.kind == "usage":
            return json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 77}})
        return "[DONE]" if self.kind == "done" else json.dumps({"choices": choices})


@dataclass(frozen=True)
class Spelling:
    """How an event is written: its line end, the space after `data:`, and further lines before and behind the data."""

    line_end: str
    space: str
    before: str
    behind: str

    def of(self, event: Event) -> str:
        if event.kind == "comment":
            return f": {event.content}".replace("\n", "") + self.line_end * 2
        lines = [self.before, f"data:{self.space}{event.data}", self.behind]
        return "".join([line + self.line_end for line in lines if line]) + self.line_end


spellings = st.builds(
    Spelling,
    st.sampled_from(LINE_ENDS),
    st.sampled_from(["", " "]),
    st.sampled_from(["", "", "id: 7", ": x", "event: message", "retry: 10"]),
    st.sampled_from(["", "", "id: 8", ":"]),
)
texts = st.lists(st.builds(Event, st.sampled_from(["text", "text", "comment"]), st.sampled_from(TEXTS)), max_size=8)
answers = st.builds(
    lambda middle, usage, done: [*middle, Event("finish"), *usage, *done],
    texts,
    st.sampled_from([[], [Event("usage")]]),
    st.sampled_from([[], [Event("done")]]),
)


def decoded(data: bytes) -> list[tuple[str | None, str]]:
    return [(event.event, event.data) for event in SSEDecoder().iter_bytes(iter([data]))]


def passed(reader: UsageFilter, stream: bytes, cuts: Sequence[int]) -> bytes:
    """What passes of a stream that arrives in pieces."""
    places = sorted({0, *(cut % (len(stream) + 1) for cut in cuts), len(stream)})
    pieces = [stream[start:end] for start, end in pairwise(places)]
    return b"".join([*[reader.feed(piece) for piece in pieces], reader.flush()])


def written(events: Sequence[Event], how: Sequence[Spelling]) -> bytes:
    return "".join([how[index % len(how)].of(event) for index, event in enumerate(events)]).encode()


cut_places = st.lists(st.integers(0, 5000), max_size=12)


@seed(1)
@fuzzed
@given(answers, st.lists(spellings, min_size=1, max_size=3), cut_places)
def test_what_passes_is_what_came(events: list[Event], how: list[Spelling], cuts: list[int]) -> None:
    stream = written(events, how)
    reader = UsageFilter(strip=False)
    assert passed(reader, stream, cuts) == stream
    assert reader.ended
    if Event("usage") in events:
        assert reader.output_tokens == 77
    else:  # an estimate: events are counted by `data:`, which may also be a part of a text
        texts = sum(event.kind == "text" for event in events)
        more = sum("data:" in event.content for event in events)
        assert texts <= reader.output_tokens <= texts + more + 1


@seed(2)
@fuzzed
@given(answers, st.lists(spellings, min_size=1, max_size=3), cut_places)
def test_without_the_event_that_we_asked_for_a_client_reads_the_same(
    events: list[Event], how: list[Spelling], cuts: list[int]
) -> None:
    stream = written(events, how)
    client = decoded(passed(UsageFilter(strip=True), stream, cuts))
    assert client == [(name, data) for name, data in decoded(stream) if data != Event("usage").data]


@seed(3)
@fuzzed
@given(st.lists(st.sampled_from(["text", "comment"]), max_size=4), st.lists(spellings, min_size=1), cut_places)
def test_an_answer_without_an_end_has_not_ended(kinds: list[str], how: list[Spelling], cuts: list[int]) -> None:

    filtered = UsageFilter(strip=True)
    passed(filtered, written([Event(kind, "a") for kind in kinds], how), cuts)
    assert not filtered.ended
