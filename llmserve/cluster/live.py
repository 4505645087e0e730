"""The live body: asyncio, real engines and the monotonic clock drive the scheduler.

Each client call is an `Exchange`. When the scheduler starts it, a task of its own (the pump) reads the engine's
answer to its end and hands the bytes over, so that an engine's slot is free when the engine is done, not when the
client has read everything. Tokens never enter the scheduler. A call that is preempted loses its pump and stays an
exchange: the scheduler starts it again, or says that it is too late.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta

from bins.dispatch import DispatchSolver
from bins.profile import Profile
from llmserve.cluster.exchange import ClientStalled, Exchange, Head, Receipt
from llmserve.cluster.fleet import Desk, Fleet, FleetConfig
from llmserve.cluster.journal import Journal
from llmserve.cluster.known_models import Listed
from llmserve.cluster.prompt_size import PromptTokensByModel, prefix_hashes
from llmserve.cluster.record import LengthRecord
from llmserve.engines.engine import Answer, Engine, EngineError
from llmserve.engines.event_stream import UsageFilter, usage_of, was_cut
from llmserve.errors import BadRequest, DeadlineExceeded, EngineFailed, RateLimited, RequestError, Unavailable
from llmserve.request import Batch, Call, Request
from llmserve.scheduling.groups import Mind
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    AnswerBegan,
    DispatchSolved,
    DrainRequested,
    EngineLost,
    Event,
    FailReason,
    FailRequest,
    PlanGroups,
    PreemptBatch,
    ReportCircuit,
    ReportTrust,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from predictor.prompt import Prompt

log = logging.getLogger("llmserve")


class Forecast(Protocol):
    """Equally likely output lengths, tokens, ascending; () when nothing is known. The middle one is the median."""

    @property
    def lengths(self) -> tuple[float, ...]: ...

    @property
    def median(self) -> float | None: ...


class Forecaster(Protocol):
    """Says how long answers will be, in bounded time, and is told how long they became."""

    @property
    def fallbacks(self) -> Mapping[str, int]: ...

    async def forecast(self, prompt: Prompt, *, least: float | None, most: float | None) -> Any: ...

    def observe(self, forecast: Any, output_tokens: float, *, capped: bool) -> None: ...


class LiveConfig(FleetConfig, frozen=True, kw_only=True):
    """The live body's limits."""

    buffer_bytes_max: Annotated[
        int, Meta(ge=1, description="bytes kept for a client that reads slowly, before its engine is slowed down")
    ] = 8 << 20
    client_stall_s: Annotated[
        float, Meta(gt=0, description="how long such a client may keep its engine waiting before it is cut off")
    ] = 60.0


