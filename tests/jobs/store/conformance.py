"""What a store must do, law by law, whatever its database. A new database belongs to llmserve when it passes.

    LAWS             of each store
    LAWS_OF_SEVERAL  of a store that several servers may share

A law is a coroutine function of a Store. It raises AssertionError, or any other exception, when it is broken.
Nothing here needs pytest: `for law in LAWS: await check(law, open_)`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

from sqlalchemy import insert, select, text, update

from llmserve.errors import BadRequest, NotFound, RequestError, Unavailable
from llmserve.jobs.objects import BatchRow, NewBatch, Status
from llmserve.jobs.store.batches import BatchLimits, BatchStore
from llmserve.jobs.store.database import Database
from llmserve.jobs.store.files import FileLimits, FileStore
from llmserve.jobs.store.owner import Owned, OwnerStore, Progress
from llmserve.jobs.store.rows import Part, Segment
from llmserve.jobs.store.servers import Servers
from llmserve.jobs.store.tables import servers

KEY, NOW, TIMES = "red", 1000, 10
LAW_S = 60.0  # that a law may take

Open = Callable[[], Awaitable[Database]]
"""Opens the store under test, empty at first, for one more server."""


class Member:
    """One of the servers that share a store."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.servers = Servers(database)
        self.files = FileStore(database, self.servers, FileLimits())
        self.batches = BatchStore(database, BatchLimits())
        self.work = OwnerStore(database, self.servers)

    async def upload(self, name: str = "in.jsonl") -> str:
        return (await self.files.add_file(KEY, name, Part("1-in.jsonl", 10), now_s=NOW, expires_at=None)).id

    async def create(self, file_id: str | None = None, once: str | None = None) -> BatchRow:
        new = NewBatch(input_file_id=file_id or await self.upload(), endpoint="/v1/completions", completion_window="1h")
        return await self.batches.create(KEY, new, window_s=3600, now_s=NOW, idempotency_key=once, asked="same")

    async def claimed(self, status: Status = "in_progress") -> BatchRow:
        """A batch that this server owns."""
        made = await self.create()
        (row,) = await self.work.claim([owned(made)], NOW)
        path: tuple[tuple[Status, Status], ...] = (("validating", "in_progress"), ("in_progress", "finalizing"))
        for before, after in path:
            if row.status != status and row.status == before:
                assert await self.work.change(row.id, before, row.epoch, after)
                row = await self.now(row)
        return row

    async def now(self, row: BatchRow) -> BatchRow:
        return await self.batches.batch(KEY, row.id)


def owned(row: BatchRow) -> Owned:
    return Owned(row.id, row.epoch, row.status)


class Store:
    """A store under test. Everything that was opened is closed at the end of the block."""

    def __init__(self, open_: Open, stack: AsyncExitStack) -> None:
        self._open, self._stack = open_, stack

    async def database(self) -> Database:
        """The database, opened once more."""
        database = await self._open()
        self._stack.push_async_callback(database.close)
        return database

    async def member(self) -> Member:
        """A server that has begun."""
        member = Member(await self.database())
        await member.servers.begin()
        self._stack.push_async_callback(member.servers.end)
        return member


async def check(law: Law, open_: Open) -> None:
    """Raise an exception when the store breaks the law, or takes too long."""
    async with asyncio.timeout(LAW_S), AsyncExitStack() as stack:
        await law(Store(open_, stack))


Law = Callable[[Store], Awaitable[None]]


@contextlib.contextmanager
def refused(kind: type[RequestError], code: str | None = None) -> Iterator[None]:
    """The block raises an error of this kind, with this code."""
    refusal: RequestError | None = None
    try:
        yield
    except kind as error:
        refusal = error
    assert refusal is not None, f"not refused: {kind.__name__}"
    assert code in (None, refusal.code), f"refused as {refusal.code}, not as {code}"


async def _named(database: Database) -> str:
    async with database.read() as connection:
        return str((await connection.execute(select(servers.c.name))).scalar())


async def _name(database: Database, name: str) -> None:
    async with database.write() as connection:
        await connection.execute(insert(servers).values(name=name, started_at=0.0))


# ---- transactions ---------------------------------------------------------------------------------------------------


