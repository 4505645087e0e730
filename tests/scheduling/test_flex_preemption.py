"""FLEX's preemption: a smaller batch is stopped for a larger one, and engines may be lost meanwhile."""

from test_flex import (  # noqa: F401
    arrive,
    due,
    ends,
    engines_have_shown_how_fast_they_are,
    failed,
    gpu,
    line,
    new_scheduler,
    preempted,
    several,
    starts,
    step,
    stops,
)

from llmserve.request import Request
from llmserve.scheduling.messages import (
    AbortRequest,
    AnswerBegan,
    EngineClosed,
    EngineLost,
    EngineReady,
    RequestCancelled,
    RequestEnded,
    TimerFired,
)
from llmserve.scheduling.scheduler import Scheduler


def test_a_batch_3_03_times_as_large_preempts_and_one_3_02_times_as_large_does_not() -> None:
    scheduler = new_scheduler(gpu(slots=400, speed=line(0.01, sizes=400)), batch_size=400)
    arrive(scheduler, due(999))
    arrive(scheduler, *several(100, model="a"))
    assert starts(ends(scheduler, "gpu0", 999, now_s=0.0)) == [("gpu0", list(range(100)))]
    assert arrive(scheduler, *several(302, model="b", first=100)) == []
    assert preempted(arrive(scheduler, due(402, model="b"))) == [("gpu0", tuple(range(100)))]


def test_preempted_requests_that_run_again_in_the_larger_batch_count() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(0))
    assert arrive(scheduler, *several(2, first=1)) == []
    actions = arrive(scheduler, due(3))  # the new batch: 1, 2, 3 and again 0
    assert preempted(actions) == [("gpu0", (0,))]
    assert starts(stops(scheduler, "gpu0", 0, now_s=0.5)) == [("gpu0", [0, 1, 2, 3])]


def test_a_larger_batch_that_would_be_late_preempts_nothing() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(0))
    assert preempted(arrive(scheduler, *several(9, 3.0, "b", first=1))) == []
    assert preempted(arrive(scheduler, *several(4, 4.0, "b", first=10))) == [("gpu0", (0,))]


def test_the_smallest_batch_is_preempted() -> None:
    scheduler = new_scheduler(gpu("gpu0"), gpu("gpu1"), batch_size=8)
    arrive(scheduler, due(0), due(1))
    arrive(scheduler, *several(2, first=2))
    assert starts(ends(scheduler, "gpu0", 0, now_s=1.0)) == [("gpu0", [2, 3])]
    assert preempted(arrive(scheduler, *several(4, model="b", first=4), now_s=1.0)) == [("gpu1", (1,))]


def test_the_freed_engine_is_kept_for_the_larger_batch() -> None:
    """Two requests leave one by one; no other batch starts there, though it is the only engine."""
    scheduler = new_scheduler()
    arrive(scheduler, due(90))
    arrive(scheduler, *several(2, 99.0, "a"))
    assert starts(ends(scheduler, "gpu0", 90, now_s=1.0)) == [("gpu0", [0, 1])]
    assert preempted(arrive(scheduler, *several(7, 99.0, "b", first=10), now_s=1.0)) == [("gpu0", (0, 1))]
    assert stops(scheduler, "gpu0", 0, now_s=1.1) == []
    assert arrive(scheduler, *several(8, 99.0, "c", first=20), now_s=1.1) == []
    assert starts(stops(scheduler, "gpu0", 1, now_s=1.2)) == [("gpu0", list(range(10, 17)))]


def test_requests_that_arrive_meanwhile_join_the_batch() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(0, 99.0, "a"))
    assert preempted(arrive(scheduler, *several(4, 99.0, "b", first=1))) == [("gpu0", (0,))]
    arrive(scheduler, due(5, 99.0, "b"))
    assert starts(stops(scheduler, "gpu0", 0, now_s=0.1)) == [("gpu0", [1, 2, 3, 4, 5])]


def test_a_preempted_request_keeps_its_arrival_time() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(0, 20.0, "a"), now_s=2.0)
    arrive(scheduler, *several(4, 8.0, "b", first=1), now_s=3.0)
    stops(scheduler, "gpu0", 0, now_s=3.5)
    waits = scheduler.requests[0]
    assert (waits.arrived_at_s, waits.request.deadline_s, waits.retries) == (2.0, 20.0, 0)
    assert starts(ends(scheduler, "gpu0", 1, 2, 3, 4, now_s=7.5)) == [("gpu0", [0])]


