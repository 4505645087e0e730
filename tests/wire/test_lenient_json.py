"""Reading the JSON of engines that do not keep to its rules."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.wire.answer_forms import COMPLETION, MESSAGE, PROMPT, RESPONSE
from llmserve.wire.event_stream import Usage, UsageFilter, usage_of
from llmserve.wire.lenient_json import SCANNED_BYTES_MAX, count_of, members, read, text_of
from llmserve.wire.typed_events import MessageReader, ResponseReader

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
"""With NaN and infinities, which Python's json writes and reads."""


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # NaN is not equal to itself


@given(
    st.dictionaries(st.text(min_size=1), VALUES, max_size=6),
    st.booleans(),
    st.sampled_from([None, 1, "\t"]),
    st.binary(),
)
def test_the_members_of_an_object_are_those_that_pythons_json_reads(
    value: dict[str, Any], ascii_only: bool, indent: Any, behind: bytes
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    found = list(members(b"\xef\xbb\xbf \n" + text + behind))
    assert found.pop() == ("", b"")
    told = json.loads(text.decode(errors="replace"))
    assert same({name: json.loads(raw.decode(errors="replace")) for name, raw in found}, told) or "?" in str(found)


@given(st.lists(VALUES, max_size=6))
def test_the_items_of_a_list_are_those_that_pythons_json_reads(value: list[Any]) -> None:
    *items, end = members(json.dumps(value).encode())
    assert end == ("", b"")
    assert same([json.loads(raw) for _, raw in items], value)


@given(st.dictionaries(st.text(), VALUES, max_size=6), st.data())
def test_what_breaks_off_is_no_object(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value).encode()
    kept = text[: data.draw(st.integers(0, len(text) - 1))]
    assert ("", b"") not in list(members(kept))
    assert read(Everything, kept) is None


class Part(msgspec.Struct):
    id: str
    size: int | None = None


class Everything(msgspec.Struct):
    count: int | None = None
    name: str = "none"
    part: Part | None = None
    parts: list[Part] | None = None


@given(st.binary())
def test_no_bytes_raise(data: bytes) -> None:
    read(Everything, data)
    read(Everything, b'{"part":' + data)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("count", "name", "part", "parts"), VALUES)))
def test_whatever_an_object_has_its_good_members_are_read(value: dict[str, Any]) -> None:
    told = read(Everything, json.dumps({**value, "odd": math.nan}).encode())
    assert told is not None
    name = value.get("name")
    assert told.name == (name.encode(errors="replace").decode() if isinstance(name, str) else "none")
    count = value.get("count")
    if type(count) is int:
        assert told.count == (count if 0 <= count < 2**31 else None)


def test_items_that_make_no_sense_are_left_out() -> None:
    listed = (
        b'{"x": NaN, "parts": [null, {"id": 7}, {"size": 3}, {"id": "a", "size": "12.0"}, [], {"id": "b", "size": {}}]}'
    )
    told = read(Everything, listed)
    assert told is not None
    assert told.parts == [Part("a", 12), Part("b", None)]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *[(text, 12) for text in ("12", "12.0", '"12"', ' "12.0" ', "1.2e1", '" 12 "', "12.7", "0012")],
        *[(text, 0) for text in ("0", "0.0", '"0"')],
        *[
            (text, None)
            for text in ("-1", "NaN", "Infinity", "null", "true", '"many"', "[]", '"12', "1e400", '""', "2147483648")
        ],
        ("1" + "0" * 399, None),
        ("1" + "0" * 5_000, None),
    ],
)
def test_a_count_is_read_in_any_spelling(text: str, count: int | None) -> None:
    assert count_of(text.encode()) == count


def test_half_a_surrogate_is_a_question_mark_in_a_text() -> None:
    assert text_of(b'"a\\ud83d\x01"') == "a?\x01"
    assert text_of(b'"\xff"') == "\N{REPLACEMENT CHARACTER}"
    assert text_of(b"7") is None


# ---- answers ----

USAGE = b'"usage":{"prompt_tokens":3,"completion_tokens":7}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"logprob":-Infinity},{"logprob":NaN}],%b}',
        b'{"choices":[{"message":{"content":"\\ud83d"}}],%b}',
        b'{"choices":[{"message":{"content":"\x01\n\t"}}],%b}',
        b'{"choices":[{"message":{"content":"\xff\xfe"}}],%b}',
        b'\xef\xbb\xbf{"choices":[],%b}',
        b'  {"choices":[],%b}\n\n',
        b'{"choices":[],%b} trailing {"usage":{}}',
        b'{"choices":[],"usage":null,%b,"x":NaN}',
        b'{"choices":null,%b}',
        b'{"choices":[null,{"finish_reason":""}],%b}',
        b'{"choices":[{"x":' + b"[" * 985 + b"]" * 985 + b"}],%b}",
        b'{"choices":[{"x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}],%b}",
        b'{"object":7,"choices":[+1, 0x10, .5, nan],%b}',
        b"{%b,'odd':1,\"choices\":[]}",
        b'{"choices":[NaN,' + b'{"logprob":-1.5,"token":"}"},' * 30_000 + b'1],"id":"x",%b}\n',
    ],
    ids=range(15),
)
def test_an_answer_that_is_no_proper_json_has_its_counts(body: bytes) -> None:
    assert usage_of(body % USAGE) == Usage(3, 7)


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        (b'{"completion_tokens":"7","prompt_tokens":3.0}', Usage(3, 7)),
        (b'{"completion_tokens":-7,"prompt_tokens":3}', Usage(3, None)),
        (b'{"completion_tokens":1' + b"0" * 400 + b',"prompt_tokens":3}', Usage(3, None)),
        (b'{"completion_tokens":99999999999,"prompt_tokens":3}', Usage(3, None)),
        (b'{"completion_tokens":{},"prompt_tokens":[]}', Usage()),
        (b"null", Usage()),
        (b"[]", Usage()),
        (b'"none"', Usage()),
        (b"{}", Usage()),
    ],
)
def test_counts_that_make_no_sense_are_unknown_and_the_others_known(told: bytes, usage: Usage) -> None:
    assert usage_of(b'{"choices":[],"usage":%b}' % told) == usage


