"""The HTTP application: the engines' endpoints (endpoints.py) on a live cluster, and the server's own.

GET /v1/models   GET /v1/models/{id}   GET and DELETE /v1/responses/{id}   POST /v1/responses/{id}/cancel
GET /openapi.json (the endpoints)   /v1/files, /v1/batches and below: jobs/endpoints.py
GET /health (the process lives)   GET /ready (an engine is up)   GET /metrics (Prometheus)
GET / (a page for people)   GET /events (what it shows)
With an admin key: GET /admin/queue   GET /admin/engines   POST /admin/engines/{name}/drain | resume | restart
GET /admin/usage   POST /admin/reload   POST /admin/peers
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import FastAPI
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from llmserve.calls.in_flight import Head, InFlightCall, Receipt, request_name
from llmserve.errors import (
    ConfigError,
    MethodNotAllowed,
    NotFound,
    RequestError,
    Unavailable,
    UnsupportedMediaType,
    model_not_found,
)
from llmserve.estimates.position import Places
from llmserve.gateway.aliases import Aliases, of_only_model
from llmserve.gateway.answers import error_parts, error_response, json_response
from llmserve.gateway.endpoints import ENDPOINTS, Endpoint
from llmserve.gateway.fitting import check_served
from llmserve.gateway.keep_alive import EVENT_STREAM, comment_of, counts_events
from llmserve.gateway.parse import CallParser, limits_of
from llmserve.gateway.paths import METHODS, Paths
from llmserve.gateway.responses import ResponseEndpoints
from llmserve.http.asgi import AsgiHandler
from llmserve.http.content_coding import HEADER, Unpacker, codings_of
from llmserve.http.exchange import Exchange
from llmserve.jobs.endpoints import BATCHES, FILES, BatchEndpoints, NoBatches
from llmserve.live.driver import LiveCluster
from llmserve.observe.metrics import Metrics
from llmserve.observe.watch import Meter, Watch
from llmserve.request import Call
from llmserve.settings.deadlines import DefaultDeadlines
from llmserve.settings.tree import ApiConfig
from llmserve.tenants.authentication import Keys
from llmserve.tenants.identity import as_asked
from llmserve.tenants.keys import DOOR
from llmserve.tenants.limits import Account, KeyLimits
from llmserve.tenants.shares import shared_by, with_share
from llmserve.web.admin import AdminEndpoints
from llmserve.web.browsers import Browsers
from llmserve.web.cors import Cors
from llmserve.web.page import PageEndpoints
from llmserve.web.state import StateEndpoints
from llmserve.wire.answer_forms import COMPLETION, Silence, error_of_body
from llmserve.wire.headers import (
    ASKER_HEADER,
    BATCH_HEADER,
    BIN_HEADER,
    ENGINE_HEADER,
    PREDICTED_HEADER,
    QUEUE_HEADER,
    STREAM_HEADERS,
)

if TYPE_CHECKING:
    from llmserve.observe.traces import Traces

log = logging.getLogger("llmserve")

PEERS, RESPONSES = "/admin/peers", "/v1/responses/"  # the latter and below


class Part(Protocol):
    """Adds its endpoints to the application."""

    def add_to(self, app: FastAPI) -> None: ...


async def no_reload() -> None:
    raise ConfigError("this server has nothing to read again")


class App:
    """Answers requests: for engines' endpoints directly, every other path by FastAPI.

    Requests to engines bypass ASGI and FastAPI: routing, middlewares and a task for each client would cost more time
    than all of scheduling (scripts/lab/benchmark_frontend.py). admin: the keys for /admin; None: /admin is disabled.
    reload: reads keys, limits and engines again.  cors : pages of which origins may call.
    browsers : what pages may do while no key is required; None: everything
    aliases: the models behind other names, see aliases.py.  meter : of all engines' energy; None: none is known
    batches: of files and batch jobs; None: there is no place for them.  traces : None: no request is traced
    """

    def __init__(
        self,
        cluster: LiveCluster,
        metrics: Metrics,
        key_limits: KeyLimits,
        config: ApiConfig,
        admin: Keys | None = None,
        reload: Callable[[], Awaitable[None]] = no_reload,
        cors: Cors | None = None,
        browsers: Browsers | None = None,
        aliases: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        batches: BatchEndpoints | None = None,
        meter: Meter | None = None,
        traces: Traces | None = None,
    ) -> None:
        cluster.routes.paths = tuple(ENDPOINTS)
        cluster.routes.has_keys = lambda: key_limits.keys.required
        self._cors = cors or None
        self._browsers = browsers
        self._unpacker = Unpacker(config.body_bytes_max)
        self._unpacking: set[asyncio.Task[None]] = set()
        self._batches = batches or NoBatches()
        self._endpoints = _Endpoints(cluster, metrics, key_limits, config, aliases, traces)
        self._keys = keys = key_limits.keys
        self._keys_of_bodies = {BATCHES: keys if batches is not None else None, PEERS: admin}
        seeing = tuple([known for known in (keys, admin) if known is not None]) if keys.required else ()
        watching = None if not keys.required else () if admin is None else (admin,)
        page = PageEndpoints(Watch(cluster, meter), watching, batches.sums if batches is not None else None)
        state = StateEndpoints(cluster, metrics, seeing)
        admins = AdminEndpoints(cluster, admin, key_limits, reload)
        parts = (self._batches, ResponseEndpoints(cluster, keys), state, page)
        others = _other_paths(self._endpoints, admins, parts)
        self._others = AsgiHandler(others, self.refused)
        self._paths = self._endpoints.paths = Paths(others, ENDPOINTS)
        self._state_for_all = StateEndpoints(cluster, metrics, ())

    def admit(self, exchange: Exchange) -> None:
        """Check the key before the body is read. Raises RequestError."""
        if self._cors is not None:
            self._cors.allow(exchange)
        if self._browsers is not None and not self._keys.required:
            self._browsers.check(exchange)
        if exchange.method == "POST" and (endpoint := ENDPOINTS.get(exchange.path)) is not None:
            exchange.endpoint = endpoint
            self._endpoints.admit(exchange, endpoint)
        elif exchange.method == "POST" and exchange.path == FILES:
            self._admit_upload(exchange)
        else:
            self._admit_body(exchange)
        if HEADER in exchange.headers and exchange.keeps_body:
            codings_of(exchange)

    def _admit_upload(self, exchange: Exchange) -> None:
        if HEADER in exchange.headers and codings_of(exchange):
            raise UnsupportedMediaType(f"`{HEADER}`: files are uploaded as they are")
        exchange.upload = self._batches.upload(exchange)

    def _admit_body(self, exchange: Exchange) -> None:
        """Keep the body of a request for this server only where a handler reads one, and for a right key."""
        if exchange.path.startswith(RESPONSES):
            keys: Keys | None = self._keys
        else:
            keys = self._keys_of_bodies.get(exchange.path) if exchange.method == "POST" else None
        exchange.keeps_body = keys is not None
        if exchange.announces_body and keys is None and not self._paths.methods(exchange.path):
            raise self._endpoints.no_path(exchange.path)
        if keys is not None:
            exchange.key = keys.authenticate(exchange.headers.get("authorization"))

    def handle(self, exchange: Exchange) -> None:
        if HEADER in exchange.headers and exchange.keeps_body:
            self._run(self._handle_packed(exchange))
        else:
            self._handle(exchange)

    async def _handle_packed(self, exchange: Exchange) -> None:
        try:
            await self._unpacker.unpack(exchange)
        except Exception as error:
            exchange.refuse(self._endpoints.count(exchange, error))
        else:
            if not exchange.ended:
                self._handle(exchange)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._unpacking.add(task)
        task.add_done_callback(self._unpacking.discard)

    def _handle(self, exchange: Exchange) -> None:
        if exchange.endpoint is not None:
            self._endpoints.complete(exchange)
        elif exchange.method == "OPTIONS":
            self._answer_options(exchange)
        else:
            self._others.handle(exchange)

    def _answer_options(self, exchange: Exchange) -> None:
        """Tell browsers what pages may send, and load balancers that the server lives."""
        if self._cors is not None and self._cors.is_preflight(exchange):
            self._cors.answer(exchange)
            return
        methods = METHODS if exchange.path == "*" else self._paths.methods(exchange.path) or ("OPTIONS",)
        exchange.start(204, [(b"allow", ", ".join(methods).encode())], None)
        exchange.end()

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


def _other_paths(endpoints: _Endpoints, admin: AdminEndpoints, parts: Iterable[Part]) -> FastAPI:
    app = _fastapi(endpoints)
    for part in parts:
        part.add_to(app)
    app.add_route("/openapi.json", endpoints.list_endpoints, methods=["GET"])
    app.add_route("/v1/models", endpoints.list_models, methods=["GET"])
    app.add_route("/v1/models/{model_id:path}", endpoints.retrieve_model, methods=["GET"])
    app.add_route("/admin/queue", admin.list_waiting, methods=["GET"])
    app.add_route("/admin/engines", admin.list_engines, methods=["GET"])
    app.add_route("/admin/usage", admin.usage, methods=["GET"])
    app.add_route("/admin/reload", admin.reload, methods=["POST"])
    app.add_route(PEERS, admin.peers, methods=["POST"])
    app.add_route("/admin/engines/{name:path}/{order}", admin.engine_action, methods=["POST"])
    for path in ENDPOINTS:
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


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """The header with the client's key: Anthropic's clients send it as `x-api-key`."""
    authorization, key = headers.get("authorization"), headers.get("x-api-key")
    return f"Bearer {key}" if authorization is None and key else authorization


def request_id_header(request_id: int, call: Call) -> tuple[bytes, bytes]:
    """Return x-request-id: the client's, if sent."""
    return b"x-request-id", request_name(request_id, call).encode()


