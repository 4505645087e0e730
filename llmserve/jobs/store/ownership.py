"""Which servers are alive. The answer never depends on how long a server was silent.

A folder of SQLite has one server, which holds the folder's lock. With PostgreSQL each server holds an advisory lock
whose number is its generation, and the database gives the lock back when the server's connection ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from llmserve.jobs.store.database import ALIVE, Database
from llmserve.jobs.store.servers import Servers

TRY = text("SELECT pg_try_advisory_lock(:kind, :generation)")
UNLOCK = text("SELECT pg_advisory_unlock(:kind, :generation)")


class Ownership:
    """Takes a generation for this server, and finds servers that have died. All methods raise SQLAlchemyError."""

    def __init__(self, database: Database, servers: Servers) -> None:
        self._database, self._servers = database, servers
        self._connection: AsyncConnection | None = None  # holds the lock; PostgreSQL only

    async def begin(self) -> int:
        """Begin a life. Returns the generation."""
        await self.end()
        if not self._database.is_sqlite:
            connection = await self._database.engine.connect()
            self._connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
        generation = await self._servers.begin(f"{socket.gethostname()}:{os.getpid()}", time.time(), self._hold)
        await self.bury_dead()
        return generation

    async def _hold(self, generation: int) -> None:
        """Take the lock of a generation that nobody else can know yet."""
        if self._connection is not None:
            await self._connection.execute(TRY, {"kind": ALIVE, "generation": generation})

    async def still_alive(self) -> bool:
        """Whether the generation of this server still stands. Finds the servers that have died."""
        try:
            if self._connection is not None:
                await self._connection.execute(text("SELECT 1"))
            await self.bury_dead()
        except SQLAlchemyError:
            if self._connection is not None and self._connection.invalidated:
                return False
            raise
        return self._database.is_sqlite or await self._servers.is_alive()

    async def bury_dead(self) -> None:
        for generation in await self._servers.others():
            if await self._is_dead(generation):
                await self._servers.bury(generation)

    async def _is_dead(self, generation: int) -> bool:
        if self._connection is None:
            return True  # the folder is this server's alone
        number = {"kind": ALIVE, "generation": generation}
        if not (await self._connection.execute(TRY, number)).scalar():
            return False
        await self._connection.execute(UNLOCK, number)
        return True

    async def end(self) -> None:
        """Give the lock back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(SQLAlchemyError):
                await connection.invalidate()  # a connection that goes back to the pool would keep its locks
                await connection.close()
