"""Release: does a bin let a batch go now, and of what size.

`size` answers for one bin; `due_at_s` says when the answer may change by time alone. A full bin always goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from llmserve.scheduling.queues import BinQueue


class Release(Protocol):
    @property
    def timed(self) -> bool:
        """Whether `due_at_s` ever gives a time."""
        ...

    def size(self, queue: BinQueue, now_s: float, engine_free: bool) -> int:
        """Requests to let go now, 0 to wait. engine_free: an engine is free and no formed batch waits for it."""
        ...

    def due_at_s(self, queue: BinQueue) -> float | None:
        """When a bin that waits must be asked again although nothing happened; None: never."""
        ...


@dataclass(frozen=True, slots=True)
class Full:
    """A batch goes when it has `batch_size` requests (the Multi-Bin paper's rule)."""

    timed: ClassVar[bool] = False

    batch_size: int

    def size(self, queue: BinQueue, now_s: float, engine_free: bool) -> int:
        return self.batch_size if len(queue) >= self.batch_size else 0

    def due_at_s(self, queue: BinQueue) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class Timeout:
    """A batch goes when full, or when its oldest request has waited `wait_s`."""

    timed: ClassVar[bool] = True

    batch_size: int
    wait_s: float

    def size(self, queue: BinQueue, now_s: float, engine_free: bool) -> int:
        waiting = len(queue)
        if waiting >= self.batch_size:
            return self.batch_size
        return waiting if waiting and now_s >= queue.oldest_at_s + self.wait_s else 0

    def due_at_s(self, queue: BinQueue) -> float | None:
        return queue.oldest_at_s + self.wait_s if len(queue) else None


@dataclass(frozen=True, slots=True)
class Greedy:
    """A batch goes when full, or with whatever is there as soon as an engine would otherwise idle."""

    timed: ClassVar[bool] = False

    batch_size: int

    def size(self, queue: BinQueue, now_s: float, engine_free: bool) -> int:
        if engine_free or len(queue) >= self.batch_size:
            return min(len(queue), self.batch_size)
        return 0

    def due_at_s(self, queue: BinQueue) -> float | None:
        return None
