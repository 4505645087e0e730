"""Every store passes the laws of conformance.py, and a store with a planted bug breaks one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conformance
import pytest
from conformance import LAWS, LAWS_OF_SEVERAL, Law, check
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection

from llmserve.jobs.store.database import Database
from llmserve.jobs.store.opening import opened, upgrade
from llmserve.jobs.store.sqlite import SQLite, sqlite_url


def name_of(law: Law) -> str:
    return law.__name__  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("law", LAWS, ids=name_of)
async def test_the_store_passes(law: Law, store_url: str) -> None:
    await check(law, lambda: opened(store_url))


@pytest.mark.parametrize("law", LAWS_OF_SEVERAL, ids=name_of)
async def test_the_store_of_several_servers_passes(law: Law, postgres_url: str) -> None:
    await check(law, lambda: opened(postgres_url))


def test_every_law_is_in_a_list() -> None:
    laws = [
        law
        for law in vars(conformance).values()
        if asyncio.iscoroutinefunction(law) and law.__module__ == "conformance"
    ]
    assert {name_of(law) for law in laws if not name_of(law).startswith("_")} - {"check"} == {
        name_of(law) for law in (*LAWS, *LAWS_OF_SEVERAL)
    }


# ---- stores with planted bugs ---------------------------------------------------------------------------------------


class Together:
    """A Presence for servers in one process. Generations are alive in the set until their server ends."""

    is_lost = False

    def __init__(self, alive: set[int]) -> None:
        self._alive, self._own = alive, 0

    async def begin(self) -> None:
        """Nothing to prepare."""

    async def hold(self, generation: int) -> None:
        self._own = generation
        self._alive.add(generation)

    async def check(self) -> None:
        """Nothing is lost."""

    async def is_dead(self, generation: int) -> bool:
        return generation not in self._alive

    async def end(self) -> None:
        self._alive.discard(self._own)


class Shared(SQLite):
    """SQLite for several servers of one process: what the planted bugs are planted in."""

    def __init__(self, path: Path, alive: set[int]) -> None:
        super().__init__(make_url(sqlite_url(path)))
        self.presence = Together(alive)


class WritersTogether(Shared):
    async def begin_write(self, connection: AsyncConnection) -> None:
        await connection.exec_driver_sql("BEGIN")


class NoTransaction(Shared):
    """Each statement takes effect at once."""

    async def begin_write(self, connection: AsyncConnection) -> None:
        pass


class NoSnapshot(Shared):
    async def begin_read(self, connection: AsyncConnection) -> None:
        pass


class NoForeignKeys(Shared):
    async def begin_write(self, connection: AsyncConnection) -> None:
        await connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
        await super().begin_write(connection)


class EveryoneIsDead(Shared):
    def __init__(self, path: Path, alive: set[int]) -> None:
        super().__init__(path, set())


class NobodyDies(Shared):
    def __init__(self, path: Path, alive: set[int]) -> None:
        super().__init__(path, alive)

        async def never(generation: int) -> bool:
            return False

        self.presence.is_dead = never


class ForgetsGenerations(Shared):
    """Numbers the next server as if the others had never been."""

    async def begin_write(self, connection: AsyncConnection) -> None:
        await super().begin_write(connection)
        await connection.exec_driver_sql("DELETE FROM sqlite_sequence")


class CutsNumbers(Shared):
    """Keeps 32 bits of the size of a file."""

    async def begin_read(self, connection: AsyncConnection) -> None:
        await connection.exec_driver_sql("UPDATE files SET bytes = bytes & 4294967295")
        await connection.commit()
        await super().begin_read(connection)


@pytest.mark.parametrize("law", [*LAWS, *LAWS_OF_SEVERAL], ids=name_of)
async def test_a_store_of_servers_in_one_process_passes(law: Law, tmp_path: Path) -> None:
    await check(law, opener(Shared, tmp_path))


@pytest.mark.parametrize(
    ("planted", "law"),
    [
        (WritersTogether, conformance.what_a_transaction_has_read_is_still_true_when_it_writes),
        (WritersTogether, conformance.a_client_waits_for_other_writers_only_as_long_as_it_may),
        (NoTransaction, conformance.a_transaction_that_fails_changes_nothing),
        (NoSnapshot, conformance.a_reader_sees_one_state_however_long_it_reads),
        (NoForeignKeys, conformance.parts_of_deleted_files_and_segments_of_deleted_batches_are_gone),
        (ForgetsGenerations, conformance.a_generation_is_never_used_again),
        (CutsNumbers, conformance.numbers_and_texts_come_back_as_they_were),
        (NobodyDies, conformance.the_next_server_takes_the_batches_of_one_that_was_killed),
        (NobodyDies, conformance.the_batch_of_a_dead_server_goes_to_another_and_the_dead_one_changes_nothing),
        (EveryoneIsDead, conformance.a_live_server_keeps_its_batches_however_long_it_is_silent),
    ],
    ids=lambda value: value.__name__,
)
async def test_a_store_with_a_planted_bug_breaks_the_law(planted: type[Shared], law: Law, tmp_path: Path) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 (an assertion, or an error of the database)
        await check(law, opener(planted, tmp_path))


def opener(kind: type[Shared], folder: Path) -> Callable[[], Any]:
    """Opens a store of this kind for one more server."""
    alive: set[int] = set()

    async def open_() -> Database:
        database = Database(kind(folder / "jobs.sqlite", alive))
        async with database.engine.connect() as connection:
            await connection.run_sync(upgrade)
            await connection.commit()
        return database

    return open_
