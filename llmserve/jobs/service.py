"""The batch jobs of a server, as its endpoints use them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from llmserve.errors import Unavailable
from llmserve.jobs.objects import BatchRow, FileRow, NewBatch, window_s
from llmserve.jobs.run.estimates import Work
from llmserve.jobs.run.input_checker import InputChecker
from llmserve.jobs.run.item_feeder import Submitter
from llmserve.jobs.run.runner import Runner
from llmserve.jobs.store.batches import BatchLimits, BatchStore
from llmserve.jobs.store.files import FileLimits, FileStore
from llmserve.jobs.store.folder import Appended, Folder
from llmserve.jobs.store.opening import opened as database_opened
from llmserve.jobs.store.owner import OwnerStore
from llmserve.jobs.store.rows import Part
from llmserve.jobs.store.servers import Servers
from llmserve.jobs.store.upload_quota import UploadQuota
from llmserve.runtime.lasting import lasting

log = logging.getLogger("llmserve")

TIDY_S = 60.0
DAY_S = 86_400


class JobService:
    """Files and batches of a server. Methods raise RequestError and SQLAlchemyError."""

    def __init__(
        self,
        files: FileStore,
        batches: BatchStore,
        folder: Folder,
        runner: Runner,
        *,
        days: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.files, self.batches, self.folder, self.runner = files, batches, folder, runner
        self._uploads = UploadQuota(folder, files.limits)
        self._keep_s = days * DAY_S
        self._clock = clock
        self._tidying: asyncio.Task[None] | None = None

    # ---- files ----

    def new_file(self, key: str) -> Appended:
        """An empty file for an upload of a key. Raises Unavailable, RateLimited."""
        try:
            return self._uploads.new_file(key)
        except OSError as error:
            raise Unavailable(f"the file cannot be stored: {error.strerror}", code="disk", retry_after_s=5.0) from error

    async def add_file(self, key: str, filename: str, file: Appended, expires_s: int | None) -> FileRow:
        """Make a file of a complete upload, whose bytes are written to the disk first."""
        try:
            await asyncio.to_thread(file.sync)
        except OSError as error:
            raise Unavailable(f"the file cannot be stored: {error.strerror}", code="disk", retry_after_s=5.0) from error
        now_s = int(self._clock())
        expires_at = now_s + min(expires_s or self._keep_s, self._keep_s)
        part = Part(file.name, file.size, file.crc)
        row = await self.files.add_file(key, filename, part, now_s=now_s, expires_at=expires_at)
        self._uploads.stored_bytes += file.size
        return row

    async def delete_file(self, key: str, file_id: str) -> None:
        self.folder.remove(await self.files.delete_file(key, file_id))

    async def content(self, key: str, file_id: str) -> tuple[FileRow, list[tuple[Path, int]]]:
        """A file, and where its bytes are: paths, and how many bytes of each."""
        file = await self.files.file(key, file_id)
        parts = await self.files.parts(key, file_id)
        return file, [(self.folder.path / part.name, part.bytes) for part in parts]

    # ---- batches ----

    async def create(self, key: str, body: bytes, new: NewBatch, idempotency_key: str | None) -> BatchRow:
        row = await self.batches.create(
            key,
            new,
            window_s=window_s(new.completion_window),
            now_s=int(self._clock()),
            idempotency_key=idempotency_key,
            asked=hashlib.sha256(msgspec.json.encode(msgspec.json.decode(body), order="sorted")).hexdigest(),
        )
        self.runner.notice()
        await self._estimate(row)
        return row

    async def _estimate(self, row: BatchRow) -> None:
        """Estimate what a new batch will take, if possible: a failure here does not affect the batch."""
        try:
            if row.status == "validating" and (parts := await self.runner.store.input(row)):
                await self.runner.estimates.of(row, parts[0])
        except (SQLAlchemyError, OSError) as error:
            log.warning("what batch %s will take is not known: %s", row.id, error)
        except Exception:
            log.exception("what batch %s will take is not known", row.id)

    async def cancel(self, key: str, batch_id: str) -> BatchRow:
        row = await self.batches.cancel(key, batch_id, int(self._clock()))
        self.runner.notice(batch_id)
        return row

    def shown(self, row: BatchRow) -> dict[str, Any]:
        """The batch as clients see it, with what llmserve adds."""
        try:
            forecast = self.runner.forecast(row)
        except Exception:  # a batch is shown even if its forecast fails
            log.exception("when batch %s will end is not known", row.id)
            forecast = None
        work = self.runner.estimates.known(row.id)
        added: dict[str, Any] = {"expected_end_at": None, "warning": None, "paused": self.runner.paused(row.id)}
        added["forecast"] = None if work is None else _rounded(work)
        if forecast is not None and math.isfinite(forecast.ends_at_s):
            added["expected_end_at"] = end = math.ceil(forecast.ends_at_s)
            if not forecast.in_time:
                late_s = end - row.expires_at
                added["warning"] = f"the batch would end {late_s:,} s after its window; the rest will expire"
        return {**row.shown(), "llmserve": added}

    # ---- life ----

    def start(self) -> None:
        self.runner.start()
        self._tidying = lasting("the tidying of batch jobs", self._tidy)

    async def close(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)
        await self.runner.close()

    async def _tidy(self) -> None:
        """Delete what has expired, and what dead servers have left."""
        while True:
            try:
                await self.tidy()
            except (SQLAlchemyError, OSError) as error:
                log.warning("files of batch jobs cannot be tidied: %s", error)
            await asyncio.sleep(TIDY_S)

    async def tidy(self) -> None:
        now_s = int(self._clock())
        names = await self.files.delete_expired(now_s)
        await self.batches.delete_batches(now_s - self._keep_s)
        await asyncio.to_thread(self.folder.remove, names)
        alive = await self.runner.store.alive()
        needed = await self.files.names()
        await asyncio.to_thread(self.folder.sweep, alive, needed)
        self._uploads.stored_bytes = await self.files.bytes_stored()


def _rounded(work: Work) -> dict[str, Any]:
    return {
        "prompt_tokens": round(work.prompt_tokens),
        "output_tokens": round(work.output_tokens),
        "money": None if work.money is None else round(work.money, 6),
        "joules": None if work.joules is None else round(work.joules, 1),
    }


@contextlib.asynccontextmanager
async def opened(
    url: str,
    path: Path,
    submitter: Submitter,
    *,
    days: int,
    limits: FileLimits,
    batch_limits: BatchLimits,
    tokens_queued_max: int,
    line_bytes_max: int,
    prompt_chars_max: int,
) -> AsyncIterator[JobService]:
    """The jobs of a store, inside the block; call `start()` and `close()` there. Raises ConfigError.

    url : of the database.  path : folder of the files
    """
    folder = Folder(path)
    database = await database_opened(url)
    try:
        servers = Servers(database)
        folder.generation = await servers.begin()
        checker = InputChecker(
            folder,
            line_bytes_max=line_bytes_max,
            prompt_chars_max=prompt_chars_max,
            tokens_queued_max=tokens_queued_max,
        )
        runner = Runner(OwnerStore(database, servers), folder, checker, submitter, keep_s=days * DAY_S)
        files = FileStore(database, servers, limits)
        yield JobService(files, BatchStore(database, batch_limits), folder, runner, days=days)
    finally:
        await database.close()
