"""The largest burst tolerance that every model can have, or why there is no plan.

    t        a tolerance that is asked for: whether every bt(i) can be at least t

The least bt(i) is some size / n_i, so t comes from a finite list and is searched by bisection:

1. The relaxation tells most t that are too large.
2. Greedy packings tell most t that are small enough. Of many models, HiGHS may then place some anew.
3. Between the two HiGHS decides, as an integer programme.

Where the largest t that 1 leaves is reached by 2, that is an optimum and no integer programme is solved.

A t of 0 asks for the limits only. Where not even that can be reached, `why_not` says which limits are missed and by how
much, or, where each is kept in total, how many GPUs or groups would be enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from llmserve.herd.instance import ROUNDING, SLACK, Floats, Instance, Ints
from llmserve.herd.milp import FREED, WHOLE_SIZE, decide
from llmserve.herd.packing import in_turn, packed
from llmserve.herd.relaxation import Relaxation
from llmserve.herd.task import Grouping, Task, task_of, tolerances_of

OnFound = Callable[[float | None, float], None]
"""(burst tolerance that was found, one that nothing can exceed): how far a search has come; None: none yet."""

REFINING, REFINING_S = 0.8, 2.0  # of the time that is left, in all; and seconds at once
WHOLE_S = 30.0  # with as much time left, HiGHS may have an instance of any size
EXPLAINING_S = 5.0  # to find out what would have been enough


# ---- the largest tolerance ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """A grouping, the burst tolerance that it was found for, and one that no grouping exceeds."""

    grouping: Grouping
    tolerance: float
    bound: float


class Search:
    """For the largest tolerance of a task that a grouping has, until a time (time.perf_counter)."""

    def __init__(self, task: Task, until_s: float, on_found: OnFound | None = None) -> None:
        self.task, self.until_s = task, until_s
        self.proven = False  # that there is none, or that what was found is the best
        self._tolerances = tolerances_of(task)  # indexed by all of the below
        self._on_found = on_found
        self._best: Grouping | None = None
        self._found = -1  # largest known to be feasible
        self._most = self._tolerances.size - 1  # all above are known to be not

    @property
    def left_s(self) -> float:
        return self.until_s - time.perf_counter()

    def run(self) -> Found | None:
        """None: none was found in the time, or there is none (`proven`)."""
        self._most = last_where(self._relaxed, self._most)
        self._tell()
        if self._most >= 0:
            self._pack()
        if self.task.need.size > FREED:
            self._refine()
        if self._best is None or self.left_s > WHOLE_S or self.task.need.size * self.task.groups <= WHOLE_SIZE:
            self._solve()
        self.proven = self._found == self._most
        if self._best is None:
            return None
        return Found(self._best, float(self._tolerances[self._found]), float(self._tolerances[self._most]))

    def _relaxed(self, at: int) -> bool:
        return Relaxation.of(self.task, self._tolerances[at]).gpus <= self.task.gpus

    def _pack(self) -> None:
        """As large a tolerance as the greedy packing finds; where it fails, larger ones are taken for out of reach."""

        def reached(at: int) -> bool:
            if at <= self._found:
                return True
            grouping = packed(self.task, self._tolerances[at]) if self.left_s > 0 else None
            if grouping is not None:
                self._keep(grouping, at)
            return grouping is not None

        if not reached(self._most):
            last_where(reached, self._most - 1)

    def _refine(self) -> None:
        """Where there are many models: pack one group after another, whatever GPUs it takes, and let the integer
        programme place only some of them anew. It saves the few GPUs that are lost where loads are rounded up to sizes.
        """
        rng = np.random.default_rng(0)  # any choice will do; the same each time
        until_s = time.perf_counter() + REFINING * self.left_s

        def refined(at: int) -> bool:
            left_s = until_s - time.perf_counter()
            if at <= self._found or left_s <= 0:
                return at <= self._found
            fixed = self._with_some_freed(self._tolerances[at], rng)
            if fixed is None:
                return False
            grouping, _ = decide(self.task, self._tolerances[at], min(left_s, REFINING_S), fixed=fixed)
            if grouping is not None:
                self._keep(grouping, at)
            return grouping is not None

        last_where(refined, self._most)

    def _with_some_freed(self, tolerance: float, rng: np.random.Generator) -> Ints | None:
        """(models,) groups that need few GPUs, -1 of some models; of each group the largest model stays in it."""
        asked = self.task.asked(tolerance)
        tried = list(in_turn(self.task, asked)) + ([] if self._best is None else [self._best.group])
        if not tried:
            return None
        gpus = [int(self.task.least_sizes(group, tolerance, self.task.groups).sum()) for group in tried]
        group = tried[int(np.argmin(gpus))].copy()
        _, largest = np.unique(group, return_index=True)  # models are by falling need
        others = np.setdiff1d(np.arange(group.size), largest)
        group[rng.choice(others, min(FREED, others.size), replace=False)] = -1
        return group

    def _solve(self) -> None:
        """By the integer programme, from above: the bound is usually near, so steps down from it begin small."""
        highest, step = self._most, 1  # what is yet to be tried lies above _found and up to here
        while self._found < highest and self.left_s > 0:
            at = max(highest - step + 1, self._found + 1)
            grouping, impossible = decide(self.task, self._tolerances[at], max(self.left_s / 2, min(self.left_s, 1.0)))
            if grouping is not None:
                self._keep(grouping, at)
                step = max((highest - self._found) // 2, 1)
                continue
            if impossible:
                self._most = at - 1
                self._tell()
            highest, step = at - 1, 2 * step

    def _keep(self, grouping: Grouping, at: int) -> None:
        """It was asked for this tolerance, and may have a larger one."""
        reached = np.searchsorted(self._tolerances, grouping.tolerance(self.task) * (1 + ROUNDING), side="right") - 1
        self._best, self._found = grouping, min(max(at, int(reached)), self._most)
        self._tell()

    def _tell(self) -> None:
        if self._on_found is not None and self._most >= 0:  # below, there is no plan
            found = None if self._best is None else float(self._tolerances[self._found])
            self._on_found(found, float(self._tolerances[self._most]))


def last_where(holds: Callable[[int], bool], high: int) -> int:
    """The largest of 0 .. high where it holds, -1 where it never does: it holds up to some number and not beyond."""
    low = -1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


# ---- why there is none --------------------------------------------------------------------------------------------


def why_not(instance: Instance, need: Floats, as_printed: bool, search: Search) -> str:
    """In a sentence, after a search that found nothing. need : (models,) n_i, in the instance's order."""
    reasons = list(_limits_broken(instance, search.task))
    if reasons:
        return f"there is no plan: {'; '.join(reasons)}"
    if not search.proven:
        return "no plan was found in the time, nor was it shown that there is none; a longer time limit may find one"
    helps = [text for text in (_would_do(instance, need, as_printed, field) for field in ("gpus", "groups")) if text]
    return (
        "there is no plan: load, memory and affinity fit in total, but no grouping of whole models keeps all limits"
        + (f"; {' or '.join(helps)} would do" if helps else "")
    )


