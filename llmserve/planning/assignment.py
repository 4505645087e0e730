"""Which worker serves which group of a plan: the workers that the plan names, or as many as the plan asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from llmserve.scheduling.messages import ServingGroup


class PlannedGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group in a plan.

    gpus     number of workers that the group needs
    workers  names of the group's workers; (): any workers that serve its models
    models, streams  as in ServingGroup
    """

    name: str
    gpus: int
    models: tuple[str, ...]
    streams: tuple[tuple[str, str], ...] = ()
    workers: tuple[str, ...] = ()

    @property
    def served(self) -> set[str]:
        """Models of all requests of the group."""
        return {*self.models, *(model for _, model in self.streams)}


def assign(
    planned: Sequence[PlannedGroup], workers: Mapping[str, Collection[str]], before: Mapping[str, str]
) -> tuple[ServingGroup, ...]:
    """Assign as many workers as possible to the groups: first workers that serve all models of a group, then workers
    that serve some. A worker stays in its previous group if no group loses a worker by that. Other workers have none.

    workers : known models by worker; empty: the worker serves any model.  before : previous group by worker.
    """
    named = {worker for group in planned for worker in group.workers}
    free = {worker: set(workers[worker]) for worker in sorted(set(workers) - named)}
    needed = {group.name: 0 if group.workers else group.gpus for group in planned}
    chosen: dict[str, str] = {}
    for suits, stays in ((_serves_all, True), (_serves_all, False), (_serves_some, False)):
        candidates = {
            group.name: [
                worker
                for worker, models in free.items()
                if suits(models, group.served) and (before.get(worker) == group.name or not stays)
            ]
            for group in planned
            if needed[group.name]
        }
        _match(needed, candidates, chosen)
    return tuple(
        ServingGroup(
            group.name,
            group.workers or tuple([worker for worker in free if chosen.get(worker) == group.name]),
            group.models,
            group.streams,
        )
        for group in planned
    )


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


def shortfalls(planned: Sequence[PlannedGroup], groups: Sequence[ServingGroup], present: Collection[str]) -> list[str]:
    """Messages about the workers that a plan asks for and lacks. present : names of the workers."""
    messages = []
    for group, serving in zip(planned, groups, strict=True):
        missing = sorted(set(group.workers) - set(present))
        if missing:
            messages.append(f"group {group.name}: no worker is called {', '.join(missing)}")
        elif not group.workers and len(serving.workers) < group.gpus:
            models = ", ".join(sorted(group.served))
            messages.append(f"group {group.name}: {len(serving.workers)} of {group.gpus} workers serve {models}")
    return messages
