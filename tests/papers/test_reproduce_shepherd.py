"""Shepherd's models, workloads and figures, and Nexus's plan: known answers, tiny figures, and what plans promise."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dispersion import index_of_dispersion
from hypothesis import given
from hypothesis import strategies as st
from papers.rows import Rows
from papers.shepherd import micro, table_5, workloads
from papers.shepherd.models import BATCH_MAX, EVALUATED, TABLE_4, Model
from papers.shepherd.nexus import ROUNDING, Cycle, Demand, Plan, Slot, pack, peaks_per_s, plan, plans
from papers.shepherd.runs import (
    CLOCKWORK,
    EDF,
    FFFS,
    FLEX,
    LARGEST,
    NEXUS,
    PLANNED_SHARE,
    PRINTED,
    RELEASED,
    RELEASED_128,
    WITHOUT_PREEMPTION,
    run,
)
from papers.shepherd.streams import Arrivals, Streams, Traffic
from papers.shepherd.worlds import (
    BURSTY,
    STABLE,
    Effort,
    World,
    divide,
    group_sizes,
    made_up,
    ratio_row,
    simulate,
    simulate_all,
)
from worlds.invariants import check

from llmserve.errors import ConfigError

# ---- models ----


def test_table_4_has_17_models_of_which_the_13_of_three_families_are_evaluated() -> None:
    assert len(TABLE_4) == 17
    left_out = TABLE_4.keys() - {model.name for model in EVALUATED}
    assert left_out == {"GoogLeNet", "Inception v3", "R-CNN", "BERT"}


def test_batches_take_what_section_7_2_says_of_them() -> None:
    """ResNet18: about 4 ms for one, about 32 ms for 128; ResNeSt269: 79 ms for one."""
    assert 1e3 * TABLE_4["ResNet18"].batch_s(1) == pytest.approx(4, abs=0.5)
    assert 1e3 * TABLE_4["ResNet18"].batch_s(128) == pytest.approx(32, abs=0.5)
    assert 1e3 * TABLE_4["ResNeSt269"].batch_s(1) == pytest.approx(79, abs=0.5)


@pytest.mark.parametrize(
    ("name", "time_s", "size"),
    [
        ("ResNet18", 0.00396, 1),  # 0.22 + 3.74
        ("ResNet18", 0.00395, 0),
        ("ResNet18", 0.25, BATCH_MAX),
        ("BERT", 0.25, 5),
        ("ResNeSt269", 0.09, 3),
    ],
)
def test_the_largest_batch_within_a_time(name: str, time_s: float, size: int) -> None:
    assert TABLE_4[name].size_within(time_s) == size


def test_an_isolated_burst_leaves_time_for_358_and_after_a_long_request_for_57() -> None:
    """At 90 ms: two full batches and what fits into the rest; or what fits after a ResNeSt269 begun at 0."""
    short, long = (TABLE_4[name] for name in workloads.MICRO)
    assert 2 * BATCH_MAX + short.size_within(0.09 - 2 * short.batch_s(BATCH_MAX)) == 358
    assert short.size_within(0.095 - long.batch_s(1)) == 57


# ---- workloads ----


def test_steady_bursts_come_every_120_ms_beside_a_request_every_ms() -> None:
    arrivals = workloads.steady_bursts(0.25, periods=3)
    of_a, of_b = (arrivals.times_s[arrivals.stream == index] for index in range(2))
    assert of_a.tolist() == np.repeat([0.005, 0.125, 0.245], 1_024).tolist()
    assert of_b == pytest.approx(np.arange(360) / 1e3)
    assert arrivals.streams.models == ("ResNet18", "ResNeSt269")
    assert arrivals.deadlines_s == pytest.approx(arrivals.times_s + 0.25)
    assert arrivals.stream[np.flatnonzero(arrivals.times_s == 0.005)[0]] == 1  # of one instant, B's comes first


def test_an_isolated_burst_is_one_and_no_request_beside_it_can_be_in_time_after_it() -> None:
    arrivals = workloads.isolated_burst(0.09)
    of_a, of_b = (arrivals.times_s[arrivals.stream == index] for index in range(2))
    assert of_a.tolist() == [0.005] * 1_024
    assert of_b[0] == 0.0
    long = TABLE_4["ResNeSt269"]
    assert of_b[-1] >= long.batch_s(1)  # there is one when the first has been served
    without_preemption_s = long.batch_s(1) + TABLE_4["ResNet18"].batch_s(57)
    assert without_preemption_s + long.batch_s(1) > arrivals.deadlines_s[arrivals.stream == 1].max()


def test_the_overload_is_6000_a_second_evenly_of_six_models_to_be_answered_in_100_ms() -> None:
    arrivals = workloads.overload(np.random.default_rng(1), requests=60_000)
    counts = np.bincount(arrivals.model)
    assert counts.size == 6
    assert (np.abs(counts - 10_000) < 5 * 100).all()
    assert arrivals.times_s[-1] == pytest.approx(10.0, abs=0.01)
    assert arrivals.deadlines_s == pytest.approx(arrivals.times_s + 0.1)
    assert index_of_dispersion(arrivals.times_s, 0.01, 10.0) == pytest.approx(1.0, abs=5 * math.sqrt(2 / 1_000))


def trace() -> Traffic:
    """400 functions, most of them rarely called, two minutes."""
    rng = np.random.default_rng(3)
    names = tuple(f"f{index}" for index in range(400))
    return Traffic(names, np.floor(rng.pareto(1.0, (400, 1)) * [1.0, 2.0]))


def test_the_trace_is_served_at_its_rate_by_the_13_models_in_turn() -> None:
    traffic = trace()
    arrivals = workloads.stable(traffic, 1_000.0, np.random.default_rng(4))
    assert len(arrivals) / 120 == pytest.approx(1_000, abs=5 * math.sqrt(1_000 / 120))
    assert arrivals.streams.models == tuple(model.name for model in EVALUATED)
    assert arrivals.streams.model_of[:14].tolist() == [*range(13), 0]
    assert (arrivals.times_s >= 60).mean() == pytest.approx(
        traffic.expected[:, 1].sum() / traffic.expected.sum(), abs=0.01
    )


def test_the_bursty_trace_has_the_same_rates_and_far_more_dispersion() -> None:
    stable, bursty = (
        draw(trace().part(0, 1), 1_000.0, np.random.default_rng(4)) for draw in (workloads.stable, workloads.bursty)
    )
    assert len(bursty) / 60 == pytest.approx(1_000, abs=5 * math.sqrt(1_000 / 60))
    assert index_of_dispersion(stable.times_s, 0.25, 60.0) == pytest.approx(1.0, abs=5 * math.sqrt(2 / 240))
    assert index_of_dispersion(bursty.times_s, 0.25, 60.0) > 10


# ---- Nexus's plan ----

MEASURED_MS: Mapping[
    str, Mapping[int, float]
] = {  # Nexus, Table 2: batch sizes are rounded up to one that was measured
    "A": {4: 50, 8: 75, 16: 100},
    "B": {4: 50, 8: 90, 16: 125},
    "C": {4: 60, 8: 95, 16: 125},
}


def measured(model: str, rate_per_s: float, slo_s: float) -> Demand:
    def batch_s(size: int) -> float:
        return next((ms for most, ms in MEASURED_MS[model].items() if size <= most), math.inf) / 1e3

    return Demand(model, batch_s, rate_per_s, slo_s)


def linear(model: str, alpha_ms: float, beta_ms: float, rate_per_s: float, slo_s: float) -> Demand:
    return Demand(model, lambda size: (alpha_ms * size + beta_ms) / 1e3, rate_per_s, slo_s)


def check_promise(plan: Plan, demands: list[Demand]) -> None:
    """The plan serves its share of these rates in time, if requests come evenly."""
    slo_s = {demand.model: demand.slo_s for demand in demands}
    planned = dict.fromkeys(slo_s, 0.0)
    for cycle in plan.gpus:
        assert cycle.occupancy <= 1 + ROUNDING, f"more work than fits: {cycle}"
        ends_s = 0.0
        for slot in cycle.slots:
            assert slot.offset_s >= ends_s * (1 - ROUNDING), f"{slot.model} begins before the last one has ended"
            ends_s = slot.offset_s + slot.batch_s
            assert cycle.duty_s + slot.batch_s <= slo_s[slot.model] * (1 + ROUNDING), f"{slot.model} may be late"
            assert slot.rate_per_s * cycle.duty_s <= slot.batch_size * (1 + ROUNDING), f"{slot.model} piles up"
            planned[slot.model] += slot.rate_per_s
    for demand in demands:
        rate_per_s = 0.0 if demand.model in plan.unserved else plan.share * demand.rate_per_s
        assert math.isclose(planned[demand.model], rate_per_s, rel_tol=1e-6), f"{demand.model}: another rate"


def shapes(cycles: list[Cycle] | tuple[Cycle, ...]) -> list[tuple[float, list[tuple[str, int, float]]]]:
    """(duty_ms, [(model, batch_size, offset_ms)]) of each GPU."""
    return [
        (
            round(1e3 * cycle.duty_s, 6),
            [(slot.model, slot.batch_size, round(1e3 * slot.offset_s, 6)) for slot in cycle.slots],
        )
        for cycle in cycles
    ]


def test_saturated_gpus_run_the_largest_batch_of_which_two_meet_the_slo() -> None:
    """Nexus's example: at 200 and 250 ms, 16 of each in 100 and 125 ms: 160, 128 and 128 requests a second."""
    demands = [measured("A", 320.0, 0.2), measured("B", 128.0, 0.25), measured("C", 128.0, 0.25)]
    assert shapes(pack(demands)) == [(100, [("A", 16, 0)])] * 2 + [(125, [("B", 16, 0)]), (125, [("C", 16, 0)])]


