"""How long a simulated engine takes for what it is given."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from llmserve.request import Batch, EngineInfo
from llmserve.scheduling.messages import BatchEnded, Event, RequestEnded


class TimedEngine:
    """An engine whose every step takes the same time.

    A barrier engine's batch takes prefill_s + step_s times its longest length (Multi-Bin, Section 3); on a refill
    engine each request takes prefill_s + step_s times its own length, from when a slot is free.
    lengths : output tokens by request id.
    """

    def __init__(
        self,
        info: EngineInfo,
        lengths: Mapping[int, float] | Sequence[float],
        *,
        step_s: float,
        prefill_s: float = 0.0,
    ) -> None:
        self.info = info
        self.busy_s = 0.0  # slot-seconds of a refill engine, engine-seconds of a barrier engine
        self._lengths = lengths
        self._step_s = step_s
        self._prefill_s = prefill_s
        self._ends_s: list[float] = []  # heap: of the requests that have a refill engine's slots

    def ends(self, batch: Batch, now_s: float) -> list[tuple[float, Event]]:
        lengths = {request.id: self._lengths[request.id] for request in batch.requests}
        name = self.info.name
        if self.info.barrier:
            takes_s = self._prefill_s + self._step_s * max(lengths.values())
            self.busy_s += takes_s
            return [(now_s + takes_s, BatchEnded(name, batch.id, lengths))]
        ends: list[tuple[float, Event]] = []
        for request_id, length in lengths.items():
            takes_s = self._prefill_s + self._step_s * length
            self.busy_s += takes_s
            ends.append((self._slot_at_s(now_s) + takes_s, RequestEnded(name, request_id, "completed", length)))
            heapq.heappush(self._ends_s, ends[-1][0])
        return ends

    def _slot_at_s(self, now_s: float) -> float:
        """When the next slot is free; it is then taken."""
        while self._ends_s and self._ends_s[0] <= now_s:
            heapq.heappop(self._ends_s)
        return now_s if len(self._ends_s) < self.info.slots else heapq.heappop(self._ends_s)

    def utilisation(self, elapsed_s: float) -> float:
        """Share of its time (of its slots' time, on a refill engine) that it was at work."""
        capacity_s = elapsed_s if self.info.barrier else elapsed_s * self.info.slots
        return self.busy_s / capacity_s if capacity_s > 0 else 0.0
