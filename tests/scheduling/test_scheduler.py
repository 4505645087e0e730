"""The scheduler's contract: events in, actions out."""

import math
import random

import pytest
from scheduling.checked_step import step

from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    BatchEnded,
    DrainRequested,
    EngineLost,
    EngineReady,
    FailRequest,
    ReportTrust,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.scheduler import Scheduler
from llmserve.scheduling.trust import Trust
from llmserve.settings.policies import SchedulingConfig

BARRIER = EngineInfo("gpu0", slots=2, barrier=True)
REFILL = EngineInfo("gpu0", slots=2, barrier=False)


def new_scheduler(*engines: EngineInfo, **config: object) -> Scheduler:
    """By default, batches of 2 from one bin, released when full."""
    values = {"bins": 1, "batch_size": 2, "release": "full", "order": "fffs", **config}
    scheduler = SchedulingConfig(**values).scheduler()  # type: ignore[arg-type]
    for engine in engines:
        scheduler.handle(EngineReady(engine), 0.0)
    return scheduler


def arrive(scheduler: Scheduler, *requests: Request | int, now_s: float = 0.0) -> list[Action]:
    actions: list[Action] = []
    for request in requests:
        event = RequestArrived(request if isinstance(request, Request) else Request(request))
        actions += step(scheduler, event, now_s)
    return actions


def batch(batch_id: int, *ids: int, bin_index: int = 0, formed_at_s: float = 0.0, size: int = 0) -> Batch:
    return Batch(batch_id, bin_index, tuple(Request(id_) for id_ in ids), formed_at_s, size or len(ids))


# ---- release ----


def test_full_bin_forms_a_batch_at_once() -> None:
    scheduler = new_scheduler(BARRIER)
    assert arrive(scheduler, 1) == []
    assert arrive(scheduler, 2) == [StartBatch("gpu0", batch(1, 1, 2))]


def test_each_bin_fills_on_its_own() -> None:
    scheduler = new_scheduler(BARRIER, bins=2, edges=(100.0,))
    short, long_ = Request(1, 50.0), Request(2, 500.0)
    assert arrive(scheduler, short, long_) == []
    third = Request(3, 60.0)
    assert arrive(scheduler, third) == [StartBatch("gpu0", Batch(1, 0, (short, third), 0.0, 2))]


def test_a_request_without_prediction_waits_in_the_first_bin() -> None:
    scheduler = new_scheduler(BARRIER, bins=2, edges=(100.0,))
    arrive(scheduler, 1)
    assert len(scheduler.queues("").bins[0]) == 1


def test_timeout_releases_requests_that_have_waited_long_enough() -> None:
    scheduler = new_scheduler(BARRIER, release="timeout", batch_wait_s=5.0)
    assert arrive(scheduler, 1, now_s=1.0) == []
    assert scheduler.wake_at_s == 6.0
    assert step(scheduler, TimerFired(), 5.9) == []
    assert step(scheduler, TimerFired(), 6.0) == [StartBatch("gpu0", batch(1, 1, formed_at_s=6.0))]
    assert scheduler.wake_at_s is None


def test_a_due_release_happens_at_any_event_not_only_at_the_timer() -> None:
    scheduler = new_scheduler(BARRIER, release="timeout", batch_wait_s=5.0, bins=2, edges=(100.0,))
    arrive(scheduler, Request(1, 1.0))
    actions = arrive(scheduler, Request(2, 200.0), now_s=7.0)
    assert actions == [StartBatch("gpu0", Batch(1, 0, (Request(1, 1.0),), 7.0, 1))]


def test_greedy_never_lets_an_engine_idle() -> None:
    scheduler = new_scheduler(BARRIER, release="greedy")
    assert arrive(scheduler, 1) == [StartBatch("gpu0", batch(1, 1))]
    assert arrive(scheduler, 2) == []
    assert step(scheduler, RequestEnded("gpu0", 1, "completed", 10), 1.0) == [
        StartBatch("gpu0", batch(2, 2, formed_at_s=1.0))
    ]


