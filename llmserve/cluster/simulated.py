"""The simulated body: a virtual clock and engine models drive the scheduler.

The event loop is a heap of `(time_s, serial, engine)`: when the next thing ends on each engine. An engine's ends may
move (requests that join slow the others down): a new entry then voids its earlier one. Arrivals come from the workload
in order and are merged in, so that memory does not grow with their number. Same inputs, same journal, byte for byte.

Nothing is late and nothing fails by itself. Faults come from engine models that fail (tests/worlds/faults.py), from
what the scheduler is told besides (`SimulatedCluster.tell`) and from `Delays`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from bins.dispatch import DispatchSolver
from llmserve.cluster.journal import Journal
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    DispatchSolved,
    DrainRequested,
    EngineReady,
    Event,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.scheduler import Scheduler


class Source(Protocol):
    """Of things that happen in their own time: requests and batches end, answers begin."""

    @property
    def next_end_s(self) -> float | None:
        """When the next thing ends if nothing joins or leaves until then; None: nothing runs."""
        ...

    def end(self, now_s: float) -> Event | None:
        """What ends at next_end_s, which is now; it is then over. None: nothing that the scheduler is told of."""
        ...


class EngineModel(Source, Protocol):
    """How long a simulated engine takes. It is told the time at every call, and never a time before the last one."""

    info: EngineInfo

    def start(self, batch: Batch, now_s: float) -> None:
        """Run these requests."""
        ...

    def abort(self, request_id: int, now_s: float) -> None:
        """Let go of a request, if it is still there; nothing more is said of it."""
        ...


@dataclass(frozen=True, slots=True)
class Delays:
    """How late a body is. All are called in the order of what happens, so that they may draw.

    abort_s     seconds until an engine hears that it is to stop a request; it may have ended by then
    plan_s      seconds that a plan takes
    timer_at_s  when a timer fires that is set for a time: not before it, and always the same for the same time
    """

    abort_s: Callable[[], float]
    plan_s: Callable[[], float]
    timer_at_s: Callable[[float], float]


class _Scheduled:
    """What happens next of a source, and which of its heap entries stands."""

    __slots__ = ("at_s", "serial", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.at_s: float | None = None
        self.serial = 0


class _Once:
    """A source of one thing."""

    __slots__ = ("_say", "next_end_s")

    def __init__(self, at_s: float, say: Callable[[], Event]) -> None:
        self.next_end_s: float | None = at_s
        self._say = say

    def end(self, now_s: float) -> Event:
        self.next_end_s = None
        return self._say()


class SimulatedCluster:
    """Drives one scheduler through virtual time. Plans are made in no time.

    solver  makes them, where the scheduler's release follows plans
    delays  None: nothing is late
    on_step, when given, is called after each step with (now_s, event, actions): reports listen here.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engines: list[EngineModel],
        *,
        solver: DispatchSolver | None = None,
        journal: Journal | None = None,
        delays: Delays | None = None,
        on_step: Callable[[float, Event, list[Action]], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self._engines = {engine.info.name: (engine, _Scheduled(engine)) for engine in engines}
        self._solver = solver
        self._journal = journal
        self._delays = delays
        self._on_step = on_step
        self._heap: list[tuple[float, int, _Scheduled]] = []
        self._serial = 0
        self._at_once: deque[Event] = deque()  # of which the scheduler is told before time goes on

    def run(self, arrivals: Iterator[tuple[float, Request]], *, flush: bool = True) -> None:
        """Run until nothing is left to happen.

        arrivals : (time_s, request), times non-decreasing.  flush: after the last arrival the bins let go of what
        they hold; otherwise what is left in partial batches is cancelled at the end.
        """
        for engine, scheduled in self._engines.values():
            self._step(EngineReady(engine.info))
            self._schedule(scheduled)
        for at_s, request in arrivals:
            self._advance(at_s)
            self._step(RequestArrived(request))
        if flush:
            self._step(DrainRequested())
        self._advance(math.inf)
        for request_id in sorted(self.scheduler.requests):
            self._step(RequestCancelled(request_id))

    def tell(self, event: Event, at_s: float) -> None:
        """Tell the scheduler this too, when its time has come; of what happens at one instant, what was known first.

        at_s : not before now. May be called before the run and, from on_step, during it.
        """
        assert at_s >= self.now_s, f"{event} is told at {self.now_s}, too late for {at_s}"
        self._schedule(_Scheduled(_Once(at_s, lambda: event)))

    def _advance(self, until_s: float) -> None:
        """Let everything happen up to and including `until_s` (inf: everything)."""
        heap = self._heap
        while True:
            if self._at_once:
                self._step(self._at_once.popleft())
                continue
            while heap and heap[0][1] != heap[0][2].serial:  # void
                heapq.heappop(heap)
            next_s = heap[0][0] if heap else math.inf
            wake_s = self.scheduler.wake_at_s
            if wake_s is not None and self._delays is not None:
                wake_s = self._delays.timer_at_s(wake_s)
            if wake_s is not None and wake_s < next_s:
                if wake_s > until_s:
                    break
                self.now_s = max(self.now_s, wake_s)
                self._step(TimerFired())
            elif heap and next_s <= until_s:
                self._end_next()
            else:
                break
        if until_s < math.inf:
            self.now_s = until_s

    def _end_next(self) -> None:
        self.now_s, _, scheduled = heapq.heappop(self._heap)
        scheduled.at_s = None
        event = scheduled.source.end(self.now_s)
        if event is not None:
            self._step(event)
        if scheduled.at_s is None:  # else the step has given the engine something else to end, and scheduled that
            self._schedule(scheduled)

    def _step(self, event: Event) -> None:
        now_s = self.now_s
        actions = self.scheduler.handle(event, now_s)
        for action in actions:
            self._carry_out(action)
        if self._journal is not None:
            self._journal.append(now_s, event, actions)
        if self._on_step is not None:
            self._on_step(now_s, event, actions)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, StartBatch):
            engine, scheduled = self._engines[action.engine]
            engine.start(action.batch, self.now_s)
            self._schedule(scheduled)
        elif isinstance(action, AbortRequest):
            self._carry_out_abort(action.engine, action.request_id)
        elif isinstance(action, PreemptBatch):
            for request_id in action.request_ids:
                self._carry_out_abort(action.engine, request_id)
        elif isinstance(action, SolveDispatch):
            assert self._solver is not None, "a release that follows plans has a solver"
            solved = DispatchSolved(self._solver.solve(action.observed), action.model)
            if self._delays is None:
                self._at_once.append(solved)
            else:
                self.tell(solved, self.now_s + self._delays.plan_s())

    def _carry_out_abort(self, engine: str, request_id: int) -> None:
        if self._delays is None:
            self._at_once.append(self._abort(engine, request_id))
        else:
            at_s = self.now_s + self._delays.abort_s()
            self._schedule(_Scheduled(_Once(at_s, partial(self._abort, engine, request_id))))

    def _abort(self, name: str, request_id: int) -> Event:
        engine, scheduled = self._engines[name]
        engine.abort(request_id, self.now_s)
        self._schedule(scheduled)
        return RequestEnded(name, request_id, "cancelled")

    def _schedule(self, scheduled: _Scheduled) -> None:
        """Put a source's next end into the heap, unless it stands there."""
        at_s = scheduled.source.next_end_s
        if at_s == scheduled.at_s:
            return
        self._serial += 1
        scheduled.at_s, scheduled.serial = at_s, self._serial
        if at_s is not None:
            heapq.heappush(self._heap, (at_s, self._serial, scheduled))