async def what_a_transaction_has_read_is_still_true_when_it_writes(store: Store) -> None:
    databases = [await store.database(), await store.database()]
    await _name(databases[0], "0")

    async def count(database: Database) -> None:
        async with database.write() as connection:
            seen = int((await connection.execute(select(servers.c.name))).scalar_one())
            await asyncio.sleep(0)
            await connection.execute(update(servers).values(name=str(seen + 1)))

    await asyncio.gather(*(count(database) for database in databases * TIMES))
    assert await _named(databases[0]) == str(len(databases) * TIMES)


async def a_transaction_that_fails_changes_nothing(store: Store) -> None:
    database = await store.database()
    await _name(database, "before")
    with contextlib.suppress(ZeroDivisionError):
        async with database.write() as connection:
            await connection.execute(update(servers).values(name="after"))
            raise ZeroDivisionError
    assert await _named(database) == "before"


async def a_transaction_that_is_cancelled_gives_the_lock_of_writers_back(store: Store) -> None:
    database, other = await store.database(), await store.database()
    writing = asyncio.Event()

    async def hold() -> None:
        async with database.write() as connection:
            await connection.execute(insert(servers).values(name="held", started_at=0.0))
            writing.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await writing.wait()
    task.cancel()
    await asyncio.wait([task])
    async with other.write(within_s=LAW_S / 2) as connection:
        assert (await connection.execute(select(servers.c.name))).all() == []


async def a_transaction_that_has_returned_is_seen_by_all_servers(store: Store) -> None:
    first, second = await store.database(), await store.database()
    for number in range(TIMES):
        async with first.write() as connection:
            await connection.execute(text("DELETE FROM servers"))
            await connection.execute(insert(servers).values(name=str(number), started_at=0.0))
        assert await _named(second) == str(number)


async def a_reader_sees_one_state_however_long_it_reads(store: Store) -> None:
    reading, writing = await store.database(), await store.database()
    await _name(writing, "before")
    async with reading.read() as connection:
        seen = [(await connection.execute(select(servers.c.name))).scalar_one()]
        async with writing.write() as other:
            await other.execute(update(servers).values(name="after"))
        seen.append((await connection.execute(select(servers.c.name))).scalar_one())
    assert seen == ["before", "before"]
    assert await _named(reading) == "after"


async def a_client_waits_for_other_writers_only_as_long_as_it_may(store: Store) -> None:
    first, second = await store.database(), await store.database()
    async with first.write():
        with refused(Unavailable, "store_unavailable"):
            async with second.write(within_s=0.05):
                raise AssertionError("two transactions write at once")
    await _name(second, "afterwards")


# ---- rows -----------------------------------------------------------------------------------------------------------


async def a_generation_is_never_used_again(store: Store) -> None:
    member, lives = await store.member(), []
    for _ in range(3):
        lives.append(member.servers.generation)
        await member.work.release()
        await member.servers.begin()
    assert lives == sorted(set(lives))


async def parts_of_deleted_files_and_segments_of_deleted_batches_are_gone(store: Store) -> None:
    member = await store.member()
    row = await member.claimed()
    await member.work.record([Progress(row.id, row.epoch, 1, 0, (Segment(row.epoch, "output", "1-out.jsonl", 7, 8),))])
    assert await member.files.names() == {"1-in.jsonl", "1-out.jsonl"}
    async with member.database.write() as connection:
        await connection.execute(text("DELETE FROM batches"))
        await connection.execute(text("DELETE FROM files"))
    assert await member.files.names() == set()


async def lists_are_in_the_order_of_creation_and_have_pages(store: Store) -> None:
    member = await store.member()
    made = [await member.upload(f"{number}") for number in range(5)]
    after, pages = None, []
    for _ in range(3):
        rows, more = await member.files.list_files(KEY, after=after, limit=2, purpose=None, ascending=True)
        pages.append([row.id for row in rows])
        after = rows[-1].id
        assert more == (len(pages) < 3)
    assert pages == [made[:2], made[2:4], made[4:]]
    newest, _ = await member.files.list_files(KEY, after=None, limit=1, purpose=None, ascending=False)
    assert [row.id for row in newest] == made[-1:]
    others, _ = await member.files.list_files("blue", after=None, limit=9, purpose=None, ascending=True)
    assert others == [], "another key sees none of them"