def test_what_is_left_of_a_and_b_shares_a_gpu_and_c_gets_its_own() -> None:
    """Nexus's example: 8 of A gather in 125 ms and run for 75; in the other 50 fit 4 of B, but not 4 of C (60)."""
    demands = [measured("A", 64.0, 0.2), measured("B", 32.0, 0.25), measured("C", 32.0, 0.25)]
    cycles = pack(demands)
    assert shapes(cycles) == [(125, [("A", 8, 0), ("B", 4, 75)]), (125, [("C", 4, 0)])]
    assert [cycle.occupancy for cycle in cycles] == pytest.approx([1.0, 0.48])


def test_a_rate_is_divided_into_whole_gpus_and_the_rest() -> None:
    """l(b) = b + 10 ms at 100 ms: 40 in 50 ms, 800 a second. 400 are left: b + 10 + b / 0.4 <= 100 up to b = 25."""
    cycles = pack([linear("m", 1.0, 10.0, 2_000.0, 0.1)])
    assert shapes(cycles) == [(50, [("m", 40, 0)])] * 2 + [(62.5, [("m", 25, 0)])]
    assert [slot.rate_per_s for cycle in cycles for slot in cycle.slots] == pytest.approx([800.0, 800.0, 400.0])


def test_rare_requests_are_run_one_a_cycle_however_seldom_they_come() -> None:
    """One every 10 s, 10 ms long, in time within 100 ms: a GPU looks for it every 90 ms."""
    assert shapes(pack([linear("m", 1.0, 9.0, 0.1, 0.1)])) == [(90, [("m", 1, 0)])]


