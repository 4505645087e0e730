"""How many slots stay free for online requests while items of batch jobs run in the others.

An item that has begun is not stopped, so an online request that finds every slot taken waits until an item ends. This
is trunk reservation (Kelly, Loss networks, Annals of Applied Probability 1, 1991, Section 4): the lesser class is
accepted while enough circuits stay free for the other class. While online requests want N slots, their number soon
changes by some sqrt(N), as that of a Poisson process does; so the reserve is

    R_c(N) = c sqrt(N + 1),   as square-root staffing has it (Halfin and Whitt, Operations Research 29, 1981)

and c is learned from arrivals. Each online arrival is played against every c of a row at once:

    S, s   slots, and the mean seconds of an item
    N      slots that online requests wanted before the arrival
    B_c    slots of items: they end, so B_c falls by exp(-dt / s) in dt seconds, but not below S - N - R_c(N), for as
           many items would have started
    the arrival waits for an item under c when N + B_c > S - 1/2, although N < S

The reserve is that of the least c under which at most WAIT_SHARE of the last arrivals would have waited for an item. So
a burst that builds up no faster than items end needs a small reserve, however large the burst becomes.

Where items may be stopped, no request waits for an item; then the share counts the arrivals that stop one.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

WAIT_SHARE = 0.005  # half of what is beyond a 99th percentile, for items end at random, not evenly as here
SILENCE_SHARE = 0.05  # chance of an arrival in an item's time below which no slot is kept free
FACTORS = np.array(
    [*np.arange(0.0, 4.0, 0.1), 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, math.inf]
)  # c; with the last no item runs
MEMORY = 4096  # arrivals after which an observation's weight has fallen to a third
KEPT = 1024  # arrivals kept until the next question


class Reserve:
    """The reserve of engines that serve the same requests. All times are seconds on the scheduler's clock.

    stops : share of the arrivals that may stop an item
    """

    def __init__(self, stops: float = 0.0) -> None:
        self._share = max(WAIT_SHARE, stops)
        self._new: deque[float] = deque(maxlen=2 * KEPT)  # arrivals not played yet: time, slots wanted, ...
        self._last_s = -math.inf
        self._items = np.zeros(len(FACTORS))  # B_c
        self._waited = np.zeros(len(FACTORS))  # weight of the arrivals that waited, by c
        self._arrivals = 0.0  # weight of all

    def arrived(self, now_s: float, wanted: int) -> None:
        """Note an online arrival. wanted : slots that online requests want, the arrival included"""
        self._new.extend((now_s, wanted))

    def items_most(self, now_s: float, wanted: int, slots: int, item_s: float) -> float:
        """Slots that items may hold. wanted : by online requests.  slots : of the engines.  item_s : as s, > 0"""
        while self._new:
            at_s, then_wanted = self._new.popleft(), self._new.popleft()
            self._play(at_s, then_wanted, slots, item_s)
        if now_s >= self.silent_from_s(item_s):
            return slots
        factor = FACTORS[np.argmax(self._waited <= self._share * self._arrivals)]
        return slots - wanted - float(factor) * math.sqrt(wanted + 1.0)

    def silent_from_s(self, item_s: float) -> float:
        """From when on no arrival is expected. After T seconds of silence, the chance of an arrival in the next s is
        s / (s + T) at most (Laplace's rule of succession); from this time on the chance is less than SILENCE_SHARE. By
        WAIT_SHARE an engine of one slot would stay idle for hundreds of items' times after each arrival.
        """
        return (self._new[-2] if self._new else self._last_s) + item_s / SILENCE_SHARE

    def _play(self, at_s: float, wanted: float, slots: int, item_s: float) -> None:
        before = wanted - 1
        started = slots - before - FACTORS * math.sqrt(wanted)
        self._items = np.maximum(self._items * math.exp((self._last_s - at_s) / item_s), np.maximum(started, 0.0))
        waits = self._items > slots - wanted + 0.5 if wanted <= slots else np.zeros(len(FACTORS), bool)
        keep = 1.0 - 1.0 / MEMORY
        self._waited, self._arrivals = keep * self._waited + waits, keep * self._arrivals + 1.0
        self._last_s = at_s
