"""Drives connections on asyncio: carries bytes between a socket and the machine; clients that send much take turns."""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable
from typing import cast

from llmserve.http.connection import TURN, Connection
from llmserve.http.exchange import Shared

READ_BYTES = 64 << 10  # at most of one connection at once
LONG_READ_BYTES = 4 << 10  # a longer read ends the connection's turn
GONE_CHECK_S = 0.02  # an interim answer's way to the client and back, at least
TCP_CLOSE = 7  # state of a socket in Linux's TCP_INFO whose other side has reset the connection


class Turns:
    """Connections that have just sent much wait here, and read on in the order in which they came.

    So all of them together cost each turn of the event loop one read, however many they are, and the short requests of
    others are read at once.
    buffer : every connection reads into it, and is done with it when its callback returns
    """

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._coming = False  # whether the next turn is on its way

    def wait(self, connection: Connection) -> None:
        """Hold the connection back until its turn comes."""
        connection.hold(TURN)
        self._waiting[connection] = None
        self._go_on()

    def leave(self, connection: Connection) -> None:
        """Forget a connection that is lost: what waits here would keep it in memory, and cost the others a turn."""
        self._waiting.pop(connection, None)

    def _go_on(self) -> None:
        if self._waiting and not self._coming:
            self._coming = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._coming = False
        if self._waiting:
            connection, _ = self._waiting.popitem(last=False)
            self._go_on()
            connection.release(TURN)


class ConnectionProtocol(asyncio.BufferedProtocol):
    """The asyncio protocol of one connection: bytes from the transport. The connection writes to the transport itself.

    on_lost : called when the connection is closed
    """

    connection: Connection

    def __init__(self, shared: Shared, turns: Turns, on_lost: Callable[[Connection], None]) -> None:
        self._shared = shared
        self._turns = turns
        self._on_lost = on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        carrying = cast(asyncio.Transport, transport)
        carrying.set_write_buffer_limits(high=self._shared.limits.buffer_bytes_max)
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        self.connection = Connection(self._shared, carrying, transport.get_extra_info("peername"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._turns.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if nbytes > LONG_READ_BYTES:
            self._turns.wait(self.connection)
        self.connection.received(self._turns.buffer[:nbytes])

    def eof_received(self) -> bool:
        if self._is_tls:
            return False  # TLS has no half of a connection: the client has gone
        is_answered = self.connection.ended()
        if is_answered:
            loop = asyncio.get_running_loop()
            for pauses in (1, 10):
                loop.call_later(pauses * GONE_CHECK_S, check_gone, self.connection)
        return is_answered

    def pause_writing(self) -> None:
        self.connection.out.pause()

    def resume_writing(self) -> None:
        self.connection.out.resume()

    def connection_lost(self, error: Exception | None) -> None:
        self._turns.leave(self.connection)
        self.connection.lost()
        self._on_lost(self.connection)


def check_gone(connection: Connection) -> None:
    """Close the connection if the client that has closed its sending side has gone altogether."""
    if not connection.half_closed or connection.out.closed:
        return
    transport = cast(asyncio.Transport, connection.transport)
    sock = transport.get_extra_info("socket")
    try:
        gone = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE
    except (OSError, AttributeError):  # no TCP, or not Linux: a closed side counts as gone
        gone = True
    if gone:
        transport.abort()
