"""Bugs that random worlds found, worked out by hand, so that other draws of worlds do not lose them."""

import pytest
from worlds.account import Account
from worlds.invariants import check

from bins.dispatch import DispatchPlan, DispatchTable
from bins.profile import StepTimes
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    DispatchSolved,
    EngineClosed,
    EngineReady,
    Event,
    FailRequest,
    ForecastsRevised,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    ServedElsewhere,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.queues.formed_queue import FormedQueue
from llmserve.scheduling.queues.waiting import FormedBatch, QueuedRequest
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig

SMALL, LARGE, LARGER = 0.0, 60.0, 90.0  # prompt tokens; an answer of 4 takes 20 more


def new_scheduler(*engines: EngineInfo, **values: object) -> Scheduler:
    config = SchedulingConfig(**{"bins": 1, "batch_size": 1, "order": "fffs", **values})  # type: ignore[arg-type]
    scheduler = config.resolved(barrier=False).scheduler()
    for engine in engines:
        scheduler.handle(EngineReady(engine), 0.0)
    return scheduler


def engine(name: str, slots: int, look_ahead: int = 0, tokens_max: int | None = 100) -> EngineInfo:
    return EngineInfo(name, slots, False, look_ahead, tokens_max)


def arrive(scheduler: Scheduler, request_id: int, prompt_tokens: float = SMALL) -> list[tuple[str, int]]:
    return starts(scheduler.handle(RequestArrived(Request(request_id, 4.0, prompt_tokens=prompt_tokens)), 0.0))


def fails(scheduler: Scheduler, name: str, request_id: int) -> list[tuple[str, int]]:
    return starts(scheduler.handle(RequestEnded(name, request_id, "failed", fault=True, retryable=True), 0.0))


def starts(actions: list[Action]) -> list[tuple[str, int]]:
    return [
        (action.engine, request.id)
        for action in actions
        if isinstance(action, StartBatch)
        for request in action.batch.requests
    ]


def test_a_request_too_large_for_a_busy_engine_starts_on_an_idle_one_even_if_plans_prefer_joining() -> None:
    """Before: the request waited for memory of the busy engine and blocked the queue beside an idle engine."""
    scheduler = new_scheduler(engine("a", 2), engine("b", 2), release="table")
    assert arrive(scheduler, 0, LARGE) == [("a", 0)]
    assert arrive(scheduler, 1, LARGE) == [("b", 1)]


def test_a_batch_set_aside_counts_when_look_ahead_places_are_shared() -> None:
    """Before: 4 waited although more requests waited than other engines existed. 0 may not return to a; b is full."""
    scheduler = new_scheduler(engine("a", 1, 1, None), engine("b", 1, 1, None), release="greedy")
    assert [arrive(scheduler, number) for number in range(5)] == [[("a", 0)], [("b", 1)], [], [("a", 2)], [("b", 3)]]
    assert fails(scheduler, "a", 0) == [("a", 4)]
    check(scheduler)


def test_a_bin_is_not_due_behind_a_batch_that_waits_for_memory() -> None:
    """Before: the timer fired endlessly.

    0 came back and waits for b. 4 waits for memory on a. 6 waits in its bin, whose timeout is over.
    """
    scheduler = new_scheduler(engine("a", 3), engine("b", 1), release="timeout", batch_wait_s=0.5, batch_size=2)
    started = [arrive(scheduler, number, LARGER if number in (4, 5) else SMALL) for number in range(7)]
    assert started == [[], [("a", 0), ("a", 1)], [], [("a", 2), ("b", 3)], [], [], []]
    assert fails(scheduler, "a", 0) == []
    scheduler.handle(TimerFired(), 0.75)
    assert scheduler.wake_at_s is not None
    assert scheduler.wake_at_s > 0.75


def test_an_engine_that_was_not_tried_sets_no_timer() -> None:
    """Before: the timer fired endlessly.

    a refused 4. Then b refuses 0, which came back from a: only this refusal sets a timer.
    """
    scheduler = new_scheduler(engine("a", 2), engine("b", 2), release="greedy")
    started = [arrive(scheduler, number, prompt) for number, prompt in enumerate([LARGE, 10.0, SMALL, 10.0, LARGER])]
    assert started == [[("a", 0)], [("b", 1)], [("a", 2)], [("b", 3)], []]
    assert fails(scheduler, "a", 0) == []
    assert scheduler.wake_at_s == 0.1
    scheduler.handle(RequestEnded("b", 3, "completed", 2.5), 0.05)
    scheduler.handle(TimerFired(), 0.1)
    assert scheduler.wake_at_s is not None
    assert scheduler.wake_at_s > 0.1


