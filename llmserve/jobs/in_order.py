"""Which lines start next, and how many: those of the earliest deadline, in the order of their file. Does no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

LINES_MAX = 256  # of all jobs: in the server's queue, on engines, or about to be written


class Shape(NamedTuple):
    """A line as far as its place goes. tokens : length of its answer, estimated.  prefix : hash of its opening"""

    number: int
    tokens: float
    prefix: int = 0


class Handed(NamedTuple):
    """A line that enters the queue."""

    job: str
    number: int


class Feeder(Protocol):
    """Chooses the lines that enter the queue."""

    def add(self, job_id: str, deadline_s: float, lines: list[Shape]) -> None:
        """Take a job with the lines that have no result yet."""
        ...

    def remove(self, job_id: str) -> object:
        """Forget a job."""
        ...

    def take(self, now_s: float) -> Iterable[Handed]:
        """The lines that enter the queue now, in order."""
        ...

    def back(self, job_id: str, number: int) -> None:
        """Let a line wait again that was not served."""
        ...

    def ended(self, job_id: str, number: int, now_s: float, tokens: float) -> None:
        """Note a line that has a result. tokens : of its answer"""
        ...


class InOrder:
    """The simplest Feeder."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[float, deque[int]]] = {}  # deadline, and lines that wait
        self._in_queue: set[tuple[str, int]] = set()

    def add(self, job_id: str, deadline_s: float, lines: list[Shape]) -> None:
        self._jobs[job_id] = deadline_s, deque([line.number for line in lines])

    def remove(self, job_id: str) -> object:
        self._jobs.pop(job_id, None)
        self._in_queue = {line for line in self._in_queue if line[0] != job_id}
        return None

    def take(self, now_s: float) -> list[Handed]:
        handed: list[Handed] = []
        for job_id, (_, waiting) in sorted(self._jobs.items(), key=lambda item: (item[1][0], item[0])):
            while waiting and len(self._in_queue) < LINES_MAX:
                handed.append(Handed(job_id, waiting.popleft()))
                self._in_queue.add((job_id, handed[-1].number))
        return handed

    def back(self, job_id: str, number: int) -> None:
        if (job_id, number) in self._in_queue:
            self._in_queue.discard((job_id, number))
            self._jobs[job_id][1].appendleft(number)

    def ended(self, job_id: str, number: int, now_s: float, tokens: float) -> None:
        self._in_queue.discard((job_id, number))
