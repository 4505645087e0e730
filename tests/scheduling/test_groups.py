"""Serving groups: which group gets a request, and where it goes when the plan changes."""

from __future__ import annotations

import pytest
from worlds.invariants import check

from bins.dispatch import DispatchPlan, DispatchTable
from bins.profile import StepTimes
from llmserve.live.journal import Header
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.layout import FALLBACK, Layout
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    BatchEnded,
    DispatchSolved,
    DrainRequested,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    PlanChanged,
    PlanGroups,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    ServingGroup,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.rates import GroupRates, Replan
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig

LEFT = ServingGroup("left", ("a",), ("m",))
RIGHT = ServingGroup("right", ("b",), ("n",))
SWAPPED = (ServingGroup("left", ("b",), ("m",)), ServingGroup("right", ("a",), ("n",)))


def engine(name: str, slots: int = 1, **fields: object) -> EngineInfo:
    return EngineInfo(name, slots, **{"barrier": False, **fields})  # type: ignore[arg-type]


def grouped(
    plan: tuple[ServingGroup, ...], *engines: EngineInfo, replan: Replan | None = None, **config: object
) -> Scheduler:
    """By default, batches of one request of one token; these engines are up."""
    values = {"bins": 1, "batch_size": 1, "release": "greedy", "order": "fffs", **config}
    scheduler = Header(SchedulingConfig(**values), (1.0,) * 64, groups=plan, replan=replan).scheduler()  # type: ignore[arg-type]
    for info in engines:
        step(scheduler, EngineReady(info))
    return scheduler


def step(scheduler: Scheduler, event: Event, now_s: float = 0.0) -> list[Action]:
    actions = scheduler.handle(event, now_s)
    check(scheduler)
    return actions


def arrive(scheduler: Scheduler, *requests: Request, now_s: float = 0.0) -> list[Action]:
    return [action for request in requests for action in step(scheduler, RequestArrived(request), now_s)]


def m(request_id: int, **fields: object) -> Request:
    return Request(request_id, model="m", **fields)  # type: ignore[arg-type]


def n(request_id: int, **fields: object) -> Request:
    return Request(request_id, model="n", **fields)  # type: ignore[arg-type]


def ended(engine_name: str, request_id: int) -> RequestEnded:
    return RequestEnded(engine_name, request_id, "completed", 5.0)


def placed(actions: list[Action]) -> list[tuple[int, str]]:
    """(request, engine) of all started requests."""
    return [
        (request.id, action.engine)
        for action in actions
        if isinstance(action, StartBatch)
        for request in action.batch.requests
    ]


def group_of(scheduler: Scheduler, request_id: int) -> str:
    return scheduler.requests[request_id].group


# ---- the group of a request ----


def test_a_request_goes_to_the_group_of_its_model_although_another_has_a_free_engine() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    assert placed(arrive(scheduler, m(1), m(2))) == [(1, "a")]
    assert placed(arrive(scheduler, n(3))) == [(3, "b")]
    assert placed(step(scheduler, ended("b", 3))) == []
    assert placed(step(scheduler, ended("a", 1))) == [(2, "a")]


def test_a_groups_own_stream_goes_there_although_another_group_has_its_model() -> None:
    right = ServingGroup("right", ("b",), ("n",), streams=(("chat", "m"),))
    scheduler = grouped((LEFT, right), engine("a"), engine("b"))
    assert placed(arrive(scheduler, m(1, stream="chat"), m(2, stream="mail"))) == [(1, "b"), (2, "a")]


def test_unplanned_models_belong_to_the_fallback_group() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a", models=("m",)), engine("c", models=("k",)))
    assert placed(arrive(scheduler, Request(1, model="k"))) == [(1, "c")]
    assert group_of(scheduler, 1) == FALLBACK


