"""Cross-origin requests: pages of the allowed origins may call this server from a browser."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from llmserve.http.exchange import Exchange
from llmserve.wire.headers import BATCH_HEADER, BIN_HEADER, ENGINE_HEADER, PREDICTED_HEADER, QUEUE_HEADER

METHODS = b"GET, POST, DELETE, OPTIONS"
KEPT_S = b"600"
READABLE = ", ".join(
    ("x-request-id", "retry-after", QUEUE_HEADER, ENGINE_HEADER, BIN_HEADER, BATCH_HEADER, PREDICTED_HEADER)
).encode()
"""Headers of an answer that a page may read."""
HEADERS_CHARS_MAX = 1024


class Cors:
    """origins : such as https://chat.example.com; `*`: all"""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def allow(self, exchange: Exchange[Any]) -> None:
        """Let the page read the answer, if its origin is allowed."""
        origin = exchange.headers.get("origin")
        if origin is None:
            return
        if "*" in self._origins:
            exchange.common_headers = b"access-control-allow-origin: *\r\n"
        elif origin in self._origins:
            exchange.common_headers = b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin.encode("latin-1")
        else:
            exchange.common_headers = b"vary: origin\r\n"
            return
        exchange.common_headers += b"access-control-expose-headers: %b\r\n" % READABLE

    def is_preflight(self, exchange: Exchange[Any]) -> bool:
        """Whether a browser asks if a page may send a request."""
        return exchange.method == "OPTIONS" and "access-control-request-method" in exchange.headers

    def answer(self, exchange: Exchange[Any]) -> None:
        """Answer a preflight. It has no key: browsers send none."""
        headers = [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", KEPT_S)]
        asked = exchange.headers.get("access-control-request-headers", "")
        if asked and len(asked) <= HEADERS_CHARS_MAX and asked.isascii() and asked.isprintable():
            headers.append((b"access-control-allow-headers", asked.encode()))
        exchange.start(204, headers, None)
        exchange.end()
