"""The database of the store: SQLite in a folder, or PostgreSQL for several servers.

Transactions that write run one after the other, under the database's own lock from their first statement on. So what a
transaction has read is still true when it writes, on either database and for several servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from llmserve.errors import ConfigError, Unavailable
from llmserve.runtime.extras import need

REVISION = "0002"  # the newest migration; a test compares
BUSY_S = 30  # that a server's own work waits for the lock of SQLite
CLIENT_WAITS_S = 3.0  # that a client waits for it
TRY_MS = 200  # that SQLite waits at once: nothing ends its wait, a client's time neither
WRITER = 0x6C6C6D73  # number of PostgreSQL's advisory lock for transactions that write
ALIVE = 0x6C6C6D74  # first number of the locks that servers hold while they live


class Database:
    """Use `write()` for transactions that write, and `read()` for all others."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        self._turn = asyncio.Lock()  # of this process; waiting here costs less than waiting for the database's lock

    @contextlib.asynccontextmanager
    async def write(self, within_s: float | None = None) -> AsyncIterator[AsyncConnection]:
        """A transaction that is committed at the end of the block. Raises SQLAlchemyError.

        within_s : for a client, who waits: when the transaction cannot begin by then, raises Unavailable
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(within_s):
                    connection = await self._begun(stack)
            except TimeoutError:
                busy = "the database of files and batches is locked by another program, or slow"
                raise Unavailable(busy, code="store_unavailable", retry_after_s=CLIENT_WAITS_S) from None
            yield connection
            await connection.commit()

    async def _begun(self, stack: contextlib.AsyncExitStack) -> AsyncConnection:
        await stack.enter_async_context(self._turn)
        connection = await stack.enter_async_context(self.engine.connect())
        if self.is_sqlite:
            await _begin_immediate(connection)
        else:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": WRITER})
        return connection

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Statements that see one state of the database."""
        async with self.engine.connect() as connection:
            if self.is_sqlite:
                await connection.exec_driver_sql("BEGIN")
            else:
                await connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            yield connection

    async def close(self) -> None:
        await self.engine.dispose()


async def _begin_immediate(connection: AsyncConnection) -> None:
    """Begin a transaction of SQLite that writes, once no other program writes. Raises OperationalError after BUSY_S."""
    until_s = time.monotonic() + BUSY_S
    while True:
        try:
            await connection.exec_driver_sql("BEGIN IMMEDIATE")
        except OperationalError as error:
            if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                raise
        else:
            return


def sqlite_url(path: Path) -> str:
    return f"sqlite+aiosqlite:///{path}"


async def opened(url: str) -> Database:
    """Open a database, and bring its tables to this version. Raises ConfigError."""
    database = Database(_engine(url))
    try:
        async with database.write() as connection:
            if await connection.run_sync(_revision) != REVISION:
                await connection.run_sync(_migrate)
    except (SQLAlchemyError, OSError) as error:
        await database.close()
        cause = getattr(error, "orig", None) or error
        raise ConfigError(f"store: cannot use {make_url(url).render_as_string()}: {cause}") from error
    return database


def _engine(url: str) -> AsyncEngine:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigError(f"store: {url!r} is no URL of a database, such as postgresql://HOST/NAME") from error
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        need("postgres", "asyncpg", why="store postgresql")
        return create_async_engine(parsed.set(drivername="postgresql+asyncpg"), pool_pre_ping=True)
    if backend != "sqlite":
        raise ConfigError(f"store: {backend} is not supported; use postgresql://HOST/NAME")
    path = Path(parsed.database or "")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    engine = create_async_engine(parsed, connect_args={"isolation_level": None, "timeout": BUSY_S})

    @event.listens_for(engine.sync_engine, "connect")
    def set_up(connection: object, record: object) -> None:
        cursor = connection.cursor()  # type: ignore[attr-defined]
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.execute(f"PRAGMA busy_timeout = {TRY_MS}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "invalidate")
    def roll_back(connection: Any, record: object, error: BaseException | None) -> None:
        """End the transaction of a cancelled task before its connection is closed.

        SQLite keeps the locks of a closed connection as long as one of its statements lives. A statement whose rows
        were not read lives in the traceback of the task.
        """
        rolling_back = asyncio.ensure_future(connection.driver_connection.rollback())
        rolling_back.add_done_callback(lambda done: done.cancelled() or done.exception())

    return engine


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar())


def _migrate(connection: Connection) -> None:
    from alembic import command  # takes longer to import than the rest of the store
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(files("llmserve.jobs.store") / "migrations"))
    config.attributes["connection"] = connection
    logging.getLogger("alembic").setLevel(logging.WARNING)  # a start that makes tables says nothing of how
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise ConfigError(f"store: its tables are of another version of llmserve: {error}") from error
