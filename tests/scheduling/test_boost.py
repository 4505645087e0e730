"""The order boost: by arrival less a boost that follows the load."""

from __future__ import annotations

import math
import random
from itertools import count

import numpy as np
import pytest
from test_orders import one_by_one, run_dry
from test_revised_forecasts import revised
from test_scheduler import arrive, new_scheduler, step

from llmserve.commands.simulate import Scenario, Summary, run, simulate
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.choice.orders import WAIT_MOST, FixedOrder, boosted, mean_turn
from llmserve.scheduling.load import LONGEST, LONGEST_CHANGES, MARGIN, Calibration, Load, Tail, Waits
from llmserve.scheduling.messages import EngineReady, RequestEnded
from llmserve.scheduling.queues import model_queues
from llmserve.scheduling.queues.waiting import PART, QueuedRequest, Room
from llmserve.scheduling.queues.window_queue import WindowQueue
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation import workload
from llmserve.simulation.predictions import Predictions
from llmserve.simulation.report import Recorder
from llmserve.simulation.scenario import Workload


def queued(tokens: float, *, at_s: float = 0.0, room: Room | None = None, long_s: float = math.inf) -> QueuedRequest:
    """A request of these tokens, one second each; the mean request takes 10 seconds, and may be delayed by 100."""
    waiting = QueuedRequest(Request(0), 0, at_s, None, tokens, tokens, tokens, 10.0)
    waiting.room, waiting.long_s = room or Room(0.0, 100.0, 500.0, 750.0), long_s
    return waiting


def of_margin(margin_s: float) -> Room:
    """The room while the wait is at its tail."""
    return Room(0.0, margin_s, 500.0, 750.0)


def load_of(scheduler: Scheduler) -> Load:
    load = scheduler.queues("").load
    assert load is not None
    return load


def simulated(order: str, patience: float = 12.0, **fields: object) -> Summary:
    scenario = Scenario(**{"requests": 5_000, "lengths": "lognormal:5.2,1.5,16384", "seed": 5, **fields})  # type: ignore[arg-type]
    return simulate(scenario, SchedulingConfig(order=order, patience=patience, queue_requests_max=10**9))


# ---- the turn ----


def test_a_burst_goes_shortest_first_although_its_first_requests_were_sorted_at_a_lower_load() -> None:
    rng, scheduler = random.Random(1), one_by_one("boost")
    tokens = [1.0, *(rng.lognormvariate(4.0, 1.5) for _ in range(200))]
    arrive(scheduler, *[Request(number, length) for number, length in enumerate(tokens)])
    started = [tokens[number] for number in run_dry(scheduler, 0, 1.0)]
    # After the last sort the load has grown by less than a quarter, so late arrivals may differ a little.
    assert started[:100] == pytest.approx(sorted(tokens)[:100], rel=0.2)


@pytest.mark.parametrize(
    ("tokens", "turn_s"),
    [(0.0, -493.0), (1.0, -405.5), (4.0, -143.0), (5.0, -93.0), (10.0, 7.0), (20.0, 57.0), (80.0, 94.5)],
)
def test_a_turn_is_the_arrival_less_a_boost_in_inverse_proportion_to_the_length(tokens: float, turn_s: float) -> None:
    """7 + 100 (1 - 10 / s); below -250 a straight line to -500"""
    assert boosted(queued(tokens, at_s=7.0)) == pytest.approx(turn_s)


def test_the_order_is_the_generalized_c_mu_rule() -> None:
    """Of two requests the one of the greater c'(age) / s is first, with c(T) = T + (s / m) T^2 / 2 r."""
    rng, now_s = random.Random(7), 1_000.0
    waiting = [queued(rng.uniform(3.0, 40.0), at_s=rng.uniform(0.0, now_s)) for _ in range(50)]

    def index(request: QueuedRequest) -> float:
        slope = 1.0 + request.service_s / 10.0 * (now_s - request.arrived_at_s) / 100.0
        return slope / request.service_s

    assert sorted(waiting, key=boosted) == sorted(waiting, key=index, reverse=True)


def test_the_longest_requests_go_last_and_among_themselves_in_order_of_arrival() -> None:
    turns_s = [boosted(queued(tokens, at_s=at_s, long_s=50.0)) for at_s, tokens in ((1.0, 900.0), (2.0, 51.0))]
    assert turns_s == [751.0, 752.0]


