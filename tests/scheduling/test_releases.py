"""Releases that follow a plan: events and a plan in, actions out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from test_scheduler import arrive, batch, new_scheduler, step

from bins.dispatch import DispatchPlan, DispatchTable
from llmserve.commands.simulate import Scenario, simulate
from llmserve.live import journal
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    DispatchSolved,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.queues.waiting import BinQueue, QueuedRequest
from llmserve.scheduling.rates import Arrivals
from llmserve.scheduling.release import Rate, Table
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.report import Summary

BARRIER = EngineInfo("gpu0", slots=8, barrier=True)
REFILL = EngineInfo("gpu0", slots=8, barrier=False)
PLANNED = ("rate-headroom", "deadline", "table")
SIZES = 4  # largest batch
NEVER = (0,) * (SIZES + 1)


def from_(threshold: int, sizes: int = SIZES) -> tuple[int, ...]:
    """Actions of a table that waits for `threshold` requests, then serves all."""
    return tuple([waiting if waiting >= threshold else 0 for waiting in range(sizes + 1)])


def table(
    actions: tuple[int, ...] = NEVER,
    *,
    other: tuple[int, ...] = (),
    advantage: tuple[float, ...] = (),
    service_s: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0),
    wait_s_max: float = 1e9,
) -> DispatchTable:
    """By default, a table that never serves before wait_s_max; a batch of b takes b seconds."""
    return DispatchTable(actions, other, advantage, service_s, service_s, wait_s_max)


def plan(*tables: DispatchTable, bins: int | None = None, **values: float) -> DispatchPlan:
    """A plan with one queue per table; by default there are as many bins."""
    bins = len(tables) if bins is None else bins
    queue_of = tuple([index * len(tables) // bins for index in range(bins)])
    return DispatchPlan(queue_of, tables, **values)  # type: ignore[arg-type]


def following(a_plan: DispatchPlan | None, *engines: EngineInfo, **config: object) -> Scheduler:
    """A scheduler of batches of 4 with this plan in force from the start; edges at 10, 20, ... tokens."""
    bins = 1 if a_plan is None else len(a_plan.queue_of)
    edges = tuple([10.0 * index for index in range(1, bins)])
    values: dict[str, object] = {"bins": bins, "edges": edges, "batch_size": SIZES, "release": "table", **config}
    scheduler = new_scheduler(*(engines or (BARRIER,)), edges_refit_every=0, **values)
    if a_plan is not None:
        step(scheduler, DispatchSolved(a_plan))
    return scheduler


def started(actions: list[Action]) -> list[list[int]]:
    """The requests of each batch that starts."""
    return [[request.id for request in action.batch.requests] for action in actions if isinstance(action, StartBatch)]


def waiting(scheduler: Scheduler) -> list[list[int]]:
    return [[queued.request.id for queued in queue] for queue in scheduler.queues("").bins]


def end(scheduler: Scheduler, batch_id: int, *ids: int, now_s: float) -> list[Action]:
    return step(scheduler, BatchEnded("gpu0", batch_id, dict.fromkeys(ids, 5.0)), now_s)


# ---- table: batch size by queue length ----


def test_a_table_waits_below_its_threshold_beside_an_idle_engine_and_serves_at_it() -> None:
    scheduler = following(plan(table(from_(3))))
    assert arrive(scheduler, 1, 2) == []
    assert arrive(scheduler, 3) == [StartBatch("gpu0", batch(1, 1, 2, 3))]


def test_a_table_may_serve_fewer_requests_than_wait() -> None:
    scheduler = following(plan(table((0, 0, 0, 2, 4))))
    assert started(arrive(scheduler, 1, 2, 3)) == [[1, 2]]
    assert waiting(scheduler) == [[3]]


def test_a_full_bin_is_released_whatever_the_plan_says() -> None:
    scheduler = following(plan(table(NEVER)))
    assert arrive(scheduler, 1, 2, 3) == []
    assert started(arrive(scheduler, 4)) == [[1, 2, 3, 4]]


def test_longer_queues_follow_the_last_entry_of_the_table() -> None:
    scheduler = following(plan(table((0, 1, 2))), batch_size=4)  # entries for up to two requests
    assert started(arrive(scheduler, 1)) == [[1]]
    arrive(scheduler, 2, 3, 4)
    assert started(end(scheduler, 1, 1, now_s=1.0)) == [[2, 3]]


def test_an_engine_that_becomes_free_applies_the_table_again() -> None:
    scheduler = following(plan(table(from_(2))))
    arrive(scheduler, 1, 2)
    assert arrive(scheduler, 3, 4, 5) == []
    assert started(end(scheduler, 1, 1, 2, now_s=1.0)) == [[3, 4, 5]]


def test_an_engine_that_becomes_free_waits_beside_too_few_requests() -> None:
    scheduler = following(plan(table(from_(3))))
    arrive(scheduler, 1, 2, 3, 4)
    assert started(end(scheduler, 1, 1, 2, 3, now_s=1.0)) == []
    assert started(arrive(scheduler, 5, now_s=1.0)) == []
    assert started(arrive(scheduler, 6, now_s=1.0)) == [[4, 5, 6]]


def test_without_a_plan_every_release_is_greedy() -> None:
    for release in PLANNED:
        scheduler = following(None, release=release, batch_wait_s=9.0)
        assert started(arrive(scheduler, 1)) == [[1]], release
        assert started(arrive(scheduler, 2, 3)) == [], release
        assert len(scheduler.queues("").formed) == 0, f"{release}: no batch forms while no engine is free"
        assert scheduler.wake_at_s is None
        assert started(end(scheduler, 1, 1, now_s=1.0)) == [[2, 3]], release


def test_a_new_plan_is_applied_at_once() -> None:
    scheduler = following(plan(table(from_(4))))
    arrive(scheduler, 1, 2)
    assert started(step(scheduler, DispatchSolved(plan(table(from_(2)))), 1.0)) == [[1, 2]]


# ---- table: bounds of the waiting time ----


@pytest.mark.parametrize(("batch_wait_s", "bound_s"), [(None, 6.0), (2.0, 2.0), (9.0, 6.0)])
def test_no_request_waits_beyond_the_plans_bound_or_the_operators(batch_wait_s: float | None, bound_s: float) -> None:
    scheduler = following(plan(table(wait_s_max=6.0)), batch_wait_s=batch_wait_s)
    assert arrive(scheduler, 1, now_s=1.0) == []
    assert arrive(scheduler, 2, now_s=1.5) == []
    assert scheduler.wake_at_s == 1.0 + bound_s
    assert step(scheduler, TimerFired(), 0.9 + bound_s) == []
    assert started(step(scheduler, TimerFired(), 1.0 + bound_s)) == [[1, 2]]
    assert scheduler.wake_at_s is None


def test_the_bound_limits_waiting_beside_a_free_engine() -> None:
    """While no engine is free, no timer is set; when an engine becomes free, overdue requests start at once."""
    scheduler = following(plan(table(wait_s_max=6.0)))
    arrive(scheduler, 1, 2, 3, 4)
    arrive(scheduler, 5, now_s=1.0)
    assert scheduler.wake_at_s is None
    assert step(scheduler, TimerFired(), 50.0) == []
    assert waiting(scheduler) == [[5]]
    assert started(end(scheduler, 1, 1, 2, 3, 4, now_s=60.0)) == [[5]]


@pytest.mark.parametrize("release", ["table", "deadline"])
def test_no_deadline_is_missed_by_waiting_for_a_larger_batch(release: str) -> None:
    """A batch of one takes 1 s, of two 2 s: due at 10 s, it must start at 9 s alone, and at 8 s in a batch of two."""
    scheduler = following(plan(table()), release=release)
    assert arrive(scheduler, Request(1, None, 10.0)) == []
    assert scheduler.wake_at_s == 9.0
    assert arrive(scheduler, 2) == []
    assert scheduler.wake_at_s == 8.0
    assert step(scheduler, TimerFired(), 7.9) == []
    assert started(step(scheduler, TimerFired(), 8.0)) == [[1, 2]]


def test_the_earliest_deadline_in_a_bin_counts_and_that_of_a_cancelled_request_does_not() -> None:
    scheduler = following(plan(table()))
    arrive(scheduler, Request(1, None, 50.0), Request(2, None, 10.0))
    assert scheduler.wake_at_s == 8.0
    scheduler = following(plan(table()))
    arrive(scheduler, Request(1, None, 5.5), Request(2), Request(3), Request(4))  # full: released
    arrive(scheduler, Request(5, None, 50.0), now_s=1.0)
    end(scheduler, 1, 1, 2, 3, 4, now_s=5.0)
    assert scheduler.wake_at_s == 49.0


def test_a_late_request_goes_at_once() -> None:
    scheduler = following(plan(table()))
    assert started(arrive(scheduler, Request(1, None, 0.5))) == [[1]]


@pytest.mark.parametrize("release", PLANNED)
def test_no_timer_fires_endlessly(release: str) -> None:
    """The engine is busy and requests have waited beyond every bound: only the engine's end may release them."""
    impatient = table(wait_s_max=0.5)
    scheduler = following(plan(impatient, impatient, latency_target_s=0.5), release=release, batch_wait_s=0.5)
    arrive(scheduler, *[Request(id_, 5.0) for id_ in range(1, 5)])
    for id_ in range(5, 8):
        arrive(scheduler, Request(id_, 5.0), Request(10 + id_, 15.0, 40.0), now_s=0.1 * id_)
    fired = 0
    while (wake_at_s := scheduler.wake_at_s) is not None and wake_at_s < 40.0:
        fired += 1
        step(scheduler, TimerFired(), wake_at_s)
        assert scheduler.wake_at_s is None or scheduler.wake_at_s > wake_at_s
    assert fired < 5
    assert scheduler.wake_at_s == 40.0, "the deadline in the second bin"
    assert len(scheduler.requests) == 10


