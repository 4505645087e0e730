"""Whether a burst tolerance is feasible, as an integer programme for scipy's HiGHS.

    x_ij       (models, groups) whether model i is in group j
    size_j     (groups,) number of GPUs of group j
    reach_jl   (groups, levels) whether group j may have models of level l: an affinity set, and a number of GPUs that
               some models of the set need. A group that reaches a level reaches all lower levels of the same set, and
               a group reaches levels of one set only

All variables are whole numbers. The tolerance t is fixed, so instead of max-min model i needs size_j >= ceil(t n_i).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmserve.planning.instance import Bools, Floats, Ints
from llmserve.planning.task import Grouping, Task
from llmserve.runtime.extras import need

WHOLE_SIZE = 4_000  # models * groups; in larger programmes HiGHS may overrun its time limit by far
PROGRAMME_MAX = 200_000  # models * groups; a larger programme would take minutes and gigabytes before HiGHS begins
FREED = 100  # models placed anew at once when there are more models
INFEASIBLE = 2  # scipy's status


def decide(
    task: Task, tolerance: float, time_limit_s: float, preferred: Bools | None = None, fixed: Ints | None = None
) -> tuple[Grouping | None, bool]:
    """(a grouping of this tolerance or None, whether HiGHS has proven that there is none).

    fixed : (models,) group of each model, -1 where HiGHS chooses the group; then there is no proof.
    preferred : (models, groups) preferred groups; the grouping then has as many models in preferred groups as possible.

    Without `fixed` and `preferred` all groups are alike. Their sizes must then fall, to exclude equivalent groupings.
    A programme above PROGRAMME_MAX is not tried: (None, False).
    """
    if task.need.size * task.groups > PROGRAMME_MAX:
        return None, False
    scipy = scipy_optimize()
    programme = _Programme(task, tolerance, task.groups if preferred is None else preferred.shape[1])
    programme.add_all(in_order=preferred is None and fixed is None)
    rows, low, high = programme.rows()
    lower, upper = np.zeros(programme.variables), np.ones(programme.variables)
    upper[programme.size] = task.size_max
    if fixed is not None:
        placed = np.flatnonzero(fixed >= 0)
        upper[programme.x[placed]] = 0.0
        lower[programme.x[placed, fixed[placed]]] = upper[programme.x[placed, fixed[placed]]] = 1.0
    cost = np.zeros(programme.variables)
    if preferred is not None:
        cost[programme.x] = -1.0 * preferred
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
        size_min = task.size_min(tolerance)
        models = size_min.size
        pairs, level = np.unique(np.stack([task.kind, size_min]), axis=1, return_inverse=True)
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
        begins = np.diff(self._level_kind, prepend=-1) > 0  # (levels,) whether a level is the lowest of its set
        more = np.where(begins, self._level_gpus, np.diff(self._level_gpus, prepend=0))
        self._add([(self.x, 1.0)], 1.0, 1.0)  # each model is in one group
        self._add([(self.size[None], 1.0)], -infinite, float(task.gpus))
        open_ = self.reach[:, begins]
        self._add([(self.x.T, task.load), (self.size[:, None], -1.0)], -infinite, 0.0)
        self._add([(self.x.T, task.memory), (open_, -1.0)], -infinite, 0.0)
        self._add([(open_, 1.0)], -infinite, 1.0)
        self._add([(open_.reshape(1, -1), 1.0)], -infinite, float(task.groups))
        self._add([(self.size[:, None], 1.0), (self.reach, -1.0 * more)], 0.0, infinite)
        later = np.flatnonzero(~begins)  # a group that reaches a level reaches the level before
        reached, before = self.reach[:, later].reshape(-1, 1), self.reach[:, later - 1].reshape(-1, 1)
        self._add([(reached, 1.0), (before, -1.0)], -infinite, 0.0)
        level = self.reach[:, self._level].T.reshape(-1, 1)  # a model's group must reach the model's level
        self._add([(self.x.reshape(-1, 1), 1.0), (level, -1.0)], -infinite, 0.0)
        if in_order:
            self._add([(self.size[:-1, None], 1.0), (self.size[1:, None], -1.0)], 0.0, infinite)

    def _add(self, terms: Sequence[tuple[Ints, float | Floats]], low: float, high: float) -> None:
        """Add a row for each first index. terms : (variables (rows, n), coefficients), summed within a row."""
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
    """The module scipy.optimize. Raises ConfigError without scipy, which only planning needs."""
    need("plan", "scipy", why="planning")
    import scipy.optimize

    return scipy.optimize
