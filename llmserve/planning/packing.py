"""Greedy groupings for a burst tolerance: a packing shows that a tolerance is feasible, for most feasible tolerances.

There are two packings. The first (`_spread`) enlarges the models a little, takes the sizes of groups from the
relaxation of these larger models, and fills all groups side by side. The second (`in_turn`) fills one group after
another.

An optimum leaves two choices. `levelled` evens the loads of the groups by packing models of larger load, and
`with_spare` gives the remaining GPUs to the groups of least burst tolerance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, product

import numpy as np

from llmserve.planning.instance import ROUNDING, Ints
from llmserve.planning.relaxation import Relaxation, sizes_towards
from llmserve.planning.task import Grouping, Task

EXPONENTS = (0.0, 0.5, 1.0)  # models are sorted by need / memory ** exponent
STEPS = 7  # steps of a bisection that needs no exact result


# ---- a packing ----------------------------------------------------------------------------------------------------


def packed(task: Task, tolerance: float) -> Grouping | None:
    """A grouping of this tolerance, or None if the packings find none."""
    size_min = task.size_min(tolerance)
    for group in chain(_spread(task, tolerance, size_min), in_turn(task, size_min)):
        if (sizes := task.sizes(group, tolerance, task.groups)) is not None:
            return Grouping(group, sizes)
    return None


def _spread(task: Task, tolerance: float, size_min: Ints) -> Iterator[Ints]:
    """Groupings with the relaxation's sizes of groups, all groups filled side by side."""
    inflated = _inflated(task, tolerance)
    if inflated is None:
        return
    relaxation = Relaxation.of(inflated, tolerance)
    allotted = relaxation.allotted()
    for largest, even in product((True, False), (True, False)):
        paths = [
            sizes_towards(relaxation.stages[kind], size_min[task.kind == kind], task.size_max, groups, gpus, largest)
            for kind, (groups, gpus) in enumerate(allotted)
        ]
        kinds = np.repeat(np.arange(len(paths)), [path.size for path in paths])
        group = _filled(task, size_min, np.concatenate(paths), kinds, even)
        if group is not None:
            yield group


def _inflated(task: Task, tolerance: float) -> Task | None:
    """The task with larger memory, then larger load, as far as the relaxation allows: a packing needs spare room.

    Memory takes half of its possible increase, to leave room for load. None: the relaxation of the task is infeasible.
    """

    def larger(load: float, memory: float) -> Task:
        return replace(
            task,
            load=np.minimum(task.load * load, np.maximum(task.load, task.size_max)),
            memory=np.minimum(task.memory * memory, 1.0),
        )

    def most(scaled: Callable[[float], Task], limit: float) -> float:
        low, high = 1.0, limit
        for _ in range(STEPS):
            middle = (low + high) / 2
            solved = Relaxation.of(scaled(middle), tolerance).gpus <= task.gpus
            low, high = (middle, high) if solved else (low, middle)
        return low

    if Relaxation.of(task, tolerance).gpus > task.gpus:
        return None
    memory = (1 + most(lambda factor: larger(1.0, factor), 2.0)) / 2
    total = float(task.load.sum())
    load = most(lambda factor: larger(factor, memory), max(task.gpus / total, 1.0)) if total > 0 else 1.0
    return larger(load, memory)


def _filled(task: Task, size_min: Ints, sizes: Ints, kinds: Ints, even: bool) -> Ints | None:
    """(models,) group of each model; None if some model fits nowhere.

    Models that fit into the fewest groups come first, then the largest. With `even`, a model goes to the group whose
    fuller resource (memory or load) then has the most room; otherwise to the group whose free memory and load have the
    largest inner product with the model's. sizes, kinds : (groups,).
    """
    suited = (size_min[:, None] <= sizes) & (task.kind[:, None] == kinds)  # (models, groups)
    weight = np.maximum(task.memory, task.load / max(float(np.mean(sizes)), 1.0))
    memory_left, load_left = np.ones(sizes.size), sizes.astype(float)
    group = np.full(size_min.size, -1)
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


def in_turn(task: Task, size_min: Ints) -> Iterator[Ints]:
    """Fill one group after another with the fitting models of largest need relative to memory. The first model already
    sets the group's size; the more load and the more large models a group takes, the smaller the other groups can be.
    """
    for exponent in EXPONENTS:
        order = np.argsort(-(task.need + ROUNDING) / task.memory**exponent, kind="stable")
        group = np.full(size_min.size, -1)
        count = 0
        for kind in range(int(task.kind.max()) + 1):
            remaining = order[task.kind[order] == kind]
            while remaining.size and count < task.groups:
                members = _one_filled(task, remaining)
                group[members] = count
                remaining = remaining[group[remaining] < 0]
                count += 1
        if (group >= 0).all():
            yield group


def _one_filled(task: Task, models: Ints) -> list[int]:
    """The members of a group that takes each next model whose memory and load still fit."""
    memory_left, load_left = 1.0 + ROUNDING, task.size_max + ROUNDING
    first = int(models.min())  # the model of largest need, which needs the most GPUs
    members: list[int] = []
    fitting = np.append(first, models[models != first])
    while True:  # a model that does not fit now does not fit later
        fitting = fitting[(task.memory[fitting] <= memory_left) & (task.load[fitting] <= load_left)]
        if not fitting.size:
            return members
        k = int(fitting[0])
        memory_left -= float(task.memory[k])
        load_left -= float(task.load[k])
        members.append(k)
        fitting = fitting[1:]


# ---- choices among optima -----------------------------------------------------------------------------------------


def levelled(task: Task, tolerance: float, grouping: Grouping, until_s: float) -> Grouping:
    """A grouping of this tolerance with a smaller load of the most loaded group, if the packing finds one."""
    total = float(task.load.sum())
    if total == 0:
        return grouping
    loads = np.bincount(grouping.group, task.load, grouping.sizes.size)
    low, high = total / task.gpus, float(np.max(loads / np.maximum(with_spare(task, grouping).sizes, 1)))
    for _ in range(STEPS):
        if time.perf_counter() > until_s:
            break
        level = (low + high) / 2
        better = packed(replace(task, load=task.load / level), tolerance)
        low, high = (level, high) if better is None else (low, level)
        grouping = grouping if better is None else better
    return grouping


def with_spare(task: Task, grouping: Grouping) -> Grouping:
    """The grouping with each spare GPU given to the group of least burst tolerance among groups below the limit."""
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
