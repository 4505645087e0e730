"""Release: whether a bin releases a batch now, and of which size.

`size` decides for one bin; `due_at_s` says when the decision may change without an event. If several bins would release
a batch for the same engine, the bin of the greatest urgency does.

Some releases use batch times, or a policy for the present load. These releases follow a plan (bins/dispatch.py), which
the scheduler asks for as loads and lengths change, and are greedy before the first plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from bins.dispatch import DispatchPlan, Observed
from bins.edges import Edges
from llmserve.scheduling.planner import Planner
from llmserve.scheduling.queues.waiting import BinQueue
from llmserve.scheduling.rates import Arrivals

WORD = 0xFFFFFFFFFFFFFFFF  # 64 bits


class Release(Protocol):
    fills: ClassVar[bool]  # whether a free engine may increase `size`
    plans: ClassVar[bool]  # whether the release follows a plan
    waits: ClassVar[bool]  # whether `size` may be less than a free engine would take

    @property
    def timed(self) -> bool:
        """Whether `due_at_s` ever gives a time."""
        ...

    @property
    def at_once(self) -> bool:
        """Whether `size` is 1 whenever a request waits, so that no request needs to wait in a bin."""
        ...

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        """Number of requests to release now; 0: wait. Here and below, the bin is not empty.

        idle : True: free engines run nothing; False: a free engine has slots beside its requests; None: none is free
        """
        ...

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        """When to ask `size` again if no event comes before; None: only after an event, such as an engine that becomes
        free.
        """
        ...

    def urgency(self, queue: BinQueue, now_s: float) -> float:
        """Of bins that would release for the same engine, the bin of the greatest urgency does."""
        ...


class _OldestFirst:
    plans: ClassVar[bool] = False
    fills: ClassVar[bool] = True
    waits: ClassVar[bool] = True

    @property
    def at_once(self) -> bool:
        return False

    def urgency(self, queue: BinQueue, now_s: float) -> float:
        return -queue.oldest_at_s


class _FullAtOnce(_OldestFirst):
    """A release that lets full batches go whether an engine is free or not."""

    batch_size: int

    @property
    def at_once(self) -> bool:
        return self.batch_size == 1


@dataclass(frozen=True, slots=True)
class Full(_FullAtOnce):
    """Full batches only, of `batch_size` requests (the Multi-Bin paper's rule; SMDP-J's static batching)."""

    fills: ClassVar[bool] = False
    timed: ClassVar[bool] = False

    batch_size: int

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        return self.batch_size if len(queue) >= self.batch_size else 0

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class Timeout(_FullAtOnce):
    """Full batches; or for a free engine, a batch whose oldest request has waited `wait_s`.

    While no engine is free, longer waiting costs nothing, but small batches would cost throughput.
    """

    timed: ClassVar[bool] = True

    batch_size: int
    wait_s: float

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        waiting = len(queue)
        if waiting >= self.batch_size:
            return self.batch_size
        late = idle is not None and now_s >= queue.oldest_at_s + self.wait_s
        return waiting if late else 0

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        return queue.oldest_at_s + self.wait_s if idle is not None else None


@dataclass(frozen=True, slots=True)
class Greedy(_FullAtOnce):
    """Full batches, or all waiting requests as soon as an engine would otherwise idle."""

    waits: ClassVar[bool] = False
    timed: ClassVar[bool] = False

    batch_size: int

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        waiting = len(queue.requests)
        if waiting >= self.batch_size:
            return self.batch_size
        return waiting if idle is not None else 0

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class Window(_OldestFirst):
    """Batches for free engines only, of neighbours by length in the window (WindowQueue). The more
    requests wait, the more alike are the lengths in a batch.
    """

    waits: ClassVar[bool] = False
    timed: ClassVar[bool] = False

    batch_size: int

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        return min(len(queue), self.batch_size) if idle is not None else 0

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        return None


# ---- releases that follow a plan ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Planned(_OldestFirst):
    """A release that follows a plan. plan : None before the first plan."""

    plans: ClassVar[bool] = True
    timed: ClassVar[bool] = True

    batch_size: int
    plan: DispatchPlan | None = field(default=None, init=False)

    def follow(self, plan: DispatchPlan) -> bool:
        """Follow this plan from now on. True when the plan assigns bins to other queues than before."""
        before, self.plan = self.plan, plan
        return before is None or before.queue_of != plan.queue_of

    def queue_of(self, bin_index: int) -> int:
        """The queue of a bin's requests. A plan that was made while predictions were not trusted has one queue."""
        if self.plan is None:
            return bin_index
        queue_of = self.plan.queue_of
        return queue_of[bin_index] if bin_index < len(queue_of) else 0

    def service_s(self, queue: BinQueue, count: int) -> float:
        """Expected time of a batch of `count` requests of the bin; 0 without a plan."""
        if self.plan is None:
            return 0.0
        service_s = self.plan.tables[queue.index].service_s
        return service_s[min(count, len(service_s)) - 1]

    def least_size(self, queue: BinQueue, rate_per_s: float, least: int = 1) -> int:
        """The least batch size, at least `least`, at which one engine serves more than `rate_per_s` requests a second;
        the largest size if none does. Source: BatchMonitor, Algorithm 1.
        """
        for size in range(least, self.batch_size):
            if size > rate_per_s * self.service_s(queue, size):
                return size
        return self.batch_size

    def latest_start_s(self, queue: BinQueue) -> float:
        """Latest start at which a batch of all meets the earliest deadline in 9 of 10 cases; inf: no deadline."""
        deadline_s = queue.earliest_deadline_s
        if self.plan is None or deadline_s == math.inf:
            return deadline_s
        late_s = self.plan.tables[queue.index].late_s
        return deadline_s - late_s[min(len(queue), len(late_s)) - 1]


