"""Reads an input file once: what is wrong with its lines, and where each line is.

    python -m llmserve.jobs.validation < task.json > report.json

A file of 200 MB takes seconds, so a server has a process of low priority do this. The index is a numpy array with a
record for each line; the index can be made again from the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from llmserve.api.bodies import BodyLimits
from llmserve.api.parse import parse_call
from llmserve.errors import BadRequest
from llmserve.jobs.contract import LineError
from llmserve.jobs.lines import CUSTOM_ID_CHARS_MAX, Line, read_line

LINES_MAX = 50_000
ERRORS_MAX = 100
CHARS_PER_TOKEN = 4  # of prompts, for the limit of queued tokens
ANSWER_TOKENS = 256  # of an answer without a limit, likewise
PREFIX_CHARS = 256
NICE = 10

RECORD = np.dtype(
    [
        ("offset", np.uint64),
        ("bytes", np.uint32),
        ("chars", np.uint32),
        ("output_tokens_max", np.uint32),
        ("prefix", np.uint64),
    ]
)
"""One line: where it is, characters of its prompt, the client's limit of the answer (0: none), hash of its opening."""

Index = npt.NDArray[np.void]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """path : of the input.  size : its bytes.  index : where the index goes"""

    path: str
    size: int
    endpoint: str
    index: str
    line_bytes_max: int
    prompt_chars_max: int
    lines_max: int = LINES_MAX


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """lines : requests in the file.  tokens : of all prompts and answers, estimated.  errors : the first ERRORS_MAX"""

    lines: int
    tokens: int
    errors: list[LineError]


def main() -> int:
    os.nice(NICE)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    sys.stdout.buffer.write(msgspec.json.encode(validate(task)))
    return 0


def validate(task: Task) -> Report:
    """Check the file and write its index. Raises OSError."""
    records = np.zeros(task.lines_max, RECORD)
    checker, tokens, count = _Checker(task), 0, 0
    for number, offset, data in _lines(task):
        if not data.strip():
            continue
        if count == task.lines_max:
            checker.add(LineError("too_many_lines", f"the file has more than {task.lines_max:,} requests"))
            break
        line = checker.line(number, data)
        if line is not None:
            record = records[count]
            record["offset"], record["bytes"] = offset, len(data)
            tokens += _describe(record, checker, number, line)
        count += 1
    if not count:
        checker.add(LineError("empty_file", "the file has no requests"))
    if not checker.errors:
        _write(Path(task.index), records[:count])
    return Report(lines=count, tokens=tokens, errors=checker.errors)


def _lines(task: Task) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset, bytes without the line's end) of each line; a line too long is cut."""
    offset = 0
    most = task.line_bytes_max + (64 << 10)  # the body, and what is around it
    with open(task.path, "rb") as file:
        number = 0
        while offset < task.size and (data := file.readline(most)):
            number += 1
            yield number, offset, data.rstrip(b"\r\n")
            offset += len(data)
            while not data.endswith(b"\n") and offset < task.size and (data := file.readline(most)):
                offset += len(data)  # the rest of a line too long


class _Checker:
    def __init__(self, task: Task) -> None:
        self.errors: list[LineError] = []
        self.task = task
        self._ids: set[str] = set()

    def add(self, error: LineError) -> None:
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(error)

    def line(self, number: int, data: bytes) -> Line | None:
        """The line; None when it has no form to go on with."""
        task = self.task
        try:
            if not data.isascii():
                data.decode()
            line = read_line(data)
        except msgspec.ValidationError as error:
            self.add(LineError("invalid_line", f"This line is no request: {error}.", number))
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            too_long = len(data) > task.line_bytes_max
            message = "This line is too long." if too_long else "This line is not parseable as valid JSON."
            self.add(LineError("line_too_long" if too_long else "invalid_json_line", message, number))
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
        if line.url != task.endpoint:
            text = f"The url must be {task.endpoint}, the endpoint of the batch."
            self.add(LineError("invalid_url", text, number, "url"))
        if len(memoryview(line.body)) > task.line_bytes_max:
            self.add(LineError("line_too_long", f"The body exceeds {task.line_bytes_max:,} bytes.", number, "body"))
        if bytes(memoryview(line.body)[:1]) != b"{":
            self.add(LineError("invalid_body", "The body must be an object.", number, "body"))
        return line


def _describe(record: Any, checker: _Checker, number: int, line: Line) -> int:
    """Fill in what the forecast needs. Returns the tokens of the request, estimated.

    What else is wrong with a body is an error of its own request, and does not stop the others.
    """
    task = checker.task
    try:
        call = parse_call(task.endpoint, bytes(line.body), BodyLimits(prompt_chars_max=task.prompt_chars_max))
    except BadRequest:
        return 0
    if call.stream:
        checker.add(LineError("stream_not_supported", "A batch has no streams.", number, "stream"))
    chars = len(call.prompt.text) + len(call.prompt.system) + call.prompt.history_characters
    record["chars"] = chars
    record["output_tokens_max"] = min(call.output_tokens_max or 0, 2**32 - 1)
    opening = call.opening[:PREFIX_CHARS].encode(errors="replace")
    record["prefix"] = int.from_bytes(blake2b(opening, digest_size=8).digest())
    prompt_tokens = call.prompt_ids or chars // CHARS_PER_TOKEN
    return prompt_tokens + call.choices * (call.output_tokens_max or ANSWER_TOKENS)


def _write(path: Path, records: Index) -> None:
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        np.save(file, records)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
