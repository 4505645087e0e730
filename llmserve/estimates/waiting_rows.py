"""Rows of GET /admin/queue: the server makes them, and `llmserve queue` reads them without loading a server."""

from __future__ import annotations

import msgspec


class WaitingRow(msgspec.Struct, frozen=True):
    """Waiting requests of one model, share and bin. share : "": of nobody in particular

    oldest_s       seconds for which the oldest has waited
    next_starts_s  predicted seconds until the next of them starts; None: unknown, or no engine works
    """

    model: str
    share: str
    bin: int
    waiting: int
    oldest_s: float
    next_starts_s: float | None