def test_a_group_that_no_engine_serves_sends_its_requests_to_the_least_loaded_served_group() -> None:
    third = ServingGroup("third", ("c",), ("k",))
    scheduler = grouped((LEFT, RIGHT, third), engine("b"), engine("c", 2))
    assert placed(arrive(scheduler, n(1))) == [(1, "b")]
    assert placed(arrive(scheduler, m(2), m(3))) == [(2, "c"), (3, "c")]
    arrive(scheduler, m(4))
    assert group_of(scheduler, 4) == "right", "at equal load the name decides"


def test_an_engine_of_another_group_that_does_not_serve_the_model_is_no_help() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("b", models=("n",)))
    assert arrive(scheduler, m(1)) == [FailRequest(1, "no_engine", None)]
    assert not scheduler.requests


def test_waiting_requests_move_when_their_engine_is_lost_and_return_with_it() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1), n(2), m(3), m(4))
    step(scheduler, EngineClosed("a"))
    assert [group_of(scheduler, id_) for id_ in (1, 3, 4)] == ["left", "right", "right"]
    assert placed(step(scheduler, ended("b", 2))) == [(3, "b")]
    step(scheduler, EngineReady(engine("a")))
    assert [group_of(scheduler, id_) for id_ in (1, 3, 4)] == ["left", "right", "left"]


def test_a_lost_engines_requests_run_again_in_a_group_with_an_engine() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1), m(2))
    assert placed(step(scheduler, EngineLost("a"))) == [(1, "b")]
    assert placed(step(scheduler, ended("b", 1))) == [(2, "b")]


def test_no_two_batches_have_one_id() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a", 3), engine("b", 3))
    actions = arrive(scheduler, m(1), n(2), m(3), n(4))
    assert [action.batch.id for action in actions if isinstance(action, StartBatch)] == [1, 2, 3, 4]


def test_each_group_holds_its_own_queue_to_its_limit() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"), queue_requests_max=1)
    assert arrive(scheduler, m(1), m(2), m(3))[-1] == FailRequest(3, "queue_full", None)
    assert placed(arrive(scheduler, n(4))) == [(4, "b")]


def test_a_cancelled_request_is_found_in_its_group() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1), m(2))
    assert step(scheduler, RequestCancelled(1)) == [AbortRequest("a", 1)]
    assert step(scheduler, RequestCancelled(2)) == []
    assert step(scheduler, RequestCancelled(99)) == []
    assert sorted(scheduler.requests) == [1]


def test_draining_reaches_every_group_and_groups_of_later_plans() -> None:
    scheduler = grouped((LEFT,), engine("a"), engine("b"))
    step(scheduler, DrainRequested())
    step(scheduler, PlanChanged((LEFT, RIGHT)))
    assert arrive(scheduler, m(1), n(2)) == [FailRequest(1, "draining", None), FailRequest(2, "draining", None)]


def test_the_timer_is_the_earliest_of_all_groups_and_releases_only_due_ones() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1), m(2, deadline_s=3.0), n(3), n(4, deadline_s=2.0))
    assert scheduler.wake_at_s == 2.0
    assert step(scheduler, TimerFired(), 2.0) == [FailRequest(4, "deadline_exceeded")]
    assert scheduler.wake_at_s == 3.0
    assert step(scheduler, TimerFired(), 3.0) == [FailRequest(2, "deadline_exceeded")]
    assert scheduler.wake_at_s is None


def test_a_step_looks_only_at_groups_that_wait_for_a_time() -> None:
    plan = tuple([ServingGroup(f"g{k}", (f"e{k}",), (f"m{k}",)) for k in range(50)])
    engines = [engine(f"e{k}") for k in range(50)]
    scheduler = grouped(plan, *engines, release="timeout", batch_size=2, batch_wait_s=1.0)
    for k in range(50):
        step(scheduler, RequestArrived(Request(k, 1.0, model=f"m{k}")), now_s=0.1 * k)
        assert len(scheduler.groups.restless) < 15, "those whose batches have waited for less than a second"
    step(scheduler, TimerFired(), now_s=10.0)
    step(scheduler, TimerFired(), now_s=10.0)
    assert not scheduler.groups.restless
    assert scheduler.wake_at_s is None


