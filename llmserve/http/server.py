"""The server: serves a handler on a socket, and sweeps over its connections."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from llmserve.http.accepting import Acceptor
from llmserve.http.connection import Connection
from llmserve.http.exchange import Exchange, Handler, Shared, http_date
from llmserve.http.limits import ServerLimits
from llmserve.http.protocol import ConnectionProtocol, Turns, check_gone
from llmserve.runtime.freed_memory import give_back

log = logging.getLogger("llmserve")

SWEEP_S = 0.5
EVICT_AFTER_S = 0.2  # a connection that has just opened may be about to send
FREED_BYTES, GIVE_BACK_EVERY_S = 8 << 20, 2.0  # of large bodies and connections, after which memory is given back
CONNECTION_BYTES = 4 << 10  # of memory, about
CLOSE_S = 30.0


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Server:
    """A server on one socket. Twice a second a sweep cuts off clients that are late, or that leave too much unread.

    cut  connections that the server closed, by reason
    """

    def __init__(
        self, handler: Handler[Any], listener: socket.socket, limits: ServerLimits, tls: ssl.SSLContext | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.shared = Shared(handler, limits, loop.time, loop.call_soon)
        self.connections: set[Connection] = self.shared.connections.all
        self.cut: Counter[str] = self.shared.cut
        self._loop = loop
        self._turns = Turns()
        self._acceptor = Acceptor(listener, self.shared, self._protocol, self._evict, tls)
        self._sweeping: asyncio.TimerHandle | None = None
        self._sweep_s = min(SWEEP_S, limits.keep_alive_s / 4) if limits.keep_alive_s else SWEEP_S
        self._gave_back_s = -math.inf

    @property
    def buffered_bytes(self) -> int:
        """Bytes of requests, and of answers that their clients have not taken, in memory."""
        return self.shared.buffers.used_bytes

    @property
    def connections_max(self) -> int:
        return self._acceptor.connections_max

    @property
    def connected(self) -> int:
        """Number of connections, with those that are being made."""
        return self._acceptor.open

    def pass_on(self, passes: Callable[[socket.socket], bool]) -> None:
        """Ask with each connection that is accepted whether somebody else takes it; see `take`."""
        self._acceptor.passes = passes

    def take(self, connection: socket.socket) -> None:
        """Serve a connection that another server has accepted, and passed on."""
        if self.shared.closing:
            connection.close()
        else:
            self._acceptor.take(connection)

    def use(self, tls: ssl.SSLContext) -> None:
        """Speak TLS with clients that connect from now on."""
        self._acceptor.tls = tls

    def on_ended(self, follow: Callable[[Exchange[Any]], object]) -> None:
        """Call the function with each request that has ended."""
        self.shared.on_ended = follow

    # ---- connections ----

    def start(self) -> None:
        self._acceptor.start()
        self._sweep()

    def _protocol(self) -> ConnectionProtocol:
        return ConnectionProtocol(self.shared, self._turns, self._lost)

    def _lost(self, connection: Connection) -> None:
        self.shared.buffers.freed_bytes += CONNECTION_BYTES
        self._acceptor.open -= 1
        self._acceptor.start()

    def _evict(self) -> bool:
        """Close the connection that is idle for longest. False: none is idle for long enough to be in nobody's use."""
        connections, now_s = self.shared.connections, self.shared.now_s()
        for connection, since_s in connections.idle.items():
            if now_s - since_s < EVICT_AFTER_S:
                return False
            connection.cut("evicted")
            connections.discard(connection)
            return True
        return False

    # ---- sweeps ----

    def _sweep(self) -> None:
        """Look after every connection: who is late, who reads, who has heard nothing, how much is in memory."""
        self._sweeping = self._loop.call_later(self._sweep_s, self._sweep)
        self.shared.date = http_date()
        now_s = self.shared.now_s()
        unread = []
        for connection in list(self.connections):
            try:
                check_gone(connection)
                if size := connection.tick(now_s):
                    unread.append((size, connection))
            except Exception:  # the others must be looked after, too
                log.exception("a connection failed, and is cut off")
                connection.cut("failed")
        self._cut_largest(unread)
        self._give_memory_back(now_s)
        self._acceptor.sweep()

    def _cut_largest(self, unread: list[tuple[int, Connection]]) -> None:
        """Cut off the clients that leave most unread, of each holder that has more than what is free."""
        buffers = self.shared.buffers
        buffers.unread_bytes = sum([size for size, _ in unread])
        held = Counter(buffers.kept)
        for size, connection in unread:
            held[connection.holder] += size
        for size, connection in sorted(unread, key=lambda pair: -pair[0]):
            if held[connection.holder] > buffers.free_bytes:
                buffers.unread_bytes -= size
                held[connection.holder] -= size
                connection.cut("buffers_full")

    def _give_memory_back(self, now_s: float) -> None:
        buffers = self.shared.buffers
        if buffers.freed_bytes > FREED_BYTES and now_s - self._gave_back_s > GIVE_BACK_EVERY_S:
            buffers.freed_bytes, self._gave_back_s = 0, now_s
            self._loop.run_in_executor(None, give_back)

    # ---- the end ----

    async def close(self) -> None:
        """Accept nobody, let the last answers out, and close every connection within CLOSE_S.

        A client that reads nothing for CLOSE_STALL_S is cut off.
        """
        self.shared.closing = True
        self._acceptor.stop()
        for connection in list(self.connections):
            connection.close_when_answered()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self.connections or self._acceptor.arriving:  # noqa: ASYNC110 (bounded, once)
                    await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.transport.abort()
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._acceptor.close()


@contextlib.asynccontextmanager
async def running(
    handler: Handler[Any], listener: socket.socket, limits: ServerLimits, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """Serve on the socket inside the block. tls : None: plain HTTP"""
    server = Server(handler, listener, limits, tls)
    server.start()
    try:
        yield server
    finally:
        await server.close()
