"""Counting tokens in a stream while it passes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.wire.event_stream import HELD_BYTES_MAX, ToolsFilter, Usage, UsageFilter, data_of, usage_of

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
def test_only_the_usage_event_is_removed_however_the_stream_is_cut(cuts: list[int]) -> None:
    assert feed(STREAM, cuts, strip=True) == (FIRST + SECOND + DONE, 7)


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_a_client_that_asked_for_usage_gets_every_byte(cuts: list[int]) -> None:
    assert feed(STREAM, cuts, strip=False) == (STREAM, 7)


TOOL = b'data: {"choices":[{"delta":{"tool_calls":[{"id":"a","function":{"name":"f"}}]}}]}\n\n'
FAULT = b'data: {"error":{"message":"x","code":500}}\n\n'


@given(
    st.lists(st.sampled_from([FIRST, SECOND, TOOL, USAGE, FAULT, DONE, b": ping\n\n", FIRST[:9]]), max_size=12),
    st.sampled_from([UsageFilter, ToolsFilter]),
    st.booleans(),
)
def test_what_passes_unread_is_what_feeding_would_have_given(
    chunks: list[bytes], kind: type[UsageFilter], strip: bool
) -> None:
    fed, other = kind(strip=strip), kind(strip=strip)
    for chunk in chunks:
        if fed.over or fed.failed is not None:
            break
        passes = other.passes(chunk)
        told = fed.feed(chunk)
        assert told == (chunk if passes else other.feed(chunk))
        assert (fed.events, fed.called, fed.over, fed.failed) == (other.events, other.called, other.over, other.failed)


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_carriage_returns_are_kept(cuts: list[int]) -> None:
    data = STREAM.replace(b"\n\n", b"\r\n\r\n")
    assert feed(data, cuts, strip=True)[0] == (FIRST + SECOND + DONE).replace(b"\n\n", b"\r\n\r\n")


def test_without_usage_events_are_counted() -> None:
    assert feed(b'data: {"choices":[{}]}\n\n' * 4 + DONE, [], strip=True)[1] == 4


def test_an_unfinished_event_is_sent_at_the_end() -> None:
    assert feed(FIRST + b"data: {", [], strip=True)[0] == FIRST + b"data: {"


def test_the_counts_of_an_unstreamed_answer_are_read_from_its_usage() -> None:
    usage = usage_of(b'{"choices":[{"x":1}],"usage":{"completion_tokens":12,"prompt_tokens":3,"total_tokens":15}}')
    assert usage == Usage(prompt_tokens=3, completion_tokens=12)
    assert usage_of(b'{"choices":[]}') == Usage(None, None)


def test_the_count_without_usage_does_not_depend_on_how_the_stream_is_cut() -> None:
    data = FIRST + SECOND + FIRST + DONE
    assert feed(data, [], strip=True)[1] == feed(data, list(range(len(data))), strip=True)[1] == 3


def test_the_usage_event_is_recognised_with_other_fields_and_without_a_last_empty_line() -> None:
    named = b": ping\nevent: usage\nid: 7\n" + USAGE
    assert feed(FIRST + named + DONE, [], strip=True) == (FIRST + DONE, 7)
    assert feed(FIRST + USAGE.rstrip(), [], strip=True) == (FIRST, 7)


def test_a_count_that_is_no_number_is_ignored() -> None:
    assert usage_of(b'{"choices":[],"usage":{"completion_tokens":-1}}') == Usage()
    assert usage_of(b'{"choices":[],"usage":{"completion_tokens":null}}') == Usage()


def test_the_prompts_tokens_are_known_once_the_usage_has_passed() -> None:
    usage = UsageFilter(strip=True)
    usage.feed(FIRST + SECOND)
    assert usage.prompt_tokens is None
    usage.feed(USAGE)
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 7)


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b"{}", b'{"choices":3}', b'{"choices":[', b"[" * 100_000])
def test_what_is_no_completion_has_no_usage(body: bytes) -> None:
    assert usage_of(body) is None


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_a_stream_has_ended_once_a_finish_reason_or_done_has_come(cuts: list[int]) -> None:
    for data, ended in (
        (b"", False),
        (FIRST + SECOND, False),
        (FIRST + b'data: {"choices":[{"delta":{"content":"data: [DONE]"}}]}\n\n', False),
        (FIRST + END[:20], False),
        (FIRST + END, True),
        (FIRST + END.rstrip(), True),
        (FIRST + DONE, True),
        (FIRST + b"data:[DONE]", True),
    ):
        places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        usage = UsageFilter(strip=True)
        for start, end in itertools.pairwise(places):
            usage.feed(data[start:end])
        assert usage.ended == ended, data


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_a_stream_of_several_answers_has_ended_once_each_has_a_finish_reason(cuts: list[int]) -> None:
    ends = [END.replace(b'{"delta"', b'{"index":%d,"delta"' % index) for index in range(3)]
    both = b'data: {"choices":[{"index":1,"finish_reason":"stop"},{"finish_reason":"length","index":2}]}\n\n'
    for data, ended in (
        (ends[0], False),
        (ends[0] + ends[2], False),
        (ends[0] + ends[0] + ends[0], False),
        (ends[1] + FIRST + ends[2] + ends[0], True),
        (ends[0] + both, True),
        (ends[0] + both.rstrip(), True),
        (ends[0] + both[:-9], False),
        (ends[0] + b'data: {"finish_reason": "stop"\n\n', False),
        (ends[0] + DONE, True),
    ):
        places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        usage = UsageFilter(strip=True, choices=3)
        for start, end in itertools.pairwise(places):
            usage.feed(data[start:end])
        assert usage.ended == ended, data


# ---- what the removed event carries besides: the engine's fingerprint, its times ----

END = b'data: {"choices":[{"delta":{"content":"}"},"finish_reason":"stop"}]}\n\n'
SIGNED_USAGE = USAGE.replace(b'"usage"', b'"system_fingerprint":"vllm-\\u00e9 }","usage"')
SIGNED_END = END.replace(b"}]}\n", b'}],"system_fingerprint":"vllm-\\u00e9 }"}\n')


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_the_last_event_gets_the_fingerprint_of_the_removed_usage(cuts: list[int]) -> None:
    assert feed(FIRST + END + SIGNED_USAGE + DONE, cuts, strip=True) == (FIRST + SIGNED_END + DONE, 7)


def test_the_last_event_gets_the_times_that_llama_cpp_writes_last() -> None:
    times = b',"timings":{"predicted_n":7,"predicted_ms":5.6}}\n'
    timed_usage, timed_end = SIGNED_USAGE.replace(b"}\n", times), SIGNED_END.replace(b"}\n", times)
    assert feed(FIRST + END + timed_usage + DONE, [], strip=True) == (FIRST + timed_end + DONE, 7)
    assert feed(FIRST + SIGNED_END + timed_usage + DONE, [], strip=True) == (FIRST + timed_end + DONE, 7)


@pytest.mark.parametrize(
    ("data", "passed"),
    [
        (END + USAGE + DONE, END + DONE),  # no fingerprint to restore
        (SIGNED_END + SIGNED_USAGE + DONE, SIGNED_END + DONE),  # the last event has one
        (END + b": ping\n\n" + SIGNED_USAGE, END + b": ping\n\n"),  # another event follows
        (END + END + SIGNED_USAGE, END + SIGNED_END),
        (END + USAGE.replace(b'"usage"', b'"system_fingerprint":null,"usage"'), END),
        (END + b"data: {", END + b"data: {"),
        (END, END),
        (END.rstrip(), END.rstrip()),
    ],
)
def test_without_a_fingerprint_to_restore_nothing_changes(data: bytes, passed: bytes) -> None:
    for cuts in ([], list(range(len(data)))):
        assert feed(data, cuts, strip=True)[0] == passed


def test_an_event_is_held_back_for_at_most_one_other_and_only_if_needed() -> None:
    usage = UsageFilter(strip=True)
    assert (usage.feed(FIRST + END), usage.feed(DONE), usage.flush()) == (FIRST, END + DONE, b"")
    assert (usage.feed(END), usage.release(), usage.flush()) == (b"", END, b"")
    assert UsageFilter(strip=False).feed(END) == END
    assert UsageFilter(strip=True, choices=2).feed(END) == END


def test_an_answer_cut_at_a_limit_is_recognised_by_its_last_event() -> None:
    usage = UsageFilter(strip=True)
    usage.feed(END)
    assert not usage.cut
    usage.feed(END.replace(b"stop", b"length"))
    assert usage.cut


# ---- ends of lines ----

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(ENDS, ENDS, st.booleans()), min_size=1, max_size=8))
def test_events_pass_as_they_come_whatever_ends_their_lines(ends: list[tuple[bytes, bytes, bool]]) -> None:
    usage, fed, passed = UsageFilter(strip=False), b"", b""
    for line_end, empty_end, has_comment in ends:
        event = (b": x" + line_end) * has_comment + FIRST.rstrip(b"\n") + line_end + empty_end
        if (line_end + empty_end) == b"\r\n":  # one end of a line: no event is complete
            event = event + b"\n"
        fed += event
        passed += usage.feed(event)
        if not fed.endswith(b"\n\r"):  # which may be half of an empty line
            assert passed == fed
    assert passed + usage.flush() == fed


@given(st.lists(st.integers(0, 10_000), max_size=40), ENDS)
def test_only_the_usage_event_is_removed_whatever_ends_lines(cuts: list[int], end: bytes) -> None:
    def ended(data: bytes) -> bytes:
        return data.replace(b"\n", end)

    bom = b"\xef\xbb\xbf"
    assert feed(bom + ended(STREAM), cuts, strip=True) == (bom + ended(FIRST + SECOND + DONE), 7)
    assert feed(bom + ended(USAGE + DONE), cuts, strip=True)[1] == 7
    usage = UsageFilter(strip=True)
    usage.feed(ended(FIRST + DONE))
    assert (usage.ended, usage.output_tokens) == (True, 1)


def test_the_data_of_an_event_is_found_behind_a_byte_order_mark() -> None:
    assert data_of(b"\xef\xbb\xbfdata: 1\rdata:2\r\n\r\n") == b" 12"


@pytest.mark.parametrize("apart", [True, False], ids=["in two reads", "in one read"])
def test_an_error_in_a_field_of_its_own_is_an_error(apart: bool) -> None:
    """llama.cpp's servers of 2025 write `error: {...}` where others write `data: {"error": {...}}`."""
    text = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    told = b'error: {"code":500,"message":"Compute error.","type":"server_error"}\n\n'
    reader = UsageFilter(strip=True)
    pieces = [text, told] if apart else [text + text + told]
    assert b"".join([reader.feed(text), *[reader.feed(piece) for piece in pieces]]).endswith(told)
    assert reader.failed is not None
    assert (reader.failed.kind, reader.failed.message) == ("engine", "Compute error.")
    assert not reader.ended