def _limits_broken(instance: Instance, task: Task) -> Iterator[str]:
    """What can be told without a search. `task` has the load that counts."""
    total, gpus, groups = float(task.load.sum()), instance.gpus, instance.groups
    if task.load[0] > task.size_max + SLACK:
        yield (
            f"one model's load needs {task.load[0]:.6g} GPUs, and a group has at most {task.size_max}: "
            f"{task.load[0] - task.size_max:.6g} too few"
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
        yield f"the models fall into {sets} affinity sets, each needs a group of its own, and {_room(instance)}"
    filled = math.ceil(task.memory.sum() - SLACK)
    if filled > min(groups, gpus):
        yield (
            f"the models take {task.memory.sum() * instance.gpu_memory_gb:.6g} GB, the memory of {filled} GPUs of "
            f"{instance.gpu_memory_gb:g} GB, so at least {filled} groups are needed, and {_room(instance)}"
        )
    elif sets > 1 and (needed := sum(_groups_needed(task))) > min(groups, gpus) >= sets:
        yield f"the models of {sets} affinity sets need {needed} groups at least, and {_room(instance)}"


def _groups_needed(task: Task) -> list[int]:
    """By affinity set: at least, by memory and by load."""
    sets = int(task.kind.max()) + 1
    memory, load = (np.bincount(task.kind, weights, sets) for weights in (task.memory, task.load))
    most = np.maximum(np.ceil(memory - SLACK), np.ceil(load / task.size_max - SLACK))
    return [int(groups) for groups in np.maximum(most, 1)]


def _room(instance: Instance) -> str:
    few = instance.gpus < instance.groups
    return f"{instance.gpus} GPUs are too few for that" if few else f"there may be {instance.groups}"


def _would_do(instance: Instance, need: Floats, as_printed: bool, field: Literal["gpus", "groups"]) -> str | None:
    """The least number of GPUs, or of groups, that would have a plan; None where none, or none in the time, would."""
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
