"""A lower bound on the GPUs for a burst tolerance, as if models could be split between groups.

A tolerance whose bound exceeds the cluster's GPUs is too large.

Models are in the order of falling need, and groups in the order of their first models. So all models before the first
model of group j + 1 are in groups 1 to j: their memory is at most that of j groups, and their load at most the GPUs of
those groups. A group that begins later in the order needs fewer GPUs. A dynamic programme over (j, GPUs so far), in
which each group begins as late as these limits allow, finds the bound. The GPUs without load are at most the spare GPUs
of the cluster, wherever the load is (`_load_max`). Affinity sets share no group: each set has its own programme, and a
sum over the sets divides the groups among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmserve.planning.instance import SLACK, Bools, Floats, Ints
from llmserve.planning.task import Task

NONE = 1 << 40  # the bound when no number of GPUs is enough


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The relaxation at a tolerance: least GPUs by number of groups, for each affinity set and for all sets.

    stages     by set
    least      (sets, groups + 1) least GPUs of each set
    together   (sets + 1, groups + 1) least GPUs of the first sets together
    """

    stages: list[list[_Stage]]
    least: Ints
    together: Ints

    @property
    def gpus(self) -> int:
        """Least GPUs of all sets together; NONE: no number is enough."""
        return min(int(self.together[-1].min()), NONE)

    @classmethod
    def of(cls, task: Task, tolerance: float) -> Relaxation:
        size_min = task.size_min(tolerance)
        kinds = int(task.kind.max()) + 1
        stages, least = [], []
        together = np.full((kinds + 1, task.groups + 1), NONE)
        together[0, 0] = 0
        for kind in range(kinds):
            members = task.kind == kind
            stages.append(_stages(size_min[members], task.load[members], task.memory[members], task, task.groups))
            least.append(_least_gpus(stages[-1], int(members.sum())))
            for own in range(1, task.groups + 1):
                sums = together[kind, : task.groups + 1 - own] + least[-1][own]
                together[kind + 1, own:] = np.minimum(together[kind + 1, own:], sums)
        return cls(stages, np.array(least), together)

    def allotted(self) -> list[tuple[int, int]]:
        """(groups, GPUs) of each set, for the fewest GPUs in all."""
        groups = int(np.argmin(self.together[-1]))
        shares = []
        for kind in reversed(range(len(self.least))):
            for own in range(1, groups + 1):
                if self.together[kind, groups - own] + self.least[kind, own] == self.together[kind + 1, groups]:
                    shares.append((own, int(self.least[kind, own])))
                    groups -= own
                    break
        return shares[::-1]


@dataclass(frozen=True, slots=True)
class _Stage:
    """The state after j groups of one affinity set, by the GPUs of these groups together: (gpus + 1,) each.

    reached  whether the groups can have this number of GPUs
    by_load  most models, in the order of falling need, that GPUs can hold by load; the same array for all stages
    fitting  most models, in the same order, that the groups can hold by memory
    """

    reached: Bools
    by_load: Ints
    fitting: int

    @property
    def begun(self) -> Ints:
        """Most models, in the order of falling need, that the groups can hold by memory and load."""
        return np.minimum(self.by_load, self.fitting)


def _stages(size_min: Ints, load: Floats, memory: Floats, task: Task, groups: int) -> list[_Stage]:
    """Stages of 0, 1, ..., groups groups of one affinity set. size_min, load, memory : (models,) by falling need."""
    gpus, numbers = np.arange(task.gpus + 1), np.arange(groups + 1)
    slack = SLACK * np.maximum(numbers, 1)
    fitting = np.searchsorted(np.append(0.0, np.cumsum(memory)), numbers + slack, side="right") - 1
    by_load = np.searchsorted(np.append(0.0, np.cumsum(load)), gpus + SLACK, side="right") - 1
    idle = task.gpus - float(task.load.sum())  # most GPUs without load, in all groups together
    limits = np.searchsorted(gpus, idle + _load_max(load, memory, numbers) + slack, side="right")
    reached = gpus == 0
    stages = []
    for fits, limit in zip(fitting.tolist(), limits.tolist(), strict=True):
        reached[limit:] = False
        stages.append(_Stage(reached, by_load, fits))
        going = np.flatnonzero(reached)
        begun = np.minimum(by_load[going], fits)
        if fits >= size_min.size:  # where all models are held, no further group begins
            going, begun = going[begun < size_min.size], begun[begun < size_min.size]
        low, high = going + size_min[begun], np.minimum(going + task.size_max, task.gpus)
        open_ = low <= high
        reached = _covered(low[open_], high[open_], gpus.size)
    return stages


def _covered(low: Ints, high: Ints, size: int) -> Bools:
    """(size,) whether a number is in some interval low .. high."""
    covered = np.zeros(size, dtype=bool)
    if low.size:
        begin, end = int(low.min()), int(high.max()) + 1
        marks = np.bincount(low - begin, minlength=end - begin + 1) - np.bincount(high + 1 - begin)
        covered[begin:end] = np.cumsum(marks)[:-1] > 0
    return covered


def _load_max(load: Floats, memory: Floats, groups: Ints) -> Floats:
    """(numbers,) the largest load of models, or parts of models, that fit into the memory of so many groups."""
    order = np.argsort(-load / memory, kind="stable")
    filled = np.append(0.0, np.cumsum(memory[order]))
    most: Floats = np.interp(groups * (1 + SLACK), filled, np.append(0.0, np.cumsum(load[order])))
    return most


def _least_gpus(stages: Sequence[_Stage], models: int) -> Ints:
    """(groups + 1,) least GPUs of 0, 1, ... groups that hold all models; NONE where the groups cannot."""
    feasible = [np.flatnonzero(stage.reached & (stage.begun == models)) for stage in stages]
    return np.array([int(gpus[0]) if gpus.size else NONE for gpus in feasible])


def sizes_towards(
    stages: Sequence[_Stage], size_min: Ints, size_max: int, groups: int, gpus: int, largest_first: bool
) -> Ints:
    """(groups,) sizes that add up to `gpus`; the first groups are as large as possible, or as small as possible."""
    sizes = []
    for stage in reversed(stages[:groups]):
        before = np.flatnonzero(stage.reached & (stage.begun < size_min.size))
        sums = before[(before + size_min[stage.begun[before]] <= gpus) & (before + size_max >= gpus)]
        chosen = int(sums[-1] if largest_first else sums[0])
        sizes.append(gpus - chosen)
        gpus = chosen
    return np.array(sizes[::-1])