def test_a_mean_request_keeps_its_arrival_as_its_turn_at_any_load() -> None:
    for margin_s in (0.0, 1e-6, 1.0, 1e6):
        assert boosted(queued(10.0, at_s=3.0, room=of_margin(margin_s))) == pytest.approx(3.0)


def test_more_room_lets_a_short_request_pass_over_more_until_it_is_ahead_of_all() -> None:
    turns_s = [boosted(queued(1.0, room=of_margin(margin_s))) for margin_s in (0.0, 1.0, 10.0, 100.0, 1000.0, 1e9)]
    assert turns_s[:3] == [0.0, -9.0, -90.0]
    assert turns_s == sorted(turns_s, reverse=True)
    assert -500.0 <= turns_s[-1] <= turns_s[3] < -350.0


def test_a_request_whose_own_time_brings_it_near_the_tail_is_delayed_less() -> None:
    room = Room(400.0, 10.0, 500.0, 750.0)
    delays_s = [boosted(queued(tokens, room=room)) / (1.0 - 10.0 / tokens) for tokens in (20.0, 200.0, 400.0, 900.0)]
    assert delays_s == pytest.approx([PART * 380.0 + 10.0, PART * 200.0 + 10.0, 10.0, 10.0])


def test_no_request_is_delayed_longer_than_the_longest_ones() -> None:
    assert boosted(queued(100.0, room=Room(0.0, 1e6, 500.0, 750.0))) == 750.0


def test_every_turn_is_a_number_however_short_or_long_the_answer() -> None:
    for tokens in (1e-300, 1e-9, 1.0, 1e9, 1e300):
        for margin_s in (1e-300, 1e-9, 1.0, 1e9, 1e300):
            assert math.isfinite(boosted(queued(tokens, room=of_margin(margin_s))))


# ---- the waits ----


def test_the_tail_is_the_quantile_of_what_was_observed_and_forgets() -> None:
    rng, tail = np.random.default_rng(2), Tail(0.01, memory=20_000)
    assert tail.value == math.inf
    for value in rng.exponential(40.0, 64_000):
        tail.observe(value)
    assert tail.value == pytest.approx(40.0 * math.log(100.0), rel=0.15)
    for value in rng.exponential(4.0, 200_000):
        tail.observe(value)
    assert tail.value == pytest.approx(4.0 * math.log(100.0), rel=0.15)


def test_at_most_the_asked_part_is_beyond_a_tail_of_few_values() -> None:
    tail = Tail(0.01)
    for number in range(3_200):
        tail.observe(1e6 if number % 50 == 0 else 5.0)
    assert tail.value > 1e6
    for _ in range(32):
        tail.observe(0.0)
    assert tail.value > 1e6


def test_room_is_what_the_wait_is_below_its_tail_and_hardly_any_while_a_queue_outgrows_all_earlier_ones() -> None:
    waits = Waits()
    for _ in range(100):
        waits.observe(0.0, 0.0, 1.0, 1.0)
    assert waits.room_s == 0.0
    for wait_s in range(1, 401):
        waits.observe(float(wait_s), float(wait_s), 1.0, 1.0)
        assert waits.room_s <= 1.5 * MARGIN * (wait_s + 1.0)
    for wait_s in range(400, -1, -1):
        waits.observe(float(wait_s), float(wait_s), 1.0, 1.0)
    assert waits.room_s == pytest.approx((PART + MARGIN) * 400.0, rel=0.35)
    assert waits.longest_s == pytest.approx(400.0, rel=0.1)


def test_the_longest_wait_is_forgotten_slowly_and_only_by_arrivals_that_need_not_wait() -> None:
    waits = Waits(memory=10)
    waits.observe(100.0, 60.0, 1.0, 1.0)
    for _ in range(1_000):
        waits.observe(50.0, 50.0, 1.0, 1.0)
    assert (waits.longest_s, waits.room.ahead_s, waits.room.last_s) == (
        100.0,
        60.0,
        pytest.approx(LONGEST * 100.0 - 60.0),
    )
    for _ in range(1_000):
        waits.observe(0.0, 0.0, 1.0, 1.0)
    assert waits.longest_s < 1.0
    assert waits.room.ahead_s < 1.0


