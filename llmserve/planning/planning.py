"""The plan: which models share which GPUs. The server reads it.

    Plan      a plan; as JSON, written by `llmserve plan` or by hand
    plan      the plan of an instance: the search for the largest least burst tolerance, and the choice among optima
    replan    the plan for other rates: optimal too, with few models that change groups

There are four ways to keep models in the groups of a previous plan. If the previous groups are optimal, every model
stays (1). Otherwise HiGHS searches the optimal grouping in which the most models stay; of very many models it places
only some anew (2). The grouping found without the previous plan is a candidate too, its groups named after the previous
groups that share most models with them (3), and so are the previous groups, repaired greedily (4). The plan takes the
candidate of (2) to (4) with the fewest moves. The previous plan stays where loading models would cost more than
the new plan gains (`replan`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from llmserve.errors import NoPlan
from llmserve.planning.instance import (
    ROUNDING,
    SLACK,
    Bools,
    Count,
    Floats,
    Instance,
    Ints,
    Name,
    NotNegative,
    Parts,
    Rates,
    Streams,
    check,
    no_duplicates,
    read_json,
    streams_of,
    with_rates,
    write_json,
)
from llmserve.planning.milp import FREED, WHOLE_SIZE, decide, scipy_optimize
from llmserve.planning.packing import levelled, with_spare
from llmserve.planning.repair import repaired
from llmserve.planning.search import OnFound, Search, why_not
from llmserve.planning.task import Grouping, Task, by_model, needs_of, task_of

TIME_LIMIT_S = 10.0
SEARCHING = 0.85  # largest share of the time for the search; the rest is for the choice among optima
MOVES_S = 5.0  # time limit for finding few moves
STREAMS_LISTED_MAX = 1_000  # a plan of more streams lists models only, and stays small; streams follow their models


# ---- a plan -------------------------------------------------------------------------------------------------------


class HerdGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """GPUs with their own scheduler; each GPU holds all models of the group.

    streams          (stream, model) pairs of this group although another group has the model; `plan` makes none
    workers          the server's names of these GPUs; (): any that serve the models. `plan` names none
    load             GPUs for the average load, over gpus; a load above 1 cannot be served
    memory_gb        memory of the models on each GPU
    burst_tolerance  least burst tolerance of the models; None: the models have no load
    """

    name: Name
    gpus: Count
    models: tuple[Name, ...]
    streams: tuple[tuple[str, str], ...] = ()
    workers: tuple[Name, ...] = ()
    load: NotNegative = 0.0
    memory_gb: NotNegative = 0.0
    burst_tolerance: NotNegative | None = None


class PlannedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model with its streams added up. burst_tolerance : at most that of each stream of the model; None: no load."""

    name: str
    group: str
    gpus_needed: float
    streams: int
    burst_tolerance: float | None = None


class PlannedStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stream, in its model's group. burst_tolerance : None: the stream has no load."""

    name: str
    model: str
    group: str
    gpus_needed: float
    burst_tolerance: float | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """Which group serves which models. A hand-written plan needs only groups with their names, GPUs and models.

    models           each with its group, in the instance's order
    streams          each with its own burst tolerance, if there are at most `STREAMS_LISTED_MAX`; otherwise ()
    burst_tolerance  the least burst tolerance; None: there is no load
    bound            upper bound of any plan; gap : bound / burst_tolerance - 1, 0 when the plan is proven optimal
    solve_s          seconds from the instance in memory to the plan
    as_printed       whether groups may have more load than GPUs
    moves            number of models that were in another group of the previous plan; None: no previous plan
    """

    groups: tuple[HerdGroup, ...]
    models: tuple[PlannedModel, ...] = ()
    streams: tuple[PlannedStream, ...] = ()
    burst_tolerance: float | None = None
    bound: float | None = None
    gap: float = 0.0
    solve_s: float = 0.0
    as_printed: bool = False
    moves: int | None = None
    version: Literal[1] = 1

    def group_of(self, stream: str, model: str) -> str | None:
        """The name of the group that serves this stream of this model; None: not in the plan."""
        pairs, models = self._routes
        return pairs.get((stream, model)) or models.get(model)

    @cached_property
    def _routes(self) -> tuple[dict[tuple[str, str], str], dict[str, str]]:
        pairs = {pair: group.name for group in self.groups for pair in group.streams}
        return pairs, {model: group.name for group in self.groups for model in group.models}

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read JSON. Raises ConfigError naming the error's place in the file."""
        where = f"the plan {path}"
        content = read_json(path, cls, PARTS, "plan")
        no_duplicates([group.name for group in content.groups], f"{where}: group")
        no_duplicates([model for group in content.groups for model in group.models], f"{where}: model")
        no_duplicates([pair for group in content.groups for pair in group.streams], f"{where}: stream")
        no_duplicates([worker for group in content.groups for worker in group.workers], f"{where}: worker")
        return content

    def save(self, path: str | Path) -> None:
        """Raises ConfigError when the file cannot be written."""
        write_json(path, self, "plan")


PARTS: Parts = {"groups[": HerdGroup, "models[": PlannedModel, "streams[": PlannedStream}


# ---- from an instance to its plan ---------------------------------------------------------------------------------


def plan(
    instance: Instance,
    *,
    as_printed: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
    previous: Plan | None = None,
    on_found: OnFound | None = None,
) -> Plan:
    """The plan of largest least burst tolerance; with a gap, if the time is too short for a proof.

    previous : a plan whose group names stay, and whose models stay in their groups where that is optimal (`replan`).
    on_found : called with the progress of the search.

    GPUs that the optimum does not use go, one by one, to the group of least burst tolerance. Unless as_printed, an
    optimum with level loads of the groups is preferred.

    Raises ConfigError on an invalid instance, and NoPlan.
    """
    began_s = time.perf_counter()
    check(instance)
    streams = streams_of(instance)
    needs = needs_of(instance, streams)
    need = by_model(instance, streams, needs)
    task, order = task_of(instance, need, as_printed)
    searching_from_s = time.perf_counter()  # the limit is the search's own: reading millions of streams takes seconds
    search = Search(task, searching_from_s + SEARCHING * time_limit_s, on_found)
    result = search.run()
    if result is None:
        raise NoPlan(why_not(instance, need, as_printed, search))
    grouping, moves = result.grouping, None
    names = _group_names([], task.groups)
    if not as_printed:
        grouping = levelled(task, result.tolerance, grouping, searching_from_s + time_limit_s)
    if previous is not None:
        models = [instance.models[k].name for k in order]
        grouping, names, moves = _with_few_moves(search, result.tolerance, grouping, previous, models)
    grouping = with_spare(task, grouping)
    named = _plan_of(instance, streams, needs, Grouping(grouping.group[np.argsort(order)], grouping.sizes), names)
    least = named.burst_tolerance
    bound = least if least is None or result.bound <= least * (1 + ROUNDING) else result.bound
    return msgspec.structs.replace(
        named,
        bound=bound,
        gap=0.0 if least is None or bound is None else bound / least - 1,
        solve_s=time.perf_counter() - began_s,
        as_printed=as_printed,
        moves=moves,
    )


