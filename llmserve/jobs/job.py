"""A batch that this server works on, in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmserve.jobs.contract import BatchRow
from llmserve.jobs.estimates import Work
from llmserve.jobs.feeding import Shapes
from llmserve.jobs.lines import is_expired, model_of, number_of
from llmserve.jobs.recorder import Account
from llmserve.jobs.rows import Part, Segment
from llmserve.jobs.validation import ANSWER_TOKENS, Index

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a job needs before its lines can run.

    path : of the input.  index : see validation.RECORD.  waiting : numbers of lines without a safe result
    completed, failed : lines with one.  expired : of these, lines that were not executed in time
    model : of the first line
    """

    path: Path
    index: Index
    waiting: list[int]
    completed: int
    failed: int
    expired: int
    model: str


class Cancellable(Protocol):
    """A line in flight."""

    def cancel(self) -> None: ...


class Job:
    """One batch under one epoch.

    waiting    numbers of the lines that are neither in flight nor have a result
    in_flight  lines that were chosen to start, and have no answer yet
    expired    lines whose result says that they were not executed in time
    work       what all lines will take, by their beginning; None: unknown
    open       whether lines may start
    changed    set when somebody must look at the batch again
    """

    def __init__(self, row: BatchRow) -> None:
        self.id, self.key, self.endpoint = row.id, row.key, row.endpoint
        self.epoch, self.expires_at, self.total = row.epoch, row.expires_at, row.total
        self.account = Account(row.id, row.epoch, row.completed, row.failed)
        self.loaded: Loaded | None = None
        self.waiting: set[int] = set()
        self.in_flight: dict[int, Cancellable] = {}
        self.recording = 0  # lines whose result is not safe yet
        self.expired = 0
        self.tries: Counter[int] = Counter()
        self.work: Work | None = None
        self.open = False
        self.changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether every line has a safe result."""
        return self.loaded is not None and self.account.completed + self.account.failed == self.total

    def start(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.total = len(loaded.index)
        self.account.completed, self.account.failed = loaded.completed, loaded.failed
        self.expired = loaded.expired
        self.waiting = set(loaded.waiting)

    def stop_lines(self) -> None:
        """Take back every line that has no answer yet."""
        self.open = False
        in_flight, self.in_flight = self.in_flight, {}
        for line in in_flight.values():
            line.cancel()
        self.waiting.update(in_flight)

    def shapes(self) -> Shapes:
        """The lines that wait. A line without a limit counts as ANSWER_TOKENS long."""
        assert self.loaded is not None, "lines of a job that is not loaded"
        numbers = np.fromiter(self.waiting, np.int64, len(self.waiting))
        records = self.loaded.index[numbers]
        return Shapes(numbers, _tokens(records), records["prefix"])

    @property
    def factor(self) -> float:
        """Of the likely lengths of all answers over those of `shapes`."""
        assert self.loaded is not None, "lines of a job that is not loaded"
        return self.work.output_tokens / float(_tokens(self.loaded.index).sum()) if self.work is not None else 1.0


def _tokens(records: Index) -> npt.NDArray[np.float64]:
    tokens = records["output_tokens_max"].astype(np.float64)
    tokens[tokens == 0] = ANSWER_TOKENS
    return tokens


def load(folder: Path, index: Path, part: Part, segments: Iterable[Segment]) -> Loaded:
    """Read the index, and which lines have a safe result. Runs in a thread. Raises OSError, ValueError.

    A result that follows the safe bytes of its segment does not count.
    """
    records = np.load(index)
    done = np.zeros(len(records), bool)
    counts, expired = {"output": 0, "error": 0}, 0
    for segment in segments:
        for row in _rows(folder / segment.name, segment.safe_bytes):
            number = number_of(row)
            assert not done[number], f"line {number} has two results"
            done[number] = True
            counts[segment.kind] += 1
            expired += is_expired(row)
    waiting = np.flatnonzero(~done).tolist()
    path = folder / part.name
    model = model_of(read_lines(path, records, [0])[0])
    return Loaded(path, records, waiting, counts["output"], counts["error"], expired, model)


def _rows(path: Path, size: int) -> Iterable[bytes]:
    with open(path, "rb", buffering=READ_BYTES) as file:
        while size > 0 and (row := file.readline()):
            size -= len(row)
            yield row


def read_lines(path: Path, index: Index, numbers: Iterable[int]) -> list[bytes]:
    """The bytes of these lines. Runs in a thread. Raises OSError."""
    with open(path, "rb") as file:
        lines = []
        for number in numbers:
            record = index[number]
            file.seek(int(record["offset"]))
            lines.append(file.read(int(record["bytes"])))
        return lines