def test_greedy_takes_the_bin_whose_oldest_request_waits_longest() -> None:
    scheduler = new_scheduler(BARRIER, release="greedy", bins=2, edges=(100.0,))
    arrive(scheduler, Request(1, 1.0))
    arrive(scheduler, Request(2, 500.0), now_s=1.0)
    arrive(scheduler, Request(3, 1.0), now_s=2.0)
    actions = step(scheduler, RequestEnded("gpu0", 1, "completed", 10), 3.0)
    assert actions == [StartBatch("gpu0", Batch(2, 1, (Request(2, 500.0),), 3.0, 1))]


def test_full_batches_form_while_every_engine_is_busy_and_keep_their_order() -> None:
    scheduler = new_scheduler(BARRIER)
    arrive(scheduler, 1, 2, 3, 4, 5, 6)
    assert step(scheduler, BatchEnded("gpu0", 1, {1: 5.0, 2: 9.0}), 1.0) == [StartBatch("gpu0", batch(2, 3, 4))]
    assert step(scheduler, BatchEnded("gpu0", 2, {3: 5.0, 4: 9.0}), 2.0) == [StartBatch("gpu0", batch(3, 5, 6))]


# ---- engines ----


def test_a_barrier_engine_is_busy_until_its_longest_request_ends() -> None:
    scheduler = new_scheduler(BARRIER)
    arrive(scheduler, 1, 2, 3, 4)
    assert step(scheduler, RequestEnded("gpu0", 1, "completed", 5), 1.0) == []
    assert step(scheduler, RequestEnded("gpu0", 2, "completed", 9), 2.0) == [StartBatch("gpu0", batch(2, 3, 4))]


def test_a_refill_engine_refills_each_slot_from_the_next_batch_in_order() -> None:
    scheduler = new_scheduler(REFILL)
    arrive(scheduler, 1, 2, 3, 4)
    assert step(scheduler, RequestEnded("gpu0", 2, "completed", 5), 1.0) == [StartBatch("gpu0", batch(2, 3, size=2))]
    assert step(scheduler, RequestEnded("gpu0", 1, "completed", 9), 2.0) == [StartBatch("gpu0", batch(2, 4, size=2))]


def test_the_engine_with_the_most_free_slots_is_used_first() -> None:
    small, large = EngineInfo("a", 2, False), EngineInfo("b", 4, False)
    scheduler = new_scheduler(small, large)
    assert arrive(scheduler, 1, 2) == [StartBatch("b", batch(1, 1, 2))]
    assert arrive(scheduler, 3, 4) == [StartBatch("a", batch(2, 3, 4))]


def test_a_batch_waits_for_the_first_engine_that_comes_up() -> None:
    scheduler = new_scheduler(BARRIER)
    step(scheduler, EngineLost("gpu0"), 1.0)
    step(scheduler, EngineReady(BARRIER), 2.0)
    assert arrive(scheduler, 1, 2, now_s=2.0) == [StartBatch("gpu0", batch(1, 1, 2, formed_at_s=2.0))]


# ---- cancellation, in every state ----


def test_a_request_cancelled_in_its_bin_takes_no_place_in_a_batch() -> None:
    scheduler = new_scheduler(BARRIER)
    arrive(scheduler, 1)
    assert step(scheduler, RequestCancelled(1)) == []
    assert arrive(scheduler, 2, 3) == [StartBatch("gpu0", batch(1, 2, 3))]


def test_a_request_cancelled_in_a_formed_batch_leaves_it() -> None:
    scheduler = new_scheduler(BARRIER)
    arrive(scheduler, 1, 2, 3, 4)
    step(scheduler, RequestCancelled(3))
    assert step(scheduler, BatchEnded("gpu0", 1, {1: 1.0, 2: 1.0})) == [StartBatch("gpu0", batch(2, 4, size=2))]


