"""From an instance to its plan: the search, the choice among equals, and the outcome in words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmserve.errors import NoPlan
from llmserve.herd.instance import ROUNDING, Floats, Instance, Ints, Rates, Streams, check, streams_of, with_rates
from llmserve.herd.moves import with_few_moves
from llmserve.herd.packing import levelled, with_spare
from llmserve.herd.planned import Group, Plan, PlannedModel, PlannedStream
from llmserve.herd.search import Search, Told, why_not
from llmserve.herd.task import Grouping, by_model, needs_of, task_of

TIME_LIMIT_S = 10.0
SEARCHING = 0.85  # of the time at most; the rest is for choosing among equals
STREAMS_TOLD_MAX = 1_000  # with more, a plan names models only: it stays small, and its streams follow their models


def plan(
    instance: Instance,
    *,
    as_printed: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
    previous: Plan | None = None,
    told: Told | None = None,
) -> Plan:
    """The plan of largest least burst tolerance; with its gap, if the time does not suffice to prove it.

    previous : a plan whose groups' names go on, and its models stay where they are wherever that is as good (`replan`).
    told : is called when something was found.

    GPUs that the optimum leaves over go, one by one, to the group of least burst tolerance. Unless as_printed, among
    equal optima one is looked for that levels the groups' loads.

    Raises ConfigError on an instance that makes no sense, and NoPlan.
    """
    began_s = time.perf_counter()
    check(instance)
    streams = streams_of(instance)
    needs = needs_of(instance, streams)
    task, order = task_of(instance, by_model(instance, streams, needs), as_printed)
    search = Search(task, began_s + SEARCHING * time_limit_s, told)
    found = search.run()
    if found is None:
        raise NoPlan(why_not(instance, as_printed, search))
    grouping = found.grouping
    if not as_printed:
        grouping = levelled(task, found.tolerance, grouping, began_s + time_limit_s)
    names = [f"group-{number + 1}" for number in range(instance.groups)]
    moves = None
    if previous is not None:
        grouping, names, moves = with_few_moves(
            search, found.tolerance, grouping, previous, [instance.models[k].name for k in order]
        )
    outcome = _Outcome(with_spare(task, grouping), names, found.bound, moves, as_printed)
    return _worded(instance, streams, needs, outcome, order, began_s)


def replan(
    instance: Instance,
    rates_per_s: Rates,
    previous: Plan,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    told: Told | None = None,
) -> Plan:
    """A plan for other rates, in the form (as printed or not) of the previous one.

    rates_per_s : by (stream, model) or by model; what is not named stays (`with_rates`).

    The least burst tolerance is as large as if there were no previous plan. Among plans that reach it: the previous
    groups, unless they do not; else one that HiGHS finds, with the fewest moves if the time suffices (of many models
    only some may move), or, if that has fewer, the one that would be made without a previous plan, its groups named
    after those they share most models with.

    Raises ConfigError on a rate below 0 or of an unknown model, and NoPlan.
    """
    changed = with_rates(instance, rates_per_s)
    return plan(changed, as_printed=previous.as_printed, time_limit_s=time_limit_s, previous=previous, told=told)


@dataclass(frozen=True, slots=True)
class _Outcome:
    grouping: Grouping
    names: list[str]
    bound: float
    moves: int | None
    as_printed: bool


def _worded(
    instance: Instance, streams: Streams, needs: Floats, outcome: _Outcome, order: Ints, began_s: float
) -> Plan:
    """The outcome in the instance's names. order : (models,) of the task's, each one's index in the instance."""
    group = np.empty(order.size, dtype=np.int64)
    group[order] = outcome.grouping.group
    sizes = outcome.grouping.sizes
    need = by_model(instance, streams, needs)
    memory_gb = np.array([model.memory_gb for model in instance.models])
    counts = np.bincount(streams.model, minlength=order.size)
    used = [number for number in range(sizes.size) if (group == number).any()]
    groups = tuple(
        Group(
            name=outcome.names[number],
            gpus=int(sizes[number]),
            models=tuple(instance.models[k].name for k in np.flatnonzero(group == number)),
            load=float(need[group == number].sum() / sizes[number]),
            memory_gb=float(memory_gb[group == number].sum()),
            burst_tolerance=_tolerance(int(sizes[number]), float(need[group == number].max())),
        )
        for number in used
    )
    models = tuple(
        PlannedModel(
            name=model.name,
            group=outcome.names[group[k]],
            gpus_needed=float(need[k]),
            streams=int(counts[k]),
            burst_tolerance=_tolerance(int(sizes[group[k]]), float(need[k])),
        )
        for k, model in enumerate(instance.models)
    )
    least = min([each.burst_tolerance for each in groups if each.burst_tolerance is not None], default=None)
    bound = least if least is None or outcome.bound <= least * (1 + ROUNDING) else outcome.bound
    return Plan(
        groups=groups,
        models=models,
        streams=_planned_streams(streams, needs, models, groups) if needs.size <= STREAMS_TOLD_MAX else (),
        burst_tolerance=least,
        bound=bound,
        gap=0.0 if least is None or bound is None else bound / least - 1,
        solve_s=time.perf_counter() - began_s,
        as_printed=outcome.as_printed,
        moves=outcome.moves,
    )


def _planned_streams(
    streams: Streams, needs: Floats, models: Sequence[PlannedModel], groups: Sequence[Group]
) -> tuple[PlannedStream, ...]:
    gpus = {group.name: group.gpus for group in groups}
    return tuple(
        PlannedStream(name, models[kind].name, models[kind].group, need, _tolerance(gpus[models[kind].group], need))
        for name, kind, need in zip(streams.names, streams.model.tolist(), needs.tolist(), strict=True)
    )


def _tolerance(gpus: int, need: float) -> float | None:
    return gpus / need if need > 0 else None
