"""The migrations make the tables of the code, on both databases."""

from __future__ import annotations

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

import llmserve.jobs.store.migrations as migrations
from llmserve.errors import ConfigError
from llmserve.jobs.store import database
from llmserve.jobs.store.tables import metadata


async def test_the_migrations_make_the_tables_of_the_code(store_url: str) -> None:
    base = await database.opened(store_url)

    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async with base.read() as connection:
        assert await connection.run_sync(differences) == []
    await base.close()
    await (await database.opened(store_url)).close()  # a second start changes nothing


def test_the_newest_migration_is_the_one_that_a_server_expects() -> None:
    (folder,) = migrations.__path__
    assert ScriptDirectory(folder).get_current_head() == database.REVISION


async def test_tables_of_a_later_version_are_refused(store_url: str) -> None:
    base = await database.opened(store_url)
    async with base.write() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await base.close()
    with pytest.raises(ConfigError, match="another version"):
        await database.opened(store_url)


async def test_a_first_start_says_nothing_of_its_migrations(store_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await (await database.opened(store_url)).close()
    assert not [record for record in caplog.records if record.name.startswith("alembic")]


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
        await database.opened(url)


async def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as error:
        await database.opened("postgresql://user:secret@127.0.0.1:1/none")
    assert "secret" not in str(error.value)
