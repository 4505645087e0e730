"""The largest burst tolerance that every model can have, or why there is no plan.

    t        a tolerance; t is feasible if some grouping has bt(i) >= t for every model i

The least bt(i) is some size / n_i, so t comes from a finite list and is searched by bisection:

1. The relaxation excludes most t that are too large.
2. Greedy packings find most t that are feasible. If there are many models, HiGHS may then place some of them anew.
3. Between the results of 1 and 2 HiGHS decides, as an integer programme.

If the largest t that 1 leaves is feasible by 2, that t is optimal and no integer programme is solved.

With t = 0 only the limits count. If even t = 0 is infeasible, `why_not` says which limits are exceeded and by how much,
or, if no limit is exceeded in total, how many GPUs or groups would be enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from llmserve.planning.instance import ROUNDING, SLACK, Floats, Instance, Ints
from llmserve.planning.milp import FREED, WHOLE_SIZE, decide
from llmserve.planning.packing import in_turn, packed
from llmserve.planning.relaxation import Relaxation
from llmserve.planning.task import Grouping, Task, task_of, tolerances_of

OnFound = Callable[[float | None, float], None]
"""Called with (best burst tolerance so far, upper bound): the progress of a search. None: no plan yet."""

REFINING, REFINING_S = 0.8, 2.0  # share of the remaining time for refining; seconds of one step
WHOLE_S = 30.0  # with this much time left, HiGHS gets an instance of any size
EXPLAINING_S = 5.0  # time limit for finding how many GPUs or groups would be enough


# ---- the largest tolerance ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best grouping, its burst tolerance in the search, and an upper bound on the tolerance of any grouping."""

    grouping: Grouping
    tolerance: float
    bound: float


