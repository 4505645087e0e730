"""Which worker serves which group of a plan: those that the plan names, else as many as it asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from llmserve.scheduling.messages import ServingGroup


class PlannedGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group as a plan has it.

    gpus     workers that it is to have
    workers  by name, these and no others; (): any that serve its models
    models, streams  as ServingGroup has them
    """

    name: str
    gpus: int
    models: tuple[str, ...]
    streams: tuple[tuple[str, str], ...] = ()
    workers: tuple[str, ...] = ()

    @property
    def served(self) -> set[str]:
        """Models of all its requests."""
        return {*self.models, *(model for _, model in self.streams)}


def assign(
    planned: Sequence[PlannedGroup], workers: Mapping[str, Collection[str]], before: Mapping[str, str]
) -> tuple[ServingGroup, ...]:
    """As many workers to as many groups as can be, of those that serve all of a group's models before those that serve
    some. A worker stays in its group of before where that costs nobody one. The rest is in no group.

    workers : models by worker, those that are known; empty: whatever is asked for.  before : group by worker.
    """
    named = {worker for group in planned for worker in group.workers}
    free = {worker: set(workers[worker]) for worker in sorted(set(workers) - named)}
    wanted = {group.name: 0 if group.workers else group.gpus for group in planned}
    chosen: dict[str, str] = {}
    for suits, stays in ((_serves_all, True), (_serves_all, False), (_serves_some, False)):
        candidates = {
            group.name: [
                worker
                for worker, models in free.items()
                if suits(models, group.served) and (before.get(worker) == group.name or not stays)
            ]
            for group in planned
            if wanted[group.name]
        }
        _match(wanted, candidates, chosen)
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


def _match(wanted: Mapping[str, int], candidates: Mapping[str, Sequence[str]], chosen: dict[str, str]) -> None:
    """Fill groups up by augmenting paths: a group that finds no free worker takes another one's, which takes one that
    only it can use. Those that have been chosen keep a group, if not the same one.
    """
    for name, suitable in candidates.items():
        have = sum(group == name for group in chosen.values())
        for _ in range(wanted[name] - have):
            if not _take_one(name, suitable, candidates, chosen, {name}):
                break


def _take_one(
    name: str,
    suitable: Sequence[str],
    candidates: Mapping[str, Sequence[str]],
    chosen: dict[str, str],
    asked: set[str],
) -> bool:
    for worker in suitable:
        if worker not in chosen:
            chosen[worker] = name
            return True
    for worker in suitable:
        other = chosen[worker]
        if other not in asked:
            asked.add(other)
            if _take_one(other, candidates.get(other, ()), candidates, chosen, asked):
                chosen[worker] = name
                return True
    return False


def shortfalls(planned: Sequence[PlannedGroup], groups: Sequence[ServingGroup], known: Collection[str]) -> list[str]:
    """What a plan asks for and does not have, in words. known : workers that are there."""
    found = []
    for group, serving in zip(planned, groups, strict=True):
        missing = sorted(set(group.workers) - set(known))
        if missing:
            found.append(f"group {group.name}: no worker is called {', '.join(missing)}")
        elif not group.workers and len(serving.workers) < group.gpus:
            models = ", ".join(sorted(group.served))
            found.append(f"group {group.name}: {len(serving.workers)} of {group.gpus} workers serve {models}")
    return found
