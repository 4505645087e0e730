"""Races between clients and servers, each in the order that hurts. Both databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from llmserve.errors import BadRequest, NotFound
from llmserve.jobs.objects import BatchRow, NewBatch
from llmserve.jobs.store import database
from llmserve.jobs.store.batches import BatchLimits, BatchStore
from llmserve.jobs.store.database import Database
from llmserve.jobs.store.files import FileLimits, FileStore
from llmserve.jobs.store.owner import Owned, OwnerStore, Progress
from llmserve.jobs.store.ownership import Ownership
from llmserve.jobs.store.rows import Part, Segment
from llmserve.jobs.store.servers import Servers

KEY, NOW = "red", 1000


def owned(row: BatchRow) -> Owned:
    return Owned(row.id, row.epoch, row.status)


class Member:
    """One of several servers that share a store."""

    def __init__(self, base: Database) -> None:
        self.base = base
        self.servers = Servers(base)
        self.files = FileStore(base, self.servers, FileLimits())
        self.batches = BatchStore(base, BatchLimits())
        self.work = OwnerStore(base, self.servers)
        self.ownership = Ownership(base, self.servers)

    async def upload(self, name: str = "in.jsonl") -> str:
        return (await self.files.add_file(KEY, name, Part("1-in.jsonl", 10), now_s=NOW, expires_at=None)).id

    async def create(self, file_id: str | None = None, **fields: object) -> BatchRow:
        new = NewBatch(input_file_id=file_id or await self.upload(), endpoint="/v1/completions", completion_window="1h")
        return await self.batches.create(
            KEY,
            new,
            window_s=3600,
            now_s=NOW,
            idempotency_key=fields.get("once"),
            asked="same",  # type: ignore[arg-type]
        )

    async def claimed(self, status: str = "in_progress") -> BatchRow:
        """A batch that this server owns."""
        made = await self.create()
        (row,) = await self.work.claim([owned(made)], NOW)
        for before, after in (("validating", "in_progress"), ("in_progress", "finalizing")):
            if row.status != status and row.status == before:
                assert await self.work.change(row.id, before, row.epoch, after)  # type: ignore[arg-type]
                row = await self.now(row)
        return row

    async def now(self, row: BatchRow) -> BatchRow:
        return await self.batches.batch(KEY, row.id)


@pytest.fixture
async def member(store_url: str) -> AsyncIterator[Member]:
    base = await database.opened(store_url)
    member = Member(base)
    await member.ownership.begin()
    yield member
    await member.ownership.end()
    await base.close()


@pytest.fixture
async def two(postgres_url: str) -> AsyncIterator[tuple[Member, Member]]:
    """Two servers that are alive. A folder of SQLite has only one."""
    async with AsyncExitStack() as stack:
        members = []
        for _ in range(2):
            base = await database.opened(postgres_url)
            stack.push_async_callback(base.close)
            member = Member(base)
            await member.ownership.begin()
            stack.push_async_callback(member.ownership.end)
            members.append(member)
        yield members[0], members[1]


# ---- clients against the owner --------------------------------------------------------------------------------------


async def test_cancel_while_finalizing_is_refused_and_the_batch_completes(member: Member) -> None:
    row = await member.claimed("finalizing")
    with pytest.raises(BadRequest, match="finalizing"):
        await member.batches.cancel(KEY, row.id, NOW)
    assert await member.work.finish(row, "finalizing", "completed", now_s=NOW, keep_s=None)
    assert (await member.now(row)).status == "completed"


async def test_an_owner_that_would_finalize_sees_that_the_batch_is_being_cancelled(member: Member) -> None:
    row = await member.claimed()
    await member.batches.cancel(KEY, row.id, NOW)
    assert not await member.work.change(row.id, "in_progress", row.epoch, "finalizing", finalizing_at=NOW)
    assert await member.work.finish(row, "cancelling", "cancelled", now_s=NOW, keep_s=None)
    assert (await member.now(row)).finalizing_at is None


async def test_expiry_while_cancelling_ends_as_cancelled(member: Member) -> None:
    row = await member.claimed()
    await member.batches.cancel(KEY, row.id, NOW)
    assert not await member.work.finish(row, "in_progress", "expired", now_s=NOW, keep_s=None)
    assert await member.work.finish(row, "cancelling", "cancelled", now_s=NOW, keep_s=None)
    assert (await member.now(row)).expired_at is None


async def test_cancel_and_finalize_at_once_let_one_win(member: Member) -> None:
    for _ in range(10):
        row = await member.claimed()
        cancelled, finalized = await asyncio.gather(
            member.batches.cancel(KEY, row.id, NOW),
            member.work.change(row.id, "in_progress", row.epoch, "finalizing"),
            return_exceptions=True,
        )
        assert isinstance(cancelled, BadRequest) == (finalized is True)
        assert (await member.now(row)).status == ("finalizing" if finalized is True else "cancelling")


async def test_the_input_of_a_new_batch_and_its_deletion_at_once_let_one_win(member: Member) -> None:
    for _ in range(10):
        file_id = await member.upload()
        deleted, made = await asyncio.gather(
            member.files.delete_file(KEY, file_id), member.create(file_id), return_exceptions=True
        )
        if isinstance(deleted, BadRequest):
            assert deleted.code == "file_in_use"
            assert isinstance(made, BatchRow)
        else:
            assert isinstance(made, NotFound)


async def test_twenty_creations_with_one_idempotency_key_make_one_batch(member: Member) -> None:
    file_id = await member.upload()
    made = await asyncio.gather(*(member.create(file_id, once="once") for _ in range(20)))
    assert len({row.id for row in made}) == 1


async def test_an_output_file_is_made_of_the_safe_bytes_only_once(member: Member) -> None:
    row = await member.claimed()
    segment = Segment(row.epoch, "output", "1-results.jsonl", 70)
    for _ in range(2):  # repeated after an answer that was lost
        progress = [Progress(row.id, row.epoch, 7, 0, (segment,))]
        assert await member.work.record(progress) == {row.id: "in_progress"}
    assert await member.work.change(row.id, "in_progress", row.epoch, "finalizing")
    assert await member.work.finish(row, "finalizing", "completed", now_s=NOW, keep_s=None)
    assert not await member.work.finish(row, "finalizing", "completed", now_s=NOW, keep_s=None)
    done = await member.now(row)
    assert done.completed == 7
    assert done.output_file_id is not None
    assert await member.files.parts(KEY, done.output_file_id) == [Part("1-results.jsonl", 70)]
    files, _ = await member.files.list_files(KEY, after=None, limit=9, purpose="batch_output", ascending=True)
    assert len(files) == 1


# ---- servers against each other ------------------------------------------------------------------------------------


async def test_of_many_claims_with_one_epoch_one_succeeds(member: Member) -> None:
    made = await member.create()
    claims = await asyncio.gather(*(member.work.claim([owned(made)], NOW) for _ in range(10)))
    assert len([row for rows in claims for row in rows]) == 1


async def test_two_servers_that_claim_one_batch_let_one_win(two: tuple[Member, Member]) -> None:
    for _ in range(10):
        made = await two[0].create()
        claims = await asyncio.gather(*(member.work.claim([owned(made)], NOW) for member in two))
        (won,) = [row for rows in claims for row in rows]
        assert won.owner == (await two[0].now(made)).owner
        assert not [row for row in await two[0].work.claimable() if row.id == made.id]


async def test_a_live_server_keeps_its_batches_however_long_it_is_silent(two: tuple[Member, Member]) -> None:
    await two[0].claimed()
    await two[1].ownership.bury_dead()
    assert await two[1].work.claimable() == []


async def test_the_batch_of_a_dead_server_goes_to_another_and_the_dead_one_changes_nothing(
    two: tuple[Member, Member],
) -> None:
    first, second = two
    row = await first.claimed()
    await first.ownership.end()  # its connection breaks; the process may still run
    await second.ownership.bury_dead()
    assert not await first.servers.is_alive()
    assert await first.work.record([Progress(row.id, row.epoch, 1, 0, ())]) == {}, "before another server has it"
    (free,) = await second.work.claimable()
    (mine,) = await second.work.claim([free], NOW)
    assert mine.epoch == row.epoch + 1
    assert await first.work.own(row.id, row.epoch) is None
    assert not await first.work.change(row.id, "in_progress", row.epoch, "finalizing")
    assert await first.work.claim([owned(mine)], NOW) == [], "a dead server claims nothing"
    with pytest.raises(BadRequest, match="another server"):
        await first.upload()
    assert await second.work.record([Progress(row.id, mine.epoch, 1, 0, ())]) == {row.id: "in_progress"}


async def test_a_server_that_lost_its_connection_notices_and_begins_a_new_life(two: tuple[Member, Member]) -> None:
    first, _ = two
    before = first.servers.generation
    assert await first.ownership.still_alive()
    async with first.base.engine.connect() as connection:  # an operator ends the connection that holds the lock
        await connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = "
            f"{first.servers.generation} AND pid <> pg_backend_pid()"
        )
    assert not await first.ownership.still_alive()
    assert await first.ownership.begin() > before
    assert await first.ownership.still_alive()


async def test_the_next_server_of_a_folder_takes_over_at_once(tmp_path: Path) -> None:
    url = database.sqlite_url(tmp_path / "jobs.sqlite")
    base = await database.opened(url)
    first = Member(base)
    await first.ownership.begin()
    row = await first.claimed()
    await base.close()  # without a release, as after kill -9
    base = await database.opened(url)
    second = Member(base)
    await second.ownership.begin()
    (free,) = await second.work.claimable()
    assert (free.id, free.epoch) == (row.id, row.epoch)
    await base.close()
