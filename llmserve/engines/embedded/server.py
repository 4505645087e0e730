"""The embedded engine's HTTP server: OpenAI's endpoints in front of one model and one worker thread.

The event loop reads requests, gathers them into batches and writes answers; tokenizing and the model have a
thread each. One batch runs at a time, to its end, in the order in which the batches were formed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from llmserve.engines.embedded.batching import BatchQueue, Seat, seat_of
from llmserve.engines.embedded.generation import DecodingRow, Delta, LanguageModel, PromptError
from llmserve.engines.embedded.protocol import CompletionCall, Conversation, TokenUsage, Writer, parse_call
from llmserve.errors import BadRequest, ModelNotFound, NotFound, RateLimited, RequestError, Unavailable

log = logging.getLogger("llmserve.embedded")

_BODY_BYTES_MAX = 16 << 20


class Reply:
    """One request on its way: its row for the worker, and the deltas for its client."""

    def __init__(self, row: DecodingRow) -> None:
        self.row = row
        self._inbox: asyncio.Queue[Delta | RequestError] = asyncio.Queue()

    def put(self, news: Delta | RequestError) -> None:
        """On the event loop: a delta, or the error that ends the reply."""
        self._inbox.put_nowait(news)

    async def next(self) -> Delta:
        """All the news there are, at least one, as one delta. Raises the error that ended the reply."""
        text = ""
        while True:
            news = await self._inbox.get()
            if isinstance(news, RequestError):
                raise news
            text += news.text
            if news.finish_reason is not None or self._inbox.empty():
                return Delta(text, news.finish_reason)

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage(len(self.row.prompt_ids), self.row.output_tokens)


class EmbeddedMetrics:
    """Counters of one engine, in a registry of their own."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.batches = self._counter("batches", "Batches that have run")
        self.steps = self._counter("steps", "Forward passes, prefills included")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the batches that have run")
        self.output_tokens = self._counter("output_tokens", "Tokens generated for clients")
        self.running = Gauge(
            "llmserve_embedded_requests_running", "Rows of the running batch that go on", registry=self.registry
        )
        gauge = Gauge("llmserve_embedded_requests_waiting", "Requests not yet running", registry=self.registry)
        gauge.set_function(waiting)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"llmserve_embedded_{name}", help_text, registry=self.registry)


class EmbeddedEngine:
    """Runs static batches on a model. `start` and `drain` bracket its life; everything is on one event loop.

    gather_s : longest wait for a batch's missing members.  queue_max : requests that may wait.
    """

    def __init__(
        self,
        model: LanguageModel,
        name: str,
        *,
        batch_size_max: int = 8,
        queue_max: int = 1024,
        gather_s: float = 1.0,
    ) -> None:
        self.model = model
        self.name = name
        self._batch_size_max = batch_size_max
        self._queue_max = queue_max
        self._queue: BatchQueue[Reply] = BatchQueue(gather_s)
        self._running: list[Reply] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._worker = ThreadPoolExecutor(1, "model")
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        self._task: asyncio.Task[None] | None = None
        self.metrics = EmbeddedMetrics(lambda: len(self._queue))

    def start(self) -> None:
        """Begins to take batches."""
        self._task = asyncio.create_task(self._run_batches())

    async def drain(self, limit_s: float) -> None:
        """Refuses what waits and what comes; lets the running batch end, but cuts it off after `limit_s`."""
        self._closing = True
        stopping = Unavailable("the engine is shutting down")
        for reply in self._queue.clear():
            reply.put(stopping)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), limit_s)
        for reply in self._running:
            if reply.row.live:
                reply.row.gone = True
                reply.put(stopping)
        await self._idle.wait()  # at most one step more
        if self._task is not None:
            self._task.cancel()
        self._worker.shutdown()
        self._tokenizing.shutdown()

    async def submit(self, body: Awaitable[bytes], seat: Seat | None, *, chat: bool) -> tuple[CompletionCall, Reply]:
        """Reads a request and seats it in its batch; raises RequestError, and then nobody waits for it."""
        try:
            call = parse_call(await body, self.model.defaults, chat=chat)
            if call.model is not None and call.model != self.name:
                raise self.no_model(call.model)
            reply = Reply(await self._row(call))
            self._check_room()
        except BaseException:  # also a client that leaves before its prompt is tokenized
            self._queue.excuse(seat)
            raise
        try:
            self._queue.add(reply, seat)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        return call, reply

    def _check_room(self) -> None:
        if self._closing:
            raise Unavailable("the engine is shutting down")
        if len(self._queue) >= self._queue_max:
            raise RateLimited(f"{self._queue_max} requests wait already")

    def no_model(self, name: str) -> ModelNotFound:
        """The error for a client that asks for another model."""
        return ModelNotFound(f"the model {name!r} does not exist; this is {self.name!r}", param="model")

    def leave(self, reply: Reply) -> None:
        """The client of this reply wants no more of it. Harmless when it has ended."""
        if not self._queue.remove(reply):
            reply.row.gone = True

    def seat(self, headers: Any) -> Seat | None:
        """The seat in a batch that a request asks for; raises BadRequest."""
        try:
            return seat_of(headers, self._batch_size_max)
        except ValueError as error:
            raise BadRequest(str(error)) from None

    async def _row(self, call: CompletionCall) -> DecodingRow:
        prompt_ids = await self._prompt_ids(call)
        limit = self.model.context_tokens
        param = "messages" if isinstance(call.prompt, Conversation) else "prompt"
        if not prompt_ids:
            raise BadRequest("the prompt has no tokens", param=param)
        if len(prompt_ids) >= limit:
            raise BadRequest(
                f"the prompt has {len(prompt_ids)} tokens, and the model's context of {limit} must hold "
                "the answer, too",
                param=param,
                code="context_length_exceeded",
            )
        return self.model.row(
            prompt_ids, call.max_tokens, call.sampling, call.stop, call.ignore_eos, streamed=call.stream
        )

    async def _prompt_ids(self, call: CompletionCall) -> list[int]:
        tokenize = partial(asyncio.get_running_loop().run_in_executor, self._tokenizing)
        match call.prompt:
            case str() as text:
                return await tokenize(self.model.text_ids, text)
            case Conversation(messages):
                try:
                    return await tokenize(self.model.chat_ids, messages)
                except PromptError as error:
                    raise BadRequest(str(error), param="messages") from None
            case ids:
                if max(ids) >= self.model.vocabulary_size:
                    raise BadRequest(f"token {max(ids)} is not in the vocabulary", param="prompt")
                return list(ids)

    async def _run_batches(self) -> None:
        while True:
            batch = await self._queue.take()
            self._running = batch
            self._idle.clear()
            try:
                await self._run(batch)
            except Exception:
                log.exception("a batch failed")
                for reply in batch:
                    reply.put(RequestError("the engine failed to run this batch", code="internal_error"))
            finally:
                self._running = []
                self.metrics.running.set(0)
                self._idle.set()

    async def _run(self, batch: list[Reply]) -> None:
        loop = asyncio.get_running_loop()
        rows = [reply.row for reply in batch]
        self.metrics.batches.inc()
        self.metrics.running.set(len(batch))
        self.metrics.prompt_tokens.inc(sum(len(row.prompt_ids) for row in rows))

        def emit(deltas: list[Delta | None]) -> None:
            loop.call_soon_threadsafe(self._deliver, batch, deltas)

        await loop.run_in_executor(self._worker, self.model.run, rows, emit)
        self.metrics.output_tokens.inc(sum(row.output_tokens for row in rows))

    def _deliver(self, batch: list[Reply], deltas: list[Delta | None]) -> None:
        self.metrics.steps.inc()
        self.metrics.running.set(sum(reply.row.live for reply in batch))
        for reply, delta in zip(batch, deltas, strict=True):
            if delta is not None:
                reply.put(delta)


