"""Order: which batch runs next. An order is a key; the candidate of the smallest key goes first.

A fixed order gives a batch its key when the batch forms, so a heap can hold the formed batches: the central queue of
Multi-Bin Batching. An order of the moment decides when an engine is free, by what can be in time on that engine.

    fffs       first formed, first served                                                        (Multi-Bin)
    shortest   shortest predicted first, with ageing
    boost      earliest arrival less a boost, which is large for short answers and follows the load   (generalized c mu)
    edf        earliest deadline first
    clockwork  the earliest deadline that can be met, in the largest batch in time               (Shepherd, Section 7)
    flex       the largest batch that can be in time; it preempts far smaller batches            (Shepherd, Section 5.2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.fair import Share, by_turn, dealt
from llmserve.scheduling.load import LONGEST
from llmserve.scheduling.queues.deadline_queue import DeadlineQueue, around_first, largest_feasible
from llmserve.scheduling.queues.waiting import FormedBatch, QueuedRequest, Run

UNDATED_S = 60.0
BEND = 8.0  # service times above about 1/8 of the mean get less than their full patience; see `turn`
WAIT_MOST = LONGEST + 1.0
"""Bound on a wait under boost, in longest waits W of first come, first served, by forecast work.

All requests that can start before another one have arrived less than last_s + ahead_s = LONGEST W after it. When so
much time has passed, all the waiting work takes W at most.
"""
PREEMPTION_FACTOR = 3.03

Key = tuple[float, ...]


@dataclass(slots=True)  # not frozen, for speed: a candidate is made for each waiting bin whenever an engine is free
class Candidate:
    """A batch that an engine could run now.

    engine   the engine
    model    the model of the requests
    queue    where the requests wait: a bin, or the requests of a formed batch
    batch_s  seconds of batches of 1, 2, ... requests of `queue` on the engine
    most     largest size of the batch
    waiting  requests that the batch could be made of, including `running`
    shorter  the model's bins of shorter answers, the longest first. Their requests end earlier, so each costs the batch
             one place only
    running  requests of these bins that the engine runs now, which would run again in a preempting batch
    batch    the formed batch; None: the batch has yet to be formed
    share    the share whose requests must be in the batch; None: any.  held : how many requests of the share must fit

    Set when the order composes the batch:
    count    requests in the batch, including `running`
    place    where the requests begin in the queue by deadline; None: requests that are in time in a batch of `count`,
             those of `queue` first
    """

    engine: EngineState
    model: str
    queue: DeadlineQueue
    batch_s: Sequence[float]
    most: int
    waiting: int
    shorter: Sequence[DeadlineQueue] = ()
    running: Sequence[Run] = ()
    batch: FormedBatch | None = None
    share: Share | None = None
    held: int = 1
    count: int = 0
    place: int | None = None

    @property
    def seconds(self) -> float:
        return self.batch_s[self.count - 1]

    def largest(self, now_s: float, *, with_running: bool = True) -> int:
        """Requests in the largest feasible batch."""
        deadlines_s = sorted([run.queued.deadline_s for run in self.running]) if with_running and self.running else ()
        return largest_feasible((self.queue, *self.shorter), now_s, self.batch_s, self.most, deadlines_s)

    def first(self, now_s: float) -> QueuedRequest:
        """The first request of the composed batch."""
        if self.place is not None:
            return self.queue.at(self.place)
        ends_s = now_s + self.seconds
        places = [(queue, queue.first_at(ends_s)) for queue in (self.queue, *self.shorter)]
        return next(queue.at(place) for queue, place in places if place < len(queue))

    def take(self, now_s: float) -> list[QueuedRequest]:
        """Take the requests of the composed batch out of their queues."""
        if self.place is not None:
            return self.queue.take_at(self.place, self.count)
        requests: list[QueuedRequest] = []
        ends_s = now_s + self.seconds
        if self.share is not None and self.batch is None:
            return self._take_dealt(ends_s)
        for queue in (self.queue, *self.shorter):
            if len(requests) < self.count:
                requests += queue.take_at(queue.first_at(ends_s), self.count - len(requests))
        return requests

    def _take_dealt(self, ends_s: float) -> list[QueuedRequest]:
        """Take requests that are in time, dealt between the shares, of each share those of `queue` first."""
        parts: dict[Share, list[Iterator[QueuedRequest]]] = {}
        for queue in (self.queue, *self.shorter):
            for share, part in queue.by_share():
                parts.setdefault(share, []).append(part.from_deadline(ends_s))
        requests = list(dealt(((share, chain(*rows)) for share, rows in by_turn(parts)), self.count))
        for queued in requests:
            next(queue for queue in (self.queue, *self.shorter) if queued.request.id in queue.requests).remove(queued)
        return requests

    def may_hold(self, now_s: float) -> bool:
        """Whether the composed batch can hold `held` requests of `share`."""
        if self.share is None or self.batch is not None:
            return True
        least_s = now_s + self.seconds if self.place is None else self.queue.deadline_at(self.place)
        queues = (self.queue, *self.shorter) if self.place is None else (self.queue,)
        parts = [part for queue in queues if (part := queue.of_share(self.share)) is not None]
        return sum([part.in_time(least_s) for part in parts]) >= min(self.held, self.count)


@dataclass(frozen=True, slots=True)
class Running:
    """A running batch that could be preempted.

    runs       its requests
    ends_at_s  expected time of its end
    """

    engine: EngineState
    runs: Sequence[Run]
    ends_at_s: float

    def __len__(self) -> int:
        return len(self.runs)


# ---- keys that are fixed -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FixedOrder:
    """An order whose keys are fixed when a batch forms.

    key           key of a formed batch; a returned batch keeps its number
    turn          key of a request that is in no batch yet; a window holds the requests with the smallest turns
    follows_load  whether both use the load (scheduling/load.py): requests are sorted again as the load changes
    """

    by_times: ClassVar[bool] = False  # see MomentOrder
    preempts: ClassVar[bool] = False

    key: Callable[[FormedBatch], float]
    turn: Callable[[QueuedRequest], float]
    follows_load: bool = False

    @property
    def batch_key(self) -> Callable[[FormedBatch], float]:
        return self.key


def fffs(batch: FormedBatch) -> float:
    """The batch's number: batches are numbered as they form."""
    return batch.id


