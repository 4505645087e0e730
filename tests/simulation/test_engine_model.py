"""Simulated engines: worked examples, the theory of processor sharing, and ends that move in a cluster."""

from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given
from worlds.invariants import check

from bins.curve import Curve
from bins.profile import Profile
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    AnswerBegan,
    BatchEnded,
    Event,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
)
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import Costs, Loading, ProfileEngine, StepEngine, TimedEngine


def profile(**values: object) -> Profile:
    """A step of n sequences takes n + 1 seconds and 10 n + 5 joules; 3 W when idle."""
    defaults = {"step_s": Curve.affine(1, 1), "step_j": Curve.affine(10, 5), "idle_w": 3.0, "source": "a test"}
    return Profile(name="test", energy_source="modelled", **{**defaults, **values})  # type: ignore[arg-type]


def refill(lengths: list[float], slots: int = 4, look_ahead: int = 0, **values: object) -> ProfileEngine:
    return ProfileEngine(EngineInfo("e", slots, False, look_ahead), lengths, profile(**values))


def barrier(lengths: list[float], slots: int = 4, **values: object) -> ProfileEngine:
    return ProfileEngine(EngineInfo("e", slots, True), lengths, profile(**values))


def batch(*request_ids: int, batch_id: int = 1) -> Batch:
    requests = tuple([Request(request_id) for request_id in request_ids])
    return Batch(batch_id, 0, requests, 0.0, len(requests))


def run_out(engine: StepEngine) -> list[tuple[float, object]]:
    """(time_s, request or batch id) of all remaining ends."""
    ends: list[tuple[float, object]] = []
    while (at_s := engine.next_end_s) is not None:
        event = engine.end(at_s)
        ends.append((at_s, event.request_id if isinstance(event, RequestEnded) else event.batch_id))  # type: ignore[union-attr]
    return ends


# ---- refill ----


def test_a_request_alone_takes_its_tokens_times_the_step_of_one() -> None:
    engine = refill([3])
    engine.start(batch(0), 1.0)
    assert engine.next_end_s == 1 + 3 * 2
    assert engine.end(7.0) == RequestEnded("e", 0, "completed", 3)
    assert engine.next_end_s is None
    assert engine.energy_j(elapsed_s=10) == 3 * 15 + 3.0 * (10 - 6)


def test_sequences_that_run_together_share_longer_steps() -> None:
    """Lengths 2, 3, 5 at once: 2 steps of three, 1 of two, 2 of one."""
    engine = refill([2, 3, 5])
    engine.start(batch(0, 1, 2), 0.0)
    assert run_out(engine) == [(8, 0), (11, 1), (15, 2)]
    assert engine.busy_j == 2 * 35 + 1 * 25 + 2 * 15
    assert engine.utilisation(15.0) == pytest.approx((3 * 8 + 2 * 3 + 1 * 4) / (4 * 15))


def test_a_request_that_joins_delays_the_ends_of_the_others() -> None:
    """Alone for a second it has done half of two tokens' first; the other 1.5 tokens take three seconds each."""
    engine = refill([2, 9])
    engine.start(batch(0), 0.0)
    assert engine.next_end_s == 4.0
    engine.start(batch(1), 1.0)
    assert engine.next_end_s == pytest.approx(1 + 1.5 * 3)


def test_requests_beyond_the_slots_wait_inside_the_engine() -> None:
    engine = refill([4, 6, 1], slots=2, look_ahead=1)
    engine.start(batch(0, 1), 0.0)
    engine.start(batch(2), 1.0)
    assert run_out(engine) == [(12, 0), (15, 2), (17, 1)]


def test_requests_that_wait_inside_an_engine_start_by_turn() -> None:
    engine = refill([4, 4, 4, 1], slots=1, look_ahead=3)
    for request_id, turn in ((0, None), (1, 3.0), (2, 2.0), (3, 1.0)):
        engine.start(msgspec.structs.replace(batch(request_id), turn=turn), 0.0)
    assert [request_id for _, request_id in run_out(engine)] == [0, 3, 2, 1]


