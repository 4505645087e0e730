"""The laws hold under arbitrary interleavings of arrivals, ends, cancellations, losses and time.

The state machine below is the outside world. It knows only the events and actions of the scheduler, and keeps its own
record of where every request must be.
"""

from collections import Counter

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from worlds.invariants import check, passable

from bins.dispatch import DispatchPlan, DispatchTable, Observed
from bins.profile import StepTimes
from llmserve.live.journal import Header, Step, replay
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    AnswerBegan,
    BatchEnded,
    DispatchSolved,
    DrainRequested,
    EngineClosed,
    EngineExpected,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    PreemptBatch,
    ReportCircuit,
    ReportTrust,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.trust import Trust
from llmserve.settings import policies
from llmserve.settings.policies import SchedulingConfig

CONFIGS = st.builds(
    SchedulingConfig,
    bins=st.integers(1, 4),
    batch_size=st.integers(1, 4),
    release=st.sampled_from(
        [
            "window",
            "window",
            "full",
            "static:1",
            "timeout",
            "greedy",
            "rate-headroom",
            "deadline",
            "table",
            "table",
            "table",
        ]
    ),
    batch_wait_s=st.sampled_from([None, 0.0, 0.5, 3.0]),
    queue_requests_max=st.sampled_from([3, 1_000]),
    retries_max=st.integers(0, 2),
    engine_wait_s=st.sampled_from([0.0, 2.0]),
    edges_refit_every=st.sampled_from([0, 3]),
    bins_by=st.sampled_from(["risk", "median"]),
    order=st.sampled_from(["fffs", "fffs", "shortest", "boost", "edf", "flex", "flex", "clockwork"]),
    preemption=st.sampled_from(["on", "on", "off"]),
    preemption_factor=st.sampled_from([1.5, 3.03]),
    patience=st.sampled_from([0.0, 12.0]),
    circuit_faults_max=st.integers(0, 3),
)
SPEED = StepTimes(0.1, (0.01, 0.02, 0.03, 0.04))
ENGINES = st.lists(
    st.builds(
        EngineInfo,
        name=st.just(""),
        slots=st.integers(1, 4),
        barrier=st.booleans(),
        look_ahead=st.integers(0, 2),
        tokens_max=st.sampled_from([None, 60, 400]),
        models=st.sampled_from([(), (), (), ("a",), ("a", "b")]),
        worker=st.sampled_from(["", "", "gpu"]),
        speeds=st.sampled_from([{}, {"": SPEED}]),
    ).map(lambda engine: engine if engine.barrier else msgspec.structs.replace(engine, worker="")),
    min_size=1,
    max_size=3,
)


