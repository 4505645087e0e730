"""Buckets of requests or tokens a minute, and what counts against the limits of a key."""

from __future__ import annotations

from llmserve.tenants.key_file import Limits

Headers = tuple[tuple[bytes, bytes], ...]
MINUTE_S = 60.0
ROUNDING = 1e-6  # of a token: whoever comes back after `wait_s` is admitted


class Bucket:
    """Holds `size`, and is refilled evenly over a minute. What was reserved and not used comes back.

    A request that used more than was reserved leaves a debt, which the refill pays first. So does a request of more
    than `size`, which may go when the bucket is full: of a limit of several servers, `size` is this server's part.
    limit : of all servers together.  size : None: the limit
    """

    __slots__ = ("_level", "_since_s", "limit", "size")

    def __init__(self, limit: int, now_s: float, size: float | None = None) -> None:
        self.limit = limit
        self.size = float(limit) if size is None else size
        self._level, self._since_s = self.size, now_s

    def level(self, now_s: float) -> float:
        """What may be taken now; below 0: a debt."""
        if now_s != self._since_s:  # a request asks several times at once
            level = self._level + (now_s - self._since_s) * self.size / MINUTE_S
            self._level, self._since_s = level if level < self.size else self.size, now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until the amount may be taken; 0: now."""
        short = (min(amount, self.size) if amount <= self.limit else amount) - self.level(now_s)
        return short * MINUTE_S / self.size if short > ROUNDING else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """Take the amount. amount : < 0 gives back"""
        self._level = self.level(now_s) - amount

    def resize(self, limit: int, now_s: float, size: float | None = None) -> None:
        """Change the size; what is taken stays taken.

        Of the same limit, a larger part is empty at first: another server may have used it.
        """
        size = float(limit) if size is None else size
        level = self.level(now_s)
        self._level = min(level, size) if limit == self.limit else level + size - self.size
        self.limit, self.size = limit, size


class Scope:
    """The limits of a key, or of a key and a model, and what counts against them now.

    requests, tokens        None: no limit by the minute
    running, waiting_tokens requests in progress, and tokens of those that have not started
    part                    of the limits that this server may use, 1 where no other serves these keys
    """

    __slots__ = ("concurrent", "requests", "running", "tokens", "tokens_waiting", "waiting_tokens", "who")

    def __init__(self, who: str, limits: Limits, now_s: float, part: float = 1.0) -> None:
        self.who = who
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.running, self.waiting_tokens = 0, 0.0
        self.change(limits, now_s, part)

    def change(self, limits: Limits, now_s: float, part: float = 1.0) -> None:
        """Take other limits; what counts against them stays."""
        self.requests = _bucket(self.requests, limits.requests_per_minute, now_s, part)
        self.tokens = _bucket(self.tokens, limits.tokens_per_minute, now_s, part)
        self.concurrent = _whole(limits.concurrent, part)
        self.tokens_waiting = _whole(limits.tokens_waiting, part)

    @property
    def limits_anything(self) -> bool:
        return bool(self.requests or self.tokens or self.concurrent or self.tokens_waiting)


def _whole(limit: int | None, part: float) -> int:
    """At least 1, so that no server refuses a key for ever; 0: no limit."""
    return max(1, round(limit * part)) if limit else 0


def _bucket(before: Bucket | None, limit: int | None, now_s: float, part: float) -> Bucket | None:
    if not limit:
        return None
    size = max(1.0, limit * part)
    if before is None:
        return Bucket(limit, now_s, size)
    before.resize(limit, now_s, size)
    return before


def limit_headers(unit: bytes, bucket: Bucket, now_s: float) -> Headers:
    level = bucket.level(now_s)
    short = bucket.size - level
    return (
        (b"x-ratelimit-limit-" + unit, b"%d" % bucket.limit),
        (b"x-ratelimit-remaining-" + unit, b"%d" % (level if level > 0.0 else 0.0)),
        (b"x-ratelimit-reset-" + unit, b"%.3fs" % (short * MINUTE_S / bucket.size if short > ROUNDING else 0.0)),
    )