class _Endpoints:
    paths: Paths  # of the whole server

    def __init__(
        self,
        cluster: LiveCluster,
        metrics: Metrics,
        key_limits: KeyLimits,
        config: ApiConfig,
        aliases: Mapping[str, tuple[str, ...]],
        traces: Traces | None,
    ) -> None:
        self._cluster = cluster
        self._traces = traces
        self._metrics = metrics
        self._key_limits = key_limits
        self._config = config
        self._deadlines = DefaultDeadlines(config.slo_ms)
        self._fair_by = shared_by(config.fair_by, keys=key_limits.keys.required)
        self._aliases = Aliases(aliases, cluster.fleet.is_up)
        self._has_aliases = bool(aliases)
        self._parser = CallParser(limits_of(config))
        self._parsing: set[asyncio.Task[None]] = set()  # large bodies

    # ---- requests to engines ----

    def admit(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Count a request of the client's key until its end. Raises RequestError."""
        if self._cluster.draining:
            retry_after_s = max(1.0, self._cluster.drain_time_s)  # a server that follows cannot listen before
            raise Unavailable("the server is shutting down", code="draining", retry_after_s=retry_after_s)
        authorization = exchange.headers.get("authorization")
        if authorization is None and endpoint.takes_bare_key:
            authorization = authorization_of(exchange.headers)
        name = self._key_limits.keys.authenticate(authorization)
        exchange.on_end = self._key_limits.acquire(name).release
        exchange.key = name

    def complete(self, exchange: Exchange) -> None:
        """Queue a request; its answer is written as the engine gives it."""
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
        if not call.model:
            call = of_only_model(call, list(self._cluster.models))
        elif self._has_aliases:
            call = self._aliases.resolved(call)
        if exchange.key == DOOR:
            call = as_asked(call, exchange.headers.get(ASKER_HEADER))
        else:
            call = with_share(self._of_key(call, exchange.key), self._share(call, exchange), account.policy)
        check_served(call, self._cluster)
        if call.form is not COMPLETION:
            call = self._cluster.routes.routed(call)
        answer = _Answer(call, exchange, account)
        trace = self._traces.begin(call, exchange) if self._traces is not None else None
        in_flight = self._cluster.submit(call, answer, account.charge(call.model), trace)
        exchange.follow(in_flight)
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

    # ---- models ----

    async def list_models(self, request: Request) -> Response:
        self._key_limits.keys.authenticate(authorization_of(request.headers))
        models = [self._model(id_) for id_ in sorted(self._cluster.models)]
        aliases = self._aliases.of(self._cluster.models)
        models += [{**self._model(model), "id": name, "root": model} for name, model in sorted(aliases.items())]
        return json_response({"object": "list", "data": models})

    async def list_endpoints(self, request: Request) -> Response:
        """The endpoints that engines have, as servers made with FastAPI tell them."""
        self._key_limits.keys.authenticate(authorization_of(request.headers))
        paths = self._cluster.routes.having(self._cluster.fleet.handles.values())
        info = {"title": "llmserve", "version": "1"}
        return json_response({"openapi": "3.1.0", "info": info, "paths": {path: {"post": {}} for path in paths}})

    async def retrieve_model(self, request: Request) -> Response:
        self._key_limits.keys.authenticate(authorization_of(request.headers))
        id_ = request.path_params["model_id"]
        if id_ in self._cluster.models:
            return json_response(self._model(id_))
        aliases = self._aliases.of(self._cluster.models)
        if id_ not in aliases:
            raise model_not_found(id_, self._cluster.models)
        return json_response({**self._model(aliases[id_]), "id": id_, "root": aliases[id_]})

    def _model(self, id_: str) -> dict[str, Any]:
        model: dict[str, Any] = {"id": id_, "object": "model", "created": 0, "owned_by": "llmserve"}
        context_tokens = self._cluster.models[id_].context_tokens
        return {**model, "max_model_len": context_tokens} if context_tokens else model

    # ---- errors ----

    def count(self, request: Exchange | Request, error: Exception) -> RequestError:
        """Count a refusal. An error that is not meant for clients is logged, and becomes one that is."""
        if not isinstance(error, RequestError):
            path = request.path if isinstance(request, Exchange) else request.url.path
            key = {"key": request.key} if isinstance(request, Exchange) and request.key else {}
            log.error("%s %s failed", request.method, path, exc_info=error, extra={"fields": key})
            error = RequestError("the front-end failed on this request", code="internal_error")
        self._metrics.refused(error.code or error.type)
        return error

    async def on_error(self, request: Request, error: Exception) -> Response:
        return error_response(self.count(request, error))

    async def on_http_exception(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            return await self.wrong_method(request)
        return error_response(self.no_path(request.url.path))

    def no_path(self, path: str) -> NotFound:
        meant = self.paths.meant(path)
        return NotFound(f"there is no {path}" + (f"; did you mean {meant}?" if meant else ""))

    async def wrong_method(self, request: Request) -> Response:
        methods = ", ".join(self.paths.methods(request.url.path))
        response = error_response(
            MethodNotAllowed(f"{request.method} is not allowed on {request.url.path}; it takes {methods}")
        )
        response.headers["allow"] = methods
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

    @property
    def listens(self) -> bool:
        return self._exchange.started

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
        headers += head.headers
        if head.body is not None:
            self._exchange.respond(head.status, headers, head.body)
            return
        told = dict(head.headers)
        headers += [(name, value) for name, value in STREAM_HEADERS if name not in told]
        self._exchange.start(head.status, headers, None)
        if not head.content_type.startswith(EVENT_STREAM):
            self._exchange.on_silence = None

    def write(self, data: bytes) -> None:
        self._exchange.write(data)

    def end(self) -> None:
        self._exchange.end()

    def fail(self, error: RequestError, receipt: Receipt | None) -> None:
        if self._exchange.started:  # the status is already sent
            self._write_error(self._call.form.error(error), receipt)
            return
        status, headers, body = error_parts(error, self._exchange.endpoint)
        if receipt is not None:
            headers += receipt_headers(receipt, self._call)
        self._exchange.respond(status, headers, body)

    def _write_error(self, body: dict[str, Any], receipt: Receipt | None) -> None:
        """End the stream with an error, in the form of its endpoint."""
        if receipt is not None and self._call.receipt:
            body = {**body, "llmserve": receipt.fields}
        self._exchange.write(self._call.form.last_events(body))
        self._exchange.end()

    def keep_alive(self, in_flight: InFlightCall, places: Places) -> None:
        """Write a comment that tells the call's place, and what the client counts as a sign of life."""
        if in_flight.usage is not None and in_flight.usage.in_parts:
            return
        if not self._exchange.started:
            headers = [(b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()), *STREAM_HEADERS]
            self._exchange.start(200, [*headers, request_id_header(in_flight.request.id, self._call)], None)
        silence = Silence(
            comment_of(places.of(in_flight), running=in_flight.forwarding is not None),
            in_flight.answered,
            in_flight.usage,
            counts_events(self._exchange.headers),
        )
        self._exchange.write(self._call.form.keep_alive(silence))
