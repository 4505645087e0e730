"""How long a batch would take, by its engine's speed and pace and its bin's answer lengths; and who is late by that.

    T(b) = pace * (prefill_s + E[longest answer of b] * step_s(b))

On a refill engine each request ends on its own, and all slots share each step:

    T(b) = pace * (prefill_s + E[an answer] * step_s(slots))

An engine of unknown speed is taken to need no time: then a request is late only when its deadline has passed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from bins.profile import StepTimes
from llmserve.request import EngineInfo
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.lengths import Tokens
from llmserve.scheduling.queues.waiting import ENTRIES_SPARE, QueuedRequest

SURELY_LATE_S = 1e-6  # margin after the last possible start, so that a request can still start at that very time
PACE_GRID = 0.02  # paces are rounded to steps of 2 %


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Seconds of batches of 1, 2, ... requests, both non-decreasing.

    expected : with answers of average length.  least : with the shortest answers, on an engine that runs nothing else.
    """

    expected: tuple[float, ...]
    least: tuple[float, ...]

    def at(self, pace: float) -> BatchTimes:
        return BatchTimes(tuple([pace * s for s in self.expected]), tuple([pace * s for s in self.least]))


class Timetable:
    """Batch times of every engine, model and bin; computed again when lengths, speeds or paces change."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        # By model: until when the entry holds, and the times of `_lines_of`.
        self._alone: dict[str, tuple[float, set[tuple[float, float]]]] = {}
        # By engine, model and bin: the inputs (tokens, engine, pace), the times at pace 1 and the times at that pace.
        self._times: dict[tuple[str, str, int], tuple[Tokens, EngineInfo, float, BatchTimes, BatchTimes]] = {}

    def late_at_s(self, queued: QueuedRequest, engines: Sequence[EngineState], least: float, now_s: float) -> float:
        """Time from which a request with a deadline is late. A late request could not be in time even if it started at
        once, alone, on the fastest of these engines, with the shortest answer of its bin or of its own prediction.

        least : output tokens of the shortest answers of its bin
        """
        request = queued.request
        own = request.quantiles[0] if request.quantiles else request.predicted_tokens
        tokens = least if own is None else min(own, least)
        lines = self._lines_of(request.model, engines, now_s)
        alone_s = min([prefill_s + tokens * step_s for prefill_s, step_s in lines], default=0.0)
        return min(queued.deadline_s, queued.deadline_s - alone_s + SURELY_LATE_S)

    def invalidate(self) -> None:
        """Drop cached times. Call after engines have come, gone, or changed their models or speed."""
        self._alone.clear()

    def _lines_of(self, model: str, engines: Sequence[EngineState], now_s: float) -> set[tuple[float, float]]:
        """Times of a request that runs alone, for each engine: (prefill seconds, seconds for each token). Both are 0 on
        an engine whose pace is not proven.
        """
        until_s, lines = self._alone.get(model, (-math.inf, set()))
        if now_s >= until_s:
            until_s, lines = math.inf, set()
            for engine in engines:
                proven_until_s = engine.proven_until_s(model)
                if now_s < proven_until_s:
                    lines.add(_alone(engine, model))
                    until_s = min(until_s, proven_until_s)
                else:
                    lines.add((0.0, 0.0))
            self._alone[model] = until_s, lines
        return lines

    def of(self, engine: EngineState, model: str, bin_index: int, tokens: Tokens) -> BatchTimes:
        """Batch times of a bin on an engine. tokens : of the bin's answers."""
        pace = _rounded(engine.pace(model))
        key = (engine.info.name, model, bin_index)
        cached = self._times.get(key)
        if cached is not None and cached[0] is tokens and cached[1] is engine.info:
            if cached[2] == pace:
                return cached[4]
            unscaled = cached[3]
        else:
            unscaled = _profiled(engine.speed(model), engine.info.slots, engine.info.barrier, tokens, self._batch_size)
        times = unscaled if pace == 1.0 else unscaled.at(pace)
        self._times[key] = tokens, engine.info, pace, unscaled, times
        return times


