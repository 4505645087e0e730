"""Instances to plan, the limits that every plan must keep, and brute force over all groupings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np
import pytest

from llmserve.planning import Instance, Model, Plan, Stream, StreamColumns, affinity_sets, needs_of, streams_of

ROUNDING = 1e-6


def instance(needs: list[float], memory_gb: list[float] | None = None, **limits: object) -> Instance:
    """One stream per model; stream k needs needs[k] GPUs."""
    sizes = memory_gb or [1.0] * len(needs)
    return Instance(
        streams=tuple(Stream(f"s{k}", f"m{k}", gpus_needed=need) for k, need in enumerate(needs)),
        models=tuple(Model(f"m{k}", size, alpha_ms=1.0, beta_ms=10.0) for k, size in enumerate(sizes)),
        **{"gpus": 4, "gpu_memory_gb": 16.0, "group_gpus_max": 4, "groups": 2, **limits},  # type: ignore[arg-type]
    )


def instance_of_rates(rates: list[float], **limits: object) -> Instance:
    base = instance([0.0] * len(rates), [6.0] * len(rates), **limits)
    models = tuple(msgspec.structs.replace(model, goodput_per_s=10.0) for model in base.models)
    streams = tuple(Stream(f"s{k}", f"m{k}", rate_per_s=rate) for k, rate in enumerate(rates))
    return msgspec.structs.replace(base, models=models, streams=streams)


def random_instance(seed: int, models: int) -> Instance:
    """Tight instances: a good part of them has no plan."""
    rng = np.random.default_rng(seed)
    gpus, groups = int(rng.integers(2, 11)), int(rng.integers(1, 4))
    needs = rng.lognormal(0.0, 1.0, models)
    memory = rng.uniform(1.0, 9.0, models)
    kinds = rng.integers(0, 2, models)
    return Instance(
        streams=tuple(Stream(f"s{k}", f"m{k}", gpus_needed=float(need)) for k, need in
                      enumerate(needs * rng.uniform(0.3, 0.9) * gpus / needs.sum())),
        models=tuple(Model(f"m{k}", float(memory[k]), [1.0, 30.0][kinds[k]], 5.0) for k in range(models)),
        gpus=gpus,
        gpu_memory_gb=float(max(memory.max(), memory.sum() * rng.uniform(0.9, 1.6) / groups)),
        group_gpus_max=int(rng.integers(1, 6)),
        groups=groups,
        affinity_max=None if seed % 3 else 2.0,
    )  # fmt: skip


def table_5(models: int, seed: int, groups: int = 10) -> Instance:
    """As scripts/lab/questions/herd/run.py draws them, with one stream per model."""
    rng = np.random.default_rng(seed)
    needs, memory = rng.lognormal(0.0, 1.0, models), rng.uniform(0.3, 1.7, models)
    names = [f"m{k}" for k in range(models)]
    return Instance(
        StreamColumns(names, names, gpus_needed=0.8 * models * needs / needs.sum()),
        tuple(Model(name, float(size), 1.0, 10.0) for name, size in zip(names, memory, strict=True)),
        gpus=models,
        gpu_memory_gb=float(memory.sum() / groups / 0.9),
        group_gpus_max=models * 3 // 2 // groups,
        groups=groups,
    )


def without_time(solution: Plan) -> Plan:
    return msgspec.structs.replace(solution, solve_s=0.0)


def check(problem: Instance, solution: Plan) -> None:
    """Assert every limit of the instance on the plan's own figures."""
    streams = streams_of(problem)
    needs = np.bincount(streams.model, needs_of(problem, streams), len(problem.models))
    need = {model.name: needs[k] for k, model in enumerate(problem.models)}
    memory_gb = {model.name: model.memory_gb for model in problem.models}
    kind = dict(zip(memory_gb, affinity_sets(problem.models, problem.affinity_max).tolist(), strict=True))
    assert sorted(model for group in solution.groups for model in group.models) == sorted(memory_gb), (
        "each model must be in one group"
    )
    assert len(solution.groups) <= problem.groups
    assert sum(group.gpus for group in solution.groups) <= problem.gpus
    for group in solution.groups:
        assert 1 <= group.gpus <= problem.group_gpus_max
        assert sum(memory_gb[model] for model in group.models) <= problem.gpu_memory_gb * (1 + 1e-5)
        assert len({kind[model] for model in group.models}) == 1
        load = sum(need[model] for model in group.models)
        assert solution.as_printed or load <= group.gpus + 1e-5
        assert group.load == pytest.approx(load / group.gpus)
    tolerances = [g.gpus / need[model] for g in solution.groups for model in g.models if need[model] > 0]
    assert solution.burst_tolerance == (pytest.approx(min(tolerances)) if tolerances else None)
    if solution.burst_tolerance is not None and solution.bound is not None:
        assert solution.bound >= solution.burst_tolerance
        assert solution.gap == pytest.approx(solution.bound / solution.burst_tolerance - 1)


def best(problem: Instance, as_printed: bool) -> float | None:
    """The largest least burst tolerance over all groupings and sizes; None: no plan. One stream per model."""
    needs = [stream.gpus_needed or 0.0 for stream in problem.streams if isinstance(stream, Stream)]
    best_tolerance: float | None = None
    for group in partitions(len(needs), problem.groups):
        members = [[k for k, of in enumerate(group) if of == number] for number in range(max(group) + 1)]
        if not all(fits(problem, part) for part in members):
            continue
        for sizes in product(range(1, problem.group_gpus_max + 1), repeat=len(members)):
            loads = [sum(needs[k] for k in part) for part in members]
            served = as_printed or all(load <= size + ROUNDING for load, size in zip(loads, sizes, strict=True))
            if sum(sizes) <= problem.gpus and served:
                tolerance = min(size / max(needs[k] for k in part) for size, part in zip(sizes, members, strict=True))
                best_tolerance = tolerance if best_tolerance is None else max(best_tolerance, tolerance)
    return best_tolerance


def partitions(count: int, groups: int) -> Iterator[list[int]]:
    """All partitions of `count` models into at most `groups` groups, each once."""
    for group in product(range(groups), repeat=count):
        if all(number <= max(group[:at], default=-1) + 1 for at, number in enumerate(group)):
            yield list(group)


def fits(problem: Instance, members: list[int]) -> bool:
    models = [problem.models[k] for k in members]
    together = sum(model.memory_gb for model in models) <= problem.gpu_memory_gb * (1 + ROUNDING)
    sets = affinity_sets(problem.models, problem.affinity_max)
    return together and len({int(sets[k]) for k in members}) == 1