def test_what_gathers_in_batches_too_small_for_its_rate_is_run_back_to_back() -> None:
    """l(1) = 45, l(2) = 50 ms at 100 ms: 40 a second at most. Of 39, two gather in 51.3 ms: 101.3. One alone would take
    45 ms of every 25.6. So up to two are run every 50 ms.
    """
    assert shapes(pack([linear("m", 5.0, 40.0, 39.0, 0.1)])) == [(50, [("m", 2, 0)])]


def test_each_load_joins_the_fullest_gpu_on_which_it_fits() -> None:
    """Single requests every 60 ms: c fits on b's GPU alone, and d on that of b and c, which is then the fullest."""
    work_ms = {"a": 40.0, "b": 36.0, "c": 22.0, "d": 2.0}
    demands = [linear(model, 0.0, ms, 5.0, (60 + ms) / 1e3) for model, ms in work_ms.items()]
    assert shapes(pack(demands)) == [(60, [("a", 1, 0)]), (60, [("b", 1, 0), ("c", 1, 36), ("d", 1, 58)])]


def test_rates_that_do_not_fit_are_planned_for_by_the_largest_share() -> None:
    """Two GPUs serve 1,600 a second of the 3,200, and a little more would need a third."""
    found = plan([linear("m", 1.0, 10.0, 3_200.0, 0.1)], gpus=2)
    assert found.share == pytest.approx(0.5, rel=2e-3)
    assert found.share <= 0.5
    assert len(found.gpus) == 2


