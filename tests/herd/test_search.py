"""The parts of the search: the relaxation's bound, models that are placed anew, and what is told meanwhile."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from instances import best, check, drawn, instance, table_5

from llmserve.herd import NoPlan, Stream, milp, needs_of, plan, search, streams_of
from llmserve.herd.relaxation import Relaxation
from llmserve.herd.task import task_of


def test_the_relaxation_never_asks_for_more_gpus_than_there_need_to_be() -> None:
    for seed in range(60):
        asked = drawn(seed, models=5)
        needs = [stream.gpus_needed or 0.0 for stream in asked.streams if isinstance(stream, Stream)]
        for as_printed in (False, True):
            found = best(asked, as_printed)
            if found is not None:
                task, _ = task_of(asked, np.array(needs), as_printed)
                assert Relaxation.of(task, found).gpus <= asked.gpus


def test_what_was_found_in_time_is_returned_with_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group may have all GPUs, and memory is tight: bound and greedy packing do not meet, and HiGHS has no time."""
    monkeypatch.setattr(search, "decide", lambda *given, **named: (None, False))
    asked = msgspec.structs.replace(table_5(120, seed=0), group_gpus_max=120)
    told: list[tuple[float | None, float]] = []
    found = plan(asked, time_limit_s=1e6, on_found=lambda best, bound: told.append((best, bound)))
    check(asked, found)
    assert 0.0 < found.gap < 0.15
    assert told[-1][1] == pytest.approx(found.bound)
    assert [best for best, _ in told if best] == sorted(best for best, _ in told if best)


def test_some_models_can_be_placed_anew_where_all_are_too_many() -> None:
    """The greedy packing of 120 models at somewhat more than it reaches takes too many GPUs; with 100 moved it fits."""
    asked = msgspec.structs.replace(table_5(120, seed=1), group_gpus_max=120)
    task, _ = task_of(asked, needs_of(asked, streams_of(asked)), as_printed=False)
    of = search.Search(task, time.perf_counter() + 1e6)
    of._most = search.last_where(of._relaxed, of._most)
    of._pack()
    packed, more = of._tolerances[of._feasible], of._tolerances[of._feasible + 2]
    fixed = of._with_some_freed(more, np.random.default_rng(0))
    assert fixed is not None
    assert np.count_nonzero(fixed < 0) == milp.FREED
    grouping, proven = milp.decide(task, more, 60.0, fixed=fixed)
    assert grouping is not None
    assert not proven
    assert grouping.tolerance(task) > packed
    assert (grouping.group[fixed >= 0] == fixed[fixed >= 0]).all()


def test_time_that_has_run_out_before_anything_was_found_is_said() -> None:
    with pytest.raises(NoPlan, match="try a longer time limit"):
        plan(table_5(50, seed=0), time_limit_s=-time.perf_counter())


def test_no_bound_is_told_where_there_turns_out_to_be_no_plan() -> None:
    """Any two of these models exceed a GPU's memory, all three fill less than two: only HiGHS sees that none fits."""
    told: list[tuple[float | None, float]] = []
    with pytest.raises(NoPlan, match="no grouping of whole models keeps all limits"):
        plan(instance([0.1] * 3, [9.0] * 3), on_found=lambda best, bound: told.append((best, bound)))
    assert {best for best, _ in told} == {None}
    assert [bound for _, bound in told] == sorted((bound for _, bound in told), reverse=True)
