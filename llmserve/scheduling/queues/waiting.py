"""Where requests wait: a queue for each bin, and batches that have formed."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import msgspec

from llmserve.request import Request
from llmserve.scheduling.fair import NOBODY, Share, by_turn, cost, dealt
from llmserve.scheduling.programs.turn import Turn

ENTRIES_SPARE = 64  # heap entries of requests that have left which may be kept before they are removed


PART = 0.5  # of the room up to the tail that a delay may use; the rest is for the work that is yet to come


class Room(msgspec.Struct, frozen=True):
    """The room that the load leaves for delays; all 0 while no request has had to wait.

    slack_s   by which the present wait, first come, first served, is below the 99th percentile of latencies
    margin_s  by which any request may be delayed
    ahead_s   how far ahead of its arrival a request may go.  last_s : by which the longest requests are delayed
    """

    slack_s: float = 0.0
    margin_s: float = 0.0
    ahead_s: float = 0.0
    last_s: float = 0.0

    def of_s(self, service_s: float) -> float:
        """Seconds by which a request of this service time may be delayed; it is among the longest latencies sooner if
        its own time is long."""
        return PART * max(0.0, self.slack_s - service_s) + self.margin_s


NO_ROOM = Room()


class QueuedRequest(msgspec.Struct, eq=False):
    """One accepted request. A request is in exactly one place: in a bin, in a formed batch, or on an engine.

    The owner of each place sets it: the queues of the model (bin, sort_length), the formed batch (formed), the
    engine (run).

    score            value that determines the bin, tokens; None without a prediction
    expected_tokens  per choice, by the present forecast; likely_tokens : the mean length of answers of such forecasts
    cached_tokens    of the prompt: what the engine that has most of it in its cache need not compute; once the request
                     runs, its engine; once it has ended, what the engine has told, if anything
    service_s        likely time on a slot, by the seconds a token at the arrival; service_mean_s : of the mean answer
    work_us          service_s in microseconds; whole, so that sums return to exactly zero
    prompt_s         part of service_s that the prompt takes
    guessed          whether the answer has no forecast, so that it counts as the mean answer
    total_tokens     tokens in an engine's memory at the end of the run; whole, so that sums return to exactly zero
    room             for delays, when the request was last sorted
    long_s           service time from which on a request may wait until last
    These two are set for orders that follow the load only, by scheduling/load.py

    bin              where the request waits or last waited; sort_length : its length in a window
    original         request and score by which predictions are judged, see Binning.judges_by; None: the present ones
    retries, cancelled  how often an engine has failed, whether the client has gone
    failed_on        the first engine with a fault; "": none.  suspect : the request may be at fault (circuit.py)
    refused_by       names of the engines that have refused the request
    turn             the request as a step of a program's turn; None while no programs come (programs/)
    share            the share that pays.  charged : to the share while the request runs, weighted tokens
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
    sort_length: float = 0.0
    work_us: int = 0
    prompt_s: float = 0.0
    cached_tokens: float = 0.0
    room: Room = NO_ROOM
    long_s: float = math.inf
    original: tuple[Request, float | None] | None = None
    formed: FormedBatch | None = None
    run: Run | None = None
    retries: int = 0
    cancelled: bool = False
    failed_on: str = ""
    suspect: bool = False
    refused_by: frozenset[str] = frozenset()
    share: Share = NOBODY
    charged: float = 0.0
    turn: Turn | None = None
    guessed: bool = False

    @property
    def deadline_s(self) -> float:
        """inf without a deadline."""
        deadline_s = self.request.deadline_s
        return math.inf if deadline_s is None else deadline_s

    @property
    def cost(self) -> float:
        """Forecast cost to the share, weighted tokens."""
        return self.cost_of(self.request.choices * self.likely_tokens)

    def cost_of(self, answer_tokens: float) -> float:
        """Cost to the share, of what an engine must compute, weighted tokens. answer_tokens : of all choices"""
        return cost(max(0.0, self.request.prompt_tokens - self.cached_tokens), answer_tokens)

    def held(self, answer_tokens: float | None = None) -> tuple[int, int]:
        """Tokens of each block of the prompt, and of what the request holds beyond its blocks, as a Ledger counts them.
        answer_tokens : None: by forecast
        """
        request = self.request
        block_tokens = max(1, round(request.block_tokens))
        total = self.total_tokens if answer_tokens is None else math.ceil(request.prompt_tokens + answer_tokens)
        return block_tokens, max(0, total - len(request.blocks) * block_tokens)

    def expect(self, tokens: float, likely: float) -> None:
        """Take another forecast, at the same seconds a token. likely : mean tokens of answers of such forecasts"""
        self.service_s = self.prompt_s + (self.service_s - self.prompt_s) * (likely / self.likely_tokens)
        self.work_us = round(1e6 * self.service_s)
        self.expected_tokens, self.likely_tokens, self.guessed = tokens, likely, False
        self.total_tokens = self.request.total_tokens(tokens)

    def revise(self, request: Request, score: float | None, judged: tuple[Request, float | None] | None) -> None:
        """Take the request with a later forecast, and its score. judged : see Binning.judges_by"""
        self.request, self.score, self.original = request, score, judged

    # ---- its share ----

    def join(self, share: Share) -> None:
        """Wait as a request of this share."""
        self.share = share
        share.wait()

    def charge(self) -> None:
        """Start: charge the share, of which one request fewer waits, with the forecast cost."""
        self.charged = self.cost_of(self.request.choices * self.likely_tokens)
        self.share.start(self.charged, self.request.blocks)

    def true_up(self, answer_tokens: float) -> None:
        """End: charge the share with the real cost instead. answer_tokens : of all choices"""
        self.share.charge(self.cost_of(answer_tokens) - self.charged)
        self.charged = 0.0

    def refund(self) -> None:
        """Take the charge back, for the run was in vain. Call when the request waits again, or has failed."""
        self.share.charge(-self.charged)
        self.charged = 0.0