def test_a_batch_whose_every_client_has_left_is_never_started() -> None:
    scheduler = new_scheduler(BARRIER)
    arrive(scheduler, 1, 2, 3, 4)
    step(scheduler, RequestCancelled(3))
    step(scheduler, RequestCancelled(4))
    assert step(scheduler, BatchEnded("gpu0", 1, {1: 1.0, 2: 1.0})) == []
    assert not scheduler.requests


def test_a_running_request_is_aborted_and_keeps_its_slot_until_the_engine_ends_it() -> None:
    scheduler = new_scheduler(REFILL)
    arrive(scheduler, 1, 2, 3, 4)
    assert step(scheduler, RequestCancelled(1)) == [AbortRequest("gpu0", 1)]
    assert step(scheduler, RequestCancelled(1)) == []
    assert step(scheduler, RequestEnded("gpu0", 1, "cancelled")) == [StartBatch("gpu0", batch(2, 3, size=2))]


def test_a_cancellation_after_the_answer_changes_nothing() -> None:
    scheduler = new_scheduler(BARRIER)
    arrive(scheduler, 1, 2)
    step(scheduler, BatchEnded("gpu0", 1, {1: 1.0, 2: 1.0}))
    assert step(scheduler, RequestCancelled(1)) == []


# ---- failing engines ----


def test_a_lost_engine_loses_no_request_and_its_batch_runs_elsewhere_as_one() -> None:
    spare = EngineInfo("gpu1", 2, True)
    scheduler = new_scheduler(BARRIER, spare)
    arrive(scheduler, 1, 2)
    assert step(scheduler, EngineLost("gpu0"), 1.0) == [StartBatch("gpu1", batch(1, 1, 2))]


def test_a_request_whose_client_has_seen_bytes_fails_with_its_engine() -> None:
    scheduler = new_scheduler(BARRIER)
    arrive(scheduler, 1, 2)
    assert step(scheduler, EngineLost("gpu0", answered=(1,))) == [FailRequest(1, "engine_lost")]
    assert list(scheduler.requests) == [2]


def test_a_returned_batch_goes_before_batches_that_formed_later() -> None:
    scheduler = new_scheduler(BARRIER)
    arrive(scheduler, 1, 2, 3, 4)
    step(scheduler, EngineLost("gpu0"))
    assert step(scheduler, EngineReady(BARRIER), 1.0) == [StartBatch("gpu0", batch(1, 1, 2))]


def test_a_request_is_tried_again_retries_max_times_and_then_fails() -> None:
    scheduler = new_scheduler(REFILL, retries_max=1, release="greedy")
    arrive(scheduler, 1)
    failed = RequestEnded("gpu0", 1, "failed", fault=True, retryable=True)
    assert step(scheduler, failed) == [StartBatch("gpu0", batch(1, 1))]
    assert step(scheduler, failed) == [FailRequest(1, "engine_failed")]


def test_a_failed_request_runs_elsewhere_even_if_its_own_engine_is_free_first() -> None:
    other = EngineInfo("gpu1", 1, False)
    scheduler = new_scheduler(REFILL, other, release="greedy")
    arrive(scheduler, 1, 2, 3)  # 1 and 2 on gpu0 or gpu1 by room, all slots taken
    on_gpu0, on_gpu1 = [next(iter(scheduler.engines[name].running)) for name in ("gpu0", "gpu1")]
    assert step(scheduler, RequestEnded("gpu0", on_gpu0, "failed", fault=True, retryable=True)) == []
    (restart,) = step(scheduler, RequestEnded("gpu1", on_gpu1, "completed", 3))
    assert isinstance(restart, StartBatch)
    assert (restart.engine, [request.id for request in restart.batch.requests]) == ("gpu1", [on_gpu0])


def test_a_request_that_its_engine_refused_for_good_is_not_tried_again() -> None:
    scheduler = new_scheduler(REFILL, release="greedy")
    arrive(scheduler, 1)
    assert step(scheduler, RequestEnded("gpu0", 1, "failed")) == []
    assert not scheduler.requests