def replan(
    instance: Instance,
    rates_per_s: Rates,
    previous: Plan,
    *,
    holds_s: float = math.inf,
    time_limit_s: float = TIME_LIMIT_S,
    on_found: OnFound | None = None,
) -> Plan:
    """A plan for other rates, in the form (as printed or not) of the previous one.

    rates_per_s : by (stream, model) or by model; other rates stay (`with_rates`).  holds_s : how long this plan holds

    The least burst tolerance is as large as without a previous plan. Among the plans that reach it, this plan has few
    moves: none if the previous groups reach it; otherwise the fewest moves that HiGHS finds in the time and for the
    number of models, or the moves of the plan made without a previous plan if those are fewer.

    Loading takes GPU-seconds, `loading_s`: a share of those in which the plan holds. The previous plan stays if its
    burst tolerance at the new rates is smaller by no more than this share.

    Raises ConfigError on a rate below 0 or of an unknown model, and NoPlan.
    """
    changed = with_rates(instance, rates_per_s)
    best = plan(
        changed, as_printed=previous.as_printed, time_limit_s=time_limit_s, previous=previous, on_found=on_found
    )
    lost = loading_s(previous, best, instance.load_s) / (instance.gpus * holds_s)
    stayed = _at_other_rates(changed, previous) if lost else None
    if stayed is None or stayed.burst_tolerance is None or best.burst_tolerance is None or best.bound is None:
        return best
    if stayed.burst_tolerance < (1.0 - lost) * best.burst_tolerance:
        return best
    gap = best.bound / stayed.burst_tolerance - 1
    return msgspec.structs.replace(stayed, bound=best.bound, gap=gap, solve_s=best.solve_s)


def loading_s(previous: Plan, new: Plan, load_s: float) -> float:
    """GPU-seconds in which models are loaded for the new plan: on GPUs that join a group all of its models, on its
    other GPUs the models that it did not have. load_s : of a model on a GPU
    """
    before = {group.name: group for group in previous.groups}
    loads = 0
    for group in new.groups:
        old = before.get(group.name)
        stay = min(group.gpus, old.gpus) if old is not None else 0
        others = len({*group.models} - {*(old.models if old is not None else ())})
        loads += (group.gpus - stay) * len(group.models) + stay * others
    return load_s * loads


def _at_other_rates(instance: Instance, previous: Plan) -> Plan | None:
    """The previous plan's groups with the tolerances at the instance's rates; None if they cannot serve these."""
    numbers = {name: number for number, group in enumerate(previous.groups) for name in group.models}
    if any(group.streams for group in previous.groups) or any(model.name not in numbers for model in instance.models):
        return None
    streams = streams_of(instance)
    needs = needs_of(instance, streams)
    sizes = np.array([group.gpus for group in previous.groups])
    of_models = np.array([numbers[model.name] for model in instance.models])
    loads = np.bincount(of_models, by_model(instance, streams, needs), sizes.size)
    if sizes.sum() > instance.gpus or (not previous.as_printed and (loads > sizes + SLACK).any()):
        return None
    names = [group.name for group in previous.groups]
    stayed = _plan_of(instance, streams, needs, Grouping(of_models, sizes), names)
    workers = {group.name: group.workers for group in previous.groups}
    groups = [msgspec.structs.replace(group, workers=workers[group.name]) for group in stayed.groups]
    return msgspec.structs.replace(stayed, groups=tuple(groups), as_printed=previous.as_printed, moves=0)


def _plan_of(instance: Instance, streams: Streams, needs: Floats, grouping: Grouping, names: Sequence[str]) -> Plan:
    """Groups, models, streams and the least burst tolerance. grouping : models in the instance's order."""
    need = by_model(instance, streams, needs)
    memory_gb = np.array([model.memory_gb for model in instance.models])
    groups = []
    for number in np.unique(grouping.group).tolist():
        members, gpus = np.flatnonzero(grouping.group == number), int(grouping.sizes[number])
        groups.append(
            HerdGroup(
                name=names[number],
                gpus=gpus,
                models=tuple(instance.models[k].name for k in members),
                load=float(need[members].sum() / gpus),
                memory_gb=float(memory_gb[members].sum()),
                burst_tolerance=_tolerance(gpus, float(need[members].max())),
            )
        )
    home = {name: group for group in groups for name in group.models}
    counts = np.bincount(streams.model, minlength=len(instance.models))
    models = []
    for model, needed, count in zip(instance.models, need.tolist(), counts.tolist(), strict=True):
        group = home[model.name]
        models.append(PlannedModel(model.name, group.name, needed, count, _tolerance(group.gpus, needed)))
    planned = []
    if needs.size <= STREAMS_LISTED_MAX:
        for name, k, needed in zip(streams.names, streams.model.tolist(), needs.tolist(), strict=True):
            group = home[models[k].name]
            planned.append(PlannedStream(name, models[k].name, group.name, needed, _tolerance(group.gpus, needed)))
    tolerances = [group.burst_tolerance for group in groups if group.burst_tolerance is not None]
    return Plan(tuple(groups), tuple(models), tuple(planned), min(tolerances, default=None))