def test_a_prefill_comes_first_and_slows_no_other_request() -> None:
    """The first runs alone from 10 s; the second's prefill ends at 13 s; then both share the first's second token."""
    engine = refill([2, 2], prefill_s=10.0, prefill_j=7.0, step_s=Curve.affine(1, 1))
    engine.start(batch(0), 0.0)
    assert engine.next_end_s == 14.0
    engine.start(batch(1), 3.0)
    assert run_out(engine) == [(13 + 0.5 * 3, 0), (14.5 + 1.5 * 2, 1)]
    assert engine.busy_s == 17.5
    # 7.5 W with one request, in prefill or not, and 25/3 W with two. Prefills cost no energy of their own.
    assert engine.busy_j == pytest.approx((3 + 3) * 7.5 + (10 + 1.5) * 25 / 3)


def test_a_refill_engine_draws_the_same_power_in_prefill_as_in_a_step() -> None:
    engine = refill([2, 2], prefill_s=10.0, prefill_j=7.0)
    engine.start(batch(0, 1), 0.0)
    run_out(engine)
    assert engine.busy_s == 10 + 2 * 3
    assert engine.energy_j(elapsed_s=20) == pytest.approx(16 * 25 / 3 + 4 * 3.0)


def test_two_requests_that_are_both_in_prefill_are_predicted_to_share_their_steps() -> None:
    engine = refill([2, 2], prefill_s=1.0)
    engine.start(batch(0, 1), 0.0)
    assert engine.next_end_s == 1 + 2 * 3


@pytest.mark.parametrize("prefill_s", [0.0, 1.0])
def test_an_aborted_request_leaves_its_slot_and_the_others_run_faster(prefill_s: float) -> None:
    engine = refill([4, 4, 2], slots=2, look_ahead=1, prefill_s=prefill_s)
    engine.start(batch(0, 1, 2), 0.0)
    engine.abort(2, prefill_s)  # while request 2 waits
    engine.abort(1, prefill_s + 3.0)  # while request 1 runs: both have a token
    assert run_out(engine) == [(prefill_s + 3 + 3 * 2, 0)]


def test_a_slot_that_an_aborted_request_leaves_goes_to_a_waiting_request() -> None:
    engine = refill([4, 1], slots=1, look_ahead=1)
    engine.start(batch(0, 1), 0.0)
    engine.abort(0, 5.0)
    assert run_out(engine) == [(7, 1)]


def test_aborts_in_prefill_and_of_unknown_requests_do_no_harm() -> None:
    engine = refill([4, 1], prefill_s=2.0)
    engine.start(batch(0, 1), 0.0)
    engine.abort(1, 1.0)
    engine.abort(7, 1.0)
    assert run_out(engine) == [(2 + 4 * 2, 0)]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from([0.0, 2.0]),
)
def test_virtual_steps_equal_small_ticks_of_time(arrivals: list[tuple[int, int]], slots: int, prefill_s: float) -> None:
    """Against ticks of 1/60 s, each of which advances every running request by 1 / (60 step_s(n)) tokens."""
    arrivals = sorted(arrivals)
    lengths = [float(length) for _, length in arrivals]
    engine = refill(lengths, slots=slots, look_ahead=99, prefill_s=prefill_s)
    ends: list[tuple[float, int]] = []
    for request_id, (at_s, _) in enumerate(arrivals):
        while engine.next_end_s is not None and engine.next_end_s <= at_s:
            now_s = engine.next_end_s
            ends.append((now_s, engine.end(now_s).request_id))  # type: ignore[union-attr]
        engine.start(batch(request_id), float(at_s))
    ends += run_out(engine)  # type: ignore[arg-type]
    ticked = _tick([at_s for at_s, _ in arrivals], lengths, slots, prefill_s)
    late_s = 2 * len(lengths) / 60  # an end is noticed at most a tick late, and delays the others by no more
    assert {request_id: pytest.approx(at_s, abs=late_s) for at_s, request_id in ends} == ticked