def test_gpus_that_are_not_needed_stay_idle() -> None:
    found = plan([linear("m", 1.0, 10.0, 800.0, 0.1)], gpus=3)
    assert found.share == 1.0
    assert [bool(cycle.slots) for cycle in found.gpus] == [True, False, False]
    assert [cycle.occupancy for cycle in found.gpus] == [1.0, 0.0, 0.0]


def test_a_model_of_which_two_batches_take_longer_than_its_slo_is_not_served() -> None:
    """ResNeSt269 takes 79 ms: at 90 ms a request that has just missed its batch is late."""
    demands = [Demand(name, TABLE_4[name].batch_s, 100.0, 0.09) for name in workloads.MICRO]
    found = plan(demands, gpus=1)
    assert found.unserved == ("ResNeSt269",)
    assert {slot.model for cycle in found.gpus for slot in cycle.slots} == {"ResNet18"}
    check_promise(found, demands)


def test_models_that_do_not_fit_at_any_rate_are_an_error() -> None:
    demands = [linear(name, 1.0, 40.0, 1.0, 0.1) for name in "abc"]
    with pytest.raises(ConfigError, match="3 models do not fit on 1 GPUs"):
        plan(demands, gpus=1)


def test_bad_demands_are_an_error_naming_the_model() -> None:
    for rate_per_s, slo_s in ((-1.0, 0.1), (math.inf, 0.1), (math.nan, 0.1), (1.0, 0.0)):
        with pytest.raises(ConfigError, match="m: a finite rate"):
            linear("m", 1.0, 10.0, rate_per_s, slo_s)
    with pytest.raises(ConfigError, match="two demands"):
        plan([linear("m", 1.0, 10.0, 1.0, 0.1)] * 2, gpus=2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(TABLE_4.values())), st.floats(0.0, 5_000.0), st.sampled_from([0.05, 0.09, 0.25])
        ),
        unique_by=lambda each: each[0].name,
        max_size=17,
    ),
    st.integers(17, 40),
)
def test_every_plan_keeps_its_promise(models: list[tuple[Model, float, float]], gpus: int) -> None:
    demands = [Demand(model.name, model.batch_s, rate_per_s, slo_s) for model, rate_per_s, slo_s in models]
    found = plan(demands, gpus)
    check_promise(found, demands)
    assert len(found.gpus) == gpus


SLOT = Slot("m", 40, 0.0, 0.05, 800.0)


@pytest.mark.parametrize(
    ("cycle", "message"),
    [
        (Cycle(0.04, (SLOT,)), "more work than fits"),
        (Cycle(0.06, (SLOT,)), "may be late"),
        (Cycle(0.05, (replace(SLOT, batch_size=39),)), "piles up"),
        (Cycle(0.05, (replace(SLOT, rate_per_s=700.0),)), "another rate"),
        (Cycle(0.05, (replace(SLOT, batch_s=0.02), replace(SLOT, batch_s=0.02, offset_s=0.01))), "before the last one"),
    ],
)
def test_a_plan_that_breaks_its_promise_is_found_out(cycle: Cycle, message: str) -> None:
    demand = linear("m", 1.0, 10.0, 800.0, 0.1)
    check_promise(Plan((Cycle(0.05, (SLOT,)),), 1.0), [demand])
    with pytest.raises(AssertionError, match=message):
        check_promise(Plan((cycle,), 1.0), [demand])


def test_peaks_are_the_highest_rate_of_each_model_in_each_period() -> None:
    streams = Streams.round_robin("ab", ["x", "y"], 0.25)
    times_s = [0.1, 0.2, 1.5, 1.6, 1.7, 60.0, 60.9, 61.0]
    arrivals = Arrivals.of(streams, times_s, [0, 0, 0, 1, 0, 1, 1, 1])
    assert peaks_per_s(arrivals).tolist() == [[2.0, 1.0], [0.0, 2.0]]
    assert peaks_per_s(Arrivals.of(streams, [], [])).shape == (0, 2)


