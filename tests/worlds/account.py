"""The laws, by an account kept outside the scheduler: of what it was told and what it answered, of nothing else.

`Account.step` takes each step of a run and raises AssertionError where a law is broken; `Account.close` when nothing is
left to happen. Numbers are those of DESIGN's laws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    BatchEnded,
    DispatchSolved,
    DrainRequested,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    ReportCircuit,
    ReportTrust,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.policies import TIMEOUT_S, SchedulingConfig
from llmserve.scheduling.scheduler import Scheduler

NEVER_IDLE = ("greedy", "window")  # releases under which nothing waits for company
NEAR_S = 1e-9  # of times that are sums of others


class Engine:
    """One engine as it must be. open_until_s : while its circuit is not closed, when it may be tried again."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.up = False
        self.open_until_s: float | None = None
        self.running: dict[int, int] = {}  # request id -> batch id

    @property
    def free(self) -> bool:
        """It must not be left without work."""
        idle = not self.running or not (self.info.barrier or self.info.tokens_max)
        return self.up and self.open_until_s is None and idle and len(self.running) < self.info.slots


class Life:
    """One accepted request. failed_on : the engine that it came back from last."""

    __slots__ = ("arrived_at_s", "engine", "failed_on", "gone", "request", "tries")

    def __init__(self, request: Request, arrived_at_s: float) -> None:
        self.request = request
        self.arrived_at_s = arrived_at_s
        self.engine: str | None = None
        self.failed_on: str | None = None
        self.gone = False
        self.tries = 0


