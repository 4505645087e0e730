"""Which forecasts are revised while requests wait, and when. The live and the simulated cluster use the same object.

Forecasts are revised in rounds over the waiting requests, the oldest first. What answers teach grows with the logarithm
of their number, so each round follows when an eighth more answers have been learnt: after 1, 2, ... 16, 18, 20, 22, ...
At last a round follows every ANSWERS_MOST answers, so that a change of all lengths is followed, too.

Pure: no clock, no randomness, no I/O.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from llmserve.request import Request
from llmserve.scheduling.messages import REVISIONS_MAX, RevisedForecast
from llmserve.scheduling.queues.waiting import QueuedRequest

GROWTH = 8  # a round follows when 1/GROWTH more answers have been learnt than at the last round
ANSWERS_MOST = 64  # answers between two rounds
CHANGE_LEAST = 0.1  # relative: the scheduler is not told of smaller changes

Forecast = tuple[float | None, tuple[float, ...]]
"""Median and equally likely lengths, output tokens; the median is None when nothing is known."""


class Revisions:
    """Rounds of revisions. After each learnt answer call `learnt`; while `pending`, give the scheduler those of `some`.

    requests  requests of the scheduler by id, in order of arrival: Scheduler.requests
    forecast  a waiting request's forecast by all that was learnt, by id; None: the forecast stays: there is none, or
              the client supplied it
    """

    def __init__(self, requests: Mapping[int, QueuedRequest], forecast: Callable[[int], Forecast | None]) -> None:
        self._requests = requests
        self._forecast = forecast
        self._learnt = 0
        self._learnt_before = 0  # answers at the beginning of the last round
        self._newest = math.inf  # id of the last request that had arrived at the beginning of the present round
        self._last = math.inf  # ... of the round before, the last request that the present round visits
        self._left: deque[int] = deque()  # ids of the present round

    def learnt(self) -> None:
        """Count an answer from which the forecaster has learnt."""
        self._learnt += 1

    @property
    def pending(self) -> bool:
        """Whether a round goes on, or is due."""
        return bool(self._left) or self._is_due

    @property
    def _is_due(self) -> bool:
        since = self._learnt - self._learnt_before
        return since >= max(1, min(self._learnt_before // GROWTH, ANSWERS_MOST))

    def some(self, goes_on: Callable[[], bool] = lambda: True) -> tuple[RevisedForecast, ...]:
        """The next forecasts of the round that have changed, at most REVISIONS_MAX. goes_on : asked before each."""
        if not self._left and self._is_due:
            self._begin()
        changed: list[RevisedForecast] = []
        while self._left and len(changed) < REVISIONS_MAX and goes_on():
            request_id = self._left.popleft()
            queued = self._requests.get(request_id)
            if queued is None or queued.run is not None or request_id > self._last:
                continue
            forecast = self._forecast(request_id)
            if forecast is not None and (revised := _changed(queued.request, *forecast)) is not None:
                changed.append(revised)
        return tuple(changed)

    def rest(self) -> list[RevisedForecast]:
        """All of the round that have changed, for a driver whose clock stands still meanwhile."""
        changed: list[RevisedForecast] = []
        while self.pending:
            changed += self.some()
        return changed

    def give_up(self) -> None:
        """End the round."""
        self._left.clear()

    def _begin(self) -> None:
        """Begin a round. Requests that arrived after the start of the last round have recent forecasts."""
        self._learnt_before = self._learnt
        self._left.extend(self._requests)
        self._last, self._newest = self._newest, self._left[-1] if self._left else math.inf


def _changed(request: Request, median: float | None, lengths: tuple[float, ...]) -> RevisedForecast | None:
    """The request's later forecast; None: it hardly differs, or nothing is known."""
    if median is None:
        return None
    before, after = _values(request.predicted_tokens, request.quantiles), _values(median, lengths)
    if len(before) == len(after) and all(
        abs(later - length) <= CHANGE_LEAST * length for length, later in zip(before, after, strict=True)
    ):
        return None
    return RevisedForecast(request.id, median, lengths)


def _values(median: float | None, lengths: tuple[float, ...]) -> tuple[float, ...]:
    return lengths or (() if median is None else (median,))
