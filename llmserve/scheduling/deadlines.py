"""When requests that wait are late: the one place where somebody's deadline is watched."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from llmserve.scheduling.queues import ENTRIES_SPARE, QueuedRequest


class Deadlines:
    """Of all requests that wait and have one.

    late_at_s  from when on a request cannot be in time, as far as is known at a time; None: never
    next_at_s  when the next one may be late; None: nobody waits for whom it matters
    """

    def __init__(self, late_at_s: Callable[[QueuedRequest, float], float | None]) -> None:
        self.next_at_s: float | None = None
        self._late_at_s = late_at_s
        self._heap: list[tuple[float, int]] = []  # (when it is late, request id), and some that have left

    def watch(self, queued: QueuedRequest, now_s: float) -> None:
        """A request waits, for the first time or again, or more is known of it."""
        if queued.request.deadline_s is None:
            return
        at_s = self._late_at_s(queued, now_s)
        if at_s is not None:
            heapq.heappush(self._heap, (at_s, queued.request.id))
            self.next_at_s = self._heap[0][0]

    def late(self, requests: dict[int, QueuedRequest], now_s: float) -> Iterator[QueuedRequest]:
        """Those that wait and are late, each once; it must have left before the next is asked for."""
        while self._heap:
            at_s, request_id = self._heap[0]
            queued = requests.get(request_id)
            waits = queued is not None and queued.run is None
            if waits and at_s > now_s:
                break
            heapq.heappop(self._heap)  # its time has come, or it waits no more
            if queued is None or not waits:
                continue
            again_s = self._late_at_s(queued, now_s)  # answers may have become shorter, or engines faster
            if again_s is not None and again_s > now_s:
                heapq.heappush(self._heap, (again_s, request_id))
                continue
            yield queued
        if len(self._heap) > 2 * len(requests) + ENTRIES_SPARE:  # far ones of requests that are over
            # Of several entries of a request the earliest is kept.
            alive = {id_: at_s for at_s, id_ in sorted(self._heap, reverse=True) if id_ in requests}
            self._heap = [(at_s, id_) for id_, at_s in alive.items()]
            heapq.heapify(self._heap)
        self.next_at_s = self._heap[0][0] if self._heap else None
