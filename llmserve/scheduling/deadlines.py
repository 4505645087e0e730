"""When a request that waits is late: it cannot be in time any more, even alone and at once on the fastest engine.

Where nothing is known of how long things take, or the order does not ask, that is when its deadline passes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

from llmserve.scheduling.batch_times import Timetable
from llmserve.scheduling.model_queues import ModelQueues
from llmserve.scheduling.queues import ENTRIES_SPARE, QueuedRequest

SURELY_LATE_S = 1e-6  # past the last moment: what could start in that very moment still can

QueuesOf = Callable[[QueuedRequest], ModelQueues]


class Deadlines:
    """Of all requests that wait and have one.

    times      of batches, where the order goes by them; None: it does not
    next_at_s  when the next one may be late; None: nobody waits for whom it matters
    """

    def __init__(self, times: Timetable | None) -> None:
        self._times = times
        self.next_at_s: float | None = None
        self._heap: list[tuple[float, int]] = []  # (when it is late, request id), and some that have left
        # By group and model: what a request takes alone, on each engine, and until when that holds.
        self._alone: dict[tuple[str, str], tuple[float, set[tuple[float, float]]]] = {}

    def watch(self, queued: QueuedRequest, queues: ModelQueues, now_s: float) -> None:
        """A request waits, for the first time or again."""
        at_s = self.late_at_s(queued, queues, now_s)
        if at_s is not None:
            heapq.heappush(self._heap, (at_s, queued.request.id))
            self.next_at_s = self._heap[0][0]

    def late_at_s(self, queued: QueuedRequest, queues: ModelQueues, now_s: float) -> float | None:
        """From when on it cannot be in time, as far as is known now; None: never."""
        due_s = queued.request.deadline_s
        if due_s is None or self._times is None:
            return due_s
        return min(due_s, due_s - self._least_s(self._times, queued, queues, now_s) + SURELY_LATE_S)

    def _least_s(self, times: Timetable, queued: QueuedRequest, queues: ModelQueues, now_s: float) -> float:
        """Seconds that it takes alone on the fastest engine, if it is among the shortest of its bin, or as short as may
        be by its own prediction.
        """
        key = (queues.group, queues.model)
        until_s, lines = self._alone.get(key, (-math.inf, set()))
        if now_s >= until_s:
            lines = {times.alone(engine, queues.model, now_s) for engine in queues.engines}
            proven_s = [engine.proven_until_s(queues.model) for engine in queues.engines]
            until_s = min([at_s for at_s in proven_s if at_s > now_s], default=math.inf)
            self._alone[key] = until_s, lines
        request, tokens = queued.request, queues.tokens(queued.bin).least
        own = request.quantiles[0] if request.quantiles else request.predicted_tokens
        if own is not None and own < tokens:
            tokens = own
        return min([prefill_s + tokens * step_s for prefill_s, step_s in lines], default=0.0)

    def look_again(self) -> None:
        """After a change of who serves what, and how fast."""
        self._alone.clear()

    def late(self, requests: dict[int, QueuedRequest], queues_of: QueuesOf, now_s: float) -> Iterator[QueuedRequest]:
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
            if self._times is not None:  # answers may have become shorter, or engines faster, since it came
                again_s = self.late_at_s(queued, queues_of(queued), now_s)
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
