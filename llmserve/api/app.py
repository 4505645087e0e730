"""The HTTP application: OpenAI's endpoints on a live cluster.

POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/{id}
GET /health (the process lives)   GET /ready (an engine is up)   GET /metrics (Prometheus)
With an admin key: GET /admin/engines   POST /admin/engines/{name}/drain | resume | restart
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from llmserve.api.admin import AdminEndpoints
from llmserve.api.answers import error_response, json_response
from llmserve.api.limits import KeyLimits
from llmserve.api.parse import BODIES, parse_call
from llmserve.cluster.in_flight import Head, InFlightCall, Receipt
from llmserve.cluster.live import LiveCluster
from llmserve.deadline_settings import DefaultDeadlines
from llmserve.errors import BadRequest, MethodNotAllowed, ModelNotFound, NotFound, RequestError, Unavailable
from llmserve.headers import BATCH_HEADER, BIN_HEADER, ENGINE_HEADER, PREDICTED_HEADER, QUEUE_HEADER
from llmserve.metrics import Metrics
from llmserve.request import Call
from llmserve.settings import ApiConfig

log = logging.getLogger("llmserve")


def create_app(
    cluster: LiveCluster,
    metrics: Metrics,
    key_limits: KeyLimits,
    config: ApiConfig,
    admin: KeyLimits | None = None,
) -> ASGIApp:
    """Return the ASGI application. FastAPI serves all paths except the completions.

    Completions bypass FastAPI: its routing and middlewares would cost more time than all of scheduling
    (scripts/lab/benchmark_frontend.py). admin: the keys for /admin; None: /admin is disabled.
    """
    endpoints = _Endpoints(cluster, metrics, key_limits, config)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_route("/v1/models", endpoints.list_models, methods=["GET"])
    app.add_route("/v1/models/{model_id:path}", endpoints.retrieve_model, methods=["GET"])
    app.add_route("/health", endpoints.health, methods=["GET"])
    app.add_route("/ready", endpoints.ready, methods=["GET"])
    app.add_route("/metrics", endpoints.metrics_text, methods=["GET"])
    admin_endpoints = AdminEndpoints(cluster, admin)
    app.add_route("/admin/engines", admin_endpoints.list_engines, methods=["GET"])
    app.add_route("/admin/engines/{name:path}/{order}", admin_endpoints.engine_action, methods=["POST"])
    for path in BODIES:
        app.add_route(path, endpoints.wrong_method, methods=["GET", "PUT", "PATCH", "DELETE"])
    app.add_exception_handler(RequestError, endpoints.on_error)
    app.add_exception_handler(HTTPException, endpoints.on_http_exception)
    app.add_exception_handler(Exception, endpoints.on_error)

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in BODIES:
            await endpoints.complete(scope, receive, send)
        else:
            await app(scope, receive, send)

    return route


def receipt_headers(receipt: Receipt, call: Call) -> list[tuple[bytes, bytes]]:
    """Return the headers that describe how the front-end served a call. x-request-id is the client's, if sent."""
    request_id = dict(call.headers).get("x-request-id") or f"llmserve-{receipt.request_id}"
    headers = [
        (b"x-request-id", request_id.encode()),
        (BIN_HEADER.encode(), b"%d" % receipt.bin),
        (BATCH_HEADER.encode(), b"%d" % receipt.batch),
        (QUEUE_HEADER.encode(), b"%.1f" % receipt.queue_ms),
        (ENGINE_HEADER.encode(), receipt.engine.encode()),
    ]
    if receipt.predicted_tokens is not None:
        headers.append((PREDICTED_HEADER.encode(), b"%.0f" % receipt.predicted_tokens))
    return headers


