"""Who may come in, and how often: API keys and the limits of each."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from llmserve.errors import ConfigError, RateLimited, Unauthorized

SLO_MS_MAX = 86_400_000.0  # a day


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The door's limits."""

    body_bytes_max: Annotated[int, Meta(ge=1, description="largest request body, bytes")] = 4 << 20
    prompt_chars_max: Annotated[int, Meta(ge=1, description="longest prompt, characters")] = 1_000_000
    concurrent_max: Annotated[int, Meta(ge=0, description="requests in progress per API key; 0: no limit")] = 0
    requests_per_minute_max: Annotated[int, Meta(ge=0, description="requests a minute per API key; 0: no limit")] = 0
    slo_ms: Annotated[
        tuple[str, ...],
        Meta(
            description="deadline of requests that bring none, milliseconds: `MS`, `model:ID=MS`, `stream:NAME=MS` or "
            "`key:NAME=MS`, the key's before the stream's before the model's before the plain one; repeat for several",
            extra={"metavar": "[model:ID=|stream:NAME=|key:NAME=]MS"},
        ),
    ] = ()

    def __post_init__(self) -> None:
        Deadlines(self.slo_ms)


class Deadlines:
    """Within what time an answer is wanted when its request does not say, by its key, stream or model, or for all.

    texts: of ApiConfig.slo_ms. Raises ConfigError on one that is none of its forms, or stands twice.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._slos_s: dict[tuple[str, str], float] = {}
        for text in texts:
            whose, separator, ms = text.rpartition("=")
            kind, colon, name = whose.strip().partition(":")
            if separator and not (kind in ("model", "stream", "key") and colon and name):
                raise ConfigError(f"slo_ms: {text!r} is not `MS`, `model:ID=MS`, `stream:NAME=MS` or `key:NAME=MS`")
            if (kind, name) in self._slos_s:
                raise ConfigError(f"slo_ms: {text!r} stands beside another for the same")
            self._slos_s[kind, name] = _milliseconds(ms, text) * 1e-3

    @property
    def keys(self) -> set[str]:
        """Names of keys that have a deadline of their own."""
        return {name for kind, name in self._slos_s if kind == "key"}

    def slo_s(self, key: str, stream: str, model: str) -> float | None:
        """key: the name of the client's key. None: whenever."""
        if not self._slos_s:
            return None
        by = (("key", key), ("stream", stream), ("model", model), ("", ""))
        return next((self._slos_s[whose] for whose in by if whose in self._slos_s), None)


def _milliseconds(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= SLO_MS_MAX:
        raise ConfigError(f"slo_ms: {whole!r} does not end with milliseconds, at most {SLO_MS_MAX:.0f}")
    return value


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


class Doorkeeper:
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

    def admit(self, authorization: str | None) -> str:
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

    def enter(self, name: str) -> None:
        """Count a call in; every `enter` that returns needs one `leave`. Raises RateLimited."""
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

    def leave(self, name: str) -> None:
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