def arrival(queued: QueuedRequest) -> float:
    return queued.arrived_at_s


def edf(batch: FormedBatch) -> float:
    """The earliest deadline in the batch."""
    return min([due_at_s(queued) for queued in batch.requests.values()])


def due_at_s(queued: QueuedRequest) -> float:
    """The deadline. A request without a deadline never fails for being late, but counts as due UNDATED_S after the
    arrival, so that a stream of requests with deadlines does not starve the request.
    """
    deadline_s = queued.request.deadline_s
    return queued.arrived_at_s + UNDATED_S if deadline_s is None else deadline_s


def is_overdue(queued: QueuedRequest, now_s: float) -> bool:
    return queued.request.deadline_s is None and queued.arrived_at_s + UNDATED_S <= now_s


def turn(patience: float) -> Callable[[QueuedRequest], float]:
    """Shortest predicted first, with ageing. Returns the function that gives a request's turn, seconds.

    The turn is the arrival time plus an allowance, which is concave in the predicted service time s:

        allowance(s) = patience * m / 8 * ln(1 + 8 s / m),   m: the mean service time

    For a short request the allowance is about patience * s. So of two requests that arrive together, the shorter goes
    first; and (in batches of one) no request overtakes an earlier one that has waited for more than `patience` times
    the earlier request's predicted service. For a long request the allowance is far less than patience * s: otherwise
    the longest answers would also wait longest, and lengthen the tail of the latency. With patience 0 the order is
    first come, first served.

    patience : >= 0, in units of predicted service.
    """

    def turn_s(queued: QueuedRequest) -> float:
        mean_s = queued.service_mean_s
        return queued.arrived_at_s + patience * mean_s / BEND * math.log1p(BEND * queued.service_s / mean_s)

    return turn_s


def shortest(patience: float) -> Callable[[FormedBatch], float]:
    """The mean turn of a batch's requests. All batches age alike, so the mean can be fixed when the batch forms."""
    return mean_turn(turn(patience))


def mean_turn(turn_s: Callable[[QueuedRequest], float]) -> Callable[[FormedBatch], float]:
    """The function that gives a batch the mean turn of its requests."""

    def turn_of_batch_s(batch: FormedBatch) -> float:
        requests = batch.requests
        if len(requests) == 1:
            (queued,) = requests.values()
            return turn_s(queued)
        return sum([turn_s(queued) for queued in requests.values()]) / len(requests)

    return turn_of_batch_s


