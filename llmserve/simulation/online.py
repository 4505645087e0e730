"""Forecasts by a learner during a run: an answer is forecast when its request arrives, and learnt when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmserve.request import Request
from llmserve.scheduling.messages import BatchEnded, Event, RequestEnded


class RowForecast(Protocol):
    """Equally likely output lengths, tokens, ascending; () when nothing is known. The middle length is the median."""

    @property
    def lengths(self) -> tuple[float, ...]: ...

    @property
    def median(self) -> float | None: ...


class RowLearner(Protocol):
    """Forecasts and learns the answers to the rows of a file, like the learner of a server."""

    def forecast(self, row: Any, /) -> RowForecast: ...

    def observe(self, row: Any, forecast: Any, /) -> None:
        """Learn the length of the row's answer."""
        ...


@dataclass(frozen=True, slots=True)
class OnlineRows:
    """rows : (rows,) of a file, of any type.  learner : makes a learner of these rows that knows nothing yet."""

    rows: NDArray[np.object_]
    learner: Callable[[], RowLearner]

    def at(self, places: NDArray[np.intp]) -> OnlineRows:
        """The rows at these places, in this order; a row may repeat."""
        return OnlineRows(self.rows[places], self.learner)

    def forecasts(self) -> OnlineForecasts:
        """The forecasts of a run whose request of id i is row i."""
        return OnlineForecasts(self)


class OnlineForecasts:
    """The forecasts of a run's requests, and what their learner has learnt so far."""

    def __init__(self, online: OnlineRows) -> None:
        self._learner = online.learner()
        self._rows = online.rows
        self._forecasts: dict[int, RowForecast] = {}

    def predicted(self, request: Request) -> Request:
        """The request with its forecast by the answers learnt so far."""
        forecast = self._forecasts[request.id] = self._learner.forecast(self._rows[request.id])
        lengths = tuple([round(length, 1) for length in forecast.lengths])  # as in the live cluster
        return msgspec.structs.replace(request, predicted_tokens=forecast.median, quantiles=lengths)

    def learn(self, event: Event) -> None:
        """Learn the answers that end with this event."""
        if type(event) is BatchEnded:
            for request_id in event.output_tokens:
                self._learn(request_id)
        elif type(event) is RequestEnded and event.outcome == "completed":
            self._learn(event.request_id)

    def _learn(self, request_id: int) -> None:
        self._learner.observe(self._rows[request_id], self._forecasts.pop(request_id))
