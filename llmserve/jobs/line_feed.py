"""Runs the lines of jobs through the server's queue, a few hundred at a time."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Literal, Protocol

from llmserve.errors import DeadlineExceeded, RequestError
from llmserve.jobs.estimates import Forecaster, Work
from llmserve.jobs.feeding import Feeder, Forecast, arranged
from llmserve.jobs.job import Job, read_lines
from llmserve.jobs.lines import Line, answer_row, answer_tokens, expired_row, read_line, refusal_row, row_id
from llmserve.jobs.recorder import Recorder, Result
from llmserve.jobs.rows import Kind

log = logging.getLogger("llmserve")

PAUSE_S, PAUSE_S_MAX = 0.25, 5.0  # after a line that no engine could take now
RETRY_S = 1.0  # after an input file that could not be read
AT_ONCE = 16  # lines that are submitted in one turn of the event loop: a few ms
TRIES_MAX = 3  # of a line that fails on the engines

Outcome = Literal["completed", "failed", "expired"]


class Answered(Protocol):
    """Hears how a line ended: once, unless the line is cancelled."""

    @property
    def is_in_flight(self) -> bool:
        """Whether the line is still to run: False, once it was taken back."""
        ...

    def answered(self, status: int, request_id: str, body: bytes) -> None: ...

    def refused(self, error: RequestError, request_id: str) -> None: ...


class Door(Forecaster, Protocol):
    """Where lines enter the server's queue, as ordinary requests do."""

    @property
    def is_open(self) -> bool:
        """Whether the server takes lines: it has an engine, and does not end."""
        ...

    @property
    def slots(self) -> int:
        """Of the engines."""
        ...

    @property
    def barrier(self) -> bool:
        """Whether engines run each batch to its end."""
        ...

    def tokens_per_s(self, key: str, model: str) -> float:
        """What the share of the key would get of a model's engines if each share that waits now went on waiting."""
        ...

    async def submit(
        self, key: str, path: str, body: bytes, client: Answered, *, expires_at: int, after_tokens: float
    ) -> Callable[[], None]:
        """Queue a line, unless it was taken back meanwhile. Returns what cancels it. Raises RequestError.

        expires_at : end of its window, unix time
        after_tokens : output tokens of the lines of its job that follow it, by their forecasts
        """
        ...


