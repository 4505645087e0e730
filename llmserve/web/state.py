"""The state of the server: /health, /ready and /metrics."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from llmserve.errors import Unauthorized
from llmserve.gateway.answers import json_response
from llmserve.live.cluster import LiveCluster
from llmserve.observe.metrics import Metrics
from llmserve.runtime.lasting import failing
from llmserve.tenants.authentication import Keys


class StateEndpoints:
    """Everybody learns whether the process lives and is ready: a probe has no key.

    keys : with one of these keys a client sees /metrics and the engines of /ready; (): every client does
    """

    def __init__(self, cluster: LiveCluster, metrics: Metrics, keys: tuple[Keys, ...]) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._keys = keys

    def add_to(self, app: FastAPI) -> None:
        app.add_route("/health", self.health, methods=["GET"])
        app.add_route("/ready", self.ready, methods=["GET"])
        app.add_route("/metrics", self.metrics_text, methods=["GET"])

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        engines = self._cluster.engines_ready
        ready = any(engines.values()) and not self._cluster.draining
        state: dict[str, object] = {"ready": ready}
        if self._refusal(request) is None:
            state = {**state, "draining": self._cluster.draining, "engines": engines}
            if failures := failing():
                state["failing"] = failures
        return json_response(state, 200 if ready else 503)

    async def metrics_text(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            raise refusal
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _refusal(self, request: Request) -> Unauthorized | None:
        """Why this client may not see the state; None: it may."""
        refusal = None
        for keys in self._keys:
            try:
                keys.authenticate(request.headers.get("authorization"))
            except Unauthorized as error:
                refusal = error
            else:
                return None
        return refusal
