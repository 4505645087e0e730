"""Memory tokens: which request may block an engine while it waits for room in the KV cache.

A request that waits for room must block the requests behind it, or smaller ones would take each room for ever. But a
request that needs nearly the whole cache makes all others wait twice: while the engine empties, and while the request
runs alone. So a request that needs more than its fair share of the cache (the cache over the slots, or a part in
MODEST_SHARES) blocks an engine only while the request holds the engine's memory token:

* Without the token such a large request is passed over. It starts where it fits; an oversize request, which needs more
  than OVERSIZE_SHARE of the cache, starts only with the token, or on an idle engine when nothing else can start.
* The token is released when its holder's run ends. If the holder had the token for L seconds, nobody gets it for
  REST x L seconds after that.

So each time in which others wait for a large request is followed by a longer time in which they wait for none: they
lose less than half of the engine's rate, however many large requests wait, and whatever these claim, for L is measured.
"""

from __future__ import annotations

import math
from typing import Protocol

from llmserve.request import EngineInfo

REST = 1.25  # a rest over the time that the token was held: over 1, for engines also take time to fill again
MODEST_SHARES = 64  # of a cache: a request within one of so many waits for little room, however many slots there are
OVERSIZE_SHARE = 0.5  # of the cache: a request that needs more leaves no room for another like it


class Needs(Protocol):
    """A request, as QueuedRequest."""

    total_tokens: int

    @property
    def formed(self) -> object | None: ...


def is_large(request: Needs, info: EngineInfo) -> bool:
    """Whether the request needs more than its fair share of the engine's memory."""
    shares = min(info.slots, MODEST_SHARES)
    return not info.barrier and info.tokens_max is not None and request.total_tokens * shares > info.tokens_max


def is_oversize(request: Needs, info: EngineInfo) -> bool:
    """Whether the request, beyond its fair share, leaves no room for another like it."""
    tokens_max = info.tokens_max
    return tokens_max is not None and request.total_tokens > OVERSIZE_SHARE * tokens_max and is_large(request, info)


class MemoryToken:
    """The memory token of one engine.

    holder         the request that others last waited for, or that runs with the token; None: the token is released
    rests_until_s  nobody gets the token before this time
    """

    __slots__ = ("_runs", "_seen_s", "_since_s", "holder", "rests_until_s")

    def __init__(self) -> None:
        self.holder: Needs | None = None
        self.rests_until_s = -math.inf
        self._since_s = self._seen_s = 0.0
        self._runs = False

    def is_open_to(self, request: Needs, now_s: float) -> bool:
        """Whether the request holds the token, or may take it: after the rest, or from a holder that waits behind."""
        if self.holder is None or self.holder is request:
            return self.holder is request or now_s >= self.rests_until_s
        if not self._runs and self.holder.formed is None:  # the holder has left, or runs elsewhere
            self._release(self._seen_s)
            return now_s >= self.rests_until_s
        return not self._runs

    def wait(self, request: Needs, now_s: float) -> None:
        """Record that others wait for the request, which holds the token from now on. The time of holding goes on where
        the token passes from one waiting request to another.
        """
        if self.holder is None:
            self._since_s = now_s
        self.holder, self._seen_s = request, now_s

    def start(self, request: Needs, now_s: float) -> None:
        """Record that the holder starts, or an oversize request, which takes the token."""
        self.wait(request, now_s)
        self._runs = True

    def end(self, now_s: float) -> None:
        """Record that the holder no longer runs."""
        if self._runs:
            self._release(now_s)

    def _release(self, at_s: float) -> None:
        self.holder, self._runs = None, False
        self.rests_until_s = at_s + REST * (at_s - self._since_s)