def boosted(queued: QueuedRequest) -> float:
    """The turn under boost, seconds: the arrival, plus a delay that is below 0 for requests shorter than the mean.

        turn = a + r(s) (1 - m / s)          at most a + LONGEST W - V
        turn = a + r(m) (1 - m / s)          for s < m; from -V / 2 down in proportion to s: -V at s = 0
        turn = a + LONGEST W - V             for the longest requests, one in 200

    a : arrival.  s : likely time of the request on a slot, with its prompt.  m : that of a mean request
    r : the room for delays.  W : the longest wait that first come, first served would have given.  V : likewise, but
    without the work of the longest requests (load.py: Waits)

    m / s is the boost. Of two requests the one of the greater m / s + age / r is first: 1 / s is what a second of a
    slot gains in finished requests, and waiting for r counts as much as a mean request's boost. This is the generalized
    c mu rule for the cost T + (s / m) T^2 / 2 r of a latency T (van Mieghem, Annals of Applied Probability 5(3), 1995).
    A long request is delayed by less than r(s). When its latency would be near the 99th percentile without a delay,
    each delay lengthens the tail; then r is small, and the order is nearly first come, first served.

    The longest requests are fewer than the hundredth beyond the 99th percentile, and take more time than any others of
    their number. The percentile hardly changes however long they wait, so they go last, in order of arrival. As all
    others have V of work at most, they wait for LONGEST W then.

    A bound holds for any arrivals and any forecasts: see `WAIT_MOST`.

    A mean request's turn is its arrival at any load, so turns of several loads are comparable: of several models, and
    between two sorts of a queue. While no request has had to wait, and without forecasts, the order is first come,
    first served.
    """
    if queued.turn is not None:
        return queued.turn.key_s(queued.service_s)
    room, service_s, mean_s = queued.room, queued.service_s, queued.service_mean_s
    if room.margin_s <= 0.0:
        return queued.arrived_at_s
    if service_s >= queued.long_s:
        return queued.arrived_at_s + room.last_s
    if service_s >= mean_s:
        return queued.arrived_at_s + min(room.last_s, room.of_s(service_s) * (1.0 - mean_s / service_s))
    room_s, half_s = room.of_s(mean_s), 0.5 * room.ahead_s
    short_s = mean_s / (1.0 + half_s / room_s)  # of this boost
    if service_s < short_s:
        return queued.arrived_at_s - half_s * (2.0 - service_s / short_s)
    return queued.arrived_at_s + room_s * (1.0 - mean_s / service_s)


# ---- keys of the moment --------------------------------------------------------------------------------------------


class MomentOrder:
    """An order that decides when an engine is free, for that engine. A candidate without a key is not started.

    Its requests wait by deadline. It may preempt batches of barrier engines for candidates that are worth more.

    by_times      whether the order goes by how long batches take on each engine
    preempts      whether it preempts
    follows_load  see FixedOrder
    """

    by_times: ClassVar[bool] = True
    follows_load: ClassVar[bool] = False
    preempts: bool = False

    def batch_key(self, batch: FormedBatch) -> float:
        """Where the batch stands among the formed batches of its model."""
        return fffs(batch)

    def turn(self, queued: QueuedRequest) -> float:
        """Where a request stands that is in no batch yet, at least roughly: for positions in the queue."""
        return queued.deadline_s

    def key(self, candidate: Candidate, now_s: float) -> Key | None:
        """The key of a composed candidate; None: the candidate shall not run on its engine now."""
        raise NotImplementedError

    def compose(self, candidate: Candidate, now_s: float) -> bool:
        """Set the candidate's `count` and `place`: which requests run. False: none can."""
        candidate.count = candidate.largest(now_s)
        return candidate.count > 0

    def least_key(self, count: int) -> Key:
        """A lower bound on the keys of candidates of at most `count` requests. () is smaller than any key."""
        return ()

    def wake_at_s(self, engine: str, now_s: float) -> float | None:
        """When to ask again for an engine that got no batch, if no event comes before; None: only after an event."""
        return None

    # ---- preemption ----

    def may_stop(self, running: int, waiting: int, batch_size: int) -> bool:
        """Whether a batch of `running` requests could be preempted at all while at most `waiting` requests wait."""
        return True

    def victim_key(self, running: Running) -> Key:
        """The batch with the smallest key is the first to be preempted."""
        return (len(running),)

    def least_worth(self, running: Running) -> float:
        """Fewest requests that a batch must hold to be worth preempting this one."""
        return 1.0

    def stops(self, candidate: Candidate, running: Running, now_s: float) -> bool:
        """Whether a composed candidate shall preempt the running batch."""
        return False


