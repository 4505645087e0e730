"""Where requests wait: a queue for each bin, and one queue of formed batches."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum

from llmserve.request import Batch, Request
from llmserve.scheduling.memory import BLOCK_TOKENS

ENTRIES_SPARE = 64  # heap entries of requests that have left which may be kept before they are swept out


class Place(Enum):
    """Where an accepted request is; it is always in exactly one place."""

    BIN = "bin"
    FORMED = "formed"
    RUNNING = "running"


class Ticket:
    """One accepted request and where it is."""

    __slots__ = (
        "alike",
        "arrived_at_s",
        "batch_id",
        "began",
        "bin",
        "cancelled",
        "engine",
        "expected_tokens",
        "formed",
        "formed_at_s",
        "place",
        "preempted",
        "request",
        "retries",
        "score",
        "service_mean_s",
        "service_s",
        "started_at_s",
        "together",
        "total_tokens",
    )

    def __init__(
        self,
        request: Request,
        bin_index: int,
        arrived_at_s: float,
        score: float | None = None,
        *,
        tokens: float = 0.0,
        service_s: float = 0.0,
        service_mean_s: float = 1.0,
    ) -> None:
        self.request = request
        self.score = score  # what its bin goes by; None without a prediction
        self.alike = 0.0  # tokens by which it finds its like in a window; the same for all where nothing ranks them
        self.bin = bin_index
        self.arrived_at_s = arrived_at_s
        self.place = Place.BIN
        self.batch_id = 0  # set when a batch is formed
        self.formed: FormedBatch | None = None  # that it waits in, or last did
        self.formed_at_s = 0.0
        # Output tokens of a choice; time on an engine, and that of the mean answer as known at its arrival.
        self.expected_tokens = tokens
        self.service_s = service_s
        self.service_mean_s = service_mean_s
        # What an engine's memory holds of it at its end. Whole, so that sums of them come back to zero.
        self.total_tokens = math.ceil(request.prompt_tokens + request.choices * (tokens + BLOCK_TOKENS))
        self.engine = ""  # these two are set while running
        self.started_at_s = 0.0
        self.together = 0  # requests that ran on its engine once it had started, itself counted
        self.retries = 0
        self.cancelled = False
        self.began = False  # while it runs: its client has been given its first byte
        self.preempted = False  # while it runs: it was told to stop, for others


class BinQueue:
    """The requests of one bin, first come first. Every operation costs O(1) however many wait, of those with a deadline
    O(log n).

    changes: how often one has come, or some have gone.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.changes = 0
        self._deadlines: list[tuple[float, int]] = []  # heap; of those that have left, too
        # An OrderedDict, not a dict: taking from the front of a plain dict walks over its deleted entries.
        self._tickets: OrderedDict[int, Ticket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets.values())

    @property
    def oldest_at_s(self) -> float:
        """Arrival of the one that has waited longest. The queue must not be empty."""
        return next(iter(self._tickets.values())).arrived_at_s

    @property
    def earliest_deadline_s(self) -> float:
        """Of those that wait; inf when none has one."""
        heap = self._deadlines
        while heap and heap[0][1] not in self._tickets:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def append(self, ticket: Ticket) -> None:
        self._tickets[ticket.request.id] = ticket
        self.changes += 1
        if ticket.request.deadline_s is not None:
            heapq.heappush(self._deadlines, (ticket.request.deadline_s, ticket.request.id))
            if len(self._deadlines) > 2 * len(self._tickets) + ENTRIES_SPARE:
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._tickets]
                heapq.heapify(self._deadlines)

    def remove(self, ticket: Ticket) -> None:
        del self._tickets[ticket.request.id]
        self.changes += 1

    def take_all(self) -> list[Ticket]:
        """First come first."""
        self.changes += 1
        taken = list(self._tickets.values())
        self._tickets.clear()
        self._deadlines.clear()
        return taken

    def take(self, count: int) -> list[Ticket]:
        self.changes += 1
        return [self._tickets.popitem(last=False)[1] for _ in range(count)]


