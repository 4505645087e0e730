"""API keys and the limits of each key."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from llmserve.errors import ConfigError, RateLimited, Unauthorized
from llmserve.private_file import warn_if_shared


def read_keys(path: Path) -> dict[str, str]:
    """Read a file of keys, one `name: key` or `key` per line. Returns name -> key. Blank and #-lines are skipped.

    A key with a colon needs a name. A name has no slash, which separates a key's name from its client's stream. Raises
    ConfigError on an unreadable or empty file, a repeated name or key, a character that is not printable, such as a
    byte order mark, or a key that an HTTP header cannot carry. Warns when others can read the file.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            warn_if_shared(path, os.fstat(file.fileno()))
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
    keys: dict[str, str] = {}
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        text = line.strip(" \t\r")
        if not text or text.startswith("#"):
            continue
        name, key = _name_and_key(text, number, f"{path}, line {number}")
        if name in keys or key in seen:
            raise ConfigError(f"{path}, line {number}: this name or key is in the file twice")
        keys[name] = key
        seen.add(key)
    if not keys:
        raise ConfigError(f"{path} has no API key")
    return keys


def _name_and_key(text: str, number: int, place: str) -> tuple[str, str]:
    first, separator, rest = text.partition(":")
    name, key = (first.strip(" \t"), rest.strip(" \t")) if separator else (f"key{number}", text)
    if unprintable := [character for character in name + key if not character.isprintable()]:
        raise ConfigError(f"{place}: the character {unprintable[0]!a} is not printable")
    if not name or not key or not key.isascii() or any(character.isspace() for character in key):
        raise ConfigError(f"{place}: not `name: key` or `key` (ASCII, without white space)")
    if "/" in name:
        raise ConfigError(f"{place}: the name {name!r} has a slash, which would make it a stream of another key")
    return name, key


class KeyLimits:
    """Checks keys and enforces each key's limits; 0 means no limit.

    A key is looked up by its SHA-256 digest. The time of a look-up can tell of digests only, and no key follows from a
    part of its digest.

    concurrent_max           calls of one key in flight at once
    requests_per_minute_max  size of a token bucket that is refilled evenly over a minute
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
        self._buckets: dict[str, tuple[float, float]] = {}  # name -> (calls left, time in s)

    @property
    def required(self) -> bool:
        """Whether clients need a key."""
        return bool(self._names)

    def authenticate(self, authorization: str | None) -> str:
        """Return the name of the key ("" when no key is required). Raises Unauthorized."""
        if not self._names:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("the request has no API key; send `Authorization: Bearer KEY`")
        name = self._names.get(_digest(key.strip()))
        if name is None:
            raise Unauthorized("the API key is wrong")
        return name

    def acquire(self, name: str) -> None:
        """Count a new call of a key. Every `acquire` that returns needs one `release`. Raises RateLimited."""
        running = self._in_progress.get(name, 0)
        if self._concurrent_max and running >= self._concurrent_max:
            raise RateLimited(
                f"this key has {running} requests in progress, the most allowed",
                code="concurrent_max",
                retry_after_s=1.0,
            )
        if self._per_minute:
            self._take_token(name)
        self._in_progress[name] = running + 1

    def release(self, name: str) -> None:
        running = self._in_progress[name] - 1
        if running:
            self._in_progress[name] = running
        else:
            del self._in_progress[name]

    def _take_token(self, name: str) -> None:
        now_s = self._clock()
        tokens, since_s = self._buckets.get(name, (float(self._per_minute), now_s))
        tokens = min(float(self._per_minute), tokens + (now_s - since_s) * self._per_minute / 60.0)
        if tokens < 1.0:
            self._buckets[name] = (tokens, now_s)
            raise RateLimited(
                f"this key may send {self._per_minute} requests per minute",
                code="requests_per_minute",
                retry_after_s=(1.0 - tokens) * 60.0 / self._per_minute,
            )
        self._buckets[name] = (tokens - 1.0, now_s)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
