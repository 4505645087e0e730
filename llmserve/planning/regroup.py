"""Keeps a live cluster's groups in line with the plan, as engines come up and as arrival rates change.

A plan says how many workers a group has, but seldom names the workers. When engines have listed their models, the
regrouper assigns the workers anew. When the scheduler asks for another plan (PlanGroups), a thread makes that plan
while the current plan serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from llmserve.live.driver import Driver
from llmserve.live.journal import Step
from llmserve.planning.assignment import PlannedGroup, assign, shortfalls
from llmserve.scheduling.layout import Layout
from llmserve.scheduling.messages import EngineReady, PlanChanged, PlanGroups, ServingGroup
from llmserve.scheduling.rates import Rates

log = logging.getLogger("llmserve")

GATHER_S = 0.1  # wait for engines that come up together
WARN_AFTER_S = 10.0  # after the start: workers that are missing then may never come

Planned = tuple[PlannedGroup, ...]


class Regrouper:
    """Listens to the journal of the cluster's driver. Make it before the cluster starts.

    planned  the groups of the first plan
    groups   the first groups of the cluster's scheduler
    replan   makes a plan for new rates; called in a thread, never twice at once. It may raise.
    """

    def __init__(
        self,
        driver: Driver,
        planned: Planned,
        groups: tuple[ServingGroup, ...],
        replan: Callable[[Rates], Planned] | None = None,
    ) -> None:
        self._driver = driver
        self._planned = planned
        self._groups = groups
        self._replan = replan
        self._models: dict[str, dict[str, tuple[str, ...]]] = {}  # by worker and engine
        self._timer: asyncio.TimerHandle | None = None
        self._warning: asyncio.TimerHandle | None = None
        self._planning: asyncio.Task[None] | None = None
        self._rates: Rates | None = None  # rates of the next plan
        driver.journal.listen(self._observe)

    def start(self) -> None:
        """Must be called inside the running event loop."""
        self._warning = asyncio.get_running_loop().call_later(WARN_AFTER_S, self._log_shortfalls)

    async def close(self) -> None:
        for timer in (self._timer, self._warning):
            if timer is not None:
                timer.cancel()
        if self._planning is not None:
            self._planning.cancel()
            await asyncio.gather(self._planning, return_exceptions=True)

    def _observe(self, step: Step) -> None:
        if isinstance(step.event, EngineReady):
            info = step.event.engine
            self._models.setdefault(info.worker or info.name, {})[info.name] = info.models
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._engines_came)
        for action in step.actions:
            if isinstance(action, PlanGroups):
                self._rates = action.rates_per_s
                if self._planning is None and self._replan is not None:
                    self._planning = asyncio.create_task(self._plan(self._replan))

    def _workers(self) -> dict[str, set[str]]:
        """Models by worker; none if an engine of the worker serves any model."""
        return {
            worker: set().union(*engines.values()) if all(engines.values()) else set()
            for worker, engines in self._models.items()
        }

    def _engines_came(self) -> None:
        self._timer = None
        self._assign(self._planned)

    def change_to(self, planned: Planned) -> None:
        """Raises ValueError when the groups contradict each other; then nothing has changed."""
        self._assign(planned)
        self._planned = planned
        self._log_shortfalls()

    def _assign(self, planned: Planned) -> None:
        before = {worker: group.name for group in self._groups for worker in group.workers}
        groups = assign(planned, self._workers(), before)
        Layout(groups)  # raises for bad groups, before the cluster gets them
        if groups != self._groups:
            self._driver.step(PlanChanged(groups))
            self._groups = groups
            log.info("groups: %s", "; ".join(f"{group.name}: {', '.join(group.workers)}" for group in groups))

    def _log_shortfalls(self) -> None:
        for shortfall in shortfalls(self._planned, self._groups, self._models):
            log.warning("%s", shortfall)

    async def _plan(self, replan: Callable[[Rates], Planned]) -> None:
        """Plan until the last rates that the scheduler reported have a plan."""
        while self._rates is not None:
            rates, self._rates = self._rates, None
            try:
                planned = await asyncio.to_thread(replan, rates)
                self.change_to(planned)
            except Exception:
                log.exception("no groups could be planned for the current rates: the current groups stay")
        self._planning = None
