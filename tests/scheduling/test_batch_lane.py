"""Items of batch jobs in the scheduler: they take what online requests leave, and count as online when they are due."""

from __future__ import annotations

import msgspec

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    DrainRequested,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    PreemptBatch,
    ReportDue,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig

SECONDS_PER_TOKEN = 0.02  # the scheduler's guess until the first answer


def item(id_: int, tokens: float = 100.0, **more: object) -> Request:
    return Request(id_, tokens, background=True, share="job", **more)  # type: ignore[arg-type]


class Driven:
    """A scheduler with one engine, and what it has done."""

    def __init__(self, slots: int, *, barrier: bool = False, **settings: object) -> None:
        config = SchedulingConfig(**settings).resolved(barrier=barrier)  # type: ignore[arg-type]
        self.scheduler: Scheduler = config.scheduler()
        self.step(EngineReady(EngineInfo("e", slots, barrier)))

    def step(self, event: Event, now_s: float = 0.0) -> list[Action]:
        return self.scheduler.handle(event, now_s)

    def arrive(self, *requests: Request, now_s: float = 0.0) -> list[int]:
        """Returns the requests that started."""
        return [id_ for request in requests for id_ in started(self.step(RequestArrived(request), now_s))]


def started(actions: list[Action]) -> list[int]:
    return [request.id for action in actions if isinstance(action, StartBatch) for request in action.batch.requests]


def test_items_take_every_slot_while_nobody_else_came() -> None:
    driven = Driven(slots=3)
    assert driven.arrive(*[item(id_) for id_ in range(5)]) == [0, 1, 2]
    assert started(driven.step(RequestEnded("e", 1, "completed", 100.0), 1.0)) == [3]


def test_an_online_request_comes_before_every_item_that_waits() -> None:
    driven = Driven(slots=1)
    driven.arrive(item(0), item(1))
    assert driven.arrive(Request(2, 50.0), now_s=0.5) == []
    assert started(driven.step(RequestEnded("e", 0, "completed", 100.0), 1.0)) == [2]


def test_items_start_by_the_ends_of_their_windows() -> None:
    driven = Driven(slots=1)
    driven.arrive(item(0), item(1, deadline_s=9_000.0), item(2, deadline_s=3_000.0))
    assert started(driven.step(RequestEnded("e", 0, "completed", 100.0), 1.0)) == [2]


def test_an_item_whose_latest_start_has_come_counts_as_online() -> None:
    driven = Driven(slots=1)
    driven.arrive(Request(0, 100.0), Request(1, 100.0))
    driven.arrive(item(2, deadline_s=100.0))
    wakes_s: list[float] = []
    due: list[Action] = []
    while not due:
        assert driven.scheduler.wake_at_s is not None
        wakes_s.append(driven.scheduler.wake_at_s)
        due = driven.step(TimerFired(), wakes_s[-1])
    assert due == [ReportDue(2)]
    # The other share waits, too: half of the slot is the item's, so its 100 tokens take four seconds, not two.
    assert 96.0 <= wakes_s[-1] < 96.1
    assert driven.arrive(item(3, deadline_s=1_000.0), now_s=wakes_s[-1]) == []


def test_what_follows_an_item_in_its_job_moves_its_latest_start() -> None:
    driven = Driven(slots=1)
    driven.arrive(Request(0, 100.0), Request(1, 100.0))
    actions = driven.step(RequestArrived(item(2, deadline_s=100.0, after_tokens=2_500.0)))
    assert actions == []
    assert driven.scheduler.wake_at_s is not None
    assert driven.step(TimerFired(), driven.scheduler.wake_at_s) == [ReportDue(2)]  # 104 s of work for 100 s


def test_an_item_fails_when_its_window_closes() -> None:
    driven = Driven(slots=1)
    driven.arrive(Request(0, 100.0), item(1, tokens=1e-3, deadline_s=5.0))
    while (now_s := driven.scheduler.wake_at_s) is not None and now_s < 5.0:
        driven.step(TimerFired(), now_s)
    assert driven.step(TimerFired(), 5.0) == [FailRequest(1, "deadline_exceeded")]
    assert not driven.scheduler.has(1)