class WindowQueue(BinQueue):
    """A queue whose batches are neighbours by length, with no edges between them.

    Of those that wait the first `window` by turn are looked at. A batch of b always holds the one whose turn it is,
    and of all b in a row by length that do, those that waste least: slots times the longest, less the sum of all. So
    by order of arrival no request in the window is passed over more than `window` times, and usually about `window` / b
    times; by another order those whose turn is earlier come before it, as everywhere.

    turn : the order's key of a request; the smallest goes next.
    Every operation costs O(log window) comparisons and moves at most `window` list entries; taking b, O(b) more.
    """

    def __init__(self, index: int, window: int, turn: Callable[[Ticket], float]) -> None:
        super().__init__(index)
        self.window = window
        self._turn = turn
        self._by_length: list[tuple[float, int]] = []  # (tokens, request id) of those in the window
        self._by_turn: list[tuple[float, int]] = []  # (turn, request id) of the same
        self._beyond: list[tuple[float, int]] = []  # heap of the others' (turn, request id), and some that have left

    def append(self, ticket: Ticket) -> None:
        super().append(ticket)
        entry = (self._turn(ticket), ticket.request.id)
        if len(self._by_turn) == self.window:
            if entry > self._by_turn[-1]:
                heapq.heappush(self._beyond, entry)
                return
            last = self._by_turn.pop()
            self._leave_row(self._tickets[last[1]])
            heapq.heappush(self._beyond, last)
        self._enter(entry, ticket)

    def remove(self, ticket: Ticket) -> None:
        super().remove(ticket)
        entry = (self._turn(ticket), ticket.request.id)
        place = bisect_left(self._by_turn, entry)
        if place < len(self._by_turn) and self._by_turn[place] == entry:
            del self._by_turn[place]
            self._leave_row(ticket)
            self._fill()
        elif len(self._beyond) > 2 * len(self._tickets) + ENTRIES_SPARE:
            self._beyond = [entry for entry in self._beyond if entry[1] in self._tickets]
            heapq.heapify(self._beyond)

    def take(self, count: int) -> list[Ticket]:
        """At most as many as the window holds."""
        self.changes += 1
        taken = self._take_row(count)
        self._fill()
        return taken

    def take_all(self) -> list[Ticket]:
        self._by_length.clear()
        self._by_turn.clear()
        self._beyond.clear()
        return super().take_all()

    def _take_row(self, count: int) -> list[Ticket]:
        first = self._tickets[self._by_turn[0][1]]
        row = self._by_length
        start = _least_waste(row, bisect_left(row, (first.alike, first.request.id)), count)
        taken = [self._tickets.pop(request_id) for _, request_id in row[start : start + count]]
        del row[start : start + count]
        for ticket in taken:
            del self._by_turn[bisect_left(self._by_turn, (self._turn(ticket), ticket.request.id))]
        return taken

    def _enter(self, entry: tuple[float, int], ticket: Ticket) -> None:
        insort(self._by_turn, entry)
        insort(self._by_length, (ticket.alike, ticket.request.id))

    def _leave_row(self, ticket: Ticket) -> None:
        del self._by_length[bisect_left(self._by_length, (ticket.alike, ticket.request.id))]

    def _fill(self) -> None:
        """Let those beyond the window in, while there is room."""
        while self._beyond and len(self._by_turn) < self.window:
            entry = heapq.heappop(self._beyond)
            ticket = self._tickets.get(entry[1])
            if ticket is not None:
                self._enter(entry, ticket)


