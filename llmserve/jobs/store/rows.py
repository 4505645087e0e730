"""Statements on files and batches within a transaction.

Every change of a batch is a compare-and-set on its status and epoch. A batch has one owner, a server. Each
server takes a generation number at its start, and counts as alive as long as its row is in `servers`. A server that
takes over a batch raises the batch's epoch, so that later changes by the old owner have no effect.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Row, Select, Table, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llmserve.errors import BadRequest, NotFound
from llmserve.jobs.objects import CHANGES, BatchRow, FileRow, LineError, Status
from llmserve.jobs.store.database import Database
from llmserve.jobs.store.tables import batches, files, parts, servers

log = logging.getLogger("llmserve")

Kind = Literal["output", "error"]
ERRORS_MAX = 100  # of a batch whose input is wrong


class Part(NamedTuple):
    """The first `bytes` of the file of this name in the folder of the store. crc : of these bytes, if known"""

    name: str
    bytes: int
    crc: int | None = None


class Segment(NamedTuple):
    """A file to which one owner appends results of a batch. safe_bytes : that count.  crc : of these bytes, if known"""

    epoch: int
    kind: Kind
    name: str
    safe_bytes: int
    crc: int | None = None


async def page(
    database: Database, table: Table, wanted: Select[Any], key: str, after: str | None, limit: int, *, ascending: bool
) -> tuple[list[Row[Any]], bool]:
    """A page of a client's rows, and whether more follow. Raises BadRequest when there is no row `after`."""
    async with database.read() as connection:
        if after is not None:
            place = select(table.c.seq).where(table.c.id == after, table.c.key == key)
            seq = (await connection.execute(place)).scalar()
            if seq is None:
                raise BadRequest(f"`after`: there is no {after!r}", param="after", code="invalid_value")
            beyond: ColumnElement[bool] = table.c.seq > seq if ascending else table.c.seq < seq
            wanted = wanted.where(beyond)
        order = table.c.seq.asc() if ascending else table.c.seq.desc()
        rows = list(await connection.execute(wanted.order_by(order).limit(limit + 1)))
        return rows[:limit], len(rows) > limit


async def is_alive(connection: AsyncConnection, generation: int) -> bool:
    found = await connection.execute(select(servers.c.generation).where(servers.c.generation == generation))
    return found.scalar() is not None


async def file_of(connection: AsyncConnection, key: str, file_id: str, param: str = "file_id") -> FileRow:
    row = (await connection.execute(select(files).where(files.c.id == file_id, files.c.key == key))).one_or_none()
    if row is None:
        error = NotFound(f"there is no file {file_id!r}", param=param)
        raise error
    return file_row(row)


async def parts_of(connection: AsyncConnection, file_id: str) -> list[Part]:
    wanted = select(parts.c.name, parts.c.bytes, parts.c.crc).where(parts.c.file_id == file_id)
    return [Part(*row) for row in await connection.execute(wanted.order_by(parts.c.place))]


async def insert_file(
    connection: AsyncConnection,
    key: str,
    filename: str,
    purpose: str,
    pieces: Sequence[Part],
    now_s: int,
    expires_at: int | None,
) -> FileRow:
    values = {
        "id": f"file-{secrets.token_hex(16)}",
        "key": key,
        "filename": filename,
        "purpose": purpose,
        "bytes": sum(piece.bytes for piece in pieces),
        "created_at": now_s,
        "expires_at": expires_at,
    }
    made = await connection.execute(insert(files).values(values).returning(files))
    row = file_row(made.one())
    rows = [{"file_id": row.id, "place": place, **piece._asdict()} for place, piece in enumerate(pieces)]
    await connection.execute(insert(parts), rows)
    return row


async def remove_file(connection: AsyncConnection, file_id: str) -> list[str]:
    names = [piece.name for piece in await parts_of(connection, file_id)]
    await connection.execute(delete(parts).where(parts.c.file_id == file_id))
    await connection.execute(delete(files).where(files.c.id == file_id))
    return names


async def batch_of(connection: AsyncConnection, batch_id: str, key: str) -> BatchRow:
    wanted = select(batches).where(batches.c.id == batch_id, batches.c.key == key)
    row = (await connection.execute(wanted)).one_or_none()
    if row is None:
        raise NotFound(f"there is no batch {batch_id!r}", param="batch_id")
    return batch_row(row)


async def change(
    connection: AsyncConnection, batch_id: str, before: Status, epoch: int, after: Status, **values: Any
) -> bool:
    assert after in CHANGES[before], f"a batch goes from {before} to {after}"
    if isinstance(errors := values.get("errors"), list):
        values["errors"] = shown(errors)
    same = batches.c.id == batch_id, batches.c.status == before, batches.c.epoch == epoch
    changed = await connection.execute(update(batches).where(*same).values(status=after, **values))
    return changed.rowcount == 1


def shown(errors: Sequence[LineError]) -> str:
    return msgspec.json.encode(errors[:ERRORS_MAX]).decode()


def file_row(row: Row[Any]) -> FileRow:
    return msgspec.convert(row._mapping, FileRow)


def batch_row(row: Row[Any]) -> BatchRow:
    """Raises msgspec.ValidationError for a row that makes no sense: SQLite keeps any value in any column."""
    return msgspec.convert(row._mapping, BatchRow)


def sound_rows(rows: Iterable[Row[Any]]) -> list[BatchRow]:
    """The batches of all sound rows. A damaged row must not hide the others."""
    sound = []
    for row in rows:
        try:
            sound.append(batch_row(row))
        except msgspec.ValidationError as error:
            log.error("the row of batch %s is damaged: %s", row.id, error)
    return sound
