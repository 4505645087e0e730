"""Sums of batch jobs for the page."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from llmserve.observe.watch import JobsSeen

if TYPE_CHECKING:
    from llmserve.jobs.service import JobService

EVERY_S = 5.0


class JobSums:
    """The numbers of batches, for the page. `follow()` is a task, so a store that hangs delays only these numbers."""

    def __init__(self, jobs: JobService, every_s: float = EVERY_S) -> None:
        self._jobs, self._every_s = jobs, every_s
        self._batches: dict[str, int] | None = None

    async def follow(self) -> None:
        from sqlalchemy.exc import SQLAlchemyError

        while True:
            try:
                self._batches = await self._jobs.batches.counts()
            except SQLAlchemyError:
                self._batches = None
            await asyncio.sleep(self._every_s)

    @property
    def seen(self) -> JobsSeen:
        feed = self._jobs.runner.feeder
        return JobsSeen(self._batches, feed.lines_waiting, feed.lines_in_flight, feed.tokens_waiting)