def _tick(arrivals_s: list[int], lengths: list[float], slots: int, prefill_s: float) -> dict[int, float]:
    """Ends by request id."""
    steps_left = dict(enumerate(lengths))
    prefill = dict.fromkeys(steps_left, prefill_s * 60)
    inside: list[int] = []
    ends: dict[int, float] = {}
    tick = 0
    while steps_left:
        waiting = [id_ for id_ in steps_left if id_ not in inside and arrivals_s[id_] * 60 <= tick]
        inside += waiting[: slots - len(inside)]
        running = [id_ for id_ in inside if prefill[id_] <= 0]
        for id_ in inside:
            prefill[id_] -= 1
        tick += 1
        for id_ in running:
            steps_left[id_] -= 1 / (60 * (len(running) + 1))
            if steps_left[id_] <= 1e-9:
                ends[id_] = tick / 60
                del steps_left[id_]
                inside.remove(id_)
    return ends


@pytest.mark.parametrize("sigma", [0.3, 1.2])
def test_many_slots_equal_processor_sharing_whose_latency_does_not_depend_on_the_spread(sigma: float) -> None:
    """M/G/1-PS: a step of n takes n times a step of one; the mean latency is E[S] / (1 - rho) for any distribution."""
    rng = np.random.default_rng(1)
    lengths = rng.lognormal(-(sigma**2) / 2, sigma, 60_000)  # mean 1
    arrivals_s = np.cumsum(rng.exponential(2.0, lengths.size)).tolist()
    engine = refill(lengths.tolist(), slots=1_000, step_s=Curve.affine(1, 0))
    ended_s = np.zeros(lengths.size)

    def let_end(until_s: float) -> None:
        while (at_s := engine.next_end_s) is not None and at_s <= until_s:
            ended_s[engine.end(at_s).request_id] = at_s  # type: ignore[union-attr]

    for request_id, at_s in enumerate(arrivals_s):
        let_end(at_s)
        engine.start(batch(request_id), at_s)
    let_end(np.inf)
    latency_s = ended_s - arrivals_s
    assert latency_s.mean() == pytest.approx(1 / (1 - 0.5), rel=0.04)
    long = lengths > 1.2  # a request of length x takes x / (1 - rho)
    assert latency_s[long].mean() == pytest.approx(2 * lengths[long].mean(), rel=0.05)
    assert engine.busy_s == pytest.approx(lengths.sum())


# ---- barrier ----


def test_a_batch_takes_its_longest_length_times_the_step_of_its_size() -> None:
    engine = barrier([2, 7, 3], prefill_s=1.5, prefill_j=20.0)
    engine.start(batch(0, 1, 2, batch_id=9), 2.0)
    assert engine.next_end_s == 2 + 1.5 + 7 * 4
    assert engine.end(31.5) == BatchEnded("e", 9, {0: 2, 1: 7, 2: 3})
    assert engine.energy_j(elapsed_s=40) == pytest.approx(20 + 7 * 35 + 3.0 * (40 - 29.5))
    assert engine.utilisation(59.0) == 0.5


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_batch_takes_the_energy_of_its_profile(size: int) -> None:
    lengths = [2.0, 7.0, 3.0, 5.0][:size]
    engine = barrier(lengths, prefill_s=1.5, prefill_j=20.0)
    engine.start(batch(*range(size)), 0.0)
    run_out(engine)
    expected_j = profile(prefill_s=1.5, prefill_j=20.0).energy_j([[max(lengths)]], [size])[0, 0]
    assert engine.busy_j == pytest.approx(expected_j)


@pytest.mark.parametrize("is_barrier", [False, True])
def test_a_profile_whose_energy_is_unknown_gives_times_and_no_joules(is_barrier: bool) -> None:
    timed = Profile.timed("timed", Curve.affine(1, 1), source="a test")
    engine = ProfileEngine(EngineInfo("e", 4, is_barrier), [3.0], timed)
    engine.start(batch(0), 0.0)
    assert run_out(engine) == [(6.0, 1 if is_barrier else 0)]
    assert engine.energy_j(10.0) is None


