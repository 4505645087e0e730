"""Engines that refuse requests: the others are tried first, and who refuses draws no traffic."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_engines import engine, placed
from test_orders import one_by_one
from test_scheduler import arrive, new_scheduler, step
from worlds.invariants import check

from llmserve.live.journal import Header, Step, replay
from llmserve.request import Request
from llmserve.scheduling.messages import (
    Action,
    EngineLost,
    EngineReady,
    FailRequest,
    ReportCircuit,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.request_book import REFUSALS_MAX
from llmserve.scheduling.rests import RESTS_S_MAX, Rests
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig

A, B, C = (engine(name, slots=1) for name in "abc")


def refused(name: str, request_id: int, rest_s: float | None = 0.0, *, fault: bool = False) -> RequestEnded:
    return RequestEnded(name, request_id, "failed", fault=fault, retryable=True, refused=True, rest_s=rest_s)


def scheduler_of(*engines: object, **config: object) -> Scheduler:
    return new_scheduler(*engines, batch_size=1, order="fffs", release="greedy", **config)  # type: ignore[arg-type]


# ---- who is asked ----


def test_a_refused_request_runs_on_another_engine() -> None:
    scheduler = scheduler_of(A, B)
    assert placed(arrive(scheduler, 1)) == [(1, "a")]
    assert placed(step(scheduler, refused("a", 1))) == [(1, "b")]


def test_a_refusal_is_passed_on_when_every_engine_has_refused() -> None:
    scheduler = scheduler_of(A, B, C)
    arrive(scheduler, 1)
    assert placed(step(scheduler, refused("a", 1))) == [(1, "b")]
    assert placed(step(scheduler, refused("b", 1))) == [(1, "c")]
    assert step(scheduler, refused("c", 1)) == [FailRequest(1, "refused", None)]


def test_the_refusal_of_the_only_engine_is_passed_on_at_once_and_holds_nobody_back() -> None:
    scheduler = scheduler_of(A)
    arrive(scheduler, 1)
    assert step(scheduler, refused("a", 1, 30.0)) == [FailRequest(1, "refused", None)]
    assert placed(arrive(scheduler, 2, now_s=0.1)) == [(2, "a")]


def test_tries_after_refusals_are_bounded_and_no_retry_is_used_up() -> None:
    engines = [engine(f"e{number}", slots=1) for number in range(REFUSALS_MAX + 4)]
    scheduler = scheduler_of(*engines, retries_max=0)
    actions, asked = arrive(scheduler, 1), []
    while started := placed(actions):
        asked.append(started[0][1])
        actions = step(scheduler, refused(asked[-1], 1))
    assert actions == [FailRequest(1, "refused", None)]
    assert len(asked) == len(set(asked)) == REFUSALS_MAX


def test_an_engine_that_is_broken_or_lost_is_no_other_engine() -> None:
    scheduler = scheduler_of(A, B, circuit_faults_max=1, retries_max=0)
    arrive(scheduler, 1, 2)
    assert ReportCircuit("b", 1.0) in step(scheduler, RequestEnded("b", 2, "failed", fault=True, retryable=True))
    assert step(scheduler, refused("a", 1)) == [FailRequest(1, "refused", None)]
    arrive(scheduler, 3)
    step(scheduler, EngineLost("b"))
    assert step(scheduler, refused("a", 3)) == [FailRequest(3, "refused", None)]


def test_a_request_that_waits_for_the_other_engine_is_asked_again_when_that_one_dies() -> None:
    scheduler = scheduler_of(A, B)
    arrive(scheduler, 1, 2)
    assert placed(step(scheduler, refused("a", 1))) == []
    assert placed(step(scheduler, EngineLost("b"), 1.0)) == [(1, "a")]
    actions = step(scheduler, refused("a", 1), 2.0)
    assert actions[0] == FailRequest(1, "refused", None)
    assert placed(actions) == [(2, "a")]


def test_a_client_that_leaves_is_refused_nothing() -> None:
    scheduler = scheduler_of(A, B)
    arrive(scheduler, 1)
    step(scheduler, RequestCancelled(1))
    assert step(scheduler, refused("a", 1)) == []
    assert not scheduler.requests


# ---- who rests ----


@pytest.mark.parametrize("order", ["fffs", "shortest", "edf", "boost", "flex"])
def test_an_engine_that_refuses_rests_while_another_works(order: str) -> None:
    scheduler = one_by_one(order, A)
    step(scheduler, EngineReady(B))
    arrive(scheduler, 1)
    step(scheduler, refused("a", 1, 5.0))
    assert placed(arrive(scheduler, 2, now_s=1.0)) == [], "b is busy, and a rests"
    assert scheduler.wake_at_s == 5.0
    assert placed(step(scheduler, RequestEnded("b", 1, "completed", 5.0), 2.0)) == [(2, "b")]
    assert placed(arrive(scheduler, 3, now_s=3.0)) == []
    assert placed(step(scheduler, TimerFired(), 5.0)) == [(3, "a")]


def test_rests_of_all_engines_hold_nobody_back() -> None:
    scheduler = scheduler_of(A, B)
    arrive(scheduler, 1)
    step(scheduler, refused("a", 1, 50.0))
    assert step(scheduler, refused("b", 1, 40.0)) == [FailRequest(1, "refused", None)]
    assert placed(arrive(scheduler, 2, now_s=1.0)) == [(2, "a")]


def test_a_rest_is_over_when_the_other_engine_no_longer_works() -> None:
    for gone in (EngineLost("b"), RequestEnded("b", 1, "failed", fault=True)):
        scheduler = scheduler_of(A, B, circuit_faults_max=1)
        arrive(scheduler, 1)
        step(scheduler, refused("a", 1, 50.0))
        assert placed(arrive(scheduler, 2)) == []
        assert [name for _, name in placed(step(scheduler, gone, 1.0))] == ["a"]


def test_a_rest_from_one_model_is_none_from_another() -> None:
    both = ("m", "n")
    scheduler = scheduler_of(engine("a", slots=1, models=both), engine("b", slots=1, models=both))
    step(scheduler, RequestArrived(Request(1, model="m")))
    step(scheduler, refused("a", 1, 50.0))
    assert placed(step(scheduler, RequestArrived(Request(2, model="m")))) == []
    assert placed(step(scheduler, RequestArrived(Request(3, model="n")))) == [(3, "a")]


def test_a_line_of_a_job_does_not_start_where_its_model_rests() -> None:
    scheduler = scheduler_of(A, B)
    arrive(scheduler, 1)
    step(scheduler, refused("a", 1, 5.0))
    assert placed(step(scheduler, RequestArrived(Request(2, background=True, deadline_s=1e6)))) == []
    assert scheduler.wake_at_s is not None
    assert scheduler.wake_at_s <= 5.0
    assert placed(step(scheduler, TimerFired(), 5.0)) == [(2, "a")]


def test_a_refusal_is_neither_a_fault_nor_an_answer_for_the_circuit() -> None:
    scheduler = scheduler_of(A, circuit_faults_max=2, retries_max=0)
    for number in range(3):
        arrive(scheduler, number)
        step(scheduler, refused("a", number))
    assert scheduler.engines["a"].circuit.closed
    arrive(scheduler, 7)
    step(scheduler, RequestEnded("a", 7, "failed", fault=True))
    arrive(scheduler, 8)
    step(scheduler, refused("a", 8))
    arrive(scheduler, 9)
    assert step(scheduler, RequestEnded("a", 9, "failed", fault=True)) == [ReportCircuit("a", 1.0)]


def test_a_server_that_came_back_has_refused_nothing() -> None:
    scheduler = scheduler_of(A, B)
    arrive(scheduler, 1)
    step(scheduler, refused("a", 1, 50.0))
    step(scheduler, EngineLost("a"), 1.0)
    step(scheduler, EngineReady(A), 2.0)
    assert placed(arrive(scheduler, 2, now_s=3.0)) == [(2, "a")]


# ---- how long a rest is ----


def test_rests_double_until_an_answer_and_are_bounded() -> None:
    rests, lengths_s, now_s = Rests(1.0), [], 0.0
    for _ in range(9):
        rests.refused("m", 0.0, now_s, now_s)
        lengths_s.append(rests.until_s("m") - now_s)
        now_s = rests.until_s("m") + 1.0
    assert lengths_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0, 32.0]
    rests.answered("m", now_s)
    rests.refused("m", 0.0, now_s, now_s)
    assert rests.until_s("m") - now_s == 1.0


def test_what_the_engine_asks_for_counts_up_to_a_bound() -> None:
    rests = Rests(1.0)
    rests.refused("m", 7.5, 0.0, 0.0)
    assert rests.until_s("m") == 7.5
    rests.refused("m", 86_400.0, 8.0, 8.0)
    assert rests.until_s("m") == 8.0 + RESTS_S_MAX


def test_requests_sent_before_the_rest_neither_lengthen_nor_end_it() -> None:
    rests = Rests(1.0)
    for at_s in (5.0, 5.1, 5.2):
        rests.refused("m", 0.0, 4.0, at_s)
    rests.answered("m", 4.0)
    assert rests.until_s("m") == 6.0


# ---- laws ----


class World:
    """Engines of which some refuse every request at once, and clients that come at random times."""

    def __init__(self, seed: int, order: str) -> None:
        self.rng = random.Random(seed)
        self.config = SchedulingConfig(order=order, release="greedy", batch_size=1, bins=1).resolved(barrier=False)
        self.scheduler = self.config.scheduler()
        self.steps: list[Step] = []
        self.runs: Counter[str] = Counter()
        self.completed: set[int] = set()
        self.failed: dict[int, str] = {}
        self.due: list[tuple[float, int, RequestEnded]] = []
        names = [f"e{number}" for number in range(self.rng.randint(1, 4))]
        self.refusing = {name for name in names if self.rng.random() < 0.5}
        self.asks = self.rng.choice([0.0, 0.0, 3.0])
        for name in names:
            self.tell(EngineReady(engine(name, slots=self.rng.randint(1, 4))), 0.0)

    @property
    def tries_max(self) -> float:
        """How often an engine that refuses may be tried: once at first, and once after each rest, with all its slots.

        Rests last 3 s where the engine asks for that, else 1, 2, 4, ... 32, 32, ... s.
        """
        lasted_s = self.steps[-1].now_s
        return 2 + lasted_s / self.asks if self.asks else 7 + lasted_s / 32

    def tell(self, event: object, now_s: float) -> None:
        actions = self.scheduler.handle(event, now_s)  # type: ignore[arg-type]
        check(self.scheduler)
        self.steps.append(Step(now_s, event, tuple(actions)))  # type: ignore[arg-type]
        for action in actions:
            self.carry_out(action, now_s)

    def carry_out(self, action: Action, now_s: float) -> None:
        if isinstance(action, StartBatch):
            (request,) = action.batch.requests
            self.runs[action.engine] += 1
            refuses = action.engine in self.refusing
            end = refused(action.engine, request.id, self.asks) if refuses else None
            at_s = now_s + (0.001 if refuses else self.rng.expovariate(2.0))
            done = RequestEnded(action.engine, request.id, "completed", 5.0)
            heapq.heappush(self.due, (at_s, request.id, end or done))
        elif isinstance(action, FailRequest):
            self.failed[action.request_id] = action.reason

    def run(self, requests: int) -> None:
        arrivals = [(self.rng.uniform(0.0, 60.0), number) for number in range(requests)]
        arrivals.sort(reverse=True)
        while arrivals or self.due or self.scheduler.requests:
            times_s = [entry[0] for entry in (*arrivals[-1:], *self.due[:1])]
            wake_at_s = self.scheduler.wake_at_s
            if wake_at_s is not None and wake_at_s <= min(times_s, default=1e9):
                self.tell(TimerFired(), wake_at_s)
                continue
            assert times_s, "requests wait, and nothing will ever happen"
            if arrivals and arrivals[-1][0] == min(times_s):
                at_s, number = arrivals.pop()
                request = Request(number, 5.0, deadline_s=1e9 if self.config.order == "flex" else None)
                self.tell(RequestArrived(request), at_s)
            else:
                at_s, _, event = heapq.heappop(self.due)
                if event.outcome == "completed":
                    self.completed.add(event.request_id)
                self.tell(event, at_s)


@example(seed=685, order="fffs")  # the engine that works is slow, so that the world lasts two minutes
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), order=st.sampled_from(["fffs", "shortest", "boost", "flex"]))
def test_every_request_is_answered_if_one_engine_takes_it_and_refusals_draw_no_traffic(seed: int, order: str) -> None:
    world = World(seed, order)
    world.run(200)
    names = set(world.scheduler.engines)
    if names - world.refusing:
        assert (len(world.completed), world.failed) == (200, {})
        for name in world.refusing:
            assert world.runs[name] <= world.tries_max * world.scheduler.engines[name].info.slots
    else:
        assert set(world.failed.values()) == {"refused"}
        assert sum(world.runs.values()) <= 200 * len(names)
    assert replay(Header(world.config), world.steps) == world.steps
