"""A batch that this server works on, in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmserve.jobs.objects import BatchRow
from llmserve.jobs.run.estimates import Work
from llmserve.jobs.run.loading import Loaded
from llmserve.jobs.run.recorder import BatchResults


class Cancellable(Protocol):
    """A line in flight."""

    def cancel(self) -> None: ...


class Job:
    """A batch under one epoch.

    waiting    (lines,) whether a line is neither in flight nor has a result
    in_flight  lines that were chosen to start, and have no answer yet
    lost       engines that each line has lost
    expired    lines whose result says that they were not executed in time
    work       what all lines will take, by their beginning; None: unknown
    open       whether lines may start
    changed    set when the batch's task must look at its row again
    seated     set while the job may be in memory with its lines
    not_before when it may be seated again, on the clock of pauses
    trouble    why this batch alone stands still; None: it does not
    damage     why the batch cannot go on; None: it can
    """

    def __init__(self, row: BatchRow) -> None:
        self.id, self.key, self.endpoint = row.id, row.key, row.endpoint
        self.epoch, self.expires_at, self.total = row.epoch, row.expires_at, row.total
        self.account = BatchResults(row.id, row.epoch, row.completed, row.failed)
        self.loaded: Loaded | None = None
        self.waiting: npt.NDArray[np.bool_] = np.zeros(0, bool)
        self.in_flight: dict[int, Cancellable] = {}
        self.recording = 0  # lines whose result is not safe yet
        self.expired = 0
        self.lost: Counter[int] = Counter()
        self.work: Work | None = None
        self.open = False
        self.changed = asyncio.Event()
        self.seated = asyncio.Event()
        self.not_before = 0.0
        self.trouble: str | None = None
        self.damage: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether every line has a safe result."""
        return self.loaded is not None and self.account.completed + self.account.failed == self.total

    @property
    def waiting_count(self) -> int:
        return int(np.count_nonzero(self.waiting))

    def start(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.total = len(loaded.offsets)
        self.account.completed, self.account.failed = loaded.completed, loaded.failed
        self.expired = loaded.expired
        self.waiting = loaded.waiting

    def stop_lines(self) -> None:
        """Take back every line that has no answer yet."""
        self.open = False
        in_flight, self.in_flight = self.in_flight, {}
        for line in in_flight.values():
            line.cancel()
        self.waiting[list(in_flight)] = True

    def unload(self) -> None:
        """Forget the lines, all of which wait or have safe results."""
        assert not self.in_flight, "lines of a job that is unloaded are not in flight"
        assert not self.recording, "results of a job that is unloaded are safe"
        self.open, self.loaded, self.waiting = False, None, np.zeros(0, bool)
        self.seated.clear()

    @property
    def factor(self) -> float:
        """Of the likely lengths of all answers over those of `shapes`."""
        assert self.loaded is not None, "lines of a job that is not loaded"
        mean = self.loaded.mean_tokens
        return self.work.output_tokens / (mean * self.total) if self.work is not None and mean else 1.0
