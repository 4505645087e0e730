"""A bin by deadline, and the batches that can be in time (Shepherd, Section 5.2 and Appendix C).

    d_r   deadline of a request r
    T(b)  seconds of a batch of b, non-decreasing in b
    t     now

A batch of b is feasible when t + T(b) <= d_r for each request r of the batch. N(b) of the waiting requests have a
deadline of t + T(b) or later; N falls with b, so the largest feasible batch has the largest b with N(b) >= b, found by
bisection.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from llmserve.scheduling.fair import Share, by_turn
from llmserve.scheduling.queues.waiting import BinQueue, FormedBatch, QueuedRequest

ROUNDING_S = 1e-9  # sums of times that differ by less count as equal


class DeadlineQueue(BinQueue):
    """Requests by deadline, the earliest first; requests without a deadline come last, in order of arrival. Requests
    may start in any order: a batch can hold each request whose own deadline it meets.

    whole : the queue of all shares, if this queue is the part of one share; None: it is not a part
    """

    by_deadline = True
    whole: DeadlineQueue | None = None

    def new_part(self) -> DeadlineQueue:
        part = DeadlineQueue(self.index)
        part.whole = self
        return part

    def in_turn(self) -> Iterator[QueuedRequest]:
        return (self.requests[request_id] for _, request_id in self._row)

    def take(self, count: int) -> list[QueuedRequest]:
        """Take the requests with the earliest deadlines."""
        return self.take_at(0, count)

    def take_at(self, start: int, count: int) -> list[QueuedRequest]:
        """Take at most `count` requests by deadline, from the place `start` on.

        Where several shares wait, the requests from the place on, whose deadlines are later, are dealt between them.
        """
        if self.parts and start < len(self._row):
            deadline_s = self._row[start][0]
            parts = ((share, part.from_deadline(deadline_s)) for share, part in by_turn(dict(self.by_share())))
            return self.take_dealt(parts, count)
        if self.whole is not None:
            requests = [self.at(place) for place in range(start, min(start + count, len(self._row)))]
            for queued in requests:
                self.whole.remove(queued)
            return requests
        requests = [self.requests.pop(request_id) for _, request_id in self._row[start : start + count]]
        if requests:
            self.changes += 1
            del self._row[start : start + len(requests)]
        if self._arrivals:
            for queued in requests:
                self._leave_rows(queued)
        return requests

    def from_deadline(self, deadline_s: float) -> Iterator[QueuedRequest]:
        """Requests due at `deadline_s` or later, by deadline. The queue must not change during the iteration."""
        for place in range(self.first_at(deadline_s), len(self._row)):
            yield self.at(place)

    def by_share(self) -> Iterator[tuple[Share, DeadlineQueue]]:
        """The requests of each share."""
        if self.requests and not self.parts:
            yield self.share, self
        for share, part in self.parts.items():
            assert isinstance(part, DeadlineQueue)
            yield share, part

    def of_share(self, share: Share) -> DeadlineQueue | None:
        """The requests of the share; None: the share has none here."""
        return next((part for other, part in self.by_share() if other is share), None)

    # ---- requests that can be in time ----

    def first_at(self, deadline_s: float) -> int:
        """Place of the first request whose deadline is `deadline_s` or later."""
        return bisect_left(self._row, (deadline_s - ROUNDING_S,))

    def in_time(self, deadline_s: float) -> int:
        """Number of requests whose deadline is `deadline_s` or later."""
        return len(self._row) - self.first_at(deadline_s)

    def at(self, place: int) -> QueuedRequest:
        """The request at a place in the order of deadlines."""
        return self.requests[self._row[place][1]]

    def deadline_at(self, place: int) -> float:
        return self._row[place][0]

    def oldest_undated(self) -> QueuedRequest | None:
        """The first request without a deadline; None: all have one."""
        if not self._row or self._row[-1][0] < math.inf:
            return None
        return self.requests[self._row[self.first_at(math.inf)][1]]


class FormedRow(DeadlineQueue):
    """The requests of a formed batch by deadline; requests of equal deadlines keep the batch's order."""

    def __init__(self, batch: FormedBatch) -> None:
        super().__init__(batch.bin)
        self.requests.update(enumerate(batch.requests.values()))
        self.share = batch.share
        self._row = sorted([(queued.deadline_s, place) for place, queued in self.requests.items()])


def largest(most: int, is_feasible: Callable[[int], bool]) -> int:
    """The largest feasible size up to `most`; 0: none is feasible. All sizes below a feasible size must be feasible."""
    low, high = 0, most
    while low < high:
        size = (low + high + 1) // 2
        if is_feasible(size):
            low = size
        else:
            high = size - 1
    return low


def largest_feasible(
    queues: Sequence[DeadlineQueue], now_s: float, batch_s: Sequence[float], most: int, running: Sequence[float] = ()
) -> int:
    """Size of the largest feasible batch of at most `most` requests, from any of these queues; 0: none is feasible.

    batch_s : T(1), T(2), ..., at least up to T(most).  running : ascending deadlines of further requests for the batch
    """

    def is_feasible(size: int) -> bool:
        ends_s = now_s + batch_s[size - 1]
        fit = sum([queue.in_time(ends_s) for queue in queues])
        if running:
            fit += len(running) - bisect_left(running, ends_s - ROUNDING_S)
        return fit >= size

    return largest(min(most, sum([len(queue) for queue in queues]) + len(running)), is_feasible)


def around_first(queue: DeadlineQueue, now_s: float, batch_s: Sequence[float], most: int) -> tuple[int, int]:
    """(place, size) of the largest batch that meets the earliest deadline still possible; (0, 0): no deadline is."""
    first = queue.first_at(now_s + batch_s[0])
    if first == len(queue):
        return 0, 0
    deadline_s = queue.deadline_at(first) + ROUNDING_S
    size = largest(min(most, len(queue) - first), lambda size: now_s + batch_s[size - 1] <= deadline_s)
    return first, max(1, size)  # a batch of 1 is feasible; only rounding can make `size` 0
