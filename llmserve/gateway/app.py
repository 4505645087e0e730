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
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from llmserve.calls.client_request import ClientExchange, ClientRequest
from llmserve.errors import (
    ConfigError,
    MethodNotAllowed,
    NotFound,
    RequestError,
    UnsupportedMediaType,
    model_not_found,
)
from llmserve.gateway.aliases import Aliases
from llmserve.gateway.answers import error_of, error_parts, error_response, json_response
from llmserve.gateway.completions import Completions
from llmserve.gateway.content_coding import HEADER, Unpacker, codings_of
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.paths import METHODS, Paths
from llmserve.gateway.responses import ResponseEndpoints
from llmserve.gateway.stages import of_clients, of_gateways
from llmserve.http.asgi import AsgiAnswers
from llmserve.http.errors import Refusal
from llmserve.http.exchange import Answer, Exchange
from llmserve.jobs.endpoints import BATCHES, FILES, BatchEndpoints, NoBatches
from llmserve.live.cluster import LiveCluster
from llmserve.observe.metrics import Metrics
from llmserve.observe.watch import Meter, Watch
from llmserve.settings.tree import ApiConfig
from llmserve.tenants.authentication import Keys, authorization_of
from llmserve.tenants.limits import KeyLimits
from llmserve.web.admin import AdminEndpoints
from llmserve.web.browsers import Browsers
from llmserve.web.cors import Cors
from llmserve.web.page import PageEndpoints
from llmserve.web.state import StateEndpoints

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
    than all of scheduling (scripts/lab/questions/performance/frontend.py).
    admin: the keys for /admin; None: /admin is disabled.
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
        behind = Aliases(aliases, cluster.fleet.is_up)
        self._endpoints = _Endpoints(cluster, metrics, key_limits, behind)
        clients = of_clients(cluster, key_limits, config, behind if aliases else None)
        gateways = of_gateways(clients, cluster, behind if aliases else None)
        begin_trace = traces.begin if traces is not None else None
        self._completions = Completions(cluster, clients, gateways, begin_trace)
        self._keys = keys = key_limits.keys
        self._keys_of_bodies = {BATCHES: keys if batches is not None else None, PEERS: admin}
        seeing = tuple([known for known in (keys, admin) if known is not None]) if keys.required else ()
        watching = None if not keys.required else () if admin is None else (admin,)
        page = PageEndpoints(Watch(cluster, meter), watching, batches.sums if batches is not None else None)
        state = StateEndpoints(cluster, metrics, seeing)
        admins = AdminEndpoints(cluster, admin, key_limits, reload)
        parts = (self._batches, ResponseEndpoints(cluster, keys), state, page)
        others = _other_paths(self._endpoints, admins, parts)
        self._others = AsgiAnswers(others)
        self._paths = self._endpoints.paths = Paths(others, ENDPOINTS)
        self._state_for_all = StateEndpoints(cluster, metrics, ())

    def new_state(self) -> ClientRequest:
        return ClientRequest()

    def admit(self, exchange: ClientExchange) -> RequestError | None:
        """Check the key before the body is read."""
        try:
            self._admit(exchange)
        except RequestError as error:
            return error
        return None

    def _admit(self, exchange: ClientExchange) -> None:
        if self._cors is not None:
            self._cors.allow(exchange)
        if self._browsers is not None and not self._keys.required:
            self._browsers.check(exchange)
        if exchange.method == "POST" and (endpoint := ENDPOINTS.get(exchange.path)) is not None:
            exchange.state.form = endpoint.form
            self._completions.admit(exchange, endpoint)
        elif exchange.method == "POST" and exchange.path == FILES:
            self._admit_upload(exchange)
        else:
            self._admit_body(exchange)
        if HEADER in exchange.headers and exchange.keeps_body:
            codings_of(exchange)

    def _admit_upload(self, exchange: ClientExchange) -> None:
        if HEADER in exchange.headers and codings_of(exchange):
            raise UnsupportedMediaType(f"`{HEADER}`: files are uploaded as they are")
        exchange.sink = self._batches.upload(exchange)

    def _admit_body(self, exchange: ClientExchange) -> None:
        """Keep the body of a request for this server only where a handler reads one, and for a right key."""
        if exchange.path.startswith(RESPONSES):
            keys: Keys | None = self._keys
        else:
            keys = self._keys_of_bodies.get(exchange.path) if exchange.method == "POST" else None
        exchange.keeps_body = keys is not None
        if exchange.announces_body and keys is None and not self._paths.methods(exchange.path):
            raise self._endpoints.no_path(exchange.path)
        if keys is not None:
            exchange.holder = exchange.state.key = keys.authenticate(exchange.headers.get("authorization"))

    def handle(self, exchange: ClientExchange) -> None:
        if HEADER in exchange.headers and exchange.keeps_body:
            self._run(self._handle_packed(exchange))
        else:
            self._handle(exchange)

    async def _handle_packed(self, exchange: ClientExchange) -> None:
        try:
            await self._unpacker.unpack(exchange)
        except Exception as error:
            exchange.refuse(error)
        else:
            if not exchange.ended:
                self._handle(exchange)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._unpacking.add(task)
        task.add_done_callback(self._unpacking.discard)

    def _handle(self, exchange: ClientExchange) -> None:
        if exchange.state.form is not None:
            self._completions.complete(exchange)
        elif exchange.method == "OPTIONS":
            self._answer_options(exchange)
        else:
            self._others.handle(exchange)

    def _answer_options(self, exchange: ClientExchange) -> None:
        """Tell browsers what pages may send, and load balancers that the server lives."""
        if self._cors is not None and self._cors.is_preflight(exchange):
            self._cors.answer(exchange)
            return
        methods = METHODS if exchange.path == "*" else self._paths.methods(exchange.path) or ("OPTIONS",)
        exchange.start(204, [(b"allow", ", ".join(methods).encode())], None)
        exchange.end()

    def refusal(self, error: Exception, exchange: ClientExchange | None) -> Answer:
        return self._endpoints.refusal(error, exchange)

    def state_handler(self) -> StateHandler:
        """Return what answers /health, /ready and /metrics to everybody, for a port of its own."""
        app = _fastapi(self._endpoints)
        self._state_for_all.add_to(app)
        return StateHandler(AsgiAnswers(app), self._endpoints.refusal)


