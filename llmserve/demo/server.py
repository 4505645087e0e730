"""The embedded engine's HTTP server: OpenAI's endpoints in front of one model and one worker thread.

The event loop reads requests, gathers requests into batches and writes answers. The tokenizer and the model have
a thread each. Batches run to completion, one at a time, in the order in which the batches were formed.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from llmserve import __version__
from llmserve.demo.batching import BatchQueue, Seat, seat_of
from llmserve.demo.generation import DecodingRow, Delta, LanguageModel, PromptError
from llmserve.demo.protocol import CompletionCall, Conversation, TokenUsage, Writer, parse_call
from llmserve.errors import BadRequest, ModelNotFound, NotFound, RateLimited, RequestError, Unauthorized, Unavailable
from llmserve.runtime.lasting import lasting

log = logging.getLogger("llmserve.embedded")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_BODY_BYTES_MAX = 16 << 20


class Reply:
    """One request in flight: its row for the worker, and the deltas for its client."""

    def __init__(self, row: DecodingRow) -> None:
        self.row = row
        self._inbox: asyncio.Queue[Delta | RequestError] = asyncio.Queue()

    def put(self, item: Delta | RequestError) -> None:
        """Add a delta, or the error that ends the reply. Call on the event loop only."""
        self._inbox.put_nowait(item)

    async def next(self) -> Delta:
        """Wait for at least one delta and return all queued deltas as one. Raises the error that ended the reply."""
        text = ""
        while True:
            item = await self._inbox.get()
            if isinstance(item, RequestError):
                raise item
            text += item.text
            if item.finish_reason is not None or self._inbox.empty():
                return Delta(text, item.finish_reason)

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage(len(self.row.prompt_ids), self.row.output_tokens)


class EmbeddedMetrics:
    """Counters and gauges of one engine, in a separate registry."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.batches = self._counter("batches", "Batches that have run")
        self.steps = self._counter("steps", "Forward passes, prefills included")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the batches that have run")
        self.output_tokens = self._counter("output_tokens", "Tokens generated for clients")
        self.running = Gauge(
            "llmserve_embedded_requests_running", "Unfinished rows of the running batch", registry=self.registry
        )
        gauge = Gauge("llmserve_embedded_requests_waiting", "Requests not yet running", registry=self.registry)
        gauge.set_function(waiting)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"llmserve_embedded_{name}", help_text, registry=self.registry)


class EmbeddedEngine:
    """Runs static batches on a model. Call `start` first and `drain` last, and all methods on one event loop.

    gather_s : longest wait for a batch's missing members.  queue_max : limit of waiting requests.
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
        """Start to run batches."""
        self._task = lasting("the embedded engine", self._run_batches)

    async def drain(self, limit_s: float) -> None:
        """Refuse waiting and new requests; let the running batch end, but stop the batch after `limit_s`."""
        self._closing = True
        stopping = Unavailable("the engine is shutting down")
        for reply in self._queue.clear():
            reply.put(stopping)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), limit_s)
        for reply in self._running:
            if reply.row.live:
                reply.row.cancelled = True
                reply.put(stopping)
        await self._idle.wait()  # takes at most one more step
        if self._task is not None:
            self._task.cancel()
        self._worker.shutdown()
        self._tokenizing.shutdown()

    async def submit(self, body: Awaitable[bytes], seat: Seat | None, *, chat: bool) -> tuple[CompletionCall, Reply]:
        """Read a request and add it to its batch. After a RequestError the batch no longer expects the request."""
        try:
            call = parse_call(await body, self.model.defaults, chat=chat)
            if call.model is not None and call.model != self.name:
                raise self.model_not_found(call.model)
            reply = Reply(await self._row(call))
            self._check_room()
        except BaseException:  # includes cancellation: the client may disconnect before the prompt is tokenized
            self._queue.cancel_seat(seat)
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
            raise RateLimited(f"{self._queue_max} requests are waiting already")

    def model_not_found(self, name: str) -> ModelNotFound:
        """Return the error for a request that names another model."""
        return ModelNotFound(f"the model {name!r} does not exist; this is {self.name!r}", param="model")

    def cancel(self, reply: Reply) -> None:
        """Stop work on a reply. No effect when the reply has ended."""
        if not self._queue.remove(reply):
            reply.row.cancelled = True

    def seat(self, headers: Any) -> Seat | None:
        """Return the batch seat that a request's headers name. Raises BadRequest."""
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
                f"the prompt has {len(prompt_ids)} tokens, but the model's context of {limit} tokens must hold "
                "the prompt and the answer",
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


def make_app(engine: EmbeddedEngine, api_key: str | None = None) -> web.Application:
    """Return the HTTP application of an engine. api_key : needed below /v1, as vLLM's; None: no key is needed."""
    routes = _Routes(engine)
    middlewares = [_errors_as_json, *([_with_key(api_key)] if api_key else [])]
    app = web.Application(middlewares=middlewares, client_max_size=_BODY_BYTES_MAX)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get("/openapi.json", routes.endpoints)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{model:.+}", routes.model)
    app.router.add_post(COMPLETIONS, routes.completions)
    app.router.add_post(CHAT, routes.chat_completions)
    return app


class _Routes:
    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        body = generate_latest(self._engine.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def endpoints(self, request: web.Request) -> web.Response:
        """The list by which a front-end knows what there is."""
        paths: dict[str, Any] = {path: {"post": {}} for path in (COMPLETIONS, CHAT)}
        about = {"title": "llmserve's embedded engine", "version": __version__}
        return web.json_response({"openapi": "3.1.0", "info": about, "paths": paths})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._engine.name:
            raise self._engine.model_not_found(name)
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
            self._engine.cancel(reply)


async def _whole(reply: Reply, writer: Writer) -> web.Response:
    text, finish_reason = "", None
    while finish_reason is None:
        delta = await reply.next()
        text, finish_reason = text + delta.text, delta.finish_reason
    return web.Response(body=writer.body(text, finish_reason, reply.usage), content_type="application/json")


async def _stream(request: web.Request, reply: Reply, writer: Writer) -> web.StreamResponse:
    # Send nothing before the first token, so that an earlier failure can still set the HTTP status code.
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
        error_class = NotFound if error.status == 404 else BadRequest
        body = error_class(f"{request.method} {request.path}: {error.reason}").body()
        return web.json_response(body, status=error.status)
    except ConnectionError:  # the client disconnected during the answer: this response is not read
        return web.Response()
    except Exception:
        log.exception("a request failed")
        body = RequestError("the engine failed", code="internal_error").body()
        return web.json_response(body, status=500)


def _with_key(api_key: str) -> Any:
    """Refuse requests below /v1 that do not have the key."""

    @web.middleware
    async def checked(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        sent = request.headers.get("authorization", "").encode("utf-8", "replace")
        if request.path.startswith("/v1/") and not hmac.compare_digest(sent, f"Bearer {api_key}".encode()):
            raise Unauthorized("this engine serves the server that started it only")
        return await handler(request)

    return checked


async def serve(
    engine: EmbeddedEngine,
    sock: Any,
    stop: asyncio.Event,
    *,
    drain_s: float,
    ready: Callable[[], None],
    api_key: str | None = None,
) -> None:
    """Serve on a bound socket until `stop` is set, then drain the engine."""
    runner = web.AppRunner(
        make_app(engine, api_key),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        keepalive_timeout=75.0,
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