def test_each_period_has_the_plan_of_its_own_peaks_and_of_the_least_slo() -> None:
    streams = Streams.of("abc", ["x"], [0, 0, 0], [0.3, 0.1, 0.2])
    arrivals = Arrivals.of(streams, [*np.arange(0, 1, 1 / 800), *np.arange(60, 61, 1 / 400)], [0] * 1_200)
    found = list(plans(arrivals, [linear("x", 1.0, 10.0, 0.0, 1.0).batch_s], gpus=1))
    assert [shapes(each.gpus) for each in found] == [[(50, [("x", 40, 0)])], [(62.5, [("x", 25, 0)])]]


# ---- runs ----


def of_model(name: str, times_s: list[float], slo_s: float = 0.25) -> Arrivals:
    return Arrivals.of(Streams.round_robin([name], [name], slo_s), times_s, [0] * len(times_s))


def test_a_run_counts_what_is_answered_in_time_and_how_long_the_gpu_works() -> None:
    """Two of ResNet18 at 0, one at 10 ms; the first begins alone, at once, and each takes 3.96 ms."""
    found = run(of_model("ResNet18", [0.0, 0.0, 0.01], slo_s=0.01), FFFS, 1)
    assert (found.in_time, found.late, found.batches) == (3, 0, 3)
    assert found.by_model == {"ResNet18": 3}
    assert found.busy_s == pytest.approx(3 * 3.96e-3)
    assert found.latencies_s[0] == pytest.approx(3.96e-3)
    assert found.latencies_s[-1] == pytest.approx(2 * 3.96e-3)  # the second waited for the first
    assert found.utilisation == pytest.approx(2 * 3.96 / 10)  # when the last has come
    assert found.wasted_share == 0.0
    assert found.offered == found.offered_in_time == 2  # the last is due after the end of the run


def test_what_is_late_is_wasted() -> None:
    """Three of ResNeSt269 at once, due in 90 ms, of which one takes 79: the order fffs runs the two others too late."""
    found = run(of_model("ResNeSt269", [0.0] * 3, slo_s=0.09), FFFS, 1)
    assert (found.in_time, found.late) == (1, 2)
    alone_s, both_s = (TABLE_4["ResNeSt269"].batch_s(size) for size in (1, 2))
    assert found.wasted_share == pytest.approx(both_s / (alone_s + both_s))


@pytest.mark.parametrize(
    ("policy", "in_time"), [(FLEX, 358), (WITHOUT_PREEMPTION, 58), (CLOCKWORK, 58), (PRINTED, 250), (FFFS, 1), (EDF, 1)]
)
def test_of_an_isolated_burst_at_90_ms_358_are_in_time_with_preemption_and_58_without(
    policy: str, in_time: int
) -> None:
    found = run(workloads.isolated_burst(0.09), policy, 1, check=check)
    assert found.in_time == in_time
    assert found.preemptions == (4 if policy in (FLEX, PRINTED) else 0)


def test_at_250_ms_flex_serves_three_times_what_earliest_deadline_first_does() -> None:
    """Published: 3.7 times, with preemption or without."""
    arrivals = workloads.steady_bursts(0.25, periods=10)
    flex, plain, clockwork = (run(arrivals, policy, 1).in_time for policy in (FLEX, WITHOUT_PREEMPTION, CLOCKWORK))
    assert 3.0 <= flex / clockwork <= 4.5
    assert plain / clockwork >= 3.0


def test_at_90_ms_the_steady_state_gains_less_than_the_isolated_burst() -> None:
    arrivals = workloads.steady_bursts(0.09, periods=10)
    flex, plain = (run(arrivals, policy, 1).in_time for policy in (FLEX, WITHOUT_PREEMPTION))
    assert 2.0 <= flex / plain < 358 / 58


