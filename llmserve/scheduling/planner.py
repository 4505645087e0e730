"""When a new plan is wanted, what it is made for, and which one is in force.

The scheduler solves nothing itself: it asks (`SolveDispatch`), its body has the plan made while the old one serves, and
tells it (`DispatchSolved`). So a journal has every plan in it, and a replay needs no profile.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bins.dispatch import DispatchPlan, Observed
from bins.edges import OnlineEdges
from llmserve.scheduling.lengths import SeenLengths
from llmserve.scheduling.rates import Arrivals

RATE_GRID = 1.05  # rates are told in steps of 5 %: the same load is the same question
PACE_STEP = 1.05  # and paces
PACE_FACTOR = 1.1  # a new plan is wanted when engines have become faster or slower by more than this
SHARE_GRID = 16  # likewise bins' shares of them: in sixteenths of an equal share
ANSWERS_BETWEEN = 512  # after which a plan is made for the lengths as they have become
ARRIVALS_LEAST = 8  # before a rate is told at all


class Planner:
    """bins: of the finest division.  rate_factor: a new plan is wanted when the rate has moved by more than this."""

    def __init__(self, bins: int, lengths: SeenLengths, arrivals: Arrivals, *, rate_factor: float) -> None:
        self._bins = bins
        self._lengths = lengths
        self._arrivals = arrivals
        self._rate_factor = rate_factor
        self._asked: Observed | None = None
        self._asked_rate = 0.0
        self._waits = False  # for the plan that was asked for
        self._seen = 0  # arrivals
        self._answers = 0  # since the bins were last looked at
        self._jumped = False
        self._looked = (-1, 0, 0, True)  # arrivals, engines, slots and trust when the world was last looked at

    def arrived(self, bin_index: int, now_s: float) -> None:
        self._seen += 1
        self._jumped |= self._arrivals.observe(bin_index, now_s)

    def answered(self) -> None:
        """One more answer is among the lengths."""
        self._answers += 1

    def wants(
        self,
        now_s: float,
        plan: DispatchPlan | None,
        edges: OnlineEdges,
        engines: int,
        slots: int,
        *,
        trusted: bool,
        pace: Callable[[], float],
    ) -> Observed | None:
        """What a new plan is to be made for; None while the present one will do, or one is being made.

        pace : seconds that the engines take for each second of their profile; asked for only when something has come
        """
        look = (self._seen, engines, slots, trusted)
        if self._waits or look == self._looked:
            return None
        self._looked = look
        rate = self._rate(now_s)
        pace_now = PACE_STEP ** round(math.log(pace(), PACE_STEP))
        if not (self._differs(rate, engines, slots, trusted) or self._pace_differs(pace_now)):
            return None
        bins = self._bins if trusted else 1
        parts = [round(SHARE_GRID * bins * share) for share in (self._arrivals.shares if trusted else (1.0,))]
        self._asked = Observed(
            rates_per_s=tuple([rate * part / sum(parts) for part in parts]),
            lengths=self._lengths.by_bin(edges.edges if trusted else (), bins),
            engines=engines,
            slots=slots,
            queues=0 if plan is None or plan.response_s_mean is None or self._jumped else len(plan.tables),
            pace=pace_now,
        )
        self._asked_rate = rate
        self._waits, self._jumped, self._answers = True, False, 0
        return self._asked

    def solved(self) -> None:
        """The plan that was asked for has come."""
        self._waits = False

    def _rate(self, now_s: float) -> float:
        """Of all arrivals, on a grid; 0 while too few have come."""
        rate = self._arrivals.total.per_s(now_s)
        if rate is None or self._seen < ARRIVALS_LEAST or not math.isfinite(rate):
            return 0.0
        return RATE_GRID ** round(math.log(rate, RATE_GRID))

    def _pace_differs(self, pace: float) -> bool:
        asked = self._asked.pace if self._asked is not None else 1.0
        return not 1.0 / PACE_FACTOR < pace / asked < PACE_FACTOR

    def _differs(self, rate: float, engines: int, slots: int, trusted: bool) -> bool:
        """Whether the world is another than the one that the last plan was made for."""
        asked = self._asked
        if (
            asked is None
            or (engines, slots) != (asked.engines, asked.slots)
            or len(asked.rates_per_s) != (self._bins if trusted else 1)
        ):
            return True
        if self._answers >= ANSWERS_BETWEEN or self._jumped:
            return rate > 0
        if not self._asked_rate:
            return rate > 0
        return not 1.0 / self._rate_factor < rate / self._asked_rate < self._rate_factor
