"""The calls of a live cluster, from their arrival to the scheduler's last word on them.

Each client call is an `InFlightCall`: llmserve predicts the length, reserves the limits, and queues the call in the
scheduler. When the scheduler starts the call, forwarding.py forwards the engine's answer. A preempted call stays in
flight: the scheduler starts the call again, or fails it at its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable

import msgspec

from llmserve.calls.charges import Charges
from llmserve.calls.in_flight import Answering, Charge, Client, InFlightCall, Receipt, Trace, told_tokens
from llmserve.calls.log_fields import about
from llmserve.calls.prompt_size import sender_hash
from llmserve.engines.engine import ServedModel
from llmserve.errors import RequestError, model_not_found
from llmserve.estimates.estimator import Estimator
from llmserve.forecasts.lengths import UNKNOWN, Forecasts, Made
from llmserve.forecasts.revisions import Forecast
from llmserve.live.driver import Driver
from llmserve.live.fleet import Fleet
from llmserve.live.forwarding import Forwarded, Forwarding, Forwards
from llmserve.live.handle import EngineHandle
from llmserve.live.reports import error_of
from llmserve.live.routes import Routes
from llmserve.request import EVEN, LAST, NO_BLOCKS, Batch, Call, Request
from llmserve.scheduling.messages import (
    AbortRequest,
    AnswerBegan,
    EngineLost,
    FailRequest,
    PreemptBatch,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
)

log = logging.getLogger("llmserve")


class Calls:
    """The calls of clients, which start, stop and end as the scheduler decides.

    on_answered  called with each call that an engine has answered whole, and the tokens of one of its answers
    on_ended     called with each call that has ended
    empty        set while no call is in flight
    secret       key of the hashes of prompts, of senders and of programs
    """

    def __init__(
        self,
        driver: Driver,
        fleet: Fleet,
        forecasts: Forecasts,
        routes: Routes,
        estimator: Estimator,
        secret: bytes | None = None,
    ) -> None:
        self.fleet, self.routes, self.forecasts = fleet, routes, forecasts
        self.on_answered: list[Callable[[InFlightCall, float], None]] = []
        self.on_ended: list[Callable[[InFlightCall], None]] = []
        self.empty = asyncio.Event()
        self.empty.set()
        self._driver = driver
        self._scheduler = driver.scheduler
        self._estimator = estimator
        self._charges = Charges(lambda: driver.scheduler.models, driver.now_s)
        self.secret = secret or secrets.token_bytes(16)
        self._in_flight: dict[int, InFlightCall] = {}
        self._last_id, self._closed = 0, False
        self._predicting: set[asyncio.Task[None]] = set()

    def get(self, request_id: int) -> InFlightCall | None:
        """The call of a request; None: the call has ended."""
        return self._in_flight.get(request_id)

    def now_s(self) -> float:
        """The cluster's clock."""
        return self._driver.now_s()

    def number_after(self, last_id: int) -> None:
        """Give requests ids above this one."""
        assert self._last_id <= last_id, "requests have such ids already"
        self._last_id = last_id

    # ---- arrival ------------------------------------------------------------------------------------------------

    def submit(
        self,
        call: Call,
        client: Client,
        charge: Charge | None = None,
        trace: Trace | None = None,
        forward: Forwards = Forwarding,
    ) -> InFlightCall:
        """Predict the length of a call and queue the call, if its charge allows. The answer goes to the client.

        forward : begins the forwarding of an engine's answer, each time that an engine gets the call
        """
        self._last_id += 1
        in_flight = InFlightCall(call, self._last_id, client, charge, trace, forward)
        if self._closed:  # the body of the request came late
            in_flight.fail(error_of("draining", None))
            return in_flight
        in_flight.arrived_at_s = self.now_s()
        made = self.forecasts.made_now(call, self._model_of(call))
        self._in_flight[self._last_id] = in_flight
        self.empty.clear()
        if made is not None:
            self._arrive(in_flight, made)
        else:
            predicting = asyncio.create_task(self._predict(in_flight))
            self._predicting.add(predicting)
            predicting.add_done_callback(self._predicting.discard)
        return in_flight

    async def _predict(self, in_flight: InFlightCall) -> None:
        try:
            made = await self.forecasts.made(in_flight.call, self._model_of(in_flight.call))
        except Exception:
            log.exception("a length was not predicted", extra=about(in_flight))
            in_flight.fail(RequestError("the front-end failed on this request", code="internal_error"))
            self._forget(in_flight)
            return
        if in_flight.delivery.over:  # the client left during the prediction, or the server closes
            self._forget(in_flight)
        else:
            self._arrive(in_flight, made)

    def _model_of(self, call: Call) -> ServedModel | None:
        return self.fleet.models.get(call.model)

    def _arrive(self, in_flight: InFlightCall, made: Made) -> None:
        in_flight.forecast = made.own
        if made.source:
            self.forecasts.sources[made.source] += 1
        in_flight.request = self.request_of(in_flight.call, made, in_flight.request.id, in_flight.arrived_at_s)
        if in_flight.charge is None:
            self._driver.step(RequestArrived(in_flight.request))
        else:
            self._charges.reserve(in_flight, self._admit)

    def _admit(self, in_flight: InFlightCall) -> None:
        """Queue a call with a reserved charge, unless the charge was refused or the client has left."""
        if in_flight.delivery.over:
            self._forget(in_flight)
        else:
            self._driver.step(RequestArrived(in_flight.request))

    def adopt(self, in_flight: InFlightCall, handle: EngineHandle, answering: Answering, ran_s: float) -> None:
        """Take over a call that an engine runs already: an earlier process of this server has started it, and another
        one forwards the answer.

        in_flight : with all that is known of it.  ran_s : seconds since its start
        """
        call, request_id, now_s = in_flight.call, in_flight.request.id, self.now_s()
        made = self.forecasts.made_now(call, self._model_of(call)) or UNKNOWN
        in_flight.forecast = made.own
        in_flight.request = request = self.request_of(call, made, request_id, in_flight.arrived_at_s)
        in_flight.answering = answering
        self._in_flight[request_id] = in_flight
        self.empty.clear()
        if in_flight.charge is not None:
            self._charges.reserve(in_flight, _is_admitted)
            in_flight.charge.started()
        self.fleet.adopted(handle, in_flight, now_s)
        answered = in_flight.delivery.answered
        self._driver.step(RequestAdopted(request, handle.engine.info, round(ran_s, 3), answered))

    def request_of(self, call: Call, made: Made, request_id: int, arrived_at_s: float) -> Request:
        """What the scheduler knows of a call."""
        terms, deadline_s = call.terms, call.deadline_s
        if deadline_s is None and terms.slo_s is not None:
            deadline_s = arrived_at_s + terms.slo_s
        prompt_tokens = round(self.forecasts.prompt_tokens.estimate(call), 1)
        return Request(
            request_id,
            made.median,
            deadline_s,
            made.lengths,
            prompt_tokens,
            call.bounds.choices,
            call.blocks,
            round(prompt_tokens * call.block_share, 2) if call.blocks else NO_BLOCKS,
            call.route_queue or self.fleet.queue_of(terms.stream_name, call.model),
            terms.stream_name,
            sender_hash(call, self.secret),
            terms.share,
            EVEN if terms.weight == EVEN else terms.weight,  # a journal leaves out this very object, not its equals
            terms.background,
            LAST if terms.after_tokens == LAST else terms.after_tokens,
            terms.program,
            terms.parent,
            terms.kind,
            terms.step,
        )

    def forecast_again(self, request_id: int) -> Forecast | None:
        """A waiting request's forecast by what was learnt since its arrival; None: its forecast stays."""
        in_flight = self._in_flight[request_id]
        return self.forecasts.revise(in_flight, self._model_of(in_flight.call))

    # ---- what the scheduler decides -----------------------------------------------------------------------------

    def start(self, action: StartBatch, now_s: float) -> None:
        """Send requests of a batch to their engine. now_s : of the scheduler's step"""
        handle = self.fleet.handles[action.engine]
        for request in action.batch.requests:
            in_flight = self._in_flight[request.id]
            in_flight.request = request  # with its last forecast
            self._start(handle, in_flight, action.batch, now_s)

    def _start(self, handle: EngineHandle, in_flight: InFlightCall, batch: Batch, now_s: float) -> None:
        in_flight.receipt = Receipt(
            request_id=in_flight.request.id,
            bin=batch.bin,
            batch=batch.id,
            engine=handle.name,
            queue_ms=(now_s - in_flight.arrived_at_s) * 1e3,
            predicted_tokens=told_tokens(in_flight.call, in_flight.request.predicted_tokens),
        )
        in_flight.stopping = False
        in_flight.attempts += 1
        if in_flight.charge is not None:
            in_flight.charge.started()
        if in_flight.trace is not None:
            in_flight.trace.started(in_flight, now_s)
        if in_flight.call.terms.background:
            in_flight.call = line_now(in_flight.call, in_flight.request, now_s)
        self.fleet.sent(handle, in_flight, now_s, holds_up=self._holds_up(handle, in_flight.request.id))
        in_flight.answering = in_flight.forward(self, handle, in_flight, batch)

    def _holds_up(self, handle: EngineHandle, request_id: int) -> bool:
        """Whether requests wait inside the engine until this one begins, however many slots are free: the engine loads
        the request's model, or computes a long prompt (scheduling/prefills.py).
        """
        if not handle.models_at_once and not self._scheduler.group.pool.computing:
            return False
        engine = self._scheduler.engines[handle.name]
        run = engine.running.get(request_id)
        return request_id in engine.prefills or (run is not None and run.loads)

    def stop(self, action: AbortRequest) -> None:
        """Close the connection to the engine; the end of the request follows."""
        _stop(self._in_flight[action.request_id])

    def preempt(self, action: PreemptBatch) -> None:
        """Stop calls that the scheduler may start again."""
        for request_id in action.request_ids:
            in_flight = self._in_flight[request_id]
            in_flight.stopping = True
            _stop(in_flight)
        log.debug("batch %d is preempted on %s", action.batch_id, action.engine)

    def fail(self, action: FailRequest) -> None:
        """Tell the client of a request that will not be answered, or not by another engine."""
        in_flight = self._in_flight[action.request_id]
        told = action.reason in ("engine_failed", "refused")
        if told and in_flight.delivery.refused is not None and not in_flight.delivery.answered:
            in_flight.delivery.begin(in_flight.delivery.refused)
        else:
            in_flight.fail(self._error_of(in_flight, action))
        self._forget(in_flight)

    def _error_of(self, in_flight: InFlightCall, action: FailRequest) -> RequestError:
        call, models = in_flight.call, self.fleet.models
        if action.reason == "model_not_found":  # the unknown name may be a route queue, not a model
            return (
                self.routes.missing(call.wire.path, call.model)
                if call.model in models
                else model_not_found(call.model, models)
            )
        is_full = action.reason == "queue_full"
        retry_after_s = self._estimator.room_s(in_flight.request) if is_full else action.retry_after_s
        return error_of(action.reason, retry_after_s, preempted=in_flight.preemptions > 0)

    # ---- answers ------------------------------------------------------------------------------------------------

    async def lacking(self, handle: EngineHandle, call: Call, status: int, body: bytes) -> RequestError | None:
        return self.routes.no_endpoint(handle, call, status, body)

    def began(self, in_flight: InFlightCall, *, first_token: bool = False) -> None:
        """Tell a preempting scheduler at once that the call has answered: it can no longer be preempted. The time of a
        stream's first token also tells how long an engine takes to load a model, and that a long prompt is computed.
        """
        request_id = in_flight.request.id
        if self._scheduler.preempts or (first_token and self._scheduler.wants_first_token(request_id)):
            self._driver.step(AnswerBegan(request_id))

    def ended(self, forwarding: Forwarded, ended: RequestEnded) -> None:
        """Take note of how a call has ended on its engine."""
        handle, in_flight = forwarding.handle, forwarding.in_flight
        if in_flight.answering is not forwarding or self._closed:
            return  # the call was abandoned: EngineLost has told the scheduler
        in_flight.answering = None
        self.fleet.left(handle, in_flight, self.now_s(), ended.output_tokens)
        if in_flight.trace is not None:
            in_flight.trace.left(in_flight, self.now_s(), ended)
        if ended.outcome == "completed" and ended.output_tokens > 0:
            for listener in self.on_answered:
                listener(in_flight, ended.output_tokens)
        self._driver.step(ended)
        self._forget(in_flight)

    def lose(self, event: EngineLost) -> None:
        """Abandon all calls of a lost engine, and tell the scheduler of the loss."""
        lost_calls = self._abandon(self.fleet.handles[event.engine])
        self._driver.step(event)
        for in_flight in lost_calls:
            self._forget(in_flight)

    def _abandon(self, handle: EngineHandle) -> list[InFlightCall]:
        lost_calls = list(handle.running.values())
        for in_flight in lost_calls:
            handle.remove(in_flight)
            answering, in_flight.answering = in_flight.answering, None
            if answering is not None:
                answering.close()
            if in_flight.trace is not None:
                in_flight.trace.left(in_flight, self.now_s(), None)
        return lost_calls

    # ---- end ----------------------------------------------------------------------------------------------------

    def cancel(self, in_flight: InFlightCall) -> None:
        """Drop the call of a client that left, from the queue or on its engine. A complete answer changes nothing."""
        in_flight.delivery.gone = True
        if not in_flight.delivery.complete and self._scheduler.has(in_flight.request.id):
            self._driver.step(RequestCancelled(in_flight.request.id))
        self._forget(in_flight)

    def _forget(self, in_flight: InFlightCall) -> None:
        """Drop a call that the scheduler is done with."""
        if not self._scheduler.has(in_flight.request.id):
            ended = self._in_flight.pop(in_flight.request.id, None)
            if in_flight.charge is not None:
                self._charges.settle(in_flight)
            if ended is not None:
                if in_flight.call.member is not None:
                    in_flight.call.member.left(in_flight.measured.names)
                _tell(self.on_ended, in_flight)
        if not self._in_flight:
            self.empty.set()

    def close(self) -> None:
        """Stop all calls at once. Their clients get an error, and so does every later call."""
        self._closed = True
        for task in self._predicting:
            task.cancel()
        for in_flight in list(self._in_flight.values()):
            in_flight.fail(error_of("draining", None))
        for in_flight in self._in_flight.values():
            if in_flight.answering is not None:
                in_flight.answering.close()
        for in_flight in self._in_flight.values():
            self._charges.settle(in_flight)


def _is_admitted(in_flight: InFlightCall) -> None:
    """Nothing is left to do for a call that runs when its charge is reserved."""


def _stop(in_flight: InFlightCall) -> None:
    assert in_flight.answering is not None, "a running request is answered"
    in_flight.answering.stop()


def _tell(listeners: Iterable[Callable[[InFlightCall], None]], in_flight: InFlightCall) -> None:
    for listener in listeners:
        try:
            listener(in_flight)
        except Exception:  # a failing listener must not stop serving
            log.exception("a listener of ended calls failed")


def line_now(call: Call, request: Request, now_s: float) -> Call:
    """A line of a job at its start: the rest of the window, and whether the line counts as an online request by now."""
    slo_s = None if request.deadline_s is None else request.deadline_s - now_s
    terms = msgspec.structs.replace(call.terms, slo_s=slo_s, background=request.background)
    return msgspec.structs.replace(call, terms=terms)