def test_items_that_wait_can_be_cancelled_and_end_with_a_drain() -> None:
    driven = Driven(slots=1)
    driven.arrive(item(0), item(1), item(2))
    assert driven.step(RequestCancelled(1)) == []
    assert [action for action in driven.step(DrainRequested()) if isinstance(action, FailRequest)] == [
        FailRequest(2, "draining")
    ]


def test_an_item_that_ran_in_vain_counts_as_online() -> None:
    driven = Driven(slots=1)
    driven.step(EngineReady(EngineInfo("f", 1, False)))
    driven.arrive(item(0), item(1))
    actions = driven.step(EngineLost("e"), 1.0)
    assert ReportDue(0) in actions or ReportDue(1) in actions


def test_a_barrier_engine_gets_the_longest_items_together() -> None:
    driven = Driven(slots=2, barrier=True, batch_size=2)
    driven.arrive(item(0), item(1, 10.0), item(2, 90.0), item(3, 12.0), item(4, 80.0))
    actions = driven.step(RequestEnded("e", 0, "completed", 100.0), 1.0)
    assert started(actions) == [2, 4]


def test_surplus_costs_the_share_of_a_job_nothing() -> None:
    driven = Driven(slots=4)
    driven.arrive(*[item(id_) for id_ in range(4)])
    queues = driven.scheduler.queues("")
    assert queues.fair.of("job", 1.0).served == 0.0


def test_the_rate_of_a_share_is_that_of_its_part_of_the_slots() -> None:
    driven = Driven(slots=4)
    background = driven.scheduler.batch_lane
    assert background.tokens_per_s(item(0)) == 4 / SECONDS_PER_TOKEN
    driven.arrive(*[Request(id_, 100.0, share="chat") for id_ in range(5)])
    assert background.tokens_per_s(item(9)) == 2 / SECONDS_PER_TOKEN
    assert Driven(slots=0).scheduler.batch_lane.tokens_per_s(item(0)) == 0.0


def test_items_leave_the_slots_that_arrivals_were_seen_to_want() -> None:
    """Pairs of requests come every second: with one slot left free, the second of a pair would wait for an item."""
    driven = Driven(slots=8, line_stops=0.0)
    now_s = 0.0
    for pair in range(200):
        now_s = float(pair)
        ids = (10 * pair, 10 * pair + 1)
        assert driven.arrive(*[Request(id_, 25.0) for id_ in ids], now_s=now_s) == [*ids]
        for id_ in ids:
            driven.step(RequestEnded("e", id_, "completed", 25.0), now_s + 0.5)
    items = [item(100_000 + id_, 200.0) for id_ in range(8)]
    running = driven.arrive(*items, now_s=now_s + 0.75)
    assert 4 <= len(running) <= 6
    driven = Driven(slots=8, line_stops=0.0)
    assert len(driven.arrive(*items)) == 8


# ---- items that may be stopped --------------------------------------------------------------------------------------


def stopped(actions: list[Action]) -> list[int]:
    return [id_ for action in actions if isinstance(action, PreemptBatch) for id_ in action.request_ids]


def test_an_online_request_stops_the_item_that_has_begun_last_and_takes_its_slot() -> None:
    driven = Driven(slots=2)
    driven.arrive(item(0))
    driven.step(RequestArrived(item(1)), 1.0)
    assert stopped(driven.step(RequestArrived(Request(2, 50.0)), 2.0)) == [1]
    assert stopped(driven.step(TimerFired(), 2.0)) == [], "the slot is on its way"
    assert started(driven.step(RequestEnded("e", 1, "cancelled"), 2.1)) == [2]
    assert driven.scheduler.queues("").fair.of("job", 1.0).served == 0.0
    assert started(driven.step(RequestEnded("e", 2, "completed", 50.0), 3.0)) == [1], "it runs again, as an item"


