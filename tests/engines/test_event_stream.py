"""Counting tokens in a stream on its way through."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from llmserve.engines.event_stream import UsageFilter, completion_tokens

FIRST = b'data: {"choices":[{"delta":{"content":"a \\"usage\\" \\n\\n b"}}]}\n\n'
SECOND = b'data: {"choices":[{"delta":{}}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = FIRST + SECOND + USAGE + DONE


def feed(data: bytes, cuts: list[int], *, strip: bool) -> tuple[bytes, int]:
    usage = UsageFilter(strip=strip)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    out = b"".join(usage.feed(data[start:end]) for start, end in itertools.pairwise(places))
    return out + usage.flush(), usage.output_tokens


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_only_the_usage_event_is_taken_out_however_the_stream_is_cut(cuts: list[int]) -> None:
    assert feed(STREAM, cuts, strip=True) == (FIRST + SECOND + DONE, 7)


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_a_client_that_asked_for_usage_gets_every_byte(cuts: list[int]) -> None:
    assert feed(STREAM, cuts, strip=False) == (STREAM, 7)


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_carriage_returns_are_kept(cuts: list[int]) -> None:
    data = STREAM.replace(b"\n\n", b"\r\n\r\n")
    assert feed(data, cuts, strip=True)[0] == (FIRST + SECOND + DONE).replace(b"\n\n", b"\r\n\r\n")


def test_without_a_told_count_events_are_counted() -> None:
    assert feed(b'data: {"choices":[{}]}\n\n' * 4 + DONE, [], strip=True)[1] == 4


def test_an_unfinished_event_goes_out_at_the_end() -> None:
    assert feed(FIRST + b"data: {", [], strip=True)[0] == FIRST + b"data: {"


def test_the_count_of_a_whole_answer_is_read_from_its_usage() -> None:
    assert completion_tokens(b'{"choices":[{"x":1}],"usage":{"completion_tokens":12}}') == 12
    assert completion_tokens(b'{"choices":[]}') == 0
    assert completion_tokens(b"not json") == 0


def test_the_count_without_usage_does_not_depend_on_how_the_stream_is_cut() -> None:
    data = FIRST + SECOND + FIRST + DONE
    assert feed(data, [], strip=True)[1] == feed(data, list(range(len(data))), strip=True)[1] == 3


def test_the_usage_event_is_known_among_other_fields_and_without_a_last_empty_line() -> None:
    named = b": ping\nevent: usage\nid: 7\n" + USAGE
    assert feed(FIRST + named + DONE, [], strip=True) == (FIRST + DONE, 7)
    assert feed(FIRST + USAGE.rstrip(), [], strip=True) == (FIRST, 7)


def test_a_count_that_is_no_count_is_not_believed() -> None:
    assert completion_tokens(b'{"choices":[],"usage":{"completion_tokens":-1}}') == 0
    assert completion_tokens(b'{"choices":[],"usage":{"completion_tokens":null}}') == 0
