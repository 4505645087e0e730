"""A previous grouping repaired for other rates: only models that break a limit leave their groups, and go elsewhere.

Greedy, so it may find none where there is one, or move more models than necessary. It is for tasks that are too large
for an integer programme, where a grouping made anew would move nearly all models.
"""

from __future__ import annotations

import numpy as np

from llmserve.planning.instance import ROUNDING, SLACK, Ints
from llmserve.planning.task import Grouping, Task


def repaired(task: Task, tolerance: float, before: Ints, groups: int) -> Grouping | None:
    """A grouping of this tolerance, or None. before : (models,) previous groups, -1 for a new model.

    A group that exceeds a limit loses the smallest model that is large enough to keep the limit, or else its largest.
    A model goes where the least number of GPUs is added; of such groups, where the most memory is left.
    """
    group = before.copy()
    for number in range(groups):
        _shrink(task, group, number)
    size_min = task.size_min(tolerance)
    placed = np.flatnonzero(group >= 0)
    kind = np.full(groups, -1)
    kind[group[placed]] = task.kind[placed]
    memory, load = np.zeros(groups), np.zeros(groups)
    np.add.at(memory, group[placed], task.memory[placed])
    np.add.at(load, group[placed], task.load[placed])
    sizes = np.zeros(groups, dtype=np.int64)
    np.maximum.at(sizes, group[placed], size_min[placed])
    sizes = np.maximum(sizes, np.ceil(load - SLACK).astype(np.int64))
    for k in np.flatnonzero(group < 0).tolist():
        grown = np.maximum(np.maximum(sizes, size_min[k]), np.ceil(load + task.load[k] - SLACK).astype(np.int64))
        fits = (memory + task.memory[k] <= 1 + ROUNDING) & (grown <= task.size_max)
        fits &= (kind == task.kind[k]) | (kind < 0)
        if not fits.any():
            return None
        chosen = int(np.lexsort((memory, grown - sizes, ~fits))[0])
        group[k], kind[chosen], sizes[chosen] = chosen, task.kind[k], grown[chosen]
        memory[chosen] += task.memory[k]
        load[chosen] += task.load[k]
    total = task.sizes(group, tolerance, groups)
    return None if total is None else Grouping(group, total)


def _shrink(task: Task, group: Ints, number: int) -> None:
    """Take models out of a group until it keeps its limits."""
    members = np.flatnonzero(group == number)
    if not members.size:
        return
    group[members[task.kind[members] != task.kind[members[0]]]] = -1
    for share, most in ((task.memory, 1.0), (task.load, float(task.size_max))):
        members = np.flatnonzero(group == number)
        while (excess := float(share[members].sum()) - most) > SLACK:
            enough = members[share[members] >= excess]
            leaving = enough[np.argmin(share[enough])] if enough.size else members[np.argmax(share[members])]
            group[leaving] = -1
            members = members[members != leaving]
