"""Where the server listens."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

from llmserve.errors import ConfigError
from llmserve.http.proxies import TrustedProxies
from llmserve.http.server import base_url, check_host, listening_socket
from llmserve.part import Part, Server
from llmserve.settings.tree import Config
from llmserve.tenants.keys import keys_of

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Listening:
    """The sockets of a server. state : of --metrics-port; None: there is none"""

    clients: socket.socket
    state: socket.socket | None

    @property
    def url(self) -> str:
        return base_url(self.clients)


class Sockets(Part):
    """The server's ports, which are its own before anything slow. Clients that connect early wait."""

    def check(self, config: Config) -> Config:
        server = config.server
        check_host(server.host, may_serve_anyone=bool(keys_of(config).keys) or server.anonymous)
        TrustedProxies(server.trusted_proxy)
        if server.metrics_host is not None and server.metrics_port is None:
            raise ConfigError("metrics_host: there is no port for it to listen on: give --metrics-port, too")
        return config

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        settings = server.config.server
        with contextlib.ExitStack() as stack:
            clients = stack.enter_context(listening_socket(settings.host, settings.port))
            state = None
            if settings.metrics_port is not None:
                state = stack.enter_context(listening_socket(settings.metrics_host or LOOPBACK, settings.metrics_port))
            server.add(Listening(clients, state))
            yield
