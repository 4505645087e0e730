"""One timer, set anew after each step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """A timer that calls `ring` once, at the time that was set last, in seconds of the clock `now_s`."""

    def __init__(self, now_s: Callable[[], float], ring: Callable[[], None]) -> None:
        self._now_s = now_s
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._at_s: float | None = None

    def set(self, at_s: float | None) -> None:
        """Ring at this time instead of the one before. None: never."""
        if at_s == self._at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at_s, self._timer = at_s, None
        if at_s is not None:
            # One millisecond late: some event loops round to milliseconds and would fire too early.
            delay_s = max(0.0, at_s - self._now_s()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = self._at_s = None
        self._ring()
