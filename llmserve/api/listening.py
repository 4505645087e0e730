"""The listening socket and the HTTP server on the socket."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import uvicorn

from llmserve.errors import ConfigError, ListenError

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, *, may_serve_anyone: bool) -> None:
    """Raise ConfigError when other machines can reach the server and nothing restricts access."""
    if not is_loopback(host) and not may_serve_anyone:
        raise ConfigError(
            f"host {host} is reachable from other machines and no API key is required: give --api-key-file FILE, "
            "or --anonymous to serve anyone"
        )


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Call before any slow start. Raises ListenError when the port is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), backlog=2048, family=family)
    except OSError as error:
        raise ListenError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def accepting(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serve the application on the socket inside the block."""

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Install no handlers: llmserve handles signals and drains the cluster first."""
            yield

    server = Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