def test_a_preempted_request_that_cannot_be_in_time_fails_at_once() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(90))
    arrive(scheduler, due(0, 3.2, "a"), due(1, 99.0, "a"))
    assert starts(ends(scheduler, "gpu0", 90, now_s=1.0)) == [("gpu0", [0, 1])]
    assert preempted(arrive(scheduler, *several(7, 99.0, "b", first=2), now_s=2.5)) == [("gpu0", (0, 1))]
    assert failed(stops(scheduler, "gpu0", 0, now_s=2.6)) == [(0, "deadline_exceeded")]
    assert failed(stops(scheduler, "gpu0", 1, now_s=2.6)) == []
    assert 1 in scheduler.requests


def test_a_request_is_not_preempted_after_its_first_byte() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(0))
    step(scheduler, AnswerBegan(0))
    assert preempted(arrive(scheduler, *several(9, model="b", first=1))) == []
    assert starts(ends(scheduler, "gpu0", 0, now_s=1.0)) == [("gpu0", list(range(1, 10)))]


def test_a_first_byte_of_an_earlier_run_does_not_protect_a_later_run() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(0))
    step(scheduler, AnswerBegan(0))
    step(scheduler, RequestEnded("gpu0", 0, "failed", fault=True, retryable=True), 1.0)  # the byte was of another run
    assert preempted(arrive(scheduler, *several(9, model="b", first=1), now_s=1.0)) == [("gpu0", (0,))]


def test_a_cancelled_request_does_not_run_again() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(90))
    arrive(scheduler, *several(2, 99.0, "a"))
    ends(scheduler, "gpu0", 90, now_s=1.0)
    assert preempted(arrive(scheduler, *several(7, 99.0, "b", first=10), now_s=1.0)) == [("gpu0", (0, 1))]
    assert step(scheduler, RequestCancelled(0), 1.1) == [AbortRequest("gpu0", 0)]
    assert starts(stops(scheduler, "gpu0", 0, 1, now_s=1.2)) == [("gpu0", list(range(10, 17)))]
    assert 0 not in scheduler.requests
    assert 1 in scheduler.requests


def test_a_request_cancelled_before_the_preemption_is_not_preempted() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(90))
    arrive(scheduler, *several(2, 99.0, "a"))
    ends(scheduler, "gpu0", 90, now_s=1.0)
    step(scheduler, RequestCancelled(0), 1.0)
    assert preempted(arrive(scheduler, *several(7, 99.0, "b", first=10), now_s=1.0)) == [("gpu0", (1,))]


def test_a_batch_whose_clients_have_all_left_is_not_preempted_again() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(0))
    assert step(scheduler, RequestCancelled(0)) == [AbortRequest("gpu0", 0)]
    assert arrive(scheduler, *several(9, model="b", first=1)) == []
    assert starts(stops(scheduler, "gpu0", 0, now_s=0.5)) == [("gpu0", list(range(1, 10)))]


def test_a_batch_that_ends_before_it_is_stopped_has_ended() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(0, 9.0, "a"))
    assert preempted(arrive(scheduler, *several(4, 9.0, "b", first=1), now_s=0.9)) == [("gpu0", (0,))]
    assert starts(ends(scheduler, "gpu0", 0, now_s=1.0)) == [("gpu0", [1, 2, 3, 4])]
    assert 0 not in scheduler.requests
    assert stops(scheduler, "gpu0", 0, now_s=1.1) == []  # the stop came too late


def test_a_batch_is_preempted_once() -> None:
    scheduler = new_scheduler(batch_size=16)
    arrive(scheduler, due(0, model="a"))
    assert preempted(arrive(scheduler, *several(4, model="b", first=1))) == [("gpu0", (0,))]
    assert arrive(scheduler, *several(12, model="c", first=10)) == []


