"""When a new plan is asked for, and what it is made for: events in, SolveDispatch out."""

from __future__ import annotations

import math

import pytest
from test_releases import NEVER, plan, table
from test_scheduler import step

from bins.dispatch import DispatchPlan, Observed
from llmserve.policies import SchedulingConfig
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.lengths import LEVELS
from llmserve.scheduling.messages import (
    Action,
    DispatchSolved,
    EngineClosed,
    EngineLost,
    EngineReady,
    RequestArrived,
    RequestEnded,
    SolveDispatch,
    TimerFired,
)
from llmserve.scheduling.planner import ANSWERS_BETWEEN, ARRIVALS_LEAST, RATE_GRID
from llmserve.scheduling.scheduler import Scheduler

GPU0, GPU1 = EngineInfo("gpu0", slots=8, barrier=False), EngineInfo("gpu1", slots=8, barrier=False)
BINS, BATCH = 2, 4


def fresh(bins: int = BINS, **config: object) -> Scheduler:
    """No engine is up yet; edges at 10, 20, ... tokens."""
    edges = tuple([10.0 * index for index in range(1, bins)])
    values: dict[str, object] = {"bins": bins, "edges": edges, "batch_size": BATCH, "release": "table", **config}
    return SchedulingConfig(**values, edges_refit_every=0, queue_requests_max=10**6, order="fffs").scheduler()  # type: ignore[arg-type]


def wait_on(bins: int = BINS, queues: int = 1, response_s_mean: float | None = 1.0) -> DispatchPlan:
    """A plan in which only full batches go."""
    return plan(*[table(NEVER)] * queues, bins=bins, response_s_mean=response_s_mean)  # type: ignore[arg-type]


class Body:
    """Brings a scheduler arrivals, answers each question with the same plan at once, and remembers the questions."""

    def __init__(self, scheduler: Scheduler, answer: DispatchPlan | None) -> None:
        self.scheduler, self.answer = scheduler, answer
        self.questions: list[Observed] = []
        self.now_s, self.ids = 0.0, 0
        self.tell(EngineReady(GPU0))

    def tell(self, event: object) -> None:
        self.listen(step(self.scheduler, event, self.now_s))  # type: ignore[arg-type]

    def listen(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SolveDispatch):
                self.questions.append(action.observed)
                if self.answer is not None:
                    self.tell(DispatchSolved(self.answer))

    def arrivals(self, count: int, gap_s: float, tokens: tuple[float, ...] = (5.0,), *, longer: float = 0.0) -> None:
        """As many, so far apart, of these predicted lengths in turn. longer: how many times as long answers are; 0:
        they tell nothing. Whatever starts ends at once.
        """
        for _ in range(count):
            self.now_s += gap_s
            self.tell(RequestArrived(Request(self.ids, tokens[self.ids % len(tokens)])))
            self.ids += 1
            for request_id, run in list(self.scheduler.engines["gpu0"].running.items()):
                answer = longer * (run.queued.request.predicted_tokens or 0.0)
                self.tell(RequestEnded("gpu0", request_id, "completed", answer))

    def new(self) -> list[Observed]:
        """Questions since this was last asked."""
        questions, self.questions = self.questions, []
        return questions


def total(observed: Observed) -> float:
    return sum(observed.rates_per_s)


# ---- the first plan ----


def test_the_first_engine_is_reason_to_ask_once_and_nothing_is_known_yet() -> None:
    scheduler = fresh()
    assert scheduler.handle(TimerFired(), 0.0) == []
    (action,) = scheduler.handle(EngineReady(GPU0), 1.0)
    assert isinstance(action, SolveDispatch)
    observed = action.observed
    assert (observed.rates_per_s, observed.engines, observed.queues) == ((0.0, 0.0), 1, 0)
    assert len(observed.lengths) == BINS
    assert scheduler.handle(TimerFired(), 2.0) == []


