"""Order: which batch runs next. An order is a key; the candidate of the smallest key goes first.

The keys of some orders are fixed as a batch forms, so that a heap holds what was formed: the central queue of
Multi-Bin Batching. Others decide at each moment, for the engine that is free, by what can be in time there.

    fffs       first formed, first served                                                        (Multi-Bin)
    shortest   shortest predicted first, with ageing
    edf        earliest deadline first
    clockwork  the earliest deadline that can still be met, with as many as leave it in time     (Shepherd, Section 7)
    flex       the largest batch that can be in time, which stops far smaller ones               (Shepherd, Section 5.2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmserve.scheduling.deadline_queue import DeadlineQueue, around_first, largest_feasible
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.queues import FormedBatch, QueuedRequest, Run

UNDATED_S = 60.0
BEND = 8.0  # service times of 1/8 of the mean and more are given less than their full patience
PREEMPTION_FACTOR = 3.03

Key = tuple[float, ...]


@dataclass(slots=True)  # not frozen: one is made for each bin that waits whenever an engine is free
class Candidate:
    """A batch that an engine could run now.

    engine   that could
    model    whose requests these are
    queue    that they are of: a bin, or the requests of a batch that was formed
    batch_s  seconds of batches of 1, 2, ... of them on that engine
    most     requests in a batch at most
    waiting  requests that it could be made of, those that run now among them
    shorter  the model's bins of shorter answers, the longest first: their requests end before its own, and cost its
             batch nothing but a place
    running  requests of these bins on that engine, which would run again in a batch that takes their place
    batch    that was formed; None: it would be now

    What the order composed of it:
    count    requests, those that run now among them
    place    where they begin in the queue by deadline; None: all that are in time in a batch of `count`, of its own
             bin first
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
        """Of what it is composed of, the request that starts first."""
        if self.place is not None:
            return self.queue.at(self.place)
        ends_s = now_s + self.seconds
        places = [(queue, queue.first_at(ends_s)) for queue in (self.queue, *self.shorter)]
        return next(queue.at(place) for queue, place in places if place < len(queue))

    def take(self, now_s: float) -> list[QueuedRequest]:
        """What it is composed of leaves its queues."""
        if self.place is not None:
            return self.queue.take_at(self.place, self.count)
        taken: list[QueuedRequest] = []
        ends_s = now_s + self.seconds
        for queue in (self.queue, *self.shorter):
            if len(taken) < self.count:
                taken += queue.take_at(queue.first_at(ends_s), self.count - len(taken))
        return taken


@dataclass(frozen=True, slots=True)
class Running:
    """A batch that runs, and could be stopped.

    runs       its requests
    ends_at_s  about when it will end
    """

    engine: EngineState
    runs: Sequence[Run]
    ends_at_s: float

    def __len__(self) -> int:
        return len(self.runs)


# ---- keys that are fixed -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FixedOrder:
    """key  of a batch as it forms; one that comes back from an engine keeps its number.
    turn  of a request that no batch holds yet: a window looks at the first.
    """

    key: Callable[[FormedBatch], float]
    turn: Callable[[QueuedRequest], float]


def fffs(batch: FormedBatch) -> float:
    """Batches are numbered as they form."""
    return batch.id


def arrival(queued: QueuedRequest) -> float:
    return queued.arrived_at_s


def edf(batch: FormedBatch) -> float:
    """The earliest deadline in it."""
    return min([due_at_s(queued) for queued in batch.requests.values()])


def due_at_s(queued: QueuedRequest) -> float:
    """A request without a deadline takes its turn as if it were due UNDATED_S after its arrival, so that a stream of
    requests with deadlines does not starve it. It is never failed for being late.
    """
    deadline_s = queued.request.deadline_s
    return queued.arrived_at_s + UNDATED_S if deadline_s is None else deadline_s


def is_overdue(queued: QueuedRequest, now_s: float) -> bool:
    return queued.request.deadline_s is None and queued.arrived_at_s + UNDATED_S <= now_s


def turn(patience: float) -> Callable[[QueuedRequest], float]:
    """Shortest predicted first, with ageing: when it is a request's turn, seconds.

    A request's turn is its arrival plus an allowance that grows with its predicted service time s, less and less:

        allowance(s) = patience * m / 8 * ln(1 + 8 s / m),   m: the mean service time

    For a short request that is patience * s, so of two that arrive together the shorter goes first, and (in batches of
    one) none is overtaken by a request that arrives later than `patience` times its own predicted service after it.
    For a long one it is far less: were it proportional, the longest answers, which need the most time anyway, would
    also wait the longest, and the tail of the latency would be theirs. With patience 0 all go first come first served.

    patience : >= 0, in units of predicted service.
    """

    def turn_s(queued: QueuedRequest) -> float:
        mean_s = queued.service_mean_s
        return queued.arrived_at_s + patience * mean_s / BEND * math.log1p(BEND * queued.service_s / mean_s)

    return turn_s


