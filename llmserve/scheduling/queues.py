"""Where requests wait: a queue for each bin, and one queue of formed batches for each model."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import takewhile

import msgspec

from llmserve.request import Request

ENTRIES_SPARE = 64  # heap entries of requests that have left which may be kept before they are removed


class QueuedRequest(msgspec.Struct, eq=False):
    """One accepted request. It is in exactly one place: in a bin, in a formed batch, or on an engine.

    score            value that determines its bin, tokens; None without a prediction
    expected_tokens  per choice, by its present forecast; likely_tokens : the mean length of answers of such forecasts
    service_s        likely time on a slot, by the seconds a token at its arrival; service_mean_s : of the mean answer
    prompt_s         part of service_s that its prompt takes
    total_tokens     tokens in an engine's memory at its end; whole, so that sums of them return to exactly zero
    lengths          equally likely lengths by its present forecast, tokens; (): only expected_tokens
    slots, decay_s   of its model: slots, and the decay of the wait's tail, as it was last sorted
    prompt_s, lengths, slots and decay_s are set for orders that follow the load only, by scheduling/load.py

    group, bin, sort_length  set by its model's queues: where it waits or last waited, and its length in a window
    judged           request and score at its arrival, by which predictions are judged; None: the present ones
    formed, run      set by the formed queue: the batch in which it waits; set by its engine while it runs
    retries, cancelled  set by the scheduler: how often its engine failed, whether its client has gone
    failed_on        engine that failed it first by a fault; "": none.  suspect : the fault may be its own (circuit.py)
    """

    request: Request
    bin: int
    arrived_at_s: float
    score: float | None = None
    expected_tokens: float = 0.0
    likely_tokens: float = 0.0
    service_s: float = 0.0
    service_mean_s: float = 1.0
    total_tokens: int = 0
    group: str = ""
    sort_length: float = 0.0
    prompt_s: float = 0.0
    lengths: tuple[float, ...] = ()
    slots: int = 1
    decay_s: float = 0.0
    judged: tuple[Request, float | None] | None = None
    formed: FormedBatch | None = None
    run: Run | None = None
    retries: int = 0
    cancelled: bool = False
    failed_on: str = ""
    suspect: bool = False

    @property
    def deadline_s(self) -> float:
        """inf without a deadline."""
        deadline_s = self.request.deadline_s
        return math.inf if deadline_s is None else deadline_s

    @property
    def work_us(self) -> int:
        """service_s in microseconds; whole, so that sums return to exactly zero."""
        return round(1e6 * self.service_s)

    def expect(self, tokens: float, likely: float) -> None:
        """Take the forecast of another `request`, at the same seconds a token. likely : mean tokens of such answers"""
        self.service_s = self.prompt_s + (self.service_s - self.prompt_s) * (likely / self.likely_tokens)
        self.expected_tokens, self.likely_tokens, self.lengths = tokens, likely, self.request.quantiles
        self.total_tokens = self.request.total_tokens(tokens)


def turn_of_arrival(queued: QueuedRequest) -> tuple[float, int]:
    return queued.arrived_at_s, queued.request.id


class Run(msgspec.Struct, eq=False):
    """A request's stay on an engine.

    engine           name of the engine; batch_id, formed_at_s : of its batch
    concurrency      requests on the engine once the batch had started
    steps_before     steps of the engine before its start (EngineState.record_run)
    began, stopping  whether its client has received the first byte, and whether it was preempted
    """

    queued: QueuedRequest
    engine: str
    batch_id: int
    formed_at_s: float
    started_at_s: float
    concurrency: int = 0
    steps_before: float = 0.0
    began: bool = False
    stopping: bool = False


class BinQueue:
    """The requests of one bin, in order of arrival. Every operation costs O(1) however many wait; where requests have
    deadlines a change costs O(log n) comparisons and moves at most n list entries.

    requests: by id, in order of arrival.  changes: number of additions and removals so far.  engines: that serve them
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.changes, self.engines = 0, 1
        # An OrderedDict, not a dict: taking from the front of a plain dict walks over its deleted entries.
        self.requests: OrderedDict[int, QueuedRequest] = OrderedDict()
        self._row: list[tuple[float, int]] = []  # (deadline, request id), ascending, of requests with a deadline

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self.requests.values())

    @property
    def oldest_at_s(self) -> float:
        """Arrival of the request that has waited longest. The queue must not be empty."""
        return next(iter(self.requests.values())).arrived_at_s

    @property
    def earliest_deadline_s(self) -> float:
        """inf when no request has a deadline."""
        return self._row[0][0] if self._row else math.inf

    def append(self, queued: QueuedRequest) -> None:
        self.requests[queued.request.id] = queued
        self.changes += 1
        if queued.request.deadline_s is not None:
            self._note_deadline(queued)

    def put_back(self, requests: Sequence[QueuedRequest]) -> None:
        """Insert requests by their arrival times. O(n) in the requests that arrived before the last of them."""
        last = max([turn_of_arrival(queued) for queued in requests])
        before = list(takewhile(lambda other: turn_of_arrival(other) < last, self))
        for queued in requests:
            self.append(queued)
        for queued in sorted([*before, *requests], key=turn_of_arrival, reverse=True):
            self.requests.move_to_end(queued.request.id, last=False)

    def remove(self, queued: QueuedRequest) -> None:
        del self.requests[queued.request.id]
        self.changes += 1
        self._forget_deadline(queued)

    def lift(self, queued: QueuedRequest) -> None:
        """Take a request out of what is sorted by forecasts, before its forecast changes; `put_down` must follow."""

    def put_down(self, queued: QueuedRequest) -> None:
        """Sort a request by its present forecast. The request is in the queue, in its place by arrival."""

    def answered(self, queued: QueuedRequest, output_tokens: float) -> None:
        """Learn from the answer of a request that waited here."""

    def sort_all(self, turn: Callable[[QueuedRequest], float] | None = None) -> None:
        """Sort what is sorted by turns again, for what they go by has changed. turn : another one"""

    def take_all(self) -> list[QueuedRequest]:
        """Take all requests, in order of arrival."""
        self.changes += 1
        requests = list(self.requests.values())
        self.requests.clear()
        self._row.clear()
        return requests

    def take(self, count: int) -> list[QueuedRequest]:
        self.changes += 1
        requests = [self.requests.popitem(last=False)[1] for _ in range(count)]
        if self._row:
            for queued in requests:
                self._forget_deadline(queued)
        return requests

    def _note_deadline(self, queued: QueuedRequest) -> None:
        entry = (queued.deadline_s, queued.request.id)
        if self._row and entry < self._row[-1]:
            insort(self._row, entry)
        else:
            self._row.append(entry)

    def _forget_deadline(self, queued: QueuedRequest) -> None:
        row, entry = self._row, (queued.deadline_s, queued.request.id)
        place = bisect_left(row, entry)
        if place < len(row) and row[place] == entry:
            del row[place]


