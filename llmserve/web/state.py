"""The state of the server: /health, /ready and /metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from llmserve.errors import RequestError
from llmserve.gateway.answers import json_response
from llmserve.gateway.own_routes import OwnRoute
from llmserve.live.cluster import LiveCluster
from llmserve.observe.metrics import Metrics
from llmserve.runtime.lasting import failing
from llmserve.tenants.guards import Guard


class StateEndpoints:
    """Everybody learns whether the process lives and is ready: a probe has no key.

    key : whoever passes sees /metrics and the engines of /ready
    """

    def __init__(self, cluster: LiveCluster, metrics: Metrics, key: Guard) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._key = key
        self.routes = [
            OwnRoute("GET", "/health", self.health, tag="state"),
            OwnRoute("GET", "/ready", self.ready, tag="state"),
            OwnRoute("GET", "/metrics", self.metrics_text, guard=key, tag="state"),
        ]

    async def health(self, _: Request) -> Response:
        """The process lives."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """An engine is up, and the server does not shut down; status 503 else. With a key: which engines are up."""
        engines = self._cluster.engines_ready
        ready = any(engines.values()) and not self._cluster.draining
        state: dict[str, object] = {"ready": ready}
        if self._may_see(request):
            state = {**state, "draining": self._cluster.draining, "engines": engines}
            if failures := failing():
                state["failing"] = failures
        return json_response(state, 200 if ready else 503)

    async def metrics_text(self, _: Request) -> Response:
        """The metrics, for Prometheus."""
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _may_see(self, request: Request) -> bool:
        try:
            self._key.check(request.headers)
        except RequestError:
            return False
        return True