class StateHandler:
    """Answers requests whose bodies nobody reads."""

    def __init__(self, answers: AsgiAnswers, refusal: Callable[[Exception, ClientExchange | None], Answer]) -> None:
        self.handle = answers.handle
        self.refusal = refusal

    def new_state(self) -> ClientRequest:
        return ClientRequest()

    def admit(self, exchange: ClientExchange) -> None:
        exchange.keeps_body = False


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


class _Endpoints:
    paths: Paths  # of the whole server

    def __init__(
        self,
        cluster: LiveCluster,
        metrics: Metrics,
        key_limits: KeyLimits,
        aliases: Aliases,
    ) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._key_limits = key_limits
        self._aliases = aliases

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

    def refusal(self, error: Exception, exchange: ClientExchange | None) -> Answer:
        """The answer to a request that is refused; it is counted, if it was one."""
        if exchange is None:
            assert isinstance(error, Refusal), "only connections are refused without a request"
            return error_parts(error_of(error))
        known = self.count(exchange, error)
        if not exchange.started:
            exchange.state.error = known
        return error_parts(known, exchange.state.form)

    def count(self, request: ClientExchange | Request, error: Exception) -> RequestError:
        """Count a refusal. An error that is not meant for clients is logged, and becomes one that is."""
        if isinstance(error, Refusal):
            error = error_of(error)
        if not isinstance(error, RequestError):
            path = request.path if isinstance(request, Exchange) else request.url.path
            key = {"key": request.state.key} if isinstance(request, Exchange) and request.state.key else {}
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
