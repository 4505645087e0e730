"""When the scheduler requests a new plan, and for which load: events in, SolveDispatch out."""

from __future__ import annotations

import math

import pytest
from test_releases import NEVER, plan, table
from test_scheduler import step

from bins.dispatch import DispatchPlan, Observed
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
from llmserve.settings.policies import SchedulingConfig

GPU0, GPU1 = EngineInfo("gpu0", slots=8, barrier=False), EngineInfo("gpu1", slots=8, barrier=False)
BINS, BATCH = 2, 4


def fresh(bins: int = BINS, **config: object) -> Scheduler:
    """A scheduler without engines; edges at 10, 20, ... tokens."""
    edges = tuple([10.0 * index for index in range(1, bins)])
    values: dict[str, object] = {"bins": bins, "edges": edges, "batch_size": BATCH, "release": "table", **config}
    return SchedulingConfig(**values, edges_refit_every=0, queue_requests_max=10**6, order="fffs").scheduler()  # type: ignore[arg-type]


def wait_on(bins: int = BINS, queues: int = 1, response_s_mean: float | None = 1.0) -> DispatchPlan:
    """A plan that releases only full batches."""
    return plan(*[table(NEVER)] * queues, bins=bins, response_s_mean=response_s_mean)  # type: ignore[arg-type]


class Body:
    """Feeds a scheduler arrivals, answers each question with the same plan at once, and records the questions."""

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
        """`count` arrivals, `gap_s` apart, with these predicted lengths in turn. Started requests end at once.

        longer : ratio of real to predicted lengths; 0: answers have no length
        """
        for _ in range(count):
            self.now_s += gap_s
            self.tell(RequestArrived(Request(self.ids, tokens[self.ids % len(tokens)])))
            self.ids += 1
            for request_id, run in list(self.scheduler.engines["gpu0"].running.items()):
                answer = longer * (run.queued.request.predicted_tokens or 0.0)
                self.tell(RequestEnded("gpu0", request_id, "completed", answer))

    def new(self) -> list[Observed]:
        """Questions since the last call."""
        questions, self.questions = self.questions, []
        return questions


def total(observed: Observed) -> float:
    return sum(observed.rates_per_s)


# ---- the first plan ----


def test_the_first_engine_causes_one_question_with_unknown_rates() -> None:
    scheduler = fresh()
    assert scheduler.handle(TimerFired(), 0.0) == []
    (action,) = scheduler.handle(EngineReady(GPU0), 1.0)
    assert isinstance(action, SolveDispatch)
    observed = action.observed
    assert (observed.rates_per_s, observed.engines, observed.queues) == ((0.0, 0.0), 1, 0)
    assert len(observed.lengths) == BINS
    assert scheduler.handle(TimerFired(), 2.0) == []


def test_a_release_that_follows_no_plan_requests_none() -> None:
    scheduler = fresh(release="greedy")
    assert scheduler.handle(EngineReady(GPU0), 0.0) == []


def test_a_rate_is_reported_after_a_few_arrivals_and_not_again_while_it_stays() -> None:
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


def test_a_plan_is_requested_again_when_the_rate_has_moved_by_more_than_the_factor() -> None:
    body = Body(fresh(rate_factor=1.25), wait_on())
    body.arrivals(200, 0.1)
    body.new()
    body.arrivals(600, 0.1 / 1.15)
    assert body.new() == [], "15 % more arrivals cause no question"
    body.arrivals(600, 0.1 / 1.5)
    questions = body.new()
    assert questions
    assert 15.0 / 1.25 < total(questions[-1]) < 15.0 * 1.25
    body.arrivals(900, 0.1)
    questions = body.new()
    assert questions, "a lower rate causes a question, too"
    assert 10.0 / 1.25 < total(questions[-1]) < 10.0 * 1.25


def test_a_larger_factor_asks_less_often() -> None:
    def questions(rate_factor: float) -> int:
        body = Body(fresh(rate_factor=rate_factor), wait_on())
        for speed in range(1, 21):
            body.arrivals(150, 0.5 / speed)
        return len(body.questions)

    assert questions(3.0) < questions(1.5) < questions(1.1)


@pytest.mark.parametrize("factor", [10.0, 0.03])
def test_a_jump_causes_a_question_within_twenty_arrivals_with_all_queue_counts_open(factor: float) -> None:
    """Also where a rate may move by a large factor without a new question."""
    body = Body(fresh(bins=4, rate_factor=1e6), wait_on(bins=4, queues=2))
    body.arrivals(200, 0.1)
    body.new()
    body.arrivals(20, 0.1 / factor)
    (observed,) = body.new()
    assert observed.queues == 0
    assert abs(math.log(total(observed) / 10.0)) > 1.0
    body.tell(EngineReady(GPU1))
    (observed,) = body.new()
    assert observed.queues == 2, "a jump is reported once"
    assert total(observed) == pytest.approx(10.0 * factor, rel=0.5)