@lru_cache(maxsize=1024)  # engines of the same profile share the entry
def _profiled(speed: StepTimes | None, slots: int, barrier: bool, tokens: Tokens, batch_size: int) -> BatchTimes:
    """Batch times at pace 1."""
    if speed is None or not speed.step_s:
        zeros = (0.0,) * batch_size
        return BatchTimes(zeros, zeros)
    slots = min(slots, len(speed.step_s))
    together = [min(size, slots) for size in range(1, batch_size + 1)]
    least = [speed.batch_s(tokens.least, size) for size in together]
    if barrier:
        expected = [speed.batch_s(longest, size) for longest, size in zip(tokens.longest, together, strict=True)]
    else:  # each request ends on its own, and all slots share each step
        expected = [speed.batch_s(tokens.longest[0], slots)] * batch_size
    return BatchTimes(_rising(expected), _rising(least))


def _alone(engine: EngineState, model: str) -> tuple[float, float]:
    speed, pace = engine.speed(model), _rounded(engine.pace(model))
    return (pace * speed.prefill_s, pace * speed.step_s[0]) if speed is not None and speed.step_s else (0.0, 0.0)


def _rounded(pace: float) -> float:
    return 1.0 if pace == 1.0 else max(1, round(pace / PACE_GRID)) * PACE_GRID


def _rising(times: list[float]) -> tuple[float, ...]:
    return tuple(accumulate(times, max))


class Deadlines:
    """Times until which waiting requests may wait: their deadlines, or the ends of their waits for an engine.

    late_at_s  time after which a request is late, as estimated at the given time; None: never
    next_at_s  earliest time at which a waiting request may become late; None: no waiting request can
    """

    def __init__(self, late_at_s: Callable[[QueuedRequest, float], float | None]) -> None:
        self.next_at_s: float | None = None
        self._late_at_s = late_at_s
        self._heap: list[tuple[float, int]] = []  # (time at which it is late, request id); may hold requests that left
        self._times: dict[int, float] = {}  # of the entry that counts, the earliest, by request id

    def watch(self, queued: QueuedRequest, now_s: float) -> None:
        """Watch a request that waits, or watch it by new batch times. The earliest time counts, at which the time is
        estimated again.
        """
        at_s, request_id = self._late_at_s(queued, now_s), queued.request.id
        if at_s is not None and at_s < self._times.get(request_id, math.inf):
            self._times[request_id] = at_s
            heapq.heappush(self._heap, (at_s, request_id))
            self.next_at_s = self._heap[0][0]

    def clear(self) -> None:
        """Watch none of the requests any more."""
        self._heap.clear()
        self._times.clear()
        self.next_at_s = None

    def late(self, requests: dict[int, QueuedRequest], now_s: float) -> Iterator[QueuedRequest]:
        """Yield each waiting request that is late. The caller must remove the request before it asks for the next."""
        while self._heap:
            at_s, request_id = self._heap[0]
            queued, counts = requests.get(request_id), at_s == self._times.get(request_id)
            waits = queued is not None and queued.run is None
            if waits and counts and at_s > now_s:
                break
            heapq.heappop(self._heap)  # the time has come, or the request no longer waits
            if not counts:
                continue
            del self._times[request_id]
            if queued is None or not waits:
                continue
            again_s = self._late_at_s(queued, now_s)  # estimate again: answers may be shorter now, or engines faster
            if again_s is None:
                continue
            if again_s > now_s:
                self._times[request_id] = again_s
                heapq.heappush(self._heap, (again_s, request_id))
                continue
            yield queued
        if len(self._heap) > 2 * len(requests) + ENTRIES_SPARE:  # drop entries of requests that have ended
            self._times = {id_: at_s for id_, at_s in self._times.items() if id_ in requests}
            self._heap = [(at_s, id_) for id_, at_s in self._times.items()]
            heapq.heapify(self._heap)
        self.next_at_s = self._heap[0][0] if self._heap else None
