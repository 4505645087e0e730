"""The laws, by an account kept outside the scheduler: of what it was told and what it answered, of nothing else.

`Account.step` takes each step of a run and raises AssertionError where a law is broken; `Account.close` when nothing is
left to happen. Numbers are those of DESIGN's laws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worlds.invariants import check

from llmserve.policies import TIMEOUT_S, SchedulingConfig
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.engines import PROVEN_S
from llmserve.scheduling.layout import FALLBACK
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    AnswerBegan,
    BatchEnded,
    DispatchSolved,
    DrainRequested,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    PlanChanged,
    PlanGroups,
    PreemptBatch,
    ReportCircuit,
    ReportTrust,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    ServingGroup,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.orders import UNDATED_S
from llmserve.scheduling.scheduler import Scheduler

NEVER_IDLE = ("greedy", "window")  # releases under which nothing waits for company
NEAR_S = 1e-9  # of times that are sums of others
JUST_S = 2e-6  # so much longer something may wait that could only just be in time


@dataclass(frozen=True, slots=True)
class Times:
    """What is known of how long things take.

    batch_s   seconds of a batch of so many on an engine; no request takes less
    tokens    of every answer
    foreseen  the scheduler knows it as well
    """

    batch_s: Callable[[EngineInfo, int], float]
    tokens: float
    foreseen: bool

    def hopes(self, request: Request) -> bool:
        """It is predicted to be shorter than any answer is: nobody gives it up for lost before its deadline."""
        own = request.quantiles[0] if request.quantiles else request.predicted_tokens
        return own is not None and own < self.tokens


class Plan:
    """Who belongs to which serving group. Without groups all belong to one."""

    def __init__(self, groups: Sequence[ServingGroup]) -> None:
        self._of_worker = {worker: group.name for group in groups for worker in group.workers}
        self._of_model = {model: group.name for group in groups for model in group.models}
        self._of_stream = {pair: group.name for group in groups for pair in group.streams}

    def of_worker(self, name: str) -> str:
        return self._of_worker.get(name, FALLBACK)

    def of_request(self, request: Request) -> str:
        named = self._of_stream.get((request.stream, request.model))
        return named or self._of_model.get(request.model, FALLBACK)


class Worker:
    """A GPU. group : whose requests it runs.  stopping : requests that were told to make room and still run.  stopped :
    how many all in all; None: all are gone, or something happened besides, so that what runs next may be anything.
    kept : nothing has been started since some were told to make room.
    """

    def __init__(self, name: str, group: str) -> None:
        self.name = name
        self.group = group
        self.kept = False
        self.engines: list[Engine] = []
        self.stopping: set[int] = set()
        self.stopped: int | None = None

    @property
    def runs_a_batch(self) -> bool:
        return any(engine.info.barrier and engine.running for engine in self.engines)


class Engine:
    """One engine as it must be. open_until_s : while its circuit is not closed, when it may be tried again."""

    def __init__(self, info: EngineInfo, worker: Worker) -> None:
        self.info = info
        self.worker = worker
        worker.engines.append(self)
        self.up = False
        self.open_until_s: float | None = None
        self.shown_s: dict[str, float] = {}  # by model: when an answer last showed how fast it is
        self.running: dict[int, int] = {}  # request id -> batch id

    @property
    def free(self) -> bool:
        """It must not be left without work."""
        idle = not self.running or not (self.info.barrier or self.info.tokens_max)
        if self.worker.stopping or (self.info.barrier and self.worker.runs_a_batch):
            return False
        return self.works and idle and len(self.running) < self.info.slots

    def is_tried(self, model: str, now_s: float) -> bool:
        """Nothing has shown lately whether it is as fast as it was told to be."""
        return bool(self.info.speeds) and now_s >= self.shown_s.get(model, -math.inf) + PROVEN_S

    @property
    def has_room(self) -> bool:
        return not self.worker.runs_a_batch if self.info.barrier else len(self.running) < self.info.slots

    @property
    def works(self) -> bool:
        return self.up and self.open_until_s is None


class Life:
    """One accepted request. failed_on : the engine that it came back from last.  began, preempted : while it runs, its
    client has seen a byte; it was told to make room.
    """

    __slots__ = ("arrived_at_s", "began", "engine", "failed_on", "gone", "preempted", "request", "tries")

    def __init__(self, request: Request, arrived_at_s: float) -> None:
        self.request = request
        self.arrived_at_s = arrived_at_s
        self.engine: str | None = None
        self.failed_on: str | None = None
        self.gone = self.began = self.preempted = False
        self.tries = 0


class Account:
    """steps_max : more than these, and something goes round in circles.  times : None: nobody knows them.

    grouped : there are serving groups. None of the laws is asked that speak of all engines of a model, or of the order
    of all its batches.
    """

    def __init__(
        self,
        config: SchedulingConfig,
        scheduler: Scheduler,
        steps_max: Callable[[float], float],
        times: Times | None = None,
        *,
        grouped: bool = False,
    ) -> None:
        self._config = config
        self._grouped = grouped
        self._direct = config.goes_by_times
        self._times = times
        self._foreseen = times if times is not None and times.foreseen else None
        self._scheduler = scheduler
        self._steps_max = steps_max
        self.steps = 0
        self.outcomes: Counter[str] = Counter()  # how many ended in each way
        self.present_s = 0.0  # integral of the number present over time
        self.stayed_s = 0.0  # sum over requests of the time that they were present
        self._now_s = 0.0
        self._alive: dict[int, Life] = {}
        self._waiting: dict[int, Life] = {}
        self._over: set[int] = set()
        self._engines: dict[str, Engine] = {}
        self._workers: dict[str, Worker] = {}
        self._plan = Plan(scheduler.plan)
        self._draining = False
        self._steady = True  # no engine has gone
        self._asked: set[str] = set()  # models that a plan is being made for
        self._models: dict[str, None] = {}  # that were heard of
        self._helpless_since_s: dict[str, float] = {}  # of these, that no engine works for
        self._formed: dict[int, tuple[int, int, int]] = {}  # batch -> its bin, its size, requests started first
        self._last_formed: Counter[str] = Counter()  # by model, the last batch whose first part was started
        # By group and model: when another model's batch went before what had waited for longer.
        self._passed_s: dict[tuple[str, str], float] = {}
        self._expected: dict[int, str] = {}  # requests of which this step must say that they fail, and why
        self._hear: dict[type, Callable[..., None]] = {
            RequestArrived: self._arrived,
            RequestCancelled: self._cancelled,
            RequestEnded: self._ended,
            AnswerBegan: self._began,
            BatchEnded: self._batch_ended,
            EngineReady: self._ready,
            EngineClosed: self._closed,
            EngineLost: self._lost,
            DrainRequested: self._drain,
            DispatchSolved: self._solved,
            PlanChanged: self._planned,
            TimerFired: lambda event, actions: None,
        }

    def step(self, now_s: float, event: Event, actions: Sequence[Action]) -> None:
        assert now_s >= self._now_s, "time ran backwards"
        self.present_s += len(self._alive) * (now_s - self._now_s)
        self._now_s = now_s
        self.steps += 1
        assert self.steps <= self._steps_max(now_s), "it goes round in circles"
        self._expected = {}
        self._hear[type(event)](event, actions)
        self._see_who_has_moved(event)
        self._see_who_makes_room(event)
        self._obey(event, actions)
        making_room = [worker for worker in self._workers.values() if worker.stopping]
        for worker in self._workers.values():
            # What leaves one GPU may start on another that makes room; or find other edges, and wait in another bin.
            if making_room != [worker] or self._config.bins_count > 1:
                worker.stopped = None
        self._see_that_nothing_is_forgotten(event)
        check(self._scheduler)

    def close(self) -> None:
        """Nothing is left, and nothing more will happen."""
        assert not self._alive, f"requests {sorted(self._alive)} have no outcome"
        assert not self._scheduler.requests, "the scheduler keeps requests that are over"
        for name, engine in self._scheduler.engines.items():
            assert not engine.running, f"the scheduler believes that {name} runs something"
            assert engine.total_tokens == 0, f"{name} has memory on account that nobody holds"

    def assert_time_is_conserved(self) -> None:
        """Little's law (10): the time that requests were present, counted by time and by request."""
        assert math.isclose(self.present_s, self.stayed_s, rel_tol=1e-9, abs_tol=1e-9), "Little's law does not hold"

    # ---- what it was told ----

    def _arrived(self, event: RequestArrived, actions: Sequence[Action]) -> None:
        request = event.request
        up = any(engine.up for engine in self._serving(request.model))
        self._models[request.model] = None
        self._see_who_helps()
        full = len(self._waiting) >= self._config.queue_requests_max
        expired = request.deadline_s is not None and request.deadline_s <= self._now_s
        reasons = [
            (self._draining, "draining"),
            (not up, "no_engine"),
            (full, "queue_full"),
            (expired, "deadline_exceeded"),
        ]
        expected = next((reason for applies, reason in reasons if applies), None)
        self._alive[request.id] = self._waiting[request.id] = Life(request, self._now_s)
        if expected:
            self._expected[request.id] = expected

    def _cancelled(self, event: RequestCancelled, actions: Sequence[Action]) -> None:
        life = self._alive.get(event.request_id)
        aborts = [action for action in actions if isinstance(action, AbortRequest)]
        if life is None or life.gone:
            assert not aborts, "what is over is aborted"
            return
        if life.engine is None:
            self._end(event.request_id, "cancelled")
            assert not aborts, "what does not run is aborted"
        else:
            life.gone = True
            assert aborts == [AbortRequest(life.engine, event.request_id)], "its engine goes on for nobody"

    def _ended(self, event: RequestEnded, actions: Sequence[Action]) -> None:
        life = self._alive.get(event.request_id)
        if life is None or life.engine != event.engine:
            return  # stale
        del self._engines[event.engine].running[event.request_id]
        if event.outcome == "completed":
            self._engines[event.engine].shown_s[life.request.model] = self._now_s
        if event.fault and event.retryable and not life.gone:
            self._back(event.request_id, event.engine, "engine_failed")
        elif event.outcome == "cancelled" and life.preempted and not life.gone:
            life.engine, life.failed_on = None, None
            life.tries -= 1
            self._waiting[event.request_id] = life
        else:
            self._end(event.request_id, "cancelled" if life.gone else event.outcome)

    def _began(self, event: AnswerBegan, actions: Sequence[Action]) -> None:
        life = self._alive.get(event.request_id)
        if life is not None and life.engine is not None and not life.preempted:
            life.began = True

    def _batch_ended(self, event: BatchEnded, actions: Sequence[Action]) -> None:
        running = self._engines[event.engine].running
        for request_id in [request_id for request_id, batch_id in running.items() if batch_id == event.batch_id]:
            del running[request_id]
            self._engines[event.engine].shown_s[self._alive[request_id].request.model] = self._now_s
            self._end(request_id, "cancelled" if self._alive[request_id].gone else "completed")

    def _ready(self, event: EngineReady, actions: Sequence[Action]) -> None:
        engine = self._engines.get(event.engine.name)
        if engine is None:
            name = event.engine.worker or event.engine.name
            worker = self._workers.setdefault(name, Worker(name, self._plan.of_worker(name)))
            engine = self._engines[event.engine.name] = Engine(event.engine, worker)
        if not engine.up:  # whatever was wrong with it, it has come back
            engine.open_until_s = None
        engine.info, engine.up = event.engine, True
        self._models.update(dict.fromkeys(event.engine.models))
        self._see_who_helps()

    def _closed(self, event: EngineClosed, actions: Sequence[Action]) -> None:
        self._engines[event.engine].up = self._steady = False
        self._see_who_helps()

    def _lost(self, event: EngineLost, actions: Sequence[Action]) -> None:
        engine = self._engines[event.engine]
        engine.up = self._steady = False
        running, engine.running = engine.running, {}
        for request_id in running:
            if self._alive[request_id].gone:
                self._end(request_id, "cancelled")
            elif request_id in event.answered:
                self._expected[request_id] = "engine_lost"
                self._alive[request_id].engine = None
            else:
                self._back(request_id, event.engine, "engine_lost")
        self._see_who_helps()

    def _drain(self, event: DrainRequested, actions: Sequence[Action]) -> None:
        self._draining = True

    def _planned(self, event: PlanChanged, actions: Sequence[Action]) -> None:
        self._plan = Plan(event.groups)

    def _solved(self, event: DispatchSolved, actions: Sequence[Action]) -> None:
        assert event.model in self._asked, "a plan comes that nobody asked for"
        self._asked.remove(event.model)

    def _back(self, request_id: int, engine: str, reason: str) -> None:
        """An engine has let go of it before its client saw a byte: it runs again, unless it did too often (9)."""
        life = self._alive[request_id]
        life.engine, life.failed_on = None, engine
        if life.tries > self._config.retries_max:
            self._expected[request_id] = reason
        else:
            self._waiting[request_id] = life

    def _end(self, request_id: int, outcome: str) -> None:
        """Exactly one outcome (1)."""
        assert request_id not in self._over, f"request {request_id} ended twice"
        life = self._alive.pop(request_id)
        if self._waiting.pop(request_id, None) is not None:
            self._passed_s.pop((self._plan.of_request(life.request), life.request.model), None)  # all that was formed
        self._over.add(request_id)
        self.outcomes[outcome] += 1
        self.stayed_s += self._now_s - life.arrived_at_s

    def _serving(self, model: str) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.info.serves(model)]

    def _see_who_helps(self) -> None:
        for model in self._models:
            if any(engine.works for engine in self._serving(model)):
                self._helpless_since_s.pop(model, None)
            else:
                self._helpless_since_s.setdefault(model, self._now_s)

    def _see_who_has_moved(self, event: Event) -> None:
        """A worker joins the group that it belongs to when it has nothing left to run; those who wait may follow."""
        moves = isinstance(event, EngineReady | EngineClosed | EngineLost | PlanChanged)
        for worker in self._workers.values():
            if not self._stays(worker) and not any(engine.running for engine in worker.engines):
                worker.group, moves = self._plan.of_worker(worker.name), True
        if moves and self._grouped:
            self._passed_s.clear()

    def _stays(self, worker: Worker) -> bool:
        return worker.group == self._plan.of_worker(worker.name)

    def _see_who_makes_room(self, event: Event) -> None:
        for worker in self._workers.values():
            if worker.stopping:
                still = {request_id for engine in worker.engines for request_id in engine.running}
                goes = isinstance(event, RequestEnded) and event.outcome == "cancelled"
                if not goes or worker.stopping <= still:
                    worker.stopped = None
                worker.stopping &= still

    # ---- what it answered ----

    def _obey(self, event: Event, actions: Sequence[Action]) -> None:
        helpless_since_s = dict(self._helpless_since_s)
        for action in actions:
            if isinstance(action, StartBatch):
                self._start(self._engines[action.engine], action.batch)
            elif isinstance(action, FailRequest):
                self._fail(action, event, helpless_since_s)
            elif isinstance(action, ReportCircuit):
                until_s = None if action.open_s is None else self._now_s + action.open_s
                self._engines[action.engine].open_until_s = until_s
                self._see_who_helps()
            elif isinstance(action, PreemptBatch):
                self._preempt(action)
            elif isinstance(action, AbortRequest):
                assert isinstance(event, RequestCancelled), "only a client that leaves stops a request"
            elif isinstance(action, PlanGroups):
                assert self._grouped, "groups are asked for where there are none"
            elif isinstance(action, ReportTrust):
                assert self._grouped or action.trusted == self._scheduler.queues(action.model).trust.trusted
            else:
                assert isinstance(action, SolveDispatch)
                assert action.model not in self._asked, "two plans are made at once"
                self._asked.add(action.model)
        assert not self._expected, f"not told: {self._expected}"

    def _start(self, engine: Engine, batch: Batch) -> None:
        info = engine.info
        assert engine.up, f"{info.name} is down and was given work"
        assert info.serves(batch.model), f"{info.name} was given {batch.model!r}, which it does not serve"
        assert not engine.worker.stopping, f"{info.name} was given work that others shall make room for"
        assert self._stays(engine.worker), f"{info.name} was given work before it joined its group"
        assert batch.requests, "an empty batch was started"
        assert batch.formed_at_s <= self._now_s, "a batch was started before it formed"
        assert len(batch.requests) <= batch.size <= self._config.full_batch, "a batch is too large"
        if info.barrier:
            assert not engine.worker.runs_a_batch, f"the GPU of {info.name} was given a second batch"  # (2)
        if engine.open_until_s is not None:
            assert self._now_s >= engine.open_until_s, f"{info.name} fails everything and was given work"
            assert info.barrier or len(batch.requests) == 1, f"{info.name} is tried with more than one request"
        if self._config.order == "fffs" and batch.id not in self._formed:
            self._assert_nobody_is_kept_waiting(engine, batch)
        if self._foreseen is not None:
            self._assert_it_is_the_best(self._foreseen, engine, batch)
        self._passed_s.pop((engine.worker.group, batch.model), None)  # also where a batch starts in parts
        self._count_batch(engine.worker, batch)
        self._see_what_was_made_room_for(engine.worker, batch)
        for request in batch.requests:
            self._start_request(request, engine, batch)
        engine.worker.kept = False
        requests_max = info.slots + (0 if info.barrier else info.look_ahead)
        assert len(engine.running) <= requests_max, f"{info.name} was given more than it takes"  # (2)

    def _start_request(self, request: Request, engine: Engine, batch: Batch) -> None:
        life = self._waiting.pop(request.id, None)
        assert life is not None, f"request {request.id} is in its batch twice"
        assert life.request == request, f"request {request.id} was started as another"
        assert not life.gone, f"request {request.id} was started for a client that has gone"  # (6)
        assert request.model == batch.model, f"request {request.id} is of another model than its batch"
        self._assert_it_may_run_there(request, engine)
        if request.deadline_s is not None:
            assert request.deadline_s > self._now_s, f"request {request.id} was started late"
            tried = len(batch.requests) == 1 and not engine.running and engine.is_tried(request.model, self._now_s)
            if self._times is not None and not tried and not (life.tries and self._times.hopes(request)):
                # What it learns of slots that others share is less exact.
                share = 1.0 if engine.info.barrier else 0.75
                ends_s = self._now_s + share * self._times.batch_s(engine.info, len(batch.requests))
                assert ends_s <= request.deadline_s + NEAR_S, f"request {request.id} was started to be late"
        if life.preempted:  # it may go where others run, and is missing where it made room
            for worker in self._workers.values():
                if worker is not engine.worker:
                    worker.stopped = None
        life.engine = engine.info.name
        life.began = life.preempted = False
        life.tries += 1
        assert life.tries <= self._config.retries_max + 1, f"request {request.id} was tried too often"  # (9)
        engine.running[request.id] = batch.id

    def _assert_it_may_run_there(self, request: Request, engine: Engine) -> None:
        """Elsewhere than in its group only while no engine there serves its model; or where room was made for it."""
        own, group = self._plan.of_request(request), engine.worker.group
        if own != group and not engine.worker.kept:
            candidates = [
                candidate
                for candidate in self._members(own, request.model)
                if candidate.up and self._stays(candidate.worker)
            ]
            assert not candidates, f"request {request.id} of {own} was started in {group}"

    def _members(self, group: str, model: str) -> list[Engine]:
        """Engines that serve the model, and belong to the group or are about to."""
        return [engine for engine in self._serving(model) if self._plan.of_worker(engine.worker.name) == group]

    def _assert_nobody_is_kept_waiting(self, engine: Engine, batch: Batch) -> None:
        """A batch is started for the first time, and what the engine serves besides has waited longer.

        Where each request is a batch from its arrival on nothing overtakes what waits for memory. Else who came before
        a batch of another model formed is next after that at the latest, if nothing but an engine is wanted for it.
        """
        release, info, group = self._config.release or "", engine.info, engine.worker.group
        servable = {id_: life for id_, life in self._waiting.items() if info.serves(life.request.model)}
        first = {id_: life for id_, life in servable.items() if self._is_new_in(group, life)}
        alone = release == "static:1" or (self._config.full_batch == 1 and release != "window")
        if alone and not self._grouped:
            assert next(iter(first)) == batch.requests[0].id, f"request {next(iter(first))} was overtaken"
        self._passed_s.pop((group, batch.model), None)
        for model in sorted({life.request.model for life in first.values()}):
            was_passed = batch.formed_at_s > self._passed_s.get((group, model), math.inf)
            assert not was_passed, f"requests of {model!r} are passed over by {batch.model!r} again and again"
        other_models = {life.request.model for life in servable.values() if not self._is_new_in(group, life)} | {
            batch.model
        }
        oldest = {life.request.model: life for life in reversed(first.values())}
        for model, life in oldest.items():
            goes = life.arrived_at_s < batch.formed_at_s and self._due_s(life, info) <= self._now_s
            if model not in other_models and engine.has_room and goes:
                self._passed_s.setdefault((group, model), self._now_s)

    def _is_new_in(self, group: str, life: Life) -> bool:
        return not life.tries and self._plan.of_request(life.request) == group

    def _assert_it_is_the_best(self, times: Times, engine: Engine, batch: Batch) -> None:
        """Of all that wait: under flex the largest, under clockwork the earliest. Where nothing else is of weight."""
        lives = [life for life in self._waiting.values() if not life.tries and engine.info.serves(life.request.model)]
        undated = [life for life in lives if life.request.deadline_s is None]
        old = any(life.arrived_at_s + UNDATED_S <= self._now_s for life in undated)
        retried = any(self._waiting[request.id].tries for request in batch.requests if request.id in self._waiting)
        makes_room = engine.worker.kept or any(worker.stopping for worker in self._workers.values())
        if old or retried or makes_room or self._config.release != "window":
            return  # others form batches before it is known who can be in time
        rows: dict[str, list[float]] = {}
        for life in lives:
            rows.setdefault(life.request.model, []).append(life.request.deadline_s or math.inf)
        if self._config.order == "clockwork":
            earliest_s = min([request.deadline_s or math.inf for request in batch.requests])
            possible_s = self._now_s + times.batch_s(engine.info, 1) + JUST_S
            missed = [at_s for row in rows.values() for at_s in row if possible_s <= at_s < earliest_s]
            assert not missed, f"what is due at {min(missed)} s could be in time, and something else was started"
            return
        for model, row in rows.items():
            for size in range(len(batch.requests) + 1, min(self._config.full_batch, engine.info.slots) + 1):
                ends_s = self._now_s + times.batch_s(engine.info, size) + JUST_S
                together = sum(deadline_s >= ends_s for deadline_s in row)
                assert together < size, f"{size} requests of {model!r} could be in time together"

    def _count_batch(self, worker: Worker, batch: Batch) -> None:
        """Batches are numbered as they form: under fffs they are first started in that order (3)."""
        lives = [self._waiting.get(request.id) for request in batch.requests]
        assert None not in lives, f"batch {batch.id} holds a request that does not wait"
        first = [life for life in lives if life is not None and life.tries == 0]
        previous = self._formed.get(batch.id)
        if previous is None:
            last = self._last_formed[batch.model]
            in_order = self._config.order != "fffs" or self._grouped or batch.id > last
            assert in_order, f"batch {batch.id} was overtaken"
            self._last_formed[batch.model] = max(last, batch.id)
            self._assert_released(worker, batch)
            previous = batch.bin, batch.size, 0
        index, size, started = previous
        assert self._direct or index == batch.bin, f"batch {batch.id} has two bins"
        assert batch.size <= size, f"batch {batch.id} has grown"  # what comes back of it is a smaller one
        assert started + len(first) <= size, f"batch {batch.id} has more requests than it was formed of"
        self._formed[batch.id] = index, size, started + len(first)

    def _assert_released(self, worker: Worker, batch: Batch) -> None:
        """What the simplest releases promise of a batch's size. Room is made for what is left of one, too."""
        if worker.kept or self._draining or batch.size == self._config.full_batch:
            return
        kind, _, size = (self._config.release or "").partition(":")
        assert kind != "full", "a batch is not full"
        assert kind != "static" or batch.size == int(size), f"a batch is not of {size}"

    def _preempt(self, action: PreemptBatch) -> None:
        """Only a batch that is small enough, of which nobody has seen a byte, and all of it; once."""
        config, engine = self._config, self._engines[action.engine]
        assert config.order == "flex", "an order stops batches that does not say so"
        assert config.preemption != "off", "batches are stopped although nobody wants that"
        assert engine.info.barrier, f"{action.engine} refills its slots and was told to make room"
        assert set(engine.running.values()) == {action.batch_id}, f"batch {action.batch_id} does not run there"
        lives = {request_id: self._alive[request_id] for request_id in engine.running}
        assert action.request_ids, f"nobody is left of batch {action.batch_id} whom others could stop"
        assert set(action.request_ids) == {id_ for id_, life in lives.items() if not life.gone}, "a batch stops in part"
        assert not any(life.began for life in lives.values()), f"batch {action.batch_id} is stopped while it is read"
        assert not engine.worker.stopping, "a batch is stopped twice"
        assert len(lives) * config.preemption_factor <= config.full_batch, "no batch could be worth so much more"
        for request_id in action.request_ids:
            lives[request_id].preempted = True
        engine.worker.stopping, engine.worker.stopped, engine.worker.kept = set(lives), len(lives), True

    def _see_what_was_made_room_for(self, worker: Worker, batch: Batch) -> None:
        """Where nothing happened meanwhile, it is as much larger as it was to be."""
        if worker.stopped is not None and self._config.release == "window":  # others may form them into several batches
            requests_min = self._config.preemption_factor * worker.stopped
            assert len(batch.requests) >= requests_min, f"{worker.stopped} made room for only {len(batch.requests)}"
            worker.stopped = None

    def _fail(self, action: FailRequest, event: Event, helpless_since_s: dict[str, float]) -> None:
        life = self._alive.get(action.request_id)
        assert life is not None, f"request {action.request_id} failed after its end"
        assert life.engine is None, f"request {action.request_id} failed while it ran"
        assert action.retry_after_s is None or 0 <= action.retry_after_s < math.inf, "nobody can wait so long"
        expected = self._expected.pop(action.request_id, None)
        if expected is not None:
            assert action.reason == expected, f"request {action.request_id} fails: {action.reason}, not {expected}"
        elif action.reason == "deadline_exceeded":
            deadline_s = life.request.deadline_s
            assert deadline_s is not None, f"request {action.request_id} has no deadline"
            self._assert_it_is_late(life.request, deadline_s)
            if life.preempted:  # it was to run again in the batch that it made room for
                for worker in self._workers.values():
                    worker.stopped = None
        else:
            assert action.reason == "no_engine", f"no reason to fail request {action.request_id}: {action.reason}"
            assert isinstance(event, TimerFired), "only time tells that no engine comes"
            if not self._grouped:
                self._assert_engines_were_waited_for(life.request.model, helpless_since_s)
        self._end(action.request_id, action.reason)

    def _assert_engines_were_waited_for(self, model: str, helpless_since_s: dict[str, float]) -> None:
        assert model in helpless_since_s, "an engine is up"
        wait_s = self._now_s - helpless_since_s[model]
        assert wait_s >= self._config.engine_wait_s - NEAR_S, f"engines were waited for only {wait_s} s"

    def _assert_it_is_late(self, request: Request, deadline_s: float) -> None:
        """It cannot be in time. Before its deadline only those can say so who know how long it takes."""
        assert self._direct or deadline_s <= self._now_s, f"request {request.id} failed before its deadline"
        if self._foreseen is not None:
            ends_s = self._now_s + self._least_s(request.model)
            assert deadline_s < ends_s + NEAR_S, f"request {request.id} failed, and could have been in time"

    def _least_s(self, model: str) -> float:
        """Seconds that a request takes alone on the fastest engine that serves it; 0 where there is none."""
        assert self._foreseen is not None, "only where times are known"
        up = [engine.info for engine in self._serving(model) if engine.up]
        return min([self._foreseen.batch_s(info, 1) for info in up], default=0.0)

    # ---- after each step ----

    def _see_that_nothing_is_forgotten(self, event: Event) -> None:
        wake_at_s = self._scheduler.wake_at_s
        if isinstance(event, TimerFired):
            assert wake_at_s is None or wake_at_s > self._now_s, "the timer would fire for ever"
        if not self._waiting:
            return
        deadlines_s = [
            life.request.deadline_s for life in self._waiting.values() if life.request.deadline_s is not None
        ]
        if deadlines_s:
            assert min(deadlines_s) > self._now_s, "a request waits past its deadline"
            assert wake_at_s is not None, "a deadline will not be noticed"
            assert wake_at_s <= min(deadlines_s), "a deadline will be noticed late"
        for life in self._waiting.values():
            self._assert_it_has_a_chance(life.request)
        if any(life.request.model in self._helpless_since_s for life in self._waiting.values()):
            assert wake_at_s is not None, "requests wait for an engine for ever"
        for engine in self._engines.values():
            if engine.free and self._stays(engine.worker):
                self._assert_it_idles_with_reason(engine, math.inf if wake_at_s is None else wake_at_s)

    def _assert_it_has_a_chance(self, request: Request) -> None:
        foreseen = self._foreseen
        if foreseen is None or request.deadline_s is None or not self._steady:
            return
        if any(engine.is_tried(request.model, self._now_s) for engine in self._serving(request.model)):
            return
        if not foreseen.hopes(request):
            ends_s = self._now_s + self._least_s(request.model)
            assert ends_s <= request.deadline_s + JUST_S, f"request {request.id} waits, and cannot be in time"

    def _assert_it_idles_with_reason(self, engine: Engine, wake_at_s: float) -> None:
        """An engine is idle only for what waits for company, was failed by it while another works, cannot be in time on
        it, has others make room for it, or is of another group (4).

        The second may wait for the memory of another engine, and nothing overtakes what waits for memory.
        """
        name = engine.info.name
        group = engine.worker.group
        waiting = {
            id_: life
            for id_, life in self._waiting.items()
            if engine.info.serves(life.request.model) and self._plan.of_request(life.request) == group
        }
        avoids = [
            id_
            for id_, life in waiting.items()
            if life.failed_on == name
            and any(other.works for other in self._members(group, life.request.model) if other is not engine)
        ]
        if avoids and not self._direct and any(other.info.tokens_max for other in self._engines.values()):
            return
        dues_s = {id_: self._due_s(life, engine.info) for id_, life in waiting.items() if id_ not in avoids}
        stuck = [id_ for id_, due_s in dues_s.items() if due_s <= self._now_s]
        assert not stuck, f"requests {stuck} wait while {name} is idle"
        assert wake_at_s <= min(dues_s.values(), default=math.inf), f"{name} will idle too long"

    def _due_s(self, life: Life, engine: EngineInfo) -> float:
        """When a request must start at the latest on an engine that is idle."""
        config = self._config
        if self._direct and not self._could_start(life.request, engine):
            return math.inf
        retries = life.tries and not self._grouped  # one that has moved since waits for company again
        if self._draining or retries or config.release in NEVER_IDLE:
            return self._now_s
        if config.release == "timeout":
            return life.arrived_at_s + (TIMEOUT_S if config.batch_wait_s is None else config.batch_wait_s)
        return math.inf

    def _could_start(self, request: Request, engine: EngineInfo) -> bool:
        """Whether, as far as anybody knows, it would be in time."""
        if any(worker.stopping for worker in self._workers.values()):
            return False  # it may be one of those that room is made for
        if request.deadline_s is None or not engine.speeds:
            return True
        if self._foreseen is None:
            return False  # the scheduler may think otherwise
        return self._now_s + self._foreseen.batch_s(engine, 1) <= request.deadline_s
