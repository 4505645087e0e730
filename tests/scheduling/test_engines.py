"""What an engine is given: requests for its slots, look-ahead and memory, and none while its circuit is open."""

from __future__ import annotations

import random

import msgspec
import pytest
from test_orders import one_by_one
from test_scheduler import arrive, new_scheduler, step
from worlds.invariants import check

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    EngineClosed,
    EngineLost,
    EngineReady,
    FailRequest,
    ReportCircuit,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
    TimerFired,
)


def placed(actions: list[Action]) -> list[tuple[int, str]]:
    """(request, engine) of all started requests."""
    return [
        (request.id, action.engine)
        for action in actions
        if isinstance(action, StartBatch)
        for request in action.batch.requests
    ]


def engine(name: str = "gpu0", slots: int = 2, **fields: object) -> EngineInfo:
    return EngineInfo(name, slots, False, **fields)  # type: ignore[arg-type]


# ---- look-ahead ----


def test_a_single_engine_always_gets_its_look_ahead() -> None:
    scheduler = one_by_one("fffs", engine(look_ahead=1))
    assert placed(arrive(scheduler, 1, 2, 3)) == [(1, "gpu0"), (2, "gpu0"), (3, "gpu0")]
    assert placed(arrive(scheduler, 4)) == []
    assert placed(step(scheduler, RequestEnded("gpu0", 1, "completed", 1.0))) == [(4, "gpu0")]


def test_an_engine_that_goes_by_priority_gets_the_turns_of_its_requests() -> None:
    for by_priority in (True, False):
        scheduler = one_by_one("edf", engine(slots=1, look_ahead=2, by_priority=by_priority))
        requests = [Request(number, deadline_s=due_s) for number, due_s in ((1, 9.0), (2, 8.0), (3, 7.0))]
        actions = [action for request in requests for action in step(scheduler, RequestArrived(request))]
        turns = [action.batch.turn for action in actions if isinstance(action, StartBatch)]
        assert turns == ([9.0, 8.0, 7.0] if by_priority else [None] * 3)


def test_time_in_an_engines_own_queue_is_no_service_time() -> None:
    seconds = []
    for look_ahead in (0, 7):
        scheduler = one_by_one("fffs", engine(slots=1, look_ahead=look_ahead))
        arrive(scheduler, *range(1, 201))
        for number in range(1, 193):  # one answer of 10 tokens each second
            step(scheduler, RequestEnded("gpu0", number, "completed", 10.0), now_s=float(number))
        seconds.append(scheduler.models[""].service.seconds_per_token)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)


def test_with_several_engines_some_requests_wait_for_slots_of_other_engines() -> None:
    scheduler = new_scheduler(
        engine("a", 1, look_ahead=2), engine("b", 1, look_ahead=2), batch_size=1, release="greedy"
    )
    assert len(placed(arrive(scheduler, 1, 2))) == 2
    assert placed(arrive(scheduler, 3)) == []
    assert placed(arrive(scheduler, 4)) == [(3, "a")]
    assert placed(step(scheduler, RequestEnded("b", 2, "completed", 1.0))) == [(4, "b")]


def test_a_free_slot_is_always_taken_before_a_look_ahead_place() -> None:
    scheduler = new_scheduler(
        engine("a", look_ahead=2), engine("b", look_ahead=2), batch_size=1, order="fffs", release="greedy"
    )
    starts = placed(arrive(scheduler, *range(20)))
    assert sorted(name for _, name in starts[:4]) == ["a", "a", "b", "b"]
    assert len(starts) == 8  # with two look-ahead places on each
    rng = random.Random(3)
    running = dict(starts)
    while running:
        request_id = rng.choice(sorted(running))
        name = running.pop(request_id)
        running.update(placed(step(scheduler, RequestEnded(name, request_id, "completed", 1.0))))
        loads = [sum(engine_name == name for engine_name in running.values()) for name in ("a", "b")]
        assert not scheduler.waiting or min(loads) >= 2, "a slot is free while requests wait"


# ---- memory ----


