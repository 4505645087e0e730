"""The driver of a server: it runs the requests on the engines, and takes other engines while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import msgspec

from llmserve.engines.kinds import EngineTls, Servers, engine_name
from llmserve.engines.openai import OpenAIEngine
from llmserve.engines.part import Connected
from llmserve.errors import ConfigError
from llmserve.forecasts.learned_state import SECRET_BYTES, LearnedState, learned_before
from llmserve.forecasts.lengths import Forecasts
from llmserve.forecasts.part import RunningPredictors, forecaster
from llmserve.forecasts.record import LengthRecord
from llmserve.forecasts.saver import Saver
from llmserve.forecasts.state_file import StateFile
from llmserve.live.cluster import LiveCluster
from llmserve.live.fleet import Fleet
from llmserve.live.homes import Homes
from llmserve.live.journal import Header, Journal
from llmserve.live.membership import SETTINGS
from llmserve.part import Commit, Part, Server
from llmserve.settings.by_model import PREFIX, by_model
from llmserve.settings.tree import Config, EngineConfig
from llmserve.spelling import nearest

log = logging.getLogger("llmserve")


@dataclass(frozen=True)
class Served:
    """What a plan says that the server serves.

    is_served  whether the server serves a model that an engine lists
    models     that engines will list some day
    homes      of a gateway with a plan: which group has which models and streams
    """

    is_served: Callable[[str], bool]
    models: Collection[str] = ()
    homes: Homes | None = None


@dataclass(frozen=True)
class ByUrl:
    """Makes the clients of engines by URL that come while the server runs, with what was learnt of them before."""

    learned: LearnedState
    servers: Servers

    def client(self, url: str, worker: str = "") -> OpenAIEngine:
        engine = self.servers.client(url, worker)
        self.learned.recall(engine)
        return engine


class Live(Part):
    """The scheduler and its driver, with what was learned before the start."""

    changeable = frozenset({"engine"})

    def check(self, config: Config) -> Config:
        engines, scheduling = config.engines, config.scheduling
        if engines.barrier and engines.slots is not None and engines.slots < scheduling.full_batch:
            raise ConfigError(f"slots: {engines.slots} slots cannot run a batch of {scheduling.full_batch} at once")
        try:
            scheduling.scheduler()
            config.dispatch.solvers(scheduling, barrier=config.barrier)
            for profile in config.dispatch.profiles().values():
                if profile.misfit:
                    log.warning("profile %s: %s", profile.name, profile.misfit)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if scheduling.goes_by_times and not config.dispatch.profile:
            log.warning(
                "order %s without --profile: the duration of batches is not known, so requests are given up only after "
                "their deadlines",
                scheduling.order,
            )
        return config

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        config, kept = server.config, server.find(StateFile)
        served = server.get(Served)
        engines, predictors = server.get(Connected).engines, server.get(RunningPredictors)
        learned = learned_before(config, kept, predictors, engines)
        forecasts = predictors[""].forecasts if "" in predictors else ()
        header = Header(
            config.scheduling,
            config.scheduling.scores(forecasts),
            config.scheduling.likely_lengths(forecasts),
            learnt=learned.models,
            programs=learned.programs,
        )
        cluster = LiveCluster(
            header.scheduler(),
            Fleet(
                engines,
                config.live,
                is_served=served.is_served,
                profiles=config.dispatch.profiles(),
                planned=set(served.models),
                homes=served.homes,
            ),
            Journal(header, path=Path(config.server.journal) if config.server.journal else None),
            forecasts=Forecasts(
                forecaster(config, predictors, learned.learners),
                LengthRecord(Path(config.prediction.record)) if config.prediction.record else None,
                learned.prompt_tokens,
            ),
            solvers=config.dispatch.solvers(config.scheduling, barrier=config.barrier),
            secret=_secret_of(config.engines) or learned.secret,
        )
        cluster.routes.engines_are_groups = config.engines.engines_are_groups
        cluster.routes.origins = learned.origins
        async with AsyncExitStack() as stack:
            if kept is not None:
                saver = server.add(Saver(kept, lambda: learned.saving(cluster.scheduler, cluster.fleet.engines)))
                stack.push_async_callback(saver.close)  # after the cluster's end, when the last answers are learned
                saver.start()
            stack.push_async_callback(cluster.close)
            server.add(cluster)
            server.add(ByUrl(learned, Servers(server.config, server.get(EngineTls))))
            yield

    @contextlib.asynccontextmanager
    async def run(self, server: Server) -> AsyncIterator[None]:
        cluster = server.get(LiveCluster)
        cluster.start()
        warning = asyncio.create_task(_warn_of_unserved(server.config, cluster))
        try:
            yield
        finally:
            warning.cancel()
            cluster.abort()  # while the server still listens: clients can be told

    def change(self, server: Server, before: Config, after: Config) -> Commit:
        """Engines by URL. An engine that is not named any more gets no new requests, and goes when it is empty."""
        added, removed = _changes(before.engines, after.engines)
        Servers(msgspec.structs.replace(server.config, engines=after.engines)).check()
        membership, by_url = server.get(LiveCluster).membership, server.get(ByUrl)
        return lambda: membership.change(
            SETTINGS, {name: partial(by_url.client, url, worker) for name, (worker, url) in added.items()}, removed
        )


def _secret_of(engines: EngineConfig) -> bytes | None:
    """The key of hashes that all gateways of the same groups have, so that a session has one id; None: no gateway."""
    if not engines.engines_are_groups or not engines.engine_api_key:
        return None
    return blake2b(engines.engine_api_key.encode(), digest_size=SECRET_BYTES, person=b"hashes").digest()


def _changes(old: EngineConfig, new: EngineConfig) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """The engines that were added, as (worker, URL) by name, and the names of those removed. Raises ConfigError."""
    if old.engine == new.engine:
        return {}, set()
    if not (old.urls or old.sources) or (old.has_vllm, old.has_embedded) != (new.has_vllm, new.has_embedded):
        raise ConfigError("engine: only URLs can change while the server runs: restart it")
    new.check()
    before = {engine_name(url): (worker, url) for worker, url in old.placed_urls}
    after = {engine_name(url): (worker, url) for worker, url in new.placed_urls}
    for name in before.keys() & after.keys():
        if before[name][0] != after[name][0]:
            raise ConfigError(f"engine: the worker of {name} cannot change while the server runs: restart it")
    if not after and not new.sources:
        raise ConfigError("engine: the last URL cannot go while the server runs")
    return {name: after[name] for name in after.keys() - before.keys()}, before.keys() - after.keys()


async def _warn_of_unserved(config: Config, cluster: LiveCluster) -> None:
    """Wait until all engines are up, then warn of settings for models that no engine serves."""
    if config.engines.group is not None:  # servers of other groups may serve the other models
        return
    while not (cluster.engines_ready and all(cluster.engines_ready.values())):  # noqa: ASYNC110 (no event to wait for)
        await asyncio.sleep(0.2)
    slos_ms = [text for text in config.limits.slo_ms if text.startswith(PREFIX)]
    for setting, texts in (
        ("profile", config.dispatch.profile),
        ("predictor", config.prediction.predictor),
        ("slo_ms", slos_ms),
    ):
        for model in sorted(set(by_model(setting, texts)) - {""} - set(cluster.models)):
            log.warning("%s: no engine serves a model %s%s", setting, model, nearest(model, cluster.models))
