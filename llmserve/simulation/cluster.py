"""The simulated cluster drives the scheduler with a virtual clock and engine models.

The event loop is a heap of `(time_s, serial, source)`: when each engine's next event is due. The time of an engine's
next event may change (requests that join slow the others down): a new entry then voids the earlier entry. Arrivals come
from the workload in order, one by one, so that memory does not grow with their number. The same inputs give the same
journal, byte for byte.

By default nothing is late and nothing fails. Faults come from engine models that fail (tests/worlds/faults.py), from
further events (`SimulatedCluster.notify`) and from `Delays`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from bins.dispatch import DispatchSolver
from llmserve.live.journal import Journal
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    REVISIONS_MAX,
    AbortRequest,
    Action,
    BatchEnded,
    DispatchSolved,
    DrainRequested,
    EngineExpected,
    EngineReady,
    Event,
    ForecastsRevised,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RevisedForecast,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.scheduler import Scheduler


class Source(Protocol):
    """A source of events at times of its own: requests and batches end, answers begin."""

    @property
    def next_end_s(self) -> float | None:
        """When the next event is due if no request joins or leaves until then; None: nothing runs."""
        ...

    def end(self, now_s: float) -> Event | None:
        """Take and return the event due at next_end_s, which is now. None: the scheduler gets no event."""
        ...


class EngineModel(Source, Protocol):
    """How long a simulated engine takes. The times of its calls never decrease."""

    info: EngineInfo

    def start(self, batch: Batch, now_s: float) -> None:
        """Run these requests."""
        ...

    def abort(self, request_id: int, now_s: float) -> None:
        """Drop a request if the engine still has it; no event about it follows."""
        ...


@dataclass(frozen=True, slots=True)
class Delays:
    """How late a cluster is. The functions are called in the order of the events, so they may draw random numbers.

    abort_s     seconds until an abort reaches the engine; the request may have ended by then
    plan_s      seconds that a plan takes
    timer_at_s  when a timer set for a time fires: not before that time, and always the same for the same time
    """

    abort_s: Callable[[], float]
    plan_s: Callable[[], float]
    timer_at_s: Callable[[float], float]


class _Scheduled:
    """A source with the time and the serial number of its valid heap entry."""

    __slots__ = ("at_s", "serial", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.at_s: float | None = None
        self.serial = 0


class _Once:
    """A source of one event."""

    __slots__ = ("_make_event", "next_end_s")

    def __init__(self, at_s: float, make_event: Callable[[], Event]) -> None:
        self.next_end_s: float | None = at_s
        self._make_event = make_event

    def end(self, now_s: float) -> Event:
        self.next_end_s = None
        return self._make_event()


class SimulatedCluster:
    """Drives one scheduler through virtual time. Plans take no time unless `delays` says so.

    solver   makes plans, where the scheduler's release follows plans
    delays   None: nothing is late
    on_step  called after each step with (now_s, event, actions), for reports
    predict  called with each request at the time of its arrival; returns the request with its forecast of that time
    late     names of engines that are expected at the beginning, and come up by an event of their own
    revise   called after the step of each end, with the event; returns later forecasts of requests that wait, such as
             the forecasts of forecasts/revisions.py. The scheduler gets them at the same time, before any other event
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
        predict: Callable[[Request], Request] | None = None,
        late: Collection[str] = (),
        revise: Callable[[RequestEnded | BatchEnded], Sequence[RevisedForecast]] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self._engines = {engine.info.name: (engine, _Scheduled(engine)) for engine in engines}
        self._solver = solver
        self._journal = journal
        self._delays = delays
        self._on_step = on_step
        self._predict = predict
        self._late = late
        self._revise = revise
        self._heap: list[tuple[float, int, _Scheduled]] = []
        self._serial = 0
        self._at_once: deque[Event] = deque()  # events for the scheduler before time goes on

    def run(self, arrivals: Iterator[tuple[float, Request]], *, flush: bool = True) -> None:
        """Run until no event is left.

        arrivals : (time_s, request), times non-decreasing.  flush : after the last arrival the bins release their
        partial batches; otherwise the requests of partial batches are cancelled at the end.
        """
        self.begin()
        for at_s, request in arrivals:
            self.advance(at_s)
            self.arrive(request)
        if flush:
            self._step(DrainRequested())
        self.advance(math.inf)
        for waiting in (self.scheduler.batch_lane.waiting, self.scheduler.requests):  # lines first, or they would start
            for request_id in sorted(waiting):
                self._step(RequestCancelled(request_id))

    def begin(self) -> None:
        """Announce the engines: what `run` does first. With `advance` and `arrive` a caller runs a part of the time."""
        for engine, scheduled in self._engines.values():
            is_late = engine.info.name in self._late
            self._step(EngineExpected(engine.info) if is_late else EngineReady(engine.info))
            self._schedule(scheduled)

    def arrive(self, request: Request) -> None:
        """A request arrives now."""
        self._step(self._arrival(request))

    def arrive_later(self, request: Request, at_s: float) -> None:
        """A request arrives at this time, not before now. May be called as `notify`."""
        assert at_s >= self.now_s, f"request {request.id} comes at {self.now_s}, too late for {at_s}"
        self._schedule(_Scheduled(_Once(at_s, lambda: self._arrival(request))))

    def _arrival(self, request: Request) -> RequestArrived:
        return RequestArrived(request if self._predict is None else self._predict(request))

    def notify(self, event: Event, at_s: float) -> None:
        """Give the scheduler this event at this time. Events of one instant keep the order in which they were made.

        at_s : not before now. May be called before the run and, from on_step, during the run.
        """
        assert at_s >= self.now_s, f"{event} comes at {self.now_s}, too late for {at_s}"
        self._schedule(_Scheduled(_Once(at_s, lambda: event)))

    def advance(self, until_s: float) -> None:
        """Carry out all events up to and including `until_s` (inf: all)."""
        heap = self._heap
        while True:
            if self._at_once:
                self._step(self._at_once.popleft())
                continue
            while heap and heap[0][1] != heap[0][2].serial:  # a void entry
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
        if scheduled.at_s is None:  # otherwise the step has already scheduled the engine's next event
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
        if self._revise is not None and isinstance(event, RequestEnded | BatchEnded):
            revised = tuple(self._revise(event))
            slices = [revised[start : start + REVISIONS_MAX] for start in range(0, len(revised), REVISIONS_MAX)]
            self._at_once += [ForecastsRevised(part) for part in slices]

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
                self.notify(solved, self.now_s + self._delays.plan_s())

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
        """Put a source's next event into the heap, unless it is there."""
        at_s = scheduled.source.next_end_s
        if at_s == scheduled.at_s:
            return
        self._serial += 1
        scheduled.at_s, scheduled.serial = at_s, self._serial
        if at_s is not None:
            heapq.heappush(self._heap, (at_s, self._serial, scheduled))