def test_a_request_that_would_overfill_the_cache_waits_first_in_the_queue() -> None:
    scheduler = one_by_one("fffs", engine(slots=8, tokens_max=1_000))
    big = [Request(number, 300.0, prompt_tokens=100.0) for number in range(3)]  # and 16 for a block's rounding
    assert [id_ for id_, _ in placed(arrive(scheduler, *big))] == [0, 1]
    assert placed(arrive(scheduler, Request(3, 5.0))) == [], "nothing overtakes a request that waits for memory"
    assert [id_ for id_, _ in placed(step(scheduler, RequestEnded("gpu0", 0, "completed", 300.0), 6.0))] == [2, 3]


def test_a_large_request_that_failed_once_is_not_overtaken_while_it_waits_for_memory() -> None:
    scheduler = one_by_one("fffs", engine(slots=8, tokens_max=1_000))
    arrive(scheduler, Request(0, 600.0), Request(1, 350.0))
    assert placed(fail(scheduler, "gpu0", 0, 0.0)) == [(0, "gpu0")]
    arrive(scheduler, Request(2, 500.0))
    assert placed(fail(scheduler, "gpu0", 0, 0.0)) == [(0, "gpu0")]
    assert placed(arrive(scheduler, Request(3, 1.0))) == [(3, "gpu0")], "2 waits without the turn, which 0 has"


def test_memory_of_requests_that_end_earlier_counts_as_free() -> None:
    """All ends need 900 tokens, but the nearly finished request frees its tokens before the other has grown."""
    scheduler = one_by_one("fffs", engine(slots=8, tokens_max=900))
    arrive(scheduler, Request(0, 400.0, prompt_tokens=100.0))
    assert placed(arrive(scheduler, Request(1, 400.0, prompt_tokens=10.0))) == []
    now_s, started = 0.0, []
    while not started and now_s < 8.0:  # at 8 s all 400 tokens of the first one are generated and freed
        assert scheduler.wake_at_s is not None
        now_s = scheduler.wake_at_s
        started = placed(step(scheduler, TimerFired(), now_s))
    assert started == [(1, "gpu0")]
    # At 0.9 s the first has 45 tokens. Both grow by 355 more until it ends: 161 + 26 + 2 * 355 = 897, blocks included.
    assert 0.8 < now_s < 1.0


def test_answers_that_outgrow_their_predictions_count_as_what_they_have_become() -> None:
    scheduler = one_by_one("fffs", engine(slots=8, tokens_max=1_000))
    arrive(scheduler, Request(0, 10.0), Request(1, 10.0))
    newcomer = Request(2, 450.0)
    assert placed(arrive(scheduler, newcomer, now_s=8.0)) == [], "400 tokens each by now, whatever was predicted"
    assert placed(step(scheduler, RequestEnded("gpu0", 0, "completed", 400.0), 8.0)) == [(2, "gpu0")]


def test_a_request_that_fits_nowhere_runs_alone() -> None:
    scheduler = one_by_one("fffs", engine(slots=8, tokens_max=100))
    assert placed(arrive(scheduler, Request(0, 5_000.0), Request(1, 5.0))) == [(0, "gpu0")]
    assert placed(step(scheduler, RequestEnded("gpu0", 0, "completed", 90.0), 1.0)) == [(1, "gpu0")]


def shares(number: int, *own: int) -> Request:
    """A request with an answer of 50 tokens, whose prompt begins with four blocks that all have, of 100 tokens each."""
    blocks = (1, 2, 3, 4, *own)
    return Request(number, 50.0, prompt_tokens=100.0 * len(blocks), blocks=blocks, block_tokens=100.0)


def test_what_prompts_have_in_common_fills_the_cache_once() -> None:
    """Of 1,000 tokens the prompts have 400 in common, and each request 66 of its own, with a block's rounding."""
    scheduler = one_by_one("fffs", engine(slots=64, tokens_max=1_000))
    assert len(placed(arrive(scheduler, *map(shares, range(16))))) == 9
    assert len(placed(step(scheduler, RequestEnded("gpu0", 0, "completed", 50.0), 0.0))) == 1


def test_a_prompt_that_begins_otherwise_has_nothing_in_common() -> None:
    scheduler = one_by_one("fffs", engine(slots=64, tokens_max=1_000))
    arrive(scheduler, shares(0), shares(1))
    other = Request(2, 50.0, prompt_tokens=500.0, blocks=(9, 2, 3, 4, 5), block_tokens=100.0)
    assert placed(arrive(scheduler, other)) == []
    assert placed(step(scheduler, RequestCancelled(2), 0.0)) == []
    assert placed(arrive(scheduler, shares(3, 5))) == [(3, "gpu0")]


