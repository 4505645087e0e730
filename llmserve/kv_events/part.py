"""Which engines' KV events are followed, by the settings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from llmserve.calls.in_flight import InFlightCall
from llmserve.engines.kinds import engine_name
from llmserve.errors import ConfigError
from llmserve.kv_events.following import Count, Following
from llmserve.kv_events.tokenizing import Tokenizing
from llmserve.live.cluster import LiveCluster
from llmserve.observe.counters import Counter, Families, Family
from llmserve.part import Part, Server
from llmserve.runtime.extras import need
from llmserve.runtime.lasting import lasting
from llmserve.settings.engines import kv_events_of
from llmserve.settings.tree import Config


class KvEvents(Part):
    """Follows what engines tell of their caches."""

    def check(self, config: Config) -> Config:
        if config.engines.kv_events:
            _sockets(config)
            need("kv-events", "zmq", why="--kv-events")
        return config

    @contextlib.asynccontextmanager
    async def run(self, server: Server) -> AsyncIterator[None]:
        if not server.config.engines.kv_events:
            yield
            return
        import zmq.asyncio

        cluster, context = server.get(LiveCluster), zmq.asyncio.Context()
        counted = server.get(Families).counter("llmserve_engine_cache_events")
        followed: dict[str, Tokenizing] = {}
        tasks = []
        for name, (endpoint, replay) in _sockets(server.config).items():
            count = _counting(counted, name)
            following = Following(name, endpoint, replay, cluster.driver.step, count)
            engine = cluster.fleet.handles[name].engine
            followed[name] = Tokenizing(name, following.chains, engine.pass_on, count)
            tasks.append(lasting(f"the KV events of {name}", partial(following.follow, context)))

        def ended(in_flight: InFlightCall) -> None:
            if in_flight.call.blocks and in_flight.receipt is not None:
                tokenizing = followed.get(in_flight.receipt.engine)
                if tokenizing is not None:
                    tokenizing.answered(in_flight)

        cluster.calls.on_ended.append(ended)
        try:
            yield
        finally:
            cluster.calls.on_ended.remove(ended)
            for tokenizing in followed.values():
                tokenizing.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            context.destroy(linger=0)


def _counting(family: Family[Counter], engine: str) -> Count:
    def count(what: str, number: int) -> None:
        family.of(engine, what).inc(number)

    return count


def _sockets(config: Config) -> dict[str, tuple[str, str]]:
    """The sockets of each engine that is followed, by its name. Raises ConfigError."""
    names = [engine_name(url) for url in config.engines.urls]
    found: dict[str, tuple[str, str]] = {}
    for engine, sockets in kv_events_of(config.engines.kv_events):
        name = names[0] if not engine and len(names) == 1 else engine
        if name not in names:
            which = f"no engine is {name}" if name else "several engines, or none by URL"
            raise ConfigError(f"kv_events: {which}: name the engine, ENGINE=tcp://HOST:PORT, one of {', '.join(names)}")
        if name in found:
            raise ConfigError(f"kv_events: {name} is given twice")
        found[name] = sockets
    return found