def test_an_item_that_ends_while_it_is_stopped_has_ended() -> None:
    driven = Driven(slots=1)
    driven.arrive(item(0))
    driven.step(RequestArrived(Request(1, 50.0)), 1.0)
    assert started(driven.step(RequestEnded("e", 0, "completed", 100.0), 1.1)) == [1]
    assert not driven.scheduler.has(0)


def test_an_item_that_would_end_after_its_window_if_it_began_anew_is_not_stopped() -> None:
    driven = Driven(slots=1)
    driven.arrive(item(0, deadline_s=2.5))
    assert stopped(driven.step(RequestArrived(Request(1, 50.0)), 1.0)) == []


def test_no_more_items_are_stopped_than_requests_wait() -> None:
    driven = Driven(slots=4)
    driven.arrive(*[item(id_) for id_ in range(6)])
    assert len(stopped(driven.step(RequestArrived(Request(10, 50.0)), 1.0))) == 1
    assert len(stopped(driven.step(RequestArrived(Request(11, 50.0)), 1.0))) == 1
    for id_ in (2, 3):
        driven.step(RequestEnded("e", id_, "cancelled"), 1.1)
    assert driven.scheduler.waiting == 0
    assert stopped(driven.step(TimerFired(), 1.2)) == []


def test_an_item_that_is_stopped_during_a_drain_fails() -> None:
    driven = Driven(slots=1)
    driven.arrive(item(0))
    driven.step(RequestArrived(Request(1, 50.0)), 1.0)
    driven.step(DrainRequested(), 1.0)
    assert FailRequest(0, "draining") in [
        msgspec.structs.replace(action, retry_after_s=None)
        for action in driven.step(RequestEnded("e", 0, "cancelled"), 1.1)
        if isinstance(action, FailRequest)
    ]


def test_one_slot_is_kept_free_for_twenty_items_times_after_an_arrival_not_longer() -> None:
    driven = Driven(slots=1, line_stops=0.0)
    driven.arrive(item(0))
    driven.step(RequestArrived(Request(1, 50.0)), 0.5)
    driven.step(RequestEnded("e", 0, "completed", 100.0), 2.0)
    driven.step(RequestEnded("e", 1, "completed", 50.0), 3.0)
    driven.arrive(item(2), now_s=3.0)
    while not (ids := started(driven.step(TimerFired(), now_s := driven.scheduler.wake_at_s or 0.0))):
        assert now_s < 100.0
    assert ids == [2]
    assert 30.0 < now_s < 45.0, "an item takes two seconds"


def test_items_that_get_too_little_for_their_window_use_the_reserve() -> None:
    """As above, but while items end at 50 tokens a second."""
    for window_s, beyond in ((100_000.0, False), (400.0, True)):
        driven = Driven(slots=8, line_stops=0.0)
        driven.arrive(item(100_000, 200.0, deadline_s=window_s, after_tokens=60_000.0))
        for pair in range(200):
            now_s = float(pair)
            driven.arrive(*[Request(10 * pair + place, 25.0) for place in (0, 1)], now_s=now_s)
            for place in (0, 1):
                driven.step(RequestEnded("e", 10 * pair + place, "completed", 25.0), now_s + 0.5)
            if pair % 4 == 3:
                now_s += 0.75
                driven.arrive(item(100_001 + pair, 200.0, deadline_s=window_s, after_tokens=60_000.0), now_s=now_s)
                ran = [id_ for id_ in driven.scheduler.engines["e"].running if id_ >= 100_000]
                driven.step(RequestEnded("e", ran[0], "completed", 200.0), now_s)
        items = [item(200_000 + id_, 200.0, deadline_s=window_s, after_tokens=60_000.0) for id_ in range(8)]
        driven.arrive(*items, now_s=199.8)
        driven.step(TimerFired(), 201.5)
        running = [id_ for id_ in driven.scheduler.engines["e"].running if id_ >= 100_000]
        assert (len(running) == 8) is beyond