def test_what_prompts_have_in_common_is_forgotten_once_the_memory_is_ample_and_counted_anew() -> None:
    scheduler, number = one_by_one("fffs", engine(slots=64, tokens_max=1_000)), 0
    for _ in range(3):
        started = placed(arrive(scheduler, *map(shares, range(number, number + 9))))
        assert len(started) == 9
        for request_id, name in started:
            step(scheduler, RequestEnded(name, request_id, "completed", 50.0), 0.0)
        number += 9


def test_every_engine_is_tried_for_memory() -> None:
    small, large = engine("a", slots=4, tokens_max=200), engine("b", slots=2, tokens_max=10_000)
    scheduler = new_scheduler(small, large, batch_size=1, order="fffs", release="greedy")
    assert placed(arrive(scheduler, Request(0, 150.0), Request(1, 150.0))) == [(0, "a"), (1, "b")]


# ---- prompts that an engine has ----


def asks(number: int, *blocks: int) -> Request:
    return Request(number, prompt_tokens=100.0 * len(blocks), blocks=blocks, block_tokens=100.0)


def test_among_free_slots_the_engine_that_has_most_of_the_prompt_is_preferred() -> None:
    scheduler = new_scheduler(engine("a", 8), engine("b", 8), batch_size=1, order="fffs", release="greedy")
    assert placed(arrive(scheduler, asks(0, 1))) == [(0, "a")]
    assert placed(arrive(scheduler, asks(1, 2))) == [(1, "b")]
    assert placed(arrive(scheduler, asks(2, 2, 3))) == [(2, "b")]
    assert placed(arrive(scheduler, asks(3, 1, 4))) == [(3, "a")]
    assert placed(arrive(scheduler, asks(4, 2, 3))) == [(4, "b")]


def test_a_common_prefix_does_not_fill_one_engine_beside_an_idle_one() -> None:
    scheduler = new_scheduler(engine("a", 8), engine("b", 8), batch_size=1, order="fffs", release="greedy")
    names = [name for _, name in placed(arrive(scheduler, *(asks(number, 1) for number in range(16))))]
    for count in range(1, 17):
        assert abs(2 * names[:count].count("a") - count) <= 3
    assert placed(arrive(scheduler, asks(99, 1))) == []


def test_affinity_never_makes_a_request_wait_for_its_engine() -> None:
    scheduler = new_scheduler(engine("a", 1), engine("b", 1), batch_size=1, order="fffs", release="greedy")
    arrive(scheduler, asks(0, 1))
    assert placed(arrive(scheduler, asks(1, 1))) == [(1, "b")]


# ---- closing ----


def test_a_closed_engine_finishes_its_requests_and_gets_no_more() -> None:
    scheduler = new_scheduler(engine("a"), engine("b"), batch_size=1, order="fffs", release="greedy")
    arrive(scheduler, 0, 1, 2, 3, 4)
    assert placed(step(scheduler, EngineClosed("a"))) == []
    assert placed(step(scheduler, RequestEnded("a", 0, "completed", 3.0))) == []
    assert placed(step(scheduler, RequestEnded("b", 1, "completed", 3.0))) == [(4, "b")]
    assert placed(arrive(scheduler, 5)) == []
    assert placed(step(scheduler, EngineReady(engine("a")))) == [(5, "a")]
    assert len(scheduler.engines["a"].running) == 2, "its earlier requests still count"


def test_a_closed_engine_may_still_be_lost_with_its_requests() -> None:
    scheduler = new_scheduler(engine("a"), engine("b"), batch_size=1, order="fffs", release="greedy")
    arrive(scheduler, 0, 1)
    step(scheduler, EngineClosed("a"))
    assert placed(step(scheduler, EngineLost("a"))) == [(0, "b")]


def test_when_the_only_engine_is_closed_new_requests_are_refused() -> None:
    scheduler = one_by_one("fffs")
    step(scheduler, EngineClosed("gpu0"))
    assert arrive(scheduler, 1) == [FailRequest(1, "no_engine", None)]


# ---- circuits ----


def fail(scheduler: object, name: str, request_id: int, now_s: float) -> list[Action]:
    return step(scheduler, RequestEnded(name, request_id, "failed", fault=True, retryable=True), now_s)  # type: ignore[arg-type]


