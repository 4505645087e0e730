"""Release: does a bin let a batch go now, and of what size.

`size` answers for one bin; `due_at_s` says when the answer may change by time alone. Where several bins would let go
for one engine, the most urgent does.

Some releases go by what a batch of so many takes, or by a policy for the present load: they follow a plan
(bins/dispatch.py), which the scheduler asks for as loads and lengths change. Until the first has come they are greedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from bins.dispatch import DispatchPlan
from llmserve.scheduling.queues import BinQueue
from llmserve.scheduling.rates import Arrivals

WORD = 0xFFFFFFFFFFFFFFFF  # 64 bits


class Release(Protocol):
    plans: ClassVar[bool]  # whether it follows a plan
    fills: ClassVar[bool]  # whether it ever lets more go because an engine is free
    waits: ClassVar[bool]  # whether it ever lets less go than an engine that is free would take

    @property
    def timed(self) -> bool:
        """Whether `due_at_s` ever gives a time."""
        ...

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        """Requests to let go now, 0 to wait. The bin is not empty; nor is it below.

        idle : whether an engine that is free runs nothing, or has slots beside what runs; None: no engine is free
        """
        ...

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        """When a bin that waits must be asked again although nothing happened; None: not before something does, such
        as an engine becoming free.
        """
        ...

    def urgency(self, queue: BinQueue, now_s: float) -> float:
        """Of bins that would let go for the same engine the one of the greatest urgency does."""
        ...


class _OldestFirst:
    plans: ClassVar[bool] = False
    fills: ClassVar[bool] = True
    waits: ClassVar[bool] = True

    def urgency(self, queue: BinQueue, now_s: float) -> float:
        return -queue.oldest_at_s


@dataclass(frozen=True, slots=True)
class Full(_OldestFirst):
    """A batch goes when it has `batch_size` requests (the Multi-Bin paper's rule; SMDP-J's static batching)."""

    fills: ClassVar[bool] = False
    timed: ClassVar[bool] = False

    batch_size: int

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        return self.batch_size if len(queue) >= self.batch_size else 0

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class Timeout(_OldestFirst):
    """A batch goes when full; or to an engine that is free, when its oldest request has waited `wait_s`.

    While no engine is free, waiting on costs nothing, and small batches formed meanwhile would cost throughput.
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
class Greedy(_OldestFirst):
    """A batch goes when full, or with whatever is there as soon as an engine would otherwise idle."""

    waits: ClassVar[bool] = False
    timed: ClassVar[bool] = False

    batch_size: int

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        if idle is not None or len(queue) >= self.batch_size:
            return min(len(queue), self.batch_size)
        return 0

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class Window(_OldestFirst):
    """A batch is formed when an engine is free for it and not before: of neighbours by length among those that wait
    (queues.WindowQueue). The more there are to choose from, the more alike they are.
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
    """A release that follows a plan; None until the first one has come."""

    plans: ClassVar[bool] = True
    timed: ClassVar[bool] = True

    batch_size: int
    plan: DispatchPlan | None = field(default=None, init=False)

    def follow(self, plan: DispatchPlan) -> bool:
        """It is in force from now on; True when bins wait in other queues than before."""
        before, self.plan = self.plan, plan
        return before is None or before.queue_of != plan.queue_of

    def service_s(self, queue: BinQueue, count: int) -> float:
        """Expected time of a batch of so many of the bin's requests; 0 without a plan."""
        if self.plan is None:
            return 0.0
        service_s = self.plan.tables[queue.index].service_s
        return service_s[min(count, len(service_s)) - 1]

    def least_size(self, queue: BinQueue, rate_per_s: float, least: int = 1) -> int:
        """The least batch size, `least` or more, at which one engine serves more than so many requests a second; the
        largest there is where none does. Source: BatchMonitor, Algorithm 1.
        """
        for size in range(least, self.batch_size):
            if size > rate_per_s * self.service_s(queue, size):
                return size
        return self.batch_size

    def latest_start_s(self, queue: BinQueue) -> float:
        """When what waits must start to meet its earliest deadline nine times in ten; inf: there is none."""
        deadline_s = queue.earliest_deadline_s
        if self.plan is None or deadline_s == math.inf:
            return deadline_s
        late_s = self.plan.tables[queue.index].late_s
        return deadline_s - late_s[min(len(queue), len(late_s)) - 1]


