"""Plans groups again when the rates at all gateways together differ from the plan's."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable

from llmserve import planning as herd
from llmserve.planning import Instance, Plan

log = logging.getLogger("llmserve")

FACTOR = 1.5  # by which a rate must differ from the planned rate
CHANCE = 4.0  # standard deviations of a Poisson count; smaller differences from the planned rate count as chance
STREAMS_MAX = 10_000  # (stream, model) pairs counted apart; arrivals of further streams are counted by model

Rates = tuple[tuple[str, str, float], ...]
"""(stream, model, arrivals a second)"""


class Replanning:
    """Counts what the gateways tell, and makes plans in a thread.

    instance : the problem of the plan.  every_s : least time between two plans
    """

    def __init__(self, instance: Instance, every_s: float) -> None:
        self._instance, self._every_s = instance, every_s
        streams = herd.streams_of(instance)
        self._names = [model.name for model in instance.models]
        models = [self._names[index] for index in streams.model]
        rates = zip(streams.names, models, map(float, streams.rate_per_s), strict=True)
        planned = tuple((name, model, rate) for name, model, rate in rates)
        self._silent: dict[str | tuple[str, str], float] = {(name, model): 0.0 for name, model, _ in planned}
        self._rates = GroupRates(every_s, tuple(row for row in planned if row[2] > 0))
        self._planning: asyncio.Task[Plan | None] | None = None

    def observe(self, arrivals: Iterable[tuple[str, str, int]]) -> None:
        """arrivals : (stream, model, requests) of one entrance"""
        for stream, model, count in arrivals:
            for _ in range(count):
                self._rates.observe(stream, model)

    def plan(self, previous: Plan, now_s: float) -> Plan | None:
        """Call once a second. Another plan, when one was made; None: the plan stays."""
        wanted = self._rates.end_window(now_s)
        if wanted is not None and self._planning is None:
            log.info("planning for %d rates that have changed", len(wanted))
            self._planning = asyncio.create_task(asyncio.to_thread(self._made, wanted, previous))
        if self._planning is None or not self._planning.done():
            return None
        planning, self._planning = self._planning, None
        return planning.result()

    def _made(self, rates: Rates, previous: Plan) -> Plan | None:
        now = dict(self._silent)
        for stream, model, rate_per_s in rates:
            if model in self._names:
                pair = (stream, model) if (stream, model) in now else model
                now[pair] = now.get(pair, 0.0) + rate_per_s
        try:
            return herd.replan(self._instance, now, previous, holds_s=self._every_s)
        except herd.NoPlan as error:
            log.warning("the groups stay: %s", error)
            return None


class GroupRates:
    """Counts arrivals in windows that begin at multiples of `every_s` and compares the rates at their ends.

    planned : of the first plan; pairs that are not listed: 0
    """

    def __init__(self, every_s: float, planned: Rates = ()) -> None:
        self._every_s = every_s
        self._planned = {(stream, model): rate for stream, model, rate in planned}
        self._window = 0
        self._counts: dict[tuple[str, str], int] = {}

    def observe(self, stream: str, model: str) -> None:
        """Count an arrival. Call `end_window` with its time first."""
        pair = stream, model
        if pair not in self._counts and len(self._counts) >= STREAMS_MAX:
            pair = "", model
        self._counts[pair] = self._counts.get(pair, 0) + 1

    def end_window(self, now_s: float) -> Rates | None:
        """The rates of a window that has ended, if a new plan is wanted for them; else None."""
        if now_s < (self._window + 1) * self._every_s:
            return None
        window = max(self._window + 1, math.floor(now_s / self._every_s))  # rounding may make the quotient too small
        counts, self._counts = self._counts, {}
        self._window = window
        if not counts or not self._differ(counts):
            return None
        self._planned = {pair: count / self._every_s for pair, count in counts.items()}
        return tuple([(stream, model, self._planned[stream, model]) for stream, model in sorted(self._planned)])

    def _differ(self, counts: dict[tuple[str, str], int]) -> bool:
        for pair in counts.keys() | self._planned.keys():
            count, expected = counts.get(pair, 0), self._planned.get(pair, 0.0) * self._every_s
            larger, smaller = max(count, expected), min(count, expected)
            if larger > FACTOR * smaller and larger - smaller > CHANCE * math.sqrt(larger):
                return True
        return False
