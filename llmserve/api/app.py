"""The HTTP application: OpenAI's endpoints on a live cluster.

POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/{id}
GET /health (the process lives)   GET /ready (an engine is up)   GET /metrics (Prometheus)
With an admin key: GET /admin/queue   GET /admin/engines   POST /admin/engines/{name}/drain | resume | restart
GET /admin/usage   POST /admin/reload   POST /admin/peers
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from llmserve.api.admin import AdminEndpoints
from llmserve.api.answers import error_parts, error_response, json_response
from llmserve.api.asgi import AsgiHandler
from llmserve.api.bodies import BODIES
from llmserve.api.exchange import Exchange
from llmserve.api.keep_alive import EVENT_STREAM, comment_of, error_of_body
from llmserve.api.keys import DOOR
from llmserve.api.limits import Account, KeyLimits, Keys
from llmserve.api.parse import CallParser
from llmserve.api.shares import with_share
from llmserve.api.state import StateEndpoints
from llmserve.asker import as_asked
from llmserve.cluster.fitting import check_fits
from llmserve.cluster.in_flight import Head, InFlightCall, Receipt
from llmserve.cluster.live import LiveCluster
from llmserve.cluster.places import Places
from llmserve.deadline_settings import DefaultDeadlines
from llmserve.errors import ConfigError, MethodNotAllowed, NotFound, RequestError, Unavailable, model_not_found
from llmserve.headers import ASKER_HEADER, BATCH_HEADER, BIN_HEADER, ENGINE_HEADER, PREDICTED_HEADER, QUEUE_HEADER
from llmserve.metrics import Metrics
from llmserve.request import Call
from llmserve.settings import ApiConfig

log = logging.getLogger("llmserve")


async def no_reload() -> None:
    raise ConfigError("this server has nothing to read again")


class App:
    """Answers requests: completions directly, every other path by FastAPI.

    Completions bypass ASGI and FastAPI: routing, middlewares and a task for each client would cost more time than all
    of scheduling (scripts/lab/benchmark_frontend.py). admin: the keys for /admin; None: /admin is disabled.
    reload: reads keys, limits and engines again.
    """

    def __init__(
        self,
        cluster: LiveCluster,
        metrics: Metrics,
        key_limits: KeyLimits,
        config: ApiConfig,
        admin: Keys | None = None,
        reload: Callable[[], Awaitable[None]] = no_reload,
    ) -> None:
        self._endpoints = _Endpoints(cluster, metrics, key_limits, config)
        keys = key_limits.keys
        seeing = tuple([known for known in (keys, admin) if known is not None]) if keys.required else ()
        state = StateEndpoints(cluster, metrics, seeing)
        self._others = AsgiHandler(
            _other_paths(self._endpoints, AdminEndpoints(cluster, admin, key_limits, reload), state), self.refused
        )
        self._state_for_all = StateEndpoints(cluster, metrics, ())

    def admit(self, exchange: Exchange) -> None:
        """Check the key before the body is read. Raises RequestError."""
        if exchange.method == "POST" and exchange.path in BODIES:
            self._endpoints.admit(exchange)

    def handle(self, exchange: Exchange) -> None:
        if exchange.method == "POST" and exchange.path in BODIES:
            self._endpoints.complete(exchange)
        else:
            self._others.handle(exchange)

    def refused(self, exchange: Exchange, error: RequestError) -> None:
        self._endpoints.count(exchange, error)

    def state_handler(self) -> AsgiHandler:
        """Return what answers /health, /ready and /metrics to everybody, for a port of its own."""
        app = _fastapi(self._endpoints)
        self._state_for_all.add_to(app)
        return AsgiHandler(app, self.refused)


def _fastapi(endpoints: _Endpoints) -> FastAPI:
    """An application whose errors have OpenAI's format."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(RequestError, endpoints.on_error)
    app.add_exception_handler(HTTPException, endpoints.on_http_exception)
    app.add_exception_handler(Exception, endpoints.on_error)
    return app


def _other_paths(endpoints: _Endpoints, admin: AdminEndpoints, state: StateEndpoints) -> FastAPI:
    app = _fastapi(endpoints)
    app.add_route("/v1/models", endpoints.list_models, methods=["GET"])
    app.add_route("/v1/models/{model_id:path}", endpoints.retrieve_model, methods=["GET"])
    state.add_to(app)
    app.add_route("/admin/queue", admin.list_waiting, methods=["GET"])
    app.add_route("/admin/engines", admin.list_engines, methods=["GET"])
    app.add_route("/admin/usage", admin.usage, methods=["GET"])
    app.add_route("/admin/reload", admin.reload, methods=["POST"])
    app.add_route("/admin/peers", admin.peers, methods=["POST"])
    app.add_route("/admin/engines/{name:path}/{order}", admin.engine_action, methods=["POST"])
    for path in BODIES:
        app.add_route(path, endpoints.wrong_method, methods=["GET", "PUT", "PATCH", "DELETE"])
    return app


