"""Where the server listens, and how requests for engines are admitted."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from llmserve.calls.client_request import ClientExchange
from llmserve.errors import ConfigError, ListenError
from llmserve.gateway.aliases import Aliases
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.forecasting import of_body
from llmserve.gateway.own_routes import OwnRoute
from llmserve.gateway.stages import Admission, Stage, identified, kind_known, of_clients, of_gateways
from llmserve.http import accepting
from llmserve.http.accepting import base_url
from llmserve.http.exchange import BodySink
from llmserve.http.proxies import TrustedProxies
from llmserve.http.server import is_loopback
from llmserve.http.tls import TlsError, server_context
from llmserve.live.cluster import LiveCluster
from llmserve.observe.counters import Families
from llmserve.part import BehindRelays, Part, Server
from llmserve.programs.known_programs import KnownPrograms
from llmserve.settings.tree import Config, aliases_of
from llmserve.tenants.keys import keys_of
from llmserve.tenants.limits import KeyLimits

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Listening:
    """The sockets of a server.

    state : of --metrics-port; None: there is none.  tls : with clients; None: plain.  url : for clients
    """

    clients: socket.socket
    state: socket.socket | None
    tls: ssl.SSLContext | None
    url: str


Upload = Callable[[ClientExchange], BodySink]
"""What takes the body of a request whose head has arrived. Raises RequestError."""


@dataclass
class OwnApi:
    """The server's own API, to which parts add their paths.

    routes  of all rooms; the first that matches answers.  uploads : by the path to which their bodies are sent
    """

    routes: list[OwnRoute] = field(default_factory=list)
    uploads: dict[str, Upload] = field(default_factory=dict)


@dataclass(frozen=True)
class Admissions:
    """The stages of requests, to which parts add theirs.

    clients    for engines.  gateways : the same of gateways in front of this server
    forecasts  for forecasts of what a call would take
    identified  the stage that finds the program of a conversation; None: this process knows of no programs
    """

    clients: Admission
    gateways: Admission
    forecasts: Admission
    identified: Stage | None = None


class Admitting(Part):
    """The stages of requests for engines."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        cluster, key_limits, config = server.get(LiveCluster), server.get(KeyLimits), server.config
        cluster.routes.paths = tuple(ENDPOINTS)
        cluster.routes.has_keys = lambda: key_limits.keys.required
        names = aliases_of(config.engines.alias)
        aliases = server.add(Aliases(names, cluster.fleet.is_up))
        told = server.get(Families).counter("llmserve_program_requests")
        programs = KnownPrograms(cluster.calls.secret, count=lambda source: told.of(source).inc())
        told_aliases = aliases if names else None
        belongs = identified(programs)
        clients = of_clients(cluster, key_limits, config.limits, told_aliases, belongs)
        asked = of_clients(cluster, key_limits, config.limits, told_aliases, kind_known(programs))
        asked.body.insert(0, of_body)
        server.add(Admissions(clients, of_gateways(clients, cluster, told_aliases), asked, belongs))
        yield


class Sockets(Part):
    """The server's ports, which are its own before anything slow. Clients that connect early wait."""

    def check(self, config: Config) -> Config:
        server = config.server
        check_clients(config)
        tls_of(config)
        if server.metrics_host is not None and server.metrics_port is None:
            raise ConfigError("metrics_host: there is no port for it to listen on: give --metrics-port, too")
        return config

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        settings = server.config.server
        with contextlib.ExitStack() as stack:
            relays = server.find(BehindRelays)
            if relays is not None:
                clients, tls, url = relays.clients, None, relays.url
            else:
                clients = stack.enter_context(listening_socket(settings.host, settings.port))
                tls = tls_of(server.config)
                url = base_url(clients, tls=tls is not None)
            state = None
            if settings.metrics_port is not None:
                state = stack.enter_context(listening_socket(settings.metrics_host or LOOPBACK, settings.metrics_port))
            server.add(Listening(clients, state, tls, url))
            server.add(OwnApi())
            yield


def check_clients(config: Config) -> None:
    """Raise ConfigError when the settings of who may reach the server contradict each other."""
    server = config.server
    check_host(server.host, may_serve_anyone=_needs_key(config) or server.anonymous)
    trusted_proxies(config)


def _needs_key(config: Config) -> bool:
    return bool(keys_of(config, warns=False).keys) or config.server.jwt_issuer is not None


def check_host(host: str, *, may_serve_anyone: bool) -> None:
    """Raise ConfigError when other machines can reach the server and nothing restricts access."""
    if not is_loopback(host) and not may_serve_anyone:
        raise ConfigError(
            f"host {host} is reachable from other machines and no API key is required: give --api-key-file FILE, "
            "or --anonymous to serve anyone"
        )


def tls_of(config: Config) -> ssl.SSLContext | None:
    """TLS with clients, of the files as they are now; None: plain HTTP. Raises ConfigError."""
    certificate, key = config.server.tls_cert, config.server.tls_key
    if certificate is None:
        if key is not None:
            raise ConfigError("tls_key: there is no certificate for it: give --tls-cert, too")
        return None
    try:
        return server_context(Path(certificate), Path(key) if key is not None else None)
    except TlsError as error:
        raise ConfigError(f"tls_cert: {error}") from error


def trusted_proxies(config: Config) -> TrustedProxies:
    """Raises ConfigError."""
    try:
        return TrustedProxies(config.server.trusted_proxy)
    except ValueError as error:
        raise ConfigError(f"trusted_proxy: {error}") from error


def listening_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket. Raises ListenError when the port is not available. shared : see accepting.py"""
    try:
        return accepting.listening_socket(host, port, shared=shared)
    except OSError as error:
        raise ListenError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
