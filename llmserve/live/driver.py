"""The driver of a scheduler in real time: events in, actions out, and a timer.

Nothing else in a server calls `Scheduler.handle`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from llmserve.live.alarm import Alarm
from llmserve.live.journal import Journal
from llmserve.scheduling.messages import Action, Event, TimerFired
from llmserve.scheduling.scheduler import Scheduler


class Driver:
    """One scheduler with its journal and the monotonic clock.

    carry_out : takes each action, and the time of its step
    """

    def __init__(
        self,
        scheduler: Scheduler,
        journal: Journal,
        carry_out: Callable[[Action, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.journal = journal
        self._carry_out = carry_out
        self._clock = clock
        self._started_at = clock()
        self._alarm = Alarm(self.now_s, lambda: self.step(TimerFired()))
        self._closed = False

    @property
    def zero_s(self) -> float:
        """The start, on the clock that was given."""
        return self._started_at

    def now_s(self) -> float:
        """Seconds since the start: the scheduler's clock."""
        return self._clock() - self._started_at

    def step(self, event: Event) -> None:
        """Give the scheduler an event, and have its actions carried out."""
        if self._closed:
            return
        now_s = self.now_s()
        actions = self.scheduler.handle(event, now_s)
        self.journal.append(now_s, event, actions)
        for action in actions:
            self._carry_out(action, now_s)
        self._alarm.set(self.scheduler.wake_at_s)

    def close(self) -> None:
        """Take no more events."""
        self._closed = True
        self._alarm.set(None)