class Search:
    """Searches the largest feasible tolerance of a task until a time (of time.perf_counter)."""

    def __init__(self, task: Task, until_s: float, on_found: OnFound | None = None) -> None:
        self.task, self.until_s = task, until_s
        self.proven = False  # that there is no grouping, or that the best grouping is optimal
        self._tolerances = tolerances_of(task)
        self._on_found = on_found
        self._best: Grouping | None = None
        self._feasible = -1  # index of the largest tolerance known to be feasible
        self._most = self._tolerances.size - 1  # all tolerances above this index are known to be infeasible

    @property
    def left_s(self) -> float:
        return self.until_s - time.perf_counter()

    def run(self) -> SearchResult | None:
        """None: the search found no grouping in the time, or there is none (`proven`)."""
        self._most = last_where(self._relaxed, self._most)
        self._report()
        if self._most >= 0:
            self._pack()
        if self.task.need.size > FREED:
            self._refine()
        if self._best is None or self.left_s > WHOLE_S or self.task.need.size * self.task.groups <= WHOLE_SIZE:
            self._solve()
        self.proven = self._feasible == self._most
        if self._best is None:
            return None
        return SearchResult(self._best, float(self._tolerances[self._feasible]), float(self._tolerances[self._most]))

    def _relaxed(self, at: int) -> bool:
        return Relaxation.of(self.task, self._tolerances[at]).gpus <= self.task.gpus

    def _pack(self) -> None:
        """Find the largest tolerance of the greedy packing. Where it fails, larger tolerances are not tried."""

        def reached(at: int) -> bool:
            if at <= self._feasible:
                return True
            grouping = packed(self.task, self._tolerances[at]) if self.left_s > 0 else None
            if grouping is not None:
                self._keep(grouping, at)
            return grouping is not None

        if not reached(self._most):
            last_where(reached, self._most - 1)

    def _refine(self) -> None:
        """For many models: pack one group after another, with any number of GPUs, and let the integer programme place
        only some models anew. This saves the few GPUs that are lost when loads are rounded up to sizes.
        """
        rng = np.random.default_rng(0)  # an arbitrary choice, but the same each time
        until_s = time.perf_counter() + REFINING * self.left_s

        def refined(at: int) -> bool:
            left_s = until_s - time.perf_counter()
            if at <= self._feasible or left_s <= 0:
                return at <= self._feasible
            fixed = self._with_some_freed(self._tolerances[at], rng)
            if fixed is None:
                return False
            grouping, _ = decide(self.task, self._tolerances[at], min(left_s, REFINING_S), fixed=fixed)
            if grouping is not None:
                self._keep(grouping, at)
            return grouping is not None

        last_where(refined, self._most)

    def _with_some_freed(self, tolerance: float, rng: np.random.Generator) -> Ints | None:
        """(models,) groups that need few GPUs, -1 for some models; the largest model of each group keeps its group."""
        size_min = self.task.size_min(tolerance)
        candidates = list(in_turn(self.task, size_min)) + ([] if self._best is None else [self._best.group])
        if not candidates:
            return None
        gpus = [int(self.task.least_sizes(group, tolerance, self.task.groups).sum()) for group in candidates]
        group = candidates[int(np.argmin(gpus))].copy()
        _, largest = np.unique(group, return_index=True)  # models are by falling need
        smaller = np.setdiff1d(np.arange(group.size), largest)
        group[rng.choice(smaller, min(FREED, smaller.size), replace=False)] = -1
        return group

    def _solve(self) -> None:
        """Search down from the bound with the integer programme. The steps begin small: the bound is usually near."""
        highest, step = self._most, 1  # the untried tolerances are above _feasible and up to `highest`
        while self._feasible < highest and self.left_s > 0:
            at = max(highest - step + 1, self._feasible + 1)
            grouping, impossible = decide(self.task, self._tolerances[at], max(self.left_s / 2, min(self.left_s, 1.0)))
            if grouping is not None:
                self._keep(grouping, at)
                step = max((highest - self._feasible) // 2, 1)
                continue
            if impossible:
                self._most = at - 1
                self._report()
            highest, step = at - 1, 2 * step

    def _keep(self, grouping: Grouping, at: int) -> None:
        """Keep a grouping of the tolerance at this index; the grouping may have a larger tolerance."""
        reached = np.searchsorted(self._tolerances, grouping.tolerance(self.task) * (1 + ROUNDING), side="right") - 1
        self._best, self._feasible = grouping, min(max(at, int(reached)), self._most)
        self._report()

    def _report(self) -> None:
        if self._on_found is not None and self._most >= 0:  # -1: there is no plan
            tolerance = None if self._best is None else float(self._tolerances[self._feasible])
            self._on_found(tolerance, float(self._tolerances[self._most]))


def last_where(holds: Callable[[int], bool], high: int) -> int:
    """The largest n of 0 .. high with holds(n), -1 if there is none. `holds` is true up to some n and false beyond."""
    low = -1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


# ---- why there is no plan -----------------------------------------------------------------------------------------


def why_not(instance: Instance, need: Floats, as_printed: bool, search: Search) -> str:
    """The reason in one sentence, after a search without a result. need : (models,) n_i, in the instance's order."""
    reasons = list(_limits_broken(instance, search.task))
    if reasons:
        return f"there is no plan: {'; '.join(reasons)}"
    if not search.proven:
        return "the search found no plan in the time, and did not prove that there is none; try a longer time limit"
    helps = [text for text in (_enough(instance, need, as_printed, field) for field in ("gpus", "groups")) if text]
    return (
        "there is no plan: load, memory and affinity fit in total, but no grouping of whole models keeps all limits"
        + (f"; {' or '.join(helps)} would be enough" if helps else "")
    )


def _limits_broken(instance: Instance, task: Task) -> Iterator[str]:
    """The limits that the totals exceed. task : its load is the load that counts."""
    total, gpus, groups = float(task.load.sum()), instance.gpus, instance.groups
    if task.load[0] > task.size_max + SLACK:
        yield (
            f"the load of one model needs {task.load[0]:.6g} GPUs, {task.load[0] - task.size_max:.6g} more than the "
            f"{task.size_max} of a group"
        )
    if total > gpus + SLACK:
        yield f"the load needs {total:.6g} GPUs, {total - gpus:.6g} more than the {gpus} there are"
    elif total > groups * task.size_max + SLACK:
        yield (
            f"the load needs {total:.6g} GPUs, and {groups} groups of at most {task.size_max} have "
            f"{groups * task.size_max}"
        )
    sets = int(task.kind.max()) + 1
    if sets > min(groups, gpus):
        yield f"the models fall into {sets} affinity sets, each set needs its own groups, and {_room(instance)}"
    filled = math.ceil(task.memory.sum() - SLACK)
    if filled > min(groups, gpus):
        yield (
            f"the models take {task.memory.sum() * instance.gpu_memory_gb:.6g} GB, the memory of {filled} GPUs of "
            f"{instance.gpu_memory_gb:g} GB, so at least {filled} groups are needed, and {_room(instance)}"
        )
    elif sets > 1 and (needed := sum(_groups_needed(task))) > min(groups, gpus) >= sets:
        yield f"the models of {sets} affinity sets need {needed} groups at least, and {_room(instance)}"


def _groups_needed(task: Task) -> list[int]:
    """Least number of groups of each affinity set, by memory and by load."""
    sets = int(task.kind.max()) + 1
    memory, load = (np.bincount(task.kind, weights, sets) for weights in (task.memory, task.load))
    most = np.maximum(np.ceil(memory - SLACK), np.ceil(load / task.size_max - SLACK))
    return [int(groups) for groups in np.maximum(most, 1)]


def _room(instance: Instance) -> str:
    few = instance.gpus < instance.groups
    return f"there are only {instance.gpus} GPUs" if few else f"the limit is {instance.groups} groups"


def _enough(instance: Instance, need: Floats, as_printed: bool, field: Literal["gpus", "groups"]) -> str | None:
    """The least number of GPUs, or of groups, that has a plan; None: there is none, or the time was too short."""
    now = getattr(instance, field)
    most = len(instance.models) if field == "groups" else instance.groups * instance.group_gpus_max
    until_s = time.perf_counter() + EXPLAINING_S

    def fails(more: int) -> bool:
        task, _ = task_of(msgspec.structs.replace(instance, **{field: now + more}), need, as_printed)
        return not _fits(task, until_s - time.perf_counter())

    enough = last_where(fails, most - now) + 1
    return f"{now + enough} {'GPUs' if field == 'gpus' else 'groups'}" if 0 < enough <= most - now else None


def _fits(task: Task, time_limit_s: float) -> bool:
    if Relaxation.of(task, 0.0).gpus > task.gpus:
        return False
    return packed(task, 0.0) is not None or (time_limit_s > 0 and decide(task, 0.0, time_limit_s)[0] is not None)
