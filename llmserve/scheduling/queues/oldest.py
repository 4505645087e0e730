"""The waiting requests of a model by age, whatever the order in which they start."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from llmserve.scheduling.queues.waiting import ENTRIES_SPARE, QueuedRequest


class Oldest:
    """The waiting requests of a model by age. A deadline that comes close counts as age.

    requests : those that wait.  slack_s : how long before its deadline a request counts as the oldest
    """

    def __init__(self, requests: Iterable[QueuedRequest]) -> None:
        self.slack_s = 0.0
        self._heap: list[tuple[float, int, QueuedRequest]] = []  # may hold requests that have left
        self._clean_at = ENTRIES_SPARE
        for queued in requests:
            self.add(queued)

    def add(self, queued: QueuedRequest) -> None:
        """Count a request that waits from now on, or again."""
        heapq.heappush(self._heap, (self.turn_s(queued), queued.request.id, queued))

    def turn_s(self, queued: QueuedRequest) -> float:
        """The arrival; of a request whose deadline is close an earlier time."""
        if queued.request.deadline_s is None:
            return queued.arrived_at_s
        return min(queued.arrived_at_s, queued.request.deadline_s - self.slack_s - queued.service_s)

    def first(self, waits: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        """The first of those that still wait."""
        heap = self._heap
        if len(heap) > self._clean_at:
            heap[:] = {entry[1]: entry for entry in heap if waits(entry[2])}.values()
            heapq.heapify(heap)
            self._clean_at = 2 * len(heap) + ENTRIES_SPARE
        while heap and not waits(heap[0][2]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None
