"""Feeds the lines of jobs into the server's queue, a few hundred at a time.

A line that cannot run now stops few others: a refused line parks the sub-queue of its key and model (item_queue.py),
and a file that cannot be read stops its own job. Only the recorder and the last engine can stop the feeder as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Literal, Protocol

from llmserve.errors import DeadlineExceeded, RequestError
from llmserve.jobs.run.estimates import Forecaster, Work
from llmserve.jobs.run.item_queue import Forecast, ItemQueue, arranged
from llmserve.jobs.run.job import Job
from llmserve.jobs.run.jsonl import Line, answer_row, answer_tokens, expired_row, line_of, refusal_row, row_id
from llmserve.jobs.run.loading import InputDamaged, read_lines
from llmserve.jobs.run.recorder import Recorder, Result
from llmserve.jobs.run.refusals import BUSY, is_final, reason_of
from llmserve.jobs.run.seats import SEATS, UNSEATED_S, Seated, Seeking, deal
from llmserve.jobs.store.rows import Kind

log = logging.getLogger("llmserve")

LOOK_S = 0.25  # how often to look whether lines may start again
AT_ONCE = 16  # lines that are submitted in one turn of the event loop: a few ms


Outcome = Literal["completed", "failed", "expired"]


class Answered(Protocol):
    """The receiver of a line's end. Exactly one method is called, unless the line is cancelled."""

    @property
    def is_in_flight(self) -> bool:
        """False once the line was taken back."""
        ...

    def answered(self, status: int, request_id: str, body: bytes) -> None: ...

    def refused(self, error: RequestError, request_id: str) -> None: ...


class Submitter(Forecaster, Protocol):
    """The entry of lines into the server's queue."""

    @property
    def is_open(self) -> bool:
        """Whether the server takes lines: it has an engine, and does not end."""
        ...

    def slots(self, model: str) -> int:
        """Of the engines of a model."""
        ...

    def is_up(self, model: str) -> bool:
        """Whether lines of a model can run now. True for an unknown model, whose lines are refused at once."""
        ...

    @property
    def barrier(self) -> bool:
        """Whether engines run each batch to its end."""
        ...

    def tokens_per_s(self, key: str, model: str) -> float:
        """Output rate of a model's engines that the key's share would get at the present competition."""
        ...

    async def submit(
        self, key: str, path: str, body: bytes, client: Answered, *, expires_at: int, after_tokens: float
    ) -> Callable[[], None]:
        """Queue a line, unless the line was taken back. Returns a function that cancels the line. Raises RequestError.

        expires_at : end of its window, unix time
        after_tokens : forecast output tokens of the job's later lines
        """
        ...