def _tolerance(gpus: int, need: float) -> float | None:
    return gpus / need if need > 0 else None


# ---- few moves ----------------------------------------------------------------------------------------------------


def _with_few_moves(
    search: Search, tolerance: float, grouping: Grouping, previous: Plan, models: Sequence[str]
) -> tuple[Grouping, list[str], int]:
    """(a grouping of this tolerance with few moves from the previous groups, names of its groups, number of moves).

    models : names of the task's models, in the order of the task. A new model is not a move.
    """
    task = search.task
    index = {model: number for number, group in enumerate(previous.groups) for model in group.models}
    before = np.array([index.get(model, -1) for model in models])
    names = _group_names([group.name for group in previous.groups], task.groups)
    preferred = before[:, None] == np.arange(len(names))
    candidates = [_renamed(grouping, preferred)]
    stayed = _stayed(task, tolerance, before, len(names))
    if stayed is not None:
        candidates = [stayed]
    elif search.left_s > 0:
        fixed = None if preferred.size <= WHOLE_SIZE else _some_freed(before)
        decided, _ = decide(task, tolerance, min(search.left_s, MOVES_S), preferred, fixed)
        candidates += [] if decided is None else [decided]
    if stayed is None and (patched := repaired(task, tolerance, before, len(names))) is not None:
        candidates.append(patched)
    moves = [int(np.count_nonzero((before >= 0) & (candidate.group != before))) for candidate in candidates]
    best = int(np.argmin(moves))
    return candidates[best], names, moves[best]


def _stayed(task: Task, tolerance: float, before: Ints, groups: int) -> Grouping | None:
    """The previous groups, if they have this tolerance and no model is new."""
    if (before < 0).any():
        return None
    if any(np.unique(task.kind[before == number]).size > 1 for number in range(groups)):
        return None
    sizes = task.sizes(before, tolerance, groups)
    return None if sizes is None else Grouping(before, sizes)


def _renamed(grouping: Grouping, preferred: Bools) -> Grouping:
    """The same groups, numbered so that the most models keep the number of their group."""
    shared = np.zeros((grouping.sizes.size, preferred.shape[1]))
    np.add.at(shared, grouping.group, preferred)
    old, new = scipy_optimize().linear_sum_assignment(-shared)
    numbers = np.empty(grouping.sizes.size, dtype=np.int64)
    numbers[old] = new
    sizes = np.zeros(preferred.shape[1], dtype=np.int64)
    sizes[numbers] = grouping.sizes
    return Grouping(numbers[grouping.group], sizes)


def _some_freed(before: Ints) -> Ints:
    """(models,) previous groups, -1 for new models and for some other models, which HiGHS then places anew."""
    placed = np.flatnonzero(before >= 0)
    freed = np.random.default_rng(0).choice(placed, min(FREED, placed.size), replace=False)
    return np.where(np.isin(np.arange(before.size), freed), -1, before)


def _group_names(previous: list[str], groups: int) -> list[str]:
    """The names of the previous groups, and new names if there may be more groups."""
    fresh = [name for number in range(len(previous) + groups) if (name := f"group-{number + 1}") not in previous]
    return previous + fresh[: max(groups - len(previous), 0)]