def make_app(engine: EmbeddedEngine) -> web.Application:
    """The HTTP side of an engine."""
    routes = _Routes(engine)
    app = web.Application(middlewares=[_errors_as_json], client_max_size=_BODY_BYTES_MAX)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{model:.+}", routes.model)
    app.router.add_post("/v1/completions", routes.completions)
    app.router.add_post("/v1/chat/completions", routes.chat_completions)
    return app


class _Routes:
    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        body = generate_latest(self._engine.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._engine.name:
            raise self._engine.no_model(name)
        return web.json_response(self._model())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._engine.name,
            "object": "model",
            "created": 0,
            "owned_by": "llmserve",
            "max_model_len": self._engine.model.context_tokens,
        }

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        seat = self._engine.seat(request.headers)
        call, reply = await self._engine.submit(request.read(), seat, chat=chat)
        try:
            writer = Writer(self._engine.name, chat=chat, include_usage=call.include_usage)
            return await (_stream(request, reply, writer) if call.stream else _whole(reply, writer))
        finally:
            self._engine.leave(reply)


async def _whole(reply: Reply, writer: Writer) -> web.Response:
    text, finish_reason = "", None
    while finish_reason is None:
        delta = await reply.next()
        text, finish_reason = text + delta.text, delta.finish_reason
    return web.Response(body=writer.body(text, finish_reason, reply.usage), content_type="application/json")


async def _stream(request: web.Request, reply: Reply, writer: Writer) -> web.StreamResponse:
    # Nothing is sent before the first token: until then a failure still has a status code of its own.
    delta = await reply.next()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    events = writer.opening()
    while delta.finish_reason is None:
        await response.write(events + writer.text(delta.text))
        events = b""
        try:
            delta = await reply.next()
        except RequestError as error:
            await response.write(writer.error(error.body()))
            return response
    events += writer.text(delta.text) if delta.text else b""
    await response.write(events + writer.closing(delta.finish_reason, reply.usage))
    return response


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return web.json_response(error.body(), status=error.status)
    except web.HTTPException as error:
        wrong = NotFound if error.status == 404 else BadRequest
        body = wrong(f"{request.method} {request.path}: {error.reason}").body()
        return web.json_response(body, status=error.status)
    except ConnectionError:  # the client left while its answer was written: nobody reads this one
        return web.Response()
    except Exception:
        log.exception("a request failed")
        body = RequestError("the engine failed", code="internal_error").body()
        return web.json_response(body, status=500)


async def serve(
    engine: EmbeddedEngine, sock: Any, stop: asyncio.Event, *, drain_s: float, ready: Callable[[], None]
) -> None:
    """Serves on a bound socket until `stop` is set; then drains the engine and returns."""
    runner = web.AppRunner(
        make_app(engine), access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=75.0
    )
    await runner.setup()
    site = web.SockSite(runner, sock, backlog=1024)
    engine.start()
    await site.start()
    ready()
    await stop.wait()
    await site.stop()
    await engine.drain(drain_s)
    await runner.cleanup()
