"""Reads an input file once: what is wrong with its lines, and where each line is.

    python -m llmserve.jobs.run.validation < task.json > report.json

A file of 200 MB takes seconds, so a server starts a process of low priority. The findings are in the index.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from llmserve.errors import BadRequest
from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.parse import parse_call
from llmserve.jobs.objects import LineError
from llmserve.jobs.run import input_index
from llmserve.jobs.run.input_index import RECORD, Report, Rules
from llmserve.jobs.run.jsonl import CUSTOM_ID_CHARS_MAX, Line, other_encoding, read_line
from llmserve.wire.json_text import fault_of, is_too_deep, without_bom

LINES_MAX = 50_000
EMPTY_LINES_MAX = 50_000
MODELS_MAX = 256  # that are told apart; lines of further ones have the model ""
MODEL_CHARS_MAX = 512
CHECK_CPU_S = 30.0  # of the processor, for one file; 200 MB of requests take a tenth of it
ERRORS_MAX = 100
CHARS_PER_TOKEN = 4  # of prompts, for the limit of queued tokens
ANSWER_TOKENS = 256  # of an answer without a limit, likewise
PREFIX_CHARS = 256
NICE = 10


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A check to be done. path : of the input.  index : path of the index to write"""

    path: str
    index: str
    rules: Rules
    cpu_s_max: float = CHECK_CPU_S


def main() -> int:
    os.nice(NICE)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    sys.stdout.buffer.write(msgspec.json.encode(validate(task)))
    return 0


def validate(task: Task) -> Report:
    """Check the file and write its index. Raises OSError."""
    rules = task.rules
    records = np.zeros(rules.lines_max, RECORD)
    checker, tokens, count, empty = _Checker(rules), 0, 0, 0
    until_s = time.thread_time() + task.cpu_s_max
    file = _File(task)
    for number, offset, data in file.lines():
        if number == 1 and (encoding := other_encoding(data)):
            checker.add(LineError("invalid_encoding", f"The file is {encoding}: write it as UTF-8."))
            return _noted(task, checker, 0, 0, records)
        if time.thread_time() > until_s:
            text = f"The check of this file took {task.cpu_s_max:g} s, up to line {number:,}: split the file."
            checker.add(LineError("check_took_too_long", text))
            return _noted(task, checker, 0, 0, records)
        if not data.strip():
            empty += 1
            if empty > EMPTY_LINES_MAX:
                checker.add(LineError("too_many_lines", f"The file has more than {EMPTY_LINES_MAX:,} empty lines."))
                return _noted(task, checker, 0, 0, records)
            continue
        if count == rules.lines_max:
            checker.add(LineError("too_many_lines", f"the file has more than {rules.lines_max:,} requests"))
            return _noted(task, checker, count, tokens, records)
        line = checker.line(number, data)
        if line is not None:
            record = records[count]
            record["offset"], record["bytes"], record["crc"] = offset, len(data), zlib.crc32(data)
            tokens += _describe(record, checker, number, line)
        count += 1
    if file.is_damaged:
        return Report(lines=0, tokens=0, errors=[LineError("input_damaged", INPUT_DAMAGED)])
    if not count:
        checker.add(LineError("empty_file", "the file has no requests"))
    return _noted(task, checker, count, tokens, records)


INPUT_DAMAGED = "The bytes of the input file are not those that were uploaded: the disk has lost or changed some."


def _noted(task: Task, checker: _Checker, count: int, tokens: int, records: input_index.Index) -> Report:
    """Keep what was found: also of a bad file, which is then not read again."""
    report = Report(lines=count, tokens=tokens, errors=checker.errors, models=list(checker.models))
    input_index.write(Path(task.index), task.rules, report, records[: 0 if report.errors else count])
    return report