async def numbers_and_texts_come_back_as_they_were(store: Store) -> None:
    member, large = await store.member(), (1 << 62) + 1
    name = "ein 'Name' \U0001f600 \\ % \"\n"
    made = await member.files.add_file(KEY, name, Part("1-x.jsonl", large, 0xFFFFFFFF), now_s=large, expires_at=None)
    assert await member.files.file(KEY, made.id) == made
    assert (made.filename, made.bytes, made.created_at, made.expires_at) == (name, large, large, None)
    assert await member.files.parts(KEY, made.id) == [Part("1-x.jsonl", large, 0xFFFFFFFF)]


# ---- clients against the owner --------------------------------------------------------------------------------------


async def a_batch_that_finalizes_is_not_cancelled(store: Store) -> None:
    member = await store.member()
    row = await member.claimed("finalizing")
    with refused(BadRequest, "batch_not_cancellable"):
        await member.batches.cancel(KEY, row.id, NOW)
    assert await member.work.finish(row, "finalizing", "completed", now_s=NOW, keep_s=None)
    assert (await member.now(row)).status == "completed"


async def an_owner_does_not_finalize_a_batch_that_is_being_cancelled(store: Store) -> None:
    member = await store.member()
    row = await member.claimed()
    await member.batches.cancel(KEY, row.id, NOW)
    assert not await member.work.change(row.id, "in_progress", row.epoch, "finalizing", finalizing_at=NOW)
    assert await member.work.finish(row, "cancelling", "cancelled", now_s=NOW, keep_s=None)
    assert (await member.now(row)).finalizing_at is None


async def a_batch_that_is_being_cancelled_does_not_expire(store: Store) -> None:
    member = await store.member()
    row = await member.claimed()
    await member.batches.cancel(KEY, row.id, NOW)
    assert not await member.work.finish(row, "in_progress", "expired", now_s=NOW, keep_s=None)
    assert await member.work.finish(row, "cancelling", "cancelled", now_s=NOW, keep_s=None)
    assert (await member.now(row)).expired_at is None


async def of_a_cancellation_and_a_finalization_at_once_one_wins(store: Store) -> None:
    member = await store.member()
    for _ in range(TIMES):
        row = await member.claimed()
        cancelled, finalized = await asyncio.gather(
            member.batches.cancel(KEY, row.id, NOW),
            member.work.change(row.id, "in_progress", row.epoch, "finalizing"),
            return_exceptions=True,
        )
        assert isinstance(cancelled, BadRequest) == (finalized is True)
        assert (await member.now(row)).status == ("finalizing" if finalized is True else "cancelling")


async def of_a_new_batch_and_the_deletion_of_its_input_at_once_one_wins(store: Store) -> None:
    member = await store.member()
    for _ in range(TIMES):
        file_id = await member.upload()
        deleted, made = await asyncio.gather(
            member.files.delete_file(KEY, file_id), member.create(file_id), return_exceptions=True
        )
        if isinstance(deleted, BadRequest):
            assert deleted.code == "file_in_use"
            assert isinstance(made, BatchRow)
        else:
            assert isinstance(made, NotFound)


async def creations_with_one_idempotency_key_make_one_batch(store: Store) -> None:
    member = await store.member()
    file_id = await member.upload()
    made = await asyncio.gather(*(member.create(file_id, once="once") for _ in range(2 * TIMES)))
    assert len({row.id for row in made}) == 1


async def an_output_file_is_made_once_and_of_the_safe_bytes(store: Store) -> None:
    member = await store.member()
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


# ---- servers against each other -------------------------------------------------------------------------------------


async def of_many_claims_with_one_epoch_one_succeeds(store: Store) -> None:
    member = await store.member()
    made = await member.create()
    claims = await asyncio.gather(*(member.work.claim([owned(made)], NOW) for _ in range(TIMES)))
    assert len([row for rows in claims for row in rows]) == 1


