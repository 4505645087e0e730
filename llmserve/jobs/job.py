"""A batch that this server works on, in memory."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmserve.jobs.contract import BatchRow
from llmserve.jobs.lines import number_of
from llmserve.jobs.recorder import Account
from llmserve.jobs.rows import Part, Segment
from llmserve.jobs.validation import Index

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a job needs before its lines can run.

    path : of the input.  index : see validation.RECORD.  waiting : numbers of lines without a safe result
    completed, failed : lines with one
    """

    path: Path
    index: Index
    waiting: list[int]
    completed: int
    failed: int


class Job:
    """One batch under one epoch.

    waiting    numbers of the lines to run, in order
    in_flight  lines that the server's queue or an engine has: what cancels each
    recording  lines whose result is not safe yet
    open       whether lines may start
    changed    set when somebody must look at the batch again
    """

    def __init__(self, row: BatchRow) -> None:
        self.id, self.key, self.endpoint = row.id, row.key, row.endpoint
        self.epoch, self.expires_at, self.total = row.epoch, row.expires_at, row.total
        self.account = Account(row.id, row.epoch, row.completed, row.failed)
        self.loaded: Loaded | None = None
        self.waiting: deque[int] = deque()
        self.in_flight: dict[int, Callable[[], None]] = {}
        self.recording: set[int] = set()
        self.tries: Counter[int] = Counter()
        self.open = False
        self.changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether every line has a safe result."""
        return self.loaded is not None and not (self.waiting or self.in_flight or self.recording)

    def start(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.total = len(loaded.index)
        self.account.completed, self.account.failed = loaded.completed, loaded.failed
        self.waiting = deque(loaded.waiting)
        self.open = True

    def stop_lines(self) -> None:
        """Take back every line that has no answer yet."""
        self.open = False
        in_flight, self.in_flight = self.in_flight, {}
        for cancel in in_flight.values():
            cancel()
        self.waiting.extendleft(sorted(in_flight, reverse=True))


def load(folder: Path, index: Path, part: Part, segments: Iterable[Segment]) -> Loaded:
    """Read the index, and which lines have a safe result. Runs in a thread. Raises OSError, ValueError.

    A result that follows the safe bytes of its segment does not count.
    """
    records = np.load(index)
    done = np.zeros(len(records), bool)
    counts = {"output": 0, "error": 0}
    for segment in segments:
        for row in _rows(folder / segment.name, segment.safe_bytes):
            number = number_of(row)
            assert not done[number], f"line {number} has two results"
            done[number] = True
            counts[segment.kind] += 1
    waiting = np.flatnonzero(~done).tolist()
    return Loaded(folder / part.name, records, waiting, counts["output"], counts["error"])


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
