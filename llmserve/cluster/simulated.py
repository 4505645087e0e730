"""The simulated body: a virtual clock and engine models drive the scheduler.

The event loop is a heap of `(time_s, serial, event)`; arrivals come from the workload in order and are merged in,
so that memory does not grow with their number. Same inputs, same journal, byte for byte.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Protocol

from llmserve.cluster.journal import Journal
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    DrainRequested,
    EngineReady,
    Event,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.scheduler import Scheduler


class EngineModel(Protocol):
    """How long a simulated engine takes."""

    info: EngineInfo

    def ends(self, batch: Batch, now_s: float) -> list[tuple[float, Event]]:
        """When each part of a batch started now will end, and the event that says so."""
        ...


class SimulatedCluster:
    """Drives one scheduler through virtual time.

    on_step, when given, is called after each step with (now_s, event, actions): reports listen here.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engines: list[EngineModel],
        *,
        journal: Journal | None = None,
        on_step: Callable[[float, Event, list[Action]], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self._engines = {engine.info.name: engine for engine in engines}
        self._journal = journal
        self._on_step = on_step
        self._heap: list[tuple[float, int, Event]] = []
        self._serial = 0

    def run(self, arrivals: Iterator[tuple[float, Request]], *, flush: bool = True) -> None:
        """Run until nothing is left to happen.

        arrivals : (time_s, request), times non-decreasing.  flush: after the last arrival the bins let go of what
        they hold; otherwise what is left in partial batches is cancelled at the end.
        """
        for engine in self._engines.values():
            self._step(EngineReady(engine.info))
        for at_s, request in arrivals:
            self._advance(at_s)
            self._step(RequestArrived(request))
        if flush:
            self._step(DrainRequested())
        self._advance(None)
        for request_id in sorted(self.scheduler.requests):
            self._step(RequestCancelled(request_id))

    def _advance(self, until_s: float | None) -> None:
        """Let everything happen up to and including `until_s` (None: everything)."""
        while True:
            next_s = self._heap[0][0] if self._heap else None
            wake_s = self.scheduler.wake_at_s
            if wake_s is not None and (next_s is None or wake_s < next_s):
                if until_s is not None and wake_s > until_s:
                    break
                self.now_s = max(self.now_s, wake_s)
                self._step(TimerFired())
            elif next_s is not None and (until_s is None or next_s <= until_s):
                self.now_s, _, event = heapq.heappop(self._heap)
                self._step(event)
            else:
                break
        if until_s is not None:
            self.now_s = until_s

    def _step(self, event: Event) -> None:
        actions = self.scheduler.handle(event, self.now_s)
        for action in actions:
            self._carry_out(action)
        if self._journal is not None:
            self._journal.append(self.now_s, event, actions)
        if self._on_step is not None:
            self._on_step(self.now_s, event, actions)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, StartBatch):
            for at_s, ended in self._engines[action.engine].ends(action.batch, self.now_s):
                self._push(at_s, ended)
        elif isinstance(action, AbortRequest):
            self._push(self.now_s, RequestEnded(action.engine, action.request_id, "cancelled"))

    def _push(self, at_s: float, event: Event) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, self._serial, event))
