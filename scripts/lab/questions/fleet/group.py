"""One serving group of a fleet: a scheduler as a server runs it, its engines, and what dies of them.

When a node dies its engines are lost: requests whose clients have bytes of the answer end with an error, and the
others run again. When the scheduler's own node dies every connection through it breaks: requests without a byte go
back to their gateways, and the engines that live are taken again by the restarted scheduler, idle and with empty
counters.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from llmserve.request import EngineInfo
from llmserve.scheduling.messages import (
    SHARES_MAX,
    Action,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    RequestEnded,
    ServedElsewhere,
    StartBatch,
)
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import EngineModel, SimulatedCluster
from llmserve.simulation.engine_model import TimedEngine
from questions.fleet.layout import Deaths, GroupPlace, Span
from questions.fleet.traffic import Sent

Outcome = Literal["completed", "lost", "late", "refused"]
RETRIED = ("no_engine", "queue_full", "engine_failed", "draining")  # reasons for which a gateway asks another group
OUTCOMES: dict[str, Outcome] = {"deadline_exceeded": "late", "engine_lost": "lost"}  # by reason; others: refused


class EngineSpeed(msgspec.Struct, frozen=True):
    """slots : requests at once.  step_s : of all of them, whatever their number"""

    slots: int = 4
    step_s: float = 0.02
    prefill_s: float = 0.2

    def requests_per_s(self, tokens_mean: float) -> float:
        """Of one GPU with full slots."""
        return self.slots / (self.prefill_s + tokens_mean * self.step_s)


class Ended(msgspec.Struct, frozen=True):
    """started_at_s : last start on an engine; None: the request never started"""

    request_id: int
    at_s: float
    outcome: Outcome
    tokens: float
    started_at_s: float | None


class Report(msgspec.Struct):
    """What a group tells its gateways at the end of a round.

    ended    requests that ended here
    again    ids of requests without a byte, which their gateways send to another group
    present  requests that wait or run; slots : of its living engines; 0: the group is down
    served   weighted tokens by key, since the last round
    """

    group: int
    ended: list[Ended] = []
    again: list[int] = []
    present: int = 0
    slots: int = 0
    served: dict[str, float] = {}


class MortalEngine(TimedEngine):
    """An engine that is lost at the beginning of each of its spans, and comes back at the end. spans : ascending"""

    def __init__(
        self, info: EngineInfo, lengths: Mapping[int, float], speed: EngineSpeed, spans: Sequence[Span]
    ) -> None:
        super().__init__(info, lengths, step_s=speed.step_s, prefill_s=speed.prefill_s)
        self._changes = deque(at_s for span in spans for at_s in span)

    def skip_loss(self) -> None:
        """The engine is down already: only its return is to come."""
        self._changes.popleft()

    @property
    def down(self) -> bool:
        return len(self._changes) % 2 == 1

    @property
    def next_end_s(self) -> float | None:
        ends_s = None if self.down else super().next_end_s
        if not self._changes:
            return ends_s
        return self._changes[0] if ends_s is None else min(ends_s, self._changes[0])

    def end(self, now_s: float) -> Event:
        if not self._changes or self._changes[0] != now_s:
            return super().end(now_s)
        answered = tuple(sorted(self.answered(now_s)))
        self._changes.popleft()
        if not self.down:
            return EngineReady(self.info)
        self._running, self._jobs, self._sequences = [], 0, 0
        self._prefill.clear()
        self._waiting.clear()
        self._changed = True
        return EngineLost(self.info.name, answered, expected=True)

    def answered(self, now_s: float) -> list[int]:
        """Ids of the requests that run and whose first step has ended."""
        if self.down:
            return []
        self._advance(now_s)
        begun = [job for *_, job in self._running if job.began + 1.0 <= self._step]
        return [request_id for job in begun for request_id in job.lengths]


class GroupProcess:
    """A group over its deaths and restarts.

    scores    sample of forecasts, for the first edges of the bins
    step_ns   of each step of its schedulers; shared with other groups
    """

    def __init__(
        self,
        place: GroupPlace,
        deaths: Deaths,
        scheduling: SchedulingConfig,
        speed: EngineSpeed,
        models: tuple[str, ...],
        scores: Sequence[float],
        step_ns: array[int],
    ) -> None:
        self.place = place
        self._scheduling, self._speed, self._models, self._scores = scheduling, speed, models, scores
        self._step_ns = step_ns
        self._spans = {engine: deaths.of_engine(engine) for engine in place.engines}
        self._changes = deque(
            (at_s, up) for down in deaths.of_group(place) for at_s, up in zip(down, (False, True), strict=True)
        )
        self._lengths: dict[int, float] = {}
        self._started: dict[int, float] = {}
        self._report = Report(place.index)
        self._engines: list[MortalEngine] = []
        self._cluster: SimulatedCluster | None = None
        self._start(0.0)

    def round(self, until_s: float, sent: Sequence[Sent], elsewhere: Mapping[str, float]) -> Report:
        """The time until `until_s`, with these arrivals. elsewhere : weighted tokens by key, of other groups"""
        report = self._report = Report(self.place.index, [], [], served={})
        if self._cluster is not None and elsewhere:
            tell(self._cluster, self._models[0], elsewhere)
        for item in sent:
            self._pass(item.at_s)
            if self._cluster is None:  # the connection is refused
                report.again.append(item.request.id)
            else:
                self._lengths[item.request.id] = item.tokens
                self._cluster.arrive(item.request)
        self._pass(until_s)
        if self._cluster is not None:
            for _, served in self._cluster.scheduler.group.served():
                report.served |= served  # all models share the engines
            report.present = len(self._cluster.scheduler.requests)
            report.slots = sum(engine.info.slots for engine in self._engines if not engine.down)
        return report

    def _pass(self, until_s: float) -> None:
        while self._changes and self._changes[0][0] <= until_s:
            at_s, up = self._changes.popleft()
            if up:
                self._start(at_s)
            else:
                self._die(at_s)
        if self._cluster is not None:
            self._cluster.advance(until_s)

    def _start(self, at_s: float) -> None:
        self._engines = []
        for engine, spans in self._spans.items():
            info = EngineInfo(f"gpu{engine}", self._speed.slots, False, models=self._models)
            left = [span for span in spans if span[1] > at_s]
            mortal = MortalEngine(info, self._lengths, self._speed, left)
            if left and left[0][0] <= at_s:
                mortal.skip_loss()
            self._engines.append(mortal)
        scheduler = self._scheduling.scheduler(self._scores)
        _time_steps(scheduler, self._step_ns)
        late = {engine.info.name for engine in self._engines if engine.down}
        engines: list[EngineModel] = [*self._engines]
        self._cluster = SimulatedCluster(scheduler, engines, on_step=self._note, late=late)
        self._cluster.now_s = at_s
        self._cluster.begin()

    def _die(self, at_s: float) -> None:
        """Every connection breaks. Engines that die at this instant have been lost before."""
        assert self._cluster is not None, "a group that is down does not die"
        self._cluster.advance(at_s)
        answered = {request_id for engine in self._engines for request_id in engine.answered(at_s)}
        for request_id in sorted(self._cluster.scheduler.requests):
            if request_id in answered:
                self._end(request_id, at_s, "lost", 0.0)
            else:
                self._leave(request_id)
                self._report.again.append(request_id)
        self._cluster = None

    # ---- what happens -------------------------------------------------------------------------------------------

    def _note(self, now_s: float, event: Event, actions: list[Action]) -> None:
        if isinstance(event, RequestEnded) and event.outcome == "completed":
            self._end(event.request_id, now_s, "completed", event.output_tokens)
        for action in actions:
            if isinstance(action, StartBatch):
                for request in action.batch.requests:
                    self._started[request.id] = now_s
            elif isinstance(action, FailRequest):
                if action.reason in RETRIED:
                    self._leave(action.request_id)
                    self._report.again.append(action.request_id)
                else:
                    self._end(action.request_id, now_s, OUTCOMES.get(action.reason, "refused"), 0.0)

    def _end(self, request_id: int, at_s: float, outcome: Outcome, tokens: float) -> None:
        self._report.ended.append(Ended(request_id, at_s, outcome, tokens, self._started.get(request_id)))
        self._leave(request_id)

    def _leave(self, request_id: int) -> None:
        self._lengths.pop(request_id, None)
        self._started.pop(request_id, None)


def tell(cluster: SimulatedCluster, model: str, elsewhere: Mapping[str, float]) -> None:
    """Tell a group what others have served, as its server is told (machines/peers.py)."""
    rows = list(elsewhere.items())
    for start in range(0, len(rows), SHARES_MAX):
        cluster.notify(ServedElsewhere(model, dict(rows[start : start + SHARES_MAX])), cluster.now_s)


def _time_steps(scheduler: Scheduler, step_ns: array[int]) -> None:
    """Append the nanoseconds of each later step."""
    handle, clock = scheduler.handle, time.perf_counter_ns

    def timed(event: Event, now_s: float) -> list[Action]:
        began = clock()
        actions = handle(event, now_s)
        step_ns.append(clock() - began)
        return actions

    scheduler.handle = timed  # type: ignore[method-assign]