# ---- table: slots that refill ----


def test_free_slots_of_a_busy_engine_are_taken_at_once_while_an_idle_engine_waits() -> None:
    scheduler = following(plan(table(from_(3))), REFILL)
    assert arrive(scheduler, 1, 2) == []
    assert started(arrive(scheduler, 3)) == [[1, 2, 3]]
    assert started(arrive(scheduler, 4, now_s=1.0)) == [[4]]
    for id_ in (1, 2, 3, 4):
        assert step(scheduler, RequestEnded("gpu0", id_, "completed", 5.0), 2.0) == []
    assert arrive(scheduler, 5, now_s=3.0) == []


def test_a_full_engine_takes_no_more_requests() -> None:
    scheduler = following(plan(table(from_(1))), EngineInfo("gpu0", slots=2, barrier=False))
    assert started(arrive(scheduler, 1, 2)) == [[1], [2]]
    assert arrive(scheduler, 3, 4) == []
    assert started(step(scheduler, RequestEnded("gpu0", 1, "completed", 5.0), 1.0)) == [[3]]


def test_a_request_joins_a_busy_engine_rather_than_an_idle_one() -> None:
    scheduler = following(plan(table(from_(3))), REFILL, msgspec.structs.replace(REFILL, name="gpu1"))
    (first,) = {action.engine for action in arrive(scheduler, 1, 2, 3) if isinstance(action, StartBatch)}
    (second,) = {action.engine for action in arrive(scheduler, 4, now_s=1.0) if isinstance(action, StartBatch)}
    assert second == first, "an engine with as much room stays idle"


