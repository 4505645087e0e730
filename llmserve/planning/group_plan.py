"""The plan of serving groups, as the server of one group and as a gateway follow it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from llmserve.engines.kinds import engine_name
from llmserve.errors import ConfigError
from llmserve.live.homes import Homes
from llmserve.planning.assignment import served_by
from llmserve.planning.planning import Plan
from llmserve.settings.tree import Config, EngineConfig
from llmserve.spelling import nearest

FALLBACK = "fallback"  # the group of all that no group of the plan names; a plan may also name this group


def with_plan(config: Config) -> Config:
    """Check the plan's file before any slow start. With `group` set, keep only the group's engines.

    Raises ConfigError.
    """
    engines = config.engines
    assert engines.plan is not None
    plan = Plan.load(engines.plan)
    if engines.group is None:
        _check_groups(engines, plan)
        return config
    remaining = _engines_of_group(engines, engines.group, plan)
    return msgspec.structs.replace(config, engines=msgspec.structs.replace(engines, engine=remaining))


def _engines_of_group(engines: EngineConfig, group: str, plan: Plan) -> tuple[str, ...]:
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
    """Return the models that the server of one group is for."""
    engines = config.engines
    if engines.plan is None or engines.group is None:
        return set()
    return _models_of(engines.group, Plan.load(engines.plan))


def _models_of(name: str, plan: Plan) -> set[str]:
    return {model for group in plan.groups if group.name == name for model in served_by(group)}


def homes_of(config: Config) -> Homes | None:
    """Return where a gateway with a plan sends the requests of models and streams; None: this is no such gateway."""
    if config.engines.plan is None or not config.engines.engines_are_groups:
        return None
    groups = Plan.load(config.engines.plan).groups
    return Homes(
        {model: group.name for group in groups for model in group.models},
        {pair: group.name for group in groups for pair in group.streams},
    )


def served_models(config: Config) -> Callable[[str], bool]:
    """Return a test of whether to serve a model that an engine lists: the model of --model, or those of --group."""
    engines = config.engines
    # Engines that llmserve starts serve only --model; vLLM's adapters count as further models, and are served.
    only = None if engines.has_vllm or engines.has_embedded else engines.model
    if engines.plan is None or engines.group is None:
        return lambda model: only in (None, model)
    plan = Plan.load(engines.plan)
    own = _models_of(engines.group, plan)
    elsewhere = {model for group in plan.groups if group.name != engines.group for model in group.models}
    takes_rest = engines.group == FALLBACK
    return lambda model: only in (None, model) and (model in own or (takes_rest and model not in elsewhere))


def _check_groups(engines: EngineConfig, plan: Plan) -> None:
    """Raise ConfigError on a group without a server, of a gateway."""
    servers = {_worker_of(engines, entry) for entry in engines.engine}
    for group in plan.groups:
        if group.name not in servers:
            near = nearest(group.name, servers)
            raise ConfigError(f"plan: no engine {group.name}=URL is the server of the group {group.name}{near}")


def _worker_of(engines: EngineConfig, entry: str) -> str:
    """Return the name that a plan uses for the worker of an --engine entry."""
    placed = msgspec.structs.replace(engines, engine=(entry,)).placed_urls
    return placed[0][0] or engine_name(placed[0][1]) if placed else entry
