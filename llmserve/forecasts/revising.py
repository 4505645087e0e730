"""Revises forecasts on the event loop while answers and arrivals go on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from llmserve.forecasts.revisions import Revisions
from llmserve.scheduling.messages import ForecastsRevised

SLICE_S = 0.0002  # forecasts are revised for this time; then the scheduler gets them
PAUSE = 4  # in units of a slice and its step: revising takes at most a fifth of the event loop

log = logging.getLogger("llmserve")


class Revising:
    """Carries out rounds of revisions in slices of less than a millisecond.

    revisions : what to revise.  step : gives the scheduler an event
    """

    def __init__(self, revisions: Revisions, step: Callable[[ForecastsRevised], None]) -> None:
        self._revisions = revisions
        self._step = step
        self._next: asyncio.Handle | None = None

    def learnt(self) -> None:
        """Count a learnt answer, and begin a round if enough has been learnt."""
        self._revisions.learnt()
        if self._next is None and self._revisions.pending:
            self._next = asyncio.get_running_loop().call_soon(self._revise)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _revise(self) -> None:
        """Revise one slice, and come back after a pause while the round goes on."""
        began_s = time.perf_counter()
        self._next = None
        try:
            revised = self._revisions.some(lambda: time.perf_counter() < began_s + SLICE_S)
        except Exception:  # requests keep the forecasts that they have
            log.exception("the forecasts of waiting requests were not revised")
            self._revisions.give_up()
            return
        if revised:
            self._step(ForecastsRevised(revised))
        if self._revisions.pending:
            pause_s = PAUSE * (time.perf_counter() - began_s)
            self._next = asyncio.get_running_loop().call_later(pause_s, self._revise)
