"""The laws of the scheduler, checked from outside: from the events that it was given and the actions that it returned.

`Account.step` checks each step of a run and raises AssertionError where a law is broken. `Account.close` checks the end
of the run. Numbers in parentheses are those of the laws in DESIGN.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from worlds.invariants import check, passable
from worlds.items import assert_item_may_start, assert_items_may_wait

from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.choice.orders import UNDATED_S
from llmserve.scheduling.engines import PROVEN_S
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    AnswerBegan,
    BatchEnded,
    CacheChanged,
    DispatchSolved,
    DrainRequested,
    EngineClosed,
    EngineExpected,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    ForecastsRevised,
    PreemptBatch,
    ReportCircuit,
    ReportDue,
    ReportTrust,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    ServedElsewhere,
    SolveDispatch,
    StartBatch,
    TimerFired,
    Tuned,
)
from llmserve.scheduling.request_book import REFUSALS_MAX
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import TIMEOUT_S, SchedulingConfig, tuned

NEVER_IDLE = ("greedy", "window")  # releases under which no request waits for others to form a batch
NEAR_S = 1e-9  # tolerance for times that are sums of other times
JUST_S = 2e-6  # a request that could only just be in time may wait this much longer


@dataclass(frozen=True, slots=True)
class Times:
    """How long batches take, as far as that is certain.

    batch_s   seconds that a batch of this size takes on an engine; no request takes less
    tokens    length of every answer
    foreseen  the scheduler knows these times, too
    """

    batch_s: Callable[[EngineInfo, int], float]
    tokens: float
    foreseen: bool

    def hopes(self, request: Request) -> bool:
        """Whether the prediction is shorter than every answer: the scheduler then waits until the deadline is past."""
        own = request.quantiles[0] if request.quantiles else request.predicted_tokens
        return own is not None and own < self.tokens


class Worker:
    """A GPU.

    stopping  requests that were told to make room and still run
    stopped   number of requests that made room. None: all left, or another event occurred: any batch may follow
    stopped_at_s  when they were told to
    kept      no batch has started since requests were told to make room
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept = False
        self.stopped_at_s = 0.0
        self.engines: list[Engine] = []
        self.stopping: set[int] = set()
        self.stopped: int | None = None

    @property
    def runs_a_batch(self) -> bool:
        return any(engine.info.barrier and engine.running for engine in self.engines)


class Engine:
    """Expected state of an engine. open_until_s : when an open circuit permits a trial; None: the circuit is closed

    known, expected  it was ever up, so that its models are known; it will be up, so that requests wait for it
    """

    def __init__(self, info: EngineInfo, worker: Worker) -> None:
        self.info = info
        self.worker = worker
        worker.engines.append(self)
        self.up = self.known = self.expected = False
        self.open_until_s: float | None = None
        self.shown_s: dict[str, float] = {}  # by model: when an answer last showed the engine's speed
        self.running: dict[int, int] = {}  # request id -> batch id

    @property
    def free(self) -> bool:
        """Whether the engine must be given work."""
        idle = not self.running or not (self.info.barrier or self.info.tokens_max or self.info.models_at_once)
        if self.worker.stopping or (self.info.barrier and self.worker.runs_a_batch):
            return False
        return self.works and idle and len(self.running) < self.info.slots

    def is_tried(self, model: str, now_s: float) -> bool:
        """Whether no recent answer has shown the engine to be as fast as its declared speed."""
        return bool(self.info.speeds) and now_s >= self.shown_s.get(model, -math.inf) + PROVEN_S

    @property
    def has_room(self) -> bool:
        return not self.worker.runs_a_batch if self.info.barrier else len(self.running) < self.info.slots

    @property
    def works(self) -> bool:
        return self.up and self.open_until_s is None


class Life:
    """One accepted request.

    failed_on  engine on which the last try failed
    refused_by engines that have declined it; refusals : tries that they were
    began      the client has received a byte of the running request
    preempted  the running request was told to make room
    """

    __slots__ = (
        *("arrived_at_s", "began", "engine", "failed_on", "gone", "preempted", "refusals", "refused_by"),
        *("request", "tries"),
    )

    def __init__(self, request: Request, arrived_at_s: float) -> None:
        self.request = request
        self.arrived_at_s = arrived_at_s
        self.engine: str | None = None
        self.failed_on: str | None = None
        self.gone = self.began = self.preempted = False
        self.tries = self.refusals = 0
        self.refused_by: set[str] = set()


