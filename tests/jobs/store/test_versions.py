"""Stores of earlier versions open, with their batches."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, inspect, text, update

from llmserve.errors import ConfigError
from llmserve.jobs.store.batches import BatchLimits, BatchStore
from llmserve.jobs.store.files import FileLimits, FileStore
from llmserve.jobs.store.opening import opened
from llmserve.jobs.store.owner import OwnerStore
from llmserve.jobs.store.rows import Part, Segment
from llmserve.jobs.store.servers import Servers
from llmserve.jobs.store.sqlite import sqlite_url
from llmserve.jobs.store.tables import ADDED, version

STORES = Path(__file__).parent / "stores"


def shape(connection: Connection) -> dict[str, Any]:
    """Columns, indexes and constraints of all tables."""
    inspector = inspect(connection)
    return {
        table: (
            [(column["name"], str(column["type"]), column["nullable"]) for column in inspector.get_columns(table)],
            sorted((index["name"], index["column_names"]) for index in inspector.get_indexes(table)),
            sorted(unique["column_names"] for unique in inspector.get_unique_constraints(table)),
            inspector.get_pk_constraint(table)["constrained_columns"],
            [
                (key["constrained_columns"], key["referred_table"], key["options"])
                for key in inspector.get_foreign_keys(table)
            ],
        )
        for table in inspector.get_table_names()
    }


async def shape_of(url: str) -> dict[str, Any]:
    database = await opened(url)
    async with database.read() as connection:
        found = await connection.run_sync(shape)
    await database.close()
    return found


@pytest.mark.parametrize("made_by", ADDED)
async def test_a_store_of_an_earlier_version_opens_with_its_batches(made_by: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    with sqlite3.connect(path) as old:
        old.executescript((STORES / f"{made_by}.sql").read_text())
    for _ in range(2):  # a second start changes nothing
        assert await shape_of(sqlite_url(path)) == await shape_of(sqlite_url(tmp_path / "new.sqlite"))
    database = await opened(sqlite_url(path))
    servers = Servers(database)
    assert await servers.begin() == 2
    owner = OwnerStore(database, servers)
    (free,) = await owner.claimable()
    (batch,) = await owner.claim([free], 2000)
    assert (batch.id, batch.status, batch.epoch, batch.completed) == ("batch_a", "in_progress", 2, 1)
    crc, crc_of_results = (77, 88) if made_by == "0002" else (None, None)
    assert await owner.input(batch) == [Part("1-in.jsonl", 10, crc)]
    assert await owner.segments(batch.id) == [Segment(1, "output", "1-out.jsonl", 70, crc_of_results)]
    assert await BatchStore(database, BatchLimits()).batch("red", "batch_a") == batch
    made = await FileStore(database, servers, FileLimits()).add_file(
        "red", "b", Part("2-b", 1, 9), now_s=1, expires_at=1
    )
    assert made.seq == 2
    await database.close()


async def test_tables_without_what_a_version_added_get_it(store_url: str) -> None:
    new = await shape_of(store_url)
    database = await opened(store_url)
    first, *later = ADDED
    async with database.write() as connection:
        for column in [column for name in later for column in ADDED[name]]:
            await connection.execute(text(f"ALTER TABLE {column.table.name} DROP COLUMN {column.name}"))
        await connection.execute(update(version).values(version_num=first))
    await database.close()
    assert await shape_of(store_url) == new


async def test_tables_of_a_later_version_are_refused(store_url: str) -> None:
    database = await opened(store_url)
    async with database.write() as connection:
        await connection.execute(update(version).values(version_num="9999"))
    await database.close()
    with pytest.raises(ConfigError, match="another version"):
        await opened(store_url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("no url", "is no URL"),
        ("mysql://host/name", "mysql is not supported"),
        ("postgresql://nobody@127.0.0.1:1/none", "cannot use"),
    ],
)
async def test_a_wrong_store_is_an_error_of_the_settings(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await opened(url)


async def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as error:
        await opened("postgresql://user:secret@127.0.0.1:1/none")
    assert "secret" not in str(error.value)
