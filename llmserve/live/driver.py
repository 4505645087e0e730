"""The live cluster drives the scheduler with asyncio, real engines and the monotonic clock.

Each client call is an `InFlightCall`. When the scheduler starts a call, calls.py forwards the engine's answer. A
preempted call stays in flight: the scheduler starts the call again, or fails it at its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from bins.dispatch import DispatchSolver
from bins.profile import Profile
from llmserve.calls.charges import Charges
from llmserve.calls.in_flight import Charge, Client, InFlightCall, Trace
from llmserve.calls.log_fields import about
from llmserve.calls.prompt_size import PromptTokensByModel, prefix_hashes, sender_hash
from llmserve.engines.engine import Engine
from llmserve.errors import RequestError, model_not_found
from llmserve.estimates.engines_wanted import EnginesWanted
from llmserve.estimates.position import Places
from llmserve.estimates.remaining import remaining_s
from llmserve.forecasts.learning import Learning
from llmserve.forecasts.lengths import AnswerLengths, LengthForecaster
from llmserve.forecasts.record import LengthRecord
from llmserve.forecasts.revising import Revising
from llmserve.forecasts.revisions import Forecast, Revisions
from llmserve.live.alarm import Alarm
from llmserve.live.calls import RunningCalls
from llmserve.live.fleet import EngineHandle, Fleet, is_expected
from llmserve.live.journal import Journal
from llmserve.live.known_models import Listed
from llmserve.live.reports import error_of, report
from llmserve.live.routes import Routes
from llmserve.live.solving import Solving
from llmserve.request import Call, Request
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    AnswerBegan,
    DrainRequested,
    EngineLost,
    Event,
    FailRequest,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.tree import LiveConfig

log = logging.getLogger("llmserve")


class LiveCluster:
    """Drives a scheduler in real time: `start()`, `submit()` for each call, `drain()`, `abort()`, `close()`.

    solvers     by model ("": every other model): make plans, where the scheduler's release follows plans
    profiles    by model ("": every other model): how long batches take on the engines
    is_served   whether the server serves a model that an engine lists
    prompt_tokens  sizes of prompts from before the start; None: none are known
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engines: Sequence[Engine],
        journal: Journal,
        *,
        forecaster: LengthForecaster | None = None,
        record: LengthRecord | None = None,
        config: LiveConfig | None = None,
        is_served: Callable[[str], bool] = lambda model: True,
        solvers: Mapping[str, DispatchSolver] = MappingProxyType({}),
        profiles: Mapping[str, Profile] = MappingProxyType({}),
        prompt_tokens: PromptTokensByModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.journal = journal
        self.lengths = AnswerLengths(forecaster, record)
        self._revising = Revising(Revisions(scheduler.requests, self._forecast_again), self._step)
        self._learning = Learning(self.lengths.learn, self._revising.learnt)
        self._config = config or LiveConfig()
        self._clock = clock
        self._started_at = clock()
        self.fleet = Fleet(
            engines, self._config, notify=self._step, on_lost=self._lose, is_served=is_served, profiles=profiles
        )
        self.prompt_tokens = PromptTokensByModel() if prompt_tokens is None else prompt_tokens
        self.routes = Routes(self.fleet)
        self._calls = RunningCalls(
            suspect=self.fleet.suspect,
            prompt_tokens=self.prompt_tokens,
            no_endpoint=self.routes.no_endpoint,
            on_named=self.routes.note,
            on_began=self._began,
            on_ended=self._ended,
            now_s=self.now_s,
        )
        self._charges = Charges(lambda: scheduler.models, self.now_s)
        self._secret = secrets.token_bytes(16)  # key of the prefixes' hashes
        self._in_flight: dict[int, InFlightCall] = {}
        self._next_id, self._closed = 0, False
        self._solving = Solving(solvers, self._step)
        self._alarm = Alarm(self.now_s, lambda: self._step(TimerFired()))
        self.places = Places(scheduler, self)
        self._wanted = EnginesWanted()
        self._empty = asyncio.Event()
        self._empty.set()
        self._listeners: list[Callable[[InFlightCall], None]] = []
        self._predicting: set[asyncio.Task[None]] = set()
        self._drained_by_s: float | None = None  # end of the time for the drain; None: not draining

    # ---- for the HTTP server -------------------------------------------------------------------------------------

    @property
    def engines_ready(self) -> dict[str, bool]:
        return {name: handle.ready for name, handle in sorted(self.fleet.handles.items())}

    @property
    def models(self) -> Listed:
        """The models that engines serve, whether the engines are up or down; see fleet.py."""
        return self.fleet.models

    @property
    def draining(self) -> bool:
        return self._drained_by_s is not None

    @property
    def drain_time_s(self) -> float:
        """Predicted seconds until the last running call ends, within the time for the drain."""
        left_s = math.inf if self._drained_by_s is None else self._drained_by_s - self.now_s()
        running = [call for handle in self.fleet.handles.values() for call in handle.running.values()]
        return max(0.0, min(left_s, max(self.remaining_s(running), default=0.0)))

    def remaining_s(self, running: Iterable[InFlightCall]) -> list[float]:
        """Predicted seconds until each of these calls ends."""
        now_s, models = self.now_s(), self.scheduler.models
        return [remaining_s(call, models[call.request.model].service, now_s) for call in running]

    def engines_wanted(self) -> dict[str, int]:
        """How many engines each model could use now; see wanted.py."""
        models = {model: queues for model, queues in self.scheduler.models.items() if model in self.models}
        return self._wanted.update(models, self.now_s())

    def remaining_s_of(self, model: str) -> list[float]:
        """`remaining_s` of the calls on the engines of a model."""
        handles = [handle for handle in self.fleet.handles.values() if model in handle.info.models]
        return self.remaining_s(call for handle in handles for call in handle.running.values())

    def now_s(self) -> float:
        return self._clock() - self._started_at

    def call(self, request_id: int) -> InFlightCall | None:
        return self._in_flight.get(request_id)

    def listen(self, listener: Callable[[InFlightCall], None]) -> None:
        """Call the listener with each call that has ended."""
        self._listeners.append(listener)

    def submit(
        self, call: Call, client: Client, charge: Charge | None = None, trace: Trace | None = None
    ) -> InFlightCall:
        """Predict the length of a call and queue the call, if its charge allows. The answer goes to the client."""
        self._next_id += 1
        in_flight = InFlightCall(call, self._next_id, client, charge, trace)
        if self._closed:  # the body of the request came late
            in_flight.fail(error_of("draining", None))
            return in_flight
        in_flight.arrived_at_s = self.now_s()
        forecast = self.lengths.predict_now(in_flight, self.models.get(call.model))
        self._in_flight[self._next_id] = in_flight
        self._empty.clear()
        if forecast is not None:
            self._arrive(in_flight, forecast)
        else:
            predicting = asyncio.create_task(self._predict(in_flight))
            self._predicting.add(predicting)
            predicting.add_done_callback(self._predicting.discard)
        return in_flight

    async def _predict(self, in_flight: InFlightCall) -> None:
        try:
            forecast = await self.lengths.predict(in_flight, self.models.get(in_flight.call.model))
        except Exception:
            log.exception("a length was not predicted", extra=about(in_flight))
            in_flight.fail(RequestError("the front-end failed on this request", code="internal_error"))
            self._forget(in_flight)
            return
        if in_flight.gone or in_flight.complete:  # the client left during the prediction, or the server closes
            self._forget(in_flight)
        else:
            self._arrive(in_flight, forecast)

    def _arrive(self, in_flight: InFlightCall, forecast: Forecast) -> None:
        call = in_flight.call
        by_prefix = bool(call.terms.share) or self.fleet.engines_of(call.model) > 1
        prompt_tokens = round(self.prompt_tokens.estimate(call), 1)
        in_flight.request = request_of(in_flight, forecast, prompt_tokens, self._secret, by_prefix=by_prefix)
        if in_flight.charge is None:
            self._step(RequestArrived(in_flight.request))
        else:
            self._charges.reserve(in_flight, self._admit)

    def _admit(self, in_flight: InFlightCall) -> None:
        """Queue a call whose charge has been reserved, unless it was refused or its client has left."""
        if in_flight.gone or in_flight.complete:
            self._forget(in_flight)
        else:
            self._step(RequestArrived(in_flight.request))

    def cancel(self, in_flight: InFlightCall) -> None:
        """Drop the call of a client that left, from the queue or on its engine. A complete answer changes nothing."""
        in_flight.gone = True
        if not in_flight.complete and self.scheduler.has(in_flight.request.id):
            self._step(RequestCancelled(in_flight.request.id))
        self._forget(in_flight)

    def notify(self, event: Event) -> None:
        """Give the scheduler an event that comes from neither calls nor engines: a change of groups."""
        self._step(event)

    # ---- one step of the scheduler ----------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        if self._closed:
            return
        now_s = self.now_s()
        actions = self.scheduler.handle(event, now_s)
        self.journal.append(now_s, event, actions)
        for action in actions:
            self._carry_out(action, now_s)
        self._alarm.set(self.scheduler.wake_at_s)

    def _carry_out(self, action: Action, now_s: float) -> None:
        if isinstance(action, StartBatch):
            self._start(action, now_s)
        elif isinstance(action, AbortRequest):
            self._calls.stop(self._in_flight[action.request_id])
        elif isinstance(action, PreemptBatch):
            self._preempt(action)
        elif isinstance(action, FailRequest):
            self._fail(action)
        elif isinstance(action, SolveDispatch):
            self._solving.begin(action)
        else:
            report(action)

    def _start(self, action: StartBatch, now_s: float) -> None:
        handle = self.fleet.handles[action.engine]
        for request in action.batch.requests:
            in_flight = self._in_flight[request.id]
            in_flight.request = request  # with its last forecast
            self._calls.start(handle, in_flight, action.batch, now_s)

    def _preempt(self, action: PreemptBatch) -> None:
        for request_id in action.request_ids:
            self._calls.preempt(self._in_flight[request_id])
        log.debug("batch %d is preempted on %s", action.batch_id, action.engine)

    def _fail(self, action: FailRequest) -> None:
        in_flight = self._in_flight[action.request_id]
        told = action.reason in ("engine_failed", "refused")
        if told and in_flight.refused is not None and not in_flight.answered:
            in_flight.begin(in_flight.refused)
        else:
            retry_after_s = action.retry_after_s
            if action.reason == "queue_full":  # when one more of its share would start, or there is room again
                retry_after_s = self.places.next_s(in_flight.request)
                if retry_after_s is None:  # how fast answers end is not known yet
                    retry_after_s = min(self.remaining_s_of(in_flight.request.model), default=None)
            error = error_of(action.reason, retry_after_s, preempted=in_flight.preemptions > 0)
            if action.reason == "model_not_found":
                call = in_flight.call
                known = call.model in self.models  # the queue that no engine lists was a lane
                missing = self.routes.missing(call.wire.path, call.model)
                error = missing if known else model_not_found(call.model, self.models)
            in_flight.fail(error)
        self._forget(in_flight)

    def _forget(self, in_flight: InFlightCall) -> None:
        """Drop a call that the scheduler is done with; wake the drain when no call is left anywhere."""
        if not self.scheduler.has(in_flight.request.id):
            ended = self._in_flight.pop(in_flight.request.id, None)
            if in_flight.charge is not None:
                self._charges.settle(in_flight)
            if ended is not None:
                _tell(self._listeners, in_flight)
        if not self._in_flight:
            self._empty.set()

    # ---- how running requests proceed and end -------------------------------------------------------------------

    def _began(self, in_flight: InFlightCall) -> None:
        """Tell a preempting scheduler at once that the call has answered: it can no longer be preempted."""
        if self.scheduler.preempts:
            self._step(AnswerBegan(in_flight.request.id))

    def _ended(self, in_flight: InFlightCall, ended: RequestEnded) -> None:
        if ended.outcome == "completed" and ended.output_tokens > 0:
            self._learning.answered(in_flight, ended.output_tokens)
        self._step(ended)
        self._forget(in_flight)

    def _forecast_again(self, request_id: int) -> Forecast | None:
        in_flight = self._in_flight[request_id]
        return self.lengths.revise(in_flight, self.models.get(in_flight.call.model))

    def _lose(self, handle: EngineHandle) -> None:
        """Abandon all calls of a lost engine, and tell the scheduler of the loss."""
        lost_calls = self._calls.abandon(handle)
        answered = tuple(sorted(in_flight.request.id for in_flight in lost_calls if in_flight.answered))
        self._step(EngineLost(handle.name, answered, planned=handle.goes_as_planned, expected=is_expected(handle)))
        for in_flight in lost_calls:
            self._forget(in_flight)

    # ---- beginning and end ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch the engines. An engine gets requests from its first successful probe on."""
        self.fleet.start()

    async def drain(self, within_s: float) -> bool:
        """Refuse new calls and finish the others. False: `within_s` was too short."""
        self._drained_by_s = self.now_s() + within_s
        self._step(DrainRequested())
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def abort(self) -> None:
        """Stop all calls at once. Their clients get an error, and so does every later call."""
        self._drained_by_s = self.now_s()
        self._closed = True
        self._alarm.set(None)
        self._learning.close()
        self._revising.close()
        self._solving.close()
        for task in self._predicting:
            task.cancel()
        for in_flight in list(self._in_flight.values()):
            in_flight.fail(error_of("draining", None))
        await self._calls.close(self._in_flight.values())
        for in_flight in self._in_flight.values():
            self._charges.settle(in_flight)

    async def close(self) -> None:
        """Stop everything at once."""
        await self.abort()
        await self.fleet.close()
        self.journal.close()
        self.lengths.close()


def _tell(listeners: Iterable[Callable[[InFlightCall], None]], in_flight: InFlightCall) -> None:
    for listener in listeners:
        try:
            listener(in_flight)
        except Exception:  # a failing listener must not stop serving
            log.exception("a listener of ended calls failed")


def request_of(
    in_flight: InFlightCall, forecast: Forecast, prompt_tokens: float, secret: bytes, *, by_prefix: bool
) -> Request:
    """What the scheduler knows of a call. secret : key of the hashes.  by_prefix : whether prefixes matter"""
    call, (predicted, quantiles) = in_flight.call, forecast
    deadline_s = call.deadline_s
    if deadline_s is None and call.terms.slo_s is not None:
        deadline_s = in_flight.arrived_at_s + call.terms.slo_s
    return Request(
        in_flight.request.id,
        predicted,
        deadline_s,
        quantiles,
        prompt_tokens,
        call.bounds.choices,
        prefix_hashes(call.opening, secret) if by_prefix else (),
        call.lane or call.model,
        call.terms.stream_name,
        sender_hash(call, secret),
        call.terms.share,
        call.terms.weight,
        call.terms.background,
        call.terms.after_tokens,
    )