@dataclass(slots=True)
class Rate(Planned):
    """BatchMonitor and BatchDispatcher: batches of the least size whose throughput exceeds the arrival rate.

    Source: BatchMonitor, Algorithm 1, repaired: the throughput must exceed rate / headroom, a size may be 1, the rate
    is that of the last arrivals, and no request waits beyond `wait_s`. As printed:
    scripts/lab/reproduction/batchmonitor.
    """

    arrivals: Arrivals
    headroom: float
    wait_s: float = math.inf

    def preferred(self, queue: BinQueue, now_s: float) -> int:
        """The batch size for the present rate, by the plan's times."""
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
        """Engines, each as far as it is to be used."""
        return (self.plan.engines if self.plan is not None else 1) * self.headroom

    def _limit_s(self, queue: BinQueue) -> float:
        return min(queue.oldest_at_s + self.wait_s, self.latest_start_s(queue))


@dataclass(slots=True)
class Deadline(Planned):
    """The largest batch within the deadline (Clipper's and Triton's way; BatchMonitor's first comparison).

    A bin lets go when full, or to an engine that is free when a request would be late if it waited longer: for its own
    deadline, or for the plan's latency target.
    """

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        waiting = len(queue)
        if waiting >= self.batch_size:
            return self.batch_size
        if idle is None:
            return 0
        return waiting if self.plan is None or now_s >= self._limit_s(queue) else 0

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        return _known(self._limit_s(queue)) if self.plan is not None and idle is not None else None

    def _limit_s(self, queue: BinQueue) -> float:
        assert self.plan is not None, "asked of a plan only"
        target_s = self.plan.latency_target_s
        limit_s = self.latest_start_s(queue)
        if target_s is None:
            return limit_s
        return min(limit_s, queue.oldest_at_s + target_s - self.service_s(queue, len(queue)))


@dataclass(slots=True)
class Table(Planned):
    """The policy of the plan (bins/smdp.py): how many go, by how many wait, whenever an engine is free to take them.

    wait_s: no request waits longer for an engine that is free; nor beyond what arrivals at the planned rate would take,
    nor past the last moment for its deadline. Slots beside what runs are taken at once.
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
        return _known(self._limit_s(queue)) if self.plan is not None and idle is not None else None

    def urgency(self, queue: BinQueue, now_s: float) -> float:
        """What serving now saves over waiting; nothing is more urgent than what has waited too long."""
        if self.plan is None:
            return -queue.oldest_at_s
        if now_s >= self._limit_s(queue):
            return math.inf
        advantage = self.plan.tables[queue.index].advantage
        return advantage[min(len(queue), len(advantage) - 1)] if advantage else -queue.oldest_at_s

    def _limit_s(self, queue: BinQueue) -> float:
        assert self.plan is not None, "asked of a plan only"
        wait_s = min(self.wait_s, self.plan.tables[queue.index].wait_s_max)
        return min(queue.oldest_at_s + wait_s, self.latest_start_s(queue))


def _known(limit_s: float) -> float | None:
    return limit_s if limit_s < math.inf else None


def _coin(queue: BinQueue) -> float:
    """In [0, 1), for each state of a queue another, and the same when asked again: a replay must decide alike.

    As if drawn (SplitMix64): what falls decides when the next one is drawn, and any pattern would favour a side.
    """
    word = queue.changes * 0x9E3779B97F4A7C15 & WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return (word ^ word >> 31) / 2.0**64
