"""A queue by deadline, and the batches of it that can be in time (Shepherd, Section 5.2 and Appendix C).

    d_r   deadline of a request r
    T(b)  seconds of a batch of b, non-decreasing in b
    t     now

A batch of b is feasible when t + T(b) <= d_r for each r in it. Of the requests that wait, N(b) have a deadline of
t + T(b) or later; N falls with b, so the largest feasible batch has the largest b with N(b) >= b, found by bisection.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from llmserve.scheduling.queues import BinQueue, Ticket

ROUNDING_S = 1e-9  # sums of times differ by less when they should be equal


class DeadlineQueue(BinQueue):
    """Requests by deadline, the earliest first; those without one last, first come first. Each is in time as long as it
    starts early enough, whoever waits before it.

    A change costs O(log n) comparisons and moves at most n list entries.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._row: list[tuple[float, int]] = []  # (deadline, request id), ascending

    def append(self, ticket: Ticket) -> None:
        self._tickets[ticket.request.id] = ticket
        self.changes += 1
        entry = _entry(ticket)
        if self._row and entry < self._row[-1]:
            insort(self._row, entry)
        else:
            self._row.append(entry)

    def remove(self, ticket: Ticket) -> None:
        super().remove(ticket)
        del self._row[bisect_left(self._row, _entry(ticket))]

    def take_all(self) -> list[Ticket]:
        self._row.clear()
        return super().take_all()

    def take(self, count: int) -> list[Ticket]:
        """Those with the earliest deadlines."""
        return self.take_these(self.ids(0, count))

    def take_these(self, request_ids: Sequence[int]) -> list[Ticket]:
        self.changes += 1
        taken = [self._tickets.pop(request_id) for request_id in request_ids]
        first = bisect_left(self._row, _entry(taken[0]))
        if [request_id for _, request_id in self._row[first : first + len(taken)]] == list(request_ids):
            del self._row[first : first + len(taken)]
        else:
            gone = set(request_ids)
            self._row = [entry for entry in self._row if entry[1] not in gone]
        return taken

    @property
    def earliest_deadline_s(self) -> float:
        return self._row[0][0] if self._row else math.inf

    # ---- what can be in time ----

    def first_at(self, deadline_s: float) -> int:
        """Place of the first whose deadline is not before this one."""
        return bisect_left(self._row, (deadline_s - ROUNDING_S,))

    def in_time(self, deadline_s: float) -> int:
        """Requests whose deadline is not before this one."""
        return len(self._row) - self.first_at(deadline_s)

    def around_first(self, now_s: float, batch_s: Sequence[float], most: int) -> tuple[int, int]:
        """(place, size) of the largest feasible batch with the earliest deadline that can still be met; (0, 0): none
        can.
        """
        first = self.first_at(now_s + batch_s[0])
        if first == len(self._row):
            return 0, 0
        deadline_s = self._row[first][0] + ROUNDING_S
        low, high = 1, min(most, len(self._row) - first)
        while low < high:
            size = (low + high + 1) // 2
            if now_s + batch_s[size - 1] <= deadline_s:
                low = size
            else:
                high = size - 1
        return first, low

    def as_printed(
        self, now_s: float, empty_s: float, batch_s: Sequence[float], most: int, besides: Sequence[Ticket] = ()
    ) -> list[int]:
        """Request ids of the batch of Algorithm 2: by deadline, each that could be in time in a batch of the size
        before it joined. It may hold requests that will be late.

        empty_s : T(0)
        """
        row = sorted([*self._row, *map(_entry, besides)]) if besides else self._row
        chosen: list[int] = []
        before_s = now_s + empty_s - ROUNDING_S
        for deadline_s, request_id in row:
            if deadline_s < before_s:
                continue
            chosen.append(request_id)
            if len(chosen) == most:
                break
            before_s = now_s + batch_s[len(chosen) - 1] - ROUNDING_S
        return chosen

    def ids(self, start: int, count: int) -> list[int]:
        """Request ids of `count` by deadline, from the place `start` on."""
        return [request_id for _, request_id in self._row[start : start + count]]

    def deadline_at(self, place: int) -> float:
        return self._row[place][0]

    def oldest_undated(self) -> Ticket | None:
        """Of those without a deadline the one that came first; None: all have one."""
        if not self._row or self._row[-1][0] < math.inf:
            return None
        return self._tickets[self._row[self.first_at(math.inf)][1]]


def largest_feasible(
    queues: Sequence[DeadlineQueue], now_s: float, batch_s: Sequence[float], most: int, besides: Sequence[float] = ()
) -> int:
    """Size of the largest feasible batch of at most `most` requests, of any of these queues; 0: none is.

    batch_s : T(1), T(2), ..., at least `most` of them.  besides : ascending deadlines of others that would be in it
    """
    low, high = 0, min(most, sum(len(queue) for queue in queues) + len(besides))
    while low < high:
        size = (low + high + 1) // 2
        ends_s = now_s + batch_s[size - 1]
        fit = sum([queue.in_time(ends_s) for queue in queues])
        if besides:
            fit += len(besides) - bisect_left(besides, ends_s - ROUNDING_S)
        if fit >= size:
            low = size
        else:
            high = size - 1
    return low


def deadline_s(ticket: Ticket) -> float:
    """inf without one."""
    own_s = ticket.request.deadline_s
    return math.inf if own_s is None else own_s


def _entry(ticket: Ticket) -> tuple[float, int]:
    return deadline_s(ticket), ticket.request.id
