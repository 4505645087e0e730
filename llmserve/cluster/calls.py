"""Calls that engines run now. A task for each call reads the engine's answer and forwards the answer to the client.

The task reads the answer to the end at the engine's pace: the engine's slot is free when the engine is done, not when
the client has read everything. Tokens never enter the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

import msgspec

from llmserve.cluster.fleet import EngineHandle
from llmserve.cluster.in_flight import Head, InFlightCall, Receipt
from llmserve.cluster.prompt_size import PromptTokensByModel
from llmserve.engines.engine import Answer, EngineError
from llmserve.engines.event_stream import Usage, UsageFilter, usage_of, was_cut
from llmserve.errors import EngineFailed, Unavailable
from llmserve.request import Batch, Call
from llmserve.scheduling.messages import RequestEnded

log = logging.getLogger("llmserve")


class Suspect(Protocol):
    """Finds out whether an engine is down after the engine failed a request of this model."""

    async def __call__(self, handle: EngineHandle, model: str, *, unreachable: bool) -> None: ...


class RunningCalls:
    """Starts, stops and abandons these tasks.

    suspect        called with an engine that failed a request
    prompt_tokens  learns from engines' counts of prompt tokens
    on_began       called when a client gets the first byte of its answer
    on_ended       called with how a call ended on its engine, unless the call was abandoned
    """

    def __init__(
        self,
        *,
        suspect: Suspect,
        prompt_tokens: PromptTokensByModel,
        on_began: Callable[[InFlightCall], None],
        on_ended: Callable[[InFlightCall, RequestEnded], None],
    ) -> None:
        self._suspect = suspect
        self._prompt_tokens = prompt_tokens
        self._on_began = on_began
        self._on_ended = on_ended
        self._closed = False

    def start(self, handle: EngineHandle, in_flight: InFlightCall, batch: Batch, now_s: float) -> None:
        in_flight.receipt = Receipt(
            request_id=in_flight.request.id,
            bin=batch.bin,
            batch=batch.id,
            engine=handle.name,
            queue_ms=(now_s - in_flight.arrived_at_s) * 1e3,
            predicted_tokens=in_flight.request.predicted_tokens,
        )
        in_flight.stopping = False
        if in_flight.charge is not None:
            in_flight.charge.started()
        handle.add(in_flight)
        task = asyncio.create_task(self._forward(handle, in_flight, batch))
        in_flight.task = task
        # Not the task's own `finally`: a task cancelled before its first step never enters its `try`.
        task.add_done_callback(partial(self._done, handle, in_flight))

    def preempt(self, in_flight: InFlightCall) -> None:
        """Stop a call that the scheduler may start again."""
        in_flight.stopping = True
        self.stop(in_flight)

    def stop(self, in_flight: InFlightCall) -> None:
        """Cancel the task, which closes the connection to the engine. Has no effect on a task that has just ended."""
        assert in_flight.task is not None, "a running request has a task"
        in_flight.task.cancel()

    def abandon(self, handle: EngineHandle) -> list[InFlightCall]:
        """Return the calls that a lost engine ran, without `on_ended` for them.

        A call whose answer is complete has ended, and is not lost with its engine.
        """
        for in_flight in list(handle.running.values()):
            if in_flight.task is not None and in_flight.task.done():
                self._done(handle, in_flight, in_flight.task)
        lost_calls = list(handle.running.values())
        for in_flight in lost_calls:
            handle.remove(in_flight)
            task, in_flight.task = in_flight.task, None
            if task is not None:
                task.cancel()
        return lost_calls

    async def close(self, in_flight_calls: Collection[InFlightCall]) -> None:
        """Stop these calls, without `on_ended` for them."""
        self._closed = True
        alive = [
            in_flight.task for in_flight in in_flight_calls if in_flight.task is not None and not in_flight.task.done()
        ]
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)

    # ---- forwarding -----------------------------------------------------------------------------------------

    async def _forward(self, handle: EngineHandle, in_flight: InFlightCall, batch: Batch) -> RequestEnded:
        """Read one answer to its end; return how the request ended."""
        name, request_id = handle.name, in_flight.request.id
        try:
            answer = await handle.engine.open(in_flight.call, batch)
            try:
                if answer.served and in_flight.receipt is not None:
                    in_flight.receipt = msgspec.structs.replace(in_flight.receipt, **answer.served)
                if answer.fault:
                    in_flight.refused = self._head(in_flight, answer, await answer.read())
                    return RequestEnded(name, request_id, "failed", fault=True, retryable=True)
                if answer.status >= 400:
                    self._begin(in_flight, self._head(in_flight, answer, await answer.read()))
                    return RequestEnded(name, request_id, "failed")
                forward = self._forward_stream if in_flight.call.stream else self._forward_whole
                tokens = await forward(name, in_flight, answer)
            finally:
                answer.close()
            return RequestEnded(name, request_id, "completed", tokens / in_flight.call.choices)
        except EngineError as error:
            return await self._failed(handle, in_flight, error)

    async def _failed(self, handle: EngineHandle, in_flight: InFlightCall, error: EngineError) -> RequestEnded:
        """Return how a request ended whose engine gave no answer, or a broken one."""
        name, request_id = handle.name, in_flight.request.id
        if error.local:  # no other engine can be reached either, and this one is not to blame
            log.warning("%s", error)
            in_flight.fail(Unavailable("the server has no free sockets", code="no_socket", retry_after_s=1.0))
            return RequestEnded(name, request_id, "cancelled", no_socket=True)
        log.log(logging.WARNING if handle.up and error.code is None else logging.DEBUG, "%s", error)
        await self._suspect(handle, in_flight.request.model, unreachable=error.unreachable)
        failure = EngineFailed(str(error), code=error.code)
        if in_flight.answered:
            in_flight.fail(failure)
        elif error.code is not None:
            assert in_flight.receipt is not None
            body = msgspec.json.encode(failure.body())
            in_flight.refused = Head(failure.status, "application/json", None, in_flight.receipt, body)
        return RequestEnded(name, request_id, "failed", fault=True, retryable=not in_flight.answered)

    async def _forward_whole(self, name: str, in_flight: InFlightCall, answer: Answer) -> int:
        """Forward an answer that is not streamed; return its output tokens."""
        body = await answer.read()
        usage = usage_of(body)
        if usage is None:
            raise EngineError(f"engine {name} answered with {len(body):,} bytes that are no completion")
        self._learn_prompt(in_flight.call, usage.prompt_tokens)
        in_flight.counts, in_flight.cut = usage, was_cut(body)
        self._begin(in_flight, self._head(in_flight, answer, body))
        return usage.completion_tokens or 0

    async def _forward_stream(self, name: str, in_flight: InFlightCall, answer: Answer) -> int:
        """Forward a stream; return its output tokens. Until the first bytes the call may run elsewhere."""
        if answer.content_type.startswith("text/html"):
            raise EngineError(f"engine {name} answered with a page of HTML")
        call, receipt = in_flight.call, in_flight.receipt
        field = msgspec.json.encode(receipt.fields) if call.receipt and receipt is not None else b""
        usage = in_flight.usage = UsageFilter(strip=call.usage_added, choices=call.choices, receipt=field)
        try:
            async for chunk in answer.chunks():
                data = usage.feed(chunk)
                if data:
                    if not in_flight.answered:
                        self._begin(in_flight, self._head(in_flight, answer, None))
                    await in_flight.feed(data)
            if not usage.ended:
                raise EngineError(f"engine {name} ended its stream without a finish_reason and without [DONE]")
        except EngineError:
            if in_flight.answered and (withheld := usage.release()):
                await in_flight.feed(withheld)
            raise
        if not in_flight.answered:
            self._begin(in_flight, self._head(in_flight, answer, None))
        if rest := usage.flush():
            await in_flight.feed(rest)
        in_flight.close()
        in_flight.counts, in_flight.cut = Usage(usage.prompt_tokens, usage.output_tokens), usage.cut
        self._learn_prompt(in_flight.call, usage.prompt_tokens)
        return usage.output_tokens

    def _begin(self, in_flight: InFlightCall, head: Head) -> None:
        in_flight.begin(head)
        self._on_began(in_flight)

    def _learn_prompt(self, call: Call, tokens: int | None) -> None:
        """Learn from the engine's count of prompt tokens. Prompts of token ids have no characters to count."""
        if tokens and call.prompt.text:
            self._prompt_tokens.observe(call, tokens)

    def _head(self, in_flight: InFlightCall, answer: Answer, body: bytes | None) -> Head:
        assert in_flight.receipt is not None
        return Head(answer.status, answer.content_type, answer.retry_after, in_flight.receipt, body)

    # ---- the end of a call ------------------------------------------------------------------------------------

    def _done(self, handle: EngineHandle, in_flight: InFlightCall, task: asyncio.Task[RequestEnded]) -> None:
        if in_flight.task is not task or self._closed:
            return  # the call was abandoned: the scheduler has settled its request with EngineLost
        in_flight.task = None
        handle.remove(in_flight)
        self._on_ended(in_flight, self._outcome(handle.name, in_flight, task))

    def _outcome(self, engine: str, in_flight: InFlightCall, task: asyncio.Task[RequestEnded]) -> RequestEnded:
        if task.cancelled():
            if in_flight.stopping and not in_flight.gone:
                in_flight.preemptions += 1
            else:
                in_flight.fail(EngineFailed("the request was aborted"))
            return RequestEnded(engine, in_flight.request.id, "cancelled")
        error = task.exception()
        if error is None:
            return task.result()
        log.error("serving request %d failed", in_flight.request.id, exc_info=error)
        in_flight.fail(EngineFailed("the front-end failed while serving this request"))
        return RequestEnded(engine, in_flight.request.id, "failed")