def test_a_stale_end_from_a_lost_engine_is_ignored() -> None:
    scheduler = new_scheduler(BARRIER)
    arrive(scheduler, 1, 2)
    step(scheduler, EngineLost("gpu0"))
    assert step(scheduler, RequestEnded("gpu0", 1, "completed", 5)) == []
    assert sorted(scheduler.requests) == [1, 2]


def test_without_any_engine_requests_are_refused_and_waiting_ones_fail_after_engine_wait_s() -> None:
    scheduler = new_scheduler(BARRIER, engine_wait_s=30.0)
    arrive(scheduler, 1)
    step(scheduler, EngineLost("gpu0"), 10.0)
    assert arrive(scheduler, 2, now_s=11.0) == [FailRequest(2, "no_engine")]
    assert scheduler.wake_at_s == 40.0
    assert step(scheduler, TimerFired(), 40.0) == [FailRequest(1, "no_engine")]


def test_before_the_first_engine_is_up_requests_are_refused() -> None:
    assert arrive(new_scheduler(), 1) == [FailRequest(1, "no_engine")]


# ---- limits ----


def test_a_full_queue_refuses_with_the_time_it_will_take_to_drain() -> None:
    scheduler = new_scheduler(BARRIER, queue_requests_max=2)
    arrive(scheduler, 1, 2)
    step(scheduler, RequestEnded("gpu0", 1, "completed", 1), 1.0)
    arrive(scheduler, 3, 4, now_s=1.0)
    step(scheduler, RequestEnded("gpu0", 2, "completed", 1), 2.0)  # 3 and 4 start; one request per second has ended
    arrive(scheduler, 5, 6, now_s=2.0)
    assert arrive(scheduler, 7, now_s=2.0) == [FailRequest(7, "queue_full", retry_after_s=2.0)]


def test_a_queue_of_long_answers_takes_longer_to_drain_than_one_of_as_many_short_ones() -> None:
    """By the forecasts: the answers that have ended were of 100 tokens, one each second."""
    advised_s = []
    for tokens in (10.0, 100.0, 1_000.0):
        scheduler = new_scheduler(REFILL, release="greedy", order="fffs", queue_requests_max=2)
        arrive(scheduler, *[Request(number, 100.0) for number in range(1, 5)])
        for number in range(1, 5):
            step(scheduler, RequestEnded("gpu0", number, "completed", 100), 1.0 * number)
            if number < 3:
                arrive(scheduler, Request(10 + number, 100.0), now_s=1.0 * number)
        arrive(scheduler, Request(20, tokens), Request(21, tokens), now_s=4.0)
        (refused,) = arrive(scheduler, Request(22, 100.0), now_s=4.0)
        advised_s.append(refused.retry_after_s)
    assert advised_s == pytest.approx([0.2, 2.0, 20.0])


def test_a_deadline_that_passes_in_the_queue_costs_no_engine() -> None:
    scheduler = new_scheduler(BARRIER)
    arrive(scheduler, 1, 2)
    late = Request(3, None, 5.0)
    arrive(scheduler, late, 4)
    assert scheduler.wake_at_s == 5.0
    actions = step(scheduler, BatchEnded("gpu0", 1, {1: 1.0, 2: 1.0}), 5.0)
    assert actions == [FailRequest(3, "deadline_exceeded"), StartBatch("gpu0", batch(2, 4, size=2))]


def test_deadlines_of_ended_requests_are_not_kept() -> None:
    scheduler = new_scheduler(REFILL, release="greedy")
    for request_id in range(500):
        arrive(scheduler, Request(request_id, None, 1e6))
        step(scheduler, RequestEnded("gpu0", request_id, "completed", 1))
    assert scheduler.wake_at_s is None
    assert len(scheduler._book.deadlines._heap) <= 64