def test_a_bin_is_not_due_behind_another_models_batch_that_waits_for_memory() -> None:
    """Before: the timer fired endlessly.

    1 of b waits for memory, and nothing overtakes it; 2 of a waits in its bin, whose timeout is over.
    """
    scheduler = new_scheduler(engine("e", 3), release="timeout", batch_wait_s=0.5, batch_size=2)
    started = [
        starts(scheduler.handle(RequestArrived(Request(number, 4.0, prompt_tokens=prompt, model=model)), 0.0))
        for number, (model, prompt) in enumerate([("b", 25.0), ("b", LARGE), ("a", SMALL)])
    ]
    assert started == [[], [("e", 0)], []]
    scheduler.handle(TimerFired(), 0.5)
    assert scheduler.wake_at_s is not None
    assert scheduler.wake_at_s > 0.5
    assert starts(scheduler.handle(RequestEnded("e", 0, "completed", 4.0), 0.55)) == [("e", 1), ("e", 2)]


def test_an_engine_seems_no_faster_because_an_answer_began_alone_and_ended_among_others() -> None:
    """Before: 4 started, and was late. 0 took 9 steps alone and one beside 1, 2 and 3: the engine, exactly as fast as
    its profile, seemed to need 0.43 of its profile's time.
    """
    times = StepTimes(0.0, (1.0, 2.0, 3.0, 4.0))
    scheduler = new_scheduler(
        EngineInfo("e", 4, False, speeds={"": times}), order="clockwork", release="window", batch_size=4
    )

    def arrives(request_id: int, now_s: float, deadline_s: float) -> list[tuple[str, int]]:
        return starts(scheduler.handle(RequestArrived(Request(request_id, 10.0, deadline_s)), now_s))

    assert arrives(0, 0.0, 100.0) == [("e", 0)]
    assert [arrives(number, 9.0, 100.0) for number in (1, 2, 3)] == [[("e", 1)], [("e", 2)], [("e", 3)]]
    assert arrives(4, 9.0, 13.0 + 9.0) == []
    assert starts(scheduler.handle(RequestEnded("e", 0, "completed", 10.0), 13.0)) == []
    assert scheduler.engines["e"].pace("") == 1.0


def preempting_scheduler(*engines: EngineInfo, **values: object) -> Scheduler:
    """0 runs on the first engine and is stopped for 1 (with 0: twice as many), which has the engine reserved."""
    scheduler = new_scheduler(*engines, batch_size=2, order="flex", preemption_factor=1.5, release="window", **values)
    first = engines[0].name
    arrivals = [scheduler.handle(RequestArrived(Request(number, model="a")), 0.0) for number in range(2)]
    assert starts(arrivals[0]) == [(first, 0)]
    assert arrivals[1] == [PreemptBatch(first, 1, (0,))]
    return scheduler


@pytest.mark.parametrize("change", [EngineClosed("e"), EngineReady(EngineInfo("e", 2, True, models=("b",)))])
def test_a_request_for_which_an_engine_is_reserved_waits_no_longer_than_others_when_the_engine_stops_serving_it(
    change: EngineClosed | EngineReady,
) -> None:
    """Before: the timer fired endlessly, for requests with an engine reserved did not fail."""
    scheduler = preempting_scheduler(EngineInfo("e", 2, True), engine_wait_s=3.0)
    scheduler.handle(change, 1.0)
    assert scheduler.wake_at_s == 4.0
    assert scheduler.handle(TimerFired(), 4.0) == [FailRequest(1, "no_engine", None)]
    assert scheduler.wake_at_s is None
    check(scheduler)