# ---- table: which of several bins ----


def of_two_bins(first: DispatchTable, second: DispatchTable, **config: object) -> list[list[int]]:
    """Request 3 came to the first bin a second before request 4 to the second; then the engine becomes free."""
    scheduler = following(None, bins=2, edges=(10.0,), **config)
    arrive(scheduler, 1)  # before the plan a request goes at once
    step(scheduler, DispatchSolved(plan(first, second)))
    arrive(scheduler, Request(3, 5.0), now_s=1.0)
    arrive(scheduler, Request(4, 15.0), now_s=2.0)
    return started(end(scheduler, 1, 1, now_s=3.0))


def test_of_two_bins_that_waited_too_long_the_older_goes_first() -> None:
    """Otherwise the last bins would starve where the plan makes no request wait."""
    scheduler = following(None, bins=2, edges=(10.0,))
    arrive(scheduler, 1)
    step(scheduler, DispatchSolved(plan(table(from_(1), wait_s_max=0.0), table(from_(1), wait_s_max=0.0))))
    arrive(scheduler, Request(3, 15.0), now_s=1.0)
    arrive(scheduler, Request(4, 5.0), now_s=2.0)
    assert started(end(scheduler, 1, 1, now_s=3.0)) == [[3]]


def test_of_two_bins_the_one_of_larger_advantage_goes_first() -> None:
    small, large = table(from_(1), advantage=(0.0, 1.0)), table(from_(1), advantage=(0.0, 5.0))
    assert of_two_bins(small, large) == [[4]]
    assert of_two_bins(large, small) == [[3]]