async def the_next_server_takes_the_batches_of_one_that_was_killed(store: Store) -> None:
    first = await store.member()
    row = await first.claimed()
    await first.servers.end()  # as the end of a process does
    await first.database.close()
    second = await store.member()
    (free,) = await second.work.claimable()
    assert (free.id, free.epoch) == (row.id, row.epoch)
    (mine,) = await second.work.claim([free], NOW)
    assert (mine.epoch, mine.owner) == (row.epoch + 1, second.servers.generation)


async def two_servers_that_claim_one_batch_let_one_win(store: Store) -> None:
    two = await store.member(), await store.member()
    for _ in range(TIMES):
        made = await two[0].create()
        claims = await asyncio.gather(*(member.work.claim([owned(made)], NOW) for member in two))
        (won,) = [row for rows in claims for row in rows]
        assert won.owner == (await two[0].now(made)).owner
        assert not [row for row in await two[0].work.claimable() if row.id == made.id]


async def a_live_server_keeps_its_batches_however_long_it_is_silent(store: Store) -> None:
    first, second = await store.member(), await store.member()
    await first.claimed()
    await second.servers.bury_dead()
    assert await second.work.claimable() == []
    assert await first.servers.still_alive()


async def the_batch_of_a_dead_server_goes_to_another_and_the_dead_one_changes_nothing(store: Store) -> None:
    first, second = await store.member(), await store.member()
    row = await first.claimed()
    await first.servers.end()  # its connection breaks; the process may still run
    await second.servers.bury_dead()
    assert first.servers.generation not in await second.servers.alive()
    assert await first.work.record([Progress(row.id, row.epoch, 1, 0, ())]) == {}, "before another server has it"
    (free,) = await second.work.claimable()
    (mine,) = await second.work.claim([free], NOW)
    assert mine.epoch == row.epoch + 1
    assert await first.work.own(row.id, row.epoch) is None
    assert not await first.work.change(row.id, "in_progress", row.epoch, "finalizing")
    assert await first.work.claim([owned(mine)], NOW) == [], "a dead server claims nothing"
    with refused(BadRequest, "upload_lost"):
        await first.upload()
    assert await second.work.record([Progress(row.id, mine.epoch, 1, 0, ())]) == {row.id: "in_progress"}


async def a_server_that_counts_as_dead_begins_a_new_life(store: Store) -> None:
    first, second = await store.member(), await store.member()
    before = first.servers.generation
    await first.servers.end()
    await second.servers.bury_dead()
    assert await first.servers.begin() > before
    assert await first.servers.still_alive()
    assert await second.servers.still_alive()


LAWS: tuple[Law, ...] = (
    what_a_transaction_has_read_is_still_true_when_it_writes,
    a_transaction_that_fails_changes_nothing,
    a_transaction_that_is_cancelled_gives_the_lock_of_writers_back,
    a_transaction_that_has_returned_is_seen_by_all_servers,
    a_reader_sees_one_state_however_long_it_reads,
    a_client_waits_for_other_writers_only_as_long_as_it_may,
    a_generation_is_never_used_again,
    parts_of_deleted_files_and_segments_of_deleted_batches_are_gone,
    lists_are_in_the_order_of_creation_and_have_pages,
    numbers_and_texts_come_back_as_they_were,
    a_batch_that_finalizes_is_not_cancelled,
    an_owner_does_not_finalize_a_batch_that_is_being_cancelled,
    a_batch_that_is_being_cancelled_does_not_expire,
    of_a_cancellation_and_a_finalization_at_once_one_wins,
    of_a_new_batch_and_the_deletion_of_its_input_at_once_one_wins,
    creations_with_one_idempotency_key_make_one_batch,
    an_output_file_is_made_once_and_of_the_safe_bytes,
    of_many_claims_with_one_epoch_one_succeeds,
    the_next_server_takes_the_batches_of_one_that_was_killed,
)
LAWS_OF_SEVERAL: tuple[Law, ...] = (
    two_servers_that_claim_one_batch_let_one_win,
    a_live_server_keeps_its_batches_however_long_it_is_silent,
    the_batch_of_a_dead_server_goes_to_another_and_the_dead_one_changes_nothing,
    a_server_that_counts_as_dead_begins_a_new_life,
)
