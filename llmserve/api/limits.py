"""Who may come in, and how often: API keys and the limits of each."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from llmserve.errors import ConfigError, RateLimited, Unauthorized


def read_keys(path: Path) -> dict[str, str]:
    """Keys of a file by their owner's name: one `name: key` or `key` a line; blank lines and #-lines are left out.

    A key that holds a colon needs a name. Raises ConfigError on an unreadable or empty file, a key that stands twice,
    or one that no HTTP header can carry.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, separator, key = text.partition(":")
        name, key = (name.strip(), key.strip()) if separator else (f"key{number}", text)
        if not name or not key or not key.isascii() or any(character.isspace() for character in key):
            raise ConfigError(f"{path}, line {number}: not `name: key` or `key` (ASCII, without white space)")
        if name in keys or key in keys.values():
            raise ConfigError(f"{path}, line {number}: this name or key stands twice")
        keys[name] = key
    if not keys:
        raise ConfigError(f"{path} holds no API key")
    return keys


class KeyLimits:
    """Checks keys in constant time and keeps each key's limits; 0 means no limit.

    concurrent_max           calls of one key in progress at once
    requests_per_minute_max  a token bucket: that many at once at most, refilled evenly over a minute
    """

    def __init__(
        self,
        keys: Mapping[str, str],
        *,
        concurrent_max: int = 0,
        requests_per_minute_max: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = {_digest(key): name for name, key in keys.items()}
        self._concurrent_max = concurrent_max
        self._per_minute = requests_per_minute_max
        self._clock = clock
        self._in_progress: dict[str, int] = {}
        self._buckets: dict[str, tuple[float, float]] = {}  # name -> (calls left, when)

    def authenticate(self, authorization: str | None) -> str:
        """The key's name ("" when no keys are asked for). Raises Unauthorized."""
        if not self._names:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("no API key was given; send `Authorization: Bearer KEY`")
        given = _digest(key.strip())
        # Every key is compared, whichever fits, so that the time tells nothing.
        found = [name for digest, name in self._names.items() if hmac.compare_digest(digest, given)]
        if not found:
            raise Unauthorized("the API key is wrong")
        return found[0]

    def acquire(self, name: str) -> None:
        """Count a call in; every `acquire` that returns needs one `release`. Raises RateLimited."""
        running = self._in_progress.get(name, 0)
        if self._concurrent_max and running >= self._concurrent_max:
            raise RateLimited(
                f"this key has {running} requests in progress, the most allowed",
                code="concurrent_max",
                retry_after_s=1.0,
            )
        if self._per_minute:
            self._take(name)
        self._in_progress[name] = running + 1

    def release(self, name: str) -> None:
        left = self._in_progress[name] - 1
        if left:
            self._in_progress[name] = left
        else:
            del self._in_progress[name]

    def _take(self, name: str) -> None:
        now_s = self._clock()
        left, since_s = self._buckets.get(name, (float(self._per_minute), now_s))
        left = min(float(self._per_minute), left + (now_s - since_s) * self._per_minute / 60.0)
        if left < 1.0:
            self._buckets[name] = (left, now_s)
            raise RateLimited(
                f"this key may ask {self._per_minute} times a minute",
                code="requests_per_minute",
                retry_after_s=(1.0 - left) * 60.0 / self._per_minute,
            )
        self._buckets[name] = (left - 1.0, now_s)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
