"""The database of the store, and what a database must do for it.

Transactions that write run one after the other, under the database's own lock from their first statement on. So what a
transaction has read is still true when the transaction writes, also with several servers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from llmserve.errors import Unavailable

CLIENT_WAITS_S = 3.0  # for the lock of writers


class Presence(Protocol):
    """The way in which servers find out which servers are alive. Silence is no sign of death.

    is_lost : whether other servers may now count this one as dead
    """

    @property
    def is_lost(self) -> bool: ...

    async def begin(self) -> None:
        """Prepare for a new life of this server."""
        ...

    async def hold(self, generation: int) -> None:
        """Be alive under a generation, until `end` or the end of the process. No other server can know it yet."""
        ...

    async def check(self) -> None:
        """Find out whether the life is lost. Raises SQLAlchemyError."""
        ...

    async def is_dead(self, generation: int) -> bool:
        """Whether the server of another generation has died. Raises SQLAlchemyError."""
        ...

    async def end(self) -> None:
        """End this server's life."""
        ...


class Backend(Protocol):
    """A kind of database for the store; tests/jobs/store/conformance.py has its laws.

    presence : of a server that uses this database
    """

    engine: AsyncEngine
    presence: Presence

    async def begin_write(self, connection: AsyncConnection) -> None:
        """Begin a transaction, once no other transaction of any server writes."""
        ...

    async def begin_read(self, connection: AsyncConnection) -> None:
        """Begin a transaction whose statements see one state of the database."""
        ...


class Database:
    """The transactions of the store: `write()` for those that write, `read()` for all others."""

    def __init__(self, backend: Backend) -> None:
        self.engine, self.presence = backend.engine, backend.presence
        self._backend = backend
        self._turn = asyncio.Lock()  # of this process; waiting here costs less than waiting for the database's lock

    @contextlib.asynccontextmanager
    async def write(self, within_s: float | None = None) -> AsyncIterator[AsyncConnection]:
        """A transaction that is committed at the end of the block. Raises SQLAlchemyError.

        within_s : for a client who waits: Unavailable is raised if the transaction cannot begin within that time
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(within_s):
                    await stack.enter_async_context(self._turn)
                    connection = await stack.enter_async_context(self.engine.connect())
                    await self._backend.begin_write(connection)
            except TimeoutError:
                busy = "the database of files and batches is locked by another program, or slow"
                raise Unavailable(busy, code="store_unavailable", retry_after_s=CLIENT_WAITS_S) from None
            yield connection
            await connection.commit()

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Statements that see one state of the database."""
        async with self.engine.connect() as connection:
            await self._backend.begin_read(connection)
            yield connection

    async def close(self) -> None:
        await self.engine.dispose()