def test_the_timer_is_the_earliest_deadline_of_the_present_requests() -> None:
    scheduler = grouped((LEFT,), engine("a"))
    arrive(scheduler, m(0))
    for number in range(1, 1_000):
        arrive(scheduler, m(number, deadline_s=1_000.0 - number * 0.5))
    assert scheduler.wake_at_s == 500.5
    for number in range(1, 1_000):
        step(scheduler, RequestCancelled(number))
    step(scheduler, TimerFired(), 500.5)
    assert scheduler.wake_at_s is None


# ---- plans ----


def test_a_worker_joins_its_new_group_when_its_running_requests_have_ended() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1), n(2), m(3), n(4))
    assert step(scheduler, PlanChanged(SWAPPED), 1.0) == []
    assert placed(step(scheduler, ended("a", 1), 2.0)) == [(4, "a")]
    assert placed(step(scheduler, ended("b", 2), 3.0)) == [(3, "b")]
    assert [scheduler.engines[name].ready for name in ("a", "b")] == [True, True]


def test_an_idle_worker_joins_at_once() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, n(1), n(2))
    assert placed(step(scheduler, PlanChanged((ServingGroup("right", ("a", "b"), ("m", "n")),)))) == [(2, "a")]


def test_while_every_worker_moves_new_requests_wait() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1), n(2))
    step(scheduler, PlanChanged(SWAPPED))
    assert arrive(scheduler, m(3), n(4)) == []
    assert placed(step(scheduler, ended("a", 1))) == [(4, "a")]
    assert placed(step(scheduler, ended("b", 2))) == [(3, "b")]


def test_waiting_requests_move_with_arrival_time_deadline_and_retries() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"), retries_max=1)
    arrive(scheduler, m(1), n(2), now_s=1.0)
    arrive(scheduler, m(3, deadline_s=9.0), now_s=2.0)
    fault = RequestEnded("a", 1, "failed", fault=True, retryable=True)
    assert placed(step(scheduler, fault, 3.0)) == [(1, "a")]
    step(scheduler, EngineClosed("a"), 3.0)
    step(scheduler, PlanChanged((ServingGroup("right", ("a", "b"), ("m", "n")),)), 4.0)
    assert step(scheduler, fault, 5.0) == [FailRequest(1, "engine_failed", None)]
    assert group_of(scheduler, 3) == "right"
    assert scheduler.requests[3].arrived_at_s == 2.0
    assert scheduler.wake_at_s == 9.0
    assert step(scheduler, TimerFired(), 9.0) == [FailRequest(3, "deadline_exceeded")]


def test_the_first_to_arrive_runs_first_in_whichever_group_it_waited() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1), n(2), m(3), n(4), m(5))
    step(scheduler, PlanChanged((ServingGroup("all", ("a",), ("m", "n")),)), 1.0)
    assert placed(step(scheduler, ended("a", 1), 2.0)) == [(3, "a")]
    assert placed(step(scheduler, ended("a", 3), 3.0)) == [(4, "a")]
    assert placed(step(scheduler, ended("a", 4), 4.0)) == [(5, "a")]


def test_a_request_that_fails_after_a_new_plan_runs_again_in_its_new_group() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1))
    step(scheduler, PlanChanged((ServingGroup("right", ("b",), ("m", "n")),)), 1.0)
    failed = RequestEnded("a", 1, "failed", fault=True, retryable=True)
    assert placed(step(scheduler, failed, 2.0)) == [(1, "b")]
    assert group_of(scheduler, 1) == "right"