def receipt_headers(receipt: Receipt, call: Call) -> list[tuple[bytes, bytes]]:
    """Return the headers that describe how the front-end served a call."""
    headers = [
        request_id_header(receipt.request_id, call),
        (BIN_HEADER.encode(), b"%d" % receipt.bin),
        (BATCH_HEADER.encode(), b"%d" % receipt.batch),
        (QUEUE_HEADER.encode(), b"%.1f" % receipt.queue_ms),
        (ENGINE_HEADER.encode(), receipt.engine.encode()),
    ]
    if receipt.predicted_tokens is not None:
        headers.append((PREDICTED_HEADER.encode(), b"%.0f" % receipt.predicted_tokens))
    return headers


def request_id_header(request_id: int, call: Call) -> tuple[bytes, bytes]:
    """Return x-request-id: the client's, if sent."""
    return b"x-request-id", (dict(call.headers).get("x-request-id") or f"llmserve-{request_id}").encode()


class _Endpoints:
    def __init__(self, cluster: LiveCluster, metrics: Metrics, key_limits: KeyLimits, config: ApiConfig) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._key_limits = key_limits
        self._config = config
        self._deadlines = DefaultDeadlines(config.slo_ms)
        self._fair_by = config.fair_by or ("key" if key_limits.keys.required else "none")
        self._parser = CallParser(prompt_chars_max=config.prompt_chars_max, choices_max=config.choices_max)
        self._parsing: set[asyncio.Task[None]] = set()  # large bodies

    # ---- completions ----

    def admit(self, exchange: Exchange) -> None:
        """Count a request of the client's key until its end. Raises RequestError."""
        if self._cluster.draining:
            retry_after_s = max(1.0, self._cluster.drain_time_s)  # a server that follows cannot listen before
            raise Unavailable("the server is shutting down", code="draining", retry_after_s=retry_after_s)
        name = self._key_limits.keys.authenticate(exchange.headers.get("authorization"))
        exchange.on_end = self._key_limits.acquire(name).release
        exchange.key = name

    def complete(self, exchange: Exchange) -> None:
        """Queue a completion; its answer is written as the engine gives it."""
        if self._parser.is_large(exchange.body):
            parsing = asyncio.get_running_loop().create_task(self._complete_large(exchange))
            self._parsing.add(parsing)
            parsing.add_done_callback(self._parsing.discard)
            return
        try:
            self._submit(self._parser.parse(exchange.path, exchange.body, exchange.headers), exchange)
        except Exception as error:
            exchange.refuse(self.count(exchange, error))

    async def _complete_large(self, exchange: Exchange) -> None:
        try:
            call = await self._parser.parse_large(exchange.path, exchange.body, exchange.headers)
            if not exchange.ended:
                self._submit(call, exchange)
        except Exception as error:
            exchange.refuse(self.count(exchange, error))

    def _submit(self, call: Call, exchange: Exchange) -> None:
        account = self._key_limits.account(exchange.key)
        if exchange.key == DOOR:
            call = as_asked(call, exchange.headers.get(ASKER_HEADER))
        else:
            call = with_share(self._of_key(call, exchange.key), self._share(call, exchange), account.policy)
        self._check_served(call)
        answer = _Answer(call, exchange, account)
        in_flight = self._cluster.submit(call, answer, account.charge(call.model))
        if not exchange.ended:
            exchange.on_gone = partial(self._cluster.cancel, in_flight)
            if call.stream:
                exchange.on_silence = partial(answer.keep_alive, in_flight, self._cluster.places)

    def _share(self, call: Call, exchange: Exchange) -> str:
        """Who gets a fair share of the engines with this call."""
        if self._fair_by == "key":
            return exchange.key
        if self._fair_by == "stream":
            return _stream_of(call, exchange.key)
        return exchange.address if self._fair_by == "address" else ""

    def _of_key(self, call: Call, key: str) -> Call:
        """The call with the stream and the deadline of the client's key."""
        stream = _stream_of(call, key)
        slo_s = call.slo_s if call.slo_s is not None else self._deadlines.slo_s(key, stream, call.model)
        if (stream, slo_s, key) == (call.stream_name, call.slo_s, call.prompt.sender):
            return call
        return replace(call, stream_name=stream, slo_s=slo_s, prompt=replace(call.prompt, sender=key))

    def _check_served(self, call: Call) -> None:
        models = self._cluster.models
        if (model := models.get(call.model)) is not None:
            check_fits(call, model, self._cluster.fleet.infos_of(call.model))
            return
        if not self._cluster.fleet.may_come(call.model):
            raise model_not_found(call.model, models)

    # ---- models ----

    async def list_models(self, request: Request) -> Response:
        self._key_limits.keys.authenticate(request.headers.get("authorization"))
        return json_response({"object": "list", "data": [self._model(id_) for id_ in sorted(self._cluster.models)]})

    async def retrieve_model(self, request: Request) -> Response:
        self._key_limits.keys.authenticate(request.headers.get("authorization"))
        id_ = request.path_params["model_id"]
        if id_ not in self._cluster.models:
            raise model_not_found(id_, self._cluster.models)
        return json_response(self._model(id_))

    def _model(self, id_: str) -> dict[str, Any]:
        model: dict[str, Any] = {"id": id_, "object": "model", "created": 0, "owned_by": "llmserve"}
        context_tokens = self._cluster.models[id_].context_tokens
        return {**model, "max_model_len": context_tokens} if context_tokens else model

    # ---- errors ----

    def count(self, request: Exchange | Request, error: Exception) -> RequestError:
        """Count a refusal. An error that is not meant for clients is logged, and becomes one that is."""
        if not isinstance(error, RequestError):
            path = request.path if isinstance(request, Exchange) else request.url.path
            log.error("%s %s failed", request.method, path, exc_info=error)
            error = RequestError("the front-end failed on this request", code="internal_error")
        self._metrics.refused(error.code or error.type)
        return error

    async def on_error(self, request: Request, error: Exception) -> Response:
        return error_response(self.count(request, error))

    async def on_http_exception(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            return await self.wrong_method(request)
        return error_response(NotFound(f"there is no {request.url.path}"))

    async def wrong_method(self, request: Request) -> Response:
        response = error_response(MethodNotAllowed(f"{request.method} is not allowed on {request.url.path}"))
        is_order = request.url.path.startswith(("/admin/engines/", "/admin/reload", "/admin/peers"))
        response.headers["allow"] = "POST" if request.url.path in BODIES or is_order else "GET"
        return response


def _stream_of(call: Call, key: str) -> str:
    return f"{key}/{call.stream_name}" if key and call.stream_name else call.stream_name or key


class _Answer:
    """Writes the answer of a call to the client's connection."""

    __slots__ = ("_account", "_call", "_exchange")

    def __init__(self, call: Call, exchange: Exchange, account: Account) -> None:
        self._call = call
        self._exchange = exchange
        self._account = account

    @property
    def paused(self) -> bool:
        return self._exchange.paused

    async def writable(self) -> None:
        await self._exchange.writable()

    def begin(self, head: Head) -> None:
        if self._exchange.started:  # by a comment, with status 200
            if head.body is not None:
                self._write_error(error_of_body(head.status, head.body), head.receipt)
            return
        headers = [(b"content-type", head.content_type.encode("latin-1", "replace"))]
        headers += receipt_headers(head.receipt, self._call)
        if self._account.is_limited:
            headers += self._account.headers(self._call.model)
        if head.retry_after is not None:
            headers.append((b"retry-after", head.retry_after.encode("latin-1", "replace")))
        if head.body is not None:
            self._exchange.respond(head.status, headers, head.body)
            return
        headers.append((b"cache-control", b"no-cache"))
        self._exchange.start(head.status, headers, None)
        if not head.content_type.startswith(EVENT_STREAM):
            self._exchange.on_silence = None

    def write(self, data: bytes) -> None:
        self._exchange.write(data)

    def end(self) -> None:
        self._exchange.end()

    def fail(self, error: RequestError, receipt: Receipt | None) -> None:
        if self._exchange.started:  # the status is already sent
            self._write_error(error.body(), receipt)
            return
        status, headers, body = error_parts(error)
        if receipt is not None:
            headers += receipt_headers(receipt, self._call)
        self._exchange.respond(status, headers, body)

    def _write_error(self, body: dict[str, Any], receipt: Receipt | None) -> None:
        """End the stream with an error event, as vLLM does."""
        if receipt is not None and self._call.receipt:
            body = {**body, "llmserve": receipt.fields}
        self._exchange.write(b"data: " + msgspec.json.encode(body) + b"\n\ndata: [DONE]\n\n")
        self._exchange.end()

    def keep_alive(self, in_flight: InFlightCall, places: Places) -> None:
        """Write a comment that tells the call's place. Clients ignore comments of an event stream."""
        if in_flight.usage is not None and in_flight.usage.in_parts:
            return
        if not self._exchange.started:
            headers = [(b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()), (b"cache-control", b"no-cache")]
            self._exchange.start(200, [*headers, request_id_header(in_flight.request.id, self._call)], None)
        self._exchange.write(b": %b\n\n" % comment_of(places.of(in_flight), running=in_flight.task is not None))
