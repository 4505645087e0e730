"""Plans for new rates: as good as without a previous plan, and with few moves."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from instances import check, instance, instance_of_rates, random_instance, table_5

from llmserve.errors import ConfigError
from llmserve.planning import (
    HerdGroup,
    Instance,
    Model,
    Plan,
    Rates,
    Stream,
    StreamColumns,
    milp,
    needs_of,
    plan,
    planning,
    replan,
    streams_of,
    with_rates,
)
from llmserve.planning.planning import loading_s
from llmserve.planning.repair import repaired
from llmserve.planning.task import task_of


def test_nothing_moves_while_the_previous_groups_are_optimal() -> None:
    problem = instance_of_rates([10.0, 8.0, 6.0, 4.0], gpus=8)
    previous = plan(problem)
    replanned = replan(problem, {("s0", "m0"): 11.0}, previous)
    assert replanned.moves == 0
    assert replanned.models[0].gpus_needed == pytest.approx(1.1)
    assert [(group.name, group.models) for group in replanned.groups] == [(g.name, g.models) for g in previous.groups]


def test_few_models_move_if_necessary_and_the_tolerance_stays_optimal() -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        problem = instance_of_rates(rng.uniform(1.0, 9.0, 7).tolist(), gpus=9, group_gpus_max=4, groups=4)
        rates = {f"m{k}": float(rate) for k, rate in enumerate(rng.uniform(1.0, 9.0, 7))}
        previous = plan(problem)
        changed = with_rates(problem, rates)
        replanned = replan(problem, rates, previous)
        check(changed, replanned)
        assert replanned.burst_tolerance == pytest.approx(plan(changed).burst_tolerance)
        old = {model: group.name for group in previous.groups for model in group.models}
        moved = sum(old[model] != group.name for group in replanned.groups for model in group.models)
        assert replanned.moves == moved
        assert moved <= 4


@pytest.mark.parametrize("holds_s", [30.0, 300.0, 3_000.0])
def test_models_are_loaded_only_for_a_plan_that_gains_more_than_their_loading_costs(holds_s: float) -> None:
    stays = moves = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        problem = instance_of_rates(rng.uniform(1.0, 9.0, 7).tolist(), gpus=12, group_gpus_max=5, groups=4)
        rates = {f"m{k}": float(rate) for k, rate in enumerate(rng.uniform(1.0, 9.0, 7))}
        previous, best = plan(problem), replan(problem, rates, plan(problem))
        replanned = replan(msgspec.structs.replace(problem, load_s=20.0), rates, previous, holds_s=holds_s)
        check(with_rates(problem, rates), replanned)
        need = {model.name: model.gpus_needed for model in best.models}
        of_previous = [(group.gpus, [need[model] for model in group.models]) for group in previous.groups]
        tolerance = min(gpus / max(needs) for gpus, needs in of_previous)
        lost = loading_s(previous, best, 20.0) / (12 * holds_s)
        assert best.burst_tolerance is not None
        if all(sum(needs) <= gpus for gpus, needs in of_previous) and tolerance >= (1 - lost) * best.burst_tolerance:
            stays += 1
            assert [(g.name, g.gpus, g.models) for g in replanned.groups] == [
                (g.name, g.gpus, g.models) for g in previous.groups
            ]
            assert replanned.moves == 0
        else:
            moves += 1
            assert replanned.groups == best.groups
    assert moves, "groups that are overloaded, or gain much, move whatever it costs"
    assert (stays > 0) == (holds_s < 3_000)


def test_loading_counts_all_models_on_a_groups_new_gpus_and_new_models_on_its_others() -> None:
    before = Plan((HerdGroup("a", 2, ("x", "y")), HerdGroup("b", 3, ("z",))))
    after = Plan((HerdGroup("a", 3, ("x", "z")), HerdGroup("b", 1, ("y",)), HerdGroup("c", 1, ("v", "w"))))
    # a: x and z on its new GPU, z on two others; b: y on the GPU that stays; c: v and w
    assert loading_s(before, after, 10.0) == 10.0 * (2 + 2 + 1 + 2)
    assert loading_s(before, before, 10.0) == 0.0


def test_of_very_many_models_only_some_may_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """m0 needs a whole group of 4 after the change; HiGHS may place at most 2 of all models again."""
    monkeypatch.setattr(planning, "WHOLE_SIZE", 0)
    monkeypatch.setattr(planning, "FREED", 2)
    freed = planning._some_freed(np.array([0, 1, -1, 1, 0]))
    assert freed[2] == -1
    assert np.count_nonzero(freed < 0) == 3
    problem = instance_of_rates([10.0, 9.0, 9.0, 8.0], gpus=7, groups=3)
    previous = plan(problem)
    replanned = replan(problem, {"m0": 39.0}, previous)
    check(with_rates(problem, {"m0": 39.0}), replanned)
    assert replanned.burst_tolerance == pytest.approx(plan(with_rates(problem, {"m0": 39.0})).burst_tolerance)


def test_a_rate_by_model_changes_its_streams_in_proportion() -> None:
    problem = instance_of_rates([10.0, 8.0])
    problem = msgspec.structs.replace(problem, streams=(*problem.streams, Stream("more", "m0", rate_per_s=30.0)))
    changed = streams_of(with_rates(problem, {"m0": 20.0}))
    assert changed.rate_per_s.tolist() == [5.0, 8.0, 15.0]


def test_an_unknown_stream_counts_with_the_tightest_slo_of_its_model() -> None:
    problem = Instance(
        (Stream("a", "m", rate_per_s=1.0, slo_s=0.1), Stream("b", "m", rate_per_s=1.0, slo_s=0.2)),
        (Model("m", 1.0, 1.0, 10.0),), 4, 16.0, 4, 1,
    )  # fmt: skip
    changed = streams_of(with_rates(problem, {("new", "m"): 7.0}))
    assert (changed.names[-1], changed.rate_per_s[-1], changed.slo_s[-1]) == ("new", 7.0, 0.1)


def test_a_stream_with_declared_gpus_counts_by_its_observed_rate() -> None:
    """A GPU ends a batch of 90 in 0.1 s: 7 requests/s need 7 x 0.1 / 90 GPUs, whatever was declared."""
    streams = (Stream("chat", "m", rate_per_s=1.0, slo_s=0.1), Stream("mail", "m", gpus_needed=0.5))
    problem = Instance(streams, (Model("m", 1.0, 1.0, 10.0),), 4, 16.0, 4, 1)
    replanned = replan(problem, {("mail", "m"): 7.0}, plan(problem))
    assert replanned.streams[1].gpus_needed == pytest.approx(7 * 0.1 / 90)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"m9": 1.0}, "rates_per_s: unknown model 'm9'; did you mean m"),
        ({("s0", "m0"): -1.0}, "rates_per_s: 's0' of model 'm0': a finite number of at least 0 is needed, not -1.0"),
        ({"m0": math.inf}, "rates_per_s: 'm0': a finite number"),
    ],
)
def test_invalid_rates_are_an_error(rates: Rates, message: str) -> None:
    problem = instance_of_rates([10.0, 8.0])
    with pytest.raises(ConfigError, match=message):
        replan(problem, rates, plan(problem))


def test_needs_without_rates_do_not_change_in_proportion() -> None:
    problem = instance([0.5, 0.5])
    with pytest.raises(ConfigError, match="the streams of model 'm0' have no rates"):
        with_rates(problem, {"m0": 5.0})


def test_of_more_models_than_a_programme_takes_few_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of two groups double. A plan made anew would move most of the models."""
    monkeypatch.setattr(milp, "PROGRAMME_MAX", 0)
    problem = table_5(200, seed=0, groups=16)
    previous = plan(problem, time_limit_s=1e6)
    hot = {model for group in previous.groups[:2] for model in group.models}
    needs = needs_of(problem, streams_of(problem)) * [2.0 if model.name in hot else 1.0 for model in problem.models]
    needs *= 0.8 * problem.gpus / needs.sum()
    names = [model.name for model in problem.models]
    changed = msgspec.structs.replace(problem, streams=StreamColumns(names, names, gpus_needed=needs))
    replanned = plan(changed, previous=previous, time_limit_s=1e6)
    check(changed, replanned)
    assert replanned.gap == 0.0
    assert replanned.moves is not None
    assert 0 < replanned.moves < 10


def test_a_repaired_grouping_keeps_all_limits_or_is_none() -> None:
    found = 0
    for seed in range(60):
        problem = random_instance(seed, models=8)
        need = needs_of(problem, streams_of(problem))
        task, _ = task_of(problem, need, as_printed=False)
        before = np.random.default_rng(seed).integers(-1, task.groups, need.size)
        grouping = repaired(task, 0.0, before, task.groups)
        if grouping is not None:
            found += 1
            assert (grouping.group >= 0).all()
            assert task.sizes(grouping.group, 0.0, task.groups) is not None
            assert all(np.unique(task.kind[grouping.group == k]).size <= 1 for k in range(task.groups))
    assert found > 5
