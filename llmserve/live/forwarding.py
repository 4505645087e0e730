"""The forwarding of one answer from an engine to the client, as the answer arrives.

The answer is read to its end at the engine's pace: the engine's slot is free when the engine is done, not when the
client has read everything. Tokens never enter the scheduler. Reading needs no task: the engine's connection calls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any, Protocol

import msgspec

from llmserve.calls.in_flight import Answering, Head, InFlightCall
from llmserve.calls.log_fields import about
from llmserve.engines.engine import NOTHING, Answer, EngineError
from llmserve.errors import EngineFailed, EngineTimeout, RequestError, Unavailable
from llmserve.forecasts.lengths import Forecasts
from llmserve.live.fleet import Fleet
from llmserve.live.handle import EngineHandle
from llmserve.live.routes import Routes
from llmserve.request import Batch, Call
from llmserve.scheduling.messages import RequestEnded
from llmserve.wire.answer_forms import COMPLETION, StreamReader
from llmserve.wire.error_objects import ErrorObject, Verdict, asked_rest_s, error_in, is_error_body, may_be_error
from llmserve.wire.event_stream import Usage
from llmserve.wire.tool_calls import Called, ids_of, names_of

log = logging.getLogger("llmserve")

JSON = "application/json"


class Owner(Protocol):
    """What an answer needs of the calls of its cluster (calls.py).

    fleet      finds out whether an engine that failed a request is down
    routes     knows which endpoints and responses engines have
    forecasts  learn from engines' counts of prompt tokens
    """

    fleet: Fleet
    routes: Routes
    forecasts: Forecasts

    def now_s(self) -> float: ...

    async def lacking(self, handle: EngineHandle, call: Call, status: int, body: bytes) -> RequestError | None:
        """What the client is told when an engine has answered 404 or 405; None: the engine's own words."""
        ...

    def began(self, in_flight: InFlightCall, *, first_token: bool = False) -> None:
        """The client gets the first byte of the answer. first_token : the byte is of the first token of a stream"""
        ...

    def ended(self, forwarding: Forwarded, ended: RequestEnded) -> None:
        """The call has ended on its engine."""
        ...


class Forwarded(Answering, Protocol):
    """An engine's answer to a call, on its way to the client."""

    handle: EngineHandle
    in_flight: InFlightCall


class Forwards(Protocol):
    """Begins the forwarding of an engine's answer. batch : with which the scheduler has started the call"""

    def __call__(self, owner: Any, handle: EngineHandle, in_flight: InFlightCall, batch: Batch, /) -> Answering: ...


