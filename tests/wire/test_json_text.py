"""JSON as others send it: nesting is counted over bytes, odd spellings are read, and errors name their place."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.wire.json_text import (
    BLOCK_BYTES,
    NESTING_MAX,
    fault_of,
    half_surrogates,
    is_too_deep,
    path_at,
    readable,
    without_bom,
)


def nested(depth: int, within: str = "") -> bytes:
    return f'{{"a":{"[" * (depth - 1)}{within}{"]" * (depth - 1)}}}'.encode()


@pytest.mark.parametrize("depth", [1, NESTING_MAX, NESTING_MAX + 1, 980, 1_000_000])
def test_nesting_is_counted_whatever_the_callers_stack(depth: int) -> None:
    def within(calls: int) -> bool:
        return within(calls - 1) if calls else is_too_deep(nested(depth))

    assert [within(0), within(700)] == 2 * [depth > NESTING_MAX]
    assert sys.getrecursionlimit() >= 900, "otherwise the second says nothing"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 500,
        "{" * 500,
        '\\"' + "[" * 500,
        "\\\\",
        '"' * 300 + "[" * 500,
        "]" * 500 + "[" * 500,
        '\\\\"[[' * 200,
        "\u4e2d[",
    ],
)
def test_brackets_within_strings_are_no_nesting(text: str) -> None:
    data = json.dumps({"a": [text, [[text]]], "b": [{}] * 200, text: [[], text]}).encode()
    assert not is_too_deep(data)
    assert is_too_deep(data[:-1] + b',"deep":' + nested(NESTING_MAX) + b"}")


def test_closing_brackets_within_a_string_do_not_hide_the_depth() -> None:
    data = json.dumps("]" * 10_000).encode()
    assert is_too_deep(b'{"a":' + data + b',"b":' + nested(NESTING_MAX) + b"}")


@pytest.mark.parametrize("quotes", [0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 1])
def test_the_depth_goes_on_from_block_to_block(quotes: int) -> None:
    within = '"[",' * (quotes // 3) + "0"
    assert not is_too_deep(nested(NESTING_MAX, within))
    assert is_too_deep(nested(NESTING_MAX, "[0]," + within))


@given(
    st.recursive(
        st.text('"\\[]{},:n') | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\[]'), inner)
    )
)
def test_the_depth_of_any_value_is_that_of_its_lists_and_objects(value: Any) -> None:
    def depth(part: Any) -> int:
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else None
        return 0 if parts is None else 1 + max(map(depth, parts), default=0)

    levels = NESTING_MAX - depth(value)
    assert not is_too_deep(b"[" * levels + json.dumps(value).encode() + b"]" * levels)
    assert is_too_deep(b"[" * (levels + 1) + json.dumps(value).encode() + b"]" * (levels + 1)) or not depth([value])


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'{"a":NaN,"b":"NaN \\"Infinity"}', {"a": [], "b": 'NaN "Infinity'}),
        (b'{"a":[-Infinity,Infinity,1]}', {"a": [[], [], 1]}),
        (b'{"a":"x\\ud83dy","\\udc00":1}', {"a": "x\ufffdy", "\ufffd": 1}),
        (b'{"a":"\\ud83d\\ude00 \\\\ud83d"}', {"a": "\U0001f600 \\ud83d"}),
        (b'{"a":"\\ud83d\\ud83d\\ude00"}', {"a": "\ufffd\U0001f600"}),
    ],
)
def test_what_pythons_json_writes_is_read_in_a_copy_of_the_same_length(data: bytes, value: Any) -> None:
    copy = readable(data)
    assert msgspec.json.decode(copy) == value
    assert len(copy) == len(data)


def test_what_is_json_is_not_copied() -> None:
    data = b'{"a":"\\ud83d\\ude00"}'
    assert readable(data) is data
    assert without_bom(data) is data
    assert without_bom(b"\xef\xbb\xbf" + data) == data


def error_of(data: bytes) -> Exception | None:
    try:
        data.decode()
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return error
    return None


@given(st.text())
def test_an_escaped_text_has_as_many_half_surrogates_as_python_sees(text: str) -> None:
    data = json.dumps(text + "\ud83d" + text).encode()
    assert len(half_surrogates(data)) == sum("\ud800" <= character <= "\udfff" for character in json.loads(data))


@pytest.mark.parametrize(
    ("data", "words", "path"),
    [
        (b"", "the text is empty", ""),
        (b'{"a":1,\n "b":tru}', "expecting value, in `b`, line 2, column 6 (byte 13)", "b"),
        (b'{"a":[1,{"b":01}]}', "expecting ',' delimiter, in `a.1.b`, line 1, column 15", "a.1.b"),
        (
            b'{"m":[{"c":"a ] \\ud83d ["}]}',
            "\\ud83d is half of a surrogate pair, in `m.0.c`, line 1, column 17",
            "m.0.c",
        ),
        (b'{"m":[0,{"c":["x","\\udc00"]}]}', "\\udc00 is half of a surrogate pair, in `m.1.c.1`", "m.1.c.1"),
        ('{"é":"é", "b":"\\ud83dx"}'.encode(), "in `b`, line 1, column 16", "b"),
        (b'{"a":"x', "unterminated string, in `a`, line 1, column 6", "a"),
        (b'{"a":{"b":1},"c":"\xff"}', "the byte 0xff is not UTF-8, in `c`", "c"),
        (b'{"a":"x\ny"}', "invalid control character, in `a`, line 1, column 8", "a"),
        (b'{"a":1}}', "extra data, line 1, column 8", ""),
        ('{"a":1}'.encode("utf-16"), "the text is UTF-16; JSON is UTF-8", ""),
        ('{"a":1}'.encode("utf-16-be"), "the text is UTF-16; JSON is UTF-8", ""),
        ('{"a":1}'.encode("utf-32"), "the text is UTF-32; JSON is UTF-8", ""),
        (b'{"a":[' + b"0," * 10 + b"x]}", "expecting value, in `a.10`", "a.10"),
    ],
)
def test_an_error_names_what_is_wrong_and_where(data: bytes, words: str, path: str) -> None:
    error = error_of(data)
    assert error is not None
    fault = fault_of(data, error)
    assert words in fault.message
    assert fault.path == path


@given(st.binary())
def test_any_bytes_are_explained(data: bytes) -> None:
    error = error_of(data)
    assert error is None or fault_of(data, error).message
    assert isinstance(path_at(data, len(data)), str)
    assert is_too_deep(data) is False or data.count(b"[") + data.count(b"{") > NESTING_MAX