def test_under_overload_truly_feasible_batches_serve_1_3_times_those_as_printed() -> None:
    arrivals = workloads.overload(np.random.default_rng(1), requests=3_000)
    flex, printed = (run(arrivals, policy, workloads.OVERLOAD_GPUS) for policy in (FLEX, PRINTED))
    assert flex.in_time >= micro.LEAST_GAIN * printed.in_time
    assert flex.late <= 1, "at most one that was run on trial, before anything had shown how fast its model is"
    assert printed.late > 0
    assert printed.wasted_share > flex.wasted_share


def test_nexus_serves_all_that_comes_evenly_and_idles_in_between() -> None:
    """200 requests a second of ResNet50, one by one: 40 gather in 200 ms, and take 38. All are in time."""
    arrivals = of_model("ResNet50", np.arange(0.001, 2.0, 0.005).tolist())
    planned = [plan([Demand("ResNet50", TABLE_4["ResNet50"].batch_s, 200.0, 0.25)], gpus=1)]
    found = run(arrivals, NEXUS, 1, plans=planned, check=check)
    assert found.in_time == len(arrivals)
    assert found.batch_size > 30
    assert 0.1 < found.utilisation < 0.3


def test_nexus_cannot_use_gpus_that_its_plan_leaves_idle() -> None:
    """Ten times the rate that the plan is for, on two GPUs of which it uses one: FLEX serves far more."""
    arrivals = of_model("ResNet50", np.arange(0.001, 1.0, 0.0005).tolist())
    planned = [plan([Demand("ResNet50", TABLE_4["ResNet50"].batch_s, 200.0, 0.25)], gpus=2)]
    nexus_, flex = run(arrivals, NEXUS, 2, plans=planned), run(arrivals, FLEX, 2)
    assert nexus_.utilisation < 0.5 < flex.utilisation
    assert flex.in_time > 3 * nexus_.in_time


# ---- readings of Clockwork ----


def burst(deadlines_s: list[float]) -> Arrivals:
    """Requests to ResNet50 at 0, after one that keeps the GPU until 8.71 ms, due at these times; a stream each."""
    names = [f"s{index}" for index in range(len(deadlines_s) + 1)]
    streams = Streams.of(names, ["ResNet50"], [0] * len(names), [1.0, *deadlines_s])
    return Arrivals.of(streams, [0.0] * len(names), range(len(names)))


@pytest.mark.parametrize(
    ("policy", "in_time", "batches"),
    [
        (CLOCKWORK, 21, [1, 1, 19]),  # the urgent one alone, then all others
        (LARGEST, 20, [1, 19]),  # all others at once; the urgent one is past
        (RELEASED, 20, [1, 16, 2, 1]),  # at most 16 at once, then what is left by powers of two
        (RELEASED_128, 20, [1, 16, 2, 1]),
    ],
)
def test_readings_of_clockwork_differ_in_what_they_batch(policy: str, in_time: int, batches: list[int]) -> None:
    """One is due at 18 ms, when it would be just in time alone (8.71 + 8.71), 19 others at 200."""
    found = run(burst([0.018, *[0.2] * 19]), policy, 1, check=check)
    assert found.in_time == in_time
    assert (found.batches, found.started) == (len(batches), sum(batches))


# ---- groups ----


def test_groups_are_of_the_size_and_the_last_of_what_is_left() -> None:
    assert group_sizes(36, 12) == [12, 12, 12]
    assert group_sizes(40, 12) == [12, 12, 12, 4]
    assert group_sizes(3, 12) == [3]


def test_every_request_goes_to_one_group_and_the_work_is_shared_by_gpus() -> None:
    traffic = trace().part(0, 1).at_rate(2_000.0)
    arrivals = workloads.stable(traffic, 2_000.0, np.random.default_rng(5))
    parts = divide(arrivals, traffic, [12, 12, 6], np.random.default_rng(6))
    assert sum(len(part) for part in parts) == len(arrivals)
    assert np.sort(np.concatenate([part.times_s for part in parts])).tolist() == arrivals.times_s.tolist()
    full_s = np.array([model.batch_s(BATCH_MAX) for model in EVALUATED])
    work = np.array([full_s[part.model].sum() for part in parts]) / [12, 12, 6]
    assert work / work.mean() == pytest.approx(1.0, abs=0.1)


