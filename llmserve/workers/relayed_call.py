"""One call of a relay's client: the scheduler process decides about it, and the engine's answer passes here."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from llmserve.calls.client_request import ClientExchange
from llmserve.calls.in_flight import InFlightCall, Trace
from llmserve.engines.engine import EngineError
from llmserve.errors import EngineFailed, RequestError
from llmserve.forecasts.reading import PromptReaders, ReadPrompt
from llmserve.gateway.aliases import with_model
from llmserve.gateway.completions import BeginTrace, ClientAnswer
from llmserve.gateway.draft import Draft
from llmserve.live.forwarding import Forwarded, Forwarding
from llmserve.live.handle import EngineHandle
from llmserve.request import Batch, Call, Request
from llmserve.scheduling.messages import RequestEnded
from llmserve.wire.headers import ASKER_HEADER
from llmserve.workers import messages
from llmserve.workers.line import SchedulerLine
from llmserve.workers.messages import Pairs, ToldTrail


class LimitsShown:
    """What an answer tells its client of the limits of the key: as the scheduler process told them at the start."""

    __slots__ = ("told",)

    def __init__(self) -> None:
        self.told: Pairs = ()

    @property
    def is_limited(self) -> bool:
        return bool(self.told)

    def headers(self, model: str) -> Pairs:
        return self.told


class Reports:
    """What the scheduler process's fleet, routes and forecasts hear of a call, as a Forwarding tells them."""

    __slots__ = ("_line", "_number")

    def __init__(self, line: SchedulerLine, number: int) -> None:
        self._line, self._number = line, number

    def began(self, handle: EngineHandle, in_flight: InFlightCall, now_s: float) -> None:
        """The fleet hears of a stream's first token by `Began`."""

    async def suspect(self, handle: EngineHandle, model: str, *, unreachable: bool) -> None:
        await self._line.ask(lambda question: messages.Suspected(question, handle.name, model, unreachable))

    async def lacking(self, handle: EngineHandle, status: int, body: bytes) -> RequestError | None:
        return await self._line.ask(lambda ask: messages.NotThere(ask, self._number, handle.name, status, body))

    def note(self, response_id: str, engine: str, call: Call) -> None:
        self._line.tell(messages.ResponseKept(self._number, response_id, engine))

    def learn_prompt(self, call: Call, tokens: int | None) -> None:
        if tokens:
            self._line.tell(messages.PromptCounted(self._number, tokens))


class Table(Protocol):
    """What a call needs of its relay."""

    line: SchedulerLine

    def now_s(self) -> float:
        """The cluster's clock."""
        ...

    def forget(self, call: RelayedCall) -> None:
        """Drop a call that is over on both sides."""
        ...


