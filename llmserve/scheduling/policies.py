"""From a configuration to a scheduler: the one place where policies are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from bins.edges import OnlineEdges
from llmserve.scheduling.order.fffs import fffs
from llmserve.scheduling.release import Full, Greedy, Release, Timeout
from llmserve.scheduling.scheduler import Scheduler

Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]

ORDERS = {"fffs": fffs}


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What decides when and where each request runs."""

    bins: Count = 8
    batch_size: Count = 8
    release: Literal["full", "timeout", "greedy"] = "greedy"
    batch_wait_s: Seconds = 0.05
    order: Literal["fffs"] = "fffs"
    edges: tuple[float, ...] | None = None
    edges_window: Count = 4096
    edges_refit_every: CountOrZero = 256
    queue_requests_max: Count = 10_000
    retries_max: CountOrZero = 2
    engine_wait_s: Seconds = 30.0

    def scheduler(self, lengths: Sequence[float] = ()) -> Scheduler:
        """A fresh scheduler. lengths: a sample of output lengths (tokens) for the first edges.

        Raises ValueError when `edges` does not fit `bins`.
        """
        edges = OnlineEdges(
            self.bins,
            edges=self.edges,
            sample=lengths,
            window=self.edges_window,
            refit_every=self.edges_refit_every,
        )
        return Scheduler(
            release=self._release(),
            order=ORDERS[self.order],
            edges=edges,
            batch_size=self.batch_size,
            queue_requests_max=self.queue_requests_max,
            retries_max=self.retries_max,
            engine_wait_s=self.engine_wait_s,
        )

    def _release(self) -> Release:
        if self.release == "full":
            return Full(self.batch_size)
        if self.release == "timeout":
            return Timeout(self.batch_size, self.batch_wait_s)
        return Greedy(self.batch_size)
