"""Whether a burst tolerance can be reached, as an integer programme that scipy's HiGHS solves.

    x_ij       (models, groups) whether model i is in group j
    size_j     (groups,) its GPUs
    reach_jl   (groups, levels) whether group j may have models of level l: an affinity set, and GPUs that some of its
               models ask for; of a set, reaching a level takes reaching those below; a group reaches into one set

All are whole numbers. The tolerance t is given, so max-min is gone and model i only asks that size_j >= ceil(t n_i).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmserve.extras import need
from llmserve.herd.instance import Bools, Floats, Ints
from llmserve.herd.task import Grouping, Task

WHOLE_SIZE = 4_000  # models * groups, of which HiGHS keeps to a time limit; of more it may look at no clock for long
FREED = 100  # of more models: as many are placed anew at once
INFEASIBLE = 2  # scipy's status


def decide(
    task: Task, tolerance: float, time_limit_s: float, kept: Bools | None = None, fixed: Ints | None = None
) -> tuple[Grouping | None, bool]:
    """A grouping of this tolerance, if HiGHS finds one; and whether it is proven that there is none.

    fixed : (models,) the group of those that have theirs, -1 of the others; then nothing is proven.
    kept : (models, groups) where each model would rather be; then, of all such groupings, one with as many as possible.

    Where all groups are alike, neither preferred nor given, they have falling sizes: of equal answers one is left.
    """
    scipy = scipy_optimize()
    programme = _Programme(task, tolerance, task.groups if kept is None else kept.shape[1])
    programme.add_all(in_order=kept is None and fixed is None)
    rows, low, high = programme.rows()
    lower, upper = np.zeros(programme.variables), np.ones(programme.variables)
    upper[programme.size] = task.size_max
    if fixed is not None:
        held = np.flatnonzero(fixed >= 0)
        upper[programme.x[held]] = 0.0
        lower[programme.x[held, fixed[held]]] = upper[programme.x[held, fixed[held]]] = 1.0
    cost = np.zeros(programme.variables)
    if kept is not None:
        cost[programme.x] = -1.0 * kept
    result = scipy.milp(
        cost,
        integrality=np.ones(programme.variables),
        bounds=scipy.Bounds(lower, upper),
        constraints=scipy.LinearConstraint(rows, low, high),
        options={"time_limit": max(time_limit_s, 0.0)},
    )
    if result.x is None:
        return None, result.status == INFEASIBLE and fixed is None
    group = np.argmax(result.x[programme.x], axis=1)
    sizes = task.sizes(group, tolerance, programme.groups)
    return (None if sizes is None else Grouping(group, sizes)), False


class _Programme:
    """Rows of the integer programme: low <= rows @ variables <= high."""

    def __init__(self, task: Task, tolerance: float, groups: int) -> None:
        self.task, self.groups = task, groups
        asked = task.asked(tolerance)
        models = asked.size
        pairs, level = np.unique(np.stack([task.kind, asked]), axis=1, return_inverse=True)
        self._level = level.reshape(-1)  # (models,) of pairs
        self._level_kind, self._level_gpus = pairs
        levels = pairs.shape[1]
        self.x = np.arange(models * groups).reshape(models, groups)
        self.size = models * groups + np.arange(groups)
        self.reach = models * groups + groups + np.arange(groups * levels).reshape(groups, levels)
        self.variables = models * groups + groups + groups * levels
        self._parts: list[tuple[Ints, Ints, Floats]] = []
        self._low: list[Floats] = []
        self._high: list[Floats] = []
        self._count = 0

    def add_all(self, in_order: bool) -> None:
        task, infinite = self.task, np.inf
        begins = np.diff(self._level_kind, prepend=-1) > 0  # (levels,) the least of an affinity set
        more = np.where(begins, self._level_gpus, np.diff(self._level_gpus, prepend=0))
        self._add([(self.x, 1.0)], 1.0, 1.0)  # each model is in one group
        self._add([(self.size[None], 1.0)], -infinite, float(task.gpus))
        open_ = self.reach[:, begins]
        self._add([(self.x.T, task.load), (self.size[:, None], -1.0)], -infinite, 0.0)
        self._add([(self.x.T, task.memory), (open_, -1.0)], -infinite, 0.0)
        self._add([(open_, 1.0)], -infinite, 1.0)
        self._add([(open_.reshape(1, -1), 1.0)], -infinite, float(task.groups))
        self._add([(self.size[:, None], 1.0), (self.reach, -1.0 * more)], 0.0, infinite)
        later = np.flatnonzero(~begins)  # reaching a level takes reaching the one before
        reached, before = self.reach[:, later].reshape(-1, 1), self.reach[:, later - 1].reshape(-1, 1)
        self._add([(reached, 1.0), (before, -1.0)], -infinite, 0.0)
        asked = self.reach[:, self._level].T.reshape(-1, 1)  # a model's group has to reach the model's level
        self._add([(self.x.reshape(-1, 1), 1.0), (asked, -1.0)], -infinite, 0.0)
        if in_order:
            self._add([(self.size[:-1, None], 1.0), (self.size[1:, None], -1.0)], 0.0, infinite)

    def _add(self, terms: Sequence[tuple[Ints, float | Floats]], low: float, high: float) -> None:
        """A row for each first index. terms : (variables (rows, n), their coefficients), added up."""
        count = terms[0][0].shape[0]
        for variables, coefficients in terms:
            rows = np.broadcast_to(self._count + np.arange(count)[:, None], variables.shape)
            values = np.broadcast_to(np.asarray(coefficients, dtype=float), variables.shape)
            self._parts.append((rows.ravel(), variables.ravel(), values.ravel()))
        self._low.append(np.full(count, low))
        self._high.append(np.full(count, high))
        self._count += count

    def rows(self) -> tuple[Any, Floats, Floats]:
        from scipy.sparse import csr_array

        row, column, value = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        matrix = csr_array((value, (row, column)), shape=(self._count, self.variables))
        return matrix, np.concatenate(self._low), np.concatenate(self._high)


def scipy_optimize() -> Any:
    """Its solvers. Raises ConfigError without it: it is a dependency of planning only."""
    need("plan", "scipy", why="planning")
    import scipy.optimize

    return scipy.optimize