@pytest.mark.parametrize("prefill_s", [0.0, 5.0])
def test_a_batch_whose_longest_is_aborted_ends_with_the_longest_remaining_one(prefill_s: float) -> None:
    engine = barrier([2, 7, 3], prefill_s=prefill_s)
    engine.start(batch(0, 1, 2), 0.0)
    engine.abort(1, 1.0)
    assert engine.next_end_s == prefill_s + 3 * 4
    assert engine.end(prefill_s + 12) == BatchEnded("e", 1, {0: 2, 2: 3})


def test_a_batch_that_is_past_its_remaining_requests_ends_at_once() -> None:
    engine = barrier([2, 7])
    engine.start(batch(0, 1), 0.0)
    engine.abort(1, 10.0)
    assert engine.next_end_s == 10.0


@pytest.mark.parametrize("prefill_s", [0.0, 5.0])
def test_a_batch_whose_requests_are_all_aborted_leaves_its_engine_free(prefill_s: float) -> None:
    engine = barrier([2, 7], prefill_s=prefill_s)
    engine.start(batch(0, 1), 0.0)
    engine.abort(0, 1.0)
    engine.abort(1, 1.0)
    assert engine.next_end_s is None
    engine.start(batch(0, batch_id=2), 1.0)
    assert engine.next_end_s == 1 + prefill_s + 2 * 2


# ---- first bytes ----


def remaining_events(engine: StepEngine) -> list[tuple[float, Event]]:
    """(time_s, event) of all remaining events."""
    events = []
    while (at_s := engine.next_end_s) is not None:
        events.append((at_s, engine.end(at_s)))
    return events


def test_streams_of_a_batch_begin_after_its_prefill_and_first_step() -> None:
    engine = TimedEngine(EngineInfo("e", 4, True), [5.0, 8.0, 3.0], step_s=0.5, prefill_s=1.0, streaming={0, 2})
    engine.start(batch(0, 1, 2), 0.0)
    assert remaining_events(engine) == [
        (1.5, AnswerBegan(0)),
        (1.5, AnswerBegan(2)),
        (5.0, BatchEnded("e", 1, {0: 5.0, 1: 8.0, 2: 3.0})),
    ]


def test_in_slots_each_stream_begins_after_its_own_first_step_at_the_shared_speed() -> None:
    """Alone a step takes 2 s, with two sequences 3 s: the second joins in the middle of the first's first step."""
    engine = StepEngine(EngineInfo("e", 2, False), [2.0, 2.0], Costs([0.0, 2.0, 3.0], [0.0] * 3), streaming={0, 1})
    engine.start(batch(0), 0.0)
    engine.start(batch(1), 1.0)
    assert remaining_events(engine) == [
        (2.5, AnswerBegan(0)),
        (4.0, AnswerBegan(1)),
        (5.5, RequestEnded("e", 0, "completed", 2.0)),
        (6.5, RequestEnded("e", 1, "completed", 2.0)),
    ]


def test_an_answer_shorter_than_a_token_begins_as_it_ends() -> None:
    engine = TimedEngine(EngineInfo("e", 1, False), [0.5], step_s=1.0, streaming={0})
    engine.start(batch(0), 0.0)
    assert remaining_events(engine) == [(0.5, AnswerBegan(0)), (0.5, RequestEnded("e", 0, "completed", 0.5))]


def test_an_aborted_request_has_no_first_byte() -> None:
    engine = TimedEngine(EngineInfo("e", 2, True), [5.0, 8.0], step_s=1.0, streaming={0, 1})
    engine.start(batch(0, 1), 0.0)
    engine.abort(0, 0.5)
    assert remaining_events(engine) == [(1.0, AnswerBegan(1)), (8.0, BatchEnded("e", 1, {1: 8.0}))]


@pytest.mark.parametrize("is_barrier", [False, True])
def test_constant_steps_do_not_depend_on_other_requests_and_have_no_known_energy(is_barrier: bool) -> None:
    engine = TimedEngine(EngineInfo("e", 2, is_barrier), [5.0, 8.0], step_s=0.5, prefill_s=1.0)
    engine.start(batch(0, 1), 0.0)
    assert run_out(engine) == ([(5.0, 1)] if is_barrier else [(3.5, 0), (5.0, 1)])
    assert engine.energy_j(10.0) is None


