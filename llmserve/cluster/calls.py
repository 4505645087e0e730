"""Calls that engines run now: what comes of an engine's answer is forwarded to the client as it arrives.

The answer is read to its end at the engine's pace: the engine's slot is free when the engine is done, not when the
client has read everything. Tokens never enter the scheduler. Reading needs no task: the engine's connection calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from llmserve.cluster.answer_forms import COMPLETION, StreamReader
from llmserve.cluster.fleet import EngineHandle
from llmserve.cluster.in_flight import Head, InFlightCall, Receipt
from llmserve.cluster.prompt_size import PromptTokensByModel
from llmserve.engines.engine import NOTHING, Answer, EngineError
from llmserve.engines.event_stream import Usage
from llmserve.errors import EngineFailed, RequestError, Unavailable
from llmserve.logs import about
from llmserve.request import Batch, Call, Request
from llmserve.scheduling.messages import RequestEnded

log = logging.getLogger("llmserve")


class Suspect(Protocol):
    """Finds out whether an engine is down after the engine failed a request of this model."""

    async def __call__(self, handle: EngineHandle, model: str, *, unreachable: bool) -> None: ...


class NoEndpoint(Protocol):
    """Says what the client is told when an engine answers this status and body; None: the engine's own answer."""

    def __call__(self, handle: EngineHandle, call: Call, status: int, body: bytes) -> RequestError | None: ...


class RunningCalls:
    """Starts, stops and abandons calls on engines.

    suspect        called with an engine that failed a request
    prompt_tokens  learns from engines' counts of prompt tokens
    no_endpoint    judges an engine's 404 and 405
    on_named       called when an answer has got an id, by which clients may ask for it again
    on_began       called when a client gets the first byte of its answer
    on_ended       called with how a call ended on its engine, unless the call was abandoned
    now_s          the cluster's clock
    """

    def __init__(
        self,
        *,
        suspect: Suspect,
        prompt_tokens: PromptTokensByModel,
        no_endpoint: NoEndpoint,
        on_named: Callable[[InFlightCall, str], None],
        on_began: Callable[[InFlightCall], None],
        on_ended: Callable[[InFlightCall, RequestEnded], None],
        now_s: Callable[[], float],
    ) -> None:
        self.suspect = suspect
        self.no_endpoint, self.on_named, self.on_began = no_endpoint, on_named, on_began
        self.now_s = now_s
        self._prompt_tokens = prompt_tokens
        self._on_ended = on_ended
        self._closed = False

    def start(self, handle: EngineHandle, in_flight: InFlightCall, batch: Batch, now_s: float) -> None:
        in_flight.receipt = Receipt(
            request_id=in_flight.request.id,
            bin=batch.bin,
            batch=batch.id,
            engine=handle.name,
            queue_ms=(now_s - in_flight.arrived_at_s) * 1e3,
            predicted_tokens=in_flight.request.predicted_tokens if in_flight.call.choices else None,
        )
        in_flight.stopping = False
        in_flight.attempts += 1
        if in_flight.charge is not None:
            in_flight.charge.started()
        if in_flight.trace is not None:
            in_flight.trace.started(in_flight, now_s)
        if in_flight.call.background:
            in_flight.call = line_now(in_flight.call, in_flight.request, now_s)
        handle.add(in_flight)
        in_flight.forwarding = Forwarding(self, handle, in_flight, batch)

    def preempt(self, in_flight: InFlightCall) -> None:
        """Stop a call that the scheduler may start again."""
        in_flight.stopping = True
        self.stop(in_flight)

    def stop(self, in_flight: InFlightCall) -> None:
        """Close the connection to the engine; `on_ended` follows."""
        assert in_flight.forwarding is not None, "a running request is forwarded"
        in_flight.forwarding.stop()

    def abandon(self, handle: EngineHandle) -> list[InFlightCall]:
        """Return the calls that a lost engine ran, without `on_ended` for them."""
        lost_calls = list(handle.running.values())
        for in_flight in lost_calls:
            handle.remove(in_flight)
            forwarding, in_flight.forwarding = in_flight.forwarding, None
            if forwarding is not None:
                forwarding.close()
            if in_flight.trace is not None:
                in_flight.trace.left(in_flight, self.now_s(), None)
        return lost_calls

    async def close(self, in_flight_calls: Collection[InFlightCall]) -> None:
        """Stop these calls, without `on_ended` for them."""
        self._closed = True
        for in_flight in in_flight_calls:
            if in_flight.forwarding is not None:
                in_flight.forwarding.close()

    def ended(self, forwarding: Forwarding, ended: RequestEnded) -> None:
        """Note how a call ended on its engine."""
        handle, in_flight = forwarding.handle, forwarding.in_flight
        if in_flight.forwarding is not forwarding or self._closed:
            return  # the call was abandoned: the scheduler has settled its request with EngineLost
        in_flight.forwarding = None
        handle.remove(in_flight)
        if in_flight.trace is not None:
            in_flight.trace.left(in_flight, self.now_s(), ended)
        self._on_ended(in_flight, ended)

    def learn_prompt(self, call: Call, tokens: int | None) -> None:
        """Learn from the engine's count of prompt tokens.

        Prompts of token ids have no characters to count, and of a prompt that goes on from an earlier response only
        the end is here.
        """
        if tokens and call.prompt.text and not call.previous:
            self._prompt_tokens.observe(call, tokens)


