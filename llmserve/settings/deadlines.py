"""Default deadlines of requests: the setting slo_ms."""

from __future__ import annotations

from collections.abc import Iterable

from llmserve.errors import ConfigError

SLO_MS_MAX = 86_400_000.0  # a day


class DefaultDeadlines:
    """Default deadlines by key, stream or model, or for all requests.

    texts: ApiConfig.slo_ms. Raises ConfigError on a text of no known form, and on two texts for the same target.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._slos_s: dict[tuple[str, str], float] = {}
        for text in texts:
            target, separator, ms = text.rpartition("=")
            kind, colon, name = target.strip().partition(":")
            if separator and not (kind in ("model", "stream", "key") and colon and name):
                raise ConfigError(f"slo_ms: {text!r} is not `MS`, `model:ID=MS`, `stream:NAME=MS` or `key:NAME=MS`")
            if (kind, name) in self._slos_s:
                raise ConfigError(f"slo_ms: {text!r} is a second value for the same target")
            self._slos_s[kind, name] = _milliseconds(ms, text) * 1e-3

    @property
    def keys(self) -> set[str]:
        """Names of the keys with their own default deadline."""
        return {name for kind, name in self._slos_s if kind == "key"}

    def slo_s(self, key: str, stream: str, model: str) -> float | None:
        """Return the default deadline in seconds; None: no deadline. key: the name of the client's key."""
        if not self._slos_s:
            return None
        targets = (("key", key), ("stream", stream), ("model", model), ("", ""))
        return next((self._slos_s[target] for target in targets if target in self._slos_s), None)


def _milliseconds(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= SLO_MS_MAX:
        raise ConfigError(f"slo_ms: {whole!r} does not end with a positive number of at most {SLO_MS_MAX:.0f} ms")
    return value
