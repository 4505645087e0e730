"""How many replicas of an engine run: as many as the plan has workers for, and more while the groups want more engines.

For engines with `replicas_max` only. Each group tells once a second how many engines each of its models wants
(estimates/engines_wanted.py): more at once, fewer when fewer were wanted for 300 s. The controller holds the largest
number of the last 300 s once more, for a group that restarts has forgotten it. A replica that is not wanted is drained
first.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from llmserve.estimates.engines_wanted import DOWN_AFTER_S, Peak
from llmserve.machines.cluster_file import ClusterFile, EngineTable
from llmserve.machines.layout import model_of
from llmserve.planning import HerdGroup, Plan


class Scaling:
    """replicas : that ran when an earlier controller ended, by engine: fewer are enough after DOWN_AFTER_S only"""

    def __init__(self, replicas: Mapping[str, int], now_s: float) -> None:
        self._earlier, self._until_s = dict(replicas), now_s + DOWN_AFTER_S
        self._peaks: dict[tuple[str, str], Peak] = {}
        self._wants: dict[str, dict[str, int]] = {}  # engines by group and model; of a silent group the last ones

    def received(self, group: str, wanted: Mapping[str, int], now_s: float) -> None:
        """wanted : engines by model"""
        peaks = self._peaks
        self._wants[group] = {
            model: peaks.setdefault((group, model), Peak(DOWN_AFTER_S)).at(now_s, count)
            for model, count in wanted.items()
        }

    def scaled(self, file: ClusterFile, plan: Plan, now_s: float) -> tuple[ClusterFile, Plan]:
        """The file with the replicas that should run, and the plan whose groups have the workers that this adds."""
        groups, engines = list(plan.groups), []
        for engine in file.engine:
            if engine.replicas_max is None:
                engines.append(engine)
                continue
            serving = [k for k, group in enumerate(groups) if model_of(engine) in _models(group)]
            planned = _planned(file, engine, [groups[k] for k in serving])
            missing = {k: self._missing(groups[k], engine, planned, len(serving)) for k in serving}
            count = planned + sum(missing.values())
            if now_s < self._until_s:
                count = max(count, self._earlier.get(engine.name, 0))
            count = min(max(count, engine.replicas), engine.replicas_max)
            engines.append(replace(engine, replicas=count))
            left = count - planned
            for k in serving:
                more = min(missing[k], left) if k != serving[-1] else left
                if more > 0:
                    groups[k] = _larger(groups[k], more, engine, count)
                    left -= more
        return replace(file, engine=tuple(engines)), Plan(tuple(groups))

    def _missing(self, group: HerdGroup, engine: EngineTable, planned: int, groups: int) -> int:
        """Engines that the group wants beyond its own. groups : that serve the model"""
        own = planned if groups == 1 else group.gpus
        return max(0, self._wants.get(group.name, {}).get(model_of(engine), 0) - own)


def _models(group: HerdGroup) -> set[str]:
    return {*group.models, *(model for _, model in group.streams)}


def _planned(file: ClusterFile, engine: EngineTable, serving: list[HerdGroup]) -> int:
    """Replicas for which the groups of the plan have workers: at least those of the file."""
    if any(len(_models(group)) > 1 for group in serving):
        return engine.replicas  # the workers of such a group are of several models
    others = [other for other in file.engine if other is not engine and model_of(other) == model_of(engine)]
    workers = sum(group.gpus for group in serving) - sum(other.replicas for other in others)
    return min(max(workers, engine.replicas), engine.replicas_max or 0)


def _larger(group: HerdGroup, more: int, engine: EngineTable, count: int) -> HerdGroup:
    """The group with so many workers more, which are the last of the `count` replicas where the group names workers."""
    names = tuple([engine.worker_of(number) for number in range(count - more, count)]) if group.workers else ()
    return replace(group, gpus=group.gpus + more, workers=(*group.workers, *names))
