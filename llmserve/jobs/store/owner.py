"""Batches in the database, as their owners use them: the servers that run their lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import bindparam, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llmserve.jobs.objects import ACTIVE, BatchRow, LineError, Status
from llmserve.jobs.store.database import Database
from llmserve.jobs.store.rows import (
    Part,
    Segment,
    batch_row,
    change,
    insert_file,
    is_alive,
    parts_of,
    shown,
    sound_rows,
)
from llmserve.jobs.store.servers import GENERATIONS, Servers
from llmserve.jobs.store.tables import batches, segments, servers

CLAIMS_MAX = 100  # in one transaction

# What every server asks every second is built once.
SEEN = select(batches.c.id, batches.c.epoch, batches.c.status).where(batches.c.status.in_(ACTIVE))
OWNED = SEEN.where(batches.c.owner == bindparam("owner"))
FREE = batches.c.owner.is_(None) | batches.c.owner.not_in(GENERATIONS)
CLAIMABLE = SEEN.where(FREE).order_by(batches.c.expires_at, batches.c.seq).limit(bindparam("most"))


class Progress(NamedTuple):
    """The progress of a batch: new segments, and the bytes of all segments that are safe now."""

    batch_id: str
    epoch: int
    completed: int
    failed: int
    segments: tuple[Segment, ...]


class Owned(NamedTuple):
    """The few fields of a batch by which an owner notices a change."""

    id: str
    epoch: int
    status: Status


class Kept(NamedTuple):
    """The readable results of a batch with damage."""

    segments: Sequence[Segment]
    completed: int
    failed: int


class OwnerStore:
    """The operations of owners on batches. All raise SQLAlchemyError. servers : this server among all"""

    def __init__(self, database: Database, servers: Servers) -> None:
        self._database, self.servers = database, servers

    async def owned(self) -> list[Owned]:
        """The active batches of this server."""
        async with self._database.read() as connection:
            rows = await connection.execute(OWNED, {"owner": self.servers.generation})
            return [Owned(*row) for row in rows]

    async def alive(self) -> set[int]:
        """The generations that count as alive; this server's always does."""
        return {self.servers.generation, *await self.servers.alive()}

    async def claimable(self, most: int = CLAIMS_MAX) -> list[Owned]:
        """Active batches without an owner that counts as alive, the earliest deadlines first."""
        async with self._database.read() as connection:
            rows = await connection.execute(CLAIMABLE, {"most": most})
            return [Owned(*row) for row in rows]

    async def claim(self, seen: Sequence[Owned], now_s: int) -> list[BatchRow]:
        """Become the owner of batches that were seen so. Returns those of which nobody else was faster.

        A batch whose row makes no sense fails at once.
        """
        claimed = []
        async with self._database.write() as connection:
            if not await is_alive(connection, self.servers.generation):
                return []
            for one in seen:
                same = batches.c.id == one.id, batches.c.epoch == one.epoch, batches.c.status.in_(ACTIVE)
                values = {"owner": self.servers.generation, "epoch": one.epoch + 1}
                taken = update(batches).where(*same).values(values).returning(batches)
                if (row := (await connection.execute(taken)).one_or_none()) is not None:
                    claimed.append(row)
            sound = sound_rows(claimed)
            for damaged in {row.id for row in claimed} - {row.id for row in sound}:
                await connection.execute(update(batches).where(batches.c.id == damaged).values(_given_up(now_s)))
        return sound

    async def release(self) -> None:
        """Give up all batches of this server, which ends."""
        async with self._database.write() as connection:
            await connection.execute(
                update(batches).where(batches.c.owner == self.servers.generation).values(owner=None)
            )
            await connection.execute(delete(servers).where(servers.c.generation == self.servers.generation))

    async def own(self, batch_id: str, epoch: int) -> BatchRow | None:
        """The batch as it is now; None: it has ended, or another server has taken it."""
        mine = batches.c.id == batch_id, batches.c.epoch == epoch, batches.c.status.in_(ACTIVE)
        async with self._database.read() as connection:
            row = (await connection.execute(select(batches).where(*mine))).one_or_none()
            return batch_row(row) if row is not None else None

    async def give_up(self, batch_id: str, epoch: int, now_s: int) -> None:
        """Let a batch fail whose row makes no sense."""
        same = batches.c.id == batch_id, batches.c.epoch == epoch, batches.c.status.in_(ACTIVE)
        async with self._database.write() as connection:
            await connection.execute(update(batches).where(*same).values(_given_up(now_s)))

    async def input(self, batch: BatchRow) -> list[Part] | None:
        """Where the input of a batch is; None: its file is gone."""
        async with self._database.read() as connection:
            return await parts_of(connection, batch.input_file_id) or None

    async def segments(self, batch_id: str) -> list[Segment]:
        """All segments of a batch, in the order of its owners."""
        async with self._database.read() as connection:
            return await segments_of(connection, batch_id)

    async def tokens_queued(self, key: str) -> int:
        """Estimated tokens of the key's batches that are in progress."""
        running = batches.c.key == key, batches.c.status == "in_progress"
        async with self._database.read() as connection:
            total = await connection.execute(select(func.coalesce(func.sum(batches.c.tokens), 0)).where(*running))
            return int(total.scalar_one())

    async def change(self, batch_id: str, before: Status, epoch: int, after: Status, **values: Any) -> bool:
        """Change the status, if status and epoch are still these."""
        async with self._database.write() as connection:
            return await change(connection, batch_id, before, epoch, after, **values)

    async def record(self, progress: Sequence[Progress]) -> dict[str, Status]:
        """Note that results are safe. May be repeated. Returns the statuses of the batches that are still owned."""
        statuses: dict[str, Status] = {}
        async with self._database.write() as connection:
            if not await is_alive(connection, self.servers.generation):
                return {}  # the files of this server may have been swept
            for one in progress:
                mine = batches.c.id == one.batch_id, batches.c.epoch == one.epoch, batches.c.status.in_(ACTIVE)
                counted = update(batches).where(*mine).values(completed=one.completed, failed=one.failed)
                status = (await connection.execute(counted.returning(batches.c.status))).scalar()
                if status is None:
                    continue
                statuses[one.batch_id] = status
                for segment in one.segments:
                    await keep(connection, one.batch_id, segment)
        return statuses

    async def finish(
        self,
        batch: BatchRow,
        before: Status,
        after: Status,
        *,
        now_s: int,
        keep_s: int | None,
        kept: Kept | None = None,
        errors: Sequence[LineError] = (),
    ) -> bool:
        """End a batch, and make files of its safe results. keep_s : seconds that these files are kept; None: for ever.

        kept : what is left of results that were damaged.  errors : why the batch ends
        False: status or epoch has changed.
        """
        if batch.output_expires_s is not None:
            keep_s = batch.output_expires_s
        expires_at = now_s + keep_s if keep_s is not None else None
        async with self._database.write() as connection:
            values: dict[str, Any] = {f"{after}_at": now_s}
            if errors:
                values["errors"] = list(errors)
            if kept is not None:
                values |= {"completed": kept.completed, "failed": kept.failed}
            if not await change(connection, batch.id, before, batch.epoch, after, **values):
                return False
            safe = kept.segments if kept is not None else await segments_of(connection, batch.id)
            ids: dict[str, str] = {}
            for kind in ("output", "error"):
                pieces = [
                    Part(one.name, one.safe_bytes, one.crc) for one in safe if one.kind == kind and one.safe_bytes
                ]
                if pieces:
                    name = f"{batch.id}_{kind}.jsonl"
                    made = await insert_file(connection, batch.key, name, "batch_output", pieces, now_s, expires_at)
                    ids[f"{kind}_file_id"] = made.id
            await connection.execute(delete(segments).where(segments.c.batch_id == batch.id))
            if ids:
                await connection.execute(update(batches).where(batches.c.id == batch.id).values(**ids))
            return True