class LiveCluster:
    """Drives one scheduler through real time. Make it, `start()` it, `submit()` calls, `drain()` and `close()` it.

    solvers     make plans, by model ("": for every other model), where the scheduler's release follows plans
    profiles    what batches take on the engines, by model likewise
    wanted      whether a model that an engine lists is to be served
    """

    def __init__(
        self,
        scheduler: Mind,
        engines: list[Engine],
        journal: Journal,
        *,
        forecaster: Forecaster | None = None,
        record: LengthRecord | None = None,
        config: LiveConfig | None = None,
        wanted: Callable[[str], bool] = lambda model: True,
        solvers: Mapping[str, DispatchSolver] = MappingProxyType({}),
        profiles: Mapping[str, Profile] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.journal = journal
        self._forecaster = forecaster
        self._record = record
        self._config = config or LiveConfig()
        self._clock = clock
        self._started_at = clock()
        self.fleet = Fleet(engines, self._config, tell=self._step, lose=self._lose, wanted=wanted, profiles=profiles)
        self._prompt_tokens = PromptTokensByModel()
        self._secret = secrets.token_bytes(16)  # of the prefixes' hashes
        self._exchanges: dict[int, Exchange] = {}
        self._next_id = 0
        self._solvers = solvers
        self._solving: dict[str, asyncio.Task[None]] = {}  # at most one a model: the scheduler waits for each plan
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s: float | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._open: set[Exchange] = set()  # calls whose clients have not been given everything yet
        self._draining = False
        self._closed = False

    # ---- for the door -----------------------------------------------------------------------------------------

    @property
    def engines_ready(self) -> dict[str, bool]:
        return {name: desk.ready for name, desk in sorted(self.fleet.desks.items())}

    @property
    def models(self) -> Listed:
        """That engines serve, be they up or down; see fleet.py."""
        return self.fleet.models

    @property
    def prediction_fallbacks(self) -> Mapping[str, int]:
        """Forecasts made without the predictor, by reason."""
        return self._forecaster.fallbacks if self._forecaster is not None else {}

    @property
    def draining(self) -> bool:
        return self._draining

    def now_s(self) -> float:
        return self._clock() - self._started_at

    async def submit(self, call: Call, on_exchange: Callable[[Exchange], None]) -> Exchange:
        """Predict and queue a call. on_exchange gets the exchange at once, so that it can be cancelled meanwhile."""
        self._next_id += 1
        exchange = Exchange(
            call,
            self._next_id,
            buffer_bytes_max=self._config.buffer_bytes_max,
            client_stall_s=self._config.client_stall_s,
        )
        self._open.add(exchange)
        self._empty.clear()
        on_exchange(exchange)
        arrived_at_s = self.now_s()
        self._exchanges[exchange.request.id] = exchange
        try:
            predicted, quantiles = await self._predict(exchange)
        except BaseException:
            self._forget(exchange)
            raise
        if exchange.gone:  # it left while its length was being predicted
            exchange.fail(EngineFailed("the client has left"))
            self._forget(exchange)
            return exchange
        deadline_s = arrived_at_s + call.slo_s if call.slo_s is not None else None
        exchange.request = Request(
            exchange.request.id,
            predicted,
            deadline_s,
            quantiles,
            round(self._prompt_tokens.estimate(call), 1),
            call.choices,
            prefix_hashes(call.opening, self._secret) if self.fleet.engines_of(call.model) > 1 else (),
            call.model,
            call.stream_name,
        )
        exchange.arrived_at_s = arrived_at_s
        self._step(RequestArrived(exchange.request))
        return exchange

    def release(self, exchange: Exchange) -> None:
        """The door is done with it: its client has everything, or has left."""
        self.cancel(exchange)
        self._open.discard(exchange)
        self._forget(exchange)

    def cancel(self, exchange: Exchange) -> None:
        """Its client has left: out of the queue, or aborted on its engine. Harmless when its answer is complete."""
        if exchange.complete:
            return
        exchange.leave()
        if exchange.request.id in self.scheduler.requests:
            self._step(RequestCancelled(exchange.request.id))

    async def _predict(self, exchange: Exchange) -> tuple[float | None, tuple[float, ...]]:
        """Predicted output tokens, the median and equally likely ones, bounded by what client and model allow.

        None and () when there is nothing to go by; only the median when the client brought it.
        """
        call = exchange.call
        model = self.models.get(call.model)
        most = call.output_tokens_max or (model.context_tokens if model is not None else None)
        if call.predicted_tokens is not None:
            return min(call.predicted_tokens, most or math.inf), ()
        if self._forecaster is None:
            return None, ()
        least = call.output_tokens_min
        forecast: Forecast = await self._forecaster.forecast(call.prompt, least=least, most=most)
        exchange.forecast = forecast
        return forecast.median, tuple([round(length, 1) for length in forecast.lengths])

    def _learn(self, exchange: Exchange, output_tokens: float) -> None:
        """From the length of a completed answer.

        One that the client forced to be so long (min_tokens, ignore_eos) says nothing about the others.
        """
        call, most = exchange.call, exchange.call.output_tokens_max
        if call.output_tokens_min is not None and output_tokens <= call.output_tokens_min:
            return
        capped = exchange.cut or (most is not None and output_tokens >= most)
        if self._forecaster is not None and exchange.forecast is not None:
            self._forecaster.observe(exchange.forecast, output_tokens, capped=capped)
        if self._record is not None and call.choices == 1:
            self._record.write(call, round(output_tokens), capped=capped)

    def tell(self, event: Event) -> None:
        """What becomes known neither by calls nor by engines: other groups."""
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
        self._arm_timer()

    def _carry_out(self, action: Action, now_s: float) -> None:
        if isinstance(action, StartBatch):
            self._start(action, now_s)
        elif isinstance(action, AbortRequest):
            self._stop(self._exchanges[action.request_id])
        elif isinstance(action, PreemptBatch):
            self._preempt(action)
        elif isinstance(action, FailRequest):
            self._fail(action)
        elif isinstance(action, ReportCircuit):
            _say_circuit(action)
        elif isinstance(action, ReportTrust):
            _say_trust(action)
        elif isinstance(action, SolveDispatch):
            self._solving[action.model] = asyncio.create_task(self._solve(action))
        else:
            assert isinstance(action, PlanGroups), (
                "all others are above; whoever plans groups hears of it by the journal"
            )

    async def _solve(self, action: SolveDispatch) -> None:
        """Have a plan made beside the event loop, while the present one serves."""
        solver = self._solvers.get(action.model) or self._solvers.get("")
        if solver is None:
            log.error("model %s has no --profile to plan by: nothing of it waits for company", action.model)
            return
        try:
            plan = await asyncio.to_thread(solver.solve, action.observed)
        except Exception:
            log.exception("no plan could be made for %s: nothing waits for company", action.observed)
            plan = solver.greedy(action.observed)
        self._step(DispatchSolved(plan, action.model))

    def _arm_timer(self) -> None:
        wake_at_s = self.scheduler.wake_at_s
        if wake_at_s == self._timer_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = wake_at_s
        self._timer = None
        if wake_at_s is not None:
            # A millisecond later than wanted: some event loops round to milliseconds and would fire too early.
            delay_s = max(0.0, wake_at_s - self.now_s()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire_timer)

    def _fire_timer(self) -> None:
        self._timer = self._timer_at_s = None
        self._step(TimerFired())

    def _start(self, action: StartBatch, now_s: float) -> None:
        desk = self.fleet.desks[action.engine]
        batch = action.batch
        for request in batch.requests:
            exchange = self._exchanges[request.id]
            exchange.receipt = Receipt(
                request_id=request.id,
                bin=batch.bin,
                batch=batch.id,
                engine=action.engine,
                queue_ms=(now_s - exchange.arrived_at_s) * 1e3,
                predicted_tokens=request.predicted_tokens,
            )
            exchange.stopping = False
            desk.add(exchange)
            task = asyncio.create_task(self._pump(desk, exchange, batch))
            exchange.task = task
            # Not the pump's own `finally`: a task cancelled before its first step never enters its `try`.
            task.add_done_callback(partial(self._pump_done, desk, exchange))

    def _preempt(self, action: PreemptBatch) -> None:
        for request_id in action.request_ids:
            exchange = self._exchanges[request_id]
            exchange.stopping = True
            self._stop(exchange)
        log.debug("batch %d makes room on %s", action.batch_id, action.engine)

    def _stop(self, exchange: Exchange) -> None:
        """Its engine is told by the closing of its connection. A pump that has just ended has ended all the same."""
        assert exchange.task is not None, "a running request has a pump"
        exchange.task.cancel()

    def _fail(self, action: FailRequest) -> None:
        exchange = self._exchanges[action.request_id]
        if action.reason == "engine_failed" and exchange.refused is not None and not exchange.answered:
            exchange.begin(exchange.refused)
        else:
            exchange.fail(_error_of(action.reason, action.retry_after_s, put_off=exchange.put_off > 0))
        self._forget(exchange)

    def _forget(self, exchange: Exchange) -> None:
        """Drop what is over on both sides: the scheduler's (queue, engine) and, for the drain, the client's."""
        if exchange.request.id not in self.scheduler.requests:
            self._exchanges.pop(exchange.request.id, None)
        if not self._exchanges and not self._open:
            self._empty.set()

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
            await self.fleet.suspect(desk, exchange.request.model, unreachable=error.unreachable)
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
        """Hand the first byte over. From now on it cannot be preempted, and the scheduler knows before it says more."""
        exchange.begin(head)
        if self.scheduler.preempts:
            self._step(AnswerBegan(exchange.request.id))

    def _learn_prompt(self, call: Call, tokens: int | None) -> None:
        """From the engine's count. Prompts of token ids have no characters to compare it with."""
        if tokens and call.prompt.text:
            self._prompt_tokens.observe(call, tokens)

    def _head(self, exchange: Exchange, answer: Answer, body: bytes | None) -> Head:
        assert exchange.receipt is not None
        return Head(answer.status, answer.content_type, answer.retry_after, exchange.receipt, body)

    def _pump_done(self, desk: Desk, exchange: Exchange, task: asyncio.Task[RequestEnded]) -> None:
        if exchange.task is not task or self._closed:
            return  # abandoned: its engine was lost, and the scheduler has already dealt with the request
        exchange.task = None
        desk.remove(exchange)
        ended = self._how_it_ended(desk.name, exchange, task)
        if ended.outcome == "completed" and ended.output_tokens > 0:
            try:
                self._learn(exchange, ended.output_tokens)
            except Exception:  # whatever is wrong with learning, the request has ended
                log.exception("nothing was learnt from request %d", ended.request_id)
        self._step(ended)
        self._forget(exchange)

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

    def _lose(self, desk: Desk) -> None:
        """Its engine is gone with all it ran."""
        for exchange in list(desk.running.values()):  # an answer that is complete is not lost with its engine
            if exchange.task is not None and exchange.task.done():
                self._pump_done(desk, exchange, exchange.task)
        lost = list(desk.running.values())
        for exchange in lost:
            desk.remove(exchange)
            task, exchange.task = exchange.task, None
            if task is not None:
                task.cancel()
        answered = tuple(sorted(exchange.request.id for exchange in lost if exchange.answered))
        self._step(EngineLost(desk.name, answered, planned=desk.restart is not None))
        for exchange in lost:
            self._forget(exchange)

    # ---- beginning and end ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch the engines; each is used from its first good probe on."""
        self.fleet.start()

    async def drain(self, within_s: float) -> bool:
        """Refuse new calls, finish what is here to its clients' last byte; False when `within_s` was not enough."""
        self._draining = True
        self._step(DrainRequested())
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop everything at once; calls that still run are aborted and told so."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for solving in self._solving.values():
            solving.cancel()
        tasks = [exchange.task for exchange in self._exchanges.values()]
        alive = [task for task in tasks if task is not None and not task.done()]
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)
        for exchange in self._open:
            exchange.fail(_error_of("draining", None))
        await self.fleet.close()
        self.journal.close()
        if self._record is not None:
            self._record.close()


