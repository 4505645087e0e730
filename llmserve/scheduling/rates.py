"""How fast things happen, seen through a bounded memory."""

from __future__ import annotations

from collections import deque


class CompletionRate:
    """Completions per second of busy time, over the last `memory` completions."""

    def __init__(self, memory: int = 64) -> None:
        self._times_s: deque[float] = deque(maxlen=memory)

    def observe(self, now_s: float) -> None:
        self._times_s.append(now_s)

    def idle(self) -> None:
        """Nothing is left to complete: the time until the next arrival says nothing about speed."""
        self._times_s.clear()

    def drain_time_s(self, waiting: int) -> float | None:
        """Predicted seconds until `waiting` requests have ended; None before two distinct completion times."""
        if len(self._times_s) < 2 or self._times_s[-1] <= self._times_s[0]:
            return None
        return waiting * (self._times_s[-1] - self._times_s[0]) / (len(self._times_s) - 1)