def test_of_two_bins_without_advantages_the_one_that_has_waited_longer_goes_first() -> None:
    assert of_two_bins(table(from_(1)), table(from_(1))) == [[3]]


def test_an_overdue_bin_goes_before_any_advantage() -> None:
    large = table(from_(1), advantage=(0.0, 5.0))
    overdue = table(advantage=(0.0, 0.0), wait_s_max=2.0)  # its table alone would never release it
    assert of_two_bins(overdue, large) == [[3]]
    patient = table(advantage=(0.0, 0.0))
    assert of_two_bins(patient, large) == [[4]]
    assert of_two_bins(patient, large, batch_wait_s=2.0) == [[3]]


def test_a_bin_that_waits_leaves_the_engine_to_another() -> None:
    assert of_two_bins(table(from_(2)), table(from_(1))) == [[4]]


def test_full_batches_go_in_order_of_formation_whatever_the_table_says() -> None:
    urgent = table(from_(1), advantage=(0.0, 1e9))
    scheduler = following(plan(table(), urgent))
    arrive(scheduler, *[Request(id_, 5.0) for id_ in range(4)])
    arrive(scheduler, Request(10, 15.0), now_s=1.0)
    arrive(scheduler, *[Request(id_, 5.0) for id_ in range(4, 8)], now_s=2.0)
    assert started(end(scheduler, 1, 0, 1, 2, 3, now_s=3.0)) == [[4, 5, 6, 7]]


# ---- table: a mixture of two policies ----


def share_that_waits(share: float, smaller: int, larger: int, cycles: int = 3_000) -> float:
    """The share of decisions about `smaller` requests on an idle engine that wait for `larger` requests."""
    release = Table(16)
    mixed = table(from_(smaller, 16), other=from_(larger, 16), service_s=(1.0,) * 16)
    release.plan = plan(mixed, share=share)
    queue, waited, id_ = BinQueue(0), 0, 0
    for _ in range(cycles):
        size = 0
        while not size:
            id_ += 1
            queue.append(QueuedRequest(Request(id_), 0, 0.0))
            size = release.size(queue, 0.0, idle=True)
            assert release.size(queue, 0.0, idle=True) == size, "a repeated question has the same answer"
            waited += len(queue) == smaller and not size
        queue.take(size)
    return waited / cycles


@pytest.mark.parametrize(("smaller", "larger"), [(1, 2), (5, 6), (12, 13), (3, 9)])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_the_mixture_keeps_its_share_although_decisions_shift_later_ones(
    share: float, smaller: int, larger: int
) -> None:
    """A request that waits causes a later decision: a regular pattern of draws would turn some shares into 0 or 1."""
    assert share_that_waits(share, smaller, larger) == pytest.approx(share, abs=0.03)  # 3.6 standard errors


def test_a_share_of_zero_or_one_is_a_pure_policy() -> None:
    assert share_that_waits(0.0, 3, 4, cycles=200) == 0.0
    assert share_that_waits(1.0, 3, 4, cycles=200) == 1.0


# ---- merging bins ----

