"""Waiting requests that get other forecasts move to where these belong."""

from __future__ import annotations

import random
from itertools import count

import msgspec
import pytest
from test_orders import one_by_one, run_dry
from test_scheduler import arrive, new_scheduler, step

from bins.profile import StepTimes
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.choice.orders import shortest, turn
from llmserve.scheduling.messages import (
    REVISIONS_MAX,
    Action,
    BatchEnded,
    FailRequest,
    ForecastsRevised,
    RequestCancelled,
    RequestEnded,
    RevisedForecast,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.queues.formed_queue import FormedQueue
from llmserve.scheduling.queues.waiting import ENTRIES_SPARE, FormedBatch, QueuedRequest
from llmserve.scheduling.queues.window_queue import WindowQueue
from llmserve.scheduling.scheduler import Scheduler
from llmserve.scheduling.trust import WINDOW_MIN, Trust

STATIC = EngineInfo("gpu0", slots=3, barrier=True)


def revised(lengths: dict[int, float]) -> ForecastsRevised:
    return ForecastsRevised(tuple([RevisedForecast(request_id, tokens) for request_id, tokens in lengths.items()]))


def batches(actions: list[Action]) -> list[tuple[int, list[int]]]:
    """(bin, request ids) of each batch that starts."""
    starts = [action.batch for action in actions if isinstance(action, StartBatch)]
    return [(batch.bin, [request.id for request in batch.requests]) for batch in starts]


def binned(**config: object) -> Scheduler:
    """Two bins, of answers below and above 100 tokens, before an engine that runs one request."""
    return new_scheduler(STATIC, **{"bins": 2, "edges": (100.0,), "batch_size": 3, "bins_by": "median", **config})


# ---- the order ----


def test_requests_of_unknown_lengths_go_shortest_first_once_their_lengths_are_known() -> None:
    scheduler = one_by_one("shortest")
    arrive(scheduler, *map(Request, range(6)))
    assert step(scheduler, revised({1: 300.0, 2: 20.0, 3: 100.0, 4: 20.0, 5: 7.0}), 1.0) == []
    assert run_dry(scheduler, 0, 2.0) == [0, 5, 2, 4, 3, 1]


def test_the_last_forecast_counts_also_within_one_event() -> None:
    scheduler = one_by_one("shortest")
    arrive(scheduler, Request(0), Request(1, 50.0), Request(2, 60.0), Request(3, 70.0))
    step(scheduler, revised({1: 10.0, 3: 500.0}), 1.0)
    step(scheduler, ForecastsRevised((RevisedForecast(1, 5.0), RevisedForecast(1, 80.0))), 2.0)
    step(scheduler, revised({3: 55.0}), 3.0)
    assert run_dry(scheduler, 0, 4.0) == [0, 3, 2, 1]


def test_the_spread_of_a_later_forecast_counts() -> None:
    scheduler = one_by_one("shortest")
    arrive(scheduler, Request(0), Request(1, 10.0), Request(2, 50.0))
    step(scheduler, ForecastsRevised((RevisedForecast(1, 10.0, (5.0, 10.0, 3_000.0)),)), 1.0)
    assert run_dry(scheduler, 0, 2.0) == [0, 2, 1]


def test_a_request_starts_with_its_last_forecast_and_keeps_everything_else() -> None:
    scheduler = one_by_one("shortest")
    request = Request(1, 50.0, 90.0, (40.0, 50.0, 60.0), 12.0, 2, (3, 4), 4.0, "", "mail")
    arrive(scheduler, Request(0), request)
    step(scheduler, revised({1: 8.0}), 1.0)
    (action,) = step(scheduler, RequestEnded("gpu0", 0, "completed", 9.0), 2.0)
    assert isinstance(action, StartBatch)
    assert action.batch.requests == (msgspec.structs.replace(request, predicted_tokens=8.0, quantiles=()),)
    assert action.batch.formed_at_s == 0.0


def test_ageing_goes_on_from_the_arrival() -> None:
    """With its later forecast a request has the turn that it would have had with that forecast from the beginning."""
    turns_s = []
    for predicted in (400.0, 40.0):
        scheduler = one_by_one("shortest")
        arrive(scheduler, Request(0), Request(1, predicted), Request(2, 900.0), Request(3, 1.0))
        step(scheduler, RequestEnded("gpu0", 0, "completed", 1_000.0), 30.0)  # a token takes longer than was expected
        step(scheduler, revised({1: 500.0, 2: 40.0}), 40.0)
        step(scheduler, revised({1: 40.0, 2: 500.0}), 50.0)
        turns_s.append([turn(12.0)(scheduler.requests[request_id]) for request_id in (1, 2)])
    assert turns_s[0] == pytest.approx(turns_s[1])
    assert turns_s[0][1] - turns_s[0][0] > 5.0


def test_running_requests_and_unknown_ids_are_ignored() -> None:
    scheduler = one_by_one("shortest")
    arrive(scheduler, Request(0, 10.0), Request(1, 20.0), Request(2, 30.0))
    step(scheduler, RequestCancelled(2), 1.0)
    assert step(scheduler, revised({0: 99.0, 2: 99.0, 7: 99.0}), 2.0) == []
    assert scheduler.requests[0].request == Request(0, 10.0)
    assert run_dry(scheduler, 0, 3.0) == [0, 1]


def test_a_returned_batch_is_sorted_again_too() -> None:
    for later, expected in ((5.0, [1, 0, 2]), (60.0, [1, 2, 0])):
        scheduler = one_by_one("shortest")
        arrive(scheduler, Request(0), Request(1, 20.0), Request(2, 30.0))
        step(scheduler, RequestEnded("gpu0", 0, "failed", fault=True, retryable=True), 1.0)
        step(scheduler, revised({0: later}), 1.0)
        assert run_dry(scheduler, 1, 2.0) == expected


def test_while_predictions_are_not_trusted_later_forecasts_change_no_order() -> None:
    scheduler = one_by_one("shortest")
    arrive(scheduler, Request(0), Request(1), Request(2), Request(3))
    scheduler.queues("").binning.trust.trusted = False
    step(scheduler, revised({1: 300.0, 2: 20.0, 3: 100.0}), 1.0)
    assert run_dry(scheduler, 0, 2.0) == [0, 1, 2, 3]


# ---- bins and batches ----


def test_a_request_moves_to_the_bin_of_its_later_forecast_and_keeps_its_place_by_arrival() -> None:
    scheduler = binned(release="timeout", batch_wait_s=10.0, batch_size=4)
    for request_id, tokens in enumerate((500.0, 50.0, 500.0, 50.0)):
        arrive(scheduler, Request(request_id, tokens), now_s=float(request_id))
    step(scheduler, revised({0: 60.0, 3: 600.0}), 4.0)
    assert scheduler.wake_at_s == 10.0  # the first request still goes 10 s after its arrival
    assert batches(step(scheduler, TimerFired(), 10.0)) == [(0, [0, 1])]
    assert batches(step(scheduler, BatchEnded("gpu0", 1, {0: 60.0, 1: 50.0}), 12.0)) == [(1, [2, 3])]


def test_a_request_that_moves_can_fill_a_batch() -> None:
    scheduler = binned(release="full")
    arrive(scheduler, Request(0, 50.0), Request(1, 500.0), Request(2, 60.0))
    assert batches(step(scheduler, revised({1: 70.0}), 1.0)) == [(0, [0, 1, 2])]


def test_a_formed_batch_keeps_its_requests() -> None:
    scheduler = binned(release="full")
    arrive(scheduler, *[Request(request_id, 50.0) for request_id in range(9)])
    assert step(scheduler, revised({4: 700.0}), 1.0) == []
    assert batches(step(scheduler, BatchEnded("gpu0", 1, dict.fromkeys(range(3), 50.0)), 2.0)) == [(0, [3, 4, 5])]


def test_a_formed_batch_gets_the_turn_of_its_requests_later_forecasts() -> None:
    scheduler = binned(release="full", order="shortest")
    arrive(scheduler, *[Request(request_id, 50.0) for request_id in range(9)])
    step(scheduler, revised({3: 99.0, 4: 99.0, 5: 99.0}), 1.0)
    assert batches(step(scheduler, BatchEnded("gpu0", 1, dict.fromkeys(range(3), 50.0)), 2.0)) == [(0, [6, 7, 8])]


def test_a_window_forms_batches_by_later_forecasts() -> None:
    scheduler = new_scheduler(STATIC, release="window", batch_size=3)
    arrive(scheduler, *[Request(request_id, 50.0) for request_id in range(9)])
    step(scheduler, revised({1: 500.0, 5: 510.0, 7: 490.0}), 1.0)
    assert batches(step(scheduler, BatchEnded("gpu0", 1, {0: 50.0}), 2.0)) == [(0, [7, 1, 5])]


def test_memory_is_reserved_by_the_later_forecast() -> None:
    scheduler = one_by_one("fffs", EngineInfo("gpu0", slots=4, barrier=False, tokens_max=1_000))
    arrive(scheduler, Request(0, 600.0), Request(1, 600.0))
    assert set(scheduler.engines["gpu0"].running) == {0}
    assert batches(step(scheduler, revised({1: 100.0}), 1.0)) == [(0, [1])]


# ---- deadlines ----


def timed(order: str) -> Scheduler:
    """An engine of one slot and 0.01 s a token; a first answer of 10 tokens has shown that its speed is true."""
    engine = EngineInfo("gpu0", 1, True, speeds={"": StepTimes(0.0, (0.01,))})
    scheduler = new_scheduler(engine, order=order, batch_size=1)
    arrive(scheduler, Request(0, 10.0))
    step(scheduler, RequestEnded("gpu0", 0, "completed", 10.0), 0.1)
    return scheduler


def test_a_request_is_late_by_its_later_forecast() -> None:
    """Request 2 is due at 1.0 s and may be as short as 1 token: after its revision, as short as 10, the shortest."""
    for tokens, late_at_s in ((1.0, 0.99), (10.0, 0.9)):
        scheduler = timed("clockwork")
        arrive(scheduler, Request(1, 500.0), Request(2, 5.0, 1.0), now_s=0.2)
        assert scheduler.wake_at_s == pytest.approx(0.95, abs=1e-4)
        step(scheduler, revised({2: tokens}), 0.3)
        if tokens < 5.0:  # the old time comes first, and is estimated again
            assert step(scheduler, TimerFired(), 0.951) == []
        assert scheduler.wake_at_s == pytest.approx(late_at_s, abs=1e-4)
        actions = step(scheduler, TimerFired(), late_at_s + 0.001)
        assert [action.request_id for action in actions if isinstance(action, FailRequest)] == [2]


# ---- bounds ----


def test_an_event_holds_a_limited_number_of_forecasts() -> None:
    some = tuple([RevisedForecast(request_id, 1.0) for request_id in range(REVISIONS_MAX + 1)])
    assert ForecastsRevised(some[1:]).revisions == some[1:]
    with pytest.raises(ValueError, match="65 forecasts are too many for one step: at most 64"):
        ForecastsRevised(some)


def test_entries_of_former_keys_do_not_pile_up() -> None:
    queue = FormedQueue(shortest(12.0))
    waiting = [QueuedRequest(Request(number, 9.0), 0, 0.0, 9.0, 9.0, 9.0, 9.0) for number in range(50)]
    formed = [FormedBatch(number, 0, 0.0, [queued]) for number, queued in enumerate(waiting)]
    for batch in formed:
        queue.push(batch)
    rng = random.Random(1)
    for _ in range(10_000):
        queued = rng.choice(waiting)
        queued.expect(tokens := rng.uniform(1.0, 100.0), tokens)
        assert queued.formed is not None
        queue.sort_again((queued.formed,))
        assert sum(map(len, queue._by_share.values())) <= 2 * len(waiting) + ENTRIES_SPARE + 1
    in_turn = sorted(formed, key=lambda batch: (shortest(12.0)(batch), batch.id))
    assert queue.batches() == in_turn
    served = []
    while queue:
        batch = queue.fresh()
        assert batch is not None
        served += queue.take(batch, 1)
    assert served == [waiting[batch.id] for batch in in_turn]


@pytest.mark.parametrize("patience", [0.0, 12.0])
def test_a_window_whose_forecasts_change_equals_a_new_window_of_the_last_forecasts(patience: float) -> None:
    """Arrivals, departures, changes and batches at random; the batches are those of a new window of what waits."""
    rng, turn_s, ids = random.Random(2), turn(patience), count()
    window = WindowQueue(0, 8, turn_s)
    waiting: dict[int, QueuedRequest] = {}
    for _ in range(3_000):
        chance = rng.random()
        if chance < 0.3:
            tokens = rng.uniform(1.0, 100.0)
            queued = QueuedRequest(Request(next(ids)), 0, float(len(waiting)), None, tokens, tokens, tokens)
            queued.sort_length = tokens
            waiting[queued.request.id] = queued
            window.append(queued)
        elif chance < 0.8 and waiting:
            queued = rng.choice(list(waiting.values()))
            window.lift(queued)
            tokens = rng.choice([queued.expected_tokens, rng.uniform(1.0, 100.0)])
            queued.expect(tokens, tokens)
            queued.sort_length = queued.expected_tokens
            window.put_down(queued)
        elif chance < 0.9 and waiting:
            window.remove(waiting.pop(rng.choice(list(waiting))))
        elif waiting:
            again = WindowQueue(0, 8, turn_s)
            for queued in waiting.values():
                again.append(queued)
            taken = [queued.request.id for queued in window.take(min(3, len(waiting)))]
            assert taken == [queued.request.id for queued in again.take(min(3, len(waiting)))]
            for request_id in taken:
                del waiting[request_id]
        assert list(window.requests) == list(waiting)
        assert len(window._beyond) <= 2 * len(window._turns_beyond) + ENTRIES_SPARE + 1


# ---- trust ----


def judged(scheduler: Scheduler) -> Trust:
    """Answer all requests, each with 10 tokens more than its number; return the trust."""
    while scheduler.requests:
        (request_id,) = scheduler.engines["gpu0"].running
        step(scheduler, RequestEnded("gpu0", request_id, "completed", 10.0 + request_id), 2.0)
    return scheduler.queues("").binning.trust


def test_predictions_are_judged_by_the_forecasts_at_the_arrivals() -> None:
    """The order picks what later forecasts call short, so among the requests that it picks these rank worse."""
    scheduler = new_scheduler(EngineInfo("gpu0", 1, False), order="shortest", batch_size=1, trust_window=32)
    arrive(scheduler, *[Request(request_id, 10.0 + request_id) for request_id in range(WINDOW_MIN)])
    judged(scheduler)
    arrive(scheduler, *[Request(request_id, 10.0 + request_id) for request_id in range(100, 140)], now_s=2.0)
    for start in (100, 120):
        step(scheduler, revised({request_id: 200.0 - request_id for request_id in range(start, start + 20)}), 2.0)
    trust = judged(scheduler)
    assert trust.trusted
    assert trust.accuracy(8).rank_correlation == pytest.approx(1.0)


def test_forecasts_from_before_the_first_answers_do_not_speak_against_later_ones() -> None:
    """A burst at the start: all forecasts are alike, until answers tell the requests apart."""
    scheduler = new_scheduler(EngineInfo("gpu0", 1, False), order="shortest", batch_size=1, trust_window=64)
    arrive(scheduler, *[Request(request_id, 50.0) for request_id in range(140)])
    for request_id in range(8):
        step(scheduler, RequestEnded("gpu0", request_id, "completed", 10.0 + request_id), 1.0)
    for start in range(8, 140, 20):
        ids = range(start, min(start + 20, 140))
        step(scheduler, revised({request_id: 10.0 + request_id for request_id in ids}), 1.0)
    trust = judged(scheduler)
    assert trust.trusted
    assert trust.accuracy(8).rank_correlation == pytest.approx(1.0)