class FormedBatch:
    """A batch that waits for an engine; requests may leave it one by one (cancelled, or started by a refill engine)."""

    __slots__ = ("avoid", "bin", "formed_at_s", "id", "key", "model", "requests", "serial", "size")

    def __init__(
        self, batch_id: int, bin_index: int, formed_at_s: float, requests: list[QueuedRequest], model: str = ""
    ) -> None:
        self.id = batch_id
        self.bin = bin_index
        self.model = model
        self.formed_at_s = formed_at_s
        self.requests = {queued.request.id: queued for queued in requests}
        self.size = len(requests)
        self.key = 0.0  # the order's key, by the present forecasts of its requests
        self.serial = 0  # of its entry among the batches that were never started; 0: it has none
        self.avoid: str | None = None  # the engine that failed the batch; used only while no other works

    @property
    def suspect(self) -> bool:
        """Whether some request of the batch may have been the cause of a fault."""
        return any(queued.suspect for queued in self.requests.values())

    @property
    def first(self) -> QueuedRequest:
        """The first request; the batch must not be empty."""
        return next(iter(self.requests.values()))

    def put_first(self, chosen: list[QueuedRequest]) -> None:
        """Move these requests of the batch to its front."""
        self.requests = {queued.request.id: queued for queued in (*chosen, *self.requests.values())}