def test_a_release_that_follows_no_plan_asks_for_none() -> None:
    scheduler = fresh(release="greedy")
    assert scheduler.handle(EngineReady(GPU0), 0.0) == []


def test_a_rate_is_told_when_a_few_have_come_and_then_no_more_while_it_stays() -> None:
    body = Body(fresh(), wait_on())
    body.new()
    body.arrivals(ARRIVALS_LEAST - 1, 0.1)
    assert body.new() == []
    body.arrivals(1, 0.1)
    (observed,) = body.new()
    assert total(observed) == pytest.approx(10.0, rel=0.03)
    body.arrivals(300, 0.1)
    assert body.new() == []


# ---- the rate ----


def test_a_plan_is_asked_for_again_when_the_rate_has_moved_by_more_than_the_factor() -> None:
    body = Body(fresh(rate_factor=1.25), wait_on())
    body.arrivals(200, 0.1)
    body.new()
    body.arrivals(600, 0.1 / 1.15)
    assert body.new() == [], "15 % more are no reason"
    body.arrivals(600, 0.1 / 1.5)
    questions = body.new()
    assert questions
    assert 15.0 / 1.25 < total(questions[-1]) < 15.0 * 1.25
    body.arrivals(900, 0.1)
    questions = body.new()
    assert questions, "nor is less than before the same"
    assert 10.0 / 1.25 < total(questions[-1]) < 10.0 * 1.25


def test_a_larger_factor_asks_less_often() -> None:
    def questions(rate_factor: float) -> int:
        body = Body(fresh(rate_factor=rate_factor), wait_on())
        for speed in range(1, 21):
            body.arrivals(150, 0.5 / speed)
        return len(body.questions)

    assert questions(3.0) < questions(1.5) < questions(1.1)


@pytest.mark.parametrize("factor", [10.0, 0.03])
def test_a_jump_is_reason_to_ask_within_twenty_arrivals_and_all_numbers_of_queues_are_open_then(factor: float) -> None:
    """However large the factor is by which a rate may move of itself."""
    body = Body(fresh(bins=4, rate_factor=1e6), wait_on(bins=4, queues=2))
    body.arrivals(200, 0.1)
    body.new()
    body.arrivals(20, 0.1 / factor)
    (observed,) = body.new()
    assert observed.queues == 0
    assert abs(math.log(total(observed) / 10.0)) > 1.0
    body.tell(EngineReady(GPU1))
    (observed,) = body.new()
    assert observed.queues == 2, "a jump is told once"
    assert total(observed) == pytest.approx(10.0 * factor, rel=0.5)


def test_rates_are_told_on_a_grid_so_that_the_same_load_is_the_same_question() -> None:
    for gap_s in (0.1, 0.1 * 1.01, 0.1 / 1.01):
        body = Body(fresh(), wait_on())
        body.arrivals(60, gap_s, tokens=(5.0, 15.0))
        (_, observed) = body.questions
        steps = math.log(total(observed), RATE_GRID)
        assert steps == pytest.approx(round(steps), abs=1e-9)
        assert total(observed) == pytest.approx(RATE_GRID**47)  # 9.9


@pytest.mark.parametrize("bins", [1, 3, 8, 64, 300])
def test_rates_of_however_many_bins_sum_to_the_rate_of_all(bins: int) -> None:
    body = Body(fresh(bins=bins), wait_on(bins=bins))
    body.arrivals(60, 0.1)
    assert len(body.questions[-1].rates_per_s) == bins
    assert total(body.questions[-1]) == pytest.approx(10.0, rel=0.03)


def test_bins_have_their_shares_of_the_rate() -> None:
    body = Body(fresh(), wait_on())
    body.arrivals(3_000, 0.1, tokens=(5.0, 5.0, 5.0, 15.0))
    body.arrivals(40, 0.001, tokens=(5.0, 5.0, 5.0, 15.0))  # a jump, to be asked again
    short, long_ = body.questions[-1].rates_per_s
    assert short / long_ == pytest.approx(3.0, rel=0.15)


# ---- lengths ----


