"""Batches in the database, as clients use them."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import msgspec
from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmserve.errors import BadRequest, RateLimited
from llmserve.jobs.objects import ACTIVE, CANCELLABLE, BatchRow, NewBatch
from llmserve.jobs.store.database import CLIENT_WAITS_S, Database
from llmserve.jobs.store.rows import batch_of, batch_row, change, file_of, page, sound_rows
from llmserve.jobs.store.tables import batches

RETRY_AFTER_S = 60.0  # of a client with too many batches


class BatchLimits(NamedTuple):
    """Batches that have not ended: of one key, and of all. 0: no limit"""

    of_key: int = 0
    of_all: int = 0


class BatchStore:
    """The operations of clients on batches. Methods raise RequestError, and SQLAlchemyError."""

    def __init__(self, database: Database, limits: BatchLimits) -> None:
        self._database, self._limits = database, limits

    async def create(
        self, key: str, new: NewBatch, *, window_s: int, now_s: int, idempotency_key: str | None, asked: str
    ) -> BatchRow:
        """Make a batch, or return the one of the same Idempotency-Key. Raises BadRequest, NotFound, RateLimited."""
        async with self._database.write(CLIENT_WAITS_S) as connection:
            if idempotency_key is not None:
                same = batches.c.key == key, batches.c.idempotency_key == idempotency_key
                row = (await connection.execute(select(batches).where(*same))).one_or_none()
                if row is not None and row.asked != asked:
                    raise BadRequest("this Idempotency-Key was used for another request", code="idempotency_key_reused")
                if row is not None:
                    return batch_row(row)
            file = await file_of(connection, key, new.input_file_id, param="input_file_id")
            if file.purpose != "batch":
                raise BadRequest(
                    f"the file has the purpose {file.purpose}, not batch", param="input_file_id", code="invalid_purpose"
                )
            await self._check_room(connection, key)
            values = {
                "id": f"batch_{secrets.token_hex(16)}",
                "key": key,
                "endpoint": new.endpoint,
                "input_file_id": file.id,
                "completion_window": new.completion_window,
                "metadata": msgspec.json.encode(new.metadata).decode() if new.metadata is not None else None,
                "output_expires_s": new.output_expires_after.seconds if new.output_expires_after else None,
                "idempotency_key": idempotency_key,
                "asked": asked,
                "status": "validating",
                "created_at": now_s,
                "expires_at": now_s + window_s,
                **dict.fromkeys(("epoch", "total", "completed", "failed", "tokens"), 0),
            }
            made = await connection.execute(insert(batches).values(values).returning(batches))
            return batch_row(made.one())

    async def _check_room(self, connection: AsyncConnection, key: str) -> None:
        limits = (
            (self._limits.of_key, (batches.c.key == key,), "this key has", "batch_active_max"),
            (self._limits.of_all, (), "all keys together have", "batch_active_total_max"),
        )
        for most, of, who, setting in limits:
            counted = select(func.count()).where(batches.c.status.in_(ACTIVE), *of)
            if most and (count := (await connection.execute(counted)).scalar_one()) >= most:
                flag = f"--{setting.replace('_', '-')}"
                raise RateLimited(
                    f"{who} {count:,} batches that have not ended, the most allowed ({flag}): wait until some have, or "
                    "cancel some",
                    retry_after_s=RETRY_AFTER_S,
                )

    async def batch(self, key: str, batch_id: str) -> BatchRow:
        """Raises NotFound."""
        async with self._database.read() as connection:
            return await batch_of(connection, batch_id, key)

    async def list_batches(self, key: str, *, after: str | None, limit: int) -> tuple[list[BatchRow], bool]:
        """As list_files, the newest first."""
        wanted = select(batches).where(batches.c.key == key)
        rows, more = await page(self._database, batches, wanted, key, after, limit, ascending=False)
        return sound_rows(rows), more

    async def counts(self) -> dict[str, int]:
        """How many batches of all keys have each status."""
        wanted = select(batches.c.status, func.count().label("number")).group_by(batches.c.status)
        async with self._database.read() as connection:
            return {row.status: row.number for row in await connection.execute(wanted)}

    async def cancel(self, key: str, batch_id: str, now_s: int) -> BatchRow:
        """Begin to cancel a batch. A batch that is cancelled, or about to be, stays as it is.

        Raises NotFound, and BadRequest for a batch that has ended, or has all its results.
        """
        async with self._database.write(CLIENT_WAITS_S) as connection:
            row = await batch_of(connection, batch_id, key)
            if row.status in ("cancelling", "cancelled"):
                return row
            if row.status not in CANCELLABLE:
                raise BadRequest(f"a batch with status {row.status} cannot be cancelled", code="batch_not_cancellable")
            await change(connection, row.id, row.status, row.epoch, "cancelling", cancelling_at=now_s)
            return await batch_of(connection, batch_id, key)

    async def delete_batches(self, before_s: int) -> int:
        """Delete the batches that were made before, and have ended. Returns how many."""
        old = batches.c.created_at < before_s, batches.c.status.not_in(ACTIVE)
        async with self._database.write() as connection:
            return (await connection.execute(delete(batches).where(*old))).rowcount
