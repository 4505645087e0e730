"""The least burst tolerance: known results, brute force, and every limit on random instances."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from instances import best, check, instance, random_instance, table_5

from llmserve.planning import Instance, Model, NoPlan, Stream, plan


def test_each_of_two_groups_has_the_gpus_that_its_largest_model_needs() -> None:
    """Two models fill a GPU's memory. 3 and 1 GPUs: min(3 / 1.5, 1 / 0.5); any other split gives less."""
    solution = plan(instance([1.5, 0.5], [10.0, 10.0]))
    assert [(group.gpus, group.models) for group in solution.groups] == [(3, ("m0",)), (1, ("m1",))]
    assert solution.burst_tolerance == pytest.approx(2.0)
    assert (solution.gap, solution.bound) == (0.0, solution.burst_tolerance)
    assert [group.load for group in solution.groups] == pytest.approx([0.5, 0.5])


def test_as_printed_an_optimum_loads_a_group_to_1_9_times_its_capacity() -> None:
    """19 models of 1 GPU's load each, on 19 GPUs in groups of at most 10. As printed, sharing costs nothing: all models
    go into the one group that can have 10. With their load they fill two groups, and the smaller one has 9.
    """
    problem = instance([1.0] * 19, [0.5] * 19, gpus=19, group_gpus_max=10, groups=2)
    printed, usable = plan(problem, as_printed=True), plan(problem)
    assert [(group.gpus, len(group.models), group.load) for group in printed.groups] == [(10, 19, 1.9)]
    assert printed.burst_tolerance == 10.0
    assert sorted((group.gpus, len(group.models), group.load) for group in usable.groups) == [
        (9, 9, 1.0),
        (10, 10, 1.0),
    ]
    assert usable.burst_tolerance == 9.0
    assert printed.gap == usable.gap == 0.0


def test_the_printed_form_promises_more_than_the_load_permits() -> None:
    """One group of 3 GPUs for two models of 2 GPUs' load each; with the load, each model needs its own group of 2."""
    problem = instance([2.0, 2.0], gpus=4, group_gpus_max=3)
    assert plan(problem, as_printed=True).burst_tolerance == pytest.approx(1.5)
    assert plan(problem, as_printed=True).groups[0].load == pytest.approx(4 / 3)
    assert plan(problem).burst_tolerance == pytest.approx(1.0)


def test_a_burst_tolerance_is_a_groups_gpus_over_the_streams_need() -> None:
    """A model's tolerance is at most that of each of its streams."""
    streams = (
        Stream("a", "m", gpus_needed=0.5),
        Stream("b", "m", gpus_needed=0.25),
        Stream("idle", "m", gpus_needed=0),
    )
    solution = plan(Instance(streams, (Model("m", 1.0, 1.0, 1.0),), 3, 16.0, 3, 1))
    assert [stream.burst_tolerance for stream in solution.streams] == [6.0, 12.0, None]
    assert solution.models[0].burst_tolerance == solution.burst_tolerance == 4.0
    assert solution.models[0].streams == 3


def test_spare_gpus_go_where_the_burst_tolerance_is_least() -> None:
    """m0 can have no more than 3 of the 8 GPUs."""
    solution = plan(instance([1.5, 0.5, 0.4], [10.0] * 3, gpus=8, group_gpus_max=3, groups=3))
    assert [group.gpus for group in solution.groups] == [3, 3, 2]
    assert solution.burst_tolerance == pytest.approx(2.0)


def test_loads_are_levelled_among_equal_optima() -> None:
    """m0 sets the optimum. The others do as well in one group as in several, but with a less even load."""
    solution = plan(instance([2.0] + [0.25] * 16, [0.5] * 17, gpus=12, group_gpus_max=4, groups=3))
    assert solution.burst_tolerance == 2.0
    assert max(group.load for group in solution.groups) < 0.6


def test_without_any_load_there_is_a_plan_and_no_burst_tolerance() -> None:
    solution = plan(instance([0.0, 0.0], [10.0, 10.0]))
    assert (solution.burst_tolerance, solution.bound, solution.gap) == (None, None, 0.0)
    assert len(solution.groups) == 2


@pytest.mark.parametrize("as_printed", [False, True])
@pytest.mark.parametrize("part", range(8))
def test_the_least_burst_tolerance_is_that_of_brute_force(part: int, as_printed: bool) -> None:
    planned = 0
    for seed in range(25 * part, 25 * (part + 1)):
        problem = random_instance(seed, models=2 + seed % 5)
        expected = best(problem, as_printed)
        if expected is None:
            with pytest.raises(NoPlan, match="there is no plan"):
                plan(problem, as_printed=as_printed)
            continue
        solution = plan(problem, as_printed=as_printed)
        assert solution.burst_tolerance == pytest.approx(expected, rel=1e-9), seed
        assert solution.gap == 0.0
        check(problem, solution)
        planned += 1
    assert planned >= 5, "too few instances have a plan"


@pytest.mark.parametrize("as_printed", [False, True])
def test_a_medium_instance_is_planned_to_the_optimum(as_printed: bool) -> None:
    """200 models on 200 GPUs, without an integer programme."""
    problem = table_5(200, seed=1)
    solution = plan(problem, as_printed=as_printed)
    check(problem, solution)
    assert solution.gap == 0.0
    assert solution.streams[7].group == solution.group_of("m7", "m7")


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    count = draw(st.integers(1, 25))
    models = tuple(
        Model(f"m{k}", draw(st.floats(0.1, 8.0)), draw(st.floats(0.1, 40.0)), draw(st.floats(0.0, 80.0)))
        for k in range(count)
    )
    streams = tuple(
        Stream(
            f"s{k}",
            f"m{draw(st.integers(0, count - 1))}",
            gpus_needed=draw(st.sampled_from([0.0, 0.25]) | st.floats(1e-6, 1.0)),
        )
        for k in range(draw(st.integers(0, 40)))
    )
    return Instance(
        streams,
        models,
        gpus=draw(st.integers(1, 40)),
        gpu_memory_gb=draw(st.floats(8.0, 80.0)),
        group_gpus_max=draw(st.integers(1, 12)),
        groups=draw(st.integers(1, 8)),
        affinity_max=draw(st.none() | st.floats(1.0, 100.0)),
    )


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(instances(), st.booleans())
def test_a_plan_keeps_every_limit(problem: Instance, as_printed: bool) -> None:
    with suppress(NoPlan):
        check(problem, plan(problem, as_printed=as_printed, time_limit_s=1.0))