def test_requests_for_which_a_paused_engine_is_reserved_wait_no_longer_than_others_without_an_engine() -> None:
    """Before: the timer fired endlessly, for requests with an engine reserved did not fail.

    1 and 2 are stopped for 3 to 7. 1 fails by the engine's fault, which opens the circuit; 2 has not stopped yet.
    """
    faults = {"retries_max": 0, "circuit_faults_max": 1, "circuit_pause_s": 9.0, "engine_wait_s": 3.0}
    scheduler = new_scheduler(EngineInfo("e", 8, True), batch_size=8, order="flex", release="window", **faults)
    assert [arrive(scheduler, number) for number in range(3)] == [[("e", 0)], [], []]
    assert starts(scheduler.handle(RequestEnded("e", 0, "completed", 4.0), 0.0)) == [("e", 1), ("e", 2)]
    arrivals = [scheduler.handle(RequestArrived(Request(number)), 0.0) for number in range(3, 8)]
    assert arrivals == [[], [], [], [], [PreemptBatch("e", 2, (1, 2))]]
    scheduler.handle(RequestEnded("e", 1, "failed", fault=True, retryable=True), 1.0)
    check(scheduler)
    assert scheduler.wake_at_s == 4.0
    failed = scheduler.handle(TimerFired(), 4.0)
    assert [action.request_id for action in failed if isinstance(action, FailRequest)] == [3, 4, 5, 6, 7]
    assert scheduler.wake_at_s is None


def test_a_bin_is_due_when_the_rate_will_have_fallen_although_its_longest_wait_is_over() -> None:
    """Before: the bin waited past its release, for only the earlier of its two times counted, which had passed.

    A batch of one takes 2 s, so at 1 request a second two must wait, after a silence of 3 s only one. 1 waits for
    memory.
    """
    settings = {"release": "rate-headroom", "rate_headroom": 1.0, "batch_wait_s": 0.5, "order": "flex"}
    scheduler = new_scheduler(engine("e", 2), batch_size=2, preemption="off", **settings)
    table = DispatchTable((0, 1, 2), (), (), service_s=(2.0, 2.5), late_s=(2.0, 2.5), wait_s_max=9.0)
    scheduler.handle(DispatchSolved(DispatchPlan((0,), (table,)), ""), 0.0)
    for number, (at_s, prompt_tokens) in enumerate([(0.0, LARGER), (1.0, SMALL)]):
        scheduler.handle(RequestArrived(Request(number, 4.0, prompt_tokens=prompt_tokens)), at_s)
    while scheduler.wake_at_s is not None and scheduler.wake_at_s < 3.5:
        scheduler.handle(TimerFired(), scheduler.wake_at_s)
    scheduler.handle(TimerFired(), 3.95)
    assert scheduler.wake_at_s == pytest.approx(4.0)


def test_parts_of_one_batch_keep_the_order_of_their_return_whoever_looked_under_another_order() -> None:
    """Before: a look at the parts sorted them for good, so that a journal did not replay to itself."""
    parts = [FormedBatch(1, 0, 0.0, [QueuedRequest(Request(number), 0, 0.0)]) for number in range(2)]
    queue = FormedQueue(lambda batch: -float(batch.first.request.id))
    for part in parts:
        queue.push_returned(part)
    assert queue.returned == parts[::-1]
    queue.sort_all(lambda batch: 0.0)
    assert queue.returned == parts


def test_requests_start_together_after_one_was_stopped_for_the_others_although_their_release_would_now_wait() -> None:
    """Before: all waited beside an idle engine. The plan lets two requests go, and makes three wait for a fourth."""
    settings = {"order": "flex", "preemption_factor": 1.5, "release": "table", "batch_wait_s": 9.0}
    scheduler = new_scheduler(EngineInfo("e", 4, True), batch_size=4, **settings)
    assert arrive(scheduler, 0) == [("e", 0)]
    table = DispatchTable((0, 0, 2, 0, 4), (), (), service_s=(1.0,) * 4, late_s=(1.0,) * 4, wait_s_max=9.0)
    scheduler.handle(DispatchSolved(DispatchPlan((0,), (table,)), ""), 0.0)
    actions = [scheduler.handle(RequestArrived(Request(number)), 0.0) for number in (1, 2)]
    assert [action for action in actions[1] if isinstance(action, PreemptBatch)] == [PreemptBatch("e", 1, (0,))]
    ended = scheduler.handle(RequestEnded("e", 0, "cancelled"), 1.0)
    assert starts(ended) == [("e", 0), ("e", 1), ("e", 2)]


