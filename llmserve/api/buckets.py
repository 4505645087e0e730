"""Buckets of requests or tokens a minute, and what counts against the limits of a key."""

from __future__ import annotations

from llmserve.api.key_file import Limits

MINUTE_S = 60.0
ROUNDING = 1e-6  # of a token: whoever comes back after `wait_s` is admitted


class Bucket:
    """Holds `size`, and is refilled evenly over a minute. What was reserved and not used comes back.

    A request that used more than was reserved leaves a debt, which the refill pays first.
    """

    __slots__ = ("_level", "_since_s", "size")

    def __init__(self, size: int, now_s: float) -> None:
        self.size = size
        self._level, self._since_s = float(size), now_s

    def level(self, now_s: float) -> float:
        """What may be taken now; below 0: a debt."""
        self._level = min(self.size, self._level + (now_s - self._since_s) * self.size / MINUTE_S)
        self._since_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until the amount, at most the size, may be taken; 0: now."""
        short = amount - self.level(now_s)
        return short * MINUTE_S / self.size if short > ROUNDING else 0.0

    def full_in_s(self, now_s: float) -> float:
        return self.wait_s(self.size, now_s)

    def take(self, amount: float, now_s: float) -> None:
        """Take the amount. amount : < 0 gives back"""
        self._level = self.level(now_s) - amount

    def resize(self, size: int, now_s: float) -> None:
        """Change the size; what is taken stays taken."""
        self._level = self.level(now_s) + size - self.size
        self.size = size


class Scope:
    """The limits of a key, or of a key and a model, and what counts against them now.

    requests, tokens        None: no limit by the minute
    running, waiting_tokens requests in progress, and tokens of those that have not started
    """

    __slots__ = ("concurrent", "requests", "running", "tokens", "tokens_waiting", "waiting_tokens", "who")

    def __init__(self, who: str, limits: Limits, now_s: float) -> None:
        self.who = who
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.running, self.waiting_tokens = 0, 0.0
        self.change(limits, now_s)

    def change(self, limits: Limits, now_s: float) -> None:
        """Take other limits; what counts against them stays."""
        self.requests = _bucket(self.requests, limits.requests_per_minute, now_s)
        self.tokens = _bucket(self.tokens, limits.tokens_per_minute, now_s)
        self.concurrent = limits.concurrent or 0
        self.tokens_waiting = limits.tokens_waiting or 0

    @property
    def limits_anything(self) -> bool:
        return bool(self.requests or self.tokens or self.concurrent or self.tokens_waiting)


def _bucket(before: Bucket | None, size: int | None, now_s: float) -> Bucket | None:
    if not size:
        return None
    if before is None:
        return Bucket(size, now_s)
    before.resize(size, now_s)
    return before
