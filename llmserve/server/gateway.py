"""The application on the port of clients, and the one of --metrics-port."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from llmserve.gateway.app import App
from llmserve.gateway.part import Listening, trusted_proxies
from llmserve.http.accepting import base_url
from llmserve.http.limits import ServerLimits
from llmserve.http.server import is_loopback, running
from llmserve.jobs.endpoints import FILES, BatchEndpoints
from llmserve.jobs.part import has_store
from llmserve.live.cluster import LiveCluster
from llmserve.observe.metrics import Metrics
from llmserve.observe.part import Followers
from llmserve.part import Part, Server
from llmserve.settings.tree import Config, aliases_of
from llmserve.tenants.limits import KeyLimits
from llmserve.tenants.part import KnownKeys
from llmserve.web.browsers import Browsers
from llmserve.web.cors import Cors

log = logging.getLogger("llmserve")

METRICS_CONNECTIONS_MAX = 64  # scrapers and probes are few


class Gateway(Part):
    """Answers clients inside the block: the last part that opens, when all that answers need is there."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        config, listening, metrics = server.config, server.get(Listening), server.get(Metrics)
        app, limits = _app(server), _limits(config)
        async with AsyncExitStack() as stack:
            if listening.state is not None:
                few = dataclasses.replace(limits, connections_max=METRICS_CONNECTIONS_MAX)
                await stack.enter_async_context(running(app.state_handler(), listening.state, few))
                log.info("metrics are at %s/metrics, without a key", base_url(listening.state))
            door = await stack.enter_async_context(running(app, listening.clients, limits))
            metrics.follow_server(door)
            if followers := server.get(Followers):
                door.on_ended(followers.tell)
            yield


def _limits(config: Config) -> ServerLimits:
    return ServerLimits(
        config.limits.body_bytes_max,
        config.live.buffer_bytes_max,
        config.limits.buffers_bytes_max,
        config.live.client_stall_s,
        keep_alive_s=config.live.keep_alive_s,
        streamed=(FILES,),
        trusted_proxies=trusted_proxies(config),
    )


def _app(server: Server) -> App:
    config, metrics, known = server.config, server.get(Metrics), server.get(KnownKeys)
    key_limits, batches, traces = server.get(KeyLimits), None, None
    if has_store(config):
        from llmserve.jobs.service import JobService

        batches = BatchEndpoints(server.get(JobService), key_limits.keys)
    if config.server.traces_sample:
        from llmserve.observe.traces import Traces

        traces = server.get(Traces)
    browsers = Browsers(
        config.server.cors_origin, config.server.allowed_host, on_loopback=is_loopback(config.server.host)
    )
    return App(
        server.get(LiveCluster),
        metrics,
        key_limits,
        config.limits,
        known.admin,
        server.reload,
        Cors(config.server.cors_origin),
        browsers,
        aliases_of(config.engines.alias),
        batches,
        metrics.meter_of_all,
        traces,
    )