class Forwarding:
    """One answer of an engine, from the request to the end."""

    __slots__ = (
        "_answer",
        "_delivery",
        "_ended",
        "_form",
        "_is_stream",
        "_measured",
        "_named",
        "_owner",
        "_waiting",
        "handle",
        "in_flight",
        "turn",
    )

    def __init__(self, owner: Owner, handle: EngineHandle, in_flight: InFlightCall, batch: Batch) -> None:
        self.handle = handle
        self.in_flight = in_flight
        self.turn = batch.turn or 0.0
        self._owner = owner
        self._delivery, self._measured = in_flight.delivery, in_flight.measured
        self._form, self._is_stream = in_flight.call.wire.form or COMPLETION, in_flight.call.wire.stream
        self._ended = self._named = False
        self._waiting: asyncio.Task[None] | None = None  # for the client to read, or for a probe of the engine
        self._measured.usage = None
        self._answer: Answer = handle.engine.ask(in_flight.call, batch, self._advance)

    def stop(self) -> None:
        """Abort the request; its end follows."""
        if not self._ended:
            self.close()
            asyncio.get_running_loop().call_soon(self._stopped)

    @property
    def heard_s(self) -> float | None:
        """None also while the client reads too slowly, or a failure is looked into."""
        return None if self._ended or self._waiting is not None else self._answer.heard_s

    def lose(self, error: EngineError) -> None:
        """Abort the request, which the engine has lost. It runs again if the client has got nothing of the answer."""
        if not self._ended and self._waiting is None:
            self._give_up(error)

    def close(self) -> None:
        """Abort the request. Nothing follows."""
        self._ended = True
        self._answer.close()
        if self._waiting is not None:
            self._waiting.cancel()

    # ---- as the answer arrives ----

    def _pass(self, part: bytes) -> bool:
        """Forward plain events of a stream that has begun: the path of nearly all events. False: `_advance` must."""
        reader = self._measured.usage
        if self._ended or self._waiting is not None or reader is None or not reader.passes(part):
            return False
        try:
            self._delivery.feed(part)
        except Exception as error:
            self._end(self._broken(error))
            return True
        if self._delivery.behind:
            self._wait()
        return True

    def _advance(self) -> None:
        """Forward what has arrived."""
        if self._ended or self._waiting is not None:
            return
        try:
            ended = self._next()
        except EngineError as error:
            if not self._ended:  # else stopped by what followed from its own bytes
                self._give_up(error)
            return
        except Exception as error:
            ended = self._broken(error)
        if ended is not None and not self._ended:
            self._end(ended)

    def _next(self) -> RequestEnded | None:
        """Return how the request ended; None: more follows. Raises EngineError."""
        answer = self._answer
        if self._measured.usage is not None:  # a stream goes on
            return self._stream(answer)
        if not answer.arrived():
            return None
        if answer.served and (receipt := self.in_flight.receipt) is not None:
            self.in_flight.receipt = msgspec.structs.replace(receipt, **answer.served)
            answer.served = NOTHING
        if self._is_stream and answer.status < 400:
            return self._stream(answer)
        if (body := answer.body()) is None:
            return None
        return self._declined(body) if answer.status >= 400 else self._whole(body)

    def _completed(self, usage: Usage, called: Called, response_id: str) -> RequestEnded:
        choices, tokens = self.in_flight.call.bounds.choices, usage.completion_tokens or 0
        each = tokens / choices if choices else 0.0
        if called or response_id:
            self._measured.names = (response_id, *ids_of(called)) if response_id else ids_of(called)
        told, tools = usage.cached_tokens, names_of(called) if called else ()
        first_at_s, last_at_s = self._measured.first_at_s, self._measured.last_at_s
        decode_s = last_at_s - first_at_s if first_at_s is not None and last_at_s is not None else None
        return RequestEnded(*self._request, "completed", each, cached_tokens=told, tools=tools, decode_s=decode_s)

    def _whole(self, body: bytes) -> RequestEnded:
        """Forward an answer that is not streamed, unless the body is an error in spite of the status."""
        in_flight, form = self.in_flight, self._form
        if may_be_error(body) and (error := error_in(body)) is not None:
            return self._told(self._verdict(error, body), error.status, body)
        answer = form.whole(body)
        if answer is None:
            nothing = not body.strip() or self._is_page
            text = f"engine {self.handle.name} answered with {len(body):,} bytes that are no {form.name}"
            raise EngineError(text, answered=not nothing)
        if answer.failed:
            self._begin(body)
            return RequestEnded(*self._request, "failed", fault=True)
        usage = answer.usage
        self._owner.forecasts.learn_prompt(in_flight.call, usage.prompt_tokens)
        self._measured.counts, self._measured.cut = usage, answer.cut
        if answer.response_id:
            self._owner.routes.note(answer.response_id, self.handle.name, in_flight.call)
        if usage.cached_tokens is not None and (receipt := in_flight.receipt) is not None:
            in_flight.receipt = msgspec.structs.replace(receipt, cached_tokens=usage.cached_tokens)
        self._begin(body)
        return self._completed(usage, answer.called, answer.response_id)

    # ---- errors that an engine tells ----

    def _declined(self, body: bytes) -> RequestEnded | None:
        """An answer with the status of an error; None: its end follows."""
        status = self._answer.status
        if status in (404, 405):
            self._waiting = asyncio.get_running_loop().create_task(self._not_there(status, body))
            return None
        return self._told(self._verdict(error_in(body), body), status, body)

    async def _not_there(self, status: int, body: bytes) -> None:
        """End a request whose engine has no such endpoint, model or response."""
        try:
            lacking = await self._owner.lacking(self.handle, self.in_flight.call, status, body)
            if lacking is not None:  # another engine may have it; this one's other requests go on
                self._delivery.refuse(self._head_of(lacking))
                ended = RequestEnded(*self._request, "failed", retryable=True, refused=True)
            else:
                ended = self._told(self._verdict(error_in(body), body), status, body)
        except Exception as error:
            ended = self._broken(error)
        self._waiting = None
        self._end(ended)

    def _told(self, verdict: Verdict, status: int, body: bytes) -> RequestEnded:
        """An error before any content. The client gets it if the error is the client's, or no other engine answers.

        status, body : for the client
        """
        head = msgspec.structs.replace(self._head(body), status=status)
        if self._answer.status < 400:
            head = msgspec.structs.replace(head, content_type=JSON)
        if not (verdict.fault or verdict.refused):
            self._delivery.begin(head)
            self._owner.began(self.in_flight)
            return RequestEnded(*self._request, "failed")
        self._delivery.refuse(head)
        return RequestEnded(
            *self._request,
            "failed",
            fault=verdict.fault,
            retryable=True,
            refused=verdict.refused,
            rest_s=self._rest_s(refused=verdict.refused),
        )

    def _verdict(self, error: ErrorObject | None, body: bytes) -> Verdict:
        """What follows from an error. body : with its words"""
        answer, call = self._answer, self.in_flight.call
        names_model = answer.status == 404 and call.wire.form in (None, COMPLETION)
        return answer.judge(error, names_model=names_model or (bool(call.model) and call.model.encode() in body))

    def _rest_s(self, *, refused: bool) -> float | None:
        """How long the engine asks to be left alone; None: it does not ask."""
        asked_s = asked_rest_s(self._answer.retry_after, self._answer.headers, time.time())
        return 0.0 if asked_s is None and refused else asked_s

    def _cut_off(self, verdict: Verdict) -> RequestEnded:
        """An error that has passed with its event: the stream ends there."""
        blamed = verdict.fault or verdict.refused
        self._delivery.error = "engine_failed" if blamed else "engine_refused"
        if self._form.done:
            self._delivery.feed(self._form.done)
        self._delivery.close()
        return RequestEnded(
            *self._request, "failed", fault=blamed, rest_s=self._rest_s(refused=True) if verdict.refused else None
        )

    # ---- streams ----

    def _stream(self, answer: Answer) -> RequestEnded | None:
        """Forward what has arrived of a stream. Until the first content the call may run elsewhere."""
        delivery, measured = self._delivery, self._measured
        usage = measured.usage or self._usage(answer)
        try:
            while not usage.over and (data := answer.take()):
                forwarded = usage.feed(data)
                if usage.stalled:
                    usage.stalled = False
                    answer.stalled()
                    if delivery.listens:
                        delivery.feed(usage.take_comments())
                if forwarded:
                    if usage.response_id and not self._named:
                        self._named = True
                        self._owner.routes.note(usage.response_id, self.handle.name, self.in_flight.call)
                    if not delivery.answered:
                        measured.first_at_s = now_s = self._owner.now_s()
                        self._begin(None)
                        self._owner.fleet.began(self.handle, self.in_flight, now_s)
                        answer.pass_to(self._pass)
                    delivery.feed(forwarded)
                    if delivery.behind and usage.failed is None and not usage.over:
                        self._wait()
                        return None
                if usage.failed is not None:
                    return self._stream_failed(usage)
                if answer.goes_on and not usage.over:  # all that has arrived was taken
                    return None
            if not (answer.complete or usage.over):
                return None
            if (whole := usage.end()) is not None:
                return self._whole(whole)
            if usage.failed is not None:
                return self._stream_failed(usage)
            if not usage.ended:
                raise EngineError(f"engine {self.handle.name} ended its stream in mid-{self._form.name}")
        except EngineError:
            if delivery.answered and (withheld := usage.release()):
                delivery.feed(withheld)
            raise
        if not delivery.answered:
            self._begin(None)
        if rest := usage.flush():
            delivery.feed(rest)
        measured.last_at_s = self._owner.now_s()
        if usage.counted:
            self.handle.note_stream(usage.events, usage.output_tokens)
        counts = Usage(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)
        measured.counts, measured.cut = counts, usage.cut
        delivery.close()
        self._owner.forecasts.learn_prompt(self.in_flight.call, usage.prompt_tokens)
        return self._completed(counts, usage.called, usage.response_id)

    def _stream_failed(self, usage: StreamReader) -> RequestEnded:
        """The engine has told an error within its stream. The client's own error passes as the engine tells it."""
        error = usage.failed
        assert error is not None, "the stream has failed"
        body = usage.failed_data
        verdict = self._verdict(error, body)
        if not self._delivery.answered:
            if verdict.fault or verdict.refused or b"data:" not in usage.failed_event:
                if not is_error_body(body):
                    told = EngineFailed(error.message or "the engine failed this request")
                    body = msgspec.json.encode(self._form.error(told))
                return self._told(verdict, error.status, body)
            self._begin(None)
            self._delivery.feed(usage.failed_event)
        return self._cut_off(verdict)

    @property
    def _is_page(self) -> bool:
        return self._answer.content_type.startswith("text/html")

    def _usage(self, answer: Answer) -> StreamReader:
        """Count the tokens of the stream from now on."""
        if self._is_page:
            raise EngineError(f"engine {self.handle.name} answered with a page of HTML")
        in_flight = self.in_flight
        call, receipt = in_flight.call, in_flight.receipt
        field = msgspec.json.encode(receipt.fields) if call.terms.receipt and receipt is not None else b""
        self._measured.usage = self._form.stream(call, field)
        self._measured.tokens_an_event = self.handle.tokens_an_event
        return self._measured.usage

    def _wait(self) -> None:
        """Read no further until the client has read more."""
        self._waiting = asyncio.get_running_loop().create_task(self._until_writable())

    async def _until_writable(self) -> None:
        await self._delivery.writable()
        self._waiting = None
        self._advance()

    def _begin(self, body: bytes | None) -> None:
        self._delivery.begin(self._head(body))
        self._owner.began(self.in_flight, first_token=body is None)

    def _head(self, body: bytes | None) -> Head:
        answer, receipt = self._answer, self.in_flight.receipt
        assert receipt is not None
        return Head(answer.status, answer.content_type, answer.retry_after, receipt, body, answer.headers)

    def _head_of(self, error: RequestError) -> Head:
        """An error of this program as an answer."""
        receipt = self.in_flight.receipt
        assert receipt is not None
        retry_after = None if error.retry_after_s is None else f"{max(1, math.ceil(error.retry_after_s))}"
        return Head(error.status, JSON, retry_after, receipt, msgspec.json.encode(self._form.error(error)))

    # ---- how it ends ----

    def _give_up(self, error: EngineError) -> None:
        self._answer.close()
        self._waiting = asyncio.get_running_loop().create_task(self._failed(error))

    @property
    def _request(self) -> tuple[str, int]:
        return self.handle.name, self.in_flight.request.id

    def _end(self, ended: RequestEnded) -> None:
        self._ended = True
        if ended.outcome == "completed":
            self._answer.drain()
        else:
            self._answer.close()
        self._owner.ended(self, ended)

    def _stopped(self) -> None:
        in_flight = self.in_flight
        if in_flight.stopping and not self._delivery.gone:
            in_flight.preemptions += 1
        else:
            in_flight.fail(EngineFailed("the request was aborted"))
        self._owner.ended(self, RequestEnded(*self._request, "cancelled"))

    def _broken(self, error: Exception) -> RequestEnded:
        """An error of this program."""
        log.error("serving a request failed", exc_info=error, extra=about(self.in_flight))
        self.in_flight.fail(EngineFailed("the front-end failed while serving this request"))
        return RequestEnded(*self._request, "failed")

    async def _failed(self, error: EngineError) -> None:
        """End a request whose engine gave no answer, or a broken one."""
        try:
            ended = await self._failure(error)
        except Exception as own:
            ended = self._broken(own)
        self._waiting = None
        self._end(ended)

    async def _failure(self, error: EngineError) -> RequestEnded:
        handle, in_flight = self.handle, self.in_flight
        if error.local:  # no other engine can be reached either, and this one is not to blame
            log.warning("%s", error, extra=about(in_flight))
            in_flight.fail(Unavailable("the server has no free sockets", code="no_socket", retry_after_s=1.0))
            return RequestEnded(*self._request, "cancelled", no_socket=True)
        level = logging.WARNING if handle.up and error.code is None else logging.DEBUG
        log.log(level, "%s", error, extra=about(in_flight))
        failure = EngineTimeout(str(error)) if error.late else EngineFailed(str(error), code=error.code)
        if error.refused and not self._delivery.answered:
            self._delivery.refuse(self._head_of(failure))
            return RequestEnded(*self._request, "failed", fault=True, retryable=True, refused=True, rest_s=0.0)
        await self._owner.fleet.suspect(handle, in_flight.call.model, unreachable=error.unreachable)
        # It may be running yet, or would run for nothing. An engine that has lost it does not run it.
        over = self._delivery.answered or error.late or error.answered
        if over:
            in_flight.fail(failure)
        elif error.code is not None:
            self._delivery.refuse(self._head_of(failure))
        return RequestEnded(*self._request, "failed", fault=True, retryable=not over, lost=error.lost)
