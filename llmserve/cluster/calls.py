"""Calls that engines run now: each has a task, the pump, that reads its answer and hands it over.

A pump reads its engine's answer to the end, so that an engine's slot is free when the engine is done, not when the
client has read everything. Tokens never enter the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Literal, Protocol

from llmserve.cluster.exchange import ClientStalled, Exchange, Head, Receipt
from llmserve.cluster.fleet import Desk
from llmserve.cluster.prompt_size import PromptTokensByModel
from llmserve.engines.engine import Answer, EngineError
from llmserve.engines.event_stream import UsageFilter, usage_of, was_cut
from llmserve.errors import BadRequest, EngineFailed
from llmserve.request import Batch, Call
from llmserve.scheduling.messages import RequestEnded

log = logging.getLogger("llmserve")


class Suspect(Protocol):
    """Looks what is wrong with an engine at which a request of this model failed."""

    async def __call__(self, desk: Desk, model: str, *, unreachable: bool) -> None: ...


class RunningCalls:
    """Starts, stops and abandons pumps.

    suspect        is asked about an engine that fails
    prompt_tokens  learns from engines' counts
    began          is told when a call's client is handed its first byte
    ended          is told how a call ended on its engine, unless it was abandoned
    """

    def __init__(
        self,
        *,
        suspect: Suspect,
        prompt_tokens: PromptTokensByModel,
        began: Callable[[Exchange], None],
        ended: Callable[[Exchange, RequestEnded], None],
    ) -> None:
        self._suspect = suspect
        self._prompt_tokens = prompt_tokens
        self._began = began
        self._ended = ended
        self._closed = False

    def start(self, desk: Desk, exchange: Exchange, batch: Batch, now_s: float) -> None:
        exchange.receipt = Receipt(
            request_id=exchange.request.id,
            bin=batch.bin,
            batch=batch.id,
            engine=desk.name,
            queue_ms=(now_s - exchange.arrived_at_s) * 1e3,
            predicted_tokens=exchange.request.predicted_tokens,
        )
        exchange.stopping = False
        desk.add(exchange)
        task = asyncio.create_task(self._pump(desk, exchange, batch))
        exchange.task = task
        # Not the pump's own `finally`: a task cancelled before its first step never enters its `try`.
        task.add_done_callback(partial(self._done, desk, exchange))

    def stop_for_others(self, exchange: Exchange) -> None:
        """It may be started again."""
        exchange.stopping = True
        self.stop(exchange)

    def stop(self, exchange: Exchange) -> None:
        """Its engine is told by the closing of its connection. A pump that has just ended has ended all the same."""
        assert exchange.task is not None, "a running request has a pump"
        exchange.task.cancel()

    def abandon(self, desk: Desk) -> list[Exchange]:
        """The engine is gone. Returns the calls that it ran: of their ends nothing is said.

        A call whose answer is complete has ended: it is not lost with its engine.
        """
        for exchange in list(desk.running.values()):
            if exchange.task is not None and exchange.task.done():
                self._done(desk, exchange, exchange.task)
        lost = list(desk.running.values())
        for exchange in lost:
            desk.remove(exchange)
            task, exchange.task = exchange.task, None
            if task is not None:
                task.cancel()
        return lost

    async def close(self, exchanges: Collection[Exchange]) -> None:
        """Stop these calls, and say nothing of their ends."""
        self._closed = True
        alive = [exchange.task for exchange in exchanges if exchange.task is not None and not exchange.task.done()]
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)

    # ---- the pump ---------------------------------------------------------------------------------------------

    async def _pump(self, desk: Desk, exchange: Exchange, batch: Batch) -> RequestEnded:
        """Read one answer to its end; say how it ended."""
        name, request_id = desk.name, exchange.request.id
        try:
            async with desk.engine.open(exchange.call, batch) as answer:
                if answer.fault:
                    exchange.refused = self._head(exchange, answer, await answer.read())
                    return RequestEnded(name, request_id, "failed", fault=True, retryable=True)
                if exchange.call.stream and answer.status == 200:
                    tokens = await self._pump_stream(exchange, answer)
                else:
                    body = await answer.read()
                    usage = usage_of(body)
                    tokens = usage.completion_tokens or 0
                    self._learn_prompt(exchange.call, usage.prompt_tokens)
                    exchange.cut = was_cut(body)
                    self._begin(exchange, self._head(exchange, answer, body))
            outcome: Literal["completed", "failed"] = "completed" if answer.status < 400 else "failed"
            return RequestEnded(name, request_id, outcome, tokens / exchange.call.choices)
        except EngineError as error:
            log.log(logging.WARNING if desk.up else logging.DEBUG, "%s", error)
            await self._suspect(desk, exchange.request.model, unreachable=error.unreachable)
            if exchange.answered:
                exchange.fail(EngineFailed(str(error)))
            return RequestEnded(name, request_id, "failed", fault=True, retryable=not exchange.answered)
        except ClientStalled:
            exchange.fail(BadRequest("the answer was not read", code="client_stalled"))
            return RequestEnded(name, request_id, "cancelled")

    async def _pump_stream(self, exchange: Exchange, answer: Answer) -> int:
        """Begins the answer with its first bytes, so that until then it can still run elsewhere."""
        usage = UsageFilter(strip=exchange.call.usage_added, choices=exchange.call.choices)
        try:
            async for chunk in answer.chunks():
                data = usage.feed(chunk)
                if data:
                    if not exchange.answered:
                        self._begin(exchange, self._head(exchange, answer, None))
                    await exchange.feed(data)
        except EngineError:
            if exchange.answered and (held := usage.release()):
                await exchange.feed(held)
            raise
        if not exchange.answered:
            self._begin(exchange, self._head(exchange, answer, None))
        if rest := usage.flush():
            await exchange.feed(rest)
        exchange.close()
        exchange.cut = usage.cut
        self._learn_prompt(exchange.call, usage.prompt_tokens)
        return usage.output_tokens

    def _begin(self, exchange: Exchange, head: Head) -> None:
        exchange.begin(head)
        self._began(exchange)

    def _learn_prompt(self, call: Call, tokens: int | None) -> None:
        """From the engine's count. Prompts of token ids have no characters to compare it with."""
        if tokens and call.prompt.text:
            self._prompt_tokens.observe(call, tokens)

    def _head(self, exchange: Exchange, answer: Answer, body: bytes | None) -> Head:
        assert exchange.receipt is not None
        return Head(answer.status, answer.content_type, answer.retry_after, exchange.receipt, body)

    # ---- its end ----------------------------------------------------------------------------------------------

    def _done(self, desk: Desk, exchange: Exchange, task: asyncio.Task[RequestEnded]) -> None:
        if exchange.task is not task or self._closed:
            return  # abandoned: its engine was lost, and the scheduler has already dealt with the request
        exchange.task = None
        desk.remove(exchange)
        self._ended(exchange, self._how_it_ended(desk.name, exchange, task))

    def _how_it_ended(self, engine: str, exchange: Exchange, task: asyncio.Task[RequestEnded]) -> RequestEnded:
        if task.cancelled():
            if exchange.stopping and not exchange.gone:
                exchange.put_off += 1
            else:
                exchange.fail(EngineFailed("the request was aborted"))
            return RequestEnded(engine, exchange.request.id, "cancelled")
        error = task.exception()
        if error is None:
            return task.result()
        log.error("serving request %d failed", exchange.request.id, exc_info=error)
        exchange.fail(EngineFailed("the front-end failed while serving this request"))
        return RequestEnded(engine, exchange.request.id, "failed")
