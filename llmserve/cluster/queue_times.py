"""When a key's next request could start, by the forecasts of what waits and runs: for Retry-After."""

from __future__ import annotations

from collections.abc import Iterable

from llmserve.cluster.in_flight import InFlightCall
from llmserve.cluster.live import LiveCluster


class LiveQueueTimes:
    """The times of a live cluster; see charges.QueueTimes."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster

    def first_end_s(self, calls: Iterable[InFlightCall]) -> float | None:
        running = [call for call in calls if call.receipt is not None]
        return min(self._cluster.remaining_s(running), default=None)

    def wait_s(self, model: str) -> float:
        """Their number, by the mean time of an answer and the slots of the model's engines."""
        queues = self._cluster.scheduler.models.get(model)
        if queues is None:
            return 0.0
        mean_s = queues.service.tokens_mean * queues.service.seconds_per_token
        return queues.waiting * mean_s / max(1, queues.all_slots)
