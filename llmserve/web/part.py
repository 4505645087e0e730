"""What clients reach: the page, the server's own paths, and the front that answers all requests."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Container
from contextlib import AsyncExitStack
from pathlib import Path

from llmserve.gateway.aliases import Aliases
from llmserve.gateway.answers import Refusals
from llmserve.gateway.completions import BeginTrace, Completions
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.forecasting import PATH as FORECAST
from llmserve.gateway.forecasting import Forecasting
from llmserve.gateway.part import Admissions, Listening, OwnApi, tls_of, trusted_proxies
from llmserve.http.accepting import base_url
from llmserve.http.limits import ServerLimits
from llmserve.http.proxies import TrustedProxies
from llmserve.http.server import Server as HttpServer
from llmserve.http.server import is_loopback, running
from llmserve.jobs.sums import JobSums
from llmserve.live.cluster import LiveCluster
from llmserve.observe.metrics import Metrics
from llmserve.observe.part import Followers
from llmserve.observe.watch import Watch
from llmserve.part import BehindRelays, Commit, Part, Server, do_nothing
from llmserve.settings.tree import Config
from llmserve.tenants.authentication import Keys
from llmserve.tenants.guards import admin_key, any_key, client_key
from llmserve.tenants.limits import KeyLimits
from llmserve.tenants.part import KnownKeys
from llmserve.web.admin import AdminEndpoints
from llmserve.web.app import App, Watcher
from llmserve.web.browsers import Browsers
from llmserve.web.cors import Cors
from llmserve.web.documents import DocumentEndpoints
from llmserve.web.models import ModelEndpoints
from llmserve.web.page import PageEndpoints
from llmserve.web.responses import ResponseEndpoints
from llmserve.web.site import Site
from llmserve.web.state import StateEndpoints

log = logging.getLogger("llmserve")

METRICS_CONNECTIONS_MAX = 64  # scrapers and probes are few


class Page(Part):
    """The page for people. Where clients need keys, only an operator sees what the page shows."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        required, admin = server.get(KeyLimits).keys.required, server.get(KnownKeys).admin
        key = admin_key(admin, "/events") if required else any_key(())
        watch = Watch(server.get(LiveCluster), server.get(Metrics).meter_of_all)
        server.get(OwnApi).routes += PageEndpoints(watch, key, server.find(JobSums)).routes
        yield


class OwnPaths(Part):
    """Models, responses, the state of the server, operators' paths, and the document of them all."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        cluster, limits, admin = server.get(LiveCluster), server.get(KeyLimits), server.get(KnownKeys).admin
        keys, routes = limits.keys, server.get(OwnApi).routes
        any_of = tuple([known for known in (keys, admin) if known is not None]) if keys.required else ()
        key, bare_key = client_key(keys), client_key(keys, bare=True)
        routes += ModelEndpoints(cluster, server.get(Aliases), bare_key).routes
        routes += ResponseEndpoints(cluster, key).routes
        routes += StateEndpoints(cluster, server.get(Metrics), any_key(any_of)).routes
        file = server.config.server.api_key_file
        routes += AdminEndpoints(
            cluster, admin_key(admin), limits, server.reload, Path(file) if file is not None else None
        ).routes
        routes += DocumentEndpoints(routes, cluster, bare_key).routes
        yield


class Front(Part):
    """Answers clients inside the block: the last part that opens, when all that answers need is there."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        listening, metrics = server.get(Listening), server.get(Metrics)
        refusals, uploads = Refusals(metrics.refused), tuple(server.get(OwnApi).uploads)
        proxies = trusted_proxies(server.config) if server.find(BehindRelays) is None else TrustedRelays()
        limits = server_limits(server.config, uploads, proxies)
        async with AsyncExitStack() as stack:
            if listening.state is not None:
                everybody = StateEndpoints(server.get(LiveCluster), metrics, any_key(()))
                few = dataclasses.replace(limits, connections_max=METRICS_CONNECTIONS_MAX)
                await stack.enter_async_context(running(Site(everybody.routes, refusals), listening.state, few))
                log.info("metrics are at %s/metrics, without a key", base_url(listening.state))
            front = await stack.enter_async_context(
                running(_app(server, refusals), listening.clients, limits, listening.tls)
            )
            server.add(front)
            if server.find(BehindRelays) is None:  # else the connections of clients are the relays'
                metrics.follow_server(front)
            if followers := server.get(Followers):
                front.on_ended(followers.tell)
            yield

    def change(self, server: Server, before: Config, after: Config) -> Commit:
        """The certificate, which is renewed now and then."""
        tls = tls_of(after)
        if tls is None or server.find(BehindRelays) is not None:
            return do_nothing
        return lambda: server.get(HttpServer).use(tls)


def server_limits(config: Config, streamed: Container[str], proxies: TrustedProxies) -> ServerLimits:
    """The limits of a server of clients.

    streamed : the paths whose bodies are taken as they come.  proxies : whose word on the client's address is taken
    """
    return ServerLimits(
        config.limits.body_bytes_max,
        config.live.buffer_bytes_max,
        config.limits.buffers_bytes_max,
        config.live.client_stall_s,
        keep_alive_s=config.live.keep_alive_s,
        streamed=streamed,
        trusted_proxies=proxies,
    )


class TrustedRelays(TrustedProxies):
    """The relays of the server are its only clients, and the last address that they tell is the client's."""

    def __init__(self) -> None:
        super().__init__(())

    def __bool__(self) -> bool:
        return True

    def client_of(self, peer: str, forwarded: str) -> str:
        return forwarded.rpartition(",")[2].strip()


def _app(server: Server, refusals: Refusals) -> App:
    config, api, admissions = server.config, server.get(OwnApi), server.get(Admissions)
    cluster = server.get(LiveCluster)
    completions = Completions(cluster, admissions.clients, admissions.gateways, begin_trace_of(server))
    cors, watchers = watchers_of(config, server.get(KeyLimits).keys)
    return App(
        completions,
        Forecasting(cluster, admissions.forecasts),
        Site(api.routes, refusals, api.uploads, (*ENDPOINTS, FORECAST)),
        cors=cors,
        watchers=watchers,
        body_bytes_max=config.limits.body_bytes_max,
    )


def watchers_of(config: Config, keys: Keys) -> tuple[Cors | None, list[Watcher]]:
    """Who sees the head of each request first: what browsers may send, and what web pages do while no key is needed."""
    settings = config.server
    cors = Cors(settings.cors_origin) if settings.cors_origin else None
    browsers = Browsers(settings.cors_origin, settings.allowed_host, on_loopback=is_loopback(settings.host))
    watchers: list[Watcher] = [cors.allow] if cors is not None else []
    watchers.append(lambda exchange: None if keys.required else browsers.check(exchange))
    return cors, watchers


def begin_trace_of(server: Server) -> BeginTrace | None:
    """What begins the traces of requests; None: the settings ask for none."""
    if not server.config.server.traces_sample:
        return None
    from llmserve.observe.traces import Traces

    return server.get(Traces).begin
