"""A server on loopback that echoes requests, and clients that send it raw bytes, for several tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from llmserve.http.accepting import listening_socket
from llmserve.http.errors import Refusal
from llmserve.http.exchange import Answer, Exchange
from llmserve.http.limits import ServerLimits
from llmserve.http.server import Server, running

POST = b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\nhello"


class Echo:
    """Answers each request with its method, path and body; keeps those that `/held` names.

    `/none` takes no body, and `/of/NAME` belongs to a key of that name.
    """

    def __init__(self) -> None:
        self.held: list[Exchange[None]] = []
        self.gone: list[Exchange[None]] = []
        self.ended = 0
        self.refusals: list[str] = []

    def new_state(self) -> None:
        return None

    def admit(self, exchange: Exchange[None]) -> Exception | None:
        def end() -> None:
            self.ended += 1

        exchange.on_end = end
        exchange.keeps_body = exchange.path != "/none"
        if exchange.path.startswith("/of/"):
            exchange.holder = exchange.path.removeprefix("/of/")
        return Refusal(401, "no_key", "no key") if exchange.path == "/secret" else None

    def handle(self, exchange: Exchange[None]) -> None:
        exchange.on_gone = lambda: self.gone.append(exchange)
        if exchange.path == "/held" or exchange.query == b"held":
            self.held.append(exchange)
        else:
            exchange.respond(200, [], f"{exchange.method} {exchange.path} ".encode() + exchange.body)

    def refusal(self, error: Exception, exchange: Exchange[None] | None) -> Answer:
        assert isinstance(error, Refusal)
        self.refusals.append(error.reason)
        return error.status, [], error.reason.encode()


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """The next answer that is not an interim one."""
        async with asyncio.timeout(20):
            head = await self.reader.readuntil(b"\r\n\r\n")
            status = int(head.split()[1])
            if status < 200:
                return await self.answer()
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            return status, await self.reader.readexactly(int(fields[b"content-length"]))

    async def rest(self) -> bytes:
        async with asyncio.timeout(20):
            return await self.reader.read()


class Site:
    def __init__(self, server: Server, echo: Echo, port: int) -> None:
        self.server = server
        self.echo = echo
        self.port = port
        self._clients: list[Client] = []
        self._later_s = 0.0
        now_s = server.shared.now_s
        server.shared.now_s = lambda: now_s() + self._later_s

    def later(self, seconds: float) -> None:
        """Let the server's clock, not the event loop's, show a later time."""
        self._later_s += seconds

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            client.writer.close()


@asynccontextmanager
async def site(**limits: Any) -> AsyncIterator[Site]:
    """A running server. limits : as in ServerLimits."""
    echo = Echo()
    with listening_socket("127.0.0.1", 0) as listener:
        all_limits = ServerLimits(**{**LIMITS, **limits})
        async with running(echo, listener, all_limits) as server:
            made = Site(server, echo, listener.getsockname()[1])
            try:
                yield made
            finally:
                await made.close()


LIMITS = {
    "body_bytes_max": 1 << 20,
    "buffer_bytes_max": 1 << 20,
    "buffers_bytes_max": 1 << 30,
    "client_stall_s": 60.0,
}
