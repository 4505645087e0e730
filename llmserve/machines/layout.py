"""Which group has which workers, and how a worker moves to another group: drained by the old one first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from llmserve.machines.cluster_file import ClusterFile, EngineTable
from llmserve.planning import HerdGroup, Plan
from llmserve.planning.assignment import assign

DEMO_MODEL = "llmserve-demo"


def model_of(engine: EngineTable) -> str:
    """The model's name in the API."""
    if engine.kind == "embedded":
        return Path(engine.model).name if engine.model else DEMO_MODEL
    return Path(engine.model).expanduser().resolve().name if Path(engine.model).expanduser().exists() else engine.model


def owners(file: ClusterFile, plan: Plan, before: Mapping[str, str]) -> dict[str, str]:
    """The group of each worker. before : the groups until now. A worker that no group needs keeps none."""
    models = {worker: {model_of(engine) for engine, _ in engines} for worker, engines in file.workers.items()}
    return {worker: group for worker, group in assign(plan.groups, models, before).items() if worker in models}


def gateways_plan(plan: Plan, groups: Collection[str]) -> Plan:
    """The plan as gateways follow it: each group is one worker, its server. groups : those that have a server"""
    return Plan(tuple(HerdGroup(g.name, 1, g.models, g.streams, (g.name,)) for g in plan.groups if g.name in groups))


class Moves:
    """Lends each worker to one group at a time. A worker that changes its group is given back first."""

    def __init__(self, owners: Mapping[str, str] | None = None) -> None:
        self.holders: dict[str, str] = dict(owners or {})
        self._leaving: dict[str, str] = {}  # worker -> the group that drains it

    def follow(self, owners: Mapping[str, str], drained: Mapping[str, Collection[str]]) -> dict[str, str]:
        """The group of each worker now, on the way to `owners`.

        drained : workers that a group's server has no more, by group; a group that is not there has none left to drain
        """
        for worker in {*self.holders, *owners}:
            held, wanted = self.holders.get(worker), owners.get(worker)
            if held == wanted:
                continue
            if held is not None:
                self._leaving[worker] = held
                del self.holders[worker]
            group = self._leaving.get(worker)
            if group is not None and worker in drained.get(group, (worker,)):
                del self._leaving[worker]
                group = None
            if group is None and wanted is not None:
                self.holders[worker] = wanted
        return dict(self.holders)
