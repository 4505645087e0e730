"""SQLite as the store's database: a file in a folder that one server has for itself."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import URL, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from llmserve.jobs.store.database import Presence

BUSY_S = 30  # that a server's own work waits for the lock
TRY_MS = 200  # that SQLite waits at a time: nothing can end its wait early, not even a client's limit


def sqlite_url(path: Path) -> str:
    return f"sqlite+aiosqlite:///{path}"


class SoleServer:
    """The folder belongs to this server alone: every other server of the database has died."""

    is_lost = False

    async def begin(self) -> None:
        """Nothing to prepare."""

    async def hold(self, generation: int) -> None:
        """The folder's lock is held already."""

    async def check(self) -> None:
        """Nothing is lost before the process ends."""

    async def is_dead(self, generation: int) -> bool:
        return True

    async def end(self) -> None:
        """The folder's lock ends with the process."""


class SQLite:
    """A Backend. Only the owner can read a new file."""

    def __init__(self, url: URL) -> None:
        self.presence: Presence = SoleServer()
        path = Path(url.database or "")
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self.engine = create_async_engine(url, connect_args={"isolation_level": None, "timeout": BUSY_S})
        _set_up(self.engine)

    async def begin_write(self, connection: AsyncConnection) -> None:
        """Raises OperationalError after BUSY_S."""
        until_s = time.monotonic() + BUSY_S
        while True:
            try:
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            except OperationalError as error:
                busy = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() > until_s:
                    raise
            else:
                return

    async def begin_read(self, connection: AsyncConnection) -> None:
        await connection.exec_driver_sql("BEGIN")


def _set_up(engine: AsyncEngine) -> None:
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