def test_after_repeated_failures_an_engine_pauses_then_gets_one_request() -> None:
    scheduler = one_by_one("fffs", engine(slots=4), circuit_faults_max=2, retries_max=9)
    arrive(scheduler, 0, 1, 2)
    assert placed(fail(scheduler, "gpu0", 0, 1.0)) == [(0, "gpu0")]
    assert fail(scheduler, "gpu0", 1, 1.0) == [ReportCircuit("gpu0", 1.0)]
    assert placed(arrive(scheduler, 3, now_s=1.5)) == []
    assert scheduler.wake_at_s == 2.0
    assert placed(step(scheduler, TimerFired(), 2.0)) == [(3, "gpu0")], "one request is on trial, and none that failed"
    assert placed(step(scheduler, RequestEnded("gpu0", 2, "completed", 5.0), 2.2)) == [], "2 was sent earlier"
    ended = step(scheduler, RequestEnded("gpu0", 3, "completed", 5.0), 2.5)
    assert ended[0] == ReportCircuit("gpu0", None)
    assert placed(ended) == [(1, "gpu0")]


def test_a_request_that_failed_is_tried_after_one_more_pause_if_no_other_comes() -> None:
    scheduler = one_by_one("fffs", engine(slots=4), circuit_faults_max=1, retries_max=9)
    arrive(scheduler, 0)
    assert fail(scheduler, "gpu0", 0, 1.0) == [ReportCircuit("gpu0", 1.0)]
    assert placed(step(scheduler, TimerFired(), 2.0)) == []
    assert scheduler.wake_at_s == 3.0
    assert placed(step(scheduler, TimerFired(), 3.0)) == [(0, "gpu0")]
    assert fail(scheduler, "gpu0", 0, 3.5) == [ReportCircuit("gpu0", 1.0)], "its failure does not lengthen the pause"


def test_retries_of_a_request_that_always_fails_open_no_circuit() -> None:
    scheduler = one_by_one("fffs", engine(slots=4), circuit_faults_max=2, retries_max=5)
    arrive(scheduler, 0)
    for _ in range(5):
        assert placed(fail(scheduler, "gpu0", 0, 1.0)) == [(0, "gpu0")]
    assert fail(scheduler, "gpu0", 0, 1.0) == [FailRequest(0, "engine_failed", None)]
    assert scheduler.engines["gpu0"].circuit.closed


def test_while_every_engine_fails_requests_wait_at_most_engine_wait_s() -> None:
    scheduler = one_by_one("fffs", engine(slots=4), circuit_faults_max=1, retries_max=0, engine_wait_s=5.0)
    arrive(scheduler, 0, 1)
    actions = fail(scheduler, "gpu0", 0, 0.0)
    assert actions == [ReportCircuit("gpu0", 1.0), FailRequest(0, "engine_failed", None)]
    arrive(scheduler, 2, 3, now_s=0.5)
    assert placed(step(scheduler, TimerFired(), 1.0)) == [(2, "gpu0")]  # the trial request hangs
    arrive(scheduler, 4, now_s=5.0)
    assert scheduler.wake_at_s == 5.5
    assert step(scheduler, TimerFired(), 5.5) == [FailRequest(3, "no_engine", None)]
    assert arrive(scheduler, 5, now_s=6.0) == [], "new requests wait for the outcome of the trial"
    assert scheduler.wake_at_s == 10.0, "each for as long"


def test_a_batch_that_a_barrier_engine_ends_closes_its_circuit() -> None:
    scheduler = new_scheduler(EngineInfo("gpu0", 2, True), circuit_faults_max=1)
    arrive(scheduler, 0, 1)
    fail(scheduler, "gpu0", 0, 0.0)
    step(scheduler, RequestEnded("gpu0", 1, "completed", 3.0))
    arrive(scheduler, 2)
    (trial,) = [action for action in step(scheduler, TimerFired(), 2.0) if isinstance(action, StartBatch)]
    assert step(scheduler, BatchEnded("gpu0", trial.batch.id, {0: 4.0}), 3.0)[0] == ReportCircuit("gpu0", None)