@dataclass(slots=True)
class Rate(Planned):
    """BatchMonitor and BatchDispatcher: batches of the least size whose throughput exceeds the arrival rate.

    Source: BatchMonitor, Algorithm 1, repaired: the throughput must exceed rate / headroom, a size may be 1, the rate
    is that of the last arrivals, and no request waits longer than `wait_s`. As printed:
    scripts/lab/papers/batchmonitor.
    """

    arrivals: Arrivals
    headroom: float
    wait_s: float = math.inf

    def preferred(self, queue: BinQueue, now_s: float) -> int:
        """The batch size for the present rate, by the plan's batch times."""
        return self.least_size(queue, (self.arrivals.total.per_s(now_s) or 0.0) / self._used)

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        waiting = min(len(queue), self.batch_size)
        if self.plan is None:
            return waiting if idle is not None or waiting == self.batch_size else 0
        preferred = self.preferred(queue, now_s)
        if waiting >= preferred:
            return preferred
        return waiting if idle is not None and now_s >= self._limit_s(queue) else 0

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        if self.plan is None:
            return None
        waiting = range(1, min(len(queue), self.batch_size) + 1)
        enough_per_s = self._used * max(size / self.service_s(queue, size) for size in waiting)
        slower_s = self.arrivals.total.below_at_s(enough_per_s)
        return slower_s if idle is None else min(slower_s, self._limit_s(queue))

    @property
    def _used(self) -> float:
        """Number of engines times `headroom`, the share of their capacity that is to be used."""
        return (self.plan.engines if self.plan is not None else 1) * self.headroom

    def _limit_s(self, queue: BinQueue) -> float:
        return min(queue.oldest_at_s + self.wait_s, self.latest_start_s(queue))


