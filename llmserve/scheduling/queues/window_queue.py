"""Windows: batches of neighbours by length, without bin edges."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from bins.cutting import Cutting, least_waste
from llmserve.scheduling.fair import by_turn, dealt
from llmserve.scheduling.queues.waiting import ENTRIES_SPARE, BinQueue, QueuedRequest, turn_of_arrival


class WindowQueue(BinQueue):
    """A queue whose batches are neighbours by length, without bin edges.

    The window holds the first `window` waiting requests by turn. Among all runs of b neighbours by length that hold the
    first request by turn, the run of least waste is taken: b times the longest length, less the sum of the lengths.
    Another run goes before if it is of much more use, and of the run only the shortest requests are taken if the mean
    latency becomes shorter (bins/cutting.py). So with turns by arrival, no request in the window is passed over by more
    than `window` whole runs, and usually by about `window` / b, and before each of these by other runs that take no
    longer. With other turns, requests of earlier turns also come first, as in any queue. Where several shares wait, the
    window is dealt between them, and the next request belongs to the share that has been served least.

    turn : the order's key of a request; the request of the smallest key is next.
    Every operation costs O(log window) comparisons and moves at most `window` list entries; taking b of at least 2 b,
    O(window) more.
    """

    def __init__(self, index: int, window: int, turn: Callable[[QueuedRequest], float]) -> None:
        super().__init__(index)
        self.window = window
        self._turn = turn
        self._by_length: list[tuple[float, int]] = []  # (tokens, request id) of the window's requests
        self._by_turn: list[tuple[float, int]] = []  # (turn, request id) of the same requests
        self._turns: dict[int, float] = {}  # these turns, by id: a request's turn may have changed since
        self._turns_beyond: dict[int, float] = {}  # turns of the requests beyond the window, by id
        self._beyond: list[tuple[float, int]] = []  # heap of the same (turn, request id), and of some that have left
        self._cutting = Cutting()
        self._newest = (-math.inf, 0)  # the last arrival

    def append(self, queued: QueuedRequest) -> None:
        super().append(queued)
        self._sort_in(queued)
        if (arrival := turn_of_arrival(queued)) > self._newest:  # not a request that comes back
            self._newest = arrival
            self._cutting.arrived()

    def new_part(self) -> WindowQueue:
        return WindowQueue(self.index, self.window, self._turn)

    def _copy_to(self, part: BinQueue) -> None:
        super()._copy_to(part)
        assert isinstance(part, WindowQueue)
        part._by_length, part._by_turn, part._turns = self._by_length.copy(), self._by_turn.copy(), self._turns.copy()
        part._turns_beyond, part._beyond = self._turns_beyond.copy(), self._beyond.copy()

    def in_turn(self) -> Iterator[QueuedRequest]:
        """The requests of the window by turn: no others are dealt."""
        return (self.requests[request_id] for _, request_id in self._by_turn)

    def answered(self, queued: QueuedRequest, output_tokens: float) -> None:
        self._cutting.answered(queued.sort_length, output_tokens)

    def put_down(self, queued: QueuedRequest) -> None:
        if self.parts:
            self.parts[queued.share].put_down(queued)
        self._sort_in(queued)

    def _sort_in(self, queued: QueuedRequest) -> None:
        entry = (self._turn(queued), queued.request.id)
        if len(self._by_turn) == self.window:
            if entry > self._by_turn[-1]:
                self._put_beyond(entry)
                return
            last = self._by_turn.pop()
            del self._turns[last[1]]
            self._leave_row(self.requests[last[1]])
            self._put_beyond(last)
        self._enter(entry, queued)

    def remove(self, queued: QueuedRequest) -> None:
        super().remove(queued)
        self._sort_out(queued)

    def lift(self, queued: QueuedRequest) -> None:
        if self.parts:
            self.parts[queued.share].lift(queued)
        self._sort_out(queued)

    def _sort_out(self, queued: QueuedRequest) -> None:
        if self._turns_beyond.pop(queued.request.id, None) is not None:
            if len(self._beyond) > 2 * len(self._turns_beyond) + ENTRIES_SPARE:
                self._beyond = [(turn, request_id) for request_id, turn in self._turns_beyond.items()]
                heapq.heapify(self._beyond)
            return
        if queued.request.id in self._turns:
            self._leave_turns(queued.request.id)
            self._leave_row(queued)
            self._fill()

    def order_by(self, turn: Callable[[QueuedRequest], float]) -> None:
        self._turn = turn
        for part in self.parts.values():
            part.order_by(turn)

    def sort_all(self) -> None:
        for queued in self.take_all():
            self.append(queued)

    def take(self, count: int) -> list[QueuedRequest]:
        """Take `count` requests, or only the shortest of them. count : at most the number in the window"""
        self.changes += 1
        requests = self._take_row(count)
        self._fill()
        return requests

    def take_all(self) -> list[QueuedRequest]:
        self._by_length.clear()
        self._by_turn.clear()
        self._turns.clear()
        self._beyond.clear()
        self._turns_beyond.clear()
        return super().take_all()

    def _take_row(self, count: int) -> list[QueuedRequest]:
        first = self._next_dealt(count) if self.parts else self.requests[self._by_turn[0][1]]
        row = self._by_length
        place = bisect_left(row, (first.sort_length, first.request.id))
        start, end = max(0, place - count + 1), min(place, len(row) - count) + count
        lengths = [length for length, _ in row[start:end]]
        skipped = least_waste(lengths, count)
        start, lengths = start + skipped, lengths[skipped : skipped + count]
        before = None
        if len(row) >= 2 * count:
            before = self._cutting.before([length for length, _ in row], start, count, first.request.id)
        if before is not None:
            start = before
        else:
            count = self._cutting.size(lengths, len(self.requests), self.engines, place - start, first.request.id)
        requests = [self.requests.pop(request_id) for _, request_id in row[start : start + count]]
        del row[start : start + count]
        for queued in requests:
            self._leave_rows(queued)
            self._leave_turns(queued.request.id)
            if self.parts:
                self._leave_part(queued)
        return requests

    def _next_dealt(self, count: int) -> QueuedRequest:
        """Deal the window between the shares. Returns the first request of the share that has been served least.

        count : size of the batch. While enough other requests wait for a batch, no share gets further ahead than the
        cost of a batch
        """
        parts = ((share, part.in_turn()) for share, part in by_turn(self.parts))
        window = {queued.request.id: queued for queued in dealt(parts, self.window, count)}
        for entry in [entry for entry in self._by_turn if entry[1] not in window]:
            self._leave_turns(entry[1])
            self._leave_row(self.requests[entry[1]])
            self._put_beyond(entry)
        for request_id, queued in window.items():
            if (turn := self._turns_beyond.pop(request_id, None)) is not None:
                self._enter((turn, request_id), queued)
        return next(iter(window.values()))

    def _enter(self, entry: tuple[float, int], queued: QueuedRequest) -> None:
        self._turns[entry[1]] = entry[0]
        insort(self._by_turn, entry)
        insort(self._by_length, (queued.sort_length, queued.request.id))

    def _leave_turns(self, request_id: int) -> None:
        del self._by_turn[bisect_left(self._by_turn, (self._turns.pop(request_id), request_id))]

    def _leave_row(self, queued: QueuedRequest) -> None:
        del self._by_length[bisect_left(self._by_length, (queued.sort_length, queued.request.id))]

    def _put_beyond(self, entry: tuple[float, int]) -> None:
        self._turns_beyond[entry[1]] = entry[0]
        heapq.heappush(self._beyond, entry)

    def _fill(self) -> None:
        """Move requests from beyond the window into the window, while there is room."""
        while self._beyond and len(self._by_turn) < self.window:
            turn, request_id = entry = heapq.heappop(self._beyond)
            if self._turns_beyond.get(request_id) == turn:
                del self._turns_beyond[request_id]
                self._enter(entry, self.requests[request_id])