@st.composite
def plans(draw: st.DrawFn, observed: Observed, batch_size: int) -> DispatchPlan:
    """Any plan that a solver might return, wise or not."""
    bins = len(observed.rates_per_s)
    queues = draw(st.integers(1, bins))
    actions = st.tuples(*[st.integers(0, waiting) for waiting in range(batch_size + 1)])
    tables = [
        DispatchTable(
            actions=draw(actions),
            other=draw(st.just(()) | actions),
            advantage=draw(st.just(()) | st.tuples(*[st.sampled_from([-1.0, 0.0, 2.0])] * batch_size)),
            service_s=tuple([0.5 + 0.25 * size for size in range(batch_size)]),
            late_s=tuple([0.75 + 0.25 * size for size in range(batch_size)]),
            wait_s_max=draw(st.sampled_from([0.0, 0.3, 10.0])),
        )
        for _ in range(queues)
    ]
    return DispatchPlan(
        queue_of=tuple([index * queues // bins for index in range(bins)]),
        tables=tuple(tables),
        share=draw(st.sampled_from([0.0, 0.5])),
        latency_target_s=draw(st.sampled_from([None, 1.0])),
        response_s_mean=draw(st.sampled_from([None, 1.0])),
    )


class Fickle(Trust):
    """Changes its verdict at every third answer, because worlds are too short for the real judge to change."""

    def observe(self, request: Request, score: float, output_tokens: float) -> bool:
        super().observe(request, score, output_tokens)
        self.answers = getattr(self, "answers", 0) + 1
        if self.answers % 3 == 0:
            self.trusted = not self.trusted
        return self.answers % 3 == 0


class World(RuleBasedStateMachine):
    """All that is outside the scheduler."""

    @initialize(config=CONFIGS, engines=ENGINES)
    def begin(self, config: SchedulingConfig, engines: list[EngineInfo]) -> None:
        self.header = Header(config, (10.0, 20.0, 30.0, 40.0))
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(policies, "Trust", Fickle)  # for the replay, too
        self.scheduler = self.header.scheduler()
        self.engines = [msgspec.structs.replace(engine, name=f"e{index}") for index, engine in enumerate(engines)]
        self.up: set[str] = set()
        self.no_requests_until_s: dict[str, float] = {}  # engines whose circuit is open
        self.running: dict[str, dict[int, int]] = {engine.name: {} for engine in self.engines}  # -> id -> batch
        self.outcomes: Counter[int] = Counter()
        self.arrived: dict[int, Request] = {}
        self.gone: set[int] = set()
        self.tries: Counter[int] = Counter()
        self.passable: set[int] = set()  # requests that others were allowed to pass at some time
        self.first_starts: dict[str, list[int]] = {}  # batches by model, in the order of their first starts
        self.began: set[int] = set()  # running requests only
        self.stopping: set[int] = set()  # running requests only
        self.steps: list[Step] = []
        self.asked: dict[str, Observed] = {}  # model -> question of the plan that is being solved
        self.now_s = 0.0
        for engine in self.engines[:2]:  # otherwise most worlds would reject most requests
            self.come_up(engine)

    # ---- events of the world ----

    def tell(self, event: Event) -> None:
        actions = self.scheduler.handle(event, self.now_s)
        self.steps.append(Step(self.now_s, event, tuple(actions)))
        self.passable |= passable(self.scheduler, self.engines)
        for action in actions:
            self.obey(action)

    def obey(self, action: Action) -> None:
        if isinstance(action, StartBatch):
            assert action.engine in self.up, "an engine that is down was given work"
            assert action.batch.requests, "an empty batch was started"
            assert self.now_s >= self.no_requests_until_s.get(action.engine, 0.0), "a failing engine was given work"
            engine = next(engine for engine in self.engines if engine.name == action.engine)
            assert engine.serves(action.batch.model), "an engine was given a model that it does not serve"
            if action.engine in self.no_requests_until_s and not engine.barrier:
                assert len(action.batch.requests) == 1, "more than one request is on trial"
            running = self.running[action.engine]
            for request in action.batch.requests:
                assert self.outcomes[request.id] == 0, "an ended request was started"
                assert not any(request.id in engine_ids for engine_ids in self.running.values()), "a request runs twice"
                assert request.id not in self.gone, "a request whose client has gone was started"
                assert request.deadline_s is None or request.deadline_s > self.now_s, "a late request was started"
                assert request.model == action.batch.model, "a batch is of two models"
                running[request.id] = action.batch.id
                self.tries[request.id] += 1
                self.began.discard(request.id)
                self.stopping.discard(request.id)
            requests_max = engine.slots + (0 if engine.barrier else engine.look_ahead)
            assert len(running) <= requests_max, "an engine was given more requests than it has places"
            firsts = self.first_starts.setdefault(action.batch.model, [])
            passed = any(request.id in self.passable for request in action.batch.requests)
            if action.batch.id not in firsts and not passed:
                firsts.append(action.batch.id)
        elif isinstance(action, FailRequest):
            assert not any(action.request_id in running for running in self.running.values())
            self.outcomes[action.request_id] += 1
        elif isinstance(action, ReportCircuit):
            if action.open_s is None:
                del self.no_requests_until_s[action.engine]
            else:
                self.no_requests_until_s[action.engine] = self.now_s + action.open_s
        elif isinstance(action, ReportTrust):
            assert action.trusted == self.scheduler.queues(action.model).binning.trust.trusted
        elif isinstance(action, SolveDispatch):
            assert action.model not in self.asked, "two plans are requested at once"
            self.asked[action.model] = action.observed
        elif isinstance(action, PreemptBatch):
            ids, running = set(action.request_ids), self.running[action.engine]
            assert ids == {id_ for id_ in running if id_ not in self.gone} != set(), "a batch is stopped in part"
            assert not ids & (self.began | self.stopping), "a request is stopped that has begun or is stopping"
            assert set(running.values()) == {action.batch_id}
            self.stopping |= ids
        else:
            assert isinstance(action, AbortRequest)
            assert action.request_id in self.running[action.engine]

    def come_up(self, engine: EngineInfo) -> None:
        if engine.name not in self.up:  # the engine is back: its earlier failures no longer count
            self.no_requests_until_s.pop(engine.name, None)
        self.up.add(engine.name)
        self.tell(EngineReady(engine))

    @rule(
        tokens=st.sampled_from([None, 5.0, 15.0, 25.0, 99.0]),
        slo_s=st.sampled_from([None, None, 0.0, 1.0]),
        model=st.sampled_from(["a", "a", "b"]),
    )
    def request_arrives(self, tokens: float | None, slo_s: float | None, model: str) -> None:
        quantiles = () if tokens is None or len(self.arrived) % 2 else (tokens / 2, tokens, 3 * tokens)
        request = Request(
            len(self.arrived),
            tokens,
            None if slo_s is None else self.now_s + slo_s,
            quantiles,
            prompt_tokens=float(len(self.arrived) % 3 * 20),
            choices=1 + len(self.arrived) % 2,
            blocks=(1 + len(self.arrived) % 2, 10 + len(self.arrived) % 10),
            block_tokens=float(len(self.arrived) % 3 * 5),
            model=model,
        )
        self.arrived[request.id] = request
        self.tell(RequestArrived(request))

    @rule(count=st.integers(2, 5), slo_s=st.sampled_from([None, 1.0, 9.0]), model=st.sampled_from(["a", "b"]))
    def a_burst_arrives(self, count: int, slo_s: float | None, model: str) -> None:
        for _ in range(count):
            request = Request(len(self.arrived), None, None if slo_s is None else self.now_s + slo_s, model=model)
            self.arrived[request.id] = request
            self.tell(RequestArrived(request))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def a_plan_comes(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.asked)))
        plan = data.draw(plans(self.asked.pop(model), self.header.scheduling.full_batch))
        self.tell(DispatchSolved(plan, model))

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        """The body fires the timer when it is due, though its clock may be late."""
        wake_at_s = self.scheduler.wake_at_s
        self.now_s += seconds
        if wake_at_s is not None and self.now_s >= wake_at_s:
            self.tell(TimerFired())
            after_s = self.scheduler.wake_at_s
            assert after_s is None or after_s > self.now_s, "the timer would fire endlessly"

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data(), outcome=st.sampled_from(["completed", "completed", "failed", "broke off", "retryable"]))
    def a_request_ends(self, data: st.DataObject, outcome: str) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, running in self.running.items() if running)))
        request_id = data.draw(st.sampled_from(sorted(self.running[name])))
        del self.running[name][request_id]
        if outcome == "retryable":
            self.outcomes[request_id] += request_id in self.gone  # its client has left: no retry
            self.tell(RequestEnded(name, request_id, "failed", fault=True, retryable=True))
            return
        self.outcomes[request_id] += 1
        kind = "completed" if outcome == "completed" else "failed"
        fault = outcome == "broke off"
        self.tell(RequestEnded(name, request_id, kind, float(request_id % 50 + 1), fault))  # type: ignore[arg-type]

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data())
    def a_client_sees_its_first_byte(self, data: st.DataObject) -> None:
        running = sorted(request_id for ids in self.running.values() for request_id in ids)
        request_id = data.draw(st.sampled_from(running))
        if request_id not in self.stopping:
            self.began.add(request_id)
            self.tell(AnswerBegan(request_id))

    @precondition(lambda self: self._stopping_on())
    @rule(data=st.data())
    def a_request_makes_room(self, data: st.DataObject) -> None:
        name, request_id = data.draw(st.sampled_from(self._stopping_on()))
        del self.running[name][request_id]
        self.outcomes[request_id] += request_id in self.gone
        self.tries[request_id] -= 1
        self.tell(RequestEnded(name, request_id, "cancelled"))

    def _stopping_on(self) -> list[tuple[str, int]]:
        return [(name, id_) for name, running in self.running.items() for id_ in running if id_ in self.stopping]

    @precondition(lambda self: len(self.arrived))
    @rule(data=st.data(), retryable=st.booleans())
    def a_stale_end_comes_from_an_engine_that_does_not_run_the_request(
        self, data: st.DataObject, retryable: bool
    ) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.arrived)))
        name = data.draw(st.sampled_from([engine.name for engine in self.engines]))
        if request_id not in self.running[name]:
            steps_before = len(self.steps)
            self.tell(RequestEnded(name, request_id, "failed", fault=True, retryable=retryable))
            assert not any(
                isinstance(action, FailRequest) for step in self.steps[steps_before:] for action in step.actions
            )

    @precondition(lambda self: any(engine.barrier and self.running[engine.name] for engine in self.engines))
    @rule(data=st.data())
    def a_batch_ends(self, data: st.DataObject) -> None:
        names = [engine.name for engine in self.engines if engine.barrier and self.running[engine.name]]
        name = data.draw(st.sampled_from(names))
        ended, self.running[name] = self.running[name], {}
        self.outcomes.update(ended.keys())
        self.tell(BatchEnded(name, next(iter(ended.values())), dict.fromkeys(ended, 7.0)))

    @precondition(lambda self: len(self.arrived))
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.arrived)))
        runs = any(request_id in running for running in self.running.values())
        if not runs and not self.outcomes[request_id]:
            self.outcomes[request_id] += 1
        self.gone.add(request_id)
        self.tell(RequestCancelled(request_id))

    @rule(data=st.data())
    def an_engine_comes_up(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        self.come_up(engine)

    @precondition(lambda self: self.up)
    @rule(data=st.data(), slots=st.integers(1, 4))
    def an_engine_turns_out_to_have_other_slots(self, data: st.DataObject, slots: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.up)))
        place = [engine.name for engine in self.engines].index(name)
        self.engines[place] = msgspec.structs.replace(self.engines[place], slots=slots)
        self.tell(EngineReady(self.engines[place]))

    @rule(data=st.data())
    def an_engine_is_expected(self, data: st.DataObject) -> None:
        self.tell(EngineExpected(data.draw(st.sampled_from(self.engines))))

    @precondition(lambda self: self.up)
    @rule(data=st.data(), expected=st.booleans())
    def an_engine_closes_and_finishes_its_requests(self, data: st.DataObject, expected: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.up)))
        self.up.remove(name)
        self.tell(EngineClosed(name, expected))

    @precondition(lambda self: self.up or any(self.running.values()))
    @rule(data=st.data(), expected=st.booleans())
    def an_engine_is_lost(self, data: st.DataObject, expected: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.up | {name for name, running in self.running.items() if running})))
        running, self.running[name] = self.running[name], {}
        answered = tuple(sorted(data.draw(st.sets(st.sampled_from(sorted(running)))) if running else ()))
        self.up.discard(name)
        self.outcomes.update(id_ for id_ in running if id_ in self.gone)
        self.tell(EngineLost(name, answered, expected=expected))

    # ---- invariants ----

    @invariant()
    def every_invariant_of_the_scheduler_holds(self) -> None:
        if hasattr(self, "scheduler"):
            check(self.scheduler)

    @invariant()
    def each_request_is_in_one_place_or_has_one_outcome(self) -> None:
        for request_id in getattr(self, "arrived", ()):
            alive = request_id in self.scheduler.requests
            assert self.outcomes[request_id] == (0 if alive else 1), f"request {request_id}"
            assert self.tries[request_id] <= self.header.scheduling.retries_max + 1

    @invariant()
    def a_barrier_engine_runs_one_batch(self) -> None:
        gpus: dict[str, set[int]] = {}
        for engine in getattr(self, "engines", ()):
            if engine.barrier:
                gpus.setdefault(engine.worker or engine.name, set()).update(self.running[engine.name].values())
        assert all(len(batches) <= 1 for batches in gpus.values())

    @invariant()
    def batches_start_in_the_order_in_which_they_formed(self) -> None:
        """Under fffs, per model. Numbers follow the order of formation; only a batch that came back overtakes, and one
        that passes requests which need more than their fair share of the memory.
        """
        if getattr(self, "header", None) is None or self.header.scheduling.order != "fffs":
            return
        for firsts in getattr(self, "first_starts", {}).values():
            assert firsts == sorted(firsts)

    def teardown(self) -> None:
        """Let everything end: no request may be left, and the journal must replay."""
        if not hasattr(self, "scheduler"):
            return
        try:
            self.end()
        finally:
            self.patch.undo()

    def end(self) -> None:
        for engine in self.engines:
            self.come_up(engine)
        self.tell(DrainRequested())
        while self.scheduler.requests:
            if not any(self.running.values()):  # all requests wait for the end of a circuit's pause
                assert self.scheduler.wake_at_s is not None
                self.now_s = max(self.now_s, self.scheduler.wake_at_s)  # with engine_wait_s = 0 it may have passed
                self.tell(TimerFired())
                continue
            name = next(name for name, running in self.running.items() if running)
            request_id = next(iter(self.running[name]))
            del self.running[name][request_id]
            self.outcomes[request_id] += 1
            self.tell(RequestEnded(name, request_id, "completed", 9.0))
            check(self.scheduler)
        assert all(not engine.total_tokens for engine in self.scheduler.engines.values()), "memory is still reserved"
        assert all(self.outcomes[request_id] == 1 for request_id in self.arrived)
        assert replay(self.header, self.steps) == self.steps


World.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestLaws = World.TestCase