def test_a_request_that_fails_on_a_staying_worker_runs_again_in_its_new_group() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"), circuit_faults_max=1)
    arrive(scheduler, m(1))
    step(scheduler, PlanChanged((ServingGroup("left", ("a",), ()), ServingGroup("right", ("b",), ("m", "n")))), 1.0)
    assert group_of(scheduler, 1) == "left", "a running request ends in its old group"
    fault = RequestEnded("a", 1, "failed", fault=True, retryable=True)  # opens the circuit of a
    assert placed(step(scheduler, fault, 2.0)) == [(1, "b")]


def test_requests_that_caused_a_preemption_move_if_they_cannot_run_there() -> None:
    """They wait for the engine that is being emptied for them, and for no other, until it is empty."""
    speeds = {"": StepTimes(0.0, (0.1, 0.2, 0.3, 0.4))}
    barrier = [engine(name, 4, barrier=True, speeds=speeds) for name in ("a", "b")]
    first = (ServingGroup("left", ("a",), ("m", "n")), ServingGroup("right", ("b",), ()))
    scheduler = grouped(first, *barrier, order="flex", release="window", batch_size=4, preemption_factor=3.5)
    arrive(scheduler, m(1, predicted_tokens=1.0))
    waiting = [n(number, predicted_tokens=1.0, deadline_s=0.45) for number in range(2, 6)]
    assert arrive(scheduler, *waiting) == [PreemptBatch("a", 1, (1,))]
    assert (
        step(scheduler, PlanChanged((ServingGroup("left", ("a",), ("m",)), ServingGroup("right", ("b",), ("n",)))))
        == []
    )
    assert [group_of(scheduler, request.id) for request in waiting] == ["left"] * 4
    actions = step(scheduler, RequestEnded("a", 1, "cancelled"), 0.2)  # two are in time on each engine, four on none
    assert [name for _, name in placed(actions)] == ["a", "a", "b", "b"]


def test_a_worker_that_changes_groups_keeps_its_circuit() -> None:
    scheduler = grouped(
        (LEFT, RIGHT), engine("a"), engine("b", models=("m",)), circuit_faults_max=1, circuit_pause_s=5.0
    )
    arrive(scheduler, m(1))
    step(scheduler, RequestEnded("a", 1, "failed", fault=True))
    step(scheduler, PlanChanged(SWAPPED), 1.0)
    assert arrive(scheduler, n(2), now_s=1.0) == []
    assert group_of(scheduler, 2) == "right"
    assert scheduler.wake_at_s == 5.0
    assert placed(step(scheduler, TimerFired(), 5.0)) == [(2, "a")]


def test_late_requests_fail_at_an_event_of_any_group() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1), m(2, deadline_s=3.0), n(3))
    assert step(scheduler, ended("b", 3), 3.0) == [FailRequest(2, "deadline_exceeded")]


def test_the_request_behind_those_that_moved_is_next() -> None:
    scheduler = grouped((ServingGroup("left", ("a",), ("m", "n")), ServingGroup("right", ("b",), ())), engine("b"))
    step(scheduler, EngineReady(engine("a", 8, tokens_max=1_000)))
    first, second = ({"predicted_tokens": 10.0, "prompt_tokens": tokens} for tokens in (450.0, 600.0))
    arrive(scheduler, m(1, **first), m(2, **second))
    assert placed(arrive(scheduler, n(3, predicted_tokens=10.0))) == [], "nothing overtakes a wait for memory"
    plan = (ServingGroup("left", ("a",), ("n",)), ServingGroup("right", ("b",), ("m",)))
    assert sorted(placed(step(scheduler, PlanChanged(plan), 1.0))) == [(2, "b"), (3, "a")]


def test_a_worker_that_joins_a_group_starts_no_request_that_leaves_it() -> None:
    left = ServingGroup("left", ("a", "c"), ("m", "k"))
    scheduler = grouped((left, RIGHT), engine("a"), engine("b"), engine("c"))
    arrive(scheduler, m(1), n(2), m(3), n(4))  # on a, b and c; the last request waits for b
    step(scheduler, ended("a", 1))
    left, right = ServingGroup("left", ("b", "c"), ("n",)), ServingGroup("right", ("a",), ("m", "k"))
    assert placed(step(scheduler, PlanChanged((left, right)))) == []
    assert group_of(scheduler, 4) == "left"