class RelayedCall:
    """A call of one of the relay's clients, and the owner of its engine's answer (forwarding.Owner).

    number   by which the processes speak of the call
    attempt  the last start on an engine; 0: none
    started  the last start as the scheduler process ordered it
    end      how the call has ended on its engine since then; None: it has not
    """

    __slots__ = (
        *("_answer", "_arrived", "_end_is_told", "_is_known", "_is_settled", "_shown", "_started_at_s", "_table"),
        *("attempt", "end", "exchange", "fleet", "forecasts", "in_flight", "number", "routes", "started"),
    )

    def __init__(
        self,
        table: Table,
        number: int,
        draft: Draft,
        exchange: ClientExchange,
        readers: PromptReaders,
        trace: BeginTrace | None,
    ) -> None:
        call = draft.call()
        self.number, self.exchange = number, exchange
        self.attempt = 0
        self.started: messages.Start | None = None
        self.end: messages.Ended | None = None
        self.fleet: Any = Reports(table.line, number)
        self.routes: Any = self.fleet
        self.forecasts: Any = self.fleet
        self._table = table
        self._started_at_s = 0.0
        self._is_known = False  # some scheduler process has heard of the request
        self._end_is_told = self._is_settled = True  # to some scheduler process; what was used of budgets
        self._shown = LimitsShown()
        self._answer = ClientAnswer(call, exchange, self._shown)
        forecast = call.bounds.choices and draft.predicted_tokens is None
        self._arrived = arrived(number, draft, readers.read(call.prompt) if forecast else None)
        begun: Trace | None = trace(call, exchange) if trace is not None else None
        self.in_flight = InFlightCall(call, 0, self._answer, None, begun, Forwarding)
        self.in_flight.arrived_at_s = table.now_s()
        if exchange.followed:
            exchange.state.call = self.in_flight
        exchange.on_gone = self._gone
        exchange.on_end = self._over
        if call.wire.stream:
            exchange.on_silence = self._silent

    @property
    def runs(self) -> bool:
        """Whether an engine answers the call now."""
        return self.in_flight.answering is not None

    # ---- to the scheduler process ----

    def arrive(self) -> None:
        """Tell of the request, which is new."""
        self._is_known = self._table.line.is_open
        self._table.line.tell(self._arrived)

    def tell_again(self) -> None:
        """Tell a scheduler process that has just started."""
        in_flight, line, now_s = self.in_flight, self._table.line, self._table.now_s()
        waited_s, over = now_s - in_flight.arrived_at_s, in_flight.delivery.over
        end = self.end if not self._end_is_told or (over and not self._is_settled) else None
        if self.started is not None and (self.runs or end is not None):
            line.tell(self._goes_on(self.started, waited_s, now_s))
        elif not self._is_known:
            self.arrive()
        elif not over and in_flight.delivery.answered:  # its engine was lost, and nobody has told the client
            in_flight.fail(EngineFailed("the engine failed this request"))
        elif not over:
            self.attempt, self.started, self.end = 0, None, None
            line.tell(msgspec.structs.replace(self._arrived, waited_s=waited_s))
        if in_flight.delivery.gone:
            line.tell(messages.Cancelled(self.number))
        if end is not None:
            self._end_is_told = True
            line.tell(end)
        elif over and not self.runs:  # nothing was used, and what was reserved is given back
            self._is_settled = True
        if self.exchange.ended:
            line.tell(messages.Over(self.number))
        self.forget_if_over()

    def _goes_on(self, started: messages.Start, waited_s: float, now_s: float) -> messages.GoesOn:
        in_flight, is_over = self.in_flight, self.end is not None and self._end_is_told
        answered, first_at_s = in_flight.delivery.answered, in_flight.measured.first_at_s
        ran_s, preemptions = now_s - self._started_at_s, in_flight.preemptions
        return messages.GoesOn(self._arrived, started, waited_s, ran_s, answered, first_at_s, preemptions, is_over)

    def shift(self, later_s: float) -> None:
        """Move the call's times to the clock of another scheduler process. later_s : how much more that clock shows"""
        in_flight, measured = self.in_flight, self.in_flight.measured
        in_flight.arrived_at_s += later_s
        self._started_at_s += later_s
        if measured.first_at_s is not None:
            measured.first_at_s += later_s
        if measured.last_at_s is not None:
            measured.last_at_s += later_s

    def seen(self) -> messages.Seen:
        """How far the answer is, while one runs."""
        in_flight = self.in_flight
        assert in_flight.answering is not None, "only what runs is seen"
        usage, heard_s = in_flight.measured.usage, in_flight.answering.heard_s
        began = usage is not None and usage.began
        return messages.Seen(self.number, self.attempt, heard_s, began, in_flight.measured.streamed_tokens)

    # ---- the client's side ----

    def _gone(self) -> None:
        in_flight, line = self.in_flight, self._table.line
        in_flight.delivery.gone = True
        if line.is_open:
            line.tell(messages.Cancelled(self.number))
        elif in_flight.answering is not None:  # nobody else stops it
            in_flight.answering.stop()

    def _over(self) -> None:
        self._table.line.tell(messages.Over(self.number))
        self.forget_if_over()

    def _silent(self) -> None:
        """Nothing has passed to the client of a stream for a while."""
        if self.in_flight.answering is not None or not self._table.line.is_open:
            self._answer.keep_alive(self.in_flight, None)
        else:
            self._table.line.tell(messages.AskPlace(self.number))

    # ---- what the scheduler process decides ----

    def start(self, told: messages.Start, handle: EngineHandle) -> None:
        in_flight, receipt = self.in_flight, told.receipt
        self.attempt, self.started, self._shown.told = told.attempt, told, told.limits
        self._started_at_s = now_s = self._table.now_s()
        self.end, self._is_settled = None, not told.holds
        in_flight.request, in_flight.receipt = Request(receipt.request_id), receipt
        if in_flight.delivery.over or in_flight.delivery.answered:
            in_flight.fail(EngineFailed("the engine failed this request"))  # whose client has got the beginning
            self._end(RequestEnded(receipt.engine, receipt.request_id, "cancelled"))
            return
        call = in_flight.call
        wire = call.wire if told.model == call.model or not call.prompt.model else with_model(call.wire, told.model)
        prompt = msgspec.structs.replace(call.prompt, model=told.model)
        in_flight.call = self._answer.call = msgspec.structs.replace(call, wire=wire, prompt=prompt, terms=told.terms)
        in_flight.stopping = False
        in_flight.attempts += 1
        if in_flight.trace is not None:
            in_flight.trace.started(in_flight, now_s)
        requests = (in_flight.request,) * told.requests
        batch = Batch(receipt.batch, receipt.bin, requests, 0.0, told.requests, turn=told.turn)
        in_flight.answering = in_flight.forward(self, handle, in_flight, batch)

    def stop(self, told: messages.Stop) -> None:
        in_flight = self.in_flight
        if not self._is_attempt(told.attempt) or (told.preempting and in_flight.delivery.answered):
            return  # it has ended or begun, which is on its way
        in_flight.stopping = told.preempting
        assert in_flight.answering is not None
        in_flight.answering.stop()

    def give_up(self, told: messages.GiveUp) -> None:
        answering = self.in_flight.answering
        if self._is_attempt(told.attempt) and answering is not None:
            answering.lose(EngineError(told.message, code="engine_lost", lost=True))

    def drop(self, told: messages.Drop) -> None:
        in_flight = self.in_flight
        if not self._is_attempt(told.attempt):
            return
        answering, in_flight.answering = in_flight.answering, None
        assert answering is not None
        answering.close()
        if in_flight.trace is not None:
            in_flight.trace.left(in_flight, self._table.now_s(), None)
        self.forget_if_over()

    def refuse(self, told: messages.Refuse) -> None:
        if not self.exchange.ended:
            self.exchange.state.call = None
            self.exchange.refuse(told.error.error)

    def fail(self, told: messages.Fail) -> None:
        self.in_flight.delivery.fail(told.error.error, told.receipt)

    def tell_refused(self, told: messages.TellRefused) -> None:
        delivery = self.in_flight.delivery
        if delivery.refused is not None:
            delivery.begin(delivery.refused)

    def show_place(self, told: messages.Place) -> None:
        if not self.exchange.ended and self.exchange.on_silence is not None:
            if not self.in_flight.request.id:
                self.in_flight.request = Request(told.request_id)
            self._answer.keep_alive(self.in_flight, told.queued)

    def _is_attempt(self, attempt: int) -> bool:
        """Whether this start of the call runs."""
        return self.attempt == attempt and self.in_flight.answering is not None

    # ---- for a Forwarding: see forwarding.Owner ----

    def now_s(self) -> float:
        return self._table.now_s()

    def began(self, in_flight: InFlightCall, *, first_token: bool = False) -> None:
        self._table.line.tell(messages.Began(self.number, self.attempt, first_token, self._table.now_s()))

    async def lacking(self, handle: EngineHandle, call: Call, status: int, body: bytes) -> RequestError | None:
        reports: Reports = self.fleet
        return await reports.lacking(handle, status, body)

    def ended(self, forwarding: Forwarded, ended: RequestEnded) -> None:
        in_flight = self.in_flight
        if in_flight.answering is not forwarding:
            return
        in_flight.answering = None
        if in_flight.trace is not None:
            in_flight.trace.left(in_flight, self._table.now_s(), ended)
        self._end(ended)
        self.forget_if_over()

    def settled(self) -> None:
        """What was used of budgets is written."""
        self._is_settled = True
        self.forget_if_over()

    def forget_if_over(self) -> None:
        if self.exchange.ended and not self.runs and self._end_is_told and self._is_settled:
            self._table.forget(self)

    def _end(self, ended: RequestEnded) -> None:
        """Tell how the call has ended on its engine."""
        in_flight = self.in_flight
        delivery, measured, refused = in_flight.delivery, in_flight.measured, in_flight.delivery.refused
        told = messages.Ended(
            self.number,
            self.attempt,
            ended,
            delivery.complete,
            delivery.answered,
            delivery.error,
            refused.status if refused is not None else 0,
            in_flight.preemptions,
            measured.counts,
            measured.streamed_tokens,
            measured.cut,
            measured.names,
            measured.first_at_s,
            measured.last_at_s,
        )
        self._end_is_told = self._table.line.is_open or in_flight.stopping  # who was preempted waits again
        self.end = told
        self._table.line.tell(told)


def never_ran(told: messages.Start) -> messages.Ended:
    """The end of a call that was ordered to start when it was over in the relay."""
    ended = RequestEnded(told.receipt.engine, told.receipt.request_id, "cancelled")
    nothing = False, False, "", 0, 0, None, 0, False, (), None, None
    return messages.Ended(told.number, told.attempt, ended, *nothing)


def arrived(number: int, draft: Draft, read: ReadPrompt | None) -> messages.Arrived:
    """The request of a draft whose body is read, without the body. read : its prompt's words"""
    headers = draft.wire.headers
    if (asker := draft.headers.get(ASKER_HEADER)) is not None:
        headers += ((ASKER_HEADER, asker),)
    return messages.Arrived(
        number,
        draft.endpoint.path,
        draft.wire.stream,
        headers,
        draft.address,
        draft.prompt,
        draft.bounds,
        draft.opening,
        draft.blocks,
        draft.block_share,
        draft.previous,
        draft.tier,
        draft.priority,
        ToldTrail.of(draft.trail) if draft.trail is not None else None,
        draft.key,
        draft.stream_name,
        draft.slo_s,
        draft.deadline_s,
        draft.predicted_tokens,
        draft.receipt,
        read,
    )
