"""Places in the queue: by share, batch and order, and the wait that follows from them."""

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from calls import a_call

from llmserve.calls.in_flight import InFlightCall, Receipt
from llmserve.engines.engine import ServedModel
from llmserve.estimates.estimator import KEPT_S, Estimator, in_turn
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import EngineLost, EngineReady, RequestArrived, RequestEnded
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig
from predictor.prompt import Prompt

NOBODY: Any = None  # the client of calls that are never answered


class Engines:
    """The engines of a scheduler's cluster, at a time that a test sets, with calls that end in these seconds."""

    models = MappingProxyType[str, ServedModel]({})

    def __init__(self, scheduler: Scheduler, *ends_s: float) -> None:
        self.at_s = 0.0
        self.estimator = Estimator(scheduler, self, lambda: self.at_s)
        self._scheduler, self._ends_s = scheduler, ends_s

    def slots_of(self, model: str) -> int:
        return 1

    def running_on(self, queue: str) -> list[InFlightCall]:
        per_token_s = self._scheduler.queues("").service.seconds_per_token
        return [self._just_begun(end_s / per_token_s) for end_s in self._ends_s]

    def _just_begun(self, tokens: float) -> InFlightCall:
        begun = InFlightCall(a_call("/v1/completions", b"", Prompt("", "")), 0, NOBODY)
        begun.request, begun.arrived_at_s = Request(0, tokens), self.at_s
        begun.receipt = Receipt(0, 0, 1, "gpu0", 0.0, tokens)
        return begun


def estimator_of(scheduler: Scheduler, *ends_s: float) -> Estimator:
    return Engines(scheduler, *ends_s).estimator


def scheduler_of(order: str = "fffs", **config: Any) -> Scheduler:
    """One slot, which request 0 takes."""
    values = {"bins": 1, "batch_size": 1, "release": "greedy", "order": order, **config}
    scheduler = SchedulingConfig(**values).resolved(barrier=False).scheduler()
    scheduler.handle(EngineReady(EngineInfo("gpu0", 1, barrier=False)), 0.0)
    arrive(scheduler, 0)
    return scheduler


def arrive(scheduler: Scheduler, request_id: int, tokens: float = 4.0, at_s: float = 0.0, **fields: Any) -> None:
    scheduler.handle(RequestArrived(Request(request_id, tokens, **fields)), at_s)


def call(request_id: int) -> Any:
    return SimpleNamespace(request=Request(request_id))


def order_of(scheduler: Scheduler) -> list[int]:
    return [queued.request.id for queued in in_turn(scheduler.queues(""), scheduler.order)]


def test_a_running_request_has_no_place_and_the_others_count_from_one() -> None:
    scheduler = scheduler_of()
    arrive(scheduler, 1)
    arrive(scheduler, 2)
    estimator = estimator_of(scheduler)
    assert [place and place.position for place in (estimator.position_of(call(number)) for number in (0, 1, 2))] == [
        None,
        1,
        2,
    ]


@pytest.mark.parametrize(("order", "expected"), [("fffs", [1, 2, 3]), ("shortest", [3, 2, 1])])
def test_places_follow_the_order(order: str, expected: list[int]) -> None:
    scheduler = scheduler_of(order, patience=1e6)
    for request_id, tokens in ((1, 900.0), (2, 50.0), (3, 5.0)):
        arrive(scheduler, request_id, tokens)
    assert order_of(scheduler) == expected


def test_the_least_served_share_is_next() -> None:
    scheduler = scheduler_of()
    for request_id, share in ((1, "flood"), (2, "flood"), (3, "flood"), (4, "modest")):
        arrive(scheduler, request_id, share=share)
    order = order_of(scheduler)
    assert order.index(4) < 2
    assert [request_id for request_id in order if request_id != 4] == [1, 2, 3]


def test_one_more_of_a_share_would_start_after_its_own_and_before_those_of_a_flood() -> None:
    """One slot; a request ends each second, and six wait."""
    scheduler = scheduler_of()
    for request_id in range(1, 9):
        arrive(scheduler, request_id, share="flood", at_s=0.1)
    for request_id in range(3):
        scheduler.handle(RequestEnded("gpu0", request_id, "completed", 4.0), 1.0 * (request_id + 1))
    arrive(scheduler, 9, share="modest", at_s=3.0)
    estimator = estimator_of(scheduler)

    def next_s(share: str) -> float | None:
        return estimator.next_start_s(Request(-1, 4.0, share=share))

    assert next_s("flood") == pytest.approx(7.0), "five of its own wait, and one of another share"
    assert next_s("modest") == pytest.approx(4.0), "its own, and two of the flood: of equals the older share is next"
    assert next_s("new") == pytest.approx(3.0), "one of each of the older shares"