class FormedQueue:
    """A model's formed batches by the key that the order gives them as they form; without such a key, by number.

    Push and pop cost O(log batches), removal of a request O(1).  returned : batches that an engine failed or lost; they
    are few, and kept apart, for each may have to wait for another engine.
    """

    def __init__(self, key: Callable[[FormedBatch], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, int, FormedBatch]] = []
        self._returned: list[FormedBatch] = []
        self._requests = 0
        self._serial = 0

    def push(self, batch: FormedBatch) -> None:
        self.hold(batch)
        batch.key = self._key(batch)
        self._enter(batch)

    def _enter(self, batch: FormedBatch) -> None:
        self._serial += 1  # makes entries distinct, so that the heap never compares batches
        batch.serial = self._serial
        heapq.heappush(self._heap, (batch.key, batch.id, batch.serial, batch))

    def sort_again(self, batch: FormedBatch) -> None:
        """Give a batch the key, and the place, that follow from the present forecasts of its requests."""
        key = self._key(batch)
        if key == batch.key:
            return
        batch.key = key
        if batch.serial:
            self._enter(batch)  # the batch's former entry is void from now on
            if len(self._heap) > 2 * self._requests + ENTRIES_SPARE:  # a valid entry has a request at least
                self._heap = [entry for entry in self._heap if _is_valid(entry)]
                heapq.heapify(self._heap)
            self._drop_void()

    def sort_all(self, key: Callable[[FormedBatch], float] | None = None) -> None:
        """Sort all batches again, for what their keys go by has changed. key : another one"""
        self._key = key or self._key
        fresh = [entry[3] for entry in self._heap if _is_valid(entry)]
        for batch in (*fresh, *self._returned):
            batch.key = self._key(batch) if batch.requests else batch.key
        self._heap = [(batch.key, batch.id, batch.serial, batch) for batch in fresh]
        heapq.heapify(self._heap)

    def push_returned(self, batch: FormedBatch) -> None:
        self.hold(batch)
        batch.key = self._key(batch)
        self._returned.append(batch)

    def set_apart(self, batch: FormedBatch) -> FormedBatch:
        """Keep a batch apart from those that were never started, so that others can start before it. Returns it."""
        if batch.serial:
            batch.serial = 0  # its entry is void from now on
            self._returned.append(batch)
            self._drop_void()
        return batch

    def hold(self, batch: FormedBatch) -> None:
        """Count a batch that is in no order, for its engine is already chosen; `take` its requests when it starts."""
        for queued in batch.requests.values():
            queued.formed = batch
        self._requests += len(batch.requests)

    def __len__(self) -> int:
        """Number of requests in formed batches."""
        return self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Their requests, in no order."""
        fresh = [entry[3] for entry in self._heap if entry[2] == entry[3].serial]
        return (queued for batch in (*fresh, *self._returned) for queued in batch.requests.values())

    @property
    def returned(self) -> list[FormedBatch]:
        """Returned batches that still hold a request, in order; parts of one batch in the order of their return."""
        if self._returned:
            self._returned = [batch for batch in self._returned if batch.requests]
        return sorted(self._returned, key=self.turn_of) if len(self._returned) > 1 else self._returned

    def fresh(self) -> FormedBatch | None:
        """The first batch that was never started; None when there is none."""
        return self._heap[0][3] if self._heap else None

    def first(self, without: Container[FormedBatch] = ()) -> FormedBatch | None:
        """The first batch, without these returned ones; None when there is none."""
        fresh = self._heap[0][3] if self._heap else None
        if not self._returned:
            return fresh
        returned = next((batch for batch in self.returned if batch not in without), None)
        if fresh is None or returned is None:
            return fresh or returned
        return min(fresh, returned, key=self.turn_of)

    def split(self, batch: FormedBatch, count: int) -> FormedBatch:
        """Hold the first `count` requests of a batch as a batch of their own, with the same number."""
        part = FormedBatch(batch.id, batch.bin, batch.formed_at_s, self.take(batch, count), batch.model)
        part.size = batch.size
        self.hold(part)
        return part

    def turn_of(self, batch: FormedBatch) -> tuple[float, int]:
        """The batch's place in the order: its key, and its number among equals."""
        return batch.key, batch.id

    def batches(self) -> list[FormedBatch]:
        """Every batch that still holds a request, in order."""
        fresh = [(*self.turn_of(entry[3]), entry[3]) for entry in self._heap if _is_valid(entry)]
        returned = [(*self.turn_of(batch), batch) for batch in self.returned]
        return [batch for *_, batch in sorted([*fresh, *returned], key=lambda entry: entry[:2])]

    def remove(self, queued: QueuedRequest) -> None:
        assert queued.formed is not None, f"request {queued.request.id} is in no formed batch"
        del queued.formed.requests[queued.request.id]
        queued.formed = None
        self._requests -= 1
        self._drop_void()

    def take(self, batch: FormedBatch, count: int) -> list[QueuedRequest]:
        """Take the first `count` requests out of a batch."""
        requests = batch.requests
        if count >= len(requests):
            leaving = list(requests.values())
            batch.requests = {}
        else:
            leaving = [requests.pop(request_id) for request_id in list(requests)[:count]]
        for queued in leaving:
            queued.formed = None
        self._requests -= len(leaving)
        self._drop_void()
        return leaving

    def _drop_void(self) -> None:
        """Pop void entries, so that the first batch of the heap holds a request."""
        heap = self._heap
        while heap and not (heap[0][3].requests and heap[0][2] == heap[0][3].serial):
            heapq.heappop(heap)


def _is_valid(entry: tuple[float, int, int, FormedBatch]) -> bool:
    """Whether the entry's batch still holds a request, and has no later entry."""
    return bool(entry[3].requests) and entry[2] == entry[3].serial
