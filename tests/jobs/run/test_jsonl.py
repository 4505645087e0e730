"""Lines of input files, and rows of results, whatever clients and engines write."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmserve.jobs.run import input_index
from llmserve.jobs.run.input_index import Rules
from llmserve.jobs.run.jsonl import (
    answer_row,
    answer_tokens,
    expired_row,
    is_expired,
    line_of,
    number_of,
    read_line,
    row_id,
)
from llmserve.jobs.run.validation import EMPTY_LINES_MAX, Task, validate
from llmserve.wire.json_text import NESTING_MAX

ENDPOINT = "/v1/completions"


def line(number: int, body: bytes = b'{"model":"m","prompt":"x"}') -> bytes:
    return b'{"custom_id":"%d","url":"/v1/completions","body":%b}\n' % (number, body)


def task(tmp_path: Path, data: bytes, **changed: Any) -> Task:
    (tmp_path / "1-in.jsonl").write_bytes(data)
    limits = {"line_bytes_max": 1 << 20, "prompt_chars_max": 1 << 20, "lines_max": 100}
    rules = Rules(endpoint=ENDPOINT, size=len(data), crc=zlib.crc32(data), **limits)
    return Task(path=str(tmp_path / "1-in.jsonl"), index=str(tmp_path / "index"), rules=rules, **changed)


def codes(tmp_path: Path, data: bytes, **changed: Any) -> list[str]:
    return [error.code for error in validate(task(tmp_path, data, **changed)).errors]


# ---- rows of results ------------------------------------------------------------------------------------------------

ODD = [
    (b'{"a":NaN,"b":[-Infinity,Infinity]}', {"a": None, "b": [None, None]}),
    (b'{"a":"NaN \x01\n"}', {"a": "NaN \x01\n"}),
    (b'\xef\xbb\xbf{"a":\n1}', {"a": 1}),
    (rb'{"a":"\ud83d \\ud83d"}', {"a": "\ud83d \\ud83d"}),
    (b'{"a":"\xff"}', {"a": "\ufffd"}),
    (b'{"a":1} and more', '{"a":1} and more'),
    (b"", ""),
    (b"<html>\n", "<html>\n"),
    (b'{"a":' * 985 + b"1" + b"}" * 985, '{"a":' * 985 + "1" + "}" * 985),
    (b"[" * 200_000, "[" * 200_000),
    (b'{"a":1' + b"0" * 5_000 + b"}", '{"a":1' + "0" * 5_000 + "}"),
    (b'{"usage":{"completion_tokens":1' + b"0" * 400 + b"}}", {"usage": {"completion_tokens": 10**400}}),
]


@pytest.mark.parametrize(("body", "shown"), ODD, ids=range(len(ODD)))
def test_every_answer_has_a_row_of_one_line_that_can_be_read(body: bytes, shown: object) -> None:
    row = answer_row(row_id("batch_a", 3), "x", 200, "r", body)
    assert row.index(b"\n") == len(row) - 1
    assert json.loads(row)["response"]["body"] == shown
    assert number_of(row, "batch_a") == 3
    assert answer_tokens(body) == 0.0


@pytest.mark.parametrize("count", [b"7", b"7.0", b'"7"', b'7,"x":NaN'])
def test_tokens_of_answers_are_read_in_any_spelling(count: bytes) -> None:
    assert answer_tokens(b'{"usage":{"completion_tokens":%b}}' % count) == 7.0


def test_only_the_row_that_says_so_is_of_an_expired_line() -> None:
    row = answer_row("batch_req_a_0", "x", 200, "r", b"{}")
    assert not is_expired(row)
    assert not is_expired(row[:-5] + b"\n")
    assert is_expired(expired_row("batch_req_a_0", "x"))


def test_a_row_of_another_batch_has_no_number_here() -> None:
    with pytest.raises(ValueError, match="another batch"):
        number_of(answer_row(row_id("batch_a", 3), "x", 200, "r", b"{}"), "batch_b")


# ---- lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("frames", [0, 700])
def test_nesting_is_counted_whatever_the_stack_of_the_caller(opening: bytes, frames: int) -> None:
    def below(frames: int, data: bytes) -> object:
        return below(frames - 1, data) if frames else read_line(data)

    closing = opening.translate(bytes.maketrans(b"[{", b"]}"), b'"a:')[::-1]
    most = (NESTING_MAX - 1) // len(closing)
    assert below(frames, line(0, opening * most + b"1" + closing * most))
    for count in (most + 1, 985, 100_000):
        with pytest.raises(msgspec.DecodeError, match="nested more than"):
            below(frames, line(0, opening * count + b"1" + closing * count))


def test_half_a_surrogate_and_nan_are_errors_of_a_body_and_not_of_its_line() -> None:
    for body in (rb'{"model":"m","prompt":"\ud83d"}', b'{"model":"m","prompt":"x","top_p":NaN}'):
        assert bytes(read_line(line(0, body)).body) == body


def test_a_line_that_cannot_be_read_any_more_still_has_its_id() -> None:
    found = line_of(line(5, b"[" * 1000 + b"]" * 1000))
    assert (found.custom_id, bytes(found.body)) == ("5", b"")
    assert line_of(b"\xff\x00").custom_id == ""


# ---- checks ---------------------------------------------------------------------------------------------------------


def test_a_byte_order_mark_is_skipped_and_another_encoding_is_named(tmp_path: Path) -> None:
    assert codes(tmp_path, b"\xef\xbb\xbf" + line(0) + line(1)) == []
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        report = validate(task(tmp_path, (line(0) + line(1)).decode().encode(encoding)))
        assert [error.message for error in report.errors] == ["The file is UTF-16: write it as UTF-8."]


def test_half_a_surrogate_fails_no_batch(tmp_path: Path) -> None:
    assert codes(tmp_path, line(0, rb'{"model":"m","prompt":"\udc00"}') + line(1)) == []


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (error,) = validate(task(tmp_path, line(0) + line(1, b'{"a":' * 990 + b"1" + b"}" * 990))).errors
    assert (error.line, "nested more than" in error.message) == (2, True)


def test_empty_lines_are_bounded(tmp_path: Path) -> None:
    assert codes(tmp_path, line(0) + b"\n" * EMPTY_LINES_MAX) == []
    assert codes(tmp_path, line(0) + b" \n" * (EMPTY_LINES_MAX + 1)) == ["too_many_lines"]


def test_a_check_has_a_limit_of_time(tmp_path: Path) -> None:
    assert codes(tmp_path, line(0), cpu_s_max=-1.0) == ["check_took_too_long"]


def test_bytes_that_were_not_uploaded_are_noticed(tmp_path: Path) -> None:
    for damaged in (line(0) + line(2), line(0), line(0) + line(1)[:-2]):
        checked = task(tmp_path, line(0) + line(1))
        (tmp_path / "1-in.jsonl").write_bytes(damaged)
        assert [error.code for error in validate(checked).errors] == ["input_damaged"]


def test_a_damaged_index_is_taken_for_missing(tmp_path: Path) -> None:
    checked = task(tmp_path, line(0) + line(1))
    validate(checked)
    path = Path(checked.index)
    found = input_index.read(path, checked.rules)
    assert found is not None
    assert found[0].lines == len(found[1]) == 2
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    for damaged in (whole[:-1], whole[:20], b"", bytes(changed), b"\x93NUMPY" + whole):
        path.write_bytes(damaged)
        assert input_index.read(path, checked.rules) is None
    path.write_bytes(whole)
    others = msgspec.structs.replace(checked.rules, prompt_chars_max=5)
    assert input_index.read(path, others) is None, "the rules have changed"


def test_the_models_of_lines_are_told_apart_up_to_a_number(tmp_path: Path) -> None:
    bodies = [b'{"model":"m%d","prompt":"x"}' % number for number in (0, 1, 0)]
    checked = task(tmp_path, b"".join([line(number, body) for number, body in enumerate(bodies)]))
    report = validate(checked)
    found = input_index.read(Path(checked.index), checked.rules)
    assert found is not None
    assert [report.models[place] for place in found[1]["model"]] == ["m0", "m1", "m0"]
