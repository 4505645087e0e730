"""Works on batches: claims them, runs their lines through the server's queue, and ends them.

A task for each batch looks at its row, does what the status asks for, and looks again. So a batch goes on from any
state in which a server has left it, and a failure, or an operation whose success is unknown, is followed by a look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from llmserve.jobs import job as jobs_of
from llmserve.jobs.checking import Checking
from llmserve.jobs.contract import BatchRow, LineError, Status
from llmserve.jobs.estimates import Estimates
from llmserve.jobs.feeding import Forecast
from llmserve.jobs.folder import Folder
from llmserve.jobs.job import Job
from llmserve.jobs.line_feed import Door, LineFeed
from llmserve.jobs.ownership import Ownership
from llmserve.jobs.recorder import Recorder, trouble_of
from llmserve.jobs.work_store import WorkStore
from llmserve.lasting import lasting

log = logging.getLogger("llmserve")

WATCH_S = 1.0
AGAIN_S = 5.0  # after a failure that nobody has foreseen
EXPIRED_AT_ONCE = 1000

T = TypeVar("T")


class Runner:
    """One for a server: `start()` inside the event loop, `close()` at the end.

    keep_s  how long files of results are kept; None: for ever
    clock   unix time
    """

    def __init__(
        self,
        store: WorkStore,
        folder: Folder,
        ownership: Ownership,
        checking: Checking,
        door: Door,
        *,
        keep_s: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._folder, self._ownership = store, folder, ownership
        self._checking, self._keep_s, self._clock = checking, keep_s, clock
        self.recorder = Recorder(store, folder, self._noted)
        self.jobs: dict[str, Job] = {}
        self.trouble: str | None = None  # why the store cannot be used now
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._look = asyncio.Event()
        self.estimates = Estimates(folder, door)
        self.feed = LineFeed(self.jobs, self.recorder, door, self._report, clock)

    # ---- for the server ----

    def start(self) -> None:
        self.recorder.start()
        self._loops = [
            lasting("the claiming of batch jobs", self._watch),
            lasting("the feed of batch jobs", self.feed.run),
        ]

    async def close(self) -> None:
        """Take all lines back, and leave the batches to the next server."""
        await _end(self._loops)
        for job in self.jobs.values():
            self.feed.stop(job)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S):
                await self.recorder.flush()
        await self._drop_all()
        await self.recorder.close()
        with contextlib.suppress(SQLAlchemyError):
            await self._store.release()
        await self._ownership.end()

    def notice(self, batch_id: str | None = None) -> None:
        """Look at a batch that a client has changed, or for new ones, at once."""
        if batch_id in self.jobs:
            self.jobs[batch_id].changed.set()
        self._look.set()

    def paused(self, batch_id: str) -> str | None:
        """Why the lines of a batch do not start now; None: they may."""
        if batch_id not in self.jobs:
            return None
        return self.recorder.trouble or self.trouble or (None if self.feed.is_open else "no_engine")

    def forecast(self, row: BatchRow) -> Forecast | None:
        """When a batch ends, unix time; None: nobody knows here."""
        job, work = self.jobs.get(row.id), self.estimates.known(row.id)
        if job is not None and row.status == "in_progress":
            return self.feed.forecast(job)
        if work is not None and row.status == "validating":
            return self.feed.forecast_new(row.key, row.expires_at, work)
        return None

    # ---- claiming ----

    async def _watch(self) -> None:
        while True:
            self._look.clear()
            try:
                await self._claim_all()
                self.trouble = None
            except (SQLAlchemyError, OSError) as error:
                self._report(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._look.wait()

    async def _claim_all(self) -> None:
        if not await self._ownership.still_alive():
            log.warning("batch jobs: the store has taken this server for dead; it begins again")
            await self._drop_all()
            self._folder.generation = await self._ownership.begin()
        for row in await self._store.owned():
            known = self.jobs.get(row.id)
            if known is not None and known.epoch == row.epoch:
                if row.status == "cancelling":
                    known.changed.set()
            else:
                await self._claim(row)
        for row in await self._store.claimable():
            await self._claim(row)

    async def _claim(self, row: BatchRow) -> None:
        if row.id in self._tasks:  # of an older epoch
            await self._drop(row.id)
        mine = await self._store.claim(row.id, row.epoch)
        if mine is not None:
            job = self.jobs[mine.id] = Job(mine)
            self._tasks[mine.id] = asyncio.create_task(self._work(job))

    async def _drop_all(self) -> None:
        for batch_id in list(self.jobs):
            await self._drop(batch_id)

    async def _drop(self, batch_id: str) -> None:
        task = self._tasks.pop(batch_id, None)
        if task is not None:
            await _end([task])
        self._forget(batch_id)

    def _forget(self, batch_id: str) -> None:
        job = self.jobs.pop(batch_id, None)
        if job is not None:
            self.feed.stop(job)
            job.account.close()

    def _report(self, error: Exception) -> None:
        trouble = trouble_of(error)
        if trouble != self.trouble:
            log.error("batch jobs pause: %s: %s", trouble, error)
        self.trouble = trouble

    # ---- one batch ----

    async def _work(self, job: Job) -> None:
        steps: dict[Status, Callable[[Job, BatchRow], Awaitable[None]]] = {
            "validating": self._validate,
            "in_progress": self._progress,
            "finalizing": self._finalize,
            "cancelling": self._cancel,
        }
        while True:
            job.changed.clear()
            try:
                row = await self._store.own(job.id, job.epoch)
                if row is None:
                    break
                await steps[row.status](job, row)
                self.trouble = None
            except (SQLAlchemyError, OSError) as error:
                self._report(error)
                await asyncio.sleep(WATCH_S)
            except Exception:
                log.exception("batch %s: the server failed on it; it is tried again", job.id)
                await asyncio.sleep(AGAIN_S)
        self._tasks.pop(job.id, None)
        self._forget(job.id)

    async def _validate(self, job: Job, row: BatchRow) -> None:
        part = await self._store.input(row)
        if part is None:
            missing = LineError("missing_input_file", "The input file is gone.")
            await self._fail(row, [missing])
            return
        if self._clock() >= row.expires_at:
            await self._finish(row, "expired")
            return
        report = await _unless(job.changed, self._checking.check(row, part[0]))
        if report is None:  # cancelled meanwhile
            return
        errors = report.errors or await self._checking.too_much(self._store, row, report)
        if errors:
            await self._fail(row, errors)
            return
        now_s = int(self._clock())
        values = {"in_progress_at": now_s, "total": report.lines, "tokens": report.tokens}
        await self._store.change(row.id, "validating", row.epoch, "in_progress", **values)

    async def _fail(self, row: BatchRow, errors: list[LineError]) -> None:
        now_s = int(self._clock())
        await self._store.change(row.id, row.status, row.epoch, "failed", failed_at=now_s, errors=errors)

    async def _progress(self, job: Job, row: BatchRow) -> None:
        if job.loaded is None:
            await self._load(job, row)
        await self.feed.open(job)
        if not job.is_done:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, row.expires_at - self._clock())):
                    await job.changed.wait()
        if job.is_done and job.expired:
            await self._finish(row, "expired")
        elif job.is_done:
            await self._store.change(row.id, "in_progress", row.epoch, "finalizing", finalizing_at=int(self._clock()))
        elif self._clock() >= row.expires_at:
            await self._expire(job, row)

    async def _load(self, job: Job, row: BatchRow) -> None:
        parts = await self._store.input(row)
        assert parts, "an active batch keeps its input file"
        index = self._folder.index(row.id)
        if not index.exists():
            await self._checking.check(row, parts[0])
        job.work = await self.estimates.of(row, parts[0])
        segments = await self._store.segments(row.id)
        job.start(await asyncio.to_thread(jobs_of.load, self._folder.path, index, parts[0], segments))

    async def _expire(self, job: Job, row: BatchRow) -> None:
        """Write a row for each line without a result, then end the batch."""
        self.feed.stop(job)
        await self.recorder.flush()
        while job.waiting and not job.account.lost:
            numbers = sorted(job.waiting)[:EXPIRED_AT_ONCE]
            for number, line in zip(numbers, await self.feed.read(job, numbers), strict=True):
                job.waiting.discard(number)
                self.feed.note_expired(job, number, line)
            await self.recorder.flush()
        await self._finish(row, "expired")

    async def _finalize(self, job: Job, row: BatchRow) -> None:
        await self._finish(row, "completed")

    async def _cancel(self, job: Job, row: BatchRow) -> None:
        self.feed.stop(job)
        await self.recorder.flush()
        await self._finish(row, "cancelled")

    async def _finish(self, row: BatchRow, after: Status) -> None:
        now_s = int(self._clock())
        if await self._store.finish(row, row.status, after, now_s=now_s, keep_s=self._keep_s):
            self._folder.remove([self._folder.index(row.id).name])

    def _noted(self, batch_id: str, epoch: int, status: Status | None) -> None:
        """The recorder has seen the status of a batch."""
        job = self.jobs.get(batch_id)
        if job is None or job.epoch != epoch:
            return
        if status is None:
            job.account.lost = True
        if status != "in_progress":
            self.feed.stop(job)
            job.changed.set()


async def _unless(changed: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of the work; None when the batch changed first, and the work was stopped."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        waiting.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
