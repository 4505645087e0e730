"""Makes results safe, in groups: append to files, fsync, one transaction. Only then do they count.

Results that cannot be written stay in memory and are tried again, so a full disk stops the jobs and nothing else.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from llmserve.jobs.objects import Status
from llmserve.jobs.store.folder import Appended, Folder
from llmserve.jobs.store.owner import OwnerStore, Progress
from llmserve.jobs.store.rows import Kind, Segment
from llmserve.runtime.lasting import lasting

log = logging.getLogger("llmserve")

RETRY_S = 1.0
FULL = (errno.ENOSPC, errno.EDQUOT)


class BatchResults:
    """The results of one batch under one owner.

    completed, failed : lines whose results are safe
    """

    def __init__(self, batch_id: str, epoch: int, completed: int = 0, failed: int = 0) -> None:
        self.batch_id, self.epoch = batch_id, epoch
        self.completed, self.failed = completed, failed
        self.files: dict[Kind, Appended] = {}
        self.lost = False  # another server owns the batch, or it has ended

    def close(self) -> None:
        self.lost = True
        for file in self.files.values():
            file.close()


class Result(NamedTuple):
    """A row of results. on_safe : called when it counts"""

    account: BatchResults
    kind: Kind
    failed: bool
    row: bytes
    on_safe: Callable[[], None]


class Recorder:
    """The recorder of a server. `start()` is called inside the event loop.

    trouble    why results cannot be written now; None: they can
    on_status  called with the id, epoch and status of each batch after its results became safe; None: lost
    """

    def __init__(self, store: OwnerStore, folder: Folder, on_status: Callable[[str, int, Status | None], None]) -> None:
        self._store, self._folder, self._on_status = store, folder, on_status
        self.trouble: str | None = None
        self._pending: list[Result] = []
        self._writing: list[Result] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Results that do not count yet."""
        return len(self._pending) + len(self._writing)

    def start(self) -> None:
        self._task = lasting("the recorder of batch jobs", self._record)

    async def close(self) -> None:
        """Stop at once. What is not safe is lost, and its lines run again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def add(self, result: Result) -> None:
        self._pending.append(result)
        self._idle.clear()
        self._wake.set()

    async def flush(self) -> None:
        """Wait until all results so far count."""
        await self._idle.wait()

    async def _record(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._writing, self._pending = self._pending, []
            await self._until_written(self._append)
            statuses = await self._until_written(self._count)
            self._settle(statuses)
            if not self._pending:
                self._idle.set()

    async def _until_written(self, step: Callable[[], Awaitable[dict[str, Status]]]) -> dict[str, Status]:
        """Repeat a step until it succeeds."""
        while True:
            try:
                done = await step()
            except (OSError, SQLAlchemyError) as error:
                trouble = trouble_of(error)
                if trouble != self.trouble:
                    log.error("batch jobs pause: %s: %s", trouble, error)
                self.trouble = trouble
                await asyncio.sleep(RETRY_S)
            else:
                if self.trouble is not None:
                    log.info("batch jobs go on")
                self.trouble = None
                return done

    def _settle(self, statuses: dict[str, Status]) -> None:
        writing, self._writing = self._writing, []
        for result in writing:
            account = result.account
            if account.batch_id in statuses and not account.lost:
                if result.failed:
                    account.failed += 1
                else:
                    account.completed += 1
                result.on_safe()
        for account in {result.account: None for result in writing}:
            self._on_status(account.batch_id, account.epoch, statuses.get(account.batch_id))

    # ---- the two steps; each may be repeated ----

    async def _append(self) -> dict[str, Status]:
        await asyncio.to_thread(self._append_now)
        return {}

    def _append_now(self) -> None:
        """Write the rows to their files, and the files to the disk. Raises OSError."""
        rows: dict[tuple[BatchResults, Kind], list[bytes]] = {}
        for result in self._writing:
            if not result.account.lost:
                rows.setdefault((result.account, result.kind), []).append(result.row)
        for (account, kind), texts in rows.items():
            file = account.files.get(kind)
            if file is None:
                file = account.files[kind] = self._folder.create()
            file.cut()
            try:
                file.write(b"".join(texts))
                file.sync()
            except OSError:
                file.cut()
                raise

    async def _count(self) -> dict[str, Status]:
        """Tell the database how far the files are safe. Raises SQLAlchemyError."""
        counts: dict[BatchResults, list[int]] = {}
        for result in self._writing:
            counts.setdefault(result.account, [0, 0])[result.failed] += 1
        progress = [
            Progress(
                account.batch_id,
                account.epoch,
                account.completed + completed,
                account.failed + failed,
                tuple(
                    Segment(account.epoch, kind, file.name, file.size, file.crc)
                    for kind, file in sorted(account.files.items())
                ),
            )
            for account, (completed, failed) in counts.items()
            if not account.lost
        ]
        statuses = await self._store.record(progress)
        for account in counts:
            if account.batch_id in statuses:
                for file in account.files.values():
                    file.counted, file.counted_crc = file.size, file.crc
        return statuses


def trouble_of(error: Exception) -> str:
    """What clients see of an error that pauses jobs."""
    if isinstance(error, OSError):
        return "disk_full" if error.errno in FULL else "disk_error"
    return "disk_full" if "disk is full" in str(error) else "store_unavailable"
