"""Keeps a live cluster's groups as its plan wants them: as engines come up, and as arrivals change.

A plan says how many workers a group has, and seldom which ones. Which ones can serve it is known when their engines
have told what they serve: then the groups are assigned anew. When the scheduler asks for another plan (PlanGroups), one
is made beside the event loop while the present one serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from llmserve.cluster.assignment import PlannedGroup, assign, shortfalls
from llmserve.cluster.journal import Step
from llmserve.cluster.live import LiveCluster
from llmserve.scheduling.layout import Layout
from llmserve.scheduling.messages import EngineReady, PlanChanged, PlanGroups, ServingGroup
from llmserve.scheduling.rates import Rates

log = logging.getLogger("llmserve")

GATHER_S = 0.1  # for engines that come up together
COMPLAIN_S = 10.0  # after the start: what is missing by then may not come any more

Planned = tuple[PlannedGroup, ...]


class Regrouper:
    """Made before the cluster starts; it listens to the cluster's journal from then on.

    groups   that the cluster's scheduler began with
    planned  what they were to be
    replan   another plan for these rates; called in a thread, never twice at once. It may raise.
    """

    def __init__(
        self,
        cluster: LiveCluster,
        planned: Planned,
        groups: tuple[ServingGroup, ...],
        replan: Callable[[Rates], Planned] | None = None,
    ) -> None:
        self._cluster = cluster
        self._planned = planned
        self._groups = groups
        self._replan = replan
        self._models: dict[str, dict[str, tuple[str, ...]]] = {}  # by worker and engine
        self._timer: asyncio.TimerHandle | None = None
        self._complaint: asyncio.TimerHandle | None = None
        self._planning: asyncio.Task[None] | None = None
        self._rates: Rates | None = None  # to plan for next
        cluster.journal.listen(self._observe)

    def start(self) -> None:
        """Inside the running event loop."""
        self._complaint = asyncio.get_running_loop().call_later(COMPLAIN_S, self._complain)

    async def close(self) -> None:
        for timer in (self._timer, self._complaint):
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
        """Models by worker; none where one of its engines serves whatever is asked for."""
        return {
            worker: set().union(*engines.values()) if all(engines.values()) else set()
            for worker, engines in self._models.items()
        }

    def _engines_came(self) -> None:
        self._timer = None
        self._assign(self._planned)

    def _change_to(self, planned: Planned) -> None:
        """Raises ValueError when its groups contradict each other; then nothing has changed."""
        self._assign(planned)
        self._planned = planned
        self._complain()

    def _assign(self, planned: Planned) -> None:
        before = {worker: group.name for group in self._groups for worker in group.workers}
        groups = assign(planned, self._workers(), before)
        Layout(groups)  # or it raises, before anybody is told
        if groups != self._groups:
            self._cluster.tell(PlanChanged(groups))
            self._groups = groups
            log.info("groups: %s", "; ".join(f"{group.name}: {', '.join(group.workers)}" for group in groups))

    def _complain(self) -> None:
        for what in shortfalls(self._planned, self._groups, self._models):
            log.warning("%s", what)

    async def _plan(self, replan: Callable[[Rates], Planned]) -> None:
        """Until there is a plan for the rates that were told of last."""
        while self._rates is not None:
            rates, self._rates = self._rates, None
            try:
                planned = await asyncio.to_thread(replan, rates)
                self._change_to(planned)
            except Exception:
                log.exception("no groups could be planned for the rates of now: the present ones stay")
        self._planning = None