def batch_of_prompts(*prompt_tokens: float) -> Batch:
    """Requests 0, 1, ... with prompts of these sizes."""
    requests = tuple([Request(id_, prompt_tokens=tokens) for id_, tokens in enumerate(prompt_tokens)])
    return Batch(1, 0, requests, 0.0, len(requests))


def test_a_static_batch_prefills_its_prompts_in_turn() -> None:
    engine = TimedEngine(EngineInfo("e", 2, True), [5.0, 8.0], step_s=0.5, prefill_s=1.0, prefill_s_per_token=0.1)
    engine.start(batch_of_prompts(20, 30), 0.0)
    assert run_out(engine) == [(1 + 50 * 0.1 + 8 * 0.5, 1)]
    assert engine.costs.batch_s([8.0], 2, prompt_tokens_mean=25) == pytest.approx(10.0)


def test_a_short_prompt_that_comes_later_may_be_prefilled_earlier() -> None:
    engine = TimedEngine(EngineInfo("e", 3, False), [5.0, 5.0, 5.0], step_s=1.0, prefill_s_per_token=0.1)
    engine.start(batch_of_prompts(40, 10, 0), 2.0)
    assert run_out(engine) == [(7.0, 2), (8.0, 1), (11.0, 0)]
    assert engine.costs.alone_s([5.0, 5.0], [40, 10]).tolist() == [9.0, 6.0]


def test_an_aborted_prefill_does_not_delay_the_others() -> None:
    engine = TimedEngine(EngineInfo("e", 2, False), [5.0, 5.0, 5.0], step_s=1.0, prefill_s_per_token=0.1)
    engine.start(batch_of_prompts(40, 10, 20), 0.0)
    engine.abort(1, 0.5)
    assert run_out(engine) == [(0.5 + 2.0 + 5.0, 2), (9.0, 0)]


def test_steps_that_take_no_time_end_at_once() -> None:
    engine = TimedEngine(EngineInfo("e", 2, False), [5.0, 8.0], step_s=0.0)
    engine.start(batch(0, 1), 3.0)
    assert run_out(engine) == [(3.0, 0), (3.0, 1)]


def test_a_profile_of_fewer_sequences_than_the_engine_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="of 4 sequences, not 5"):
        refill([1.0], slots=5, slots_max=4)


# ---- under a cluster ----


class Script:
    """A scheduler that returns set actions for set events."""

    requests: tuple[int, ...] = ()
    batch_lane = SimpleNamespace(waiting=())
    wake_at_s = None

    def __init__(self, actions: dict[object, list[Action]]) -> None:
        self.actions = actions
        self.seen: list[tuple[float, object]] = []

    def handle(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, RequestArrived):
            key: object = event.request.id
        elif isinstance(event, RequestEnded):
            key = event.outcome, event.request_id
        else:
            key = type(event).__name__
        self.seen.append((now_s, key))
        return self.actions.get(key, [])


def test_an_end_that_moves_is_reported_once_and_at_its_new_time() -> None:
    script = Script({0: [StartBatch("e", batch(0))], 1: [StartBatch("e", batch(1))]})
    cluster = SimulatedCluster(script, [refill([2, 9])])  # type: ignore[arg-type]
    cluster.run(iter([(0.0, Request(0)), (1.0, Request(1))]), flush=False)
    ends = [(at_s, key) for at_s, key in script.seen if isinstance(key, tuple)]
    assert ends == [(pytest.approx(5.5), ("completed", 0)), (pytest.approx(5.5 + 7.5 * 2), ("completed", 1))]


def test_an_aborted_request_is_reported_at_once_and_never_again() -> None:
    script = Script({0: [StartBatch("e", batch(0, 1))], 2: [AbortRequest("e", 0)]})
    cluster = SimulatedCluster(script, [refill([2, 9, 1])])  # type: ignore[arg-type]
    cluster.run(iter([(0.0, Request(0)), (3.0, Request(2)), (3.0, Request(3))]), flush=False)
    assert script.seen[2:] == [(3.0, 2), (3.0, ("cancelled", 0)), (3.0, 3), (3 + 8 * 2, ("completed", 1))]


