"""Opens the store's database by its URL, and brings its tables to this version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import URL, Column, Connection, insert, inspect, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.schema import CreateColumn

from llmserve.errors import ConfigError
from llmserve.jobs.store.database import Backend, Database
from llmserve.jobs.store.postgresql import PostgreSQL
from llmserve.jobs.store.sqlite import SQLite
from llmserve.jobs.store.tables import ADDED, metadata, version

BACKENDS: dict[str, Callable[[URL], Backend]] = {"sqlite": SQLite, "postgresql": PostgreSQL}


async def opened(url: str) -> Database:
    """Open a database. Raises ConfigError."""
    database = Database(_backend(url))
    try:
        async with database.write() as connection:
            await connection.run_sync(upgrade)
    except (SQLAlchemyError, OSError) as error:
        await database.close()
        cause = getattr(error, "orig", None) or error
        raise ConfigError(f"store: cannot use {make_url(url).render_as_string()}: {cause}") from error
    except ConfigError:
        await database.close()
        raise
    return database


def _backend(url: str) -> Backend:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigError(f"store: {url!r} is no URL of a database, such as postgresql://HOST/NAME") from error
    backend = BACKENDS.get(parsed.get_backend_name())
    if backend is None:
        raise ConfigError(f"store: {parsed.get_backend_name()} is not supported; use postgresql://HOST/NAME")
    return backend(parsed)


def upgrade(connection: Connection) -> None:
    """Create the tables, or add what an earlier version lacks. Raises ConfigError for a later version."""
    newest = list(ADDED)[-1]
    has_tables = inspect(connection).has_table(version.name)
    found = connection.execute(select(version.c.version_num)).scalar() if has_tables else None
    if found is None:
        metadata.create_all(connection)
        connection.execute(insert(version).values(version_num=newest))
    elif found not in ADDED:
        raise ConfigError(f"store: its tables are of another version of llmserve: {found}, and not {newest}")
    elif found != newest:
        versions = list(ADDED)
        for later in versions[versions.index(found) + 1 :]:
            for column in ADDED[later]:
                _add(connection, column)
        connection.execute(update(version).values(version_num=newest))


def _add(connection: Connection, column: Column[Any]) -> None:
    definition = CreateColumn(column).compile(dialect=connection.dialect)
    connection.execute(text(f"ALTER TABLE {column.table.name} ADD COLUMN {definition}"))
