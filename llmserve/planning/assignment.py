"""Which worker serves which group of a plan: the workers that the plan names, or as many as the plan asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from llmserve.planning import HerdGroup


def assign(
    groups: Sequence[HerdGroup], workers: Mapping[str, Collection[str]], before: Mapping[str, str]
) -> dict[str, str]:
    """The group of each worker, for as many workers as possible: first those that serve all models of a group, then
    those that serve some. A worker stays in its previous group if no group loses a worker by that.

    workers : models by worker; empty: the worker serves any model.  before : previous group by worker.
    """
    named = {worker: group.name for group in groups for worker in group.workers}
    free = {worker: set(workers[worker]) for worker in sorted(set(workers) - set(named))}
    needed = {group.name: 0 if group.workers else group.gpus for group in groups}
    chosen: dict[str, str] = {}
    for suits, stays in ((_serves_all, True), (_serves_all, False), (_serves_some, False)):
        candidates = {
            group.name: [
                worker
                for worker, models in free.items()
                if suits(models, served_by(group)) and (before.get(worker) == group.name or not stays)
            ]
            for group in groups
            if needed[group.name]
        }
        _match(needed, candidates, chosen)
    return named | chosen


def served_by(group: HerdGroup) -> set[str]:
    """Models of all requests of a group."""
    return {*group.models, *(model for _, model in group.streams)}


def _serves_all(models: set[str], needed: set[str]) -> bool:
    return not models or needed <= models


def _serves_some(models: set[str], needed: set[str]) -> bool:
    return not models or bool(needed & models)


def _match(needed: Mapping[str, int], candidates: Mapping[str, Sequence[str]], chosen: dict[str, str]) -> None:
    """Fill the groups along augmenting paths: a group without a free worker takes a worker of another group, if that
    group can replace the worker. A chosen worker keeps some group, but maybe another one.
    """
    for name, suitable in candidates.items():
        have = sum(group == name for group in chosen.values())
        for _ in range(needed[name] - have):
            if not _add_worker(name, suitable, candidates, chosen, {name}):
                break


def _add_worker(
    name: str,
    suitable: Sequence[str],
    candidates: Mapping[str, Sequence[str]],
    chosen: dict[str, str],
    visited: set[str],
) -> bool:
    for worker in suitable:
        if worker not in chosen:
            chosen[worker] = name
            return True
    for worker in suitable:
        other = chosen[worker]
        if other not in visited:
            visited.add(other)
            if _add_worker(other, candidates.get(other, ()), candidates, chosen, visited):
                chosen[worker] = name
                return True
    return False