@dataclass(slots=True)
class Deadline(Planned):
    """The largest batch within the deadline (Clipper's and Triton's way; BatchMonitor's first comparison).

    Release a batch when it is full; or for a free engine, when a request would miss its own deadline or the plan's
    latency target if it waited longer.
    """

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        waiting = len(queue)
        if waiting >= self.batch_size:
            return self.batch_size
        if idle is None:
            return 0
        return waiting if self.plan is None or now_s >= self._limit_s(queue) else 0

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        return _if_finite(self._limit_s(queue)) if self.plan is not None and idle is not None else None

    def _limit_s(self, queue: BinQueue) -> float:
        assert self.plan is not None, "the limit needs a plan"
        target_s = self.plan.latency_target_s
        limit_s = self.latest_start_s(queue)
        if target_s is None:
            return limit_s
        return min(limit_s, queue.oldest_at_s + target_s - self.service_s(queue, len(queue)))


@dataclass(slots=True)
class Table(Planned):
    """The policy of the plan (bins/smdp.py): the batch size by the number of waiting requests, for a free engine.

    wait_s: longest wait for an engine that is free. A request also waits no longer than expected arrivals at the
    planned rate would take, nor beyond the latest start for its deadline. Free slots beside running requests are used
    at once.
    """

    wait_s: float = math.inf

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        waiting = min(len(queue), self.batch_size)
        if waiting == self.batch_size:
            return waiting
        if idle is None:
            return 0
        if self.plan is None or idle is False or now_s >= self._limit_s(queue):
            return waiting
        table = self.plan.tables[queue.index]
        actions = table.other if table.other and _coin(queue) < self.plan.share else table.actions
        return actions[min(waiting, len(actions) - 1)]

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        return _if_finite(self._limit_s(queue)) if self.plan is not None and idle is not None else None

    def urgency(self, queue: BinQueue, now_s: float) -> float:
        """Cost that serving now saves over waiting; inf for a bin whose limit has passed."""
        if self.plan is None:
            return -queue.oldest_at_s
        if now_s >= self._limit_s(queue):
            return math.inf
        advantage = self.plan.tables[queue.index].advantage
        return advantage[min(len(queue), len(advantage) - 1)] if advantage else -queue.oldest_at_s

    def _limit_s(self, queue: BinQueue) -> float:
        assert self.plan is not None, "the limit needs a plan"
        wait_s = min(self.wait_s, self.plan.tables[queue.index].wait_s_max)
        return min(queue.oldest_at_s + wait_s, self.latest_start_s(queue))


class Plans:
    """The plans of one model. release : follows them.  planner : says when a new one is wanted"""

    def __init__(self, release: Planned, planner: Planner) -> None:
        self._release, self._planner = release, planner

    def arrived(self, bin_index: int, now_s: float) -> int:
        """Count an arrival in a bin. Returns the queue in which it waits."""
        self._planner.arrived(bin_index, now_s)
        return self._release.queue_of(bin_index)

    def answered(self) -> None:
        """Count a recorded answer."""
        self._planner.answered()

    def queue_of(self, bin_index: int) -> int:
        """The queue in which a bin's requests wait."""
        return self._release.queue_of(bin_index)

    def follow(self, plan: DispatchPlan) -> bool:
        """Follow a new plan. True when the plan assigns bins to other queues than before."""
        self._planner.solved()
        return self._release.follow(plan)

    def wants(
        self, now_s: float, edges: Edges | None, engines: int, slots: int, pace: Callable[[], float]
    ) -> Observed | None:
        """The load for which a new plan is wanted; see Planner."""
        return self._planner.wants(now_s, self._release.plan, edges, engines, slots, pace)


def _if_finite(limit_s: float) -> float | None:
    return limit_s if limit_s < math.inf else None


def _coin(queue: BinQueue) -> float:
    """A number in [0, 1) for each state of a queue; the same state gives the same number, so that replays agree.

    Pseudo-random (SplitMix64): each number decides when the next is drawn, so a regular pattern would bias the shares.
    """
    word = queue.changes * 0x9E3779B97F4A7C15 & WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return (word ^ word >> 31) / 2.0**64
