"""What an optimum leaves open: how even the groups' loads are, and who gets the GPUs left over."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from llmserve.herd.packing import STEPS, packed
from llmserve.herd.task import Grouping, Task


def levelled(task: Task, tolerance: float, grouping: Grouping, until_s: float) -> Grouping:
    """One of this tolerance whose most loaded group has less to do, if the packing finds one."""
    total = float(task.load.sum())
    if total == 0:
        return grouping
    loads = np.bincount(grouping.group, task.load, grouping.sizes.size)
    low, high = total / task.gpus, float(np.max(loads / np.maximum(with_spare(task, grouping).sizes, 1)))
    for _ in range(STEPS):
        if time.perf_counter() > until_s:
            break
        level = (low + high) / 2
        found = packed(replace(task, load=task.load / level), tolerance)
        low, high = (level, high) if found is None else (low, level)
        grouping = grouping if found is None else found
    return grouping


def with_spare(task: Task, grouping: Grouping) -> Grouping:
    """Each GPU that is left to the group of least burst tolerance that may have more."""
    sizes = grouping.sizes.copy()
    need = np.zeros(sizes.size)
    np.maximum.at(need, grouping.group, task.need)
    load = np.bincount(grouping.group, task.need, sizes.size)
    for _ in range(task.gpus - int(sizes.sum())):
        room = np.flatnonzero((sizes > 0) & (sizes < task.size_max))
        if not room.size:
            break
        with np.errstate(divide="ignore"):
            tolerances = sizes[room] / need[room]
        sizes[room[np.lexsort((-load[room] / sizes[room], tolerances))[0]]] += 1
    return Grouping(grouping.group, sizes)
