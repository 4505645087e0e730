"""Turns at an engine's memory, so that no request makes others wait beyond its fair share.

A request that waits for room in a KV cache must block the requests behind it, or smaller ones would take each room for
ever. But a request that needs nearly the whole cache makes all others wait twice: while the engine empties, and while
the request runs alone. So a request that needs more than its fair share of the cache (the cache over the slots)
blocks an engine in its turn only:

* Such a request without a turn is passed over. It starts where it fits; if it needs more than GIANT_SHARE of the
  cache, it starts only with the turn there, or on an idle engine when nothing else can start.
* A turn ends with the run of its holder. If it has lasted L seconds, the engine's next turn begins REST x L seconds
  later at the earliest.

So each time in which others wait for such a request is followed by a longer time in which none does: they lose less
than half of the engine's rate, however many such requests wait, and whatever these claim, for L is measured.
"""

from __future__ import annotations

import math
from typing import Protocol

from llmserve.request import EngineInfo

REST = 1.25  # a rest over the turn before it: over 1, for engines also take time to fill again
GIANT_SHARE = 0.5  # of the cache: a request that needs more leaves no room for another like it


class Needs(Protocol):
    """A request, as QueuedRequest."""

    total_tokens: int

    @property
    def formed(self) -> object | None: ...


def is_large(request: Needs, info: EngineInfo) -> bool:
    """Whether the request needs more than its fair share of the engine's memory."""
    return not info.barrier and info.tokens_max is not None and request.total_tokens * info.slots > info.tokens_max


def is_giant(request: Needs, info: EngineInfo) -> bool:
    """Whether the request, beyond its fair share, leaves no room for another like it."""
    tokens_max = info.tokens_max
    return tokens_max is not None and request.total_tokens > GIANT_SHARE * tokens_max and is_large(request, info)


class MemoryTurn:
    """The turn at one engine's memory.

    holder         the request that last waited in its turn, or that runs in it; None: the turn has ended
    rests_until_s  the next turn begins at this time at the earliest
    """

    __slots__ = ("_runs", "_seen_s", "_since_s", "holder", "rests_until_s")

    def __init__(self) -> None:
        self.holder: Needs | None = None
        self.rests_until_s = -math.inf
        self._since_s = self._seen_s = 0.0
        self._runs = False

    def is_open_to(self, request: Needs, now_s: float) -> bool:
        """Whether the request has the turn, or may take it: after the rest, or from a holder that waits behind it."""
        if self.holder is None or self.holder is request:
            return self.holder is request or now_s >= self.rests_until_s
        if not self._runs and self.holder.formed is None:  # the holder has left, or runs elsewhere
            self._end(self._seen_s)
            return now_s >= self.rests_until_s
        return not self._runs

    def wait(self, request: Needs, now_s: float) -> None:
        """Record that others wait for the request, which has the turn from now on. A turn that goes on stays one."""
        if self.holder is None:
            self._since_s = now_s
        self.holder, self._seen_s = request, now_s

    def start(self, request: Needs, now_s: float) -> None:
        """Record that the holder starts, or a giant, which does so in a turn."""
        self.wait(request, now_s)
        self._runs = True

    def end(self, now_s: float) -> None:
        """Record that the holder no longer runs."""
        if self._runs:
            self._end(now_s)

    def _end(self, at_s: float) -> None:
        self.holder, self._runs = None, False
        self.rests_until_s = at_s + REST * (at_s - self._since_s)