def _say_circuit(action: ReportCircuit) -> None:
    if action.open_s is None:
        log.info("engine %s works again", action.engine)
    else:
        log.warning(
            "engine %s fails one request after the other: it gets none for %.1f s", action.engine, action.open_s
        )


def _say_trust(action: ReportTrust) -> None:
    r = "none" if action.rank_correlation is None else f"{action.rank_correlation:.2f}"
    of = f" of {action.model}" if action.model else ""
    if action.trusted:
        log.info("length predictions rank answers%s again (rank correlation %s): bins are back", of, r)
    else:
        log.warning(
            "length predictions do not rank answers%s (rank correlation %s): one bin, first come first served", of, r
        )


def _error_of(reason: FailReason, retry_after_s: float | None, *, put_off: bool = False) -> RequestError:
    """What a client is told when the scheduler says no. put_off : its request has been preempted."""
    if reason == "queue_full":
        return RateLimited("the queue is full", code="queue_full", retry_after_s=retry_after_s or 1.0)
    if reason == "deadline_exceeded" and put_off:
        return DeadlineExceeded("the request was put off for others and is too late now")
    if reason == "deadline_exceeded":
        return DeadlineExceeded("the answer cannot be there by its deadline")
    if reason == "engine_failed":
        return EngineFailed("the engine failed this request")
    if reason == "engine_lost":
        return EngineFailed("the engine was lost while it ran this request", code="engine_lost")
    message = "the server is shutting down" if reason == "draining" else "no engine that serves this model is up"
    return Unavailable(message, code=reason, retry_after_s=retry_after_s or 1.0)