def test_requests_of_a_half_emptied_engine_preempt_nothing_on_another() -> None:
    """1 and 2 belong to the three for which room is made. If 1, which is back first, stopped 3 and 4, then two engines
    would stop each other's batches endlessly.
    """
    scheduler = new_scheduler(gpu("gpu0", slots=2), gpu("gpu1", slots=2), preemption_factor=1.5)
    arrive(scheduler, due(0), due(90))
    step(scheduler, AnswerBegan(0))
    step(scheduler, AnswerBegan(90))
    arrive(scheduler, *several(4, first=1))
    assert starts(ends(scheduler, "gpu0", 0, now_s=1.0)) == [("gpu0", [1, 2])]
    assert starts(ends(scheduler, "gpu1", 90, now_s=1.0)) == [("gpu1", [3, 4])]
    for name in ("gpu0", "gpu1"):
        step(scheduler, EngineReady(gpu(name, slots=8)), 1.0)  # more slots than assumed
    assert preempted(arrive(scheduler, due(5), now_s=1.0)) == [("gpu0", (1, 2))]
    assert stops(scheduler, "gpu0", 1, now_s=1.0) == []
    assert starts(stops(scheduler, "gpu0", 2, now_s=1.0)) == [("gpu0", [1, 2, 5])]


def test_a_batch_exactly_as_many_times_larger_as_required_preempts() -> None:
    scheduler = new_scheduler(preemption_factor=2.0)
    arrive(scheduler, due(0))
    assert preempted(arrive(scheduler, due(1))) == [("gpu0", (0,))]


def test_preemption_off_preempts_nothing() -> None:
    scheduler = new_scheduler(preemption="off")
    arrive(scheduler, due(0))
    assert arrive(scheduler, *several(99, model="b", first=1)) == []
    assert not scheduler.preempts
    assert new_scheduler().preempts


def test_preemption_if_needed_stops_nothing_for_requests_that_can_wait() -> None:
    """Request 0 of model a runs for 5 s."""
    scheduler = new_scheduler(gpu(speeds={"a": line(5.0), "": line(1.0)}), preemption="if-needed")
    arrive(scheduler, due(0, model="a"))
    assert arrive(scheduler, *several(4, 9.0, "b", first=1)) == []
    assert preempted(arrive(scheduler, *several(4, 4.5, "c", first=5))) == [("gpu0", (0,))]


# ---- engines that are lost during a preemption ----


def reserve_gpu0_for_b(scheduler: Scheduler) -> None:
    """gpu1 runs 90 of model z to its end; on gpu0 request 0 of model a shall make room for four requests of model b."""
    assert starts(arrive(scheduler, due(0, model="a"), due(90, model="z"))) == [("gpu0", [0]), ("gpu1", [90])]
    step(scheduler, AnswerBegan(90))
    assert preempted(arrive(scheduler, *several(4, 99.0, "b", first=1))) == [("gpu0", (0,))]


def test_a_batch_whose_engine_is_lost_before_it_starts_runs_elsewhere() -> None:
    scheduler = new_scheduler(gpu("gpu0"), gpu("gpu1"))
    reserve_gpu0_for_b(scheduler)
    assert starts(step(scheduler, EngineLost("gpu0"), 1.0)) == []
    actions = ends(scheduler, "gpu1", 90, now_s=1.0)  # the requests of the lost engine have waited longest
    assert starts(actions) == [("gpu1", [0])]
    assert starts(ends(scheduler, "gpu1", 0, now_s=2.0)) == [("gpu1", [1, 2, 3, 4])]


def test_a_batch_whose_engine_closes_before_it_starts_runs_elsewhere() -> None:
    scheduler = new_scheduler(gpu("gpu0"), gpu("gpu1"))
    reserve_gpu0_for_b(scheduler)
    assert step(scheduler, EngineClosed("gpu0"), 0.1) == []
    assert starts(stops(scheduler, "gpu0", 0, now_s=0.2)) == []
    assert starts(ends(scheduler, "gpu1", 90, now_s=1.0)) == [("gpu1", [1, 2, 3, 4])]


def test_an_engine_that_is_ready_again_is_no_longer_kept() -> None:
    scheduler = new_scheduler(gpu("gpu0"), gpu("gpu1"))
    reserve_gpu0_for_b(scheduler)
    step(scheduler, EngineLost("gpu0"), 0.1)
    assert starts(step(scheduler, EngineReady(gpu("gpu0")), 0.2)) != []


def test_requests_of_the_larger_batch_may_leave_or_be_late() -> None:
    scheduler = new_scheduler()
    arrive(scheduler, due(0, model="a"))
    assert preempted(arrive(scheduler, *several(4, 4.0, "b", first=1))) == [("gpu0", (0,))]
    for request_id in (1, 2):
        assert step(scheduler, RequestCancelled(request_id), 0.1) == []
    assert failed(step(scheduler, TimerFired(), 3.5)) == [(3, "deadline_exceeded"), (4, "deadline_exceeded")]
    assert starts(stops(scheduler, "gpu0", 0, now_s=3.6)) == [("gpu0", [0])]


