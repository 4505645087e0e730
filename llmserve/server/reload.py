"""Keys, limits, weights, budgets, engines by URL and plans are read again while the server runs: all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from llmserve.engines.kinds import Servers, engine_name
from llmserve.errors import ConfigError
from llmserve.live.driver import LiveCluster
from llmserve.planning import group_plan
from llmserve.planning.regroup import Regrouper
from llmserve.settings.tree import Config, EngineConfig
from llmserve.tenants.keys import default_limits, keys_of
from llmserve.tenants.limits import KeyLimits

CHANGEABLE = {"concurrent_max", "requests_per_minute_max", "tokens_per_minute_max", "engine", "limits_part"}
"""Settings that may change. limits_part counts at the next start only: the controller of a cluster deals the parts."""

Commit = Callable[[], None]
Part = Callable[[Config, Config], Commit]
"""Checks new settings (before, after), in a thread; returns what puts them into effect. Raises ConfigError."""


class Reloader:
    """Reads the settings again, and has all parts of the server check them before any changes.

    config  the settings at the start
    read    reads the settings again. Raises ConfigError. None: they stay, and only the files that they name are read
    """

    def __init__(self, config: Config, read: Callable[[], Config] | None = None) -> None:
        self._config = config
        self._read = read or (lambda: config)
        self._parts: list[Part] = []
        self._one_at_a_time = asyncio.Lock()

    def add(self, part: Part) -> None:
        self._parts.append(part)

    @property
    def has_parts(self) -> bool:
        """Whether a server has started, so that there is something to change."""
        return bool(self._parts)

    async def reload(self) -> None:
        """Raises ConfigError, which says what is wrong; then nothing has changed."""
        async with self._one_at_a_time:
            after, commits = await asyncio.to_thread(self._checked)
            for commit in commits:
                commit()
            self._config = after

    def _checked(self) -> tuple[Config, list[Commit]]:
        before, after = self._config, self._read()
        for section in before.__struct_fields__:
            old, new = getattr(before, section), getattr(after, section)
            changed = {name for name in old.__struct_fields__ if getattr(old, name) != getattr(new, name)}
            if fixed := sorted(changed - CHANGEABLE):
                raise ConfigError(f"{', '.join(fixed)}: cannot change while the server runs: restart it")
        return after, [part(before, after) for part in self._parts]


def keys_part(key_limits: KeyLimits) -> Part:
    """Keys, and everything that the key file says of them."""

    def prepare(before: Config, after: Config) -> Commit:
        file, defaults = keys_of(after), default_limits(after)
        return lambda: key_limits.change(file, defaults)

    return prepare


def engines_part(config: Config, cluster: LiveCluster) -> Part:
    """Engines by URL. An engine that is not named any more gets no new requests, and goes when it is empty.

    config : with the defaults that depend on the engines
    """

    def prepare(before: Config, after: Config) -> Commit:
        old, new = before.engines, after.engines
        added, removed = _changes(old, new)
        servers = Servers(msgspec.structs.replace(config, engines=new))
        servers.check()

        def commit() -> None:
            for name in removed:
                cluster.fleet.remove(cluster.fleet.handles[name])
            for engine in servers.connect() if added else []:
                if engine.info.name in added:
                    cluster.fleet.add(engine)

        return commit

    return prepare


def plan_part(regrouper: Regrouper) -> Part:
    """The groups of --plan: its file is read again, and the groups change while requests go on."""

    def prepare(before: Config, after: Config) -> Commit:
        group_plan.with_plan(after)
        planned = group_plan.planned_groups(after)
        return lambda: regrouper.change_to(planned)

    return prepare


def _changes(old: EngineConfig, new: EngineConfig) -> tuple[set[str], set[str]]:
    """Names of the engines that were added and removed. Raises ConfigError."""
    if old.engine == new.engine:
        return set(), set()
    if not old.urls or (old.has_vllm, old.has_embedded) != (new.has_vllm, new.has_embedded):
        raise ConfigError("engine: only URLs can change while the server runs: restart it")
    new.check()
    before = {engine_name(url): worker for worker, url in old.placed_urls}
    after = {engine_name(url): worker for worker, url in new.placed_urls}
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            raise ConfigError(f"engine: the worker of {name} cannot change while the server runs: restart it")
    if not after:
        raise ConfigError("engine: the last URL cannot go while the server runs")
    return after.keys() - before.keys(), before.keys() - after.keys()
