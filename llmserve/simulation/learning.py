"""What a simulated server learns: an answer is forecast when its request arrives, and learnt when it ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from llmserve.forecasts.revisions import Forecast, Revisions
from llmserve.request import Request
from llmserve.scheduling.messages import BatchEnded, Event, RequestEnded, RevisedForecast
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.simulation.online import OnlineRows, RowForecast


class SimulatedLearning:
    """The forecasts of a run's requests, revised while they wait, as in a server.

    online : the request of id i is row i.  requests : of the scheduler; see Revisions
    """

    def __init__(self, online: OnlineRows, requests: Mapping[int, QueuedRequest]) -> None:
        self._learner = online.learner()
        self._rows = online.rows
        self._forecasts: dict[int, RowForecast] = {}
        self._revisions = Revisions(requests, self._revised)

    def predicted(self, request: Request) -> Request:
        """The request with its forecast by the answers learnt so far."""
        forecast = self._forecasts[request.id] = self._learner.forecast(self._rows[request.id])
        median, lengths = _rounded(forecast)
        return msgspec.structs.replace(request, predicted_tokens=median, quantiles=lengths)

    def learn(self, event: Event) -> Sequence[RevisedForecast]:
        """Learn the answers that end with this event. Returns the forecasts of waiting requests that have changed."""
        ended: Collection[int] = ()
        if type(event) is BatchEnded:
            ended = event.output_tokens
        elif type(event) is RequestEnded and event.outcome == "completed":
            ended = (event.request_id,)
        for request_id in ended:
            self._learner.observe(self._rows[request_id], self._forecasts.pop(request_id))
            self._revisions.learnt()
        return self._revisions.rest()

    def _revised(self, request_id: int) -> Forecast:
        forecast = self._learner.revise(self._rows[request_id], self._forecasts[request_id])
        self._forecasts[request_id] = forecast
        return _rounded(forecast)


def _rounded(forecast: RowForecast) -> Forecast:
    return forecast.median, tuple([round(length, 1) for length in forecast.lengths])  # as in the live cluster
