"""When a new dispatch plan is wanted, and for which load.

The scheduler solves no plan itself. It asks for a plan (`SolveDispatch`), follows the old plan meanwhile, and gets the
new plan as an event (`DispatchSolved`). So a journal contains every plan, and a replay needs no profile.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bins.dispatch import DispatchPlan, Observed
from bins.edges import Edges
from llmserve.scheduling.lengths import SeenLengths
from llmserve.scheduling.rates import Arrivals

RATE_GRID = 1.05  # rates are rounded to steps of 5 %, so that equal loads give equal questions
PACE_STEP = 1.05  # and paces
PACE_FACTOR = 1.1  # a new plan is wanted when engines have become faster or slower by more than this
SHARE_GRID = 16  # bins' shares of the rate are rounded to sixteenths of an equal share
ANSWERS_BETWEEN = 512  # answers after which a plan is made for the new lengths
ARRIVALS_LEAST = 8  # with fewer arrivals the rate counts as unknown (0)


class Planner:
    """The questions for plans of one model.

    bins : number of bins.  rate_factor : change of the rate after which a new plan is wanted
    """

    def __init__(self, bins: int, lengths: SeenLengths, arrivals: Arrivals, *, rate_factor: float) -> None:
        self._bins = bins
        self._lengths = lengths
        self._arrivals = arrivals
        self._rate_factor = rate_factor
        self._requested: Observed | None = None  # the load of the last request for a plan, and its rate
        self._requested_rate = 0.0
        self._waits = False  # for the requested plan
        self._arrived = 0  # number of arrivals
        self._answers = 0  # since the last request for a plan
        self._jumped = False  # whether the rate has jumped since then
        self._checked = (-1, 0, 0, True)  # arrivals, engines, slots and trust at the last check

    def arrived(self, bin_index: int, now_s: float) -> None:
        self._arrived += 1
        self._jumped |= self._arrivals.observe(bin_index, now_s)

    def answered(self) -> None:
        """Count one more recorded answer."""
        self._answers += 1

    def wants(
        self,
        now_s: float,
        plan: DispatchPlan | None,
        edges: Edges | None,
        engines: int,
        slots: int,
        pace: Callable[[], float],
    ) -> Observed | None:
        """The load for which a new plan is wanted; None while the present plan will do, or a plan is being made.

        edges : of the bins; None: predictions are not trusted, and one bin serves
        pace : seconds that the engines take for each second of their profile; called only if the state has changed
        """
        trusted = edges is not None
        state = (self._arrived, engines, slots, trusted)
        if self._waits or state == self._checked:
            return None
        self._checked = state
        rate = self._rate(now_s)
        pace_now = PACE_STEP ** round(math.log(pace(), PACE_STEP))
        if not (self._differs(rate, engines, slots, trusted) or self._pace_differs(pace_now)):
            return None
        bins = self._bins if trusted else 1
        parts = [round(SHARE_GRID * bins * share) for share in (self._arrivals.shares if trusted else (1.0,))]
        self._requested = Observed(
            rates_per_s=tuple([rate * part / sum(parts) for part in parts]),
            lengths=self._lengths.by_bin(edges or (), bins),
            engines=engines,
            slots=slots,
            queues=0 if plan is None or plan.response_s_mean is None or self._jumped else len(plan.tables),
            pace=pace_now,
        )
        self._requested_rate = rate
        self._waits, self._jumped, self._answers = True, False, 0
        return self._requested

    def solved(self) -> None:
        """Record that the requested plan has come."""
        self._waits = False

    def _rate(self, now_s: float) -> float:
        """Rate of all arrivals, rounded to the grid; 0 after fewer than ARRIVALS_LEAST arrivals."""
        rate = self._arrivals.total.per_s(now_s)
        if rate is None or self._arrived < ARRIVALS_LEAST or not math.isfinite(rate):
            return 0.0
        return RATE_GRID ** round(math.log(rate, RATE_GRID))

    def _pace_differs(self, pace: float) -> bool:
        requested = self._requested.pace if self._requested is not None else 1.0
        return not 1.0 / PACE_FACTOR < pace / requested < PACE_FACTOR

    def _differs(self, rate: float, engines: int, slots: int, trusted: bool) -> bool:
        """Whether load, engines or trust differ from those of the last requested plan."""
        requested = self._requested
        if (
            requested is None
            or (engines, slots) != (requested.engines, requested.slots)
            or len(requested.rates_per_s) != (self._bins if trusted else 1)
        ):
            return True
        if self._answers >= ANSWERS_BETWEEN or self._jumped:
            return rate > 0
        if not self._requested_rate:
            return rate > 0
        return not 1.0 / self._rate_factor < rate / self._requested_rate < self._rate_factor