class Account:
    """steps_max : more than these, and something goes round in circles."""

    def __init__(self, config: SchedulingConfig, scheduler: Scheduler, steps_max: Callable[[float], float]) -> None:
        self._config = config
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
        self._draining = False
        self._asked = False  # for a plan
        self._helpless_since_s: float | None = 0.0
        self._formed: dict[int, tuple[int, int, int]] = {}  # batch -> its bin, its size, requests started first
        self._last_formed = 0  # the last batch whose first part was started
        self._expected: dict[int, str] = {}  # requests of which this step must say that they fail, and why
        self._hear: dict[type, Callable[..., None]] = {
            RequestArrived: self._arrived,
            RequestCancelled: self._cancelled,
            RequestEnded: self._ended,
            BatchEnded: self._batch_ended,
            EngineReady: self._ready,
            EngineClosed: self._closed,
            EngineLost: self._lost,
            DrainRequested: self._drain,
            DispatchSolved: self._solved,
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
        self._obey(event, actions)
        self._see_that_nothing_is_forgotten(event)
        self._scheduler.check()

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
        up = any(engine.up for engine in self._engines.values())
        full = len(self._waiting) >= self._config.queue_requests_max
        late = request.deadline_s is not None and request.deadline_s <= self._now_s
        reasons = [
            (self._draining, "draining"),
            (not up, "no_engine"),
            (full, "queue_full"),
            (late, "deadline_exceeded"),
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
        if event.fault and event.retryable and not life.gone:
            self._back(event.request_id, event.engine, "engine_failed")
        else:
            self._end(event.request_id, "cancelled" if life.gone else event.outcome)

    def _batch_ended(self, event: BatchEnded, actions: Sequence[Action]) -> None:
        running = self._engines[event.engine].running
        for request_id in [request_id for request_id, batch_id in running.items() if batch_id == event.batch_id]:
            del running[request_id]
            self._end(request_id, "cancelled" if self._alive[request_id].gone else "completed")

    def _ready(self, event: EngineReady, actions: Sequence[Action]) -> None:
        engine = self._engines.setdefault(event.engine.name, Engine(event.engine))
        if not engine.up:  # whatever was wrong with it, it has come back
            engine.open_until_s = None
        engine.info, engine.up = event.engine, True
        self._see_who_helps()

    def _closed(self, event: EngineClosed, actions: Sequence[Action]) -> None:
        self._engines[event.engine].up = False
        self._see_who_helps()

    def _lost(self, event: EngineLost, actions: Sequence[Action]) -> None:
        engine = self._engines[event.engine]
        engine.up = False
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

    def _solved(self, event: DispatchSolved, actions: Sequence[Action]) -> None:
        assert self._asked, "a plan comes that nobody asked for"
        self._asked = False

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
        self._waiting.pop(request_id, None)
        self._over.add(request_id)
        self.outcomes[outcome] += 1
        self.stayed_s += self._now_s - life.arrived_at_s

    def _see_who_helps(self) -> None:
        if any(engine.up and engine.open_until_s is None for engine in self._engines.values()):
            self._helpless_since_s = None
        elif self._helpless_since_s is None:
            self._helpless_since_s = self._now_s

    # ---- what it answered ----

    def _obey(self, event: Event, actions: Sequence[Action]) -> None:
        helpless_since_s = self._helpless_since_s
        for action in actions:
            if isinstance(action, StartBatch):
                self._start(self._engines[action.engine], action.batch)
            elif isinstance(action, FailRequest):
                self._fail(action, event, helpless_since_s)
            elif isinstance(action, ReportCircuit):
                until_s = None if action.open_s is None else self._now_s + action.open_s
                self._engines[action.engine].open_until_s = until_s
                self._see_who_helps()
            elif isinstance(action, AbortRequest):
                assert isinstance(event, RequestCancelled), "only a client that leaves stops a request"
            elif isinstance(action, ReportTrust):
                assert action.trusted == self._scheduler.lane(action.model).trust.trusted
            else:
                assert isinstance(action, SolveDispatch)
                assert not self._asked, "two plans are made at once"
                self._asked = True
        assert not self._expected, f"not told: {self._expected}"

    def _start(self, engine: Engine, batch: Batch) -> None:
        info = engine.info
        assert engine.up, f"{info.name} is down and was given work"
        assert batch.requests, "an empty batch was started"
        assert batch.formed_at_s <= self._now_s, "a batch was started before it formed"
        assert len(batch.requests) <= batch.size <= self._config.full_batch, "a batch is too large"
        if info.barrier:
            assert not engine.running, f"barrier engine {info.name} was given a second batch"  # (2)
        if engine.open_until_s is not None:
            assert self._now_s >= engine.open_until_s, f"{info.name} fails everything and was given work"
            assert info.barrier or len(batch.requests) == 1, f"{info.name} is tried with more than one request"
        self._count_batch(batch)
        for request in batch.requests:
            self._start_request(request, engine, batch)
        most = info.slots + (0 if info.barrier else info.look_ahead)
        assert len(engine.running) <= most, f"{info.name} was given more than it takes"  # (2)

    def _start_request(self, request: Request, engine: Engine, batch: Batch) -> None:
        life = self._waiting.pop(request.id, None)
        assert life is not None, f"request {request.id} is in its batch twice"
        assert life.request == request, f"request {request.id} was started as another"
        assert not life.gone, f"request {request.id} was started for a client that has gone"  # (6)
        assert request.deadline_s is None or request.deadline_s > self._now_s, f"request {request.id} was started late"
        life.engine = engine.info.name
        life.tries += 1
        assert life.tries <= self._config.retries_max + 1, f"request {request.id} was tried too often"  # (9)
        engine.running[request.id] = batch.id

    def _count_batch(self, batch: Batch) -> None:
        """Batches are numbered as they form: under fffs they are first started in that order (3)."""
        lives = [self._waiting.get(request.id) for request in batch.requests]
        assert None not in lives, f"batch {batch.id} holds a request that does not wait"
        first = [life for life in lives if life is not None and life.tries == 0]
        before = self._formed.get(batch.id)
        if before is None:
            assert self._config.order != "fffs" or batch.id > self._last_formed, f"batch {batch.id} was overtaken"
            self._last_formed = max(self._last_formed, batch.id)
            self._assert_released(batch)
            before = batch.bin, batch.size, 0
        index, size, started = before
        assert index == batch.bin, f"batch {batch.id} has two bins"
        assert batch.size <= size, f"batch {batch.id} has grown"  # what comes back of it is a smaller one
        assert started + len(first) <= size, f"batch {batch.id} has more requests than it was formed of"
        self._formed[batch.id] = index, size, started + len(first)

    def _assert_released(self, batch: Batch) -> None:
        """What the simplest releases promise of a batch's size."""
        if self._draining or batch.size == self._config.full_batch:
            return
        kind, _, size = (self._config.release or "").partition(":")
        assert kind != "full", "a batch is not full"
        assert kind != "static" or batch.size == int(size), f"a batch is not of {size}"

    def _fail(self, action: FailRequest, event: Event, helpless_since_s: float | None) -> None:
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
            assert deadline_s <= self._now_s, f"request {action.request_id} failed before its deadline"
        else:
            assert action.reason == "no_engine", f"no reason to fail request {action.request_id}: {action.reason}"
            assert isinstance(event, TimerFired), "only time tells that no engine comes"
            assert helpless_since_s is not None, "an engine is up"
            wait_s = self._now_s - helpless_since_s
            assert wait_s >= self._config.engine_wait_s - NEAR_S, f"engines were waited for only {wait_s} s"
        self._end(action.request_id, action.reason)

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
        if self._helpless_since_s is not None:
            assert wake_at_s is not None, "requests wait for an engine for ever"
        for engine in self._engines.values():
            if engine.free:
                self._assert_it_idles_with_reason(engine, math.inf if wake_at_s is None else wake_at_s)

    def _assert_it_idles_with_reason(self, engine: Engine, wake_at_s: float) -> None:
        """An engine is idle only for what waits for company, or was failed by it while another works (4).

        The latter may wait for the memory of another engine, and nothing overtakes what waits for memory.
        """
        name = engine.info.name
        another = any(
            other.up and other.open_until_s is None for other in self._engines.values() if other is not engine
        )
        avoids = [id_ for id_, life in self._waiting.items() if life.failed_on == name and another]
        if avoids and any(other.info.tokens_max for other in self._engines.values()):
            return
        dues_s = {id_: self._due_s(life) for id_, life in self._waiting.items() if id_ not in avoids}
        stuck = [id_ for id_, due_s in dues_s.items() if due_s <= self._now_s]
        assert not stuck, f"requests {stuck} wait while {name} is idle"
        assert wake_at_s <= min(dues_s.values(), default=math.inf), f"{name} will idle too long"

    def _due_s(self, life: Life) -> float:
        """When a request must start at the latest on an engine that is idle."""
        config = self._config
        if self._draining or life.tries or config.release in NEVER_IDLE:
            return self._now_s
        if config.release == "timeout":
            return life.arrived_at_s + (TIMEOUT_S if config.batch_wait_s is None else config.batch_wait_s)
        return math.inf