class _File:
    """The lines of the input, and whether the bytes read so far are those that were uploaded."""

    def __init__(self, task: Task) -> None:
        self._path, self._rules = task.path, task.rules
        self._crc, self._bytes = 0, 0

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(number from 1, offset, bytes without the line's end) of each line; a line too long is cut."""
        most = self._rules.line_bytes_max + (64 << 10)  # the body, and what is around it
        with open(self._path, "rb") as file:
            number = 0
            while data := self._read(file, most):
                number += 1
                offset = self._bytes - len(data)
                yield number, offset, data.rstrip(b"\r\n")
                while not data.endswith(b"\n") and (data := self._read(file, most)):
                    pass  # the rest of a line too long

    def _read(self, file: Any, most: int) -> bytes:
        data: bytes = file.readline(min(most, self._rules.size - self._bytes))
        self._crc = zlib.crc32(data, self._crc)
        self._bytes += len(data)
        return data

    @property
    def is_damaged(self) -> bool:
        rules = self._rules
        return self._bytes != rules.size or (rules.crc is not None and rules.crc != self._crc)


class _Checker:
    """The errors and models of the lines so far. models : places in the list of models, by name"""

    def __init__(self, rules: Rules) -> None:
        self.errors: list[LineError] = []
        self.rules = rules
        self.models: dict[str, int] = {}
        self._ids: set[str] = set()

    def model(self, name: str) -> int:
        """The place of a model in the list of models."""
        if name not in self.models and (len(self.models) >= MODELS_MAX or len(name) > MODEL_CHARS_MAX):
            name = ""
        return self.models.setdefault(name, len(self.models))

    def add(self, error: LineError) -> None:
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(error)

    def line(self, number: int, data: bytes) -> Line | None:
        """The line; None when it has no form to go on with."""
        rules = self.rules
        try:
            if not data.isascii():
                data.decode()
            line = read_line(data)
        except msgspec.ValidationError as error:
            self.add(LineError("invalid_line", f"This line is no request: {error}.", number))
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.add(_unreadable(rules, number, data, error))
            return None
        if not 0 < len(line.custom_id) <= CUSTOM_ID_CHARS_MAX:
            text = f"The custom_id must have 1 to {CUSTOM_ID_CHARS_MAX} characters."
            self.add(LineError("invalid_custom_id", text, number, "custom_id"))
        elif line.custom_id in self._ids:
            text = "The custom_id of this line was used by a line before."
            self.add(LineError("duplicate_custom_id", text, number, "custom_id"))
        self._ids.add(line.custom_id)
        if line.method != "POST":
            self.add(LineError("invalid_method", "The method must be POST.", number, "method"))
        if line.url != rules.endpoint:
            text = f"The url must be {rules.endpoint}, the endpoint of the batch."
            self.add(LineError("invalid_url", text, number, "url"))
        if len(memoryview(line.body)) > rules.line_bytes_max:
            text = f"The body exceeds {rules.line_bytes_max:,} bytes, which --body-bytes-max allows."
            self.add(LineError("line_too_long", text, number, "body"))
        if bytes(memoryview(line.body)[:1]) != b"{":
            self.add(LineError("invalid_body", "The body must be an object.", number, "body"))
        return line


def _describe(record: Any, checker: _Checker, number: int, line: Line) -> int:
    """Fill in what the forecast needs. Returns the tokens of the request, estimated.

    Any other fault of a body is an error of its request alone.
    """
    rules = checker.rules
    try:
        call = parse_call(rules.endpoint, bytes(line.body), BodyLimits(prompt_chars_max=rules.prompt_chars_max))
    except BadRequest:
        record["model"] = checker.model("")
        return 0
    record["model"] = checker.model(call.model)
    if call.wire.stream:
        checker.add(LineError("stream_not_supported", "A batch has no streams.", number, "stream"))
    chars = len(call.prompt.text) + len(call.prompt.system) + call.prompt.history_characters
    record["output_tokens_max"] = min(call.bounds.output_tokens_max or 0, 2**32 - 1)
    opening = call.opening[:PREFIX_CHARS].encode(errors="replace")
    record["prefix"] = int.from_bytes(blake2b(opening, digest_size=8).digest())
    prompt_tokens = call.bounds.prompt_ids or chars // CHARS_PER_TOKEN
    return prompt_tokens + call.bounds.choices * (call.bounds.output_tokens_max or ANSWER_TOKENS)


def _unreadable(rules: Rules, number: int, data: bytes, error: Exception) -> LineError:
    if len(data) > rules.line_bytes_max:
        text = f"This line is too long: --body-bytes-max allows {rules.line_bytes_max:,} bytes."
        return LineError("line_too_long", text, number)
    if is_too_deep(data):
        return LineError("invalid_json_line", f"This line is no request: {error}.", number)
    fault = fault_of(without_bom(data), error).message
    return LineError("invalid_json_line", f"This line is not parseable as valid JSON: {fault}.", number)


if __name__ == "__main__":
    sys.exit(main())