def test_retry_after_counts_busy_time_only() -> None:
    scheduler = new_scheduler(REFILL, release="greedy", queue_requests_max=1)
    arrive(scheduler, 1, 2)
    step(scheduler, RequestEnded("gpu0", 1, "completed", 1), 1.0)
    step(scheduler, RequestEnded("gpu0", 2, "completed", 1), 2.0)
    arrive(scheduler, 3, 4, 5, now_s=40_000.0)  # after a night without work
    step(scheduler, RequestEnded("gpu0", 3, "completed", 1), 40_001.0)
    step(scheduler, RequestEnded("gpu0", 4, "completed", 1), 40_002.0)
    arrive(scheduler, 6, 7, now_s=40_002.0)
    assert arrive(scheduler, 8, now_s=40_002.0) == [FailRequest(8, "queue_full", retry_after_s=1.0)]


def test_a_deadline_already_passed_is_refused_at_once() -> None:
    scheduler = new_scheduler(BARRIER)
    step(scheduler, TimerFired(), 9.0)
    assert arrive(scheduler, Request(1, None, 8.0), now_s=9.0) == [FailRequest(1, "deadline_exceeded")]


def test_a_drain_releases_every_bin_and_refuses_new_requests() -> None:
    scheduler = new_scheduler(BARRIER)
    arrive(scheduler, 1)
    assert step(scheduler, DrainRequested()) == [StartBatch("gpu0", batch(1, 1))]
    assert arrive(scheduler, 2) == [FailRequest(2, "draining")]


def test_time_never_runs_backwards() -> None:
    scheduler = new_scheduler(BARRIER)
    step(scheduler, TimerFired(), 2.0)
    with pytest.raises(AssertionError, match="backwards"):
        scheduler.handle(TimerFired(), 1.0)


# ---- predictions ----


def test_edges_follow_the_predictions_that_arrive() -> None:
    scheduler = new_scheduler(REFILL, release="greedy", bins=2, edges=(1000.0,), edges_refit_every=2)
    arrive(scheduler, Request(1, 10.0), Request(2, 20.0))
    assert scheduler.queues("").binning.edges.edges == (15.0,)


def test_bins_by_risk_keep_possibly_long_answers_out_of_short_batches() -> None:
    sure, unsure = (90.0, 100.0, 110.0), (10.0, 50.0, 3000.0)
    schedulers = {
        bins_by: new_scheduler(BARRIER, bins=2, edges=(500.0,), bins_by=bins_by, batch_size=8)
        for bins_by in ("risk", "median")
    }
    for scheduler in schedulers.values():
        arrive(scheduler, Request(1, 100.0, quantiles=sure), Request(2, 50.0, quantiles=unsure))
    assert [len(queue) for queue in schedulers["risk"].queues("").bins] == [1, 1]
    assert [len(queue) for queue in schedulers["median"].queues("").bins] == [2, 0]


def feed(scheduler: Scheduler, pairs: list[tuple[float, float]], first_id: int) -> list[ReportTrust]:
    """Requests with (predicted, real) lengths; each ends before the next arrives."""
    actions: list[Action] = []
    for request_id, (predicted, real) in enumerate(pairs, first_id):
        arrive(scheduler, Request(request_id, predicted))
        actions += step(scheduler, RequestEnded("gpu0", request_id, "completed", real))
    return [action for action in actions if isinstance(action, ReportTrust)]


LENGTHS = [float(10 * (i * 7 % 10) + 1) for i in range(32)]
SHUFFLED = [LENGTHS[i] for i in random.Random(0).sample(range(32), 32)]
RIGHT, WRONG = [list(zip(LENGTHS, real, strict=True)) for real in (LENGTHS, SHUFFLED)]


