"""Learns an engine's number of slots from what it tells of its running and waiting requests."""

from __future__ import annotations

from typing import Any

from llmserve.engines.dialects import Told

SLOTS_MAX = 1 << 16  # no engine has as many: an engine that always claims to be full must not grow without end

FIRST_GROWTH = 2.0  # growth factor of the number of slots, when all slots are in use and no request waits
GROWTH = 1.25  # the same factor after requests have waited inside the engine once


class SlotsLearner:
    """Estimates an engine's number of slots from readings of its metrics; vLLM does not report its max_num_seqs.

    While more requests than the look-ahead wait inside the engine, the number of running requests is the number of
    slots. While all slots are in use and no request waits, the engine may have more slots. A reading may fall between
    a request's arrival and its first step, so two readings in a row must show the waiting requests.

    slots          first guess; choose few, because requests sent too early wait inside the engine in FCFS order
    limit_reached  more requests than the look-ahead have waited; before that, there may be far more slots
    """

    def __init__(self, slots: int, look_ahead: int) -> None:
        self.slots = slots
        self.limit_reached = False
        self._look_ahead = look_ahead
        self._before: tuple[int, int] | None = None  # running and waiting

    def observe(self, told: Told) -> int:
        """Add a reading. Returns the number of slots to use from now on."""
        if told.slots is not None:
            self.slots, self.limit_reached = max(1, told.slots), True
        elif told.running is not None and told.waiting is not None:
            self._observe(told.running, told.waiting)
        self.slots = min(self.slots, SLOTS_MAX)
        return self.slots

    def _observe(self, running: int, waiting: int) -> None:
        before, self._before = self._before, (running, waiting)
        if before is not None and min(before[1], waiting) > self._look_ahead:
            self.slots, self.limit_reached = max(1, before[0], running), True
        elif waiting == 0 and running >= self.slots:
            self.slots = int(self.slots * (GROWTH if self.limit_reached else FIRST_GROWTH)) + 1

    def state(self) -> dict[str, Any]:
        return {"slots": self.slots, "limit_reached": self.limit_reached}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises ValueError for anything else."""
        slots, limit_reached = state.get("slots"), state.get("limit_reached")
        if type(slots) is not int or slots < 1 or type(limit_reached) is not bool:
            raise ValueError(f"{state} is no state of an engine's slots")
        self.slots, self.limit_reached = slots, limit_reached