class Amount:
    """What requests have to do, in quantities of which the seconds are learnt later, too, and in microseconds by the
    speeds at the arrivals; whole, so that sums return to exactly zero.

    guessed  answers without a forecast.  tokens : likely, of the others.  prompt_us : of a slot
    work_us  of a slot.  long_us : of the requests that may wait until last
    """

    __slots__ = ("guessed", "long_us", "prompt_us", "tokens", "work_us")

    def __init__(self) -> None:
        self.guessed = self.tokens = self.prompt_us = self.work_us = self.long_us = 0

    def add(self, queued: QueuedRequest, sign: int = 1) -> None:
        self.work_us += sign * queued.work_us
        if queued.service_s >= queued.long_s:
            self.long_us += sign * queued.work_us
        if queued.guessed:
            self.guessed += sign
        else:
            self.tokens += sign * round(queued.likely_tokens)
        if queued.prompt_s:
            self.prompt_us += sign * round(1e6 * queued.prompt_s)


def turn_of_arrival(queued: QueuedRequest) -> tuple[float, int]:
    return queued.arrived_at_s, queued.request.id


class Run(msgspec.Struct, eq=False):
    """A request's stay on an engine.

    engine           name of the engine; batch_id, formed_at_s : of the request's batch
    concurrency      requests on the engine once the batch had started
    steps_before     steps of the engine before the start (EngineState.record_run)
    began, stopping  whether the client has received the first byte, and whether the run was preempted
    loads            whether the engine had to load the model first.  load_s : seconds of the run for that
    hit_tokens       of the prompt, which the engine was expected to have in its cache at the start
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
    loads: bool = False
    load_s: float = 0.0
    hit_tokens: float = 0.0


class BinQueue:
    """The requests of one bin, in order of arrival. Every operation costs O(1) however many requests wait; where these
    have deadlines, or some have come back, a change costs O(log n) comparisons and moves at most n list entries.

    Where requests of several shares wait, each taken batch is dealt between the shares (scheduling/fair.py).

    requests     by id; in order of arrival, unless some have come back
    changes      number of additions and removals so far
    engines      number of engines that serve the requests
    by_deadline  whether requests without a deadline have a place in the order of deadlines, too
    parts        the requests of each share, from the arrival of a second share until the queue is empty; {}: one share
    share        of all requests while there are no parts
    """

    by_deadline: ClassVar[bool] = False

    def __init__(self, index: int) -> None:
        self.index = index
        self.changes, self.engines = 0, 1
        # An OrderedDict, not a dict: taking from the front of a plain dict walks over its deleted entries.
        self.requests: OrderedDict[int, QueuedRequest] = OrderedDict()
        self.parts: dict[Share, BinQueue] = {}
        self.share = NOBODY
        self._row: list[tuple[float, int]] = []  # (deadline, request id), ascending, of requests with a deadline
        self._arrivals: list[tuple[float, int]] = []  # (arrival, request id), ascending; []: none has come back

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[QueuedRequest]:
        if self._arrivals:
            return (self.requests[request_id] for _, request_id in self._arrivals)
        return iter(self.requests.values())

    @property
    def oldest_at_s(self) -> float:
        """Arrival of the request that has waited longest. The queue must not be empty."""
        if self._arrivals:
            return self._arrivals[0][0]
        return next(iter(self.requests.values())).arrived_at_s

    @property
    def earliest_deadline_s(self) -> float:
        """inf when no request has a deadline."""
        return self._row[0][0] if self._row else math.inf

    def append(self, queued: QueuedRequest) -> None:
        share, request = queued.share, queued.request
        if self.requests and (self.parts or share is not self.share):
            self._join_part(queued)
        self.share = share
        self.requests[request.id] = queued
        self.changes += 1
        if request.deadline_s is not None or self.by_deadline:
            self._enter_row(queued)
        if self._arrivals:
            insort(self._arrivals, turn_of_arrival(queued))

    # ---- shares ----

    def new_part(self) -> BinQueue:
        """An empty queue like this one, for the requests of one share."""
        return BinQueue(self.index)

    def _join_part(self, queued: QueuedRequest) -> None:
        """Put a request into the part of its share, before it joins the queue."""
        if not self.parts:
            self._copy_to(self.part_of(self.share))
        part = self.part_of(queued.share)
        if self._arrivals:
            part.put_back((queued,))
        else:
            part.append(queued)

    def part_of(self, share: Share) -> BinQueue:
        """The part of a share, made on first use."""
        part = self.parts.get(share)
        if part is None:
            part = self.parts[share] = self.new_part()
        return part

    def _copy_to(self, part: BinQueue) -> None:
        """Let an empty queue, the only part, have the same requests in the same order."""
        part.requests, part.share = self.requests.copy(), self.share
        part._row, part._arrivals = self._row.copy(), self._arrivals.copy()

    def _leave_part(self, queued: QueuedRequest) -> None:
        """Remove a request, which has left the queue, from the part of its share."""
        if not self.requests:
            self.parts.clear()
            return
        part = self.parts[queued.share]
        part.remove(queued)
        if not part.requests:
            del self.parts[queued.share]

    def waits_here(self, share: Share) -> bool:
        """Whether a request of the share waits here."""
        if self.parts or not self.requests:
            return share in self.parts
        return self.share is share

    def in_turn(self) -> Iterator[QueuedRequest]:
        """The requests in the order of `take`, while all are of one share."""
        return iter(self)

    def take_dealt(self, parts: Iterable[tuple[Share, Iterator[QueuedRequest]]], count: int) -> list[QueuedRequest]:
        """Take `count` requests, dealt between the shares. parts : see dealt"""
        requests = list(dealt(parts, count))
        for queued in requests:
            self.remove(queued)
        return requests

    # ---- requests that come back or leave ----

    def put_back(self, requests: Sequence[QueuedRequest]) -> None:
        """Insert requests by their arrival times. The first that come back cost O(n)."""
        for queued in sorted(requests, key=turn_of_arrival):
            if self.requests and not self._arrivals:
                self._arrivals = sorted([turn_of_arrival(other) for other in self])
            self.append(queued)

    def divide(self) -> None:
        """Divide the requests between the shares again, after their order or their shares have changed."""
        self.parts.clear()
        requests = list(self)
        self.share = requests[0].share if requests else NOBODY
        if any(queued.share is not self.share for queued in requests):
            for queued in requests:
                self.part_of(queued.share).append(queued)

    def remove(self, queued: QueuedRequest) -> None:
        del self.requests[queued.request.id]
        self.changes += 1
        self._leave_rows(queued)
        if self.parts:
            self._leave_part(queued)

    def lift(self, queued: QueuedRequest) -> None:
        """Remove a request from the rows sorted by forecast, before the forecast changes; `put_down` must follow."""

    def put_down(self, queued: QueuedRequest) -> None:
        """Sort a request into these rows again. The request has kept its place in the queue, by arrival."""

    def answered(self, queued: QueuedRequest, output_tokens: float) -> None:
        """Learn from the answer of a request that waited here."""

    def order_by(self, turn: Callable[[QueuedRequest], float]) -> None:
        """Sort by another key from now on; those that wait have to be sorted again."""

    def sort_all(self) -> None:
        """Sort again after the inputs of the keys have changed."""

    def take_all(self) -> list[QueuedRequest]:
        """Take all requests, in order of arrival."""
        self.changes += 1
        requests = list(self)
        self.requests.clear()
        self.parts.clear()
        self._row.clear()
        self._arrivals.clear()
        return requests

    def take(self, count: int) -> list[QueuedRequest]:
        if self.parts:
            return self.take_dealt(((share, part.in_turn()) for share, part in by_turn(self.parts)), count)
        self.changes += 1
        if self._arrivals:
            requests = [self.requests.pop(request_id) for _, request_id in self._arrivals[:count]]
        else:
            requests = [self.requests.popitem(last=False)[1] for _ in range(count)]
        if self._row or self._arrivals:
            for queued in requests:
                self._leave_rows(queued)
        return requests

    def _enter_row(self, queued: QueuedRequest) -> None:
        entry = (queued.deadline_s, queued.request.id)
        if self._row and entry < self._row[-1]:
            insort(self._row, entry)
        else:
            self._row.append(entry)

    def _leave_rows(self, queued: QueuedRequest) -> None:
        """Remove a request, which has left the queue, from the rows by deadline and by arrival."""
        row, entry = self._row, (queued.deadline_s, queued.request.id)
        place = bisect_left(row, entry)
        if place < len(row) and row[place] == entry:
            del row[place]
        if self._arrivals:
            del self._arrivals[bisect_left(self._arrivals, turn_of_arrival(queued))]


class FormedBatch:
    """A batch that waits for an engine. Requests may leave one by one: cancelled, or started by a refill engine."""

    __slots__ = (
        *(
            "avoid",
            "behind",
            "bin",
            "formed_at_s",
            "id",
            "key",
            "large",
            "later_until_s",
            "model",
            "requests",
            "serial",
        ),
        *("share", "size"),
    )

    def __init__(
        self, batch_id: int, bin_index: int, formed_at_s: float, requests: list[QueuedRequest], model: str = ""
    ) -> None:
        self.id = batch_id
        self.bin = bin_index
        self.model = model
        self.formed_at_s = formed_at_s
        self.requests = {queued.request.id: queued for queued in requests}
        self.size = len(requests)
        self.key = 0.0  # the order's key, by the present forecasts of the requests
        self.serial = 0  # of the batch's entry in the formed queue; 0: none
        self.large = False  # whether the entry is in a sub-queue of large batches
        self.behind: str | None = None  # for what it waits in another sub-queue (FormedQueue); None: in none
        self.later_until_s = math.inf  # how long it may wait for a busy engine at most; inf: it has not begun to
        self.avoid: frozenset[str] = frozenset()  # engines that failed or refused the batch; used if no other works
        self.share = requests[0].share if len(requests) == 1 else self.join_least_served()

    # ---- its requests ----

    def hold(self) -> None:
        """Tell the requests that they wait in this batch."""
        for queued in self.requests.values():
            queued.formed = self

    def drop(self, queued: QueuedRequest) -> None:
        """Remove a request."""
        del self.requests[queued.request.id]
        queued.formed = None

    def take(self, count: int) -> list[QueuedRequest]:
        """Remove the first `count` requests, and return them."""
        requests = self.requests
        if count >= len(requests):
            leaving = list(requests.values())
            self.requests = {}
        else:
            leaving = [requests.pop(request_id) for request_id in list(requests)[:count]]
        for queued in leaving:
            queued.formed = None
        return leaving

    # ---- its place in the formed queue ----

    def entry(self, serial: int, *, large: bool = False, behind: str | None = None) -> Entry:
        """Make the batch's entry, which voids an earlier one. large, behind : see FormedQueue"""
        self.serial, self.large, self.behind = serial, large, behind
        return self.key, self.id, serial, self

    def leave_entry(self) -> None:
        """Have no entry from now on."""
        self.serial = 0

    def join_least_served(self) -> Share:
        """Take the batch's least served share as the batch's share, whose sub-queue is the batch's place, and count as
        not large. Returns the share.
        """
        if len(self.requests) == 1:
            (queued,) = self.requests.values()
            self.share = queued.share
        else:
            shares = dict.fromkeys([queued.share for queued in self.requests.values()])
            self.share = min(shares, key=lambda share: share.place, default=NOBODY)
        self.large, self.behind = False, None
        return self.share

    def come_back(self, engine: str) -> None:
        """Avoid an engine that failed, refused or lost the batch, and the engines that have refused its requests."""
        self.avoid = frozenset((engine,)).union(*[queued.refused_by for queued in self.requests.values()])
        self.join_least_served()

    def has(self, share: Share) -> bool:
        """Whether a request of the share is in the batch."""
        return any(queued.share is share for queued in self.requests.values())

    @property
    def passable(self) -> bool:
        """Whether others may pass the batch: it is in a sub-queue of large batches, or waits for something else."""
        return self.large or self.behind is not None

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


Entry = tuple[float, int, int, FormedBatch]  # in a formed queue: key, number, serial