class ItemFeeder:
    """The feeder of all jobs: submits lines while the server takes any. `run()` is a task.

    jobs        by id
    recorder    makes results safe
    clock       unix time
    lines_ended lines with a safe result, by outcome
    """

    def __init__(
        self, jobs: Mapping[str, Job], recorder: Recorder, submitter: Submitter, clock: Callable[[], float]
    ) -> None:
        self._jobs, self._recorder, self._submitter, self._clock = jobs, recorder, submitter, clock
        self._items = ItemQueue(slots=submitter.slots)
        self.lines_ended: dict[str, int] = dict.fromkeys(("completed", "failed", "expired"), 0)
        self._wake = asyncio.Event()
        self._seeking: dict[str, Job] = {}  # jobs that wait for a seat
        self._dealt_s = -math.inf  # when seats were dealt last

    @property
    def is_open(self) -> bool:
        """Whether lines can start now."""
        return self._submitter.is_open

    @property
    def lines_waiting(self) -> int:
        return sum([job.waiting_count for job in self._jobs.values()])

    @property
    def lines_in_flight(self) -> int:
        return sum([len(job.in_flight) for job in self._jobs.values()])

    @property
    def tokens_waiting(self) -> float:
        return self._items.tokens_waiting

    def _now_s(self) -> float:
        """The clock of pauses, which nobody sets."""
        return asyncio.get_running_loop().time()

    # ---- jobs ----

    async def seat(self, job: Job) -> None:
        """Wait until the lines of a job may be in memory; see seats.py."""
        self._seeking[job.id] = job
        self._wake.set()
        try:
            await job.seated.wait()
        finally:
            self._seeking.pop(job.id, None)

    def _deal_seats(self) -> None:
        now_s = self._now_s()
        if not self._seeking or (len(self._seeking) > SEATS and now_s < self._dealt_s + LOOK_S):
            return
        self._dealt_s = now_s
        seeking = [
            Seeking(job.not_before, job.expires_at, job.id, job.key)
            for job in self._seeking.values()
            if not job.seated.is_set() and job.not_before <= now_s
        ]
        lost, given = deal([self._seated(job) for job in self._jobs.values() if job.seated.is_set()], seeking)
        for job_id in lost:
            self._unseat(self._jobs[job_id])
        for job_id in given:
            self._seeking[job_id].seated.set()

    def _seated(self, job: Job) -> Seated:
        is_parked = self._why_parked(job) is not None
        is_idle = is_parked and not (job.in_flight or job.recording)
        return Seated(job.id, job.key, job.expires_at, is_parked, is_idle)

    def _unseat(self, job: Job) -> None:
        self._items.remove(job.id)
        job.not_before = self._now_s() + UNSEATED_S
        job.unload()
        job.changed.set()

    async def open(self, job: Job) -> None:
        """Let the lines of a job start. May be called again."""
        if not job.open:
            assert job.loaded is not None, "lines of a job that is not loaded"
            job.open = True
            shapes, models = job.loaded.shapes, job.loaded.models
            if shapes is not None:
                slots = max([self._submitter.slots(model) for model in models], default=0)
                lines = await asyncio.to_thread(arranged, shapes, barrier=self._submitter.barrier, slots=slots)
                if not job.open or job.id in self._items:  # stopped meanwhile, or opened again
                    return
                self._items.add(job.id, job.expires_at, lines, factor=job.factor, key=job.key, models=models)
                job.loaded.shapes = None
        self._wake.set()

    def stop(self, job: Job) -> None:
        """Take back every line of a job that has no answer yet. Its lines do not start again."""
        self._items.remove(job.id)
        job.stop_lines()
        self._wake.set()

    def paused(self, job: Job) -> str | None:
        """Why no line of a job starts now; None: one may."""
        if job.loaded is None and job.id in self._seeking:
            return "queued"
        return job.trouble or self._why_parked(job)

    def _why_parked(self, job: Job) -> str | None:
        now_s = self._now_s()
        reasons = [sub_queue.why_parked(now_s) for sub_queue in self._items.sub_queues_of(job.id)]
        return reasons[0] if reasons and None not in reasons else None

    def forecast(self, job: Job) -> Forecast | None:
        """When a job ends; None: nobody knows."""
        if job.id in self._items:
            most = partial(self._submitter.tokens_per_s, job.key)
            return self._items.forecast(job.id, self._clock(), most, self._now_s())
        if job.loaded is not None or job.work is None:
            return None
        return self.forecast_new(job.key, job.expires_at, job.work)

    def forecast_new(self, key: str, expires_at: float, work: Work) -> Forecast:
        """When a batch ends whose lines are not known yet."""
        tokens_per_s = self._submitter.tokens_per_s(key, work.model)
        now_s = self._now_s()
        return self._items.forecast_new(expires_at, work.model, work.output_tokens, self._clock(), tokens_per_s, now_s)

    # ---- lines that start ----

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_in_s()):
                    await self._wake.wait()
            self._wake.clear()
            self._deal_seats()
            if not self._submitter.is_open or self._recorder.trouble is not None:
                await asyncio.sleep(LOOK_S)
                self._wake.set()
                continue
            for sub_queue in self._items.sub_queues:
                sub_queue.closed = None if self._submitter.is_up(sub_queue.model) else "no_engine"
            for job, lines in self._taken():
                await self._begin(job, lines)

    def _look_in_s(self) -> float | None:
        """When to look again without being woken. None: only an event can change anything."""
        is_closed = any(sub_queue.closed for sub_queue in self._items.sub_queues)
        if is_closed or self._seeking:  # engines come up, and seats become free, without waking this task
            return LOOK_S
        now_s = self._now_s()
        at_s = self._items.look_at_s(now_s)
        return max(0.0, at_s - now_s) if at_s < math.inf else None

    def _taken(self) -> list[tuple[Job, list[_ItemInFlight]]]:
        """The lines that start now, which are in flight from here on. Neighbours of one job are together."""
        taken: list[tuple[Job, list[_ItemInFlight]]] = []
        for job_id, handed in groupby(self._items.take(self._now_s()), attrgetter("job")):
            job = self._jobs[job_id]
            lines = [_ItemInFlight(self, job, line.number, line.after_tokens) for line in handed]
            for line in lines:
                job.in_flight[line.number] = line
                job.waiting[line.number] = False
            taken.append((job, lines))
        return taken

    async def _begin(self, job: Job, lines: Sequence[_ItemInFlight]) -> None:
        """Start lines of a job. Whatever fails, the others are not held up."""
        try:
            await self._start(job, lines)
            job.trouble = None
        except InputDamaged as error:
            job.damage = str(error)
            self._hold(job, lines, "input_damaged")
        except Exception as error:
            log.exception("lines of batch %s cannot start", job.id)
            self._hold(job, lines, "disk_error" if isinstance(error, OSError) else "internal_error")

    def _hold(self, job: Job, lines: Sequence[_ItemInFlight], trouble: str) -> None:
        """Take lines back, and let their job stand still until somebody has looked at it."""
        self._take_back(job, lines)
        self.stop(job)
        job.trouble = trouble
        job.changed.set()

    async def read(self, job: Job, numbers: Sequence[int]) -> list[Line]:
        assert job.loaded is not None, "lines of a job that is not loaded"
        texts = await asyncio.to_thread(read_lines, job.loaded, numbers)
        return [line_of(text) for text in texts]

    async def _start(self, job: Job, lines: Sequence[_ItemInFlight]) -> None:
        """Submit lines that were not taken back. Raises OSError and InputDamaged, both before the first line."""
        requests = await self.read(job, [line.number for line in lines])
        for place, (line, request) in enumerate(zip(lines, requests, strict=True), 1):
            line.request = request
            if place % AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn
            if not line.is_in_flight:
                continue
            try:
                cancel = await self._submitter.submit(
                    job.key,
                    job.endpoint,
                    bytes(request.body),
                    line,
                    expires_at=job.expires_at,
                    after_tokens=line.after_tokens,
                )
            except RequestError as error:
                line.refused(error, "")
            except Exception as error:
                log.error("line %d of batch %s failed", line.number + 1, job.id, exc_info=error)
                line.refused(RequestError("the front-end failed on this request", code="internal_error"), "")
            else:
                line.started(cancel)

    def _take_back(self, job: Job, lines: Sequence[_ItemInFlight]) -> None:
        for line in reversed(lines):
            if line.is_in_flight:
                del job.in_flight[line.number]
                self._back(job, line.number)

    def _back(self, job: Job, number: int) -> None:
        """Let a line wait again."""
        job.waiting[number] = True
        self._items.back(job.id, number)

    def answered(self, job: Job, number: int, request: Line, status: int, request_id: str, body: bytes) -> None:
        """An engine has answered a line. The line is in flight until it has its row, or waits again."""
        if status in BUSY:
            self._again(job, number, "engine_busy", None)
            return
        if status < 400 and (sub_queue := self._items.sub_queue_of(job.id, number)) is not None:
            sub_queue.clear()
        row = answer_row(row_id(job.id, number), request.custom_id, status, request_id, body)
        self.note(job, number, row, "failed" if status >= 400 else "completed", answer_tokens(body))

    def refused(self, job: Job, number: int, request: Line, error: RequestError, request_id: str) -> None:
        """The front-end has refused or failed a line."""
        if isinstance(error, DeadlineExceeded):
            if self._clock() < job.expires_at - 1.0:  # it cannot be in time any more
                self.note_expired(job, number, request)
                return
            del job.in_flight[number]
            job.waiting[number] = True  # the batch expires
            job.changed.set()
        elif is_final(error, job.lost, number):
            row = refusal_row(row_id(job.id, number), request.custom_id, request_id, error)
            self.note(job, number, row, "failed")
        else:
            self._again(job, number, reason_of(error), error.retry_after_s)

    def _again(self, job: Job, number: int, reason: str, retry_after_s: float | None) -> None:
        """Return a line for another try, and park its sub-queue."""
        del job.in_flight[number]
        sub_queue = self._items.sub_queue_of(job.id, number)
        self._back(job, number)
        if sub_queue is not None:
            sub_queue.park(reason, self._now_s(), retry_after_s or 0.0)
        self._wake.set()

    def note_expired(self, job: Job, number: int, request: Line) -> None:
        """Give a line the result that it was not executed in time."""
        job.expired += 1
        self.note(job, number, expired_row(row_id(job.id, number), request.custom_id), "expired")

    def note(self, job: Job, number: int, row: bytes, outcome: Outcome, tokens: float = 0.0) -> None:
        job.recording += 1
        job.in_flight.pop(number, None)

        def on_safe() -> None:
            job.recording -= 1
            self.lines_ended[outcome] += 1
            self._items.ended(job.id, number, self._now_s(), tokens)
            self._wake.set()
            if job.is_done:
                job.changed.set()

        failed = outcome != "completed"
        kind: Kind = "error" if failed else "output"
        self._recorder.add(Result(job.account, kind, failed, row, on_safe))


