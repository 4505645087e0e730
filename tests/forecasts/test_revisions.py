"""Which forecasts are revised, and when."""

from __future__ import annotations

from itertools import pairwise

from llmserve.forecasts.revisions import ANSWERS_MOST, Forecast, Revisions
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import REVISIONS_MAX, EngineReady, ForecastsRevised, RequestArrived
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig


def waiting(*predicted: float | None) -> Scheduler:
    """A scheduler whose engine runs request 0. Requests 1, 2, ... wait with these predictions."""
    scheduler = SchedulingConfig().resolved(barrier=False).scheduler()
    scheduler.handle(EngineReady(EngineInfo("gpu", 1, False)), 0.0)
    for request_id, tokens in enumerate((None, *predicted)):
        scheduler.handle(RequestArrived(Request(request_id, tokens)), 0.0)
    return scheduler


def rounds(scheduler: Scheduler, answers: int) -> list[tuple[int, list[int]]]:
    """(answers learnt, ids asked for) of each round, while so many answers are learnt."""
    asked: list[int] = []

    def forecast(request_id: int) -> Forecast:
        asked.append(request_id)
        return 5.0, ()

    revisions, seen = Revisions(scheduler.requests, forecast), []
    for learnt in range(1, answers + 1):
        revisions.learnt()
        if revisions.pending:
            asked.clear()
            revisions.rest()
            seen.append((learnt, list(asked)))
    return seen


def test_rounds_follow_the_first_answers_at_once_and_later_ones_at_growing_distances() -> None:
    times = [learnt for learnt, _ in rounds(waiting(1.0), 2_000)]
    assert times[:22] == [*range(1, 17), 18, 20, 22, 24, 27, 30]
    gaps = [later - learnt for learnt, later in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == ANSWERS_MOST


def test_a_round_asks_for_the_waiting_requests_in_order_of_arrival() -> None:
    assert rounds(waiting(9.0, 3.0, None, 7.0), 1) == [(1, [1, 2, 3, 4])]


def test_requests_that_arrived_since_the_last_round_wait_for_the_next() -> None:
    scheduler = waiting(1.0)
    asked: list[int] = []
    revisions = Revisions(scheduler.requests, lambda request_id: asked.append(request_id))
    revisions.learnt()
    revisions.rest()
    scheduler.handle(RequestArrived(Request(2, 1.0)), 1.0)
    for _ in range(2):
        revisions.learnt()
        revisions.rest()
    assert asked == [1, 1, 1, 2]


def test_only_forecasts_that_have_changed_by_more_than_a_tenth_are_passed_on() -> None:
    scheduler = waiting(100.0, 100.0, 100.0, None, 100.0, 100.0)
    later: dict[int, Forecast | None] = {
        1: (109.0, ()),
        2: (111.0, ()),
        3: (100.0, (50.0, 100.0, 200.0)),  # the median is the same, but now its spread is known
        4: (20.0, ()),
        5: None,
        6: (None, ()),
    }
    revisions = Revisions(scheduler.requests, later.__getitem__)
    revisions.learnt()
    revised = revisions.rest()
    assert [revision.request_id for revision in revised] == [2, 3, 4]
    assert revised[1].quantiles == (50.0, 100.0, 200.0)
    scheduler.handle(ForecastsRevised(tuple(revised)), 1.0)
    revisions.learnt()
    assert revisions.rest() == []


def test_a_round_can_be_carried_out_in_slices() -> None:
    scheduler = waiting(*[1.0] * 200)
    revisions = Revisions(scheduler.requests, lambda request_id: (5.0, ()))
    revisions.learnt()
    assert len(revisions.some()) == REVISIONS_MAX
    assert revisions.some(lambda: False) == ()
    turns = iter([True, True, True, False])
    assert [revision.request_id for revision in revisions.some(lambda: next(turns))] == [65, 66, 67]
    assert revisions.pending
    assert len(revisions.rest()) == 200 - REVISIONS_MAX - 3
    assert not revisions.pending


def test_answers_that_are_learnt_during_a_round_begin_another_after_it() -> None:
    scheduler = waiting(*[1.0] * 100)
    revisions = Revisions(scheduler.requests, lambda request_id: (5.0, ()))
    revisions.learnt()
    first = revisions.some()
    revisions.learnt()
    second = revisions.some()
    assert [revision.request_id for revision in (*first, *second)] == list(range(1, 101))
    assert revisions.pending
    assert revisions.some()[0].request_id == 1
