"""Turns of reading: what one client sends fast is read while others are served."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmserve.api.connection import Connection

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
        self._waiting: deque[Connection] = deque()

    def wait(self, connection: Connection) -> None:
        """Let the connection, which is held, read on when its turn comes."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        connection = self._waiting.popleft()
        if self._waiting:
            self._loop.call_soon(self._next)
        connection.release(TURN)
