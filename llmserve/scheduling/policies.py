"""From a configuration to a scheduler: the one place where policies are named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from bins.edges import OnlineEdges
from bins.risk import risk
from llmserve.scheduling.order.fffs import fffs
from llmserve.scheduling.release import Full, Greedy, Release, Timeout
from llmserve.scheduling.scheduler import Scheduler
from llmserve.scheduling.trust import WINDOW_MIN, Trust

ORDERS = {"fffs": fffs}


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What decides when and where each request runs."""

    bins: Annotated[int, Meta(ge=1, description="equal-mass length bins")] = 8
    batch_size: Annotated[int, Meta(ge=1, description="requests in a full batch")] = 8
    release: Annotated[
        Literal["full", "timeout", "greedy"],
        Meta(
            description="when a bin lets a batch go: full; timeout: full, or the oldest has waited batch-wait-s; "
            "greedy: full, or an engine would idle"
        ),
    ] = "greedy"
    batch_wait_s: Annotated[float, Meta(ge=0, description="longest wait in a bin under --release timeout")] = 0.05
    order: Annotated[
        Literal["fffs"], Meta(description="which formed batch runs next; fffs: first formed, first served")
    ] = "fffs"
    bins_by: Annotated[
        Literal["risk", "median"],
        Meta(description="risk: the expected longest answer of a batch of such requests; median: the predicted length"),
    ] = "risk"
    edges: Annotated[
        tuple[float, ...] | None,
        Meta(description="first interior edges of the bins, output tokens (default: from the predictor's training)"),
    ] = None
    edges_window: Annotated[int, Meta(ge=1, description="predictions that the edges are fitted to")] = 4096
    edges_refit_every: Annotated[int, Meta(ge=0, description="arrivals between two fits of the edges; 0: never")] = 256
    trust_window: Annotated[
        int,
        Meta(
            ge=WINDOW_MIN,
            description="answers by which predictions are judged, or 4 x bins x batch-size when that is more; while "
            "they rank answers no better than chance, one bin serves",
        ),
    ] = 256
    queue_requests_max: Annotated[int, Meta(ge=1, description="requests that may wait; one more gets 429")] = 10_000
    retries_max: Annotated[
        int, Meta(ge=0, description="times a request runs again when its engine failed before the first byte")
    ] = 2
    engine_wait_s: Annotated[
        float, Meta(ge=0, description="how long requests wait for an engine when none is up, before 503")
    ] = 30.0

    def scheduler(self, lengths: Sequence[float] = ()) -> Scheduler:
        """A fresh scheduler. lengths: a sample of what bins go by (tokens) for the first edges.

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
            # Answers come in batches of one bin, which say nothing about ranking between bins.
            trust=Trust(max(self.trust_window, 4 * self.bins * self.batch_size)),
            by_risk=self.bins_by == "risk",
            queue_requests_max=self.queue_requests_max,
            retries_max=self.retries_max,
            engine_wait_s=self.engine_wait_s,
        )

    def scores(self, forecasts: Iterable[Sequence[float]]) -> tuple[float, ...]:
        """What bins go by, of a sample of forecasts (equally likely lengths each)."""
        if self.bins_by == "risk":
            return tuple(risk(lengths, self.batch_size) for lengths in forecasts)
        return tuple(lengths[len(lengths) // 2] for lengths in forecasts)

    def _release(self) -> Release:
        if self.release == "full":
            return Full(self.batch_size)
        if self.release == "timeout":
            return Timeout(self.batch_size, self.batch_wait_s)
        return Greedy(self.batch_size)
