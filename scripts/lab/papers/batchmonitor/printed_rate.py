"""BatchMonitor and BatchDispatcher as printed (Algorithm 1).

The batch size is the least size, from 2 on, whose throughput exceeds the arrival rate of the last whole second. A batch
waits without limit until it has this size. llmserve's release `rate-headroom` is the same rule, repaired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmserve.scheduling.queues.waiting import BinQueue
from llmserve.scheduling.rates import ArrivalRate, Arrivals
from llmserve.scheduling.release import Planned
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig

SIZE_LEAST = 2
WINDOW_S = 1.0


class WindowCount(ArrivalRate):
    """The rate of the last arrivals, and the count of the last whole window. Windows begin at multiples of window_s."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._window_s = window_s
        self._window = 0
        self._count = self._last = 0

    def observe(self, now_s: float) -> bool:
        self._roll(now_s)
        self._count += 1
        return super().observe(now_s)

    def last_per_s(self, now_s: float) -> float:
        """Return the arrivals a second in the last whole window."""
        self._roll(now_s)
        return self._last / self._window_s

    @property
    def ends_at_s(self) -> float:
        """End of the window that was in progress at the last call."""
        return (self._window + 1) * self._window_s

    def _roll(self, now_s: float) -> None:
        window = math.floor(now_s / self._window_s)
        if window > self._window:
            self._last = self._count if window == self._window + 1 else 0
            self._window, self._count = window, 0


@dataclass(slots=True)
class PrintedRate(Planned):
    """count : of the arrivals to all bins. Each bin uses the whole count."""

    count: WindowCount

    def preferred(self, queue: BinQueue, now_s: float) -> int:
        """Return the batch size for the present rate, from the times of the plan. Needs a plan."""
        assert self.plan is not None, "the plan has the times"
        return self.least_size(queue, self.count.last_per_s(now_s) / self.plan.engines, SIZE_LEAST)

    def size(self, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        waiting = min(len(queue), self.batch_size)
        if self.plan is None:
            return waiting if idle is not None or waiting == self.batch_size else 0
        preferred = self.preferred(queue, now_s)
        return preferred if waiting >= preferred else 0

    def due_at_s(self, queue: BinQueue, idle: bool | None) -> float | None:
        """Return the end of the window: the preferred size, at least SIZE_LEAST, may then be smaller."""
        return self.count.ends_at_s if self.plan is not None and len(queue) >= SIZE_LEAST else None


class PrintedScheduling(SchedulingConfig, frozen=True, kw_only=True):
    """Scheduling by the printed rule. Plans are requested as by the repaired rule, which `release` names."""

    release: str | None = "rate-headroom"

    def scheduler(self, scores: Sequence[float] = (), lengths: Sequence[float] = (), **options: Any) -> Scheduler:
        return super().scheduler(scores, lengths, **{"release": self._printed, **options})

    def _printed(self, arrivals: Arrivals) -> PrintedRate:
        arrivals.total = count = WindowCount()  # observes every arrival
        return PrintedRate(self.full_batch, count)
