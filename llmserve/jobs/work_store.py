"""Batches in the database, as the servers that work on them use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llmserve.jobs.contract import ACTIVE, BatchRow, Status
from llmserve.jobs.database import Database
from llmserve.jobs.rows import Part, Segment, batch_row, change, insert_file, is_alive, parts_of
from llmserve.jobs.servers import Servers
from llmserve.jobs.tables import batches, segments, servers


class Progress(NamedTuple):
    """How far a batch is. New segments and the bytes of all segments that are safe now."""

    batch_id: str
    epoch: int
    completed: int
    failed: int
    segments: tuple[Segment, ...]


class WorkStore:
    """The operations of owners on batches. All raise SQLAlchemyError."""

    def __init__(self, database: Database, servers: Servers) -> None:
        self._database, self._servers = database, servers

    async def owned(self) -> list[BatchRow]:
        """The active batches of this server."""
        async with self._database.read() as connection:
            mine = select(batches).where(batches.c.owner == self._servers.generation, batches.c.status.in_(ACTIVE))
            return [batch_row(row) for row in await connection.execute(mine)]

    async def alive(self) -> set[int]:
        """The generations that count as alive."""
        return {self._servers.generation, *await self._servers.others()}

    async def active(self) -> set[str]:
        """Ids of all batches that have not ended."""
        async with self._database.read() as connection:
            return set((await connection.execute(select(batches.c.id).where(batches.c.status.in_(ACTIVE)))).scalars())

    async def claimable(self) -> list[BatchRow]:
        """The active batches without an owner that counts as alive, the earliest deadline first."""
        alive = select(servers.c.generation)
        free = batches.c.owner.is_(None) | batches.c.owner.not_in(alive)
        wanted = select(batches).where(batches.c.status.in_(ACTIVE), free)
        async with self._database.read() as connection:
            rows = await connection.execute(wanted.order_by(batches.c.expires_at, batches.c.seq))
            return [batch_row(row) for row in rows]

    async def claim(self, batch_id: str, epoch: int) -> BatchRow | None:
        """Become the owner of a batch that was seen with this epoch. None: somebody else was faster."""
        taken = update(batches).where(batches.c.id == batch_id, batches.c.epoch == epoch, batches.c.status.in_(ACTIVE))
        async with self._database.write() as connection:
            if not await is_alive(connection, self._servers.generation):
                return None
            values = {"owner": self._servers.generation, "epoch": epoch + 1}
            row = (await connection.execute(taken.values(values).returning(batches))).one_or_none()
            return batch_row(row) if row is not None else None

    async def release(self) -> None:
        """Give up all batches of this server, which ends."""
        async with self._database.write() as connection:
            await connection.execute(
                update(batches).where(batches.c.owner == self._servers.generation).values(owner=None)
            )
            await connection.execute(delete(servers).where(servers.c.generation == self._servers.generation))

    async def own(self, batch_id: str, epoch: int) -> BatchRow | None:
        """The batch as it is now; None: it has ended, or another server has taken it."""
        mine = batches.c.id == batch_id, batches.c.epoch == epoch, batches.c.status.in_(ACTIVE)
        async with self._database.read() as connection:
            row = (await connection.execute(select(batches).where(*mine))).one_or_none()
            return batch_row(row) if row is not None else None

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
            if not await is_alive(connection, self._servers.generation):
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

    async def finish(self, batch: BatchRow, before: Status, after: Status, *, now_s: int, keep_s: int | None) -> bool:
        """End a batch, and make files of its safe results. keep_s : seconds that these files are kept; None: for ever.

        False: status or epoch has changed.
        """
        if batch.output_expires_s is not None:
            keep_s = batch.output_expires_s
        expires_at = now_s + keep_s if keep_s is not None else None
        async with self._database.write() as connection:
            if not await change(connection, batch.id, before, batch.epoch, after, **{f"{after}_at": now_s}):
                return False
            safe = await segments_of(connection, batch.id)
            ids: dict[str, str] = {}
            for kind in ("output", "error"):
                pieces = [Part(one.name, one.safe_bytes) for one in safe if one.kind == kind and one.safe_bytes]
                if pieces:
                    name = f"{batch.id}_{kind}.jsonl"
                    made = await insert_file(connection, batch.key, name, "batch_output", pieces, now_s, expires_at)
                    ids[f"{kind}_file_id"] = made.id
            await connection.execute(delete(segments).where(segments.c.batch_id == batch.id))
            if ids:
                await connection.execute(update(batches).where(batches.c.id == batch.id).values(**ids))
            return True


async def segments_of(connection: AsyncConnection, batch_id: str) -> list[Segment]:
    wanted = select(segments.c.epoch, segments.c.kind, segments.c.name, segments.c.safe_bytes)
    rows = await connection.execute(wanted.where(segments.c.batch_id == batch_id).order_by(segments.c.epoch))
    return [Segment(*row) for row in rows]


async def keep(connection: AsyncConnection, batch_id: str, segment: Segment) -> None:
    place = segments.c.batch_id == batch_id, segments.c.epoch == segment.epoch, segments.c.kind == segment.kind
    grown = await connection.execute(update(segments).where(*place).values(safe_bytes=segment.safe_bytes))
    if grown.rowcount == 0:
        await connection.execute(insert(segments).values(batch_id=batch_id, **segment._asdict()))