class _ItemInFlight:
    """A line that was chosen to start, and ends once: by an answer, by a refusal, or by being taken back."""

    __slots__ = ("_cancel", "_feed", "_job", "after_tokens", "number", "request")

    request: Line  # from the start on

    def __init__(self, feed: ItemFeeder, job: Job, number: int, after_tokens: float) -> None:
        self._feed, self._job, self.number, self.after_tokens = feed, job, number, after_tokens
        self._cancel: Callable[[], None] | None = None

    @property
    def is_in_flight(self) -> bool:
        return self._job.in_flight.get(self.number) is self

    def started(self, cancel: Callable[[], None]) -> None:
        """Note what cancels the line. A line that was taken back meanwhile is cancelled now."""
        self._cancel = cancel
        if not self.is_in_flight:
            cancel()

    def cancel(self) -> None:
        if self._cancel is not None:
            self._cancel()

    def answered(self, status: int, request_id: str, body: bytes) -> None:
        if self.is_in_flight:
            try:
                self._feed.answered(self._job, self.number, self.request, status, request_id, body)
            except Exception:
                log.exception("the answer of line %d of batch %s has no row", self.number + 1, self._job.id)
                self.refused(RequestError("the answer cannot be written", code="internal_error"), request_id)

    def refused(self, error: RequestError, request_id: str) -> None:
        if self.is_in_flight:
            self._feed.refused(self._job, self.number, self.request, error, request_id)