def world(**changes: object) -> World:
    values = {
        "trace": STABLE,
        "traffic": trace().part(0, 1),
        "rate_per_s": 3_000.0,
        "slo_s": 0.25,
        "policies": (FLEX,),
        "seed": 1,
        "span_s": 0.8,
        "from_s": 0.3,
        **changes,
    }
    return World(**values)  # type: ignore[arg-type]


def test_three_groups_of_12_serve_three_times_what_one_does() -> None:
    one = simulate(world())[FLEX]
    three = simulate(world(rate_per_s=9_000.0, gpus=36, group_gpus=12))[FLEX]
    assert three.gpus == 36
    assert three.share_in_time == pytest.approx(one.share_in_time, abs=0.1)
    assert three.goodput_per_s == pytest.approx(3 * one.goodput_per_s, rel=0.1)


def test_a_worker_alone_serves_less_than_a_group_that_shares() -> None:
    grouped, alone = (simulate(world(trace=BURSTY, group_gpus=size))[FLEX].in_time for size in (12, 1))
    assert alone < grouped


# ---- all together ----


@pytest.mark.slow
def test_under_overload_flex_is_ahead_of_every_baseline_and_no_answer_of_it_is_late() -> None:
    policies = (FLEX, CLOCKWORK, RELEASED, NEXUS, PLANNED_SHARE, FFFS, EDF)
    found = simulate(world(rate_per_s=15_000.0, span_s=0.5, policies=policies))
    flex = found[FLEX]
    assert flex.late == 0
    assert flex.utilisation > 0.95
    for policy in policies[1:]:
        assert flex.in_time > 1.5 * found[policy].in_time, policy
    assert found[PLANNED_SHARE].arrived < 0.5 * found[NEXUS].arrived
    assert found[CLOCKWORK].batch_size < 0.25 * flex.batch_size


def test_steps_are_timed_only_where_that_is_asked_for() -> None:
    timed, plain = (simulate(world(timed=timed, span_s=0.4))[FLEX] for timed in (True, False))
    assert timed.steps > timed.arrived
    assert timed.step_s_mean > 0
    assert plain.steps == 0
    assert plain.in_time == timed.in_time


def test_worlds_come_out_the_same_every_time_seed_by_seed() -> None:
    worlds = {("a",): [world(seed=seed, span_s=0.4) for seed in (2, 1)], ("b",): [world(seed=3, span_s=0.4)]}
    told: list[str] = []
    found = [simulate_all(worlds, Effort(made_up(), False), lambda part, share: told.append(part)) for _ in range(2)]
    assert found[0] == found[1]
    assert [one[FLEX] for one in found[0][("a",)]] == [simulate(world(seed=seed, span_s=0.4))[FLEX] for seed in (1, 2)]
    assert told[-1].startswith("3 of 3 runs")


def test_without_a_trace_a_few_functions_bring_most() -> None:
    rates = np.sort(made_up().expected[:, 0])[::-1]
    assert rates.size == 1_350
    assert rates[:13].sum() > 0.3 * rates.sum()
    assert Effort.of(1, 2, None, quick=True).traced is False


def test_a_quotient_of_sums_has_an_interval_that_holds_it_and_that_equal_seeds_close() -> None:
    row = ratio_row("figure", {}, "ratio", [10.0, 20.0, 33.0], [5.0, 10.0, 15.0])
    assert row.measured == pytest.approx(63 / 30)
    assert row.low is not None
    assert row.high is not None
    assert row.low < 63 / 30 < row.high
    same = ratio_row("figure", {}, "ratio", [10.0, 20.0], [5.0, 10.0])
    assert (same.low, same.measured, same.high) == pytest.approx((2.0, 2.0, 2.0))


def test_table_5_is_left_out_where_it_has_not_been_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table_5, "RESULTS", tmp_path / "herd.json")
    assert list(table_5.rows()) == []
    cases = [
        {"kind": "usual", "models": 200, "form": "with load", "plan_s": seconds} for seconds in (0.5, 0.25, 9.0)
    ] + [{"kind": "full", "models": 200, "form": "with load", "plan_s": 99.0}]
    (tmp_path / "herd.json").write_text(json.dumps(cases))
    (row,) = Rows(list(table_5.rows()))
    assert (row.measured, row.note) == (0.5, "published: 0.55 s")