def test_after_so_many_answers_a_plan_is_made_for_the_lengths_as_they_have_become() -> None:
    body = Body(fresh(), wait_on())
    body.arrivals(40, 0.1, tokens=(5.0, 15.0))
    previous = body.new()[-1]
    body.arrivals(ANSWERS_BETWEEN, 0.1, tokens=(5.0, 15.0), longer=10.0)
    assert body.new() == [], "arrivals are looked at before their own answers"
    body.arrivals(1, 0.1, tokens=(5.0, 15.0), longer=10.0)
    (observed,) = body.new()
    assert observed.lengths == ((50.0,) * LEVELS, (150.0,) * LEVELS)
    assert observed.rates_per_s == pytest.approx(previous.rates_per_s, rel=0.15)
    body.arrivals(ANSWERS_BETWEEN - 8, 0.1, tokens=(5.0, 15.0), longer=20.0)
    assert body.new() == []


# ---- engines and trust ----


def test_engines_that_come_and_go_are_reason_to_ask() -> None:
    body = Body(fresh(), wait_on())
    assert body.new()[-1].engines == 1
    body.tell(EngineReady(GPU1))
    assert [observed.engines for observed in body.new()] == [2]
    body.tell(EngineLost("gpu0"))
    assert [observed.engines for observed in body.new()] == [1]
    body.tell(EngineReady(GPU0))
    body.tell(EngineClosed("gpu1"))
    assert [observed.engines for observed in body.new()] == [2, 1]


def test_without_any_engine_nothing_is_asked() -> None:
    body = Body(fresh(), wait_on())
    body.new()
    body.tell(EngineLost("gpu0"))
    body.tell(TimerFired())
    assert body.new() == []
    body.tell(EngineReady(GPU0))
    assert body.new() == [], "as many as before"


def test_predictions_that_are_not_trusted_leave_one_bin_to_plan_for_and_come_back_with_trust() -> None:
    body = Body(fresh(), wait_on())
    body.arrivals(40, 0.1, tokens=(5.0, 15.0))
    body.new()
    body.scheduler.queues("").trust.trusted = False
    body.answer = wait_on(bins=1)
    body.arrivals(1, 0.1)
    (observed,) = body.new()
    assert len(observed.rates_per_s) == len(observed.lengths) == 1
    assert observed.rates_per_s[0] == pytest.approx(10.0, rel=0.03)
    body.scheduler.queues("").trust.trusted = True
    body.arrivals(1, 0.1)
    assert [len(observed.rates_per_s) for observed in body.new()] == [BINS]


# ---- one at a time ----


def test_while_a_plan_is_being_made_no_other_is_asked_for_and_then_the_world_is_looked_at_again() -> None:
    body = Body(fresh(rate_factor=1.1), None)
    assert len(body.new()) == 1
    body.arrivals(50, 0.1)
    body.arrivals(50, 0.01)
    body.tell(EngineReady(GPU1))
    assert body.new() == []
    body.tell(DispatchSolved(wait_on()))
    (observed,) = body.new()
    assert (observed.engines, total(observed)) == (2, pytest.approx(100.0, rel=0.5))


def test_the_number_of_queues_in_force_is_told_of_a_plan_for_a_known_load_only() -> None:
    for response_s_mean, queues in ((1.0, 2), (None, 0)):
        body = Body(fresh(bins=4), wait_on(bins=4, queues=2, response_s_mean=response_s_mean))
        body.arrivals(40, 0.1)
        body.new()
        body.tell(EngineReady(GPU1))
        assert [observed.queues for observed in body.new()] == [queues]


def test_all_at_once_is_no_rate() -> None:
    """Nothing can be divided by no time; what comes then is asked about as soon as time passes."""
    body = Body(fresh(), wait_on())
    body.new()
    body.arrivals(100, 0.0)
    assert body.new() == []
    body.arrivals(1, 0.5)
    assert [math.isfinite(total(observed)) for observed in body.new()] == [True]