FOUR = plan(*[table()] * 4)
ONE = plan(table(), bins=4)


def test_merging_four_bins_into_one_and_back_keeps_all_requests_in_order_of_arrival() -> None:
    scheduler = following(FOUR, batch_size=8)
    for now_s, (id_, tokens) in enumerate([(1, 35.0), (2, 5.0), (3, 36.0), (4, 15.0), (5, 6.0)]):
        arrive(scheduler, Request(id_, tokens), now_s=float(now_s))
    assert waiting(scheduler) == [[2, 5], [4], [], [1, 3]]
    step(scheduler, DispatchSolved(ONE), 5.0)
    assert waiting(scheduler) == [[1, 2, 3, 4, 5], [], [], []]
    arrive(scheduler, Request(6, 25.0), now_s=6.0)
    assert waiting(scheduler) == [[1, 2, 3, 4, 5, 6], [], [], []]
    step(scheduler, DispatchSolved(FOUR), 7.0)
    assert waiting(scheduler) == [[2, 5], [4], [6], [1, 3]]


def test_bins_that_make_a_full_batch_together_go_when_they_are_merged() -> None:
    scheduler = following(FOUR)
    arrive(scheduler, *[Request(id_, tokens) for id_, tokens in ((1, 35.0), (2, 5.0), (3, 25.0), (4, 15.0), (5, 6.0))])
    assert started(step(scheduler, DispatchSolved(ONE), 1.0)) == [[1, 2, 3, 4]]
    assert waiting(scheduler) == [[5], [], [], []]


def test_neighbouring_bins_wait_in_one_queue() -> None:
    scheduler = following(plan(table(from_(2)), table(from_(2)), bins=4))
    assert arrive(scheduler, Request(1, 5.0), Request(2, 25.0)) == []
    assert arrive(scheduler, Request(3, 35.0)) == [
        StartBatch("gpu0", Batch(1, 1, (Request(2, 25.0), Request(3, 35.0)), 0.0, 2))
    ]


def test_predictions_that_are_not_trusted_leave_one_queue() -> None:
    scheduler = following(FOUR)
    scheduler.queues("").binning.trust.trusted = False
    arrive(scheduler, Request(1, 35.0), Request(2, 5.0))
    assert waiting(scheduler) == [[1, 2], [], [], []]
    step(scheduler, DispatchSolved(plan(table())), 1.0)  # solved for one bin
    scheduler.queues("").binning.trust.trusted = True
    arrive(scheduler, Request(3, 35.0), now_s=2.0)
    assert waiting(scheduler) == [[1, 2, 3], [], [], []], "until a plan for all bins comes"
    step(scheduler, DispatchSolved(FOUR), 3.0)
    assert waiting(scheduler) == [[2], [], [], [1, 3]]


# ---- rate with headroom ----


def queue_of(count: int) -> BinQueue:
    queue = BinQueue(0)
    for id_ in range(count):
        queue.append(QueuedRequest(Request(id_), 0, 0.0))
    return queue


def test_headroom_requires_more_throughput_than_arrivals() -> None:
    """At 2.1 requests/s with batches of a second at least 3 are needed; 2.1 / 0.6 = 3.5; 2.1 / 0.5 = 4.2."""
    arrivals = Arrivals(1)
    for index in range(22):
        arrivals.observe(0, index / 2.1)
    for headroom, size in ((1.0, 3), (0.8, 3), (0.6, 4), (0.5, 5)):
        release = Rate(8, arrivals, headroom)
        release.plan = plan(table(service_s=(1.0,) * 8))
        assert release.preferred(queue_of(1), 10.0) == size


def test_with_headroom_a_lone_request_goes_at_once() -> None:
    scheduler = following(plan(table()), release="rate-headroom")
    assert started(arrive(scheduler, 1)) == [[1]]
    end(scheduler, 1, 1, now_s=100.0)
    assert started(arrive(scheduler, 2, now_s=100.0)) == [[2]], "one request in a hundred seconds"


