"""Readers of streams whose events have a type."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.engines.timed.answer import FakeAnswer, whole_stream
from llmserve.wire.event_stream import PARTIAL_BYTES_MAX
from llmserve.wire.typed_events import EventReader, MessageReader, ResponseReader

READERS = {"/v1/responses": ResponseReader, "/v1/messages": MessageReader}


def stream(path: str, *, cut: bool = False) -> bytes:
    return whole_stream(FakeAnswer("m", path, 5, 7, cut=cut, id="resp-1"))


@given(path=st.sampled_from(sorted(READERS)), cuts=st.lists(st.integers(0, 3000)), crlf=st.booleans())
def test_any_pieces_give_the_same_bytes_and_counts(path: str, cuts: list[int], crlf: bool) -> None:
    data = stream(path).replace(b"\n", b"\r\n") if crlf else stream(path)
    reader, places = READERS[path](), sorted({0, *[min(cut, len(data)) for cut in cuts], len(data)})
    passed = b""
    for start, end in pairwise(places):
        passed += reader.feed(data[start:end])
        assert not passed or passed.endswith((b"\n\n", b"\r\n\r\n"))
    assert reader.ended
    assert passed + reader.flush() == data
    assert (reader.output_tokens, reader.prompt_tokens, reader.cut) == (5, 7, False)
    assert reader.response_id == ("resp-1" if path == "/v1/responses" else "")


@pytest.mark.parametrize("path", READERS)
def test_tokens_are_counted_before_the_engine_tells_them(path: str) -> None:
    reader = READERS[path]()
    reader.feed(stream(path)[: -len(stream(path)) // 4])
    assert 3 <= reader.output_tokens <= 5


@pytest.mark.parametrize("path", READERS)
def test_an_answer_at_its_limit_is_cut(path: str) -> None:
    reader = READERS[path]()
    reader.feed(stream(path, cut=True))
    assert (reader.cut, reader.ended) == (True, True)


@pytest.mark.parametrize("path", READERS)
def test_an_error_fails_a_stream_and_nothing_passes_behind_it(path: str) -> None:
    reader, data = READERS[path](), stream(path)
    error = b'event: error\ndata: {"type": "error", "error": {"message": "no"}}\n\n'
    half = data[: data.index(b"\n\n", len(data) // 2) + 2]
    assert reader.feed(half + error + data[len(half) :]) == half + error
    assert reader.failed is not None
    assert reader.failed.message == "no"
    assert not reader.ended


def test_a_last_event_without_its_empty_line_is_read_too() -> None:
    reader, data = MessageReader(), stream("/v1/messages").removesuffix(b"\n\n")
    passed = reader.feed(data)
    assert reader.ended
    assert passed + reader.flush() == data


def test_generated_text_ends_nothing() -> None:
    reader = ResponseReader()
    event = {"type": "response.output_text.delta", "delta": '"type":"response.completed"'}
    reader.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert not reader.ended


def test_a_very_large_event_passes_in_parts_and_still_ends_the_stream() -> None:
    event = {"type": "response.completed", "response": {"id": "r", "output": "x" * (2 * PARTIAL_BYTES_MAX)}}
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    reader = ResponseReader()
    half = len(data) // 2 + PARTIAL_BYTES_MAX // 4
    assert reader.feed(data[:half]) == data[:half]
    assert reader.in_parts
    assert reader.feed(data[half:]) == data[half:]
    assert reader.ended


def test_counts_without_sense_are_unknown() -> None:
    reader = MessageReader()
    reader.feed(b'data: {"type":"message_start","message":{"usage":{"input_tokens":-3}}}\n\n')
    assert reader.prompt_tokens is None


def test_other_streams_have_no_counts_and_end_when_they_end() -> None:
    reader = EventReader()
    assert reader.feed(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert (reader.ended, reader.output_tokens, reader.flush()) == (True, 0, b"data: b")