def test_while_one_engine_fails_the_others_serve() -> None:
    scheduler = new_scheduler(
        *(engine("a", 1), engine("b", 1)), batch_size=1, order="fffs", release="greedy", circuit_faults_max=1
    )
    arrive(scheduler, 0, 1)
    assert fail(scheduler, "a", 0, 0.0) == [ReportCircuit("a", 1.0)]
    assert placed(step(scheduler, RequestEnded("b", 1, "completed", 3.0), 0.1)) == [(0, "b")]
    assert placed(arrive(scheduler, 2, now_s=0.2)) == []
    assert placed(step(scheduler, RequestEnded("b", 0, "completed", 3.0), 0.3)) == [(2, "b")]


def test_clients_errors_never_open_a_circuit() -> None:
    scheduler = one_by_one("fffs", circuit_faults_max=1)
    for request_id in range(50):
        arrive(scheduler, request_id)
        assert step(scheduler, RequestEnded("gpu0", request_id, "failed")) == []
    assert scheduler.engines["gpu0"].circuit.closed


def test_an_engine_that_comes_back_starts_with_a_closed_circuit() -> None:
    scheduler = one_by_one("fffs", circuit_faults_max=1)
    arrive(scheduler, 0)
    fail(scheduler, "gpu0", 0, 0.0)
    step(scheduler, EngineLost("gpu0"))
    assert placed(step(scheduler, EngineReady(engine(slots=1)))) == [(0, "gpu0")]


# ---- nothing leaks ----


def test_after_100_000_random_disconnects_every_counter_is_zero() -> None:
    rng = random.Random(100_000)
    scheduler = new_scheduler(
        *(engine(name, 4, look_ahead=1, tokens_max=2_000) for name in ("a", "b", "c")),
        batch_size=1,
        order="shortest",
        release="greedy",
        queue_requests_max=200,
    )
    alive: dict[int, str | None] = {}  # request -> its engine; None: waiting
    cancelled = aborted = ended = 0
    now_s, next_id = 0.0, 0
    while cancelled < 100_000:
        now_s += rng.expovariate(1_000.0)
        choice = rng.random()
        if choice < 0.5 or not alive:
            next_id += 1
            request = Request(
                next_id,
                rng.uniform(1, 400),
                prompt_tokens=rng.uniform(0, 99),
                blocks=(1 + next_id % 7,),
                block_tokens=20.0,
            )
            actions = scheduler.handle(RequestArrived(request), now_s)
            if not any(isinstance(action, FailRequest) for action in actions):
                alive[next_id] = None
        else:
            request_id = next(iter(alive)) if rng.random() < 0.5 else rng.choice(list(alive))
            name = alive.pop(request_id)
            if choice < 0.97:
                cancelled += 1
                actions = scheduler.handle(RequestCancelled(request_id), now_s)
                if name is not None:
                    aborted += 1
                    actions += scheduler.handle(RequestEnded(name, request_id, "cancelled"), now_s)
            elif name is not None:
                ended += 1
                actions = scheduler.handle(RequestEnded(name, request_id, "completed", rng.uniform(1, 400)), now_s)
            else:
                alive[request_id] = None
                continue
        alive.update(placed(actions))
    assert min(aborted, cancelled - aborted, ended) > 1_000, "too few ends of some kind"
    for request_id, name in list(alive.items()):
        scheduler.handle(RequestCancelled(request_id), now_s)
        if name is not None:
            alive.update(placed(scheduler.handle(RequestEnded(name, request_id, "cancelled"), now_s)))
    for name, state in scheduler.engines.items():
        for request_id in list(state.running):
            scheduler.handle(RequestEnded(name, request_id, "cancelled"), now_s)
    check(scheduler)
    assert (len(scheduler.requests), scheduler.waiting, len(scheduler.queues("").formed)) == (0, 0, 0)
    assert [(len(state.running), state.total_tokens, state.room) for state in scheduler.engines.values()] == [
        (0, 0, 4)
    ] * 3


def test_an_engine_with_fewer_slots_than_requests_gets_none_until_a_slot_is_free() -> None:
    scheduler = one_by_one("fffs", engine(slots=4))
    arrive(scheduler, 0, 1, 2, 3, 4)
    assert placed(step(scheduler, EngineReady(msgspec.structs.replace(engine(), slots=2)))) == []
    assert placed(step(scheduler, RequestEnded("gpu0", 0, "completed", 1.0))) == []
    assert placed(step(scheduler, RequestEnded("gpu0", 1, "completed", 1.0))) == []
    assert placed(step(scheduler, RequestEnded("gpu0", 2, "completed", 1.0))) == [(4, "gpu0")]
