"""Which formed batch runs next: shortest predicted first with ageing, and earliest deadline first."""

from __future__ import annotations

import random

from test_scheduler import REFILL, arrive, new_scheduler, step

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import Action, FailRequest, RequestEnded, StartBatch, TimerFired
from llmserve.scheduling.scheduler import Scheduler

ONE = EngineInfo("gpu0", slots=1, barrier=False)
SECONDS_PER_TOKEN = 0.02  # before the first answer


def one_by_one(order: str, engine: EngineInfo = ONE, **config: object) -> Scheduler:
    return new_scheduler(engine, order=order, batch_size=1, release="greedy", **config)


def run_dry(scheduler: Scheduler, running: int, now_s: float) -> list[int]:
    """End requests at `now_s` one after the other; return the ids in the order of their starts."""
    started = [running]
    while scheduler.requests:
        actions = step(scheduler, RequestEnded("gpu0", started[-1], "completed"), now_s)
        started += [
            request.id for action in actions if isinstance(action, StartBatch) for request in action.batch.requests
        ]
    return started


def test_requests_that_arrive_together_go_shortest_first() -> None:
    scheduler = one_by_one("shortest")
    arrive(scheduler, Request(0, 1.0), Request(1, 300.0), Request(2, 20.0), Request(3, 100.0), Request(4, 20.0))
    assert run_dry(scheduler, 0, 1.0) == [0, 2, 4, 3, 1]


def test_the_mean_of_the_quantiles_is_the_length_that_counts() -> None:
    scheduler = one_by_one("shortest")
    gamble = Request(1, 10.0, quantiles=(5.0, 10.0, 3_000.0))
    arrive(scheduler, Request(0, 1.0), gamble, Request(2, 50.0))
    assert run_dry(scheduler, 0, 1.0) == [0, 2, 1]


def test_no_request_is_overtaken_by_one_that_arrives_too_much_later() -> None:
    """Random arrivals: a request that overtakes another arrived less than `patience` of its service times after it."""
    rng = random.Random(8)
    for patience in (0.0, 2.0, 12.0):
        scheduler = one_by_one("shortest", patience=patience, queue_requests_max=1_000)
        arrived_s: dict[int, float] = {}
        service_s: dict[int, float] = {}
        now_s = 0.0
        for request_id in range(200):
            now_s += rng.expovariate(1 / 2.0)
            tokens = rng.lognormvariate(4.0, 1.0)
            arrived_s[request_id], service_s[request_id] = now_s, tokens * SECONDS_PER_TOKEN
            arrive(scheduler, Request(request_id, tokens), now_s=now_s)
        started = run_dry(scheduler, 0, now_s)[1:]
        overtaken = 0
        for place, first in enumerate(started):
            for later in started[place + 1 :]:
                if arrived_s[later] < arrived_s[first]:
                    overtaken += 1
                    assert arrived_s[first] - arrived_s[later] < patience * service_s[later]
        assert (overtaken > 0) == (patience > 0)


def test_a_request_without_a_prediction_counts_as_long_as_the_mean_answer() -> None:
    scheduler = one_by_one("shortest")
    arrive(scheduler, Request(0), Request(1, 10_000.0), Request(2), Request(3, 5.0))
    assert run_dry(scheduler, 0, 1.0) == [0, 3, 2, 1]


def test_predictions_that_rank_nothing_leave_first_come_first_served() -> None:
    scheduler = one_by_one("shortest", trust_window=32)
    rng = random.Random(1)
    for request_id in range(64):  # all of the same length, whatever was predicted
        arrive(scheduler, Request(request_id, rng.uniform(1, 500)))
        step(scheduler, RequestEnded("gpu0", request_id, "completed", rng.uniform(1, 500)))
    assert not scheduler.queues("").binning.trust.trusted
    arrive(scheduler, Request(100, 5.0))
    arrive(scheduler, Request(101, 400.0), now_s=1.0)
    arrive(scheduler, Request(102, 3.0), now_s=2.0)
    assert run_dry(scheduler, 100, 3.0) == [100, 101, 102]


def test_shortest_orders_whole_batches_too() -> None:
    scheduler = new_scheduler(EngineInfo("gpu0", 2, True), order="shortest", bins=2, edges=(100.0,))
    arrive(
        scheduler,
        Request(0, 1.0),
        Request(1, 1.0),
        Request(2, 500.0),
        Request(3, 400.0),
        Request(4, 9.0),
        Request(5, 9.0),
    )
    actions: list[Action] = []
    for request_id in (0, 1):
        actions += step(scheduler, RequestEnded("gpu0", request_id, "completed", 1.0), 1.0)
    assert [
        [request.id for request in action.batch.requests] for action in actions if isinstance(action, StartBatch)
    ] == [[4, 5]]


def test_the_earliest_deadline_goes_first_and_undated_requests_after_a_minute() -> None:
    scheduler = one_by_one("edf")
    arrive(scheduler, Request(0), Request(1), Request(2, deadline_s=90.0), Request(3, deadline_s=30.0))
    assert run_dry(scheduler, 0, 1.0) == [0, 3, 1, 2]


def test_a_late_request_is_dropped_before_it_runs() -> None:
    scheduler = one_by_one("edf")
    arrive(scheduler, Request(0), Request(1, deadline_s=5.0), Request(2, deadline_s=50.0))
    assert step(scheduler, TimerFired(), 6.0) == [FailRequest(1, "deadline_exceeded", None)]
    assert run_dry(scheduler, 0, 6.0) == [0, 2]


def test_a_batch_of_several_is_taken_in_parts_in_the_order_of_its_requests() -> None:
    scheduler = new_scheduler(REFILL, order="fffs", release="full")
    arrive(scheduler, 1, 2, 3, 4)
    (action,) = step(scheduler, RequestEnded("gpu0", 2, "completed", 5.0), 1.0)
    assert isinstance(action, StartBatch)
    assert [request.id for request in action.batch.requests] == [3]