def test_predictions_that_rank_no_answers_leave_one_bin_until_they_rank_again() -> None:
    scheduler = new_scheduler(REFILL, release="greedy", bins=2, batch_size=1, edges=(50.0,), edges_refit_every=0)
    scheduler.queues("").binning.trust = Trust(32)
    assert feed(scheduler, RIGHT, first_id=0) == []
    (lost,) = feed(scheduler, WRONG, first_id=100)
    assert not lost.trusted
    assert lost.rank_correlation is not None
    assert lost.rank_correlation < 2 / math.sqrt(31)
    (started,) = arrive(scheduler, Request(200, 91.0))
    assert isinstance(started, StartBatch)
    assert started.batch.bin == 0, "91 tokens belong into bin 1, but there is one bin now"
    step(scheduler, RequestEnded("gpu0", 200, "completed", 1.0))
    (report,) = feed(scheduler, RIGHT, first_id=300)
    assert report.trusted
    (started,) = arrive(scheduler, Request(400, 91.0))
    assert isinstance(started, StartBatch)
    assert started.batch.bin == 1


def test_waiting_requests_move_to_the_first_bin_when_trust_is_lost() -> None:
    scheduler = new_scheduler(REFILL, release="full", bins=2, batch_size=2, edges=(50.0,), edges_refit_every=0)
    scheduler.queues("").binning.trust = Trust(32)
    arrive(scheduler, Request(90, 99.0))  # alone in bin 1
    for first in range(0, 16, 2):  # all real lengths are equal: no prediction can rank them
        arrive(scheduler, Request(first, 1.0), Request(first + 1, 2.0))
        step(scheduler, RequestEnded("gpu0", first, "completed", 7.0))
        actions = step(scheduler, RequestEnded("gpu0", first + 1, "completed", 7.0))
    assert actions == [ReportTrust(False, None)]
    assert [[queued.request.id for queued in queue] for queue in scheduler.queues("").bins] == [[90], []]
    assert arrive(scheduler, Request(91, 1.0)) == [
        StartBatch("gpu0", Batch(9, 0, (Request(90, 99.0), Request(91, 1.0)), 0.0, 2))
    ]


def test_answers_without_a_prediction_do_not_change_trust() -> None:
    scheduler = new_scheduler(REFILL, release="greedy")
    for request_id in range(40):
        arrive(scheduler, request_id)
        step(scheduler, RequestEnded("gpu0", request_id, "completed", 5.0))
    assert scheduler.queues("").binning.trust.accuracy(4).answers == 0


def test_the_score_that_bins_use_is_the_score_that_is_judged() -> None:
    scheduler = new_scheduler(REFILL, release="greedy", bins=2, batch_size=4, edges=(50.0,), edges_refit_every=0)
    scheduler.queues("").binning.trust = Trust(32)
    sure, unsure = (20.0, 21.0, 22.0), (20.0, 21.0, 900.0)  # one median, two risks
    for request_id in range(64):
        long = request_id % 2 == 1
        arrive(scheduler, Request(request_id, 21.0, quantiles=unsure if long else sure))
        step(scheduler, RequestEnded("gpu0", request_id, "completed", 900.0 if request_id % 4 == 1 else 21.0))
    assert scheduler.queues("").binning.trust.trusted
    assert scheduler.queues("").binning.trust.rank_correlation > 0.5


# ---- edges by answers ----


def test_edges_follow_real_answer_lengths_and_not_predictions() -> None:
    """Of scores 1 to 40 only scores above 30 belong to long answers: the edge is at 30, not in the middle."""
    scheduler = new_scheduler(
        BARRIER, bins=2, release="greedy", edges_by="answers", edges_refit_every=64, edges_window=1024
    )
    lengths = {}
    now_s = 0.0
    for request_id in range(1, 1101):
        score = request_id % 40 + 1
        lengths[request_id] = 1000.0 if score > 30 else 10.0
        now_s += 1.0
        for action in scheduler.handle(RequestArrived(Request(request_id, float(score))), now_s):
            assert isinstance(action, StartBatch)
            ids = [request.id for request in action.batch.requests]
            scheduler.handle(BatchEnded("gpu0", action.batch.id, {id_: lengths[id_] for id_ in ids}), now_s)
        if request_id == 256:
            edges = scheduler.queues("").binning.edges.edges
            assert edges == pytest.approx((20.5,), abs=1.0)  # too few answers: equal mass
    assert scheduler.queues("").binning.edges.edges == (30.5,)