def _least_waste(row: list[tuple[float, int]], place: int, count: int) -> int:
    """Where the `count` in a row begin that hold the one at `place` and waste least.

    row : ascending lengths, tokens.  count : at most as many as there are.
    """
    first, last = max(0, place - count + 1), min(place, len(row) - count)
    lengths = [length for length, _ in row[first : last + count]]
    total = sum(lengths[:count])
    best, least = 0, count * lengths[count - 1] - total
    for start in range(1, last - first + 1):
        total += lengths[start + count - 1] - lengths[start - 1]
        waste = count * lengths[start + count - 1] - total
        if waste < least:
            best, least = start, waste
    return first + best


class FormedBatch:
    """A batch that waits for an engine; requests may leave it one by one (cancelled, or started by a refill engine)."""

    __slots__ = ("avoid", "bin", "formed_at_s", "id", "model", "size", "tickets")

    def __init__(
        self, batch_id: int, bin_index: int, formed_at_s: float, tickets: list[Ticket], model: str = ""
    ) -> None:
        self.id = batch_id
        self.bin = bin_index
        self.model = model
        self.formed_at_s = formed_at_s
        self.tickets = {ticket.request.id: ticket for ticket in tickets}
        self.size = len(tickets)
        self.avoid: str | None = None  # the engine that failed it: run elsewhere if there is an elsewhere

    def take(self, count: int) -> tuple[Batch, list[Ticket]]:
        """Remove the first `count` requests, as what an engine is told to start."""
        if count >= len(self.tickets):
            taken = list(self.tickets.values())
            self.tickets = {}
        else:
            taken = [self.tickets.pop(request_id) for request_id in list(self.tickets)[:count]]
        requests = tuple([ticket.request for ticket in taken])
        return Batch(self.id, self.bin, requests, self.formed_at_s, self.size, self.model), taken


class FormedQueue:
    """Formed batches by the order's key. Push and pop cost O(log batches), removal of a request O(1)."""

    def __init__(self, key: Callable[[FormedBatch], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, int, FormedBatch]] = []
        self._waiting = 0  # requests
        self._serial = 0

    def push(self, batch: FormedBatch) -> None:
        for ticket in batch.tickets.values():
            ticket.formed = batch
        self._waiting += len(batch.tickets)
        self.put_back(batch)

    def __len__(self) -> int:
        """Requests that wait in formed batches."""
        return self._waiting

    def __bool__(self) -> bool:
        return self._waiting > 0

    def batches(self) -> list[FormedBatch]:
        """Every batch that still holds a request, in order."""
        return [batch for *_, batch in sorted(self._heap) if batch.tickets]

    def remove(self, ticket: Ticket) -> None:
        assert ticket.formed is not None, "it is in no formed batch"
        del ticket.formed.tickets[ticket.request.id]
        self._waiting -= 1

    def first(self) -> FormedBatch | None:
        """The batch that runs next; None when nothing waits."""
        turn = self.turn()
        return None if turn is None else self._heap[0][3]

    def turn(self) -> tuple[float, int] | None:
        """Its place in the order, also among other queues' batches; None when nothing waits."""
        while self._heap:
            key, batch_id, _, batch = self._heap[0]
            if batch.tickets:
                return key, batch_id
            heapq.heappop(self._heap)
        return None

    def take(self, batch: FormedBatch, count: int) -> tuple[Batch, list[Ticket]]:
        started, tickets = batch.take(count)
        self._waiting -= len(tickets)
        return started, tickets

    def hold(self, batch: FormedBatch) -> None:
        """Count a batch that is in no order, for its engine is known; `take` its requests when that is free."""
        for ticket in batch.tickets.values():
            ticket.formed = batch
        self._waiting += len(batch.tickets)

    def set_aside(self, batch: FormedBatch) -> None:
        """Take the first batch out of the order for now; its requests still count. Give it back with `put_back`."""
        entry = heapq.heappop(self._heap)
        assert entry[3] is batch, "only the first batch can be set aside"

    def put_back(self, batch: FormedBatch) -> None:
        self._serial += 1  # a total order: equal keys never compare batches
        heapq.heappush(self._heap, (self._key(batch), batch.id, self._serial, batch))