def hurried(**config: object) -> Scheduler:
    """At 4 arrivals/s and batches of a second only full batches keep up. 5 and 6 wait at 1.5 s."""
    scheduler = following(plan(table(service_s=(1.0,) * 4)), release="rate-headroom", **config)
    for id_ in range(1, 7):
        arrive(scheduler, id_, now_s=0.25 * id_)
    end(scheduler, 1, 1, now_s=1.5)  # the first went alone, as no rate was known
    running = list(scheduler.engines["gpu0"].running)
    if running:
        end(scheduler, 2, *running, now_s=1.5)
    return scheduler


@pytest.mark.parametrize(("batch_wait_s", "bound_s"), [(0.4, 0.4), (None, 1.0)])
def test_with_headroom_no_request_waits_beyond_batch_wait_s_for_an_engine_that_is_free(
    batch_wait_s: float | None, bound_s: float
) -> None:
    """The default limit is BatchMonitor's window."""
    scheduler = hurried(batch_wait_s=batch_wait_s)
    assert waiting(scheduler) == [[6]]
    assert scheduler.wake_at_s == 1.5 + bound_s
    assert step(scheduler, TimerFired(), 1.4 + bound_s) == []
    assert started(step(scheduler, TimerFired(), 1.5 + bound_s)) == [[6]]


def test_with_headroom_no_deadline_is_missed_by_waiting() -> None:
    scheduler = hurried()
    arrive(scheduler, Request(7, None, 2.75), now_s=1.6)
    assert scheduler.wake_at_s == 1.75
    assert started(step(scheduler, TimerFired(), 1.75)) == [[6, 7]]


def test_with_headroom_a_silence_releases_the_last_requests_of_a_burst() -> None:
    """A batch of one suffices below 0.8 arrivals/s. The estimate falls so far in a silence about as long as the
    remembered arrivals would take at that rate.
    """
    scheduler = hurried(batch_wait_s=60.0)
    assert waiting(scheduler) == [[6]]
    wake_at_s = scheduler.wake_at_s
    assert wake_at_s is not None
    assert wake_at_s == pytest.approx(
        1.5 + 6 / 0.8 - 5 * 0.25, rel=0.02
    )  # five gaps, the older ones with slightly lower weight
    assert step(scheduler, TimerFired(), wake_at_s - 0.01) == []
    assert started(step(scheduler, TimerFired(), wake_at_s)) == [[6]]


# ---- the largest batch within the deadline ----


def test_a_batch_goes_before_its_oldest_request_would_miss_the_target() -> None:
    scheduler = following(plan(table(), latency_target_s=10.0), release="deadline")
    assert arrive(scheduler, 1) == []
    assert scheduler.wake_at_s == 9.0
    assert arrive(scheduler, 2, now_s=1.0) == []
    assert scheduler.wake_at_s == 8.0, "a larger batch would take longer"
    assert step(scheduler, TimerFired(), 7.9) == []
    assert started(step(scheduler, TimerFired(), 8.0)) == [[1, 2]]


def test_a_requests_own_deadline_is_kept_where_it_is_earlier_than_the_target() -> None:
    scheduler = following(plan(table(), latency_target_s=10.0), release="deadline")
    arrive(scheduler, Request(1, None, 5.0))
    assert scheduler.wake_at_s == 4.0
    assert started(step(scheduler, TimerFired(), 4.0)) == [[1]]


def test_an_arrival_that_would_make_the_oldest_late_releases_the_batch() -> None:
    scheduler = following(plan(table(), latency_target_s=3.0), release="deadline")
    assert arrive(scheduler, 1) == []
    assert started(arrive(scheduler, 2, now_s=1.5)) == [[1, 2]], "two take 2 s: 1 has been late for that since 1.0"


def test_without_any_deadline_a_batch_waits_until_it_is_full() -> None:
    scheduler = following(plan(table()), release="deadline")
    assert arrive(scheduler, 1, 2, 3) == []
    assert scheduler.wake_at_s is None
    assert started(arrive(scheduler, 4)) == [[1, 2, 3, 4]]


