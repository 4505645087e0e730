"""A circuit breaker: an engine that fails all requests gets none for a while, then one at a time on trial.

closed     fewer than `faults_max` faults in a row
open       `faults_max` requests in a row failed by the engine's fault: nothing is sent until the pause is over
half open  the pause is over: one request (of a barrier engine: one batch) is on trial; its success closes the circuit,
           its failure opens the circuit for longer

Only the engine's own faults count (5xx, silence, broken connections), never a client's error (4xx). Only a request's
first try counts, for a request that fails on every engine says nothing about the engines. Requests sent before the
circuit opened neither lengthen the pause nor end it.
"""

from __future__ import annotations

import math
from collections.abc import Container

PAUSE_GROWTH = 2.0
PAUSES_MAX = 32.0  # longest pause, in units of the first


class Circuit:
    """faults_max: faults in a row that open the circuit; 0: never.  pause_s: the first pause; each next is doubled."""

    __slots__ = ("_faults", "_faults_max", "_first_pause_s", "_pause_s", "open_until_s", "trial")

    def __init__(self, faults_max: int, pause_s: float) -> None:
        self._faults_max = faults_max or math.inf
        self._first_pause_s = self._pause_s = pause_s
        self._faults = 0
        self.open_until_s: float | None = None  # None while closed; the past while half open
        self.trial: int | None = None  # the request on trial while half open

    @property
    def closed(self) -> bool:
        return self.open_until_s is None

    def takes(self, now_s: float) -> bool:
        """Whether a request may be sent now."""
        return self.open_until_s is None or (now_s >= self.open_until_s and self.trial is None)

    def started(self, request_id: int) -> None:
        if self.open_until_s is not None and self.trial is None:
            self.trial = request_id

    def fault(self, request_id: int, now_s: float) -> None:
        """Record that a request failed by the engine's fault."""
        self._faults += 1
        if self.open_until_s is None:
            if self._faults >= self._faults_max:
                self.open_until_s = now_s + self._pause_s
        elif request_id == self.trial:
            self._pause_s = min(PAUSE_GROWTH * self._pause_s, PAUSES_MAX * self._first_pause_s)
            self.open_until_s, self.trial = now_s + self._pause_s, None

    def success(self, request_ids: Container[int]) -> None:
        """Record that the engine has completed these requests. Closes the circuit unless another is on trial."""
        if self.open_until_s is not None and self.trial not in request_ids:
            return
        self._faults = 0
        self._pause_s = self._first_pause_s
        self.open_until_s = self.trial = None

    def end_trial(self, request_id: int) -> None:
        """End the trial of a request that left the engine without a result (cancelled): another may be tried."""
        if request_id == self.trial:
            self.trial = None
