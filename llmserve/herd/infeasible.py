"""Why an instance has no plan, by how much its limits are missed, and what would be enough."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from llmserve.herd.instance import SLACK, Instance, streams_of
from llmserve.herd.milp import decide
from llmserve.herd.packing import packed
from llmserve.herd.relaxation import Relaxation
from llmserve.herd.search import Search, last_where
from llmserve.herd.task import Task, by_model, needs_of, task_of

EXPLAINING_S = 5.0  # to find out what would have been enough


def why_not(instance: Instance, as_printed: bool, search: Search) -> str:
    """In a sentence, after a search that found nothing."""
    reasons = list(_limits_broken(instance, search.task))
    if reasons:
        return f"there is no plan: {'; '.join(reasons)}"
    if not search.proven:
        return "no plan was found in the time, nor was it shown that there is none; a longer time limit may find one"
    helps = [text for text in (_would_do(instance, as_printed, field) for field in ("gpus", "groups")) if text]
    return (
        "there is no plan: load, memory and affinity fit in total, but no grouping of whole models keeps all limits"
        + (f"; {' or '.join(helps)} would do" if helps else "")
    )


def _limits_broken(instance: Instance, task: Task) -> Iterator[str]:
    """What can be told without a search. `task` has the load that counts."""
    total, gpus, groups = float(task.load.sum()), instance.gpus, instance.groups
    if task.load[0] > task.size_max + SLACK:
        yield (
            f"one model's load needs {task.load[0]:.6g} GPUs, and a group has at most {task.size_max}: "
            f"{task.load[0] - task.size_max:.6g} too few"
        )
    if total > gpus + SLACK:
        yield f"the load needs {total:.6g} GPUs, {total - gpus:.6g} more than the {gpus} there are"
    elif total > groups * task.size_max + SLACK:
        yield (
            f"the load needs {total:.6g} GPUs, and {groups} groups of at most {task.size_max} have "
            f"{groups * task.size_max}"
        )
    sets = int(task.kind.max()) + 1
    if sets > min(groups, gpus):
        yield f"the models fall into {sets} affinity sets, each needs a group of its own, and {_room(instance)}"
    filled = math.ceil(task.memory.sum() - SLACK)
    if filled > min(groups, gpus):
        yield (
            f"the models take {task.memory.sum() * instance.gpu_memory_gb:.6g} GB, the memory of {filled} GPUs of "
            f"{instance.gpu_memory_gb:g} GB, so at least {filled} groups are needed, and {_room(instance)}"
        )
    elif sets > 1 and (needed := sum(_groups_needed(task))) > min(groups, gpus) >= sets:
        yield f"the models of {sets} affinity sets need {needed} groups at least, and {_room(instance)}"


def _groups_needed(task: Task) -> list[int]:
    """By affinity set: at least, by memory and by load."""
    sets = int(task.kind.max()) + 1
    memory, load = (np.bincount(task.kind, weights, sets) for weights in (task.memory, task.load))
    most = np.maximum(np.ceil(memory - SLACK), np.ceil(load / task.size_max - SLACK))
    return [int(groups) for groups in np.maximum(most, 1)]


def _room(instance: Instance) -> str:
    few = instance.gpus < instance.groups
    return f"{instance.gpus} GPUs are too few for that" if few else f"there may be {instance.groups}"


def _would_do(instance: Instance, as_printed: bool, field: Literal["gpus", "groups"]) -> str | None:
    """The least number of GPUs, or of groups, that would have a plan; None where none, or none in the time, would."""
    now = getattr(instance, field)
    most = len(instance.models) if field == "groups" else instance.groups * instance.group_gpus_max
    streams = streams_of(instance)
    need = by_model(instance, streams, needs_of(instance, streams))
    until_s = time.perf_counter() + EXPLAINING_S

    def fails(more: int) -> bool:
        task, _ = task_of(msgspec.structs.replace(instance, **{field: now + more}), need, as_printed)
        return not _fits(task, until_s - time.perf_counter())

    enough = last_where(fails, most - now) + 1
    return f"{now + enough} {'GPUs' if field == 'gpus' else 'groups'}" if 0 < enough <= most - now else None


def _fits(task: Task, time_limit_s: float) -> bool:
    if Relaxation.of(task, 0.0).gpus > task.gpus:
        return False
    return packed(task, 0.0) is not None or (time_limit_s > 0 and decide(task, 0.0, time_limit_s)[0] is not None)
