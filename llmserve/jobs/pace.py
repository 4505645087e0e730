"""How fast lines end, and when a batch will probably end at this pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 120.0


class Pace:
    """Tokens of the lines that ended in the last WINDOW_S, as validation has estimated these. clock : any seconds"""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: deque[tuple[float, float]] = deque()  # time of a whole second, tokens
        self._tokens = 0.0
        self._since_s: float | None = None  # when lines began to end

    def ended(self, tokens: float) -> None:
        """Note that a line has a result."""
        now_s = self._clock()
        self._forget(now_s)
        if self._since_s is None:
            self._since_s = now_s
        if self._ended and self._ended[-1][0] == now_s // 1:
            self._ended[-1] = now_s // 1, self._ended[-1][1] + tokens
        else:
            self._ended.append((now_s // 1, tokens))
        self._tokens += tokens

    def end_s(self, tokens: float) -> float | None:
        """When so many more tokens will have ended, on the clock; None: no line has ended lately."""
        now_s = self._clock()
        self._forget(now_s)
        if self._since_s is None or not self._tokens:
            return None
        seconds = max(1.0, min(WINDOW_S, now_s - self._since_s))
        return now_s + tokens * seconds / self._tokens

    def _forget(self, now_s: float) -> None:
        while self._ended and self._ended[0][0] < now_s - WINDOW_S:
            self._tokens -= self._ended.popleft()[1]
        if not self._ended:
            self._tokens, self._since_s = 0.0, None
