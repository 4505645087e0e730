"""Tuned: the order changes while requests wait."""

from __future__ import annotations

import pytest
from test_orders import one_by_one, run_dry
from test_scheduler import arrive, new_scheduler, step

from llmserve.live.journal import Header, Step, replay
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import BatchEnded, EngineReady, Event, RequestArrived, RequestEnded, StartBatch, Tuned
from llmserve.settings.policies import SchedulingConfig

REQUESTS = (Request(0, 1.0), Request(1, 300.0), Request(2, 20.0), Request(3, 100.0))


def test_waiting_requests_are_sorted_by_the_new_order_and_later_ones_too() -> None:
    scheduler = one_by_one("fffs")
    arrive(scheduler, *REQUESTS)
    step(scheduler, Tuned({"order": "shortest", "patience": 40.0}))
    arrive(scheduler, Request(4, 50.0))
    assert run_dry(scheduler, 0, 1.0) == [0, 2, 4, 3, 1]


def test_waiting_requests_go_back_to_the_order_of_their_arrival() -> None:
    scheduler = one_by_one("shortest")
    arrive(scheduler, *REQUESTS)
    step(scheduler, Tuned({"order": "fffs"}))
    assert run_dry(scheduler, 0, 1.0) == [0, 1, 2, 3]


def test_boost_measures_the_load_from_the_change_on() -> None:
    scheduler = one_by_one("fffs")
    arrive(scheduler, *REQUESTS)
    step(scheduler, Tuned({"order": "boost"}))
    arrive(scheduler, *[Request(number, 50.0) for number in range(4, 40)])
    order = run_dry(scheduler, 0, 1.0)
    assert order.index(2) < order.index(3) < order.index(1)
    assert order.index(1) > order.index(10)


def test_a_setting_that_is_not_given_is_the_configured_one() -> None:
    """With patience 0 the order of the configuration is that of the arrivals."""
    scheduler = one_by_one("shortest", patience=0.0)
    arrive(scheduler, *REQUESTS)
    step(scheduler, Tuned({"order": "shortest", "patience": 40.0}))
    step(scheduler, Tuned({"order": "shortest"}))
    assert run_dry(scheduler, 0, 1.0) == [0, 1, 2, 3]


def test_a_window_is_sorted_by_the_new_order() -> None:
    """Windows of 2: the first by turn and its only neighbour."""
    scheduler = new_scheduler(
        EngineInfo("gpu0", 2, True), order="fffs", batch_size=2, release="window", window=2, patience=12.0
    )
    arrive(scheduler, Request(0, 9.0))
    arrive(scheduler, Request(1, 800.0), Request(2, 700.0), Request(3, 5.0), Request(4, 6.0))
    step(scheduler, Tuned({"order": "shortest"}))
    actions = step(scheduler, BatchEnded("gpu0", 1, {0: 9.0}), 1.0)
    started = [action.batch.requests for action in actions if isinstance(action, StartBatch)]
    assert [{request.id for request in batch} for batch in started] == [{3, 4}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "flex"}, "cannot change"),
        ({"order": "nosuch"}, "order"),
        ({"order": "shortest", "patience": -1.0}, "patience"),
        ({"patiense": 1.0}, "patiense is no setting"),
    ],
)
def test_settings_of_no_order_are_an_error_and_change_nothing(settings: dict[str, str | float], message: str) -> None:
    scheduler = one_by_one("shortest")
    arrive(scheduler, *REQUESTS)
    with pytest.raises(ValueError, match=message):
        step(scheduler, Tuned(settings))
    assert run_dry(scheduler, 0, 1.0) == [0, 2, 3, 1]


def test_an_order_of_the_moment_cannot_be_changed() -> None:
    scheduler = new_scheduler(EngineInfo("gpu0", 2, True), order="flex", batch_size=2)
    with pytest.raises(ValueError, match="cannot change"):
        step(scheduler, Tuned({"order": "fffs"}))


def test_a_journal_with_a_change_of_the_order_replays() -> None:
    """The second model's queues are made after the change, and follow the new order, too."""
    header = Header(SchedulingConfig(order="fffs", batch_size=1, release="greedy", bins=1))
    scheduler = header.scheduler()
    events: list[Event] = [
        EngineReady(EngineInfo("e", 1, False)),
        RequestArrived(Request(0, 5.0, model="a")),
        Tuned({"order": "shortest", "patience": 40.0}),
        *[RequestArrived(Request(number, 100.0 / number, model="b")) for number in (1, 2, 3)],
        RequestEnded("e", 0, "completed", 5.0),
    ]
    steps = [Step(0.5, event, tuple(scheduler.handle(event, 0.5))) for event in events]
    (start,) = steps[-1].actions
    assert isinstance(start, StartBatch)
    assert start.batch.requests[0].id == 3
    assert replay(header, steps) == steps
