"""Within what time an answer is wanted when its request does not say: the setting slo_ms."""

from __future__ import annotations

from collections.abc import Iterable

from llmserve.errors import ConfigError

SLO_MS_MAX = 86_400_000.0  # a day


class DefaultDeadlines:
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