class Clockwork(MomentOrder):
    """Earliest deadline first over whole queues, without preemption, as Shepherd describes Clockwork (Section 7)."""

    def compose(self, candidate: Candidate, now_s: float) -> bool:
        queue, most = candidate.queue, candidate.most
        candidate.place, candidate.count = around_first(queue, now_s, candidate.batch_s, most)
        return candidate.count > 0

    def key(self, candidate: Candidate, now_s: float) -> Key:
        assert candidate.place is not None, "the candidate must be composed first"
        return (candidate.queue.deadline_at(candidate.place),)


@dataclass(frozen=True)
class Flex(MomentOrder):
    """The largest batch that can be in time runs next, and preempts a running batch that is far smaller.

    Source: Shepherd (NSDI 2023), Section 5.2 and Appendix C. The queue with the largest feasible batch is served; among
    equals the queue whose batch takes least time (the greatest value density), then the queue with the earliest
    deadline. A running batch is preempted for a batch of at least `preemption_factor` times its size: 3.03 gives the
    competitive ratio of 12.62 K of Theorem 5.2.

    A free slot of an engine whose slots refill takes one request, so all candidates are equally large, and the fastest
    would always go first: see `_urgency`.

    In the paper, a model's service time does not depend on the request. An LLM's batch takes as long as its longest
    answer, so a model's requests wait in bins by predicted length, and a batch of one bin is filled up with requests of
    shorter bins: more bins make batches shorter, never smaller. Algorithm 2 as printed makes some requests of its
    batches late; the batches here are truly feasible (scheduling/queues/deadline_queue.py).

    preemption_factor : None: no preemption.  only_if_needed : preempt only if waiting requests would be late after the
    running batch. At low load this saves nearly all preemptions and loses nothing; a burst whose requests arrive one
    by one is detected a little later.
    """

    preemption_factor: float | None = PREEMPTION_FACTOR
    only_if_needed: bool = False

    @property
    def preempts(self) -> bool:  # type: ignore[override]
        return self.preemption_factor is not None

    def key(self, candidate: Candidate, now_s: float) -> Key:
        if not candidate.engine.info.barrier:
            return (-candidate.count, *_urgency(candidate, now_s))
        return (-candidate.count, candidate.seconds, candidate.queue.earliest_deadline_s)

    def least_key(self, count: int) -> Key:
        return (-count,)

    def may_stop(self, running: int, waiting: int, batch_size: int) -> bool:
        """Bounds the size of a preempting batch: `waiting` requests, and the preempted requests of the same model."""
        factor = self._factor
        return running * factor <= batch_size and running * (factor - 1.0) <= waiting

    def least_worth(self, running: Running) -> float:
        return self._factor * len(running)

    def stops(self, candidate: Candidate, running: Running, now_s: float) -> bool:
        if candidate.count < self.least_worth(running):
            return False
        if not self.only_if_needed or candidate.waiting > candidate.count:
            return True  # the batch cannot take all waiting requests, so any delay costs throughput
        after = candidate.largest(max(now_s, running.ends_at_s), with_running=False)
        return candidate.count > len(running) + after

    @property
    def _factor(self) -> float:
        assert self.preemption_factor is not None, "this order does not preempt"
        return self.preemption_factor


def _urgency(candidate: Candidate, now_s: float) -> Key:
    """Which of equally large candidates is first where slots refill: overloaded bins, the shortest answers first, then
    the others by deadline.

    A bin is overloaded when the requests of the bin and of shorter bins, on all slots, take longer than the bin's first
    request can wait. Then some will be late, fewest if the shortest go first. Other bins lose nothing by waiting.
    """
    first_s, queue = candidate.first(now_s).deadline_s, candidate.queue
    waiting = len(queue) + sum([len(shorter) for shorter in candidate.shorter])
    work_s = waiting * candidate.seconds / (queue.engines * candidate.engine.info.slots)
    if work_s > first_s - now_s - candidate.seconds:
        return 0.0, candidate.seconds, first_s
    return 1.0, first_s, candidate.seconds


Order = FixedOrder | MomentOrder
