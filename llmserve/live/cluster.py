"""A live cluster: a scheduler, its engines and the calls of clients, put together.

    client -> Calls -> Driver -> Scheduler -> actions -> Calls -> Forwarding -> engine
    engine -> Fleet -> Driver -> Scheduler -> ...

Events go down to the driver. `LiveCluster._carry_out` hands each action to the object that carries it out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from bins.dispatch import DispatchSolver
from llmserve.estimates.estimator import Estimator
from llmserve.forecasts.lengths import Forecasts
from llmserve.forecasts.loops import LearningLoop, RevisionLoop
from llmserve.forecasts.revisions import Revisions
from llmserve.live.calls import Calls
from llmserve.live.driver import Driver
from llmserve.live.fleet import Fleet
from llmserve.live.journal import Journal
from llmserve.live.known_models import Listed
from llmserve.live.membership import Membership
from llmserve.live.reports import report
from llmserve.live.routes import Routes
from llmserve.live.solving import Solving
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    DrainRequested,
    EngineLost,
    Event,
    FailRequest,
    PreemptBatch,
    SolveDispatch,
    StartBatch,
)
from llmserve.scheduling.scheduler import Scheduler

log = logging.getLogger("llmserve")


class LiveCluster:
    """A scheduler at work: `start()`, `calls.submit()` for each call, `drain()`, `abort()`, `close()`.

    forecasts   of what calls will take; None: only clients predict
    solvers     by model ("": every other model): make plans, where the scheduler's release follows plans
    secret      see Calls; None: it is drawn

    on_drain    called when the drain begins
    """

    def __init__(
        self,
        scheduler: Scheduler,
        fleet: Fleet,
        journal: Journal,
        *,
        forecasts: Forecasts | None = None,
        solvers: Mapping[str, DispatchSolver] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
        secret: bytes | None = None,
    ) -> None:
        self.scheduler, self.fleet, self.journal = scheduler, fleet, journal
        self.membership = Membership(fleet)
        self.forecasts = forecasts or Forecasts()
        self.driver = Driver(scheduler, journal, self._carry_out, clock)
        self.estimator = Estimator(scheduler, fleet, self.driver.now_s)
        self.routes = Routes(fleet)
        self.calls = Calls(self.driver, fleet, self.forecasts, self.routes, self.estimator, secret)
        self._solving = Solving(solvers, self.driver.step)
        self._revising = RevisionLoop(Revisions(scheduler.requests, self.calls.forecast_again), self.driver.step)
        self._learning = LearningLoop(self.forecasts.learn, self._revising.learnt)
        self.calls.on_answered.append(self._learning.answered)
        self.on_drain: list[Callable[[], None]] = []
        self._drained_by_s: float | None = None  # end of the time for the drain; None: not draining

    @property
    def engines_ready(self) -> dict[str, bool]:
        """Whether each engine takes new requests, by name."""
        return self.fleet.ready

    @property
    def models(self) -> Listed:
        """The models that engines serve, whether the engines are up or down; see fleet.py."""
        return self.fleet.models

    def now_s(self) -> float:
        """The scheduler's clock."""
        return self.driver.now_s()

    def _carry_out(self, action: Action, now_s: float) -> None:
        if isinstance(action, StartBatch):
            self.calls.start(action, now_s)
        elif isinstance(action, AbortRequest):
            self.calls.stop(action)
        elif isinstance(action, PreemptBatch):
            self.calls.preempt(action)
        elif isinstance(action, FailRequest):
            self.calls.fail(action)
        elif isinstance(action, SolveDispatch):
            self._solving.begin(action)
        else:
            report(action)

    def _hear_engine(self, event: Event) -> None:
        if isinstance(event, EngineLost):
            self.calls.lose(event)
        else:
            self.driver.step(event)

    # ---- beginning and end ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch the engines. An engine gets requests from its first successful probe on."""
        self.fleet.start(self._hear_engine)

    @property
    def draining(self) -> bool:
        return self._drained_by_s is not None

    @property
    def drain_time_s(self) -> float:
        """Predicted seconds until the last running call ends, within the time for the drain."""
        left_s = math.inf if self._drained_by_s is None else self._drained_by_s - self.now_s()
        return max(0.0, min(left_s, self.estimator.drained_s(self.fleet.running)))

    async def drain(self, within_s: float) -> bool:
        """Refuse new calls and finish the others. False: `within_s` was too short."""
        self._drained_by_s = self.now_s() + within_s
        self.driver.step(DrainRequested())
        for listener in self.on_drain:
            listener()
        try:
            async with asyncio.timeout(within_s):
                await self.calls.empty.wait()
        except TimeoutError:
            return False
        return True

    def abort(self) -> None:
        """Stop all calls at once. Their clients get an error, and so does every later call."""
        self._drained_by_s = self.now_s()
        self.driver.close()
        self._learning.close()
        self._revising.close()
        self._solving.close()
        self.calls.close()

    async def close(self) -> None:
        """Stop everything at once."""
        self.abort()
        await self.fleet.close()
        self.journal.close()
        self.forecasts.close()