def shortest(patience: float) -> Callable[[FormedBatch], float]:
    """The mean turn of a batch's requests, fixed when it forms: all who wait grow older alike, which never changes
    their order.
    """
    turn_s = turn(patience)

    def turn_of_batch_s(batch: FormedBatch) -> float:
        return sum([turn_s(queued) for queued in batch.requests.values()]) / len(batch.requests)

    return turn_of_batch_s


# ---- keys of the moment --------------------------------------------------------------------------------------------


class MomentOrder:
    """An order that decides when an engine is free, for that engine. What it has no key for is not started.

    Its requests wait by deadline. It may stop batches that engines run to their end for candidates that are worth more.
    """

    preempts: bool = False

    def key(self, candidate: Candidate, now_s: float) -> Key | None:
        """Of a candidate that has been composed; None: it shall not run on this engine now."""
        raise NotImplementedError

    def compose(self, candidate: Candidate, now_s: float) -> bool:
        """Say how many go, and who. False: nobody can."""
        candidate.count = candidate.largest(now_s)
        return candidate.count > 0

    def least_key(self, count: int) -> Key:
        """No candidate of at most so many requests has a smaller key. () is smaller than any."""
        return ()

    def wake_at_s(self, engine: str, now_s: float) -> float | None:
        """When an engine that was given nothing is to be asked again although nothing happened."""
        return None

    # ---- preemption ----

    def may_stop(self, running: int, waiting: int, batch_size: int) -> bool:
        """Whether a batch of so many could be stopped at all while so many wait."""
        return True

    def victim_key(self, running: Running) -> Key:
        """Of several that could be stopped the smallest is."""
        return (len(running),)

    def least_worth(self, running: Running) -> float:
        """Requests that a batch must hold at least to be worth stopping this one."""
        return 1.0

    def stops(self, candidate: Candidate, running: Running, now_s: float) -> bool:
        """Whether what runs shall make room for a candidate that has been composed."""
        return False


class Clockwork(MomentOrder):
    """Earliest deadline first over whole queues, without preemption, as Shepherd describes Clockwork (Section 7)."""

    def compose(self, candidate: Candidate, now_s: float) -> bool:
        queue, most = candidate.queue, candidate.most
        candidate.place, candidate.count = around_first(queue, now_s, candidate.batch_s, most)
        return candidate.count > 0

    def key(self, candidate: Candidate, now_s: float) -> Key:
        assert candidate.place is not None, "it has been composed"
        return (candidate.queue.deadline_at(candidate.place),)


@dataclass(frozen=True)
class Flex(MomentOrder):
    """The largest batch that can be in time runs next, and stops what runs when that is far smaller.

    Source: Shepherd (NSDI 2023), Section 5.2 and Appendix C. Of all queues the one with the largest feasible batch is
    served; among equals the one that takes least time (the greatest value density), then the one whose deadline is
    earliest. A batch that runs is preempted for one of at least `preemption_factor` times its size: 3.03 gives the
    competitive ratio of 12.62 K of Theorem 5.2.

    The paper's models take as long whatever the request. An LLM's batch takes as long as its longest answer, so a
    model's requests wait in bins by predicted length, and a batch of one bin is filled up with shorter ones: more bins
    make batches shorter, never smaller. As printed, Algorithm 2 makes some requests of its batches late; these batches
    are truly feasible (scheduling/deadline_queue.py).

    preemption_factor : None: nothing is preempted.  only_if_needed : nor is it where what waits would still be in
    time after what runs. At low load that saves nearly all preemptions, and loses nothing; a burst that comes one by
    one is seen for what it is a little later.
    """

    preemption_factor: float | None = PREEMPTION_FACTOR
    only_if_needed: bool = False

    @property
    def preempts(self) -> bool:  # type: ignore[override]
        return self.preemption_factor is not None

    def key(self, candidate: Candidate, now_s: float) -> Key:
        return (-candidate.count, candidate.seconds, candidate.queue.earliest_deadline_s)

    def least_key(self, count: int) -> Key:
        return (-count,)

    def may_stop(self, running: int, waiting: int, batch_size: int) -> bool:
        """Where so few wait, not even those of their own model that run would make up the rest."""
        factor = self._factor
        return running * factor <= batch_size and running * (factor - 1.0) <= waiting

    def least_worth(self, running: Running) -> float:
        return self._factor * len(running)

    def stops(self, candidate: Candidate, running: Running, now_s: float) -> bool:
        if candidate.count < self.least_worth(running):
            return False
        if not self.only_if_needed or candidate.waiting > candidate.count:
            return True  # where more wait than the next batch takes, every moment counts
        after = candidate.largest(max(now_s, running.ends_at_s), with_running=False)
        return candidate.count > len(running) + after

    @property
    def _factor(self) -> float:
        assert self.preemption_factor is not None, "only of an order that preempts"
        return self.preemption_factor


Order = FixedOrder | MomentOrder