def test_waiting_requests_are_sorted_again_when_the_load_changes() -> None:
    """The first requests of a burst waited for little when they came; when one starts, all are sorted by one tail."""
    scheduler = one_by_one("boost")
    arrive(scheduler, *[Request(number, 10.0 + number % 7) for number in range(301)])
    step(scheduler, RequestEnded("gpu0", 0, "completed"), 1.0)
    queues, load = scheduler.queues(""), load_of(scheduler)
    waiting = queues.all_waiting()
    assert {request.room for request in waiting} == {load.waits.room}
    assert queues.amount.work_us == pytest.approx(1e6 * sum(request.service_s for request in waiting))
    run_dry(scheduler, next(iter(scheduler.engines["gpu0"].running)), 1.0)
    assert queues.amount.work_us == 0


SLICE = 16  # formed batches that are sorted again in one go, in these tests


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[QueuedRequest]:
    """The requests whose turns `sorting` has asked for, in this order."""
    monkeypatch.setattr(model_queues, "SORTED_AT_ONCE", SLICE)
    return []


def sorting(asked: list[QueuedRequest]) -> Scheduler:
    """A scheduler by boost with one slot, whose keys note their requests."""

    def turn_s(waiting: QueuedRequest) -> float:
        asked.append(waiting)
        return boosted(waiting)

    order = FixedOrder(mean_turn(turn_s), turn_s, follows_load=True)
    scheduler = SchedulingConfig(batch_size=1, release="greedy", order="boost", bins=1).scheduler(order=order)
    scheduler.handle(EngineReady(EngineInfo("gpu0", 1, False)), 0.0)
    return scheduler


def next_starts(scheduler: Scheduler) -> None:
    running = next(iter(scheduler.engines["gpu0"].running))
    step(scheduler, RequestEnded("gpu0", running, "completed"), 1.0)


def test_a_burst_is_sorted_again_when_a_request_can_start_however_often_the_load_has_grown(
    asked: list[QueuedRequest],
) -> None:
    scheduler = sorting(asked)
    arrive(scheduler, *[Request(number, 10.0) for number in range(1 + SLICE)])
    assert len(asked) == 1 + SLICE
    next_starts(scheduler)
    assert len(asked) == 1 + 2 * SLICE


def test_a_long_queue_is_sorted_again_in_slices_and_then_as_if_at_once(asked: list[QueuedRequest]) -> None:
    rng, scheduler = random.Random(6), sorting(asked)
    arrive(scheduler, *[Request(number, rng.lognormvariate(4.0, 1.5)) for number in range(8 * SLICE)])
    queues, slices = scheduler.queues(""), 0
    while queues.dirty:
        asked.clear()
        next_starts(scheduler)
        slices += 1
        assert len(asked) <= SLICE
    assert slices == 8
    waiting = list(queues.formed)
    assert {request.room for request in waiting} == {load_of(scheduler).waits.room}
    in_turn = sorted(waiting, key=lambda request: (boosted(request), request.request.id))
    started = run_dry(scheduler, next(iter(scheduler.engines["gpu0"].running)), 1.0)
    assert started[1:] == [request.request.id for request in in_turn]


def test_a_load_that_changes_while_a_long_queue_is_sorted_again_begins_the_sort_anew(
    asked: list[QueuedRequest],
) -> None:
    scheduler = sorting(asked)
    arrive(scheduler, *[Request(number, 10.0 + number % 7) for number in range(4 * SLICE)])
    step(scheduler, RequestEnded("gpu0", 0, "completed"), 0.0)
    before_s = load_of(scheduler).waits.longest_s
    arrive(scheduler, *[Request(number, 10.0 + number % 7) for number in range(4 * SLICE, 12 * SLICE)])
    assert load_of(scheduler).waits.longest_s > before_s
    while scheduler.queues("").dirty:
        next_starts(scheduler)
    assert {request.room for request in scheduler.queues("").formed} == {load_of(scheduler).waits.room}