def test_a_suspect_has_its_trial_on_time_although_the_engine_has_only_places_ahead() -> None:
    """Before: no timer was set, and the suspect waited until another event, with all requests behind it.

    The fault of 1 opens the circuit for 1 s, and suspects wait a second more. 0 and 2 still run, so no slot is free.
    """
    scheduler = new_scheduler(engine("e", 1, 2, None), release="greedy", circuit_faults_max=1, circuit_pause_s=1.0)
    assert [arrive(scheduler, number) for number in range(3)] == [[("e", 0)], [("e", 1)], [("e", 2)]]
    assert fails(scheduler, "e", 1) == []
    assert scheduler.wake_at_s == 1.0
    assert scheduler.handle(TimerFired(), 1.0) == []
    assert scheduler.wake_at_s == 2.0
    assert starts(scheduler.handle(TimerFired(), 2.0)) == [("e", 1)]


def test_a_full_queue_that_makes_room_lets_the_batches_of_the_share_that_is_left_form() -> None:
    """World 70342: the last other share was refused, no engine was free, and a full batch stayed in its bin."""
    config = SchedulingConfig(order="fffs", release="full", bins=1, batch_size=2, queue_requests_max=3)
    scheduler = config.resolved(barrier=True).scheduler()
    scheduler.handle(EngineReady(EngineInfo("e", 2, True)), 0.0)
    shares = ["many", "many", "light", "many", "many", "many"]
    for request_id, share in enumerate(shares):
        weight = 0.25 if share == "light" else 1.0
        actions = scheduler.handle(RequestArrived(Request(request_id, 4.0, share=share, weight=weight)), 0.0)
    assert actions == [FailRequest(2, "queue_full")]
    check(scheduler)
    assert len(scheduler.queues("").formed) == 2


def test_who_is_first_once_its_rival_was_served_elsewhere_starts_at_once() -> None:
    """World 68208715: the request waited for the next event, and a look at the scheduler changed what was next.

    0 leaves 20 tokens of the memory. 1 needs 30 and is first, so 2, which needs 20, waits behind; then 2 is first.
    """
    scheduler = new_scheduler(engine("e", 3), release="greedy")
    shares = [("x", LARGE), ("rival", 10.0), ("own", SMALL)]
    for number, (share, prompt_tokens) in enumerate(shares):
        request = Request(number, 4.0, prompt_tokens=prompt_tokens, share=share)
        scheduler.handle(RequestArrived(request), 0.0)
    assert list(scheduler.engines["e"].running) == [0]
    assert starts(scheduler.handle(ServedElsewhere("", {"rival": 1_000.0}), 0.0)) == [("e", 2)]


def test_a_request_may_be_overtaken_on_an_engine_that_rests_from_its_model() -> None:
    """Worlds 68207225 and 68207825: the account reported the start of 3, wrongly.

    e rests from a, for the other engine works. So 2 of a waits for the other one, and 3 of b starts on e.
    """
    scheduler = new_scheduler(release="greedy")
    account = Account(SchedulingConfig(bins=1, batch_size=1, order="fffs", release="greedy"), scheduler, lambda _: 99.0)

    def step(event: Event) -> list[tuple[str, int]]:
        actions = scheduler.handle(event, 0.0)
        account.step(0.0, event, actions)
        return starts(actions)

    step(EngineReady(EngineInfo("e", 2, False, models=("a", "b"))))
    step(EngineReady(EngineInfo("other", 1, False, models=("a",))))
    assert [step(RequestArrived(Request(number, 4.0, model="a"))) for number in (0, 1)] == [[("e", 0)], [("e", 1)]]
    assert step(RequestEnded("e", 0, "failed", retryable=True, refused=True, rest_s=5.0)) == [("other", 0)]
    assert step(RequestArrived(Request(2, 4.0, model="a"))) == []
    assert step(RequestArrived(Request(3, 4.0, model="b"))) == [("e", 3)]


