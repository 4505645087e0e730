"""What is measured and told of a server: the use of keys, energy, metrics, traces, and a log of requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

from llmserve.calls.client_request import ClientExchange
from llmserve.engines.part import Connected
from llmserve.engines.power import GpuEnergy
from llmserve.forecasts.saver import Saver
from llmserve.http.server import is_loopback
from llmserve.live.cluster import LiveCluster
from llmserve.observe.counters import Families
from llmserve.observe.energy import EnergyMeter, MeasuredEnergy, ModelledEnergy, meter_of_all
from llmserve.observe.key_usage import KeyUsage
from llmserve.observe.metrics import Metrics
from llmserve.observe.table import TABLE
from llmserve.part import Part, Server
from llmserve.runtime.extras import need
from llmserve.settings.tree import Config

log = logging.getLogger("llmserve")


class Usage(Part):
    """The counts of what keys use. They follow the journal before any meter does: joules fall into the right span."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        families = server.add(Families(TABLE))
        if server.config.server.api_key_file:
            cluster = server.get(LiveCluster)
            usage = server.add(KeyUsage(lambda: cluster.models, families))
            cluster.journal.listen(usage.observe)
        yield


class Meters(list[EnergyMeter]):
    """The meters of the engines' energy, each with a different source."""


class Energy(Part):
    """Measures the energy of engines on this machine's GPUs, and models the energy of engines with a profile."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        cluster = server.get(LiveCluster)
        async with AsyncExitStack() as stack:
            meters = server.add(Meters())
            if (gpus := _gpus_of(server)) is not None:
                stack.callback(gpus.close)
                measured = MeasuredEnergy(gpus, of_all_work=_runs_on_local_gpus(server.config))
                await stack.enter_async_context(measured.sampling(cluster.now_s))
                meters.append(measured)
            if (modelled := _modelled(server.config)) is not None:
                cluster.journal.listen(modelled.observe)
                meters.append(modelled)
            if (usage := server.find(KeyUsage)) is not None:
                usage.meter = meter_of_all(meters)
            yield


def _gpus_of(server: Server) -> GpuEnergy | None:
    """The energy counters of the GPUs that engines here may use; None: no engine uses a GPU, or none has a counter."""
    engines = server.config.engines
    has_local = any(_are_local(engines.urls))
    if not engines.has_vllm and not has_local:
        return None
    return GpuEnergy.open(None if has_local else server.get(Connected).gpus)  # a local server may use any local GPU


def _runs_on_local_gpus(config: Config) -> bool:
    """Whether the energy of the local GPUs is that of all engines. The embedded engine uses no GPU."""
    return all(_are_local(config.engines.urls)) and not config.engines.has_embedded


def _are_local(urls: Sequence[str]) -> list[bool]:
    return [is_loopback(urlsplit(url).hostname or "") for url in urls]


def _modelled(config: Config) -> ModelledEnergy | None:
    """The modelled meter; None without profiles, or if one of them has no energy."""
    profiles = config.dispatch.profiles()
    unknown = [profile.name for profile in profiles.values() if not profile.energy_known]
    if unknown:
        log.warning("the profile %s has no energy: /metrics has no modelled joules", ", ".join(unknown))
    return ModelledEnergy(profiles) if profiles and not unknown else None


class Followers(list[Callable[[ClientExchange], None]]):
    """Hear of each request of a client that has ended."""

    def tell(self, exchange: ClientExchange) -> None:
        """Tell the followers in the next turn: the call of a request that is refused at once is not known yet."""
        asyncio.get_running_loop().call_soon(self._tell, exchange)

    def _tell(self, exchange: ClientExchange) -> None:
        for follower in self:
            try:
                follower(exchange)
            except Exception:  # the others must hear of it, too
                log.exception("a follower of ended requests failed")
        exchange.state.call = None  # the call knows the exchange, too: a cycle would stay until a full collection


@dataclass(frozen=True)
class Traced:
    """What spans tell of the scheduler. order : in force, in words.  now_s : its clock"""

    order: Callable[[], str]
    now_s: Callable[[], float]


class Measurements(Part):
    """The metrics of /metrics."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        config = server.config
        cluster = server.get(LiveCluster)
        metrics = server.add(
            Metrics(
                cluster,
                config.scheduling.full_batch,
                server.get(Meters),
                energy_known=all(profile.energy_known for profile in config.dispatch.profiles().values()),
                saver=server.find(Saver),
                families=server.get(Families),
            )
        )
        server.add(Followers())
        server.add(Traced(lambda: metrics.order, cluster.now_s))
        yield


class Traces(Part):
    """Spans of requests, sent by OTLP. Without the setting OpenTelemetry is not imported."""

    in_relays = True

    def check(self, config: Config) -> Config:
        if config.server.traces_sample:
            need("traces", "opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter", why="traces_sample")
        return config

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        if not server.config.server.traces_sample:
            yield
            return
        from llmserve.observe import traces

        traced = server.get(Traced)
        made = traces.Traces(server.config.server.traces_sample, traced.order, traced.now_s, traces.otlp())
        server.add(made)
        server.get(Followers).append(made.ended)
        try:
            yield
        finally:
            await made.close()  # after the last requests, which have spans


class AccessLog(Part):
    """A line of the log for each request that has ended."""

    in_relays = True

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        if server.config.server.access_log:
            from llmserve.observe import access_log

            access_log.enable()
            server.get(Followers).append(access_log.write)
        yield