def _given_up(now_s: int) -> dict[str, Any]:
    """The values for a batch with a damaged row: a sound row that says so to the client."""
    errors = [LineError("row_damaged", "The row of this batch in the database was damaged.")]
    gone: dict[str, Any] = {f"{s}_at": None for s in ("in_progress", "finalizing", "completed", "expired")}
    gone |= dict.fromkeys(("cancelling_at", "cancelled_at", "metadata", "output_expires_s"))
    gone |= dict.fromkeys(("output_file_id", "error_file_id", "idempotency_key"))
    zero = dict.fromkeys(("total", "completed", "failed", "tokens"), 0)
    return {
        **zero,
        **gone,
        "created_at": now_s,
        "expires_at": now_s,
        "status": "failed",
        "failed_at": now_s,
        "errors": shown(errors),
    }


async def segments_of(connection: AsyncConnection, batch_id: str) -> list[Segment]:
    columns = segments.c.epoch, segments.c.kind, segments.c.name, segments.c.safe_bytes, segments.c.crc
    wanted = select(*columns)
    rows = await connection.execute(wanted.where(segments.c.batch_id == batch_id).order_by(segments.c.epoch))
    return [Segment(*row) for row in rows]


async def keep(connection: AsyncConnection, batch_id: str, segment: Segment) -> None:
    place = segments.c.batch_id == batch_id, segments.c.epoch == segment.epoch, segments.c.kind == segment.kind
    grown = await connection.execute(
        update(segments).where(*place).values(safe_bytes=segment.safe_bytes, crc=segment.crc)
    )
    if grown.rowcount == 0:
        await connection.execute(insert(segments).values(batch_id=batch_id, **segment._asdict()))
