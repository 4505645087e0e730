"""How many slots stay free for online requests while lines of jobs run in the others.

A line that has begun is not stopped, so an online request that finds every slot taken waits until a line ends. This is
trunk reservation (Kelly, Loss networks, Annals of Applied Probability 1, 1991, Section 4): the lesser class is
accepted while enough circuits stay free for the other class. While online requests want N slots, their number soon
changes by some sqrt(N), as that of a Poisson process does; so the reserve is

    R_c(N) = c sqrt(N + 1),   as square-root staffing has it (Halfin and Whitt, Operations Research 29, 1981)

and c is learnt from arrivals. Each online arrival is played against every c of a row at once:

    S, s   slots, and the mean seconds of a line
    N      slots that online requests wanted before the arrival
    B_c    slots of lines: they end, so B_c falls by exp(-dt / s) in dt seconds, but not below S - N - R_c(N), for as
           many would have started
    the arrival waits for a line under c when it finds N + B_c > S - 1/2, although N < S

The reserve is that of the least c under which at most WAIT_SHARE of the last arrivals would have waited for a line. So
a burst that builds up no faster than lines end needs a small reserve, however large it becomes.

Where lines may be stopped, nobody waits for them, and the share is that of the arrivals that stop one.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

WAIT_SHARE = 0.005  # half of what is beyond a 99th percentile, for lines end at random, not evenly as here
SILENCE_SHARE = 0.05  # chance of an arrival in a line's time below which no slot is kept free
FACTORS = np.array([*np.arange(0.0, 4.0, 0.1), 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, math.inf])  # c; at last no line runs
MEMORY = 4096  # arrivals after which an observation's weight has fallen to a third
KEPT = 1024  # arrivals that are kept until somebody asks


class Reserve:
    """The reserve of engines that serve the same requests. All times are seconds on the scheduler's clock.

    stops : share of the arrivals that may stop a line
    """

    def __init__(self, stops: float = 0.0) -> None:
        self._share = max(WAIT_SHARE, stops)
        self._new: deque[float] = deque(maxlen=2 * KEPT)  # arrivals that were not played yet: time, slots wanted, ...
        self._last_s = -math.inf
        self._lines = np.zeros(len(FACTORS))  # B_c
        self._waited = np.zeros(len(FACTORS))  # weight of the arrivals that waited, by c
        self._arrivals = 0.0  # weight of all

    def arrived(self, now_s: float, wanted: int) -> None:
        """Note an online arrival. wanted : slots that online requests want, the arrival included"""
        self._new.extend((now_s, wanted))

    def lines_most(self, now_s: float, wanted: int, slots: int, line_s: float) -> float:
        """Slots that lines may hold. wanted : by online requests.  slots : of the engines.  line_s : as s, > 0"""
        while self._new:
            at_s, then_wanted = self._new.popleft(), self._new.popleft()
            self._play(at_s, then_wanted, slots, line_s)
        if now_s >= self.silent_from_s(line_s):
            return slots
        factor = FACTORS[np.argmax(self._waited <= self._share * self._arrivals)]
        return slots - wanted - float(factor) * math.sqrt(wanted + 1.0)

    def silent_from_s(self, line_s: float) -> float:
        """From when on no arrival is expected: after T seconds of silence, one comes in the next s with a chance of
        s / (s + T) at most (Laplace's rule of succession), which is then less than SILENCE_SHARE. By WAIT_SHARE an
        engine of one slot would stay idle for hundreds of lines' times after each arrival.
        """
        return (self._new[-2] if self._new else self._last_s) + line_s / SILENCE_SHARE

    def _play(self, at_s: float, wanted: float, slots: int, line_s: float) -> None:
        before = wanted - 1
        started = slots - before - FACTORS * math.sqrt(wanted)
        self._lines = np.maximum(self._lines * math.exp((self._last_s - at_s) / line_s), np.maximum(started, 0.0))
        waits = self._lines > slots - wanted + 0.5 if wanted <= slots else np.zeros(len(FACTORS), bool)
        keep = 1.0 - 1.0 / MEMORY
        self._waited, self._arrivals = keep * self._waited + waits, keep * self._arrivals + 1.0
        self._last_s = at_s