class LineFeed:
    """Submits lines while the door is open; `run()` is a task.

    jobs        by id
    recorder    makes results safe
    on_trouble  called with an error of the disk
    clock       unix time
    lines_ended lines with a safe result, by outcome
    """

    def __init__(
        self,
        jobs: Mapping[str, Job],
        recorder: Recorder,
        door: Door,
        on_trouble: Callable[[Exception], None],
        clock: Callable[[], float],
    ) -> None:
        self._jobs, self._recorder, self._door = jobs, recorder, door
        self._feeder = Feeder()
        self._on_trouble, self._clock = on_trouble, clock
        self.lines_ended: dict[str, int] = dict.fromkeys(("completed", "failed", "expired"), 0)
        self._wake = asyncio.Event()
        self._pause_s, self._paused_until = 0.0, -math.inf

    @property
    def is_open(self) -> bool:
        """Whether lines can start now."""
        return self._door.is_open

    @property
    def lines_waiting(self) -> int:
        return sum([len(job.waiting) for job in self._jobs.values()])

    @property
    def lines_in_flight(self) -> int:
        return sum([len(job.in_flight) for job in self._jobs.values()])

    @property
    def tokens_waiting(self) -> float:
        return self._feeder.tokens_waiting

    async def open(self, job: Job) -> None:
        """Let the lines of a job start. May be called again."""
        if not job.open:
            job.open = True
            barrier, slots = self._door.barrier, self._door.slots
            lines = await asyncio.to_thread(lambda: arranged(job.shapes(), barrier=barrier, slots=slots))
            if not job.open or job.id in self._feeder:  # stopped meanwhile, or opened again
                return
            self._feeder.add(job.id, job.expires_at, lines, factor=job.factor)
        self._wake.set()

    def stop(self, job: Job) -> None:
        """Take back every line of a job that has no answer yet."""
        self._feeder.remove(job.id)
        job.stop_lines()
        self._wake.set()

    def forecast(self, job: Job) -> Forecast | None:
        """When a job ends; None: its lines cannot start now."""
        if job.id not in self._feeder or job.loaded is None:
            return None
        tokens_per_s = self._door.tokens_per_s(job.key, job.loaded.model)
        return self._feeder.forecast(job.id, self._clock(), tokens_per_s)

    def forecast_new(self, key: str, expires_at: float, work: Work) -> Forecast:
        """When a batch ends whose lines are not known yet."""
        tokens_per_s = self._door.tokens_per_s(key, work.model)
        return self._feeder.forecast_new(expires_at, work.output_tokens, self._clock(), tokens_per_s)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            left_s = self._paused_until - self._clock()
            if left_s > 0 or not self._door.is_open or self._recorder.trouble is not None:
                await asyncio.sleep(max(left_s, PAUSE_S))
                self._wake.set()
                continue
            for job, lines in self._taken():
                try:
                    await self._start(job, lines)
                except OSError as error:
                    self._take_back(job, lines)
                    self._on_trouble(error)
                    await asyncio.sleep(RETRY_S)
                    self._wake.set()

    def _taken(self) -> list[tuple[Job, list[_LineInFlight]]]:
        """The lines that start now, which are in flight from here on. Neighbours of one job are together."""
        taken: list[tuple[Job, list[_LineInFlight]]] = []
        self._feeder.slots = self._door.slots
        for job_id, handed in groupby(self._feeder.take(self._clock()), attrgetter("job")):
            job = self._jobs[job_id]
            lines = [_LineInFlight(self, job, line.number, line.after_tokens) for line in handed]
            for line in lines:
                job.in_flight[line.number] = line
                job.waiting.discard(line.number)
            taken.append((job, lines))
        return taken

    async def read(self, job: Job, numbers: Sequence[int]) -> list[Line]:
        assert job.loaded is not None, "lines of a job that is not loaded"
        texts = await asyncio.to_thread(read_lines, job.loaded.path, job.loaded.index, numbers)
        return [read_line(text) for text in texts]

    async def _start(self, job: Job, lines: Sequence[_LineInFlight]) -> None:
        """Submit these lines, if nobody has taken them back. Raises OSError before the first."""
        requests = await self.read(job, [line.number for line in lines])
        for place, (line, request) in enumerate(zip(lines, requests, strict=True), 1):
            line.request = request
            if place % AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn
            if not line.is_in_flight:
                continue
            try:
                cancel = await self._door.submit(
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

    def _take_back(self, job: Job, lines: Sequence[_LineInFlight]) -> None:
        for line in reversed(lines):
            if line.is_in_flight:
                del job.in_flight[line.number]
                self._back(job, line.number)

    def _back(self, job: Job, number: int) -> None:
        """Let a line wait again."""
        job.waiting.add(number)
        self._feeder.back(job.id, number)

    def answered(self, job: Job, number: int, request: Line, status: int, request_id: str, body: bytes) -> None:
        """An engine has answered a line."""
        if status == 429 or status == 408 or status >= 500:
            if self._again(job, number, counted=status != 429):
                return
        elif status < 400:
            self._pause_s = 0.0
        row = answer_row(row_id(job.id, number), request.custom_id, status, request_id, body)
        self.note(job, number, row, "failed" if status >= 400 else "completed", answer_tokens(body))

    def refused(self, job: Job, number: int, request: Line, error: RequestError, request_id: str) -> None:
        """The front-end has refused or failed a line."""
        if isinstance(error, DeadlineExceeded):
            if self._clock() < job.expires_at - 1.0:  # it cannot be in time any more
                self.note_expired(job, number, request)
                return
            job.waiting.add(number)  # the batch expires
            job.changed.set()
            return
        passing = error.status >= 500 or error.status == 429
        if passing and self._again(job, number, counted=error.code == "engine_failed"):
            return
        self.note(job, number, refusal_row(row_id(job.id, number), request.custom_id, request_id, error), "failed")

    def _again(self, job: Job, number: int, *, counted: bool) -> bool:
        """Let a line wait for another try, unless it has had enough. counted : the fault may be the line's own"""
        job.tries[number] += counted
        if job.tries[number] >= TRIES_MAX:
            return False
        self._back(job, number)
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S, 1.5 * self._pause_s))
        self._paused_until = self._clock() + self._pause_s
        self._wake.set()
        return True

    def note_expired(self, job: Job, number: int, request: Line) -> None:
        """Give a line the result that it was not executed in time."""
        job.expired += 1
        self.note(job, number, expired_row(row_id(job.id, number), request.custom_id), "expired")

    def note(self, job: Job, number: int, row: bytes, outcome: Outcome, tokens: float = 0.0) -> None:
        job.recording += 1

        def on_safe() -> None:
            job.recording -= 1
            self.lines_ended[outcome] += 1
            self._feeder.ended(job.id, number, self._clock(), tokens)
            self._wake.set()
            if job.is_done:
                job.changed.set()

        failed = outcome != "completed"
        kind: Kind = "error" if failed else "output"
        self._recorder.add(Result(job.account, kind, failed, row, on_safe))


class _LineInFlight:
    """A line that was chosen to start. It ends once: by an answer, a refusal, or because it is taken back."""

    __slots__ = ("_cancel", "_feed", "_job", "after_tokens", "number", "request")

    request: Line  # from the start on

    def __init__(self, feed: LineFeed, job: Job, number: int, after_tokens: float) -> None:
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
            del self._job.in_flight[self.number]
            self._feed.answered(self._job, self.number, self.request, status, request_id, body)

    def refused(self, error: RequestError, request_id: str) -> None:
        if self.is_in_flight:
            del self._job.in_flight[self.number]
            self._feed.refused(self._job, self.number, self.request, error, request_id)
