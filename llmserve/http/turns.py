"""Turns of reading: what one client sends fast is read while others are served."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmserve.http.connection import Connection

READ_BYTES = 64 << 10  # at most of one connection at once
TURN = 1  # Connection.hold
LONG_READ_BYTES = 4 << 10  # a longer read ends the connection's turn


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
        """Let the connection, which is held, read on when its turn comes."""
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