def test_other_forms_are_read_as_leniently() -> None:
    response = b'{"object":"response","id":"r\\ud83d","x":NaN,"usage":{"input_tokens":"4","output_tokens":5.0}}'
    told = RESPONSE.whole(response)
    assert told is not None
    assert (told.usage, told.response_id) == (Usage(4, 5), "r?")
    message = b'{"type":"message","stop_reason":"max_tokens","x":NaN,"usage":{"input_tokens":4,"output_tokens":"5"}}'
    told = MESSAGE.whole(message)
    assert told is not None
    assert (told.usage, told.cut) == (Usage(4, 5), True)
    told = PROMPT.whole(b'{"data":[NaN],"usage":{"total_tokens":"6"}}')
    assert told is not None
    assert told.usage == Usage(6, 0)
    long = (
        b'{"id":"r","object":"response","output":[NaN' + b',"x"' * SCANNED_BYTES_MAX + b'],"usage":{"input_tokens":4}}'
    )
    told = RESPONSE.whole(long)
    assert told is not None
    assert (told.usage, told.response_id) == (Usage(4, None), "r")


@pytest.mark.parametrize("form", [COMPLETION, RESPONSE, MESSAGE], ids=lambda form: form.name)
@pytest.mark.parametrize(
    "body", [b"", b"<html>{}</html>", b"[NaN]", b"NaN", b'{"x":NaN}', b'{"choices":[NaN', b'{"error":{"x":NaN}}']
)
def test_what_is_no_answer_stays_none(form: Any, body: bytes) -> None:
    assert form.whole(body) is None


def test_a_large_answer_is_not_looked_at_for_long() -> None:
    body = b'{"choices":[NaN' + b"[" * 5_000_000 + b"]" * 5_000_000 + b"]," + USAGE + b"}"
    small = b'{"choices":[NaN' + b"[" * 50_000 + b"]" * 50_000 + b"]," + USAGE + b"}"
    times_s = []
    for data in (small, body):
        began_s = time.process_time()
        assert usage_of(data) == Usage(3, 7)
        times_s.append(time.process_time() - began_s)
    assert times_s[1] < 2 * times_s[0], "a hundred times the bytes"


# ---- streams ----

TOKEN = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":""}]}\n\n'
LAST = b'data: {"choices":[{"delta":{},"logprobs":NaN,"finish_reason" : "length"}]}\n\n'


def test_an_empty_finish_reason_ends_nothing() -> None:
    usage = UsageFilter(strip=True)
    usage.feed(TOKEN * 3)
    assert not usage.ended
    several = UsageFilter(strip=True, choices=2)
    several.feed(b'data: {"choices":[{"index":0,"finish_reason":""},{"index":1,"finish_reason":"stop"}]}\n\n')
    assert not several.ended


def test_odd_events_pass_and_their_counts_are_read() -> None:
    usage = UsageFilter(strip=True)
    counts = b'data: {"choices":null,"usage":{"prompt_tokens":"3","completion_tokens":7.0},"x":NaN}\n\n'
    odd = b'data: {"choices":[{"delta":{"content":"\\ud83d\x01"}}], "x":Infinity} \n\ndata: nothing\n\n'
    passed = b"".join([usage.feed(event) for event in (TOKEN, odd, LAST, counts, b"data: [DONE]\n\n")]) + usage.flush()
    assert passed == TOKEN + odd + LAST + b"data: [DONE]\n\n"
    assert (usage.ended, usage.cut, usage.output_tokens, usage.prompt_tokens) == (True, True, 7, 3)


def test_odd_counts_in_a_stream_leave_the_number_of_events() -> None:
    usage = UsageFilter(strip=True)
    usage.feed(TOKEN * 3 + b'data: {"choices":[],"usage":{"completion_tokens":1' + b"0" * 400 + b"}}\n\n")
    assert usage.output_tokens == 3


def test_typed_events_are_read_as_leniently() -> None:
    response = ResponseReader()
    event = (
        b'event: response.completed\ndata: {"type" : "response.completed", "x":NaN, "response":{"id":"r","usage":%b}}'
    )
    response.feed(event % b'{"input_tokens":"4","output_tokens":5.0}' + b"\n\n")
    assert (response.ended, response.response_id, response.prompt_tokens, response.output_tokens) == (True, "r", 4, 5)
    message = MessageReader()
    event = b'data: {"type":"message_delta","x":-Infinity,"delta":{"stop_reason":"max_tokens"},"usage":%b}\n\n'
    message.feed(event % b'{"output_tokens":"5"}')
    assert (message.cut, message.output_tokens, message.ended) == (True, 5, False)
