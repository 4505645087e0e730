"""What is measured and told of a server: the use of keys, energy, metrics, traces, and a log of requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

from llmserve.calls.client_request import ClientExchange
from llmserve.engines.part import Connected
from llmserve.forecasts.saver import Saver
from llmserve.live.cluster import LiveCluster
from llmserve.observe.counters import Families
from llmserve.observe.energy import EnergyMeter, meter_of_all
from llmserve.observe.key_usage import KeyUsage
from llmserve.observe.metrics import Metrics
from llmserve.observe.table import TABLE
from llmserve.part import Part, Server
from llmserve.runtime.extras import need
from llmserve.settings.tree import Config

log = logging.getLogger("llmserve")


class Usage(Part):
    """Counts what each key uses. It follows the journal before any meter does, so that each span has its own joules."""

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
        from llmserve.observe.energy_meters import energy_meters

        config = server.config
        async with AsyncExitStack() as stack:
            gpus = server.get(Connected).gpus
            found = await energy_meters(config, server.get(LiveCluster), config.dispatch.profiles(), gpus, stack)
            meters = server.add(Meters(found))
            if (usage := server.find(KeyUsage)) is not None:
                usage.meter = meter_of_all(meters)
            yield


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


class Measurements(Part):
    """The metrics of /metrics."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        config = server.config
        server.add(
            Metrics(
                server.get(LiveCluster),
                config.scheduling.full_batch,
                server.get(Meters),
                energy_known=all(profile.energy_known for profile in config.dispatch.profiles().values()),
                saver=server.find(Saver),
                families=server.get(Families),
            )
        )
        server.add(Followers())
        yield


class Traces(Part):
    """Spans of requests, sent by OTLP. Without the setting OpenTelemetry is not imported."""

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

        metrics, cluster = server.get(Metrics), server.get(LiveCluster)
        made = traces.Traces(server.config.server.traces_sample, lambda: metrics.order, cluster.now_s, traces.otlp())
        server.add(made)
        server.get(Followers).append(made.ended)
        try:
            yield
        finally:
            await made.close()  # after the last requests, which have spans


class AccessLog(Part):
    """A line of the log for each request that has ended."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        if server.config.server.access_log:
            from llmserve.observe import access_log

            access_log.enable()
            server.get(Followers).append(access_log.write)
        yield