def test_rates_are_reported_on_a_grid_so_that_the_same_load_is_the_same_question() -> None:
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
    body.arrivals(40, 0.001, tokens=(5.0, 5.0, 5.0, 15.0))  # a jump causes a new question
    short, long_ = body.questions[-1].rates_per_s
    assert short / long_ == pytest.approx(3.0, rel=0.15)


# ---- lengths ----


def test_after_enough_answers_a_plan_is_requested_for_the_new_lengths() -> None:
    body = Body(fresh(), wait_on())
    body.arrivals(40, 0.1, tokens=(5.0, 15.0))
    previous = body.new()[-1]
    body.arrivals(ANSWERS_BETWEEN, 0.1, tokens=(5.0, 15.0), longer=10.0)
    assert body.new() == [], "the planner sees an arrival before its answer"
    body.arrivals(1, 0.1, tokens=(5.0, 15.0), longer=10.0)
    (observed,) = body.new()
    assert observed.lengths == ((50.0,) * LEVELS, (150.0,) * LEVELS)
    assert observed.rates_per_s == pytest.approx(previous.rates_per_s, rel=0.15)
    body.arrivals(ANSWERS_BETWEEN - 8, 0.1, tokens=(5.0, 15.0), longer=20.0)
    assert body.new() == []


# ---- engines and trust ----


def test_lost_and_new_engines_cause_questions() -> None:
    body = Body(fresh(), wait_on())
    assert body.new()[-1].engines == 1
    body.tell(EngineReady(GPU1))
    assert [observed.engines for observed in body.new()] == [2]
    body.tell(EngineLost("gpu0"))
    assert [observed.engines for observed in body.new()] == [1]
    body.tell(EngineReady(GPU0))
    body.tell(EngineClosed("gpu1"))
    assert [observed.engines for observed in body.new()] == [2, 1]


def test_without_any_engine_no_plan_is_requested() -> None:
    body = Body(fresh(), wait_on())
    body.new()
    body.tell(EngineLost("gpu0"))
    body.tell(TimerFired())
    assert body.new() == []
    body.tell(EngineReady(GPU0))
    assert body.new() == [], "as many as before"


def test_without_trust_plans_are_for_one_bin_until_trust_is_back() -> None:
    body = Body(fresh(), wait_on())
    body.arrivals(40, 0.1, tokens=(5.0, 15.0))
    body.new()
    body.scheduler.queues("").binning.trust.trusted = False
    body.answer = wait_on(bins=1)
    body.arrivals(1, 0.1)
    (observed,) = body.new()
    assert len(observed.rates_per_s) == len(observed.lengths) == 1
    assert observed.rates_per_s[0] == pytest.approx(10.0, rel=0.03)
    body.scheduler.queues("").binning.trust.trusted = True
    body.arrivals(1, 0.1)
    assert [len(observed.rates_per_s) for observed in body.new()] == [BINS]


# ---- one at a time ----


def test_while_a_plan_is_solved_no_other_is_requested_and_then_the_load_is_checked_again() -> None:
    body = Body(fresh(rate_factor=1.1), None)
    assert len(body.new()) == 1
    body.arrivals(50, 0.1)
    body.arrivals(50, 0.01)
    body.tell(EngineReady(GPU1))
    assert body.new() == []
    body.tell(DispatchSolved(wait_on()))
    (observed,) = body.new()
    assert (observed.engines, total(observed)) == (2, pytest.approx(100.0, rel=0.5))


def test_the_number_of_queues_in_force_is_reported_only_for_a_plan_for_a_known_load() -> None:
    for response_s_mean, queues in ((1.0, 2), (None, 0)):
        body = Body(fresh(bins=4), wait_on(bins=4, queues=2, response_s_mean=response_s_mean))
        body.arrivals(40, 0.1)
        body.new()
        body.tell(EngineReady(GPU1))
        assert [observed.queues for observed in body.new()] == [queues]


def test_simultaneous_arrivals_have_no_rate() -> None:
    """A rate needs a time span: these arrivals are reported as soon as time passes."""
    body = Body(fresh(), wait_on())
    body.new()
    body.arrivals(100, 0.0)
    assert body.new() == []
    body.arrivals(1, 0.5)
    assert [math.isfinite(total(observed)) for observed in body.new()] == [True]