def test_a_cancelled_request_frees_its_slot_for_the_next_on_a_real_scheduler() -> None:
    scheduler = SchedulingConfig(bins=1, release="greedy").resolved(barrier=False).scheduler()
    handle, ended = scheduler.handle, {}

    def the_client_of_0_leaves_as_2_comes(event: Event, now_s: float) -> list[Action]:
        if isinstance(event, RequestEnded):
            ended[event.request_id] = now_s
        if isinstance(event, RequestArrived) and event.request.id == 2:
            return handle(RequestCancelled(0), now_s)
        return handle(event, now_s)

    scheduler.handle = the_client_of_0_leaves_as_2_comes  # type: ignore[method-assign]
    cluster = SimulatedCluster(scheduler, [refill([100, 3], slots=1)])
    cluster.run(iter([(0.0, Request(0)), (0.0, Request(1)), (4.0, Request(2))]))
    assert ended == {0: 4.0, 1: 4.0 + 3 * 2}
    check(scheduler)


def test_a_hundred_engines_end_in_the_order_of_time() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.exponential(20.0, 5_000).tolist()
    config = SchedulingConfig(bins=1, release="greedy", queue_requests_max=10**6).resolved(barrier=False)
    engines = [ProfileEngine(EngineInfo(f"e{number}", 4, False), lengths, profile()) for number in range(100)]
    times: list[float] = []
    cluster = SimulatedCluster(config.scheduler(), list(engines), on_step=lambda now_s, *_: times.append(now_s))
    cluster.run((at_s, Request(id_)) for id_, at_s in enumerate(np.linspace(0, 500, 5_000).tolist()))
    assert times == sorted(times)
    assert not cluster.scheduler.requests
    assert len(times) == 100 + 2 * 5_000 + 1


# ---- models in turn ----


def of_model(model: str, *request_ids: int) -> Batch:
    return msgspec.structs.replace(batch(*request_ids), model=model)


def in_turn(lengths: list[float], slots: int = 2, models_at_once: int = 1) -> StepEngine:
    info = EngineInfo("e", slots, False, look_ahead=9)
    return StepEngine(info, lengths, Costs.constant(1.0, 0.0, slots), loading=Loading(models_at_once, 10.0))


def test_a_request_waits_for_the_load_of_its_model_and_the_next_of_the_model_does_not() -> None:
    engine = in_turn([2, 3])
    engine.start(of_model("a", 0), 0.0)
    assert run_out(engine) == [(12, 0)]
    engine.start(of_model("a", 1), 20.0)
    assert run_out(engine) == [(23, 1)]
    assert engine.loads == 1


def test_a_load_waits_until_the_model_before_has_no_request_and_holds_up_those_behind() -> None:
    engine = in_turn([2, 2, 2])
    for request_id, model in enumerate("aba"):
        engine.start(of_model(model, request_id), 0.0)
    assert run_out(engine) == [(12, 0), (24, 1), (36, 2)]
    assert engine.loads == 3


def test_requests_that_come_during_a_load_begin_at_its_end() -> None:
    engine = in_turn([2, 4])
    engine.start(of_model("a", 0), 0.0)
    engine.start(of_model("a", 1), 5.0)
    assert run_out(engine) == [(12, 0), (14, 1)]


def test_two_models_that_fit_run_side_by_side_and_the_one_used_longest_ago_makes_room() -> None:
    engine = in_turn([2, 5, 2, 2], models_at_once=2)
    for request_id, model in enumerate("abcb"):
        engine.start(of_model(model, request_id), 0.0)
    assert run_out(engine) == [(12, 0), (15, 1), (17, 3), (24, 2)]
    assert engine.loads == 3


def test_an_aborted_request_that_waits_for_a_load_lets_those_behind_it_go() -> None:
    engine = in_turn([4, 1, 2])
    for request_id, model in enumerate("aba"):
        engine.start(of_model(model, request_id), 0.0)
    engine.abort(1, 11.0)
    assert run_out(engine) == [(13, 2), (14, 0)]
