"""The laws of serving groups, under arbitrary plans and interleavings of events."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_groups import LEFT
from worlds.invariants import check

from bins.profile import StepTimes
from llmserve.live.journal import Header, Step, replay
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.layout import FALLBACK
from llmserve.scheduling.messages import (
    AbortRequest,
    AnswerBegan,
    DrainRequested,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    PlanChanged,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    ServingGroup,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.rates import Replan
from llmserve.settings.policies import SchedulingConfig

POLICIES = [
    ("fffs", "greedy"),
    ("edf", "full"),
    ("fffs", "timeout"),
    ("edf", "window"),
    ("flex", "window"),
    ("flex", "timeout"),
    ("clockwork", "full"),
]
WORKERS = ("w0", "w1", "w2")
MODELS = ("m", "n", "k")
STREAMS = ("", "chat")


@st.composite
def plans(draw: st.DrawFn) -> tuple[ServingGroup, ...]:
    """Any plan, wise or not: up to three groups, some of unknown workers or without models."""
    names = draw(st.lists(st.sampled_from(["g0", "g1", "g2", FALLBACK]), unique=True, max_size=3))
    if not names:
        return ()
    of = st.sampled_from([*names, None])
    workers = {worker: draw(of) for worker in (*WORKERS, "unknown")}
    models = {model: draw(of) for model in MODELS}
    pairs = {(stream, model): draw(of) for stream in STREAMS[1:] for model in MODELS}
    return tuple(
        ServingGroup(
            name,
            tuple([worker for worker, owner in workers.items() if owner == name]),
            tuple([model for model, owner in models.items() if owner == name]),
            tuple([pair for pair, owner in pairs.items() if owner == name]),
        )
        for name in names
    )


class AnyPlans(RuleBasedStateMachine):
    """The outside world: which requests each engine runs, and which have ended, by the scheduler's messages."""

    @initialize(
        plan=plans(),
        engines=st.lists(
            st.builds(
                EngineInfo,
                name=st.just(""),
                slots=st.integers(1, 3),
                barrier=st.just(False),
                look_ahead=st.integers(0, 1),
                models=st.sampled_from([(), ("m",), ("n",), ("m", "n"), ("k",)]),
                worker=st.sampled_from(["", "w0", "w1"]),
                speeds=st.sampled_from([{}, {"": StepTimes(0.1, (0.01, 0.02, 0.03))}]),
            ),
            min_size=1,
            max_size=4,
        ),
        config=st.builds(
            SchedulingConfig,
            bins=st.integers(1, 2),
            batch_size=st.integers(1, 3),
            queue_requests_max=st.sampled_from([4, 1_000]),
            retries_max=st.integers(0, 2),
            engine_wait_s=st.sampled_from([0.0, 2.0]),
            circuit_faults_max=st.integers(0, 2),
            preemption_factor=st.just(1.5),
        ),
        policy=st.sampled_from(POLICIES),
        barrier=st.booleans(),
    )
    def begin(
        self,
        plan: tuple[ServingGroup, ...],
        engines: list[EngineInfo],
        config: SchedulingConfig,
        policy: tuple[str, str],
        barrier: bool,
    ) -> None:
        config = msgspec.structs.replace(config, order=policy[0], release=policy[1])
        self.header = Header(config, groups=plan or (LEFT,), replan=Replan(1.0))
        scheduler = self.header.scheduler()
        self.scheduler = scheduler
        self.now_s = 0.0
        self.steps: list[Step] = []
        self.alive: dict[int, str | None] = {}  # request -> engine that runs it; None: waiting
        self.began: set[int] = set()
        self.arrived: dict[int, float] = {}
        self.count = 0
        self.up: set[str] = set()
        self.engines = {
            f"e{index}": msgspec.structs.replace(info, name=f"e{index}", barrier=barrier)
            for index, info in enumerate(engines)
        }
        for name in self.engines:
            self.come_up(name)

    # ---- the world's record ----

    def tell(self, event: Event) -> None:
        actions = self.scheduler.handle(event, self.now_s)
        self.steps.append(Step(self.now_s, event, tuple(actions)))
        for action in actions:
            if isinstance(action, StartBatch):
                assert action.engine in self.up, "work starts on an engine that is not up"
                for request in action.batch.requests:
                    assert self.alive[request.id] is None, f"{request.id} is started twice, or after its end"
                    assert self.engines[action.engine].serves(request.model)
                    self.alive[request.id] = action.engine
            elif isinstance(action, FailRequest):
                assert self.alive.pop(action.request_id) is None, f"{action.request_id} fails while it runs"
            elif isinstance(action, PreemptBatch | AbortRequest):
                ids = action.request_ids if isinstance(action, PreemptBatch) else (action.request_id,)
                assert all(self.alive[id_] == action.engine for id_ in ids)

    def come_up(self, name: str) -> None:
        self.up.add(name)
        self.tell(EngineReady(self.engines[name]))

    @rule(model=st.sampled_from(MODELS), stream=st.sampled_from(STREAMS), slo_s=st.sampled_from([None, 0.5, 5.0]))
    def a_request_arrives(self, model: str, stream: str, slo_s: float | None) -> None:
        self.count += 1
        self.alive[self.count] = None
        self.arrived[self.count] = self.now_s
        deadline_s = None if slo_s is None else self.now_s + slo_s
        self.tell(RequestArrived(Request(self.count, 5.0, deadline_s, model=model, stream=stream)))

    @rule(plan=plans())
    def the_plan_changes(self, plan: tuple[ServingGroup, ...]) -> None:
        self.tell(PlanChanged(plan))

    @precondition(lambda self: any(self.running()))
    @rule(
        data=st.data(),
        how=st.sampled_from(["completed", "completed", "completed", "failed", "fault", "fault", "cancelled"]),
    )
    def a_request_ends(self, data: st.DataObject, how: str) -> None:
        request_id = data.draw(st.sampled_from(self.running()))
        engine_name = self.alive[request_id]
        queued = self.scheduler.requests[request_id]
        assert queued.run is not None
        retryable = request_id not in self.began
        waits_again = (how == "fault" and retryable) or (how == "cancelled" and queued.run.stopping)
        if waits_again and not queued.cancelled:
            self.alive[request_id] = None
        else:
            del self.alive[request_id]
        outcome = "failed" if how == "fault" else how
        event = RequestEnded(engine_name or "", request_id, outcome, 5.0, how == "fault", retryable)  # type: ignore[arg-type]
        self.tell(event)

    @precondition(lambda self: any(self.running()))
    @rule(data=st.data())
    def a_first_byte_is_sent(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.running()))
        self.began.add(request_id)
        self.tell(AnswerBegan(request_id))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.alive)))
        if self.alive[request_id] is None:
            del self.alive[request_id]
        self.tell(RequestCancelled(request_id))

    @rule(data=st.data())
    def an_engine_closes(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        self.up.discard(name)
        self.tell(EngineClosed(name))

    @rule(data=st.data())
    def an_engine_dies(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        self.up.discard(name)
        answered = []
        for request_id in [id_ for id_, engine_name in self.alive.items() if engine_name == name]:
            self.alive[request_id] = None
            if request_id in self.began:
                answered.append(request_id)
            if self.scheduler.requests[request_id].cancelled:
                del self.alive[request_id]
        self.tell(EngineLost(name, tuple(answered)))

    @rule(data=st.data())
    def an_engine_comes_up(self, data: st.DataObject) -> None:
        self.come_up(data.draw(st.sampled_from(sorted(self.engines))))

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while (wake_at_s := self.scheduler.wake_at_s) is not None and wake_at_s <= until_s:
            self.now_s = max(self.now_s, wake_at_s)
            self.tell(TimerFired())
        self.now_s = until_s

    def running(self) -> list[int]:
        return sorted(id_ for id_, engine_name in self.alive.items() if engine_name is not None)

    # ---- laws ----

    @invariant()
    def each_request_is_where_the_world_records_it(self) -> None:
        check(self.scheduler)
        assert set(self.scheduler.requests) == set(self.alive), "a request was lost, or ended twice"
        for request_id, engine_name in self.alive.items():
            queued = self.scheduler.requests[request_id]
            runs_on = None if queued.run is None else queued.run.engine
            assert runs_on == engine_name, f"{request_id} runs on {engine_name}, by its own record on {runs_on}"
            assert queued.arrived_at_s == self.arrived[request_id]

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for name in self.engines:
            self.come_up(name)
        self.tell(DrainRequested())
        for _ in range(10 * self.count):
            self.time_passes(100.0)
            for request_id in self.running():
                self.tell(RequestEnded(self.alive.pop(request_id) or "", request_id, "completed", 5.0))
        assert all(not self.served(self.scheduler.requests[id_].request.model) for id_ in self.alive), (
            "requests are stuck"
        )
        assert replay(self.header, self.steps) == self.steps

    def served(self, model: str) -> bool:
        return any(info.serves(model) for info in self.engines.values())


TestAnyPlans = AnyPlans.TestCase
TestAnyPlans.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
