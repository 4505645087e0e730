"""Plans groups again when the rates at all doors together differ from the plan's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from llmserve import planning as herd
from llmserve.planning import Instance, Plan
from llmserve.scheduling.rates import GroupRates, Rates, Replan

log = logging.getLogger("llmserve")


class Replanning:
    """Counts what the doors tell, and makes plans in a thread.

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
        self._rates = GroupRates(Replan(every_s, tuple(row for row in planned if row[2] > 0)))
        self._planning: asyncio.Task[Plan | None] | None = None

    def observe(self, arrivals: Iterable[tuple[str, str, int]]) -> None:
        """arrivals : (stream, model, requests) of one door"""
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