def line_now(call: Call, request: Request, now_s: float) -> Call:
    """A line of a job as it starts: what is left of its window, and whether it counts as an online request by now."""
    slo_s = None if request.deadline_s is None else request.deadline_s - now_s
    return msgspec.structs.replace(call, slo_s=slo_s, background=request.background)


class Forwarding:
    """Forwards one answer of an engine to the client, from the request to the end."""

    __slots__ = ("_answer", "_calls", "_ended", "_form", "_named", "_waiting", "handle", "in_flight")

    def __init__(self, calls: RunningCalls, handle: EngineHandle, in_flight: InFlightCall, batch: Batch) -> None:
        self.handle = handle
        self.in_flight = in_flight
        self._calls = calls
        self._form = in_flight.call.form or COMPLETION
        self._ended = self._named = False
        self._waiting: asyncio.Task[None] | None = None  # for the client to read, or for a probe of the engine
        in_flight.usage = None
        self._answer: Answer = handle.engine.ask(in_flight.call, batch, self._advance)

    def stop(self) -> None:
        """Abort the request; its end follows."""
        if not self._ended:
            self.close()
            asyncio.get_running_loop().call_soon(self._stopped)

    def close(self) -> None:
        """Abort the request. Nothing follows."""
        self._ended = True
        self._answer.close()
        if self._waiting is not None:
            self._waiting.cancel()

    # ---- as the answer arrives ----

    def _advance(self) -> None:
        """Forward what has arrived."""
        if self._ended or self._waiting is not None:
            return
        try:
            ended = self._next()
        except EngineError as error:
            if self._ended:  # stopped by what followed from its own bytes
                return
            self._answer.close()
            self._waiting = asyncio.get_running_loop().create_task(self._failed(error))
            return
        except Exception as error:
            ended = self._broken(error)
        if ended is not None and not self._ended:
            self._end(ended)

    def _next(self) -> RequestEnded | None:
        """Return how the request ended; None: more follows. Raises EngineError."""
        answer, in_flight = self._answer, self.in_flight
        if not answer.arrived():
            return None
        if answer.served and in_flight.receipt is not None:
            in_flight.receipt = msgspec.structs.replace(in_flight.receipt, **answer.served)
            answer.served = NOTHING
        if in_flight.call.stream and answer.status < 400:
            tokens = self._stream(answer)
        elif (body := answer.body()) is None:
            return None
        elif answer.fault:
            in_flight.refused = self._head(body)
            return RequestEnded(*self._request, "failed", fault=True, retryable=True)
        elif answer.status >= 400:
            self._refuse(body)
            return RequestEnded(*self._request, "failed")
        else:
            tokens = self._whole(body)
        if tokens is None:
            return None
        choices = in_flight.call.choices
        return RequestEnded(*self._request, "completed", tokens / choices if choices else 0.0)

    def _whole(self, body: bytes) -> int:
        """Forward an answer that is not streamed; return its output tokens."""
        in_flight, form = self.in_flight, self._form
        answer = form.whole(body)
        if answer is None:
            raise EngineError(f"engine {self.handle.name} answered with {len(body):,} bytes that are no {form.name}")
        usage = answer.usage
        self._calls.learn_prompt(in_flight.call, usage.prompt_tokens)
        in_flight.counts, in_flight.cut = usage, answer.cut
        if answer.response_id:
            self._calls.on_named(in_flight, answer.response_id)
        self._begin(body)
        return usage.completion_tokens or 0

    def _refuse(self, body: bytes) -> None:
        """Give the client the engine's refusal, or say what the engine lacks."""
        answer, in_flight, error = self._answer, self.in_flight, None
        if answer.status in (404, 405):
            error = self._calls.no_endpoint(self.handle, in_flight.call, answer.status, body)
        if error is not None:
            in_flight.fail(error)
        else:
            self._begin(body)

    def _stream(self, answer: Answer) -> int | None:
        """Forward what has arrived of a stream; at its end return its output tokens.

        Until the first bytes the call may run elsewhere.
        """
        in_flight = self.in_flight
        usage = in_flight.usage or self._usage(answer)
        try:
            while data := answer.take():
                if forwarded := usage.feed(data):
                    if usage.response_id and not self._named:
                        self._named = True
                        self._calls.on_named(in_flight, usage.response_id)
                    if not in_flight.answered:
                        in_flight.first_at_s = self._calls.now_s()
                        self._begin(None)
                    in_flight.feed(forwarded)
                    if in_flight.paused:
                        self._waiting = asyncio.get_running_loop().create_task(self._until_writable())
                        return None
            if not answer.complete:
                return None
            if not usage.ended:
                raise EngineError(f"engine {self.handle.name} ended its stream in mid-{self._form.name}")
        except EngineError:
            if in_flight.answered and (withheld := usage.release()):
                in_flight.feed(withheld)
            raise
        if not in_flight.answered:
            self._begin(None)
        if rest := usage.flush():
            in_flight.feed(rest)
        in_flight.last_at_s = self._calls.now_s()
        in_flight.counts, in_flight.cut = Usage(usage.prompt_tokens, usage.output_tokens), usage.cut
        in_flight.close()
        self._calls.learn_prompt(in_flight.call, usage.prompt_tokens)
        return usage.output_tokens

    def _usage(self, answer: Answer) -> StreamReader:
        """Count the tokens of the stream from now on."""
        if answer.content_type.startswith("text/html"):
            raise EngineError(f"engine {self.handle.name} answered with a page of HTML")
        in_flight = self.in_flight
        call, receipt = in_flight.call, in_flight.receipt
        field = msgspec.json.encode(receipt.fields) if call.receipt and receipt is not None else b""
        in_flight.usage = self._form.stream(call, field)
        return in_flight.usage

    async def _until_writable(self) -> None:
        await self.in_flight.writable()
        self._waiting = None
        self._advance()

    def _begin(self, body: bytes | None) -> None:
        self.in_flight.begin(self._head(body))
        self._calls.on_began(self.in_flight)

    def _head(self, body: bytes | None) -> Head:
        answer, receipt = self._answer, self.in_flight.receipt
        assert receipt is not None
        return Head(answer.status, answer.content_type, answer.retry_after, receipt, body, answer.headers)

    # ---- how it ends ----

    @property
    def _request(self) -> tuple[str, int]:
        return self.handle.name, self.in_flight.request.id

    def _end(self, ended: RequestEnded) -> None:
        self._ended = True
        self._answer.close()
        self._calls.ended(self, ended)

    def _stopped(self) -> None:
        in_flight = self.in_flight
        if in_flight.stopping and not in_flight.gone:
            in_flight.preemptions += 1
        else:
            in_flight.fail(EngineFailed("the request was aborted"))
        self._calls.ended(self, RequestEnded(*self._request, "cancelled"))

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
        await self._calls.suspect(handle, in_flight.call.model, unreachable=error.unreachable)
        failure = EngineFailed(str(error), code=error.code)
        if in_flight.answered:
            in_flight.fail(failure)
        elif error.code is not None:
            assert in_flight.receipt is not None
            body = msgspec.json.encode(self._form.error(failure))
            in_flight.refused = Head(failure.status, "application/json", None, in_flight.receipt, body)
        return RequestEnded(*self._request, "failed", fault=True, retryable=not in_flight.answered)
