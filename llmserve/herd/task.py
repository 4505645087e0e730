"""What the search works on: an instance without names, and a grouping of its models.

    n_i            GPUs that model i needs for its average load        `Task.need`
    t              a burst tolerance that every model is to have
    ceil(t n_i)    GPUs that a group with model i then has at least    `Task.asked`

Numbers that differ by no more than floating-point arithmetic may make them differ count as equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmserve.herd.affinity import affinity_sets
from llmserve.herd.instance import ROUNDING, SLACK, Floats, Instance, Ints


@dataclass(frozen=True, slots=True)
class Task:
    """An instance without names. Models by falling need.

    need       (models,) n_i
    load       (models,) what it takes of its group's GPUs: n_i; 0 as printed
    memory     (models,) share of a GPU's
    kind       (models,) affinity set
    """

    need: Floats
    load: Floats
    memory: Floats
    kind: Ints
    gpus: int
    size_max: int
    groups: int

    def asked(self, tolerance: float) -> Ints:
        """(models,) GPUs that a group needs to have, for this burst tolerance of each model in it."""
        gpus = np.ceil(tolerance * self.need * (1 - ROUNDING) - ROUNDING)
        return np.maximum(gpus, 1.0).astype(np.int64)

    def least_sizes(self, group: Ints, tolerance: float, groups: int) -> Ints:
        """(groups,) of these groups, 0 of an empty one."""
        sizes: Ints = np.ceil(np.bincount(group, self.load, groups) - SLACK).astype(np.int64)
        np.maximum.at(sizes, group, self.asked(tolerance))
        return sizes

    def sizes(self, group: Ints, tolerance: float, groups: int) -> Ints | None:
        """The same; None where limits are broken."""
        memory = np.bincount(group, self.memory, groups)
        sizes = self.least_sizes(group, tolerance, groups)
        kept = memory.max() <= 1 + SLACK and sizes.max() <= self.size_max and sizes.sum() <= self.gpus
        kept = kept and np.count_nonzero(sizes) <= self.groups
        return sizes if kept else None


@dataclass(frozen=True, slots=True)
class Grouping:
    """group : (models,) of each.  sizes : (groups,) GPUs, 0 of an empty one."""

    group: Ints
    sizes: Ints

    def tolerance(self, task: Task) -> float:
        """The least one; infinite without load."""
        with np.errstate(divide="ignore"):
            return float(np.min(self.sizes[self.group] / task.need))


def task_of(instance: Instance, need: Floats, as_printed: bool) -> tuple[Task, Ints]:
    """And the order of its models in the instance's."""
    order = np.argsort(-need, kind="stable")
    memory = np.array([model.memory_gb for model in instance.models]) / instance.gpu_memory_gb
    task = Task(
        need=need[order],
        load=np.zeros(need.size) if as_printed else need[order],
        memory=memory[order],
        kind=affinity_sets(instance.models, instance.affinity_max)[order],
        gpus=instance.gpus,
        size_max=min(instance.group_gpus_max, instance.gpus),
        groups=min(instance.groups, need.size, instance.gpus),
    )
    return task, order


def tolerances_of(task: Task) -> Floats:
    """Rising: 0, and every size / n_i that the least burst tolerance can be."""
    most = task.size_max / task.need[0] if task.need[0] > 0 else 0.0
    found = [np.zeros(1)]
    for need in np.unique(task.need[task.need > 0]):
        sizes = np.arange(1, math.floor(most * need * (1 + ROUNDING)) + 1)
        found.append(sizes / need)
    values = np.unique(np.concatenate(found))
    distinct = np.diff(values, prepend=-np.inf) > ROUNDING * values  # of equals, the smaller: asked() rounds down
    return values[distinct]