def test_a_clients_error_in_a_field_of_its_own_is_the_clients() -> None:
    reader = UsageFilter(strip=True)
    said = b'error: {"code":400,"message":"the request exceeds the context","type":"invalid_request_error"}\n\n'
    assert reader.feed(said) == b""
    assert reader.failed is not None
    assert reader.failed.kind == "client"


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b" x"),
        (b"data: x\r\n\r\n", b" x"),
        (b"data: x\r\r", b" x"),
        (b"data: x\ny", b" x"),
        (b"data: a\n: c\ndata: b\n\n", b" a b"),
        (b"event: e\ndata: x\n\n", b" x"),
        (b"data:", b""),
        (b": c\n\n", b""),
    ],
)
def test_the_data_of_an_event_is_that_of_its_data_lines(event: bytes, data: bytes) -> None:
    assert data_of(event) == data


def test_nothing_passes_before_content_but_all_of_it_with_content() -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    before = [b": hello\n\n", b"\n", b"data:\n\n", role, b'event: ping\ndata: {"type": "ping"}\n\n']
    usage = UsageFilter(strip=False)
    assert [usage.feed(event) for event in before] == [b""] * 5
    assert usage.feed(FIRST) == b"".join(before) + FIRST
    assert usage.feed(role) == role


def test_what_is_held_back_is_bounded() -> None:
    usage = UsageFilter(strip=False)
    fed = b"".join([usage.feed(b": %b\n\n" % (b"x" * 1000)) for _ in range(200)])
    assert not fed, "comments may be left out"
    assert HELD_BYTES_MAX - 2000 < len(usage.feed(FIRST)) < HELD_BYTES_MAX + 2000
    opening = b'data: {"choices":[],"x":"%b"}\n\n' % (b"x" * 1000)
    usage = UsageFilter(strip=False)
    assert b"".join([usage.feed(opening) for _ in range(200)]) == opening * 200


def test_only_what_shows_that_the_engine_works_ends_a_silence() -> None:
    silent = (b": x\n\n", b"data:\n\n", b"event: ping\ndata: {}\n\n", b'data: {"type":"keepalive"}\n\n', b": half")
    heard = (SECOND, USAGE, b"data: {", b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n')
    for prefix in (b"", FIRST):
        for events, stalled in ((silent, True), (heard, False)):
            for event in events:
                usage = UsageFilter(strip=True)
                usage.feed(prefix)
                usage.feed(event)
                assert usage.stalled == stalled, (prefix, event)
