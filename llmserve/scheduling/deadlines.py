"""When waiting requests become late: the only place that watches deadlines."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from llmserve.scheduling.queues import ENTRIES_SPARE, QueuedRequest


class Deadlines:
    """The deadlines of all waiting requests.

    late_at_s  time after which a request is late, as estimated at the given time; None: never
    next_at_s  earliest time at which a waiting request may become late; None: no waiting request can
    """

    def __init__(self, late_at_s: Callable[[QueuedRequest, float], float | None]) -> None:
        self.next_at_s: float | None = None
        self._late_at_s = late_at_s
        self._heap: list[tuple[float, int]] = []  # (time at which it is late, request id); may hold requests that left

    def watch(self, queued: QueuedRequest, now_s: float) -> None:
        """Watch a request that waits, or watch it by new batch times."""
        if queued.request.deadline_s is None:
            return
        at_s = self._late_at_s(queued, now_s)
        if at_s is not None:
            heapq.heappush(self._heap, (at_s, queued.request.id))
            self.next_at_s = self._heap[0][0]

    def late(self, requests: dict[int, QueuedRequest], now_s: float) -> Iterator[QueuedRequest]:
        """Yield each waiting request that is late. The caller must remove the request before it asks for the next."""
        while self._heap:
            at_s, request_id = self._heap[0]
            queued = requests.get(request_id)
            waits = queued is not None and queued.run is None
            if waits and at_s > now_s:
                break
            heapq.heappop(self._heap)  # the time has come, or the request no longer waits
            if queued is None or not waits:
                continue
            again_s = self._late_at_s(queued, now_s)  # estimate again: answers may be shorter now, or engines faster
            if again_s is not None and again_s > now_s:
                heapq.heappush(self._heap, (again_s, request_id))
                continue
            yield queued
        if len(self._heap) > 2 * len(requests) + ENTRIES_SPARE:  # drop entries of requests that have ended
            # A request with several entries keeps the earliest.
            alive = {id_: at_s for at_s, id_ in sorted(self._heap, reverse=True) if id_ in requests}
            self._heap = [(at_s, id_) for id_, at_s in alive.items()]
            heapq.heapify(self._heap)
        self.next_at_s = self._heap[0][0] if self._heap else None