def test_one_more_starts_at_once_where_a_slot_is_free_and_never_without_an_engine() -> None:
    scheduler = scheduler_of()
    scheduler.handle(RequestEnded("gpu0", 0, "completed", 4.0), 1.0)
    assert estimator_of(scheduler).next_start_s(Request(1)) == 0.0
    assert estimator_of(scheduler).next_start_s(Request(1, model="unknown")) is None
    scheduler.handle(EngineLost("gpu0"), 2.0)
    assert estimator_of(scheduler).next_start_s(Request(1)) is None


def test_the_wait_is_of_the_running_calls_until_the_rate_of_ends_is_known() -> None:
    scheduler = scheduler_of()
    for request_id in (1, 2, 3, 4):
        arrive(scheduler, request_id)
    engines = Engines(scheduler, 3.0)
    estimator = engines.estimator
    waits_s = [place.wait_s for number in (1, 2) if (place := estimator.position_of(call(number))) is not None]
    assert waits_s == [3.0, None]
    for request_id in (0, 1, 2):  # one ends each 2 s
        scheduler.handle(RequestEnded("gpu0", request_id, "completed", 4.0), 2.0 * request_id + 2.0)
    engines.at_s = 6.0
    place = estimator.position_of(call(4))
    assert place is not None
    assert (place.position, place.wait_s) == (1, 2.0)


def test_who_waits_behind_long_answers_is_told_a_longer_wait_than_behind_as_many_short_ones() -> None:
    scheduler = scheduler_of()
    for request_id in range(1, 5):
        arrive(scheduler, request_id)
    for request_id in range(4):  # one of 4 tokens ends each 2 s
        scheduler.handle(RequestEnded("gpu0", request_id, "completed", 4.0), 2.0 * request_id + 2.0)
    for request_id, tokens in ((5, 40.0), (6, 4.0), (7, 4.0)):
        arrive(scheduler, request_id, tokens, 8.0)
    engines = Engines(scheduler)
    engines.at_s = 8.0
    waits_s = [place.wait_s for number in (5, 6, 7) if (place := engines.estimator.position_of(call(number)))]
    assert waits_s == [pytest.approx(2.0), pytest.approx(22.0), pytest.approx(24.0)]
    (row,) = engines.estimator.rows()
    assert row.next_starts_s == pytest.approx(2.0)


def test_after_a_pause_the_wait_counts_the_answers_before_by_the_mean_answer() -> None:
    scheduler = scheduler_of()
    scheduler.handle(RequestEnded("gpu0", 0, "completed", 4.0), 2.0)  # now idle: the rate of ends is forgotten
    for request_id in (1, 2, 3):
        arrive(scheduler, request_id, at_s=9.0)
    service = scheduler.queues("").service
    place = estimator_of(scheduler, 1.5).position_of(call(3))
    assert place is not None
    assert place.wait_s == pytest.approx(1.5 + service.tokens_mean * service.seconds_per_token)


def test_places_hold_for_a_second_and_then_are_made_again() -> None:
    scheduler = scheduler_of()
    arrive(scheduler, 1)
    arrive(scheduler, 2)
    engines = Engines(scheduler)
    estimator = engines.estimator
    before = estimator.position_of(call(2))
    scheduler.handle(RequestEnded("gpu0", 0, "completed", 4.0), 0.1)
    arrive(scheduler, 3, at_s=0.1)
    kept = estimator.position_of(call(2))
    new = estimator.position_of(call(3))
    engines.at_s = KEPT_S
    after = estimator.position_of(call(2))
    positions = [place.position for place in (before, kept, new, after) if place is not None]
    assert positions == [2, 2, 2, 1], "a request that came later is last"


def test_without_a_working_engine_no_wait_is_told() -> None:
    scheduler = scheduler_of()
    arrive(scheduler, 1)
    scheduler.handle(EngineLost("gpu0", expected=True), 1.0)
    place = estimator_of(scheduler, 3.0).position_of(call(1))
    assert place is not None
    assert (place.wait_s, place.no_engine) == (None, True)
