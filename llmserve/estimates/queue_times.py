"""When a key's requests start and end, by the forecasts of what waits and runs: for Retry-After."""

from __future__ import annotations

from llmserve.calls.in_flight import InFlightCall
from llmserve.live.driver import LiveCluster
from llmserve.request import Request


class LiveQueueTimes:
    """The times of a live cluster; see charges.QueueTimes."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster

    def start_s(self, call: InFlightCall) -> float | None:
        """By the call's place, which knows the shares. Before the rate of ends is known, by the mean answer."""
        place = self._cluster.places.of(call)
        if place is None:
            return 0.0
        if place.wait_s is not None or place.helpless:
            return place.wait_s
        slots = sum([info.slots for info in self._cluster.fleet.infos_of(call.call.model)])
        return place.position * self._answer_s(call, None) / max(1, slots)

    def end_s(self, call: InFlightCall) -> float | None:
        if call.forwarding is not None:
            (left_s,) = self._cluster.remaining_s([call])
            return left_s
        start_s = self.start_s(call)
        return None if start_s is None else start_s + self._answer_s(call, call.request.expected_tokens)

    def next_s(self, request: Request) -> float | None:
        return self._cluster.places.next_s(request)

    def _answer_s(self, call: InFlightCall, tokens: float | None) -> float:
        """Seconds of an answer. tokens : None: as many as the mean"""
        queues = self._cluster.scheduler.models.get(call.call.model)
        if queues is None:
            return 0.0
        return (tokens or queues.service.tokens_mean) * queues.service.seconds_per_token
