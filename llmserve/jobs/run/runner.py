"""Works on batches: claims them, runs their lines through the server's queue, and ends them.

A task for each batch reads the batch's row, does what the status asks for, and reads again. So a batch continues from
any state that a server has left behind; after a failure, or an operation of unknown success, the task looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
from sqlalchemy.exc import SQLAlchemyError

from llmserve.jobs.objects import BatchRow, LineError, Status
from llmserve.jobs.run.estimates import Estimates
from llmserve.jobs.run.input_checker import InputChecker
from llmserve.jobs.run.item_feeder import ItemFeeder, Submitter
from llmserve.jobs.run.item_queue import Forecast
from llmserve.jobs.run.job import Job
from llmserve.jobs.run.loading import InputDamaged, Loaded, copy_salvaged, load
from llmserve.jobs.run.recorder import Recorder, trouble_of
from llmserve.jobs.run.validation import INPUT_DAMAGED
from llmserve.jobs.store.folder import Folder
from llmserve.jobs.store.owner import CLAIMS_MAX, Kept, Owned, OwnerStore
from llmserve.jobs.store.rows import Segment
from llmserve.runtime.lasting import lasting

log = logging.getLogger("llmserve")

WATCH_S = 1.0
AGAIN_S, AGAIN_S_MAX = 5.0, 60.0  # after files that cannot be read, and failures that nobody has foreseen
EXPIRED_AT_ONCE = 1000
LOADS_MAX = 2  # jobs that are read at a time
GONE = LineError("missing_input_file", "The input file is gone.")

T = TypeVar("T")


class Runner:
    """The runner of a server. `start()` is called inside the event loop, `close()` at the end.

    keep_s   how long files of results are kept; None: for ever
    clock    unix time
    on_left  called with key and id of each batch that is not this server's work any more: the batch has ended, or
             another server has taken it
    """

    def __init__(
        self,
        store: OwnerStore,
        folder: Folder,
        checker: InputChecker,
        submitter: Submitter,
        *,
        keep_s: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store, self._folder, self._checker = store, folder, checker
        self._keep_s, self._clock = keep_s, clock
        self.recorder = Recorder(store, folder, self._noted)
        self.jobs: dict[str, Job] = {}
        self.trouble: str | None = None  # why the store cannot be used now
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._look = asyncio.Event()
        self.estimates = Estimates(folder, submitter)
        self.feeder = ItemFeeder(self.jobs, self.recorder, submitter, clock)
        self._loading = asyncio.Semaphore(LOADS_MAX)
        self.on_left: list[Callable[[str, str], None]] = []

    # ---- for the server ----

    def start(self) -> None:
        self.recorder.start()
        self._loops = [
            lasting("the claiming of batch jobs", self._watch),
            lasting("the feed of batch jobs", self.feeder.run),
        ]

    async def close(self) -> None:
        """Take all lines back, and leave the batches to the next server."""
        await _end(self._loops)
        for job in self.jobs.values():
            self.feeder.stop(job)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S):
                await self.recorder.flush()
        await self._drop_all()
        await self.recorder.close()
        with contextlib.suppress(SQLAlchemyError):
            await self.store.release()
        await self.store.servers.end()

    def notice(self, batch_id: str | None = None) -> None:
        """Look at a batch that a client has changed, or for new ones, at once."""
        if batch_id in self.jobs:
            self.jobs[batch_id].changed.set()
        self._look.set()

    def paused(self, batch_id: str) -> str | None:
        """Why the lines of a batch do not start now; None: they may."""
        job = self.jobs.get(batch_id)
        if job is None:
            return None
        everybody = self.recorder.trouble or self.trouble or (None if self.feeder.is_open else "no_engine")
        return everybody or self.feeder.paused(job)

    def forecast(self, row: BatchRow) -> Forecast | None:
        """When a batch ends, unix time; None: nobody knows here."""
        job, work = self.jobs.get(row.id), self.estimates.known(row.id)
        if job is not None and row.status == "in_progress":
            return self.feeder.forecast(job)
        if work is not None and row.status == "validating":
            return self.feeder.forecast_new(row.key, row.expires_at, work)
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
        if not await self.store.servers.still_alive():
            log.warning("batch jobs: the store has taken this server for dead; it begins again")
            await self._drop_all()
            self._folder.generation = await self.store.servers.begin()
        unknown = []
        for seen in await self.store.owned():
            known = self.jobs.get(seen.id)
            if known is None or known.epoch != seen.epoch:
                unknown.append(seen)
            elif seen.status == "cancelling":
                known.changed.set()
        for begin in range(0, len(unknown), CLAIMS_MAX):
            await self._claim(unknown[begin : begin + CLAIMS_MAX])
        while found := await self.store.claimable():
            await self._claim(found)
            if len(found) < CLAIMS_MAX:
                break

    async def _claim(self, seen: Sequence[Owned]) -> None:
        for one in seen:
            if one.id in self._tasks:  # of an older epoch
                await self._drop(one.id)
        for row in await self.store.claim(seen, int(self._clock())):
            job = self.jobs[row.id] = Job(row)
            self._tasks[row.id] = lasting(f"the work on batch {row.id}", partial(self._work, job))

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
            self.feeder.stop(job)
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
        pause_s = WATCH_S
        while True:
            job.changed.clear()
            try:
                row = await self.store.own(job.id, job.epoch)
                if row is None:
                    break
                await steps[row.status](job, row)
                self.trouble, pause_s = None, WATCH_S
                continue
            except SQLAlchemyError as error:
                self._report(error)
                await asyncio.sleep(WATCH_S)
                continue
            except OSError as error:  # of the files of this batch
                log.error("batch %s stands still: %s", job.id, error)
                job.trouble = trouble_of(error)
            except msgspec.ValidationError as error:
                log.error("batch %s fails: its row is damaged: %s", job.id, error)
                job.trouble = "row_damaged"
                with contextlib.suppress(SQLAlchemyError):  # the next look tries again
                    await self.store.give_up(job.id, job.epoch, int(self._clock()))
            except Exception:
                log.exception("batch %s stands still: the server failed on it", job.id)
                job.trouble = "internal_error"
            await _unless(job.changed, asyncio.sleep(pause_s))
            pause_s = min(2 * pause_s, AGAIN_S_MAX)
        self._tasks.pop(job.id, None)
        self._forget(job.id)
        for listener in self.on_left:
            listener(job.key, job.id)

    async def _validate(self, job: Job, row: BatchRow) -> None:
        part = await self.store.input(row)
        if part is None:
            await self._fail(row, [GONE])
            return
        if self._clock() >= row.expires_at:
            await self._finish(row, "expired")
            return
        checked = await _unless(job.changed, self._checker.checked(row, part[0]))
        if checked is None:  # cancelled meanwhile
            return
        report, _ = checked
        errors = report.errors or await self._checker.too_much(self.store, row, report)
        if errors:
            await self._fail(row, errors)
            return
        job.trouble = None
        now_s = int(self._clock())
        values = {"in_progress_at": now_s, "total": report.lines, "tokens": report.tokens}
        await self.store.change(row.id, "validating", row.epoch, "in_progress", **values)

    async def _fail(self, row: BatchRow, errors: Sequence[LineError], kept: Kept | None = None) -> None:
        """End a batch that cannot run, or cannot go on. Its results so far are in its files."""
        log.error("batch %s fails: %s", row.id, errors[0].message)
        await self._finish(row, "failed", errors, kept)

    async def _progress(self, job: Job, row: BatchRow) -> None:
        if job.damage is not None:
            self.feeder.stop(job)
            await self.recorder.flush()
            await self._fail(row, [LineError("input_damaged", f"{INPUT_DAMAGED} ({job.damage})")])
            return
        if job.trouble is not None:
            await self._begin_again(job)
        if job.loaded is None:
            await _unless(job.changed, self.feeder.seat(job))
            if not job.seated.is_set() or not await self._load(job, row):
                return  # the batch has changed, or has failed
        await self.feeder.open(job)
        if not job.is_done:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, row.expires_at - self._clock())):
                    await job.changed.wait()
        if job.is_done and job.expired:
            await self._finish(row, "expired")
        elif job.is_done:
            await self.store.change(row.id, "in_progress", row.epoch, "finalizing", finalizing_at=int(self._clock()))
        elif job.loaded is not None and self._clock() >= row.expires_at:
            await self._expire(job, row)

    async def _begin_again(self, job: Job) -> None:
        """Forget the lines of a job whose files could not be read, and read them again after a while."""
        self.feeder.stop(job)
        await self.recorder.flush()
        if job.loaded is not None:
            job.unload()
            await _unless(job.changed, asyncio.sleep(AGAIN_S))

    async def _load(self, job: Job, row: BatchRow) -> bool:
        """Read what the lines need. False: the batch has failed, for the disk has damaged what it needs."""
        async with self._loading:
            parts = await self.store.input(row)
            if parts is None:
                await self._fail(row, [GONE])
                return False
            report, index = await self._checker.checked(row, parts[0])
            if report.errors:
                await self._fail(row, report.errors)
                return False
            job.work = await self.estimates.of(row, parts[0])
            segments = await self.store.segments(row.id)
            loaded = await asyncio.to_thread(load, self._folder.path, parts[0], report, index, row.id, segments)
            if loaded.damaged:
                await self._fail_damaged(row, loaded, segments)
                return False
            job.start(loaded)
            job.trouble = None
            return True

    async def _fail_damaged(self, row: BatchRow, loaded: Loaded, segments: Sequence[Segment]) -> None:
        """End a batch with damaged results. The readable results are in its files."""
        damaged = {salvaged.segment for salvaged in loaded.damaged}
        kept = [segment for segment in segments if segment not in damaged]
        counts = {"output": loaded.completed, "error": loaded.failed}
        for salvaged in loaded.damaged:
            if salvaged.rows:
                file = self._folder.create()
                await asyncio.to_thread(copy_salvaged, self._folder.path, salvaged, file)
                segment = salvaged.segment
                kept.append(Segment(segment.epoch, segment.kind, file.name, file.size, file.crc))
                counts[segment.kind] += len(salvaged.rows)
        readable, written = sum(counts.values()), row.completed + row.failed
        text = (
            f"The disk has lost or changed results of this batch: of {written:,}, {readable:,} can be read, and are in "
            "its files; those that were changed and can still be read may be wrong."
        )
        errors = [LineError("results_damaged", text)]
        await self._fail(row, errors, Kept(kept, counts["output"], counts["error"]))

    async def _expire(self, job: Job, row: BatchRow) -> None:
        """Write a row for each line without a result, then end the batch."""
        self.feeder.stop(job)
        await self.recorder.flush()
        while job.waiting.any() and not job.account.lost:
            numbers = np.flatnonzero(job.waiting)[:EXPIRED_AT_ONCE].tolist()
            try:
                lines = await self.feeder.read(job, numbers)
            except InputDamaged as error:
                job.damage = str(error)
                await self._progress(job, row)
                return
            for number, line in zip(numbers, lines, strict=True):
                job.waiting[number] = False
                self.feeder.note_expired(job, number, line)
            await self.recorder.flush()
        await self._finish(row, "expired")

    async def _finalize(self, job: Job, row: BatchRow) -> None:
        await self._finish(row, "completed")

    async def _cancel(self, job: Job, row: BatchRow) -> None:
        self.feeder.stop(job)
        await self.recorder.flush()
        await self._finish(row, "cancelled")

    async def _finish(
        self, row: BatchRow, after: Status, errors: Sequence[LineError] = (), kept: Kept | None = None
    ) -> None:
        now_s = int(self._clock())
        await self.store.finish(row, row.status, after, now_s=now_s, keep_s=self._keep_s, kept=kept, errors=errors)

    def _noted(self, batch_id: str, epoch: int, status: Status | None) -> None:
        """The recorder has seen the status of a batch."""
        job = self.jobs.get(batch_id)
        if job is None or job.epoch != epoch:
            return
        if status is None:
            job.account.lost = True
        if status != "in_progress":
            self.feeder.stop(job)
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
