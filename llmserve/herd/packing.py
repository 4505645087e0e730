"""Greedy groupings for a burst tolerance: a packing tells of a tolerance that it is small enough, of most that are.

A packing is tried in two ways. The first takes models for somewhat larger than they are, has the relaxation find the
sizes of groups for these, and fills all groups side by side (`_spread`). The second fills one group after another
(`in_turn`).

An optimum leaves two things open. The groups' loads are made even by packing models of larger load (`levelled`), and
the GPUs that are left over go to the groups of least burst tolerance (`with_spare`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product

import numpy as np

from llmserve.herd.instance import ROUNDING, Ints
from llmserve.herd.relaxation import Relaxation, sizes_towards
from llmserve.herd.task import Grouping, Task

EXPONENTS = (0.0, 0.5, 1.0)  # of memory, by which need is divided
STEPS = 7  # of bisections that need no exact answer


# ---- a packing ----------------------------------------------------------------------------------------------------


def packed(task: Task, tolerance: float) -> Grouping | None:
    """A grouping of this tolerance, or None where none was found."""
    asked = task.asked(tolerance)
    for group in chain(_spread(task, tolerance, asked), in_turn(task, asked)):
        if (sizes := task.sizes(group, tolerance, task.groups)) is not None:
            return Grouping(group, sizes)
    return None


def _spread(task: Task, tolerance: float, asked: Ints) -> Iterator[Ints]:
    """Into groups of the sizes that the relaxation finds, side by side."""
    inflated = _inflated(task, tolerance)
    if inflated is None:
        return
    relaxation = Relaxation.of(inflated, tolerance)
    allotted = relaxation.allotted()
    for largest_first, even in product((True, False), (True, False)):
        paths = [
            sizes_towards(relaxation.stages[kind], asked[task.kind == kind], task.size_max, groups, gpus, largest_first)
            for kind, (groups, gpus) in enumerate(allotted)
        ]
        kinds = np.repeat(np.arange(len(paths)), [path.size for path in paths])
        group = _filled(task, asked, np.concatenate(paths), kinds, even)
        if group is not None:
            yield group


def _inflated(task: Task, tolerance: float) -> Task | None:
    """The task with memory, then load, made larger as far as the relaxation allows: a packing needs room for manoeuvre.

    Memory by half as much as it could be, so that some is left for load. None where not even the task itself is solved.
    """

    def larger(load: float, memory: float) -> Task:
        return replace(
            task,
            load=np.minimum(task.load * load, np.maximum(task.load, task.size_max)),
            memory=np.minimum(task.memory * memory, 1.0),
        )

    def most(made: Callable[[float], Task], limit: float) -> float:
        low, high = 1.0, limit
        for _ in range(STEPS):
            middle = (low + high) / 2
            solved = Relaxation.of(made(middle), tolerance).gpus <= task.gpus
            low, high = (middle, high) if solved else (low, middle)
        return low

    if Relaxation.of(task, tolerance).gpus > task.gpus:
        return None
    memory = (1 + most(lambda factor: larger(1.0, factor), 2.0)) / 2
    total = float(task.load.sum())
    load = most(lambda factor: larger(factor, memory), max(task.gpus / total, 1.0)) if total > 0 else 1.0
    return larger(load, memory)


def _filled(task: Task, asked: Ints, sizes: Ints, kinds: Ints, even: bool) -> Ints | None:
    """(models,) a group for each; None where one has no room.

    First those that the fewest groups can take, then the largest first. Each goes where the fuller of memory and load
    is then the least full (even), or where what is left resembles it most (their inner product).
    sizes, kinds : (groups,).
    """
    suited = (asked[:, None] <= sizes) & (task.kind[:, None] == kinds)  # (models, groups)
    weight = np.maximum(task.memory, task.load / max(float(np.mean(sizes)), 1.0))
    memory_left, load_left = np.ones(sizes.size), sizes.astype(float)
    group = np.full(asked.size, -1)
    for k in np.lexsort((-weight, suited.sum(axis=1))).tolist():
        memory, load = task.memory[k], task.load[k]
        fits = suited[k] & (memory <= memory_left + ROUNDING) & (load <= load_left + ROUNDING)
        if not fits.any():
            return None
        if even:
            score = np.minimum(memory_left - memory, (load_left - load) / sizes)
        else:
            score = memory * memory_left + load * load_left / sizes**2
        chosen = int(np.argmax(np.where(fits, score, -np.inf)))
        memory_left[chosen] -= memory
        load_left[chosen] -= load
        group[k] = chosen
    return group


def in_turn(task: Task, asked: Ints) -> Iterator[Ints]:
    """One group after another, each with the models of largest need for their memory that fit: its largest size is paid
    for already, and the more load it takes and the fewer large models it leaves, the smaller the others can be.
    """
    for exponent in EXPONENTS:
        order = np.argsort(-(task.need + ROUNDING) / task.memory**exponent, kind="stable")
        group = np.full(asked.size, -1)
        count = 0
        for kind in range(int(task.kind.max()) + 1):
            left = order[task.kind[order] == kind].tolist()
            while left and count < task.groups:
                taken, left = _one_filled(task, left)
                group[taken] = count
                count += 1
        if (group >= 0).all():
            yield group


def _one_filled(task: Task, models: Sequence[int]) -> tuple[list[int], list[int]]:
    """A group with the first of them, wherever memory and load still fit; and those that are left."""
    memory_left, load_left = 1.0 + ROUNDING, task.size_max + ROUNDING
    first = min(models)  # of the largest need: who has it asks for the most GPUs
    taken, left = [], []
    for k in (first, *(k for k in models if k != first)):
        if task.memory[k] <= memory_left and task.load[k] <= load_left:
            memory_left -= task.memory[k]
            load_left -= task.load[k]
            taken.append(k)
        else:
            left.append(k)
    return taken, left


# ---- what an optimum leaves open ----------------------------------------------------------------------------------


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
