"""PostgreSQL as the store's database, which several servers may share."""

from __future__ import annotations

import contextlib

from sqlalchemy import URL, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from llmserve.jobs.store.database import Presence
from llmserve.runtime.extras import need

WRITER = 0x6C6C6D73  # number of the advisory lock for transactions that write
ALIVE = 0x6C6C6D74  # first number of the locks that servers hold while they live
LOCK_WRITER = text("SELECT pg_advisory_xact_lock(:lock)")
TRY = text("SELECT pg_try_advisory_lock(:kind, :generation)")
UNLOCK = text("SELECT pg_advisory_unlock(:kind, :generation)")


class AdvisoryLocks:
    """A Presence: each server holds an advisory lock with the number of its generation.

    The database releases the lock when the server's connection ends, and not before.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._connection: AsyncConnection | None = None  # holds the lock

    @property
    def is_lost(self) -> bool:
        return self._connection is not None and self._connection.invalidated

    async def begin(self) -> None:
        connection = await self._engine.connect()
        self._connection = await connection.execution_options(isolation_level="AUTOCOMMIT")

    async def hold(self, generation: int) -> None:
        await self._held().execute(TRY, {"kind": ALIVE, "generation": generation})

    async def check(self) -> None:
        await self._held().execute(text("SELECT 1"))

    async def is_dead(self, generation: int) -> bool:
        number = {"kind": ALIVE, "generation": generation}
        if not (await self._held().execute(TRY, number)).scalar():
            return False
        await self._held().execute(UNLOCK, number)
        return True

    def _held(self) -> AsyncConnection:
        assert self._connection is not None, "a server that has begun"
        return self._connection

    async def end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(SQLAlchemyError):
                await connection.invalidate()  # a connection that goes back to the pool would keep its locks
                await connection.close()


class PostgreSQL:
    """A Backend. Raises ConfigError without its driver."""

    def __init__(self, url: URL) -> None:
        need("postgres", "asyncpg", why="store postgresql")
        self.engine = create_async_engine(url.set(drivername="postgresql+asyncpg"), pool_pre_ping=True)
        self.presence: Presence = AdvisoryLocks(self.engine)

    async def begin_write(self, connection: AsyncConnection) -> None:
        await connection.execute(LOCK_WRITER, {"lock": WRITER})

    async def begin_read(self, connection: AsyncConnection) -> None:
        await connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
