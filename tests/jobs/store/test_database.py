"""Transactions of the store's database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest import mock

import aiosqlite
from sqlalchemy import insert

from llmserve.jobs.store.database import Database
from llmserve.jobs.store.opening import opened
from llmserve.jobs.store.sqlite import sqlite_url
from llmserve.jobs.store.tables import servers


async def begin_life(database: Database) -> None:
    made = insert(servers).values(name="server", started_at=0.0).returning(servers.c.generation)
    async with database.write() as connection:
        await connection.execute(made)


async def test_a_transaction_that_is_cancelled_before_its_rows_are_read_gives_its_lock_back(tmp_path: Path) -> None:
    database = await opened(sqlite_url(tmp_path / "jobs.sqlite"))
    reading = asyncio.Event()

    async def never_read(cursor: aiosqlite.Cursor) -> None:
        reading.set()
        await asyncio.Event().wait()

    with mock.patch.object(aiosqlite.Cursor, "fetchall", never_read):
        task = asyncio.create_task(begin_life(database))
        await reading.wait()
        task.cancel()
        await asyncio.wait([task])
    async with asyncio.timeout(10):  # the task's traceback is still there, and SQLite's lock has a patience of 30 s
        await begin_life(database)
    assert task.cancelled()
    await database.close()