def test_a_group_that_is_no_longer_planned_is_kept_until_it_is_empty() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1))
    step(scheduler, PlanChanged((RIGHT,)))
    assert sorted(scheduler.groups.by_name) == [FALLBACK, "left", "right"]
    step(scheduler, ended("a", 1))
    assert sorted(scheduler.groups.by_name) == [FALLBACK, "right"]


def test_the_engines_of_one_worker_move_together() -> None:
    pair = [engine(name, barrier=True, worker="gpu0", models=(name,)) for name in ("m", "n")]
    first = (ServingGroup("left", ("gpu0",), ("m", "n")), ServingGroup("right", (), ()))
    scheduler = grouped(first, *pair)
    assert placed(arrive(scheduler, m(1), n(2))) == [(1, "m")]
    step(scheduler, PlanChanged((ServingGroup("right", ("gpu0",), ("m", "n")),)), 1.0)
    assert group_of(scheduler, 2) == "right"
    assert placed(step(scheduler, BatchEnded("m", 1, {1: 5.0}), 2.0)) == [(2, "n")]
    assert sorted(scheduler.groups.by_name) == [FALLBACK, "right"]


def test_a_plan_that_is_reverted_leaves_a_worker_where_it_is() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a", 2), engine("b"))
    arrive(scheduler, m(1))
    step(scheduler, PlanChanged(SWAPPED), 1.0)
    step(scheduler, PlanChanged((LEFT, RIGHT)), 2.0)
    assert placed(arrive(scheduler, m(2), now_s=2.0)) == [(2, "a")]


def test_a_moving_worker_that_is_lost_loses_nothing_and_comes_back_in_its_new_group() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1), n(2))
    step(scheduler, PlanChanged(SWAPPED), 1.0)
    assert step(scheduler, EngineLost("a"), 2.0) == []
    assert placed(step(scheduler, ended("b", 2), 3.0)) == [(1, "b")]
    step(scheduler, EngineReady(engine("a")), 4.0)
    assert placed(arrive(scheduler, n(3), now_s=4.0)) == [(3, "a")]


def test_a_stale_end_of_a_request_that_runs_elsewhere_changes_nothing() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1))
    assert placed(step(scheduler, EngineLost("a"))) == [(1, "b")]
    assert step(scheduler, ended("a", 1)) == []
    assert sorted(scheduler.requests) == [1]


def test_a_plan_of_unknown_workers_leaves_no_request_without_an_engine() -> None:
    scheduler = grouped((LEFT, RIGHT), engine("a"), engine("b"))
    arrive(scheduler, m(1), m(2))
    step(scheduler, PlanChanged((ServingGroup("left", ("x", "y"), ("m", "n")),)))
    assert group_of(scheduler, 2) == FALLBACK
    assert placed(arrive(scheduler, n(3))) == []
    assert placed(step(scheduler, ended("a", 1))) == [(3, "a")]


def test_groups_that_share_a_model_ask_for_its_dispatch_plans_one_after_the_other() -> None:
    right = ServingGroup("right", ("b",), (), streams=(("chat", "m"),))
    scheduler = grouped((LEFT, right), release="deadline", batch_size=2)
    first = step(scheduler, EngineReady(engine("a", models=("m",))))
    assert [type(action) for action in first] == [SolveDispatch]
    assert step(scheduler, EngineReady(engine("b", 3, models=("m",)))) == []
    plan = DispatchPlan(queue_of=(0,), tables=(DispatchTable((0, 1, 2), (), (), (1.0, 1.0), (1.0, 1.0), 10.0),))
    (second,) = step(scheduler, DispatchSolved(plan, "m"))
    assert isinstance(second, SolveDispatch)
    assert second.observed.slots == 3
    assert step(scheduler, DispatchSolved(plan, "m")) == []


