"""When the calls of one key end and start, for Retry-After: kept for a second, for clients ask again and again."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple, Protocol

from llmserve.calls.in_flight import InFlightCall
from llmserve.estimates.estimator import KEPT_S
from llmserve.request import Request


class CallTimes(Protocol):
    """When calls start and end, in seconds from now; None: unknown. See estimator.Estimator."""

    def start_s(self, call: InFlightCall) -> float | None: ...

    def end_s(self, call: InFlightCall) -> float | None: ...

    def next_start_s(self, request: Request) -> float | None: ...


class Starts(NamedTuple):
    """When waiting calls start.

    made_s : time of the prediction.  starts_s : ascending.  sums : tokens that have started by each of these times
    """

    made_s: float
    starts_s: list[float]
    sums: list[float]


class KeyEstimates:
    """Predictions for one key, by model; "": of all its models. times : None: nothing is predicted"""

    def __init__(self, times: CallTimes | None, clock: Callable[[], float]) -> None:
        self._times = times
        self._clock = clock
        self._first_ends: dict[str, tuple[float, float]] = {}  # times of the prediction, and of the end
        self._starts: dict[str, Starts] = {}

    def first_end_s(self, model: str, calls: Iterable[InFlightCall]) -> float | None:
        """Predicted seconds until one of the key's calls ends; None: unknown. calls : iterated if nothing is kept"""
        now_s, times = self._clock(), self._times
        made_s, end_s = self._first_ends.get(model, (-math.inf, 0.0))
        if now_s - made_s >= KEPT_S:
            ends_s = [times.end_s(call) for call in calls] if times is not None else []
            left_s = min([end_s for end_s in ends_s if end_s is not None], default=None)
            if left_s is None:
                return None
            end_s = now_s + left_s
            self._first_ends[model] = now_s, end_s
        return max(0.0, end_s - now_s)

    def room_s(self, model: str, tokens: float, waiting: Iterable[tuple[InFlightCall, float]]) -> float | None:
        """Predicted seconds until so many of the key's waiting tokens have started; None: unknown.

        waiting : the waiting calls with their tokens, iterated if nothing is kept
        """
        now_s = self._clock()
        kept = self._starts.get(model)
        if kept is None or now_s - kept.made_s >= KEPT_S:
            kept = self._starts[model] = self._starts_of(waiting, now_s)
        if not kept.starts_s:
            return None
        return max(0.0, kept.starts_s[min(bisect_left(kept.sums, tokens), len(kept.starts_s) - 1)] - now_s)

    def _starts_of(self, waiting: Iterable[tuple[InFlightCall, float]], now_s: float) -> Starts:
        times = self._times
        starts = [(times.start_s(call), tokens) for call, tokens in waiting] if times is not None else []
        known = sorted([(now_s + start_s, tokens) for start_s, tokens in starts if start_s is not None])
        return Starts(now_s, [start_s for start_s, _ in known], list(accumulate([tokens for _, tokens in known])))
