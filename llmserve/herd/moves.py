"""A grouping of the same burst tolerance in which few models are in another group than before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmserve.herd.instance import Bools, Ints
from llmserve.herd.milp import FREED, WHOLE_SIZE, decide, scipy_optimize
from llmserve.herd.planned import Plan
from llmserve.herd.search import Search
from llmserve.herd.task import Grouping, Task

MOVES_S = 5.0  # to find few moves


def with_few_moves(
    search: Search, tolerance: float, grouping: Grouping, previous: Plan, models: Sequence[str]
) -> tuple[Grouping, list[str], int]:
    """Of this tolerance, in the previous groups as far as possible; the groups' names; the models that moved.

    models : names of the task's, in its order. A model that is new does not move.
    """
    task = search.task
    index = {model: number for number, group in enumerate(previous.groups) for model in group.models}
    before = np.array([index.get(model, -1) for model in models])
    names = _names([group.name for group in previous.groups], task.groups)
    kept = before[:, None] == np.arange(len(names))
    candidates = [_renamed(grouping, kept)]
    stayed = _stayed(task, tolerance, before, len(names))
    if stayed is not None:
        candidates = [stayed]
    elif search.left_s > 0:
        fixed = None if kept.size <= WHOLE_SIZE else _some_freed(before)
        found, _ = decide(task, tolerance, min(search.left_s, MOVES_S), kept, fixed)
        candidates += [] if found is None else [found]
    moves = [int(np.count_nonzero((before >= 0) & (each.group != before))) for each in candidates]
    best = int(np.argmin(moves))
    return candidates[best], names, moves[best]


def _stayed(task: Task, tolerance: float, before: Ints, groups: int) -> Grouping | None:
    """Everything where it was, if that is of this tolerance and nothing is new."""
    if (before < 0).any():
        return None
    if any(np.unique(task.kind[before == number]).size > 1 for number in range(groups)):
        return None
    sizes = task.sizes(before, tolerance, groups)
    return None if sizes is None else Grouping(before, sizes)


def _renamed(grouping: Grouping, kept: Bools) -> Grouping:
    """The same groups, numbered so that the most models keep their number."""
    shared = np.zeros((grouping.sizes.size, kept.shape[1]))
    np.add.at(shared, grouping.group, kept)
    old, new = scipy_optimize().linear_sum_assignment(-shared)
    numbers = np.empty(grouping.sizes.size, dtype=np.int64)
    numbers[old] = new
    sizes = np.zeros(kept.shape[1], dtype=np.int64)
    sizes[numbers] = grouping.sizes
    return Grouping(numbers[grouping.group], sizes)


def _some_freed(before: Ints) -> Ints:
    """Where there are too many models for all to be placed anew: some, and those that are new."""
    known = np.flatnonzero(before >= 0)
    freed = np.random.default_rng(0).choice(known, min(FREED, known.size), replace=False)
    return np.where(np.isin(np.arange(before.size), freed), -1, before)


def _names(previous: list[str], groups: int) -> list[str]:
    """Those of the previous groups, and new ones if there may be more."""
    fresh = [name for number in range(len(previous) + groups) if (name := f"group-{number + 1}") not in previous]
    return previous + fresh[: max(groups - len(previous), 0)]
