"""The fewest GPUs for a burst tolerance, if models could be split between groups: what tells that one is too large.

With models by falling need, and groups by their first model, the models before that of group j + 1 are all in groups 1
to j: their memory is at most that of j groups, and their load at most those groups' GPUs. The later group j + 1 begins,
the less it asks for. So a dynamic programme over (j, GPUs so far), each group beginning as late as that allows, finds
the fewest GPUs. GPUs without load are bounded by those that the cluster has to spare, however load is spread
(`_load_max`). Affinity sets share no group: each has its own such programme, and a sum over them divides the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmserve.herd.instance import SLACK, Bools, Floats, Ints
from llmserve.herd.task import Task

NONE = 1 << 40  # GPUs that would do: no number would


@dataclass(frozen=True, slots=True)
class Relaxation:
    """What the relaxation comes to at a tolerance: least GPUs of each affinity set by its groups, and of all.

    stages     by set
    least      (sets, groups + 1)
    together   (sets + 1, groups + 1) GPUs that the first sets need at least with so many groups
    """

    stages: list[list[_Stage]]
    least: Ints
    together: Ints

    @property
    def gpus(self) -> int:
        """That all sets need at least; NONE: no number would do."""
        return min(int(self.together[-1].min()), NONE)

    @classmethod
    def of(cls, task: Task, tolerance: float) -> Relaxation:
        asked = task.asked(tolerance)
        kinds = int(task.kind.max()) + 1
        stages, least = [], []
        together = np.full((kinds + 1, task.groups + 1), NONE)
        together[0, 0] = 0
        for kind in range(kinds):
            mine = task.kind == kind
            stages.append(_stages(asked[mine], task.load[mine], task.memory[mine], task, task.groups))
            least.append(_least_gpus(stages[-1], int(mine.sum())))
            for own in range(1, task.groups + 1):
                sums = together[kind, : task.groups + 1 - own] + least[-1][own]
                together[kind + 1, own:] = np.minimum(together[kind + 1, own:], sums)
        return cls(stages, np.array(least), together)

    def allotted(self) -> list[tuple[int, int]]:
        """(groups, GPUs) of each set, where they need the fewest GPUs in all."""
        left = int(np.argmin(self.together[-1]))
        found = []
        for kind in reversed(range(len(self.least))):
            for own in range(1, left + 1):
                if self.together[kind, left - own] + self.least[kind, own] == self.together[kind + 1, left]:
                    found.append((own, int(self.least[kind, own])))
                    left -= own
                    break
        return found[::-1]


@dataclass(frozen=True, slots=True)
class _Stage:
    """After j groups of one affinity set. Both (gpus + 1,), by the GPUs that they have in all.

    reached  whether they can have so many
    begun    models, by falling need, that memory and load let those groups hold at most
    """

    reached: Bools
    begun: Ints


def _stages(asked: Ints, load: Floats, memory: Floats, task: Task, groups: int) -> list[_Stage]:
    """Of 0, 1, ..., groups groups of one affinity set. asked, load, memory : of its models, by falling need."""
    gpus = np.arange(task.gpus + 1)
    by_memory = np.append(0.0, np.cumsum(memory))
    by_load = np.searchsorted(np.append(0.0, np.cumsum(load)), gpus + SLACK, side="right") - 1
    reached = gpus == 0
    idle = task.gpus - float(task.load.sum())  # GPUs that can be without load, in all groups together
    stages = []
    for number in range(groups + 1):
        held = int(np.searchsorted(by_memory, number + SLACK * max(number, 1), side="right")) - 1
        begun = np.minimum(by_load, held)
        reached &= gpus <= idle + _load_max(load, memory, number) + SLACK * max(number, 1)
        stages.append(_Stage(reached, begun))
        going = np.flatnonzero(reached & (begun < asked.size))
        low = gpus[going] + asked[begun[going]]
        high = np.minimum(gpus[going] + task.size_max, task.gpus)
        open_ = low <= high
        marks = np.bincount(low[open_], minlength=task.gpus + 2) - np.bincount(high[open_] + 1, minlength=task.gpus + 2)
        reached = np.cumsum(marks)[:-1] > 0
    return stages


def _load_max(load: Floats, memory: Floats, groups: int) -> float:
    """The most load of models, or parts of them, that fit into the memory of so many groups."""
    order = np.argsort(-load / memory, kind="stable")
    taken = np.append(0.0, np.cumsum(memory[order]))
    return float(np.interp(groups * (1 + SLACK), taken, np.append(0.0, np.cumsum(load[order]))))


def _least_gpus(stages: Sequence[_Stage], models: int) -> Ints:
    """(groups + 1,) that 0, 1, ... groups need at least to hold all; NONE where they cannot."""
    found = [np.flatnonzero(stage.reached & (stage.begun == models)) for stage in stages]
    return np.array([int(gpus[0]) if gpus.size else NONE for gpus in found])


def sizes_towards(
    stages: Sequence[_Stage], asked: Ints, size_max: int, groups: int, gpus: int, largest_first: bool
) -> Ints:
    """(groups,) sizes of groups that have so many GPUs together; the first groups' as large as can be, or as small."""
    sizes = []
    for stage in reversed(stages[:groups]):
        before = np.flatnonzero(stage.reached & (stage.begun < asked.size))
        sums = before[(before + asked[stage.begun[before]] <= gpus) & (before + size_max >= gpus)]
        chosen = int(sums[-1] if largest_first else sums[0])
        sizes.append(gpus - chosen)
        gpus = chosen
    return np.array(sizes[::-1])
