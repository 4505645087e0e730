"""Run all simulations of a paper, with each of their seeds, on several cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from llmserve.simulation.many import in_processes
from papers.rows import Report

REPORTS = 100  # most reports of progress

Key = tuple[str | float, ...]
"""Name of a world: the figure and the parameters."""
T = TypeVar("T")
R = TypeVar("R")


def run_all(
    run: Callable[[T], R], tasks: Mapping[Key, Iterable[T]], size: Callable[[T], float], jobs: int, report: Report
) -> dict[Key, list[R]]:
    """Return the results of each key's tasks, in the order of the tasks, for any number of processes.

    size : task -> work of the task, for the share that is done
    """
    keyed = [(key, task) for key, key_tasks in tasks.items() for task in key_tasks]
    order = sorted(range(len(keyed)), key=lambda place: -size(keyed[place][1]))  # so that all processes end together
    todo = [keyed[place][1] for place in order]
    runs = in_processes(run, todo, jobs) if jobs > 1 else enumerate(map(run, todo))
    total, done = sum(map(size, todo)), 0.0
    results: dict[int, R] = {}
    for index, result in runs:
        results[order[index]] = result
        done += size(todo[index])
        if len(results) % math.ceil(len(todo) / REPORTS) == 0:
            last = key_text(keyed[order[index]][0])
            report(f"{len(results):,} of {len(todo):,} runs, the last of {last}", done / total)
    by_key: dict[Key, list[R]] = {key: [] for key in tasks}
    for place, (key, _) in enumerate(keyed):
        by_key[key].append(results[place])
    return by_key


def key_text(key: Iterable[str | float]) -> str:
    return " ".join(part if isinstance(part, str) else f"{part:g}" for part in key)


def ends_of(values: Sequence[T]) -> Sequence[T]:
    return values[0], values[-1]
