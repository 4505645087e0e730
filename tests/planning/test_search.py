"""Parts of the search: the relaxation's bound, models that are placed again, and progress reports."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from instances import best, check, instance, random_instance, table_5

from llmserve.planning import NoPlan, Stream, milp, needs_of, plan, search, streams_of
from llmserve.planning.relaxation import Relaxation
from llmserve.planning.task import task_of


def test_the_relaxation_never_needs_more_gpus_than_necessary() -> None:
    for seed in range(60):
        problem = random_instance(seed, models=5)
        needs = [stream.gpus_needed or 0.0 for stream in problem.streams if isinstance(stream, Stream)]
        for as_printed in (False, True):
            tolerance = best(problem, as_printed)
            if tolerance is not None:
                task, _ = task_of(problem, np.array(needs), as_printed)
                assert Relaxation.of(task, tolerance).gpus <= problem.gpus


def test_the_best_plan_within_the_time_limit_is_returned_with_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group may have all GPUs, and memory is tight: bound and greedy packing differ, and HiGHS has no time."""
    monkeypatch.setattr(search, "decide", lambda *args, **named: (None, False))
    problem = msgspec.structs.replace(table_5(120, seed=0), group_gpus_max=120)
    reports: list[tuple[float | None, float]] = []
    solution = plan(problem, time_limit_s=1e6, on_found=lambda best, bound: reports.append((best, bound)))
    check(problem, solution)
    assert 0.0 < solution.gap < 0.15
    assert reports[-1][1] == pytest.approx(solution.bound)
    assert [best for best, _ in reports if best] == sorted(best for best, _ in reports if best)


def test_some_models_can_be_placed_again_where_all_are_too_many() -> None:
    """The greedy packing of 120 models needs too many GPUs for a slightly higher tolerance; moving 100 models helps."""
    problem = msgspec.structs.replace(table_5(120, seed=1), group_gpus_max=120)
    task, _ = task_of(problem, needs_of(problem, streams_of(problem)), as_printed=False)
    of = search.Search(task, time.perf_counter() + 1e6)
    of._most = search.last_where(of._relaxed, of._most)
    of._pack()
    packed, target = of._tolerances[of._feasible], of._tolerances[of._feasible + 2]
    fixed = of._with_some_freed(target, np.random.default_rng(0))
    assert fixed is not None
    assert np.count_nonzero(fixed < 0) == milp.FREED
    grouping, proven = milp.decide(task, target, 60.0, fixed=fixed)
    assert grouping is not None
    assert not proven
    assert grouping.tolerance(task) > packed
    assert (grouping.group[fixed >= 0] == fixed[fixed >= 0]).all()


def test_a_time_limit_without_a_plan_is_an_error() -> None:
    with pytest.raises(NoPlan, match="try a longer time limit"):
        plan(table_5(50, seed=0), time_limit_s=-time.perf_counter())


def test_no_tolerance_is_reported_where_no_plan_exists() -> None:
    """Any two of these models exceed a GPU's memory, all three fill less than two: only HiGHS proves that none fits."""
    reports: list[tuple[float | None, float]] = []
    with pytest.raises(NoPlan, match="no grouping of whole models keeps all limits"):
        plan(instance([0.1] * 3, [9.0] * 3), on_found=lambda best, bound: reports.append((best, bound)))
    assert {best for best, _ in reports} == {None}
    assert [bound for _, bound in reports] == sorted((bound for _, bound in reports), reverse=True)


def test_many_models_in_many_groups_reach_the_bound() -> None:
    problem = msgspec.structs.replace(table_5(600, seed=0, groups=50), group_gpus_max=40)
    solution = plan(problem, time_limit_s=1e6)
    check(problem, solution)
    assert solution.gap == 0.0


def test_a_programme_that_is_too_large_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "PROGRAMME_MAX", 120 * 10 - 1)
    monkeypatch.setattr(milp, "scipy_optimize", lambda: pytest.fail("HiGHS must not begin"))
    problem = msgspec.structs.replace(table_5(120, seed=0), group_gpus_max=120)
    solution = plan(problem, time_limit_s=1e6)
    check(problem, solution)
    assert 0.0 < solution.gap < 0.15
