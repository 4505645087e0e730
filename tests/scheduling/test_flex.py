"""The contract of FLEX: it starts the largest batch that can be in time, and preempts smaller ones for it.

By default an answer has one token, and a batch of b requests takes b seconds.
"""

import math
import random
from collections.abc import Sequence

import pytest
from scheduling.checked_step import step
from worlds.invariants import check

from bins.profile import StepTimes
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.choice.orders import Candidate, Flex, Key, MomentOrder, Order
from llmserve.scheduling.engines import PROVEN_S, EngineState
from llmserve.scheduling.messages import (
    Action,
    AnswerBegan,
    BatchEnded,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    PreemptBatch,
    RequestArrived,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster

SIZES = 128
Starts = list[tuple[str, list[int]]]


@pytest.fixture(autouse=True)
def engines_have_shown_how_fast_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """All speeds count as shown recently, so that there are no trials. Tests of trials undo this patch."""
    monkeypatch.setattr(EngineState, "proven_until_s", lambda self, model: math.inf)


def line(alpha_s: float, beta_s: float = 0.0, sizes: int = SIZES) -> StepTimes:
    """A batch of b answers of one token takes alpha b + beta."""
    return StepTimes(beta_s, tuple([alpha_s * size for size in range(1, sizes + 1)]))


def gpu(name: str = "gpu0", *, speed: StepTimes | None = None, slots: int = SIZES, **values: object) -> EngineInfo:
    fields = {"speeds": {"": line(1.0) if speed is None else speed}, **values}
    return EngineInfo(name, slots, barrier=fields.pop("barrier", True), **fields)  # type: ignore[arg-type]


def new_scheduler(*engines: EngineInfo, lengths: Sequence[float] = (1.0,), **config: object) -> Scheduler:
    values = {"order": "flex", "batch_size": SIZES, **config}
    scheduler = SchedulingConfig(**values).resolved(barrier=True).scheduler(lengths)  # type: ignore[arg-type]
    for engine in engines or (gpu(),):
        step(scheduler, EngineReady(engine))
    return scheduler


def due(request_id: int, deadline_s: float | None = None, model: str = "") -> Request:
    return Request(request_id, deadline_s=deadline_s, model=model)


def arrive(scheduler: Scheduler, *requests: Request, now_s: float = 0.0) -> list[Action]:
    return [action for request in requests for action in step(scheduler, RequestArrived(request), now_s)]


def several(count: int, deadline_s: float | None = None, model: str = "", first: int = 0) -> list[Request]:
    return [due(request_id, deadline_s, model) for request_id in range(first, first + count)]


def ends(scheduler: Scheduler, engine: str, *ids: int, now_s: float) -> list[Action]:
    """The running batch of the engine ends."""
    batch_id = scheduler.engines[engine].running[ids[0]].batch_id
    return step(scheduler, BatchEnded(engine, batch_id, dict.fromkeys(ids, 1.0)), now_s)


def stops(scheduler: Scheduler, engine: str, *ids: int, now_s: float) -> list[Action]:
    """The engine reports these requests as stopped."""
    return [
        action for request_id in ids for action in step(scheduler, RequestEnded(engine, request_id, "cancelled"), now_s)
    ]


def starts(actions: Sequence[Action]) -> Starts:
    return [
        (action.engine, [request.id for request in action.batch.requests])
        for action in actions
        if isinstance(action, StartBatch)
    ]


def preempted(actions: Sequence[Action]) -> list[tuple[str, tuple[int, ...]]]:
    return [(action.engine, action.request_ids) for action in actions if isinstance(action, PreemptBatch)]


def failed(actions: Sequence[Action]) -> list[tuple[int, str]]:
    return [(action.request_id, action.reason) for action in actions if isinstance(action, FailRequest)]


# ---- which batch ----


def test_a_free_engine_gets_the_largest_batch_of_all_models() -> None:
    scheduler = new_scheduler(preemption="off")
    assert starts(arrive(scheduler, due(0, 9.0))) == [("gpu0", [0])]
    arrive(scheduler, *several(2, 9.0, "a", first=1), *several(3, 9.0, "b", first=3))
    assert starts(ends(scheduler, "gpu0", 0, now_s=1.0)) == [("gpu0", [3, 4, 5])]
    assert starts(ends(scheduler, "gpu0", 3, 4, 5, now_s=4.0)) == [("gpu0", [1, 2])]


def test_a_request_that_would_shrink_the_batch_waits_and_fails_when_it_is_late() -> None:
    scheduler = new_scheduler(preemption="off")
    arrive(scheduler, due(0))
    arrive(scheduler, due(1, 2.5), *several(3, 4.0, first=2))
    assert starts(ends(scheduler, "gpu0", 0, now_s=1.0)) == [("gpu0", [2, 3, 4])]
    assert scheduler.wake_at_s == pytest.approx(1.5, abs=1e-5)
    assert failed(step(scheduler, TimerFired(), 1.51)) == [(1, "deadline_exceeded")]


def test_of_equally_large_batches_the_fastest_goes_first_then_the_most_urgent() -> None:
    scheduler = new_scheduler(gpu(speeds={"slow": line(2.0), "": line(1.0)}), preemption="off")
    arrive(scheduler, due(0))
    arrive(scheduler, due(1, 50.0, "slow"), due(2, 60.0, "late"), due(3, 55.0, "soon"))
    assert starts(ends(scheduler, "gpu0", 0, now_s=1.0)) == [("gpu0", [3])]
    assert starts(ends(scheduler, "gpu0", 3, now_s=2.0)) == [("gpu0", [2])]
    assert starts(ends(scheduler, "gpu0", 2, now_s=3.0)) == [("gpu0", [1])]


def test_a_request_that_cannot_be_in_time_even_alone_fails_as_it_arrives() -> None:
    scheduler = new_scheduler()
    assert failed(arrive(scheduler, due(0, 0.9))) == [(0, "deadline_exceeded")]
    assert starts(arrive(scheduler, due(1, 1.0))) == [("gpu0", [1])]


def test_the_fastest_engine_decides_which_requests_cannot_be_in_time() -> None:
    scheduler = new_scheduler(gpu("fast", speed=line(0.5)), gpu("slow"))
    arrive(scheduler, due(0))
    assert starts(arrive(scheduler, due(1, 0.9))) == []  # only the slow engine is free
    assert starts(ends(scheduler, "fast", 0, now_s=0.25)) == [("fast", [1])]


def test_without_declared_speeds_all_requests_go_together_until_their_deadlines() -> None:
    scheduler = new_scheduler(gpu(speeds={}), preemption="off")
    arrive(scheduler, due(0), due(1, 1.0), due(2, 2.0), due(3))
    assert failed(step(scheduler, TimerFired(), 1.0)) == [(1, "deadline_exceeded")]
    assert starts(ends(scheduler, "gpu0", 0, now_s=1.5)) == [("gpu0", [2, 3])]


def test_a_request_that_may_be_in_time_with_luck_runs_if_no_better_batch_exists() -> None:
    """Answers take 1 s or 9 s, 5 s on average. With 2 s left a request with a short answer is in time."""
    scheduler = new_scheduler(lengths=[1.0, 9.0], preemption="off")
    assert starts(arrive(scheduler, due(0, 2.0))) == [("gpu0", [0])]
    arrive(scheduler, due(1, 12.0), due(2, 40.0))
    assert starts(ends(scheduler, "gpu0", 0, now_s=10.0)) == [("gpu0", [2])]


def test_refill_slots_take_requests_in_time_and_preempt_nothing() -> None:
    scheduler = new_scheduler(gpu(slots=2, speed=line(1.0, sizes=2), barrier=False))
    assert starts(arrive(scheduler, due(0, 99.0))) == [("gpu0", [0])]
    assert starts(arrive(scheduler, due(1, 99.0))) == [("gpu0", [1])]
    assert arrive(scheduler, *several(9, 99.0, first=2)) == []
    actions = step(scheduler, RequestEnded("gpu0", 0, "completed", 1.0), 2.0)
    assert starts(actions) == [("gpu0", [2])]


def refilling(*deadlines_s: tuple[float, float]) -> Scheduler:
    """One slot, at a second a token, that is taken; requests 1, 2, ... of (predicted tokens, deadline) wait."""
    scheduler = new_scheduler(
        gpu(slots=1, speed=line(1.0, sizes=1), barrier=False), lengths=[2.0] * 20 + [10.0] * 20, bins=2
    )
    arrive(scheduler, Request(0, 2.0, 99.0))
    arrive(scheduler, *[Request(number, *each) for number, each in enumerate(deadlines_s, 1)])
    return scheduler


def test_a_free_slot_takes_the_most_urgent_request_while_shorter_ones_can_wait() -> None:
    """The short answer has 97 s to wait, the long one 3 s."""
    scheduler = refilling((2.0, 101.0), (10.0, 15.0))
    assert starts(step(scheduler, RequestEnded("gpu0", 0, "completed", 2.0), 2.0)) == [("gpu0", [2])]


def test_a_free_slot_takes_a_short_request_while_more_wait_than_can_be_in_time() -> None:
    """Nine short answers take 18 s; the first of them is due in 10 s."""
    scheduler = refilling(*[(2.0, 12.0)] * 9, (10.0, 14.0))
    assert starts(step(scheduler, RequestEnded("gpu0", 0, "completed", 2.0), 2.0)) == [("gpu0", [1])]


# ---- patience ----


def test_a_request_without_a_deadline_waits_at_most_a_minute_for_other_requests() -> None:
    scheduler = new_scheduler(gpu(speed=line(0.0, beta_s=1.0)), preemption="off")
    arrive(scheduler, due(0, model="busy"))
    arrive(scheduler, due(1, model="undated"))
    served_s = None
    running, fresh = [0], 2
    for second in range(1, 70):
        arrive(scheduler, *several(2, second + 50.0, "dated", first=fresh), now_s=float(second))
        fresh += 2
        ((_, ids),) = starts(ends(scheduler, "gpu0", *running, now_s=float(second)))
        running = ids
        if 1 in ids:
            served_s = second
            break
    assert served_s == 60


def test_after_a_minute_requests_go_in_order_of_arrival_whatever_their_model() -> None:
    """Otherwise a steady stream of one model's undated requests would starve the other model's."""
    scheduler = new_scheduler(gpu(slots=1), preemption="off")
    arrive(scheduler, due(0, model="a"))
    arrive(scheduler, due(1, model="b"), now_s=0.5)
    arrive(scheduler, *several(3, model="a", first=2), now_s=1.0)
    assert starts(ends(scheduler, "gpu0", 0, now_s=70.0)) == [("gpu0", [1])]
    assert starts(ends(scheduler, "gpu0", 1, now_s=71.0)) == [("gpu0", [2])]


def test_a_request_that_has_waited_a_minute_is_not_preempted() -> None:
    """Otherwise each burst would stop the request again, endlessly."""
    scheduler = new_scheduler(preemption_factor=2.0)
    arrive(scheduler, due(0, model="busy"))
    step(scheduler, AnswerBegan(0))
    arrive(scheduler, due(1, model="undated"))
    assert starts(ends(scheduler, "gpu0", 0, now_s=60.0)) == [("gpu0", [1])]
    assert preempted(arrive(scheduler, *several(9, 99.0, "dated", first=2), now_s=60.5)) == []


# ---- how fast engines really are ----


def test_an_engine_half_as_fast_as_declared_gets_smaller_batches() -> None:
    scheduler = new_scheduler(preemption="off")
    arrive(scheduler, due(0))
    now_s, running = 0.0, [0]
    for request_id in range(1, 200):
        arrive(scheduler, due(request_id), now_s=now_s)
        now_s += 2.0
        ((_, running),) = starts(ends(scheduler, "gpu0", *running, now_s=now_s))
    arrive(scheduler, *several(20, now_s + 2.0 + 10.1, first=1_000), now_s=now_s)
    ((_, ids),) = starts(ends(scheduler, "gpu0", *running, now_s=now_s + 2.0))
    assert len(ids) == 5


def test_single_ends_of_a_batch_show_that_an_engine_is_as_fast_as_declared() -> None:
    """As for engines over HTTP: all answers of a batch come at its end, each in its own message."""
    scheduler = new_scheduler(preemption="off")
    arrive(scheduler, due(0))
    arrive(scheduler, *several(4, first=1))
    assert starts(ends(scheduler, "gpu0", 0, now_s=1.0)) == [("gpu0", [1, 2, 3, 4])]
    for request_id in range(1, 5):
        step(scheduler, RequestEnded("gpu0", request_id, "completed", 1.0), 5.0)
    assert scheduler.engines["gpu0"].pace("") == pytest.approx(1.0)


def test_an_engine_without_recent_answers_is_tried_with_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The declared time of a request is 2 s, the true one 1 s: only a trial can show that."""
    monkeypatch.undo()
    scheduler = new_scheduler(gpu(speed=line(2.0)), preemption="off")
    assert starts(arrive(scheduler, due(0, 1.5))) == [("gpu0", [0])]
    assert arrive(scheduler, due(1, 2.5), due(2, 2.5)) == []
    assert starts(ends(scheduler, "gpu0", 0, now_s=1.0)) == [("gpu0", [1])]
    assert scheduler.engines["gpu0"].pace("") == pytest.approx(0.5)


def test_a_shown_speed_is_believed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    scheduler = new_scheduler(preemption="off")
    arrive(scheduler, due(0))
    ends(scheduler, "gpu0", 0, now_s=1.0)
    assert failed(arrive(scheduler, due(1, 1.0 + PROVEN_S + 0.4), now_s=PROVEN_S + 0.5)) == [(1, "deadline_exceeded")]
    assert starts(arrive(scheduler, due(2, 1.0 + PROVEN_S + 0.4), now_s=PROVEN_S + 1.0)) == [("gpu0", [2])]


def test_a_trial_preempts_and_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    scheduler = new_scheduler(gpu(slots=4, speed=line(1.0, sizes=4), barrier=False))
    assert starts(arrive(scheduler, due(0, 0.5))) == [("gpu0", [0])]
    assert arrive(scheduler, due(1, 0.6)) == []


# ---- failing engines ----


def test_an_engine_on_trial_gets_one_request() -> None:
    scheduler = new_scheduler(gpu(barrier=False), circuit_faults_max=1, circuit_pause_s=1.0)
    arrive(scheduler, due(0))
    step(scheduler, RequestEnded("gpu0", 0, "failed", fault=True), 0.0)
    arrive(scheduler, *several(3, first=1))
    assert starts(step(scheduler, TimerFired(), 1.0)) == [("gpu0", [1])]


def test_a_batch_that_must_avoid_an_engine_does_not_block_it_for_others() -> None:
    """gpu0 failed 0. Requests of the lost gpu1 may run on gpu0, but wait behind 0, which needs another engine."""
    scheduler = new_scheduler(gpu("gpu0"), gpu("gpu1"), gpu("gpu2"), preemption="off")
    arrive(scheduler, due(0), due(1), due(2))
    for name in ("gpu0", "gpu1", "gpu2"):
        assert list(scheduler.engines[name].running) == [int(name[-1])]
    assert starts(step(scheduler, RequestEnded("gpu0", 0, "failed", fault=True, retryable=True), 0.1)) == []
    assert starts(step(scheduler, EngineLost("gpu1"), 0.2)) == [("gpu0", [1])]


def test_requests_that_run_again_are_not_started_late() -> None:
    """Two requests of a lost engine could each be in time alone, but not together."""
    speeds = {"slow": line(2.9), "": line(1.0)}
    scheduler = new_scheduler(gpu("gpu0"), gpu("gpu1", speeds=speeds), preemption="off")
    arrive(scheduler, due(90), due(91, model="slow"))
    arrive(scheduler, *several(2, 4.5))
    assert starts(ends(scheduler, "gpu0", 90, now_s=1.0)) == [("gpu0", [0, 1])]
    step(scheduler, EngineLost("gpu0"), 2.9)
    ((_, ids),) = starts(ends(scheduler, "gpu1", 91, now_s=2.9))
    assert len(ids) == 1


def test_no_request_waits_past_its_deadline_however_short_its_answer_is_predicted_to_be() -> None:
    scheduler = new_scheduler(preemption="off")
    arrive(scheduler, due(0))
    step(scheduler, RequestArrived(Request(1, 1e-9, 1.5)), 0.0)
    assert scheduler.wake_at_s is not None
    assert scheduler.wake_at_s <= 1.5


class Patient(MomentOrder):
    """Starts nothing before a time, and sets a timer for it."""

    def key(self, candidate: Candidate, now_s: float) -> Key | None:
        return () if now_s >= 1.0 else None

    def wake_at_s(self, engine: str, now_s: float) -> float | None:
        return 1.0 if now_s < 1.0 else None


def test_an_order_sets_no_timer_for_an_engine_that_is_busy_again() -> None:
    """Otherwise the timer would fire endlessly."""
    config = SchedulingConfig(order="flex").resolved(barrier=True)
    scheduler = config.scheduler((1.0,), order=Patient())
    step(scheduler, EngineReady(gpu()))
    arrive(scheduler, due(0, 99.0))
    assert scheduler.wake_at_s == 1.0
    step(scheduler, EngineClosed("gpu0"), 0.5)
    step(scheduler, TimerFired(), 1.0)
    assert scheduler.wake_at_s is not None
    assert scheduler.wake_at_s > 1.0


# ---- whole runs ----

A, B = line(0.22e-3, 3.74e-3), line(4.37e-3, 74.20e-3)  # ResNet18 and ResNeSt269, Table 4


@pytest.mark.parametrize(("preemption", "in_time"), [("on", 358), ("off", 58)])
def test_an_isolated_burst_is_in_time_6_2_times_as_often_with_preemption(preemption: str, in_time: int) -> None:
    """Section 7.2: 1,024 requests of A arrive while one of B runs; all are due within 90 ms."""
    singles = [(number / 1e3, due(number, number / 1e3 + 0.09, "B")) for number in range(80)]
    burst = [(5e-3, due(80 + number, 95e-3, "A")) for number in range(1_024)]
    arrivals = sorted([*singles, *burst], key=lambda pair: pair[0])
    done = run([gpu(speeds={"A": A, "B": B})], arrivals, preemption=preemption)
    assert sum(met for _, met in done) == in_time


class Gpu:
    """Serves several models, a batch at a time, at their declared speeds, in answers of one token."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.next_end_s: float | None = None
        self._batch_id = 0
        self._running: dict[int, float] = {}  # output tokens by request id

    def start(self, batch: Batch, now_s: float) -> None:
        assert not self._running, f"{self.info.name} was sent two batches"
        self._batch_id, self._running = batch.id, {request.id: 1.0 for request in batch.requests}
        speed = self.info.speeds.get(batch.model) or self.info.speeds[""]
        self.next_end_s = now_s + speed.prefill_s + speed.step_s[len(self._running) - 1]

    def abort(self, request_id: int, now_s: float) -> None:
        self._running.pop(request_id, None)
        if not self._running:
            self.next_end_s = None

    def end(self, now_s: float) -> Event:
        ended, self._running, self.next_end_s = self._running, {}, None
        return BatchEnded(self.info.name, self._batch_id, ended)


def run(
    engines: Sequence[EngineInfo],
    arrivals: Sequence[tuple[float, Request]],
    *,
    order: Order | None = None,
    **config: object,
) -> list[tuple[int, bool]]:
    """(request id, in time) of all answered requests; asserts that no batch starts too late."""
    values = {"order": "flex", "batch_size": SIZES, **config}
    scheduler = SchedulingConfig(**values).resolved(barrier=True).scheduler((1.0,), order=order)  # type: ignore[arg-type]
    speeds = {engine.name: engine.speeds for engine in engines}
    deadlines_s = {request.id: request.deadline_s for _, request in arrivals}
    done: list[tuple[int, bool]] = []

    def listen(now_s: float, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartBatch):
                speed, size = speeds[action.engine][action.batch.model], len(action.batch.requests)
                ends_s = now_s + speed.prefill_s + speed.step_s[size - 1]
                for request in action.batch.requests:
                    assert request.deadline_s is None or ends_s <= request.deadline_s + 1e-9
        if isinstance(event, BatchEnded):
            for request_id in event.output_tokens:
                deadline_s = deadlines_s[request_id]
                done.append((request_id, deadline_s is None or now_s <= deadline_s + 1e-9))
        check(scheduler)

    cluster = SimulatedCluster(scheduler, [Gpu(engine) for engine in engines], on_step=listen)
    cluster.run(iter(arrivals))
    return done


@pytest.mark.parametrize("seed", range(12))
def test_no_batch_is_started_of_which_a_request_is_certain_to_be_late(seed: int) -> None:
    """All answers are in time, too: random bursts of three models on two overloaded GPUs."""
    rng = random.Random(seed)
    speeds = {model: line(rng.uniform(0.1, 2.0), rng.uniform(0.0, 3.0)) for model in "abc"}
    slots, now_s, arrivals = rng.choice([4, 16, SIZES]), 0.0, []
    for _ in range(60):
        now_s += rng.expovariate(0.5)
        model, slo_s = rng.choice("abc"), rng.uniform(1.0, 40.0)
        for _ in range(rng.choice([1, 1, 2, 20])):
            deadline_s = None if rng.random() < 0.05 else now_s + slo_s * rng.choice([1.0, 1.0, 0.5])
            arrivals.append((now_s, due(len(arrivals), deadline_s, model)))
    for preemption in ("on", "off"):
        engines = [gpu(name, slots=slots, speeds=speeds) for name in ("gpu0", "gpu1")]
        done = run(engines, arrivals, preemption=preemption)
        assert all(met for _, met in done)
        assert len({request_id for request_id, _ in done}) == len(done) > len(arrivals) / 20
        undated = {request.id for _, request in arrivals if request.deadline_s is None}
        assert undated <= {request_id for request_id, _ in done}


class Greedy(Flex):
    """Composes batches of all waiting requests, in time or not."""

    def compose(self, candidate: Candidate, now_s: float) -> bool:
        candidate.place, candidate.count = 0, min(candidate.most, len(candidate.queue))
        return True


def test_batches_of_all_waiting_requests_contain_late_ones() -> None:
    """Shows that the law above can fail."""
    burst = [(0.0, due(number, 3.0)) for number in range(6)]
    with pytest.raises(AssertionError):
        run([gpu(speeds={"": line(1.0)})], [(0.0, due(99)), *burst], order=Greedy(None))
