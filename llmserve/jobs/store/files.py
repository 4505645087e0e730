"""Files in the database."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmserve.errors import BadRequest
from llmserve.jobs.objects import ACTIVE, FileRow
from llmserve.jobs.store.database import CLIENT_WAITS_S, Database
from llmserve.jobs.store.rows import Part, file_of, file_row, insert_file, is_alive, page, parts_of, remove_file
from llmserve.jobs.store.servers import Servers
from llmserve.jobs.store.tables import batches, files, parts, segments


class FileLimits(NamedTuple):
    """The limits of files. 0: no limit.  files_max : of one key.  bytes_max : of all files together"""

    files_max: int = 0
    bytes_max: int = 0


class FileStore:
    """The operations on files. Methods raise RequestError, and SQLAlchemyError."""

    def __init__(self, database: Database, servers: Servers, limits: FileLimits) -> None:
        self._database, self._servers, self.limits = database, servers, limits

    async def add_file(
        self, key: str, filename: str, part: Part, *, now_s: int, expires_at: int | None, purpose: str = "batch"
    ) -> FileRow:
        """Make a file of a complete upload. Raises BadRequest at a limit."""
        async with self._database.write(CLIENT_WAITS_S) as connection:
            if not await is_alive(connection, self._servers.generation):
                raise BadRequest("the upload took too long: another server has taken over", code="upload_lost")
            await self._check_room(connection, key, part.bytes)
            return await insert_file(connection, key, filename, purpose, [part], now_s, expires_at)

    async def _check_room(self, connection: AsyncConnection, key: str, size: int) -> None:
        if self.limits.files_max:
            count = (await connection.execute(select(func.count()).where(files.c.key == key))).scalar_one()
            if count >= self.limits.files_max:
                raise BadRequest(f"this key has {count} files, the most allowed: delete some", code="files_max")
        if self.limits.bytes_max:
            used = await _bytes_of_all(connection)
            if used + size > self.limits.bytes_max:
                raise BadRequest(
                    f"all files together have {used:,} of {self.limits.bytes_max:,} bytes: delete some",
                    code="files_bytes_max",
                )

    async def file(self, key: str, file_id: str) -> FileRow:
        """Raises NotFound."""
        async with self._database.read() as connection:
            return await file_of(connection, key, file_id)

    async def parts(self, key: str, file_id: str) -> list[Part]:
        """Where the bytes of a file are, in order. Raises NotFound."""
        async with self._database.read() as connection:
            await file_of(connection, key, file_id)
            return await parts_of(connection, file_id)

    async def list_files(
        self, key: str, *, after: str | None, limit: int, purpose: str | None, ascending: bool
    ) -> tuple[list[FileRow], bool]:
        """A page of files, and whether more follow. Raises BadRequest when there is no file `after`."""
        wanted = select(files).where(files.c.key == key)
        if purpose is not None:
            wanted = wanted.where(files.c.purpose == purpose)
        rows, more = await page(self._database, files, wanted, key, after, limit, ascending=ascending)
        return [file_row(row) for row in rows], more

    async def delete_file(self, key: str, file_id: str) -> list[str]:
        """Delete a file. Returns the names whose bytes nobody needs any more. Raises NotFound, BadRequest."""
        async with self._database.write(CLIENT_WAITS_S) as connection:
            await file_of(connection, key, file_id)
            using = select(batches.c.id).where(batches.c.input_file_id == file_id, batches.c.status.in_(ACTIVE))
            batch_id = (await connection.execute(using.limit(1))).scalar()
            if batch_id is not None:
                raise BadRequest(
                    f"the file is the input of batch {batch_id}, which has not ended: cancel the batch first",
                    code="file_in_use",
                )
            return await remove_file(connection, file_id)

    async def delete_expired(self, now_s: int) -> list[str]:
        """Delete the files that have expired and that no active batch needs. Returns as `delete_file`."""
        used = select(batches.c.input_file_id).where(batches.c.status.in_(ACTIVE))
        old = select(files.c.id).where(files.c.expires_at <= now_s, files.c.id.not_in(used))
        async with self._database.write() as connection:
            ids = list((await connection.execute(old)).scalars())
            return [name for file_id in ids for name in await remove_file(connection, file_id)]

    async def bytes_stored(self) -> int:
        """Of all files."""
        async with self._database.read() as connection:
            return await _bytes_of_all(connection)

    async def names(self) -> set[str]:
        """The names in the folder that are needed."""
        async with self._database.read() as connection:
            used = [await connection.execute(select(table.c.name)) for table in (parts, segments)]
            return {name for rows in used for name in rows.scalars()}


async def _bytes_of_all(connection: AsyncConnection) -> int:
    return int((await connection.execute(select(func.coalesce(func.sum(files.c.bytes), 0)))).scalar_one())
