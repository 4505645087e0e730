"""Makes the dispatch plans that a live scheduler asks for, in threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from bins.dispatch import DispatchSolver
from llmserve.scheduling.messages import DispatchSolved, Event, SolveDispatch

log = logging.getLogger("llmserve")

FALLBACKS = {
    "overload": "no dispatch plan%s carries %.4g requests/s: requests do not wait for a batch",
    "unsolved": "a decision process%s could not be solved at %.4g requests/s: the dispatch plan is not the best",
}


class Solving:
    """Dispatch plans in the making, at most one per model: the scheduler asks for the next when it has the last.

    solvers  by model ("": every other model)
    notify   takes an event for the scheduler
    """

    def __init__(self, solvers: Mapping[str, DispatchSolver], notify: Callable[[Event], None]) -> None:
        self._solvers = solvers
        self._notify = notify
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, action: SolveDispatch) -> None:
        task = asyncio.create_task(self._solve(action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _solve(self, action: SolveDispatch) -> None:
        solver = self._solvers.get(action.model) or self._solvers.get("")
        if solver is None:
            log.error("model %s has no --profile to plan by: its requests do not wait for a batch", action.model)
            return
        try:
            plan = await asyncio.to_thread(solver.solve, action.observed)
        except Exception:
            log.exception("no plan could be made for %s: requests do not wait for a batch", action.observed)
            plan = replace(solver.greedy(action.observed), fallback="unsolved")
        if plan.fallback:
            rates_per_s = sum(action.observed.rates_per_s)
            log.warning(FALLBACKS[plan.fallback], f" of {action.model}" if action.model else "", rates_per_s)
        self._notify(DispatchSolved(plan, action.model))
