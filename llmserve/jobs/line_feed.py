"""Runs the lines of jobs through the server's queue, a few hundred at a time."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from llmserve.errors import DeadlineExceeded, RequestError
from llmserve.jobs.job import Job, read_lines
from llmserve.jobs.lines import Line, answer_row, expired_row, read_line, refusal_row
from llmserve.jobs.recorder import Recorder, Result
from llmserve.jobs.rows import Kind

log = logging.getLogger("llmserve")

LINES_MAX = 256  # of all jobs, in the server's queue, on engines, or about to be written
PAUSE_S, PAUSE_S_MAX = 0.25, 5.0  # after a line that no engine could take now
RETRY_S = 1.0  # after an input file that could not be read
TRIES_MAX = 3  # of a line that fails on the engines


class Answered(Protocol):
    """Hears how a line ended: once, unless the line is cancelled."""

    def answered(self, status: int, request_id: str, body: bytes) -> None: ...

    def refused(self, error: RequestError, request_id: str) -> None: ...


class Door(Protocol):
    """Where lines enter the server's queue, as ordinary requests do."""

    @property
    def is_open(self) -> bool:
        """Whether the server takes lines: it has an engine, and does not end."""
        ...

    async def submit(self, key: str, path: str, body: bytes, within_s: float, client: Answered) -> Callable[[], None]:
        """Queue a request with a deadline. Returns what cancels it. Raises RequestError."""
        ...


def choose_lines(jobs: Sequence[Job], room: int) -> list[tuple[Job, list[int]]]:
    """Which lines start next, `room` at most: those of the earliest deadline, in the order of their file.

    Takes the lines from what waits in their jobs.
    """
    chosen: list[tuple[Job, list[int]]] = []
    for job in sorted(jobs, key=lambda job: (job.expires_at, job.id)):
        count = min(room, len(job.waiting))
        if job.open and count > 0:
            chosen.append((job, [job.waiting.popleft() for _ in range(count)]))
            room -= count
    return chosen


class LineFeed:
    """Submits lines while the door is open; `run()` is a task.

    jobs        by id
    recorder    makes results safe
    on_trouble  called with an error of the disk
    clock       unix time
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
        self._on_trouble, self._clock = on_trouble, clock
        self._wake = asyncio.Event()
        self._pause_s, self._paused_until = 0.0, -math.inf

    @property
    def is_open(self) -> bool:
        """Whether lines can start now."""
        return self._door.is_open

    def wake(self) -> None:
        """Look for lines that may start."""
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if (left_s := self._paused_until - self._clock()) > 0 or not self._door.is_open:
                await asyncio.sleep(max(left_s, PAUSE_S))
                self._wake.set()
                continue
            busy = sum([len(job.in_flight) + len(job.recording) for job in self._jobs.values()])
            for job, numbers in choose_lines(list(self._jobs.values()), LINES_MAX - busy):
                try:
                    await self._start(job, numbers)
                except OSError as error:
                    job.waiting.extendleft(reversed(numbers))
                    self._on_trouble(error)
                    await asyncio.sleep(RETRY_S)
                    self._wake.set()

    async def read(self, job: Job, numbers: Sequence[int]) -> list[Line]:
        assert job.loaded is not None, "lines of a job that is not loaded"
        texts = await asyncio.to_thread(read_lines, job.loaded.path, job.loaded.index, numbers)
        return [read_line(text) for text in texts]

    async def _start(self, job: Job, numbers: Sequence[int]) -> None:
        """Submit these lines. Raises OSError; then none has been submitted."""
        lines = await self.read(job, numbers)
        for number, line in zip(numbers, lines, strict=True):
            if not job.open or job.account.lost:
                job.waiting.append(number)
                continue
            client = _Waiting(self, job, number, line)
            within_s = max(0.001, job.expires_at - self._clock())
            job.in_flight[number] = _nothing
            try:
                cancel = await self._door.submit(job.key, job.endpoint, bytes(line.body), within_s, client)
            except RequestError as error:
                client.refused(error, "")
            except Exception as error:
                log.error("line %d of batch %s failed", number + 1, job.id, exc_info=error)
                client.refused(RequestError("the front-end failed on this request", code="internal_error"), "")
            else:
                if number in job.in_flight:  # not answered at once
                    job.in_flight[number] = cancel
                elif not client.ended:
                    cancel()  # the job was stopped meanwhile

    def answered(self, job: Job, number: int, line: Line, status: int, request_id: str, body: bytes) -> None:
        """An engine has answered a line."""
        if job.in_flight.pop(number, None) is None:
            return
        if status == 429 or status == 408 or status >= 500:
            if self._again(job, number, counted=status != 429):
                return
        elif status < 400:
            self._pause_s = 0.0
        self.note(job, number, answer_row(job.id, number, line, status, request_id, body), failed=status >= 400)

    def refused(self, job: Job, number: int, line: Line, error: RequestError, request_id: str) -> None:
        """The front-end has refused or failed a line."""
        if job.in_flight.pop(number, None) is None:
            return
        if isinstance(error, DeadlineExceeded):
            if self._clock() < job.expires_at - 1.0:  # it cannot be in time any more
                self.note(job, number, expired_row(job.id, number, line), failed=True)
                return
            job.waiting.append(number)  # the batch expires
            job.changed.set()
            return
        passing = error.status >= 500 or error.status == 429
        if passing and self._again(job, number, counted=error.code == "engine_failed"):
            return
        self.note(job, number, refusal_row(job.id, number, line, request_id, error), failed=True)

    def _again(self, job: Job, number: int, *, counted: bool) -> bool:
        """Let a line wait for another try, unless it has had enough. counted : the fault may be the line's own"""
        job.tries[number] += counted
        if job.tries[number] >= TRIES_MAX:
            return False
        job.waiting.appendleft(number)
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S, 1.5 * self._pause_s))
        self._paused_until = self._clock() + self._pause_s
        self._wake.set()
        return True

    def note(self, job: Job, number: int, row: bytes, *, failed: bool) -> None:
        job.recording.add(number)

        def on_safe() -> None:
            job.recording.discard(number)
            self._wake.set()
            if job.is_done:
                job.changed.set()

        kind: Kind = "error" if failed else "output"
        self._recorder.add(Result(job.account, kind, failed, row, on_safe))


class _Waiting:
    """Hears of one line."""

    __slots__ = ("_feed", "_job", "_line", "_number", "ended")

    def __init__(self, feed: LineFeed, job: Job, number: int, line: Line) -> None:
        self._feed, self._job, self._number, self._line = feed, job, number, line
        self.ended = False

    def answered(self, status: int, request_id: str, body: bytes) -> None:
        self.ended = True
        self._feed.answered(self._job, self._number, self._line, status, request_id, body)

    def refused(self, error: RequestError, request_id: str) -> None:
        self.ended = True
        self._feed.refused(self._job, self._number, self._line, error, request_id)


def _nothing() -> None:
    """Cancels a line that is being submitted."""
