"""How many slots stay free for online requests while lines of jobs run in the others.

A line that has begun is not stopped, so an online request that finds every slot taken waits until a line ends. This is
the setting of trunk reservation in loss networks (Kelly, Loss networks, Annals of Applied Probability 1, 1991, Section
4): a call of the lesser class is accepted while more than r circuits are free, whatever the greater class does next.

r is learnt from arrivals. Each online arrival is played against every r at once:

    N    slots that online requests want, with the arrival; as it really was
    B_r  slots that lines would hold under r. A line ends after s seconds in the mean, so B_r falls by exp(-dt / s) in
         dt seconds, but never below what fills all slots but r
    an arrival waits under r when N + B_r is more than the slots, although N is not

The reserve is the least r under which at most WAIT_SHARE of the last arrivals would have waited.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

WAIT_SHARE = 0.005  # half of what is beyond a 99th percentile; lines also end later than their mean
MEMORY = 4096  # arrivals after which an observation's weight has fallen to a third
KEPT = 1024  # arrivals that are kept until somebody asks


class Reserve:
    """The reserve of engines that serve the same requests. All times are seconds on the scheduler's clock."""

    def __init__(self) -> None:
        self._new: deque[tuple[float, int]] = deque(maxlen=KEPT)  # arrivals that were not played yet
        self._last: tuple[float, int] | None = None
        self._lines = self._waits = np.zeros(1)  # (slots + 1,) by r: slots of lines, and weight of those that waited
        self._arrivals = 0.0  # their weight

    def arrived(self, now_s: float, wanted: int) -> None:
        """Note an online arrival. wanted : slots that online requests want, the arrival included"""
        self._new.append((now_s, wanted))

    def slots(self, now_s: float, slots: int, line_s: float) -> int:
        """Slots to keep free. slots : of the engines.  line_s : mean seconds that a line takes, > 0"""
        while self._new:
            self._play(*self._new.popleft(), slots, line_s)
        if self._last is None or now_s >= self.silent_from_s(line_s):
            return 0
        return int(np.argmax(self._waits[: slots + 1] <= WAIT_SHARE * self._arrivals)) if slots else 0

    def silent_from_s(self, line_s: float) -> float:
        """From when on no arrival is expected: after T seconds of silence, one comes in the next s with a chance of
        s / (s + T) at most (Laplace's rule of succession), which is then less than WAIT_SHARE.
        """
        last_s = self._new[-1][0] if self._new else self._last[0] if self._last is not None else -math.inf
        return last_s + line_s / WAIT_SHARE

    def _play(self, at_s: float, wanted: int, slots: int, line_s: float) -> None:
        if len(self._lines) != slots + 1:
            self._resize(slots)
        before_s, before = self._last or (at_s, wanted)
        kept = np.arange(slots + 1)
        least = np.maximum(0, slots - min(before, wanted - 1) - kept)
        self._lines = np.maximum(self._lines * math.exp((before_s - at_s) / line_s), least)
        keep = 1.0 - 1.0 / MEMORY
        waits = (self._lines + wanted > slots) & (wanted <= slots)
        self._waits, self._arrivals = keep * self._waits + waits, keep * self._arrivals + 1.0
        self._last = at_s, wanted

    def _resize(self, slots: int) -> None:
        """Follow engines that came or went: what was learnt of each r stays, a larger r begins as the largest did."""
        places = np.minimum(np.arange(slots + 1), len(self._lines) - 1)
        self._lines, self._waits = np.zeros(slots + 1), self._waits[places]
        self._waits[-1] = 0.0