def test_an_engine_that_has_yet_to_join_requests_no_dispatch_plan() -> None:
    scheduler = grouped((LEFT, RIGHT), release="deadline", batch_size=1)
    actions = step(scheduler, EngineReady(engine("a", models=("m", "n"))))
    assert [action.model for action in actions if isinstance(action, SolveDispatch)] == ["m", "n"]
    plan = DispatchPlan(queue_of=(0,), tables=(DispatchTable((0, 1), (), (), (1.0,), (1.0,), 10.0),))
    for model in ("m", "n"):
        step(scheduler, DispatchSolved(plan, model))
    assert placed(arrive(scheduler, m(1))) == [(1, "a")]
    assert step(scheduler, PlanChanged((ServingGroup("right", ("a",), ("m", "n")),))) == []
    actions = step(scheduler, ended("a", 1))
    assert [action.observed.slots for action in actions if isinstance(action, SolveDispatch)] == [1, 1]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (ServingGroup("left", ("c",), ("k",)), "name 'left' is in two groups"),
        (ServingGroup("x", ("a",), ("k",)), "worker 'a' is in two groups, left and x"),
        (ServingGroup("x", ("c",), ("m",)), "model 'm' is in two groups, left and x"),
        (ServingGroup("x", ("c",), ("k",), (("s", "m"), ("s", "m"))), "stream .* is in two groups, x and x"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(group: ServingGroup, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout((LEFT, group))


# ---- rates ----


def test_groups_are_planned_again_when_arrival_rates_differ_from_the_plan() -> None:
    replan = Replan(10.0, planned=(("", "m", 3.0), ("", "n", 3.0)))
    scheduler = grouped((LEFT, RIGHT), engine("a", 100), engine("b", 100), replan=replan)
    for number in range(30):
        arrive(scheduler, m(number), n(100 + number), now_s=number / 3)
    assert step(scheduler, TimerFired(), 10.0) == [], "as planned"
    for number in range(60):
        arrive(scheduler, m(200 + number), now_s=10 + number / 6)
    assert scheduler.wake_at_s == 20.0
    assert step(scheduler, TimerFired(), 20.0) == [PlanGroups((("", "m", 6.0),))]
    for number in range(60):
        arrive(scheduler, m(300 + number), now_s=20 + number / 6)
    assert step(scheduler, TimerFired(), 30.0) == [], "as last requested"


def test_without_arrivals_no_timer_is_set_and_no_plan_requested() -> None:
    scheduler = grouped((LEFT,), engine("a", 100), replan=Replan(10.0, planned=(("", "m", 3.0),)))
    assert scheduler.wake_at_s is None
    arrive(scheduler, m(1), now_s=5.0)
    assert scheduler.wake_at_s == 10.0
    assert step(scheduler, TimerFired(), 10.0) == [PlanGroups((("", "m", 0.1),))]
    assert scheduler.wake_at_s is None
    assert placed(arrive(scheduler, m(2), now_s=95.0)) == [(2, "a")]
    assert scheduler.wake_at_s == 100.0


def test_random_fluctuations_request_no_plan() -> None:
    rates = GroupRates(Replan(1.0, planned=(("s", "m", 4.0),)))
    for window, count in enumerate([4, 8, 1, 7, 2, 6, 9], start=1):
        for _ in range(count):
            rates.observe("s", "m")
        assert rates.end_window(float(window)) is None
    for _ in range(40):
        rates.observe("s", "m")
    assert rates.end_window(8.0) == (("s", "m", 40.0),)


def test_streams_beyond_the_limit_are_counted_by_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmserve.scheduling.rates.STREAMS_MAX", 2)
    rates = GroupRates(Replan(1.0))
    for stream in ("a", "b", "c", "d"):
        for _ in range(20):
            rates.observe(stream, "m")
    assert rates.end_window(1.0) == (("", "m", 40.0), ("a", "m", 20.0), ("b", "m", 20.0))
