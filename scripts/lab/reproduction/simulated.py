"""Every world of a paper, under each of its seeds, on several cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from llmserve.simulation.many import in_processes
from reproduction.rows import Report

REPORTS = 100  # of progress, at most

Key = tuple[str | float, ...]
"""Names a world: what it is for, and its numbers."""
T = TypeVar("T")
R = TypeVar("R")


def run_all(
    run: Callable[[T], R], tasks: Mapping[Key, Iterable[T]], size: Callable[[T], float], jobs: int, report: Report
) -> dict[Key, list[R]]:
    """Results of each key's tasks, in their order; the same however many processes there are.

    size : of a task, of which a share is done
    """
    keyed = [(key, task) for key, each in tasks.items() for task in each]
    order = sorted(range(len(keyed)), key=lambda place: -size(keyed[place][1]))  # so that the processes end together
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
    found: dict[Key, list[R]] = {key: [] for key in tasks}
    for place, (key, _) in enumerate(keyed):
        found[key].append(results[place])
    return found


def key_text(key: Iterable[str | float]) -> str:
    return " ".join(part if isinstance(part, str) else f"{part:g}" for part in key)


def ends_of(values: Sequence[T]) -> Sequence[T]:
    return values[0], values[-1]
