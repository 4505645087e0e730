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


class ServiceTime:
    """How long requests run: seconds an output token, and tokens an answer; means that forget.

    memory: completions after which an observation's weight has fallen to a third.
    """

    def __init__(self, memory: int = 64, *, seconds_per_token: float = 0.02, tokens_mean: float = 256.0) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._seconds = self._tokens = self._answers = 0.0
        self.seconds_per_token = seconds_per_token  # a guess until the first answer
        self.tokens_mean = tokens_mean

    def observe(self, seconds: float, tokens: float) -> None:
        """One answer: so long on its engine, so many tokens (> 0)."""
        self._seconds = self._keep * self._seconds + seconds
        self._tokens = self._keep * self._tokens + tokens
        self._answers = self._keep * self._answers + 1.0
        self.tokens_mean = self._tokens / self._answers
        if self._seconds > 0:
            self.seconds_per_token = self._seconds / self._tokens