def test_requests_of_the_larger_batch_fail_at_their_deadline_and_not_later() -> None:
    """No speed is declared here."""
    scheduler = new_scheduler(gpu(speeds={}))
    arrive(scheduler, due(0, model="a"))
    assert preempted(arrive(scheduler, *several(4, 1.0, "b", first=1))) == [("gpu0", (0,))]
    actions = stops(scheduler, "gpu0", 0, now_s=1.0)
    assert starts(actions) == [("gpu0", [0])]
    assert [request_id for request_id, _ in failed(actions)] == [1, 2, 3, 4]


def test_engines_of_one_gpu_run_one_batch_between_them_and_make_room_for_each_other() -> None:
    scheduler = new_scheduler(gpu("a", models=("a",), worker="gpu0"), gpu("b", models=("b",), worker="gpu0"))
    assert starts(arrive(scheduler, due(0, model="a"))) == [("a", [0])]
    assert arrive(scheduler, *several(3, model="b", first=1)) == []
    assert preempted(arrive(scheduler, due(4, model="b"))) == [("a", (0,))]
    assert starts(stops(scheduler, "a", 0, now_s=0.5)) == [("b", [1, 2, 3, 4])]
    assert starts(ends(scheduler, "b", 1, 2, 3, 4, now_s=4.5)) == [("a", [0])]


def two_on_one_gpu(**config: object) -> Scheduler:
    """Engine a of model a and engine b of model b; request 0 of model a runs."""
    settings = {"preemption": "off", **config}
    scheduler = new_scheduler(
        gpu("a", models=("a",), worker="gpu0"), gpu("b", models=("b",), worker="gpu0"), **settings
    )
    assert starts(arrive(scheduler, due(0, 99.0, "a"))) == [("a", [0])]
    return scheduler


def test_a_gpu_gets_the_largest_batch_of_all_its_engines() -> None:
    scheduler = two_on_one_gpu()
    arrive(scheduler, due(1, 99.0, "a"), *several(3, 99.0, "b", first=2))
    assert starts(ends(scheduler, "a", 0, now_s=1.0)) == [("b", [2, 3, 4])]
    assert starts(ends(scheduler, "b", 2, 3, 4, now_s=4.0)) == [("a", [1])]


def test_a_gpu_makes_room_for_the_largest_batch_of_all_its_engines() -> None:
    scheduler = new_scheduler(
        gpu("a", slots=4, models=("a",), worker="gpu0"), gpu("b", models=("a",), worker="gpu0"), batch_size=16
    )
    arrive(scheduler, due(0, 99.0, "a"))
    step(scheduler, AnswerBegan(0))
    arrive(scheduler, *several(8, 99.0, "a", first=1))
    step(scheduler, RequestEnded("a", 0, "completed", 1.0), 1.0)
    assert scheduler.engines["b"].running.keys() == set(range(1, 9))


def test_clockwork_serves_the_earliest_deadline_of_all_engines_of_a_gpu() -> None:
    scheduler = two_on_one_gpu(order="clockwork", bins=1)
    arrive(scheduler, due(1, 50.0, "a"), due(2, 40.0, "b"))
    assert starts(ends(scheduler, "a", 0, now_s=1.0)) == [("b", [2])]


def test_a_shorter_answer_that_joins_makes_a_batch_larger() -> None:
    """Bins of answers of 1 and 9 tokens: two long and one short preempt nothing; a second short one suffices."""
    scheduler = new_scheduler(lengths=[1.0] * 32 + [9.0] * 32, bins=2, edges=(5.0,), edges_refit_every=0)

    def answer(request_id: int, tokens: float) -> Request:
        return Request(request_id, tokens, 999.0, model="b")

    arrive(scheduler, due(0, 999.0, "a"))
    assert preempted(arrive(scheduler, answer(1, 9.0), answer(2, 9.0), answer(3, 1.0))) == []
    assert preempted(arrive(scheduler, answer(4, 1.0))) == [("gpu0", (0,))]
    assert starts(stops(scheduler, "gpu0", 0, now_s=0.5)) == [("gpu0", [1, 2, 3, 4])]