class _Endpoints:
    def __init__(self, cluster: LiveCluster, metrics: Metrics, key_limits: KeyLimits, config: ApiConfig) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._key_limits = key_limits
        self._config = config
        self._deadlines = DefaultDeadlines(config.slo_ms)

    # ---- completions ----

    async def complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a completion, as an ASGI application. Also sends the response of every error."""
        request = Request(scope, receive)
        try:
            name = self._key_limits.authenticate(request.headers.get("authorization"))
            self._key_limits.acquire(name)
        except RequestError as error:
            await self._refuse(request, error, send)
            return
        try:
            call = await self._read_call(request, receive, name)
            self._check_served(call)
            await _Completion(self._cluster, call).run(scope, receive, send)
        except ClientGone:
            return
        except Exception as error:
            await self._refuse(request, error, send)
        finally:
            self._key_limits.release(name)

    async def _read_call(self, request: Request, receive: Receive, key: str) -> Call:
        """Read and parse the body. key: the name of the client's API key."""
        call = parse_call(
            request.url.path,
            await self._read_body(receive),
            prompt_chars_max=self._config.prompt_chars_max,
            headers=request.headers,
        )
        stream = call.stream_name or key
        slo_s = call.slo_s if call.slo_s is not None else self._deadlines.slo_s(key, stream, call.model)
        if (stream, slo_s, key) == (call.stream_name, call.slo_s, call.prompt.sender):
            return call
        return replace(call, stream_name=stream, slo_s=slo_s, prompt=replace(call.prompt, sender=key))

    async def _refuse(self, request: Request, error: Exception, send: Send) -> None:
        response = await self.on_error(request, error)
        if "expect" in request.headers:  # the body may still be unread: the connection cannot carry another request
            response.headers["connection"] = "close"
        await response(request.scope, request.receive, send)

    def _check_served(self, call: Call) -> None:
        if self._cluster.draining:
            retry_after_s = max(1.0, self._cluster.drain_time_s)  # a server that follows cannot listen before
            raise Unavailable("the server is shutting down", code="draining", retry_after_s=retry_after_s)
        models = self._cluster.models
        if call.model in models:
            return
        if not any(self._cluster.engines_ready.values()):  # without an engine, the list of models is not known
            raise Unavailable("no engine is up", code="no_engine", retry_after_s=1.0)
        raise _model_not_found(call.model, list(models))

    async def _read_body(self, receive: Receive) -> bytes:
        """Read the whole body. Raises BadRequest when it is too large, ClientGone when the client disconnects."""
        limit = self._config.body_bytes_max
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client has disconnected")
            part: bytes = message.get("body", b"")
            body += part
            if len(body) > limit:
                raise BadRequest(f"the body is larger than {limit:,} bytes", code="body_too_large")
            if not message.get("more_body", False):
                return body

    # ---- models ----

    async def list_models(self, request: Request) -> Response:
        self._key_limits.authenticate(request.headers.get("authorization"))
        return json_response({"object": "list", "data": [self._model(id_) for id_ in sorted(self._cluster.models)]})

    async def retrieve_model(self, request: Request) -> Response:
        self._key_limits.authenticate(request.headers.get("authorization"))
        id_ = request.path_params["model_id"]
        if id_ not in self._cluster.models:
            raise _model_not_found(id_, list(self._cluster.models))
        return json_response(self._model(id_))

    def _model(self, id_: str) -> dict[str, Any]:
        model: dict[str, Any] = {"id": id_, "object": "model", "created": 0, "owned_by": "llmserve"}
        context_tokens = self._cluster.models[id_].context_tokens
        return {**model, "max_model_len": context_tokens} if context_tokens else model

    # ---- state ----

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        engines = self._cluster.engines_ready
        ready = any(engines.values()) and not self._cluster.draining
        return json_response(
            {"ready": ready, "draining": self._cluster.draining, "engines": engines}, 200 if ready else 503
        )

    async def metrics_text(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # ---- errors ----

    async def on_error(self, request: Request, error: Exception) -> Response:
        if not isinstance(error, RequestError):
            log.error("%s %s failed", request.method, request.url.path, exc_info=error)
            error = RequestError("the front-end failed on this request", code="internal_error")
        self._metrics.refused(error.code or error.type)
        return error_response(error)

    async def on_http_exception(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            return await self.wrong_method(request)
        return error_response(NotFound(f"there is no {request.url.path}"))

    async def wrong_method(self, request: Request) -> Response:
        response = error_response(MethodNotAllowed(f"{request.method} is not allowed on {request.url.path}"))
        is_order = request.url.path.startswith("/admin/engines/")
        response.headers["allow"] = "POST" if request.url.path in BODIES or is_order else "GET"
        return response


def _model_not_found(id_: str, models: list[str]) -> ModelNotFound:
    return ModelNotFound(f"there is no model {id_!r}; this server has {', '.join(sorted(models))}", param="model")


class _Completion:
    """Submits a call, then forwards the engine's bytes. Cancels the call when the client disconnects."""

    def __init__(self, cluster: LiveCluster, call: Call) -> None:
        self._cluster = cluster
        self._call = call
        self._in_flight: InFlightCall | None = None

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            in_flight = await self._cluster.submit(self._call, self._set_in_flight)
            await self._answer(in_flight, scope, receive, send)
        finally:
            watcher.cancel()
            if self._in_flight is not None:
                self._cluster.release(self._in_flight)

    def _set_in_flight(self, in_flight: InFlightCall) -> None:
        self._in_flight = in_flight

    async def _watch(self, receive: Receive) -> None:
        """Wait until the client disconnects, then cancel the call to free the engine."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if self._in_flight is not None:
            self._cluster.cancel(self._in_flight)
            self._in_flight.fail(ClientGone("the client has disconnected"))

    async def _answer(self, in_flight: InFlightCall, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            head = await in_flight.head()
        except ClientGone:
            return
        except RequestError as error:
            response = error_response(error)
            if in_flight.receipt is not None:
                response.raw_headers += receipt_headers(in_flight.receipt, in_flight.call)
            await response(scope, receive, send)
            return
        if head.body is not None:
            await _send_start(send, in_flight.call, head, len(head.body))
            await send({"type": "http.response.body", "body": head.body})
            return
        await _send_start(send, in_flight.call, head, None)
        try:
            async for chunk in in_flight.chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ClientGone:
            return
        except RequestError as error:  # the status is already sent: send an error event, as OpenAI's clients expect
            event = b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class ClientGone(RequestError):
    """The client has closed its connection. This error is never sent."""


async def _send_start(send: Callable[[Any], Awaitable[None]], call: Call, head: Head, length: int | None) -> None:
    headers = [(b"content-type", head.content_type.encode()), *receipt_headers(head.receipt, call)]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    else:
        headers.append((b"cache-control", b"no-cache"))
    if head.retry_after is not None:
        headers.append((b"retry-after", head.retry_after.encode()))
    await send({"type": "http.response.start", "status": head.status, "headers": headers})