def test_late_requests_form_no_small_batches_while_the_engine_is_busy() -> None:
    scheduler = following(plan(table(), latency_target_s=0.5), release="deadline")
    assert started(arrive(scheduler, 1)) == [[1]]
    for id_ in (2, 3, 4):
        assert arrive(scheduler, id_, now_s=float(id_)) == []
    assert started(end(scheduler, 1, 1, now_s=5.0)) == [[2, 3, 4]]


# ---- static ----


def test_static_releases_only_batches_of_its_size() -> None:
    scheduler = new_scheduler(BARRIER, release="static:2", batch_size=8)
    assert arrive(scheduler, 1) == []
    assert started(arrive(scheduler, 2)) == [[1, 2]]
    arrive(scheduler, 3, 4, 5, 6, 7)
    assert started(end(scheduler, 1, 1, 2, now_s=1.0)) == [[3, 4]]
    assert waiting(scheduler) == [[7]]


# ---- whole runs ----

OBJECTIVES = {
    "rate-headroom": DispatchConfig(),
    "deadline": DispatchConfig(latency_target_s=20.0),
    "table": DispatchConfig(latency_target_s=8.0),
}


def run(release: str, path: Path | None = None, **values: object) -> int:
    """Of 600 requests, the number that complete when bins are not flushed after the last arrival."""
    scenario = Scenario(
        **{"requests": 600, "load": 0.2, "profile": "h100-llama-3.1-8b", "barrier": True, "seed": 3, **values},  # type: ignore[arg-type]
        last_batch="drop",
    )
    scheduling = SchedulingConfig(
        release=release, bins=4, batch_size=16, queue_requests_max=10**9, edges_refit_every=50
    )
    summary = simulate(scenario, scheduling, dispatch=OBJECTIVES.get(release), journal_path=path)
    return summary.completed


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("release", [*PLANNED, "static:4"])
def test_a_journal_replays_to_itself(tmp_path: Path, release: str, barrier: bool) -> None:
    path = tmp_path / "journal.jsonl"
    run(release, path, barrier=barrier, slots=16, predictions="lognormal:0.4")
    header, steps = journal.read(path)
    assert sum(isinstance(step.event, DispatchSolved) for step in steps) >= (2 if release in PLANNED else 0)
    assert sum(isinstance(action, StartBatch) for step in steps for action in step.actions) > 30
    assert journal.replay(header, steps) == steps


@pytest.mark.parametrize("release", ["rate-headroom", "deadline", "table"])
def test_all_requests_complete_without_further_arrivals(release: str) -> None:
    assert run(release) == 600


def at_low_load(release: str, bins: int, **objective: float) -> Summary:
    """4,000 requests at 5 % of the rate that full batches of 32 equal requests serve."""
    scenario = Scenario(
        requests=4_000,
        arrival_rate=0.84,
        lengths="lognormal:5.2,0.55",
        profile="h100-llama-3.1-8b",
        barrier=True,
        seed=1,
    )
    scheduling = SchedulingConfig(release=release, bins=bins, batch_size=32, queue_requests_max=10**9)
    return simulate(scenario, scheduling, dispatch=DispatchConfig(**objective))  # type: ignore[arg-type]


def test_at_low_load_bins_cost_a_table_nothing() -> None:
    """Greedy takes half as long again in eight bins as in one; a plan merges the bins."""
    alone, eight = at_low_load("greedy", 1), at_low_load("greedy", 8)
    assert eight.latency_s_mean > 1.4 * alone.latency_s_mean
    assert at_low_load("table", 8).latency_s_mean < 1.02 * alone.latency_s_mean


def test_a_latency_target_is_met_for_much_less_energy() -> None:
    greedy, table_ = at_low_load("greedy", 1), at_low_load("table", 8, latency_target_s=8.0)
    assert 0.9 * 8.0 < table_.latency_s_mean < 1.03 * 8.0
    assert table_.energy_j is not None
    assert greedy.energy_j is not None
    assert table_.energy_j < 0.6 * greedy.energy_j


def test_full_batches_leave_the_last_requests_behind() -> None:
    """The contrast to the tests above."""
    assert run("static:16") < 600