def test_an_engine_is_asked_again_after_the_request_that_held_it_back_has_started_elsewhere() -> None:
    """World 68207150: 3 waited for the next event beside a, which could hold it.

    0 leaves 55 tokens of a's memory. 2, which needs 70, holds back 3, which needs 40; then 2 starts on b.
    """
    scheduler = new_scheduler(engine("a", 3), engine("b", 1), release="window", order="flex", preemption="off")
    started = [
        starts(scheduler.handle(RequestArrived(Request(number, 4.0, 40.0 + number, prompt_tokens=prompt_tokens)), 0.0))
        for number, prompt_tokens in enumerate([25.0, 50.0, 50.0, 20.0])
    ]
    assert started == [[("a", 0)], [("b", 1)], [], []]
    assert starts(scheduler.handle(RequestEnded("b", 1, "completed", 4.0), 0.01)) == [("b", 2), ("a", 3)]


def test_a_check_does_not_count_as_waiting_for_a_memory_token() -> None:
    """World 91300541: a check after a step without a dispatch changed when the token was last waited for.

    1 waits for the token of e from 0.0 on, and 2 behind it. The later the token is released, the longer it rests.
    """
    scheduler = new_scheduler(engine("e", 3), release="greedy")
    assert [arrive(scheduler, number, prompt) for number, prompt in enumerate([25.0, LARGE, LARGE])] == [
        [("e", 0)],
        [],
        [],
    ]
    assert scheduler.handle(ForecastsRevised(()), 0.05) == []
    check(scheduler)
    scheduler.handle(RequestCancelled(1), 0.06)
    token = scheduler.engines["e"].memory_token
    assert token.holder is scheduler.requests[2]
    assert token.rests_until_s == 0.0


def test_what_a_release_lets_go_on_a_busy_engine_starts_on_an_idle_one_if_it_fits_there_only() -> None:
    """World 523700693: 1 formed a batch for b, waited for its memory, and was not tried on a, which was asked before.

    The plan makes idle engines wait for four requests; busy ones take all they can.
    """
    scheduler = new_scheduler(engine("b", 3), order="flex", preemption="off", release="table", batch_size=4)
    assert arrive(scheduler, 0, 25.0) == [("b", 0)]
    table = DispatchTable((0, 0, 0, 0, 4), (), (), service_s=(1.0,) * 4, late_s=(1.0,) * 4, wait_s_max=9.0)
    scheduler.handle(DispatchSolved(DispatchPlan((0,), (table,)), ""), 0.0)
    scheduler.handle(EngineReady(engine("a", 3)), 0.0)
    assert arrive(scheduler, 1, LARGE) == [("a", 1)]


def test_of_shares_that_hold_as_much_of_a_full_queue_the_same_makes_room_in_every_run() -> None:
    """World 1503201046: the share depended on where the process had its objects, so a journal did not replay."""
    engines = [EngineInfo(model, 1, False, models=(model,)) for model in ("a", "b")]
    schedulers = [new_scheduler(*engines, release="greedy", queue_requests_max=4) for _ in range(20)]
    for number, (model, share) in enumerate([("a", "x"), ("b", "y")] + 2 * [("a", "x"), ("b", "y")]):
        for scheduler in schedulers:
            scheduler.handle(RequestArrived(Request(number, 4.0, model=model, share=share)), 0.0)
    last = RequestArrived(Request(6, 4.0, model="a", share="z"))
    assert [scheduler.handle(last, 0.0) for scheduler in schedulers] == 20 * [[FailRequest(4, "queue_full")]]


def test_a_returned_batch_is_tried_again_after_a_batch_that_forms_has_made_look_ahead_places_usable() -> None:
    """Worlds 1503201625 and 48457465: 0 waited for the next event beside the look-ahead place of b.

    a failed 0, and b's place ahead needs two formed requests. Then the other share's 3 forms for a, whose memory 1
    leaves too little of, and blocks both engines.
    """
    scheduler = new_scheduler(engine("a", 2), engine("b", 1, 1, None), release="greedy", batch_size=2)
    started = [
        starts(scheduler.handle(RequestArrived(Request(number, 4.0, prompt_tokens=prompt, share=share)), 0.0))
        for number, (share, prompt) in enumerate([("x", SMALL), ("y", LARGE), ("x", SMALL), ("y", 20.0)])
    ]
    assert started == [[("a", 0)], [("a", 1)], [("b", 2)], []]
    assert fails(scheduler, "a", 0) == [("b", 0)]
    check(scheduler)
