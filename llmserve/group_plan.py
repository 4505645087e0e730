"""The plan of serving groups that a server follows: its groups, engines and models, and when it plans anew."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from llmserve import herd
from llmserve.cluster.assignment import PlannedGroup
from llmserve.engine_kinds import engine_name
from llmserve.errors import ConfigError
from llmserve.scheduling.layout import FALLBACK
from llmserve.scheduling.rates import STREAMS_MAX, Rates, Replan
from llmserve.settings import Config, EngineConfig
from llmserve.spelling import nearest


def planned_groups(config: Config) -> tuple[PlannedGroup, ...]:
    """The groups that this server has; () without a plan, and where the server is one group. Raises ConfigError."""
    if config.engines.plan is None or config.engines.group is not None:
        return ()
    return _groups_of(herd.Plan.load(config.engines.plan))


def _groups_of(plan: herd.Plan) -> tuple[PlannedGroup, ...]:
    return tuple(
        PlannedGroup(group.name, group.gpus, group.models, group.streams, group.workers) for group in plan.groups
    )


def with_plan(config: Config) -> Config:
    """Its files are looked at before anything slow is started; of one group, only the group's engines are left.

    Raises ConfigError.
    """
    engines = config.engines
    assert engines.plan is not None
    plan = herd.Plan.load(engines.plan)
    replanner(config)
    if engines.group is None:
        _check_workers(engines, plan)
        return config
    left = _engines_of_group(engines, engines.group, plan)
    return msgspec.structs.replace(config, engines=msgspec.structs.replace(engines, engine=left))


def _engines_of_group(engines: EngineConfig, group: str, plan: herd.Plan) -> tuple[str, ...]:
    """Each --engine that serves the group. A worker that no group names may serve the fallback group, and every group
    that names no worker.

    Raises ConfigError when the plan has no such group, or the group no engine.
    """
    workers = {FALLBACK: (), **{planned.name: planned.workers for planned in plan.groups}}
    if group not in workers:
        raise ConfigError(f"group: {engines.plan} has no group {group!r}{nearest(group, workers)}")
    own, named = workers[group], {worker for some in workers.values() for worker in some}
    takes_unnamed = group == FALLBACK or not own
    found = []
    for entry in engines.engine or ("embedded",):
        worker = _worker_of(engines, entry)
        if worker in own or (takes_unnamed and worker not in named):
            found.append(entry)
    if not found:
        of = f"its workers, {', '.join(own)}" if own else "a worker that no other group names"
        raise ConfigError(f"group {group}: none of the engines is on {of}")
    return tuple(found)


def wanted_models(config: Config) -> Callable[[str], bool]:
    """Whether a model that an engine lists is to be served: the one of --model, those of the --group."""
    engines = config.engines
    # What is started here serves nothing else; vLLM's adapters are models of their own.
    only = None if engines.has_vllm or engines.has_embedded else engines.model
    if engines.plan is None or engines.group is None:
        return lambda model: only in (None, model)
    planned = _groups_of(herd.Plan.load(engines.plan))
    own = {model for group in planned if group.name == engines.group for model in group.served}
    others = {model for group in planned if group.name != engines.group for model in group.models}
    takes_rest = engines.group == FALLBACK
    return lambda model: only in (None, model) and (model in own or (takes_rest and model not in others))


def _check_workers(engines: EngineConfig, plan: herd.Plan) -> None:
    """Raises ConfigError on a worker that no engine can be on. vLLM's are known when it has been started."""
    if engines.has_vllm:
        return
    known = {_worker_of(engines, entry) for entry in engines.engine or ("embedded",)}
    for group in plan.groups:
        for worker in group.workers:
            if worker not in known:
                near = nearest(worker, known)
                raise ConfigError(f"plan: group {group.name} has no engine on its worker {worker}{near}")


def _worker_of(engines: EngineConfig, entry: str) -> str:
    """The worker of an --engine, by the name that a plan has for it."""
    placed = msgspec.structs.replace(engines, engine=(entry,)).placed_urls
    return placed[0][0] or engine_name(placed[0][1]) if placed else entry


def replan_when(config: Config) -> Replan | None:
    """Raises ConfigError."""
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
    # More than are counted apart cannot be compared one by one: the first look then asks for a plan.
    return Replan(engines.replan_every_s, tuple(planned) if len(planned) <= STREAMS_MAX else ())


def replanner(config: Config) -> Callable[[Rates], tuple[PlannedGroup, ...]] | None:
    """Raises ConfigError when a file of it cannot be read."""
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
        previous = herd.replan(instance, now, previous)
        return _groups_of(previous)

    return replan