def drawn_arrivals(kind: str, rate_per_s: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Arrival times: alone, in batches of 20, of a load that moves by 30 %, or at once."""
    times = np.cumsum(rng.exponential(1.0, count))
    if kind == "batches":
        times = np.repeat(20.0 * times, 20)[:count]
    elif kind == "day":
        times = times + 0.3 * count / 6.0 * np.sin(6.0 * times / count)
    elif kind == "at once":
        times = np.zeros(count)
    return times / rate_per_s


def served(order: str, slots: int, arrivals_s: np.ndarray, lengths: np.ndarray, forecasts: np.ndarray) -> Recorder:
    """When each request started and ended, on one engine that takes 0.02 seconds for a token."""
    recorder = Recorder(lengths.size)
    trace = workload.Trace(arrivals_s, lengths, np.zeros(lengths.size))
    work = Workload(trace, Predictions(forecasts), (), (), 1.0)
    config = SchedulingConfig(order=order, queue_requests_max=10**9).resolved(barrier=False)
    run(Scenario(slots=slots, step_s=0.02), config, work, recorder=recorder)
    return recorder


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["poisson", "batches", "day", "at once"])
def test_no_request_waits_longer_than_the_bound_whatever_arrives(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(4.0, rng.uniform(0.1, 2.0), 300)
    service_s = 0.02 * lengths
    arrivals_s = drawn_arrivals(kind, rng.uniform(0.5, 2.0) / service_s.mean(), 300, rng)
    recorder = served("boost", 1, arrivals_s, lengths, lengths)
    started_s = np.array(recorder.started_s)
    waiting = (arrivals_s[:, None] > arrivals_s) & (started_s >= arrivals_s[:, None])  # (arrival, request)
    if kind == "at once":
        waiting = np.tri(300, k=-1, dtype=bool)
    longest_s = (waiting @ service_s).max()
    # The waits by which requests are sorted are told in steps, and a running request is never stopped.
    most_s = LONGEST_CHANGES * WAIT_MOST * longest_s + service_s.max()
    assert (started_s - arrivals_s).max() <= most_s


@pytest.mark.parametrize(("kind", "load"), [("poisson", 0.9), ("batches", 0.85), ("day", 0.9)])
def test_the_tail_holds_for_arrivals_of_any_kind_while_the_mean_gets_shorter(kind: str, load: float) -> None:
    means, tails = [], []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        lengths = rng.lognormal(5.2, 0.8, 3_000)
        arrivals_s = drawn_arrivals(kind, load * 8 / (0.02 * lengths.mean()), lengths.size, rng)
        forecasts = lengths * rng.lognormal(0.0, 0.5, lengths.size)
        first, boost = [
            np.array(served(order, 8, arrivals_s, lengths, forecasts).ended_s) - arrivals_s
            for order in ("fffs", "boost")
        ]
        means.append(boost.mean() / first.mean())
        tails.append(np.quantile(boost, 0.99) / np.quantile(first, 0.99))
    assert np.mean(means) < 0.95
    assert np.mean(tails) <= 1.1


def test_long_answers_that_are_forecast_as_the_shortest_are_noticed() -> None:
    rng = np.random.default_rng(3)
    lengths = np.minimum(20.0 * (1.0 - rng.random(6_000)) ** (-1 / 1.1), 16_384.0)
    arrivals_s = drawn_arrivals("poisson", 0.9 * 8 / (0.02 * lengths.mean()), lengths.size, rng)
    forecasts = lengths * rng.lognormal(0.0, 0.3, lengths.size)
    forecasts[lengths >= np.quantile(lengths, 0.97)] = 5.0
    first, boost = [
        np.array(served(order, 8, arrivals_s, lengths, forecasts).ended_s) - arrivals_s for order in ("fffs", "boost")
    ]
    assert boost.mean() <= 1.05 * first.mean()
    assert np.quantile(boost, 0.99) <= 1.15 * np.quantile(first, 0.99)


# ---- forecasts ----


def test_without_forecasts_requests_go_in_order_of_arrival() -> None:
    scheduler = one_by_one("boost")
    arrive(scheduler, *[Request(number) for number in range(30)])
    assert run_dry(scheduler, 0, 1.0) == list(range(30))


def test_forecasts_that_are_not_trusted_do_not_count() -> None:
    scheduler = one_by_one("boost")
    scheduler.queues("").binning.trust.trusted = False
    arrive(scheduler, *[Request(number, 300.0 - number, quantiles=(1.0, 300.0 - number)) for number in range(30)])
    assert run_dry(scheduler, 0, 1.0) == list(range(30))


def test_a_revised_forecast_gives_a_request_its_new_place() -> None:
    scheduler = one_by_one("boost")
    arrive(scheduler, *[Request(number, 100.0 + number) for number in range(20)])
    step(scheduler, revised({19: 1.0, 1: 900.0}), 1.0)
    started = run_dry(scheduler, 0, 1.0)
    assert (started[1], started[-1]) == (19, 1)


def test_a_window_that_is_sorted_again_equals_a_new_window() -> None:
    """Engines that run batches to their end: windows hold the requests of the smallest turns."""
    rng, ids = random.Random(3), count()
    window = WindowQueue(0, 8, boosted)
    waiting: list[QueuedRequest] = []
    for number in range(200):
        request = queued(rng.uniform(1.0, 100.0), at_s=float(number), room=of_margin(float(number)))
        request.request = Request(next(ids))
        waiting.append(request)
        if number % 20 == 19:
            for other in window:
                other.room = of_margin(float(number))
            window.sort_all()
        window.append(request)
        if number % 5 == 4:
            for request in window.take(4):
                waiting.remove(request)
    assert [request.request.id for request in window] == [request.request.id for request in waiting]
    again = WindowQueue(0, 8, boosted)
    for request in waiting:
        again.append(request)
    assert window.take(4) == again.take(4)


# ---- whole runs ----


def test_boost_shortens_the_mean_more_than_the_usual_patience_and_keeps_the_tail() -> None:
    fields = {"load": 0.95, "predictions": "quantiles:1.0", "requests": 8_000, "seed": 2}
    first, patient, boost = [simulated(order, **fields) for order in ("fffs", "shortest", "boost")]
    assert boost.latency_s_mean < 0.95 * patient.latency_s_mean
    assert boost.latency_s_mean < 0.7 * first.latency_s_mean
    assert boost.latency_s_p99 < 1.2 * first.latency_s_p99


def test_where_lengths_differ_far_more_than_exponential_ones_boost_keeps_the_tail_at_half_the_mean() -> None:
    fields = {"load": 0.97, "predictions": "quantiles:1.0", "requests": 20_000, "seed": 104}
    first, boost = [simulated(order, **fields) for order in ("fffs", "boost")]
    assert boost.latency_s_mean < 0.48 * first.latency_s_mean
    assert boost.latency_s_p99 < 1.1 * first.latency_s_p99


def test_boost_serves_short_requests_first_in_overload_without_starving_the_long() -> None:
    first, shortest_first, boost = [
        simulated(order, patience, load=1.3) for order, patience in (("fffs", 0.0), ("shortest", 1e9), ("boost", 0.0))
    ]
    assert boost.latency_s_mean < 0.7 * first.latency_s_mean
    assert boost.latency_s_p99 < 0.8 * shortest_first.latency_s_p99


def test_boost_orders_the_batches_of_engines_that_run_them_to_their_end() -> None:
    fields = {"load": 0.95, "barrier": True, "predictions": "quantiles:1.0", "requests": 3_000}
    first, boost = [simulated(order, **fields) for order in ("fffs", "boost")]
    assert boost.latency_s_mean < 0.95 * first.latency_s_mean
    assert boost.latency_s_p99 < 1.2 * first.latency_s_p99


def test_the_waits_count_the_slots_of_all_engines() -> None:
    def longest_s(scheduler: Scheduler) -> float:
        arrive(scheduler, *[Request(number, 50.0) for number in range(100)])
        return load_of(scheduler).waits.longest_s

    engines = [EngineInfo(f"gpu{number}", slots=2, barrier=False) for number in range(3)]
    one, three = [
        new_scheduler(*some, order="boost", batch_size=1, release="greedy") for some in (engines[:1], engines)
    ]
    assert longest_s(one) == pytest.approx(3.0 * longest_s(three), rel=0.3)


def test_requests_that_wait_inside_an_engine_count_as_waiting() -> None:
    longest_s = []
    for look_ahead in (0, 100):
        scheduler = one_by_one("boost", EngineInfo("gpu0", 1, False, look_ahead))
        arrive(scheduler, *[Request(number) for number in range(50)])
        longest_s.append(load_of(scheduler).waits.longest_s)
    assert longest_s[0] > 0.0
    assert longest_s[1] == pytest.approx(longest_s[0], rel=0.3)


def test_orders_that_do_not_follow_the_load_measure_no_waits() -> None:
    scheduler = one_by_one("shortest")
    arrive(scheduler, *[Request(number, 10.0) for number in range(5)])
    step(scheduler, RequestEnded("gpu0", 0, "completed", 10.0), 1.0)
    assert scheduler.queues("").load is None


# ---- calibration ----


def calibrated(error: float, factor: float = 1.0, count: int = 3_000) -> tuple[Calibration, np.ndarray, np.ndarray]:
    """A calibration after answers of lognormal lengths, and more forecasts with the lengths of their answers."""
    rng = np.random.default_rng(4)
    lengths = rng.lognormal(5.0, 0.8, 2 * count)
    forecasts = factor * lengths * rng.lognormal(0.0, error, 2 * count)
    calibration = Calibration()
    for forecast, tokens in zip(forecasts[:count], lengths[:count], strict=True):
        calibration.observe(forecast, tokens)
    return calibration, forecasts[count:], lengths[count:]


@pytest.mark.parametrize(("error", "factor"), [(0.0, 1.0), (0.0, 3.0), (0.8, 1.0), (0.8, 0.2), (3.0, 1.0)])
def test_forecasts_that_are_too_long_or_too_extreme_are_corrected(error: float, factor: float) -> None:
    calibration, forecasts, lengths = calibrated(error, factor)
    corrected = np.array([calibration.tokens(forecast) for forecast in forecasts])
    shortest, longest = forecasts < np.quantile(forecasts, 0.2), forecasts > np.quantile(forecasts, 0.8)
    for some in (shortest, longest, forecasts > 0.0):
        assert corrected[some].mean() == pytest.approx(lengths[some].mean(), rel=0.15)


def test_forecasts_that_are_too_close_together_are_corrected() -> None:
    """As those of a learner that has seen few answers."""
    lengths = np.random.default_rng(4).lognormal(5.0, 1.2, 3_000)
    calibration = Calibration()
    for tokens in lengths:
        calibration.observe(math.exp(5.0 + (math.log(tokens) - 5.0) / 1.5), tokens)
    for tokens in (20.0, 150.0, 1_000.0):
        assert calibration.tokens(math.exp(5.0 + (math.log(tokens) - 5.0) / 1.5)) == pytest.approx(tokens, rel=0.1)


def test_what_the_first_forecasts_did_not_know_counts_little_soon() -> None:
    rng = np.random.default_rng(4)
    calibration = Calibration()
    for tokens in rng.lognormal(5.0, 1.0, 32):
        calibration.observe(rng.lognormal(5.0, 1.0), tokens)
    for tokens in rng.lognormal(5.0, 1.0, 32):
        calibration.observe(tokens, tokens)
    assert calibration.tokens(1_000.0) > 6 * calibration.tokens(100.0)


def test_before_enough_answers_a_forecast_stands_for_itself() -> None:
    calibration = Calibration()
    for tokens in (10.0, 20.0, 30.0):
        calibration.observe(tokens, 5.0 * tokens)
    assert calibration.tokens(17.0) == 17.0


def test_equal_forecasts_stand_for_the_mean_answer() -> None:
    calibration = Calibration()
    for number in range(200):
        calibration.observe(100.0, 20.0 + number % 3)
    assert calibration.tokens(100.0) == pytest.approx(21.0, rel=0.01)


@pytest.mark.parametrize("predictions", ["lognormal:1.0", "quantiles:1.0"])
def test_forecasts_that_are_too_extreme_leave_the_tail_as_it_is(predictions: str) -> None:
    """Kendall's tau 0.4: a long forecast is often wrong, and a request that waits for it lengthens the tail."""
    fields = {"load": 0.95, "lengths": "lognormal:5.2,0.8", "predictions": predictions, "requests": 8_000}
    first, boost = [simulated(order, **fields) for order in ("fffs", "boost")]
    assert boost.latency_s_mean < 0.97 * first.latency_s_mean
    assert boost.latency_s_p99 < 1.1 * first.latency_s_p99
