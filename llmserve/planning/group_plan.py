"""The plan of serving groups that a server follows: its groups, engines and models, and when it is replanned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from llmserve import planning as herd
from llmserve.engines.kinds import engine_name
from llmserve.errors import ConfigError
from llmserve.planning.assignment import PlannedGroup
from llmserve.scheduling.layout import FALLBACK
from llmserve.scheduling.rates import STREAMS_MAX, Rates, Replan
from llmserve.settings.tree import Config, EngineConfig
from llmserve.spelling import nearest


def planned_groups(config: Config) -> tuple[PlannedGroup, ...]:
    """Return the server's groups; () without a plan, or for a server of a single group. Raises ConfigError."""
    if config.engines.plan is None or config.engines.group is not None:
        return ()
    return _groups_of(herd.Plan.load(config.engines.plan))


def _groups_of(plan: herd.Plan) -> tuple[PlannedGroup, ...]:
    return tuple(
        PlannedGroup(group.name, group.gpus, group.models, group.streams, group.workers) for group in plan.groups
    )


def with_plan(config: Config) -> Config:
    """Check the plan's files before any slow start. With `group` set, keep only the group's engines.

    Raises ConfigError.
    """
    engines = config.engines
    assert engines.plan is not None
    plan = herd.Plan.load(engines.plan)
    replanner(config)
    if engines.group is None:
        _check_workers(engines, plan)
        return config
    remaining = _engines_of_group(engines, engines.group, plan)
    return msgspec.structs.replace(config, engines=msgspec.structs.replace(engines, engine=remaining))


def _engines_of_group(engines: EngineConfig, group: str, plan: herd.Plan) -> tuple[str, ...]:
    """Return the --engine entries that serve a group. A worker that no group names serves the fallback group, and all
    groups that name no worker.

    Raises ConfigError when the plan does not have the group, or the group has no engine.
    """
    workers = {FALLBACK: (), **{planned.name: planned.workers for planned in plan.groups}}
    if group not in workers:
        raise ConfigError(f"group: {engines.plan} has no group {group!r}{nearest(group, workers)}")
    own, named = workers[group], {worker for names in workers.values() for worker in names}
    takes_unnamed = group == FALLBACK or not own
    entries = []
    for entry in engines.engine or ("embedded",):
        worker = _worker_of(engines, entry)
        if worker in own or (takes_unnamed and worker not in named):
            entries.append(entry)
    if not entries:
        place = f"its workers, {', '.join(own)}" if own else "a worker that no other group names"
        raise ConfigError(f"group {group}: none of the engines is on {place}")
    return tuple(entries)


def planned_models(config: Config) -> set[str]:
    """Return the models of the server's group. Without --group the scheduler knows the plan's groups."""
    engines = config.engines
    if engines.plan is None or engines.group is None:
        return set()
    return _models_of(engines.group, _groups_of(herd.Plan.load(engines.plan)))


def _models_of(name: str, planned: Iterable[PlannedGroup]) -> set[str]:
    return {model for group in planned if group.name == name for model in group.served}


def served_models(config: Config) -> Callable[[str], bool]:
    """Return a test of whether to serve a model that an engine lists: the model of --model, or those of --group."""
    engines = config.engines
    # Engines that llmserve starts serve only --model; vLLM's adapters count as further models, and are served.
    only = None if engines.has_vllm or engines.has_embedded else engines.model
    if engines.plan is None or engines.group is None:
        return lambda model: only in (None, model)
    planned = _groups_of(herd.Plan.load(engines.plan))
    own = _models_of(engines.group, planned)
    elsewhere = {model for group in planned if group.name != engines.group for model in group.models}
    takes_rest = engines.group == FALLBACK
    return lambda model: only in (None, model) and (model in own or (takes_rest and model not in elsewhere))


def _check_workers(engines: EngineConfig, plan: herd.Plan) -> None:
    """Raise ConfigError on a worker without an engine. No check with vLLM, whose workers are known after its start."""
    if engines.has_vllm:
        return
    workers = {_worker_of(engines, entry) for entry in engines.engine or ("embedded",)}
    for group in plan.groups:
        for worker in group.workers:
            if worker not in workers:
                near = nearest(worker, workers)
                raise ConfigError(f"plan: group {group.name} has no engine on its worker {worker}{near}")


def _worker_of(engines: EngineConfig, entry: str) -> str:
    """Return the name that a plan uses for the worker of an --engine entry."""
    placed = msgspec.structs.replace(engines, engine=(entry,)).placed_urls
    return placed[0][0] or engine_name(placed[0][1]) if placed else entry


def replan_when(config: Config) -> Replan | None:
    """Return the rates of the plan and the replanning interval; None without replanning. Raises ConfigError."""
    engines = config.engines
    if engines.replan_every_s is None or engines.plan_instance is None:
        return None
    streams = herd.streams_of(instance := herd.Instance.load(engines.plan_instance))
    models = [instance.models[index].name for index in streams.model]
    planned = [
        (name, model, float(rate))
        for name, model, rate in zip(streams.names, models, streams.rate_per_s, strict=True)
        if rate > 0
    ]
    # Only STREAMS_MAX streams are counted separately. Without planned rates to compare, the first check replans.
    return Replan(engines.replan_every_s, tuple(planned) if len(planned) <= STREAMS_MAX else ())


def replanner(config: Config) -> Callable[[Rates], tuple[PlannedGroup, ...]] | None:
    """Return a function that replans for measured rates; None without replanning. Raises ConfigError on a bad file."""
    engines = config.engines
    if engines.plan is None or engines.plan_instance is None:
        return None
    instance, previous = herd.Instance.load(engines.plan_instance), herd.Plan.load(engines.plan)
    streams = herd.streams_of(instance)
    names = [model.name for model in instance.models]
    silent: dict[str | tuple[str, str], float] = {
        (name, names[index]): 0.0 for name, index in zip(streams.names, streams.model, strict=True)
    }

    def replan(rates: Rates) -> tuple[PlannedGroup, ...]:
        nonlocal previous
        now = dict(silent)
        now.update({(stream, model): rate_per_s for stream, model, rate_per_s in rates if model in names})
        previous = herd.replan(instance, now, previous, holds_s=engines.replan_every_s or math.inf)
        return _groups_of(previous)

    return replan