class Account:
    """Checks the laws of the scheduler after each step.

    steps_max  largest number of steps up to a time; more mean an endless loop
    times      how long batches take; None: unknown
    """

    def __init__(
        self,
        config: SchedulingConfig,
        scheduler: Scheduler,
        steps_max: Callable[[float], float],
        times: Times | None = None,
    ) -> None:
        self._config = config
        self._direct = config.goes_by_times
        self._times = times
        self._foreseen = times if times is not None and times.foreseen else None
        self._scheduler = scheduler
        self._steps_max = steps_max
        self.steps = 0
        self.outcomes: Counter[str] = Counter()  # requests by outcome
        self.present_s = 0.0  # integral over time of the number of requests present
        self.stayed_s = 0.0  # sum over requests of the time for which each was present
        self._now_s = 0.0
        self._alive: dict[int, Life] = {}
        self._waiting: dict[int, Life] = {}
        self.items: dict[int, Life] = {}  # of jobs, that wait and are not due
        self.online = False  # whether any request but items has arrived, or an item is due
        self._over: set[int] = set()
        self._infos: list[EngineInfo] = []  # every description of an engine so far
        self._passable: set[int] = set()  # requests that others were allowed to pass at some time
        self._engines: dict[str, Engine] = {}
        self._workers: dict[str, Worker] = {}
        self._draining = False
        self._steady = True  # no engine was closed or lost
        self._asked: set[str] = set()  # models whose dispatch plan is being solved
        self._models: dict[str, None] = {}  # all models that engines or requests have named, as an ordered set
        self._no_engine_since_s: dict[str, float] = {}  # since when no working engine serves the model
        self._formed: dict[int, tuple[int, int, int]] = {}  # batch -> its bin, its size, requests in its first start
        self._of_items: set[int] = set()  # batches of items
        self._last_formed: Counter[str] = Counter()  # by model, the last batch whose first part was started
        # By model: when a batch of another model overtook requests that had waited longer.
        self._passed_s: dict[str, float] = {}
        self._expected: dict[int, str] = {}  # requests that must fail in this step -> reason
        self._makes_room: set[int] = set()  # requests of which one must be refused in this step, for a full queue
        self._shares: set[str] = set()  # of all requests so far
        self._handlers: dict[type, Callable[..., None]] = {
            RequestArrived: self._arrived,
            RequestCancelled: self._cancelled,
            RequestEnded: self._ended,
            AnswerBegan: self._began,
            ForecastsRevised: self._revised,
            BatchEnded: self._batch_ended,
            EngineExpected: self._hoped_for,
            EngineReady: self._ready,
            EngineClosed: self._closed,
            EngineLost: self._lost,
            DrainRequested: self._drain,
            DispatchSolved: self._solved,
            Tuned: self._tuned,
            ServedElsewhere: lambda event, actions: None,
            CacheChanged: lambda event, actions: None,
            TimerFired: lambda event, actions: None,
        }

    def step(self, now_s: float, event: Event, actions: Sequence[Action]) -> None:
        assert now_s >= self._now_s, "time ran backwards"
        self.present_s += len(self._alive) * (now_s - self._now_s)
        self._now_s = now_s
        self.steps += 1
        assert self.steps <= self._steps_max(now_s), "the scheduler loops"
        self._expected, self._makes_room = {}, set()
        self._handlers[type(event)](event, actions)
        self._update_preemptions(event)
        self._apply(event, actions)
        making_room = [worker for worker in self._workers.values() if worker.stopping]
        for worker in self._workers.values():
            # A request that leaves a GPU may start on another that makes room, or wait in another bin after new edges.
            if making_room != [worker] or self._config.bins_count > 1:
                worker.stopped = None
        self._assert_nothing_is_forgotten(event)
        check(self._scheduler)

    def close(self) -> None:
        """Check that nothing is left when no more events will occur."""
        assert not self._alive, f"requests {sorted(self._alive)} have no outcome"
        assert not self._scheduler.requests, "the scheduler keeps requests that have ended"
        for name, engine in self._scheduler.engines.items():
            assert not engine.running, f"the scheduler counts requests as running on {name}"
            assert engine.total_tokens == 0, f"{name} has memory reserved for no request"

    def assert_time_is_conserved(self) -> None:
        """Little's law (10): the time that requests were present is the same, counted over time and over requests."""
        assert math.isclose(self.present_s, self.stayed_s, rel_tol=1e-9, abs_tol=1e-9), "Little's law does not hold"

    # ---- events ----

    def _arrived(self, event: RequestArrived, actions: Sequence[Action]) -> None:
        request = event.request
        up = any(engine.up or engine.expected for engine in self._serving(request.model))
        self._models[request.model] = None
        self._update_no_engine()
        full = len(self.items if request.background else self._waiting) >= self._config.queue_requests_max
        expired = request.deadline_s is not None and request.deadline_s <= self._now_s
        reasons = [
            (self._draining, "draining"),
            (not up, "no_engine"),
            (expired, "deadline_exceeded"),
            (full, "queue_full"),
        ]
        expected = next((reason for applies, reason in reasons if applies), None)
        self._shares.add(request.share)
        holds = expected == "queue_full" and not request.background
        self._makes_room = self._last_of_holders(request) if holds else set()
        if self._makes_room:
            expected = None
        self.online = self.online or not request.background
        place = self.items if request.background else self._waiting
        self._alive[request.id] = place[request.id] = Life(request, self._now_s)
        if expected:
            self._expected[request.id] = expected

    def _last_of_holders(self, request: Request) -> set[int]:
        """Of the shares that hold most of the full queue by their weights: the last request of each, one of which makes
        room for this request. Empty: the request's own share holds most, with this request.
        """
        last = {life.request.share: id_ for id_, life in self._alive.items() if id_ in self._waiting}
        held = Counter([life.request.share for life in self._waiting.values()])
        held[request.share] += 1
        weights = {life.request.share: life.request.weight for life in self._waiting.values()}
        weights[request.share] = request.weight
        most = max([held[share] / weights[share] for share in held])
        holders = {share for share in held if held[share] / weights[share] == most}
        return set() if request.share in holders else {last[share] for share in holders}

    def _cancelled(self, event: RequestCancelled, actions: Sequence[Action]) -> None:
        life = self._alive.get(event.request_id)
        aborts = [action for action in actions if isinstance(action, AbortRequest)]
        if life is None or life.gone:
            assert not aborts, "a request is aborted after its end"
            return
        if life.engine is None:
            self._end(event.request_id, "cancelled")
            assert not aborts, "a request is aborted that does not run"
        else:
            life.gone = True
            assert aborts == [AbortRequest(life.engine, event.request_id)], "the engine does not abort the request"

    def _ended(self, event: RequestEnded, actions: Sequence[Action]) -> None:
        life = self._alive.get(event.request_id)
        if life is None or life.engine != event.engine:
            return  # stale
        del self._engines[event.engine].running[event.request_id]
        if event.outcome == "completed":
            self._engines[event.engine].shown_s[life.request.model] = self._now_s
        if event.refused and not life.gone:
            self._declined(life, event.engine)
        elif event.fault and event.retryable and not life.gone:
            self._back(event.request_id, event.engine, "engine_failed")
        elif event.outcome == "cancelled" and life.preempted and not life.gone:
            life.engine, life.failed_on = None, None
            life.tries -= 1
            self._wait_again(event, life)
        else:
            self._end(event.request_id, "cancelled" if life.gone else event.outcome)

    def _wait_again(self, event: RequestEnded, life: Life) -> None:
        """An item that was stopped for an online request waits as an item again."""
        if not life.request.background or self._engines[event.engine].info.barrier:
            self._waiting[event.request_id] = life
        elif self._draining:
            self._expected[event.request_id] = "draining"
        else:
            life.preempted = False
            self.items[event.request_id] = life

    def _began(self, event: AnswerBegan, actions: Sequence[Action]) -> None:
        life = self._alive.get(event.request_id)
        if life is not None and life.engine is not None and not life.preempted:
            life.began = True

    def _revised(self, event: ForecastsRevised, actions: Sequence[Action]) -> None:
        """From now on a waiting request has the forecast, and starts with it; nothing makes room for it."""
        for revision in event.revisions:
            life = self._waiting.get(revision.request_id) or self.items.get(revision.request_id)
            if life is not None:
                life.request = revision.of(life.request)
        assert not any(isinstance(action, PreemptBatch) for action in actions), "a later forecast preempts a batch"

    def _batch_ended(self, event: BatchEnded, actions: Sequence[Action]) -> None:
        running = self._engines[event.engine].running
        for request_id in [request_id for request_id, batch_id in running.items() if batch_id == event.batch_id]:
            del running[request_id]
            self._engines[event.engine].shown_s[self._alive[request_id].request.model] = self._now_s
            self._end(request_id, "cancelled" if self._alive[request_id].gone else "completed")

    def _hoped_for(self, event: EngineExpected, actions: Sequence[Action]) -> None:
        """Until its models are known, the engine may serve any."""
        assert event.engine.name not in self._engines, "worlds expect engines only before they were ever up"
        self._add(msgspec.structs.replace(event.engine, models=())).expected = True
        self._steady = False

    def _add(self, info: EngineInfo) -> Engine:
        name = info.worker or info.name
        worker = self._workers.setdefault(name, Worker(name))
        engine = self._engines[info.name] = Engine(info, worker)
        return engine

    def _ready(self, event: EngineReady, actions: Sequence[Action]) -> None:
        self._infos.append(event.engine)
        engine = self._engines.get(event.engine.name) or self._add(event.engine)
        if not engine.known:  # what waited for it, and no engine serves, is refused now
            engine.known, engine.info = True, event.engine
            unlisted = [id_ for id_, life in self._waiting.items() if not self._serving(life.request.model)]
            self._expected.update(dict.fromkeys(unlisted, "model_not_found"))
        if not engine.up:  # the engine is back: its earlier failures no longer count
            engine.open_until_s = None
        engine.info, engine.up = event.engine, True
        self._models.update(dict.fromkeys(event.engine.models))
        self._update_no_engine()

    def _closed(self, event: EngineClosed, actions: Sequence[Action]) -> None:
        engine = self._engines[event.engine]
        engine.up = self._steady = False
        engine.expected = event.expected
        self._update_no_engine()

    def _lost(self, event: EngineLost, actions: Sequence[Action]) -> None:
        engine = self._engines[event.engine]
        engine.up = self._steady = False
        engine.expected = event.expected
        running, engine.running = engine.running, {}
        for request_id in running:
            if self._alive[request_id].gone:
                self._end(request_id, "cancelled")
            elif request_id in event.answered:
                self._expected[request_id] = "engine_lost"
                self._alive[request_id].engine = None
            else:
                self._back(request_id, event.engine, "engine_lost")
        self._update_no_engine()

    def _drain(self, event: DrainRequested, actions: Sequence[Action]) -> None:
        self._draining = True
        self._expected.update(dict.fromkeys(self.items, "draining"))

    def _tuned(self, event: Tuned, actions: Sequence[Action]) -> None:
        """What was overtaken under the former order does not count under the new one."""
        self._config = tuned(self._config, event.settings)
        self._last_formed.clear()
        self._passed_s.clear()

    def _solved(self, event: DispatchSolved, actions: Sequence[Action]) -> None:
        assert event.model in self._asked, "a plan arrives that was not requested"
        self._asked.remove(event.model)

    def _back(self, request_id: int, engine: str, reason: str) -> None:
        """The engine failed a request before its client saw a byte: it runs again unless its tries are used up (9)."""
        life = self._alive[request_id]
        life.engine, life.failed_on = None, engine
        if life.tries - life.refusals > self._config.retries_max:
            self._expected[request_id] = reason
        else:
            self._waiting[request_id] = life

    def _declined(self, life: Life, name: str) -> None:
        """A request that an engine declines runs on another one that works, or fails when all of them have."""
        life.engine, life.failed_on = None, name
        life.refused_by.add(name)
        life.refusals += 1
        others = [e for e in self._serving(life.request.model) if e.works and e.info.name not in life.refused_by]
        if others and len(life.refused_by) < REFUSALS_MAX:
            self._waiting[life.request.id] = life
        else:
            self._expected[life.request.id] = "refused"

    def _end(self, request_id: int, outcome: str) -> None:
        """Each request has exactly one outcome (1)."""
        assert request_id not in self._over, f"request {request_id} ended twice"
        life = self._alive.pop(request_id)
        self.items.pop(request_id, None)
        if self._waiting.pop(request_id, None) is not None:
            self._passed_s.pop(life.request.model, None)  # all were formed
        self._over.add(request_id)
        self.outcomes[outcome] += 1
        self.stayed_s += self._now_s - life.arrived_at_s

    def _serving(self, model: str) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.info.serves(model)]

    def _update_no_engine(self) -> None:
        for model in self._models:
            if any(engine.works for engine in self._serving(model)):
                self._no_engine_since_s.pop(model, None)
            else:
                self._no_engine_since_s.setdefault(model, self._now_s)

    def _update_preemptions(self, event: Event) -> None:
        for worker in self._workers.values():
            if worker.stopping:
                still = {request_id for engine in worker.engines for request_id in engine.running}
                goes = isinstance(event, RequestEnded) and event.outcome == "cancelled"
                if not goes or worker.stopping <= still:
                    worker.stopped = None
                worker.stopping &= still

    # ---- actions ----

    def _apply(self, event: Event, actions: Sequence[Action]) -> None:
        no_engine_since_s = dict(self._no_engine_since_s)
        self._passable |= passable(self._scheduler, self._infos)
        for action in actions:
            if isinstance(action, StartBatch):
                self._start(self._engines[action.engine], action.batch)
            elif isinstance(action, FailRequest):
                self._fail(action, event, no_engine_since_s)
            elif isinstance(action, ReportCircuit):
                until_s = None if action.open_s is None else self._now_s + action.open_s
                self._engines[action.engine].open_until_s = until_s
                self._update_no_engine()
            elif isinstance(action, PreemptBatch):
                self._preempt(action)
            elif isinstance(action, AbortRequest):
                assert isinstance(event, RequestCancelled), "requests are aborted only when their client leaves"
            elif isinstance(action, ReportDue):
                self._due(action.request_id)
            elif isinstance(action, ReportTrust):
                assert action.trusted == self._scheduler.queues(action.model).binning.trust.trusted
            else:
                assert isinstance(action, SolveDispatch)
                assert action.model not in self._asked, "two plans are requested at once"
                self._asked.add(action.model)
        assert not self._expected, f"missing failures: {self._expected}"
        assert not self._makes_room, f"none of {self._makes_room} made room in the full queue"

    def _due(self, request_id: int) -> None:
        """An item that has a window, or that ran in vain, counts as online, as if it arrived now."""
        life, self.online = self._alive[request_id], True
        assert life.request.background, f"request {request_id} is due and is no item"
        ran = request_id not in self.items
        assert ran or life.request.deadline_s is not None, f"item {request_id} is due and has no window"
        life.request = msgspec.structs.replace(life.request, background=False)
        if request_id in self.items:
            self._waiting[request_id] = self._arrive_now(request_id)

    def _arrive_now(self, request_id: int) -> Life:
        """Take an item out of those that wait: in the queues it counts from now."""
        life = self._alive[request_id] = self._alive.pop(request_id)
        assert self.items.pop(request_id, None) is life, f"item {request_id} does not wait"
        self.stayed_s += self._now_s - life.arrived_at_s
        life.arrived_at_s = self._now_s
        return life

    def _start_items(self, engine: Engine, batch: Batch) -> None:
        """Items start on what others leave: their batch has no place among those of the queues."""
        self._assert_takes(engine, batch)
        online = [life.request for life in self._waiting.values()]
        for request in batch.requests:
            life = self._arrive_now(request.id)
            assert_item_may_start(request, life.request, engine.info, online, self._now_s)
            life.engine = engine.info.name
            life.tries += 1
            engine.running[request.id] = batch.id
        self._formed[batch.id] = batch.bin, batch.size, len(batch.requests)
        self._of_items.add(batch.id)
        assert len(engine.running) <= engine.info.slots, f"{engine.info.name} was given items beyond its slots"

    def _assert_takes(self, engine: Engine, batch: Batch) -> None:
        """The engine takes the batch, whatever waits."""
        info = engine.info
        assert engine.up, f"{info.name} is down and was given work"
        assert info.serves(batch.model), f"{info.name} was given {batch.model!r}, which it does not serve"
        assert not engine.worker.stopping, f"{info.name} was given work while running requests must make room"
        assert batch.requests, "an empty batch was started"
        assert batch.formed_at_s <= self._now_s, "a batch was started before it formed"
        assert len(batch.requests) <= batch.size <= self._config.full_batch, "a batch is too large"
        if info.barrier:
            assert not engine.worker.runs_a_batch, f"the GPU of {info.name} was given a second batch"  # (2)
        if engine.open_until_s is not None:
            assert self._now_s >= engine.open_until_s, f"{info.name} was given work while its circuit was open"
            assert info.barrier or len(batch.requests) == 1, f"{info.name} was given a trial of more than one request"

    def _start(self, engine: Engine, batch: Batch) -> None:
        if batch.requests and batch.requests[0].background:
            self._start_items(engine, batch)
            return
        self._assert_takes(engine, batch)
        info = engine.info
        if self._config.order == "fffs" and batch.id not in self._formed:
            self._assert_not_overtaken(engine, batch)
        if self._foreseen is not None:
            self._assert_it_is_the_best(self._foreseen, engine, batch)
        self._passed_s.pop(batch.model, None)  # also when a batch starts in parts
        self._count_batch(engine.worker, batch)
        self._assert_preemption_pays(engine.worker, batch)
        for request in batch.requests:
            self._start_request(request, engine, batch)
        engine.worker.kept = False
        requests_max = info.slots + (0 if info.barrier else info.look_ahead)
        assert len(engine.running) <= requests_max, f"{info.name} was given more requests than it has places"  # (2)

    def _start_request(self, request: Request, engine: Engine, batch: Batch) -> None:
        life = self._waiting.pop(request.id, None)
        assert life is not None, f"request {request.id} is in its batch twice"
        assert life.request == request, f"request {request.id} was changed before its start"
        assert not life.gone, f"request {request.id} was started for a client that has gone"  # (6)
        assert request.model == batch.model, f"request {request.id} is of another model than its batch"
        if request.deadline_s is not None:
            assert request.deadline_s > self._now_s, f"request {request.id} was started late"
            tried = len(batch.requests) == 1 and not engine.running and engine.is_tried(request.model, self._now_s)
            if self._times is not None and not tried and not (life.tries and self._times.hopes(request)):
                # Where sequences share slots the scheduler learns less exact times.
                share = 1.0 if engine.info.barrier else 0.75
                ends_s = self._now_s + share * self._times.batch_s(engine.info, len(batch.requests))
                assert ends_s <= request.deadline_s + NEAR_S, f"request {request.id} was started too late"
        if life.preempted:  # it may join a running batch; no preemption can be checked for its old worker
            for worker in self._workers.values():
                if worker is not engine.worker:
                    worker.stopped = None
        life.engine = engine.info.name
        life.began = life.preempted = False
        life.tries += 1
        tries = life.tries - life.refusals
        assert tries <= self._config.retries_max + 1, f"request {request.id} was tried too often"  # (9)
        engine.running[request.id] = batch.id

    def _assert_not_overtaken(self, engine: Engine, batch: Batch) -> None:
        """Check a batch that starts for the first time against requests of the same engine that have waited longer.

        If each request is its own batch, nothing of its share overtakes a request that waits for its fair share of the
        memory or less. Otherwise a request that arrived before a batch of another model formed starts directly after
        it, unless requests of its model need more than their fair share of an engine's memory. Requests of a model
        from which the engine rests wait for another engine. An engine that holds few models groups them.
        """
        release, info = self._config.release or "", engine.info
        resting = {model for model in self._models if self._rests_until_s(engine, model)}
        servable = {
            id_: life
            for id_, life in self._waiting.items()
            if info.serves(life.request.model) and life.request.model not in resting
            if not info.models_at_once or life.request.model == batch.model
        }
        first = {id_: life for id_, life in servable.items() if not life.tries}
        alone = release == "static:1" or (self._config.full_batch == 1 and release != "window")
        if alone:
            starts = batch.requests[0]
            own = [id_ for id_, life in first.items() if life.request.share == starts.share]
            oldest = next(id_ for id_ in own if id_ == starts.id or id_ not in self._passable)
            assert oldest == starts.id, f"request {oldest} was overtaken"
        if len(self._shares) > 1:  # batches wait for those of a share that has been served less
            return
        passed = {life.request.model for id_, life in first.items() if id_ in self._passable}
        first = {id_: life for id_, life in first.items() if life.request.model not in passed}
        for model in passed:
            self._passed_s.pop(model, None)
        self._passed_s.pop(batch.model, None)
        for model in sorted({life.request.model for life in first.values()}):
            was_passed = batch.formed_at_s > self._passed_s.get(model, math.inf)
            assert not was_passed, f"requests of {model!r} are overtaken by {batch.model!r} repeatedly"
        other_models = {batch.model, *(life.request.model for life in servable.values() if life.tries)}
        oldest_of = {life.request.model: life for life in reversed(first.values())}
        for model, life in oldest_of.items():
            goes = life.arrived_at_s < batch.formed_at_s and self._due_s(life, info) <= self._now_s
            if model not in other_models and engine.has_room and goes:
                self._passed_s.setdefault(model, self._now_s)

    def _assert_it_is_the_best(self, times: Times, engine: Engine, batch: Batch) -> None:
        """Under flex the batch is the largest that waits, under clockwork the earliest, unless another rule applies."""
        lives = [life for life in self._waiting.values() if not life.tries and engine.info.serves(life.request.model)]
        undated = [life for life in lives if life.request.deadline_s is None]
        old = any(life.arrived_at_s + UNDATED_S <= self._now_s for life in undated)
        retried = any(self._waiting[request.id].tries for request in batch.requests if request.id in self._waiting)
        makes_room = engine.worker.kept or any(worker.stopping for worker in self._workers.values())
        if old or retried or makes_room or self._config.release != "window" or len(self._shares) > 1:
            return  # other releases form batches before their requests' chances are known
        rows: dict[str, list[float]] = {}
        for life in lives:
            rows.setdefault(life.request.model, []).append(life.request.deadline_s or math.inf)
        if self._config.order == "clockwork":
            earliest_s = min([request.deadline_s or math.inf for request in batch.requests])
            possible_s = self._now_s + times.batch_s(engine.info, 1) + JUST_S
            missed = [at_s for row in rows.values() for at_s in row if possible_s <= at_s < earliest_s]
            assert not missed, f"what is due at {min(missed)} s could be in time, but another batch was started"
            return
        for model, row in rows.items():
            for size in range(len(batch.requests) + 1, min(self._config.full_batch, engine.info.slots) + 1):
                ends_s = self._now_s + times.batch_s(engine.info, size) + JUST_S
                together = sum(deadline_s >= ends_s for deadline_s in row)
                assert together < size, f"{size} requests of {model!r} could be in time together"

    def _count_batch(self, worker: Worker, batch: Batch) -> None:
        """Batches have numbers in the order of their formation: under fffs they first start in that order (3)."""
        lives = [self._waiting.get(request.id) for request in batch.requests]
        assert None not in lives, f"batch {batch.id} holds a request that does not wait"
        first = [life for life in lives if life is not None and life.tries == 0]
        previous = self._formed.get(batch.id)
        if previous is None:
            last = self._last_formed[batch.model] if len(self._shares) == 1 else 0
            in_order = self._config.order != "fffs" or batch.id > last
            was_passed = any(request.id in self._passable for request in batch.requests)
            assert in_order or was_passed, f"batch {batch.id} was overtaken"
            self._last_formed[batch.model] = max(last, batch.id)
            self._assert_released(worker, batch)
            previous = batch.bin, batch.size, 0
        index, size, started = previous
        of_items = batch.id in self._of_items  # of any bins: what comes back of them may be of shorter ones
        assert self._direct or of_items or index == batch.bin, f"batch {batch.id} has two bins"
        assert batch.size <= size, f"batch {batch.id} has grown"  # requests that come back form a smaller batch
        assert started + len(first) <= size, f"batch {batch.id} has more requests than it was formed of"
        self._formed[batch.id] = index, size, started + len(first)

    def _assert_released(self, worker: Worker, batch: Batch) -> None:
        """Check the batch size that the simple releases promise. Rests of batches may preempt, too."""
        if worker.kept or self._draining or batch.size == self._config.full_batch:
            return
        if self._direct and len(self._shares) > 1:
            return  # batches form for a free engine only, of what the order can use
        kind, _, size = (self._config.release or "").partition(":")
        assert kind != "full", "a batch that is not full was released"
        assert kind != "static" or batch.size == int(size), f"a batch is not of {size}"

    def _stop_line(self, action: PreemptBatch) -> None:
        """Check that an item is stopped for somebody, unread, and stopped once."""
        engine, (request_id,) = self._engines[action.engine], action.request_ids
        life, online = self._alive[request_id], [life.request for life in self._waiting.values()]
        assert self._config.line_stops > 0, f"item {request_id} is stopped although items run to their end"
        assert engine.running[request_id] == action.batch_id, f"item {request_id} does not run on {action.engine}"
        assert not life.began, f"item {request_id} is stopped after its first byte"
        assert not life.gone, f"item {request_id} is stopped although its client left"
        assert not life.preempted, f"item {request_id} is stopped twice"
        over = len(engine.running) > engine.info.slots
        wanted = over or any(engine.info.serves(request.model) for request in online)
        assert wanted, f"item {request_id} is stopped for nobody"
        life.preempted = True

    def _preempt(self, action: PreemptBatch) -> None:
        """Check that the batch is small enough, unread, stopped as a whole, and stopped once."""
        config, engine = self._config, self._engines[action.engine]
        if self._alive[action.request_ids[0]].request.background and not engine.info.barrier:
            self._stop_line(action)
            return
        assert config.order == "flex", "an order that does not preempt stops a batch"
        assert config.preemption != "off", "a batch is stopped although preemption is off"
        assert engine.info.barrier, f"{action.engine} refills its slots and was told to make room"
        assert set(engine.running.values()) == {action.batch_id}, f"batch {action.batch_id} does not run there"
        lives = {request_id: self._alive[request_id] for request_id in engine.running}
        assert action.request_ids, f"batch {action.batch_id} has no requests left to stop"
        assert set(action.request_ids) == {id_ for id_, life in lives.items() if not life.gone}, "a batch stops in part"
        assert not any(life.began for life in lives.values()), f"batch {action.batch_id} is stopped after a first byte"
        assert not engine.worker.stopping, "a batch is stopped twice"
        assert len(lives) * config.preemption_factor <= config.full_batch, "no batch could be so much larger"
        for request_id in action.request_ids:
            lives[request_id].preempted = True
        engine.worker.stopping, engine.worker.stopped, engine.worker.kept = set(lives), len(lives), True
        engine.worker.stopped_at_s = self._now_s

    def _assert_preemption_pays(self, worker: Worker, batch: Batch) -> None:
        """If nothing else happened since the preemption, the new batch is larger by at least the preemption factor.

        While the requests make room, a deadline comes closer, and so large a batch may be in time no more.
        """
        hurries = any(request.deadline_s is not None for request in batch.requests)
        if hurries and self._now_s > worker.stopped_at_s:
            worker.stopped = None
        if worker.stopped is not None and self._config.release == "window":  # other releases may form several batches
            requests_min = self._config.preemption_factor * worker.stopped
            assert len(batch.requests) >= requests_min, f"{worker.stopped} made room for only {len(batch.requests)}"
            worker.stopped = None

    def _fail(self, action: FailRequest, event: Event, no_engine_since_s: dict[str, float]) -> None:
        life = self._alive.get(action.request_id)
        assert life is not None, f"request {action.request_id} failed after its end"
        assert life.engine is None, f"request {action.request_id} failed while it ran"
        assert action.retry_after_s is None or 0 <= action.retry_after_s < math.inf, "the advised wait is endless"
        expected = self._expected.pop(action.request_id, None)
        if action.request_id in self._makes_room:
            assert action.reason == "queue_full", f"request {action.request_id} fails: {action.reason}"
            self._makes_room = set()
        elif expected is not None:
            assert action.reason == expected, f"request {action.request_id} fails: {action.reason}, not {expected}"
        elif action.reason == "deadline_exceeded":
            deadline_s = life.request.deadline_s
            assert deadline_s is not None, f"request {action.request_id} has no deadline"
            self._assert_it_is_late(life.request, deadline_s)
            if life.preempted:  # it was to run again in the batch for which it made room
                for worker in self._workers.values():
                    worker.stopped = None
        else:
            assert action.reason == "no_engine", f"no reason to fail request {action.request_id}: {action.reason}"
            assert isinstance(event, TimerFired), "only a timer may end the wait for an engine"
            self._assert_engines_were_waited_for(life, no_engine_since_s)
        self._end(action.request_id, action.reason)

    def _assert_engines_were_waited_for(self, life: Life, no_engine_since_s: dict[str, float]) -> None:
        assert life.request.model in no_engine_since_s, "an engine is up"
        wait_s = self._now_s - max(no_engine_since_s[life.request.model], life.arrived_at_s)
        assert wait_s >= self._config.engine_wait_s - NEAR_S, f"requests waited for engines only {wait_s} s"

    def _assert_it_is_late(self, request: Request, deadline_s: float) -> None:
        """The request cannot be in time. Before its deadline only known times can show that."""
        assert self._direct or deadline_s <= self._now_s, f"request {request.id} failed before its deadline"
        if self._foreseen is not None:
            ends_s = self._now_s + self._least_s(request.model)
            assert deadline_s < ends_s + NEAR_S, f"request {request.id} failed, and could have been in time"

    def _least_s(self, model: str) -> float:
        """Seconds that a request takes alone on the fastest engine that serves its model; 0 where no engine does."""
        assert self._foreseen is not None, "only where times are known"
        up = [engine.info for engine in self._serving(model) if engine.up]
        return min([self._foreseen.batch_s(info, 1) for info in up], default=0.0)

    # ---- after each step ----

    def _assert_nothing_is_forgotten(self, event: Event) -> None:
        wake_at_s = self._scheduler.wake_at_s
        if isinstance(event, TimerFired):
            assert wake_at_s is None or wake_at_s > self._now_s, "the timer would fire endlessly"
        works = [engine.info for engine in self._engines.values() if engine.free]
        idle = () if self.online else [i for i in works if not self._engines[i.name].running]
        assert_items_may_wait([life.request for life in self.items.values()], idle, self._now_s, wake_at_s)
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
        for life in self._waiting.values():
            self._assert_it_gives_up(life, math.inf if wake_at_s is None else wake_at_s)
        for engine in self._engines.values():
            if engine.free:
                self._assert_it_idles_with_reason(engine, math.inf if wake_at_s is None else wake_at_s)

    def _assert_it_gives_up(self, life: Life, wake_at_s: float) -> None:
        """A request waits for a working engine for engine_wait_s."""
        since_s = self._no_engine_since_s.get(life.request.model)
        if since_s is not None:
            due_s = max(since_s, life.arrived_at_s) + self._config.engine_wait_s
            assert wake_at_s < math.inf, "requests would wait endlessly for an engine"
            assert wake_at_s <= due_s + NEAR_S, f"request {life.request.id} would wait too long for an engine"

    def _assert_it_has_a_chance(self, request: Request) -> None:
        foreseen = self._foreseen
        if foreseen is None or request.deadline_s is None or not self._steady:
            return
        if any(engine.is_tried(request.model, self._now_s) for engine in self._serving(request.model)):
            return
        if not foreseen.hopes(request):
            ends_s = self._now_s + self._least_s(request.model)
            assert ends_s <= request.deadline_s + JUST_S, f"request {request.id} waits although it cannot be in time"

    def _assert_it_idles_with_reason(self, engine: Engine, wake_at_s: float) -> None:
        """An idle engine leaves only requests that wait to form a batch, that it failed or declined while another
        engine works, that cannot be in time on it, for which others make room, or from whose model it rests while
        another engine does not (4).

        A request that the engine failed may wait for memory of another engine; nothing overtakes a wait for memory.
        """
        name = engine.info.name
        waiting = {id_: life for id_, life in self._waiting.items() if engine.info.serves(life.request.model)}
        avoids = [
            id_
            for id_, life in waiting.items()
            if (life.failed_on == name or name in life.refused_by)
            and any(other.works for other in self._serving(life.request.model) if other is not engine)
        ]
        if avoids and not self._direct and any(other.info.tokens_max for other in self._engines.values()):
            return
        dues_s = {
            id_: max(self._due_s(life, engine.info), self._rests_until_s(engine, life.request.model))
            for id_, life in waiting.items()
            if id_ not in avoids
        }
        stuck = [id_ for id_, due_s in dues_s.items() if due_s <= self._now_s]
        assert not stuck, f"requests {stuck} wait although {name} is idle"
        assert wake_at_s <= min(dues_s.values(), default=math.inf), f"{name} will idle too long"

    def _rests_until_s(self, engine: Engine, model: str) -> float:
        """Until when the engine leaves requests of a model to others; 0 while it does not."""
        states = self._scheduler.engines
        until_s = states[engine.info.name].rests.until_s(model)
        others = [other.info.name for other in self._serving(model) if other.works]
        awake = any(states[name].rests.until_s(model) <= self._now_s for name in others)
        return until_s if until_s > self._now_s and awake else 0.0

    def _due_s(self, life: Life, engine: EngineInfo) -> float:
        """When a request must start at the latest on an idle engine."""
        config = self._config
        if self._direct and not self._could_start(life.request, engine):
            return math.inf
        if self._draining or life.tries or config.release in NEVER_IDLE:
            return self._now_s
        if config.release == "timeout":
            return life.arrived_at_s + (TIMEOUT_S if config.batch_wait_s is None else config.batch_wait_s)
        return math.inf

    def _could_start(self, request: Request, engine: EngineInfo) -> bool:
        """Whether the request would be in time, as far as times are known."""
        if any(worker.stopping for worker in self._workers.values()):
            return False  # other requests may be making room for this one
        if request.deadline_s is None or not engine.speeds:
            return True
        if self._foreseen is None:
            return False  # the scheduler may expect other times
        return self._now_s + self._foreseen.batch_s(engine, 1) <= request.deadline_s
