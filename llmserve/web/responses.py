"""Responses that engines keep: /v1/responses/{id} is passed to the engine that knows the response."""

from __future__ import annotations

from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from llmserve.gateway.own_routes import OwnRoute
from llmserve.live.cluster import LiveCluster
from llmserve.tenants.guards import Guard, key_of
from llmserve.tenants.keys import GATEWAY
from llmserve.wire.headers import ENGINE_HEADER


class ResponseEndpoints:
    """No work for an engine: these requests wait in no queue and count against no limit."""

    def __init__(self, cluster: LiveCluster, client_key: Guard) -> None:
        self._cluster = cluster
        one = "/v1/responses/{response_id}"
        paths = (("GET", one), ("DELETE", one), ("GET", one + "/{order}"), ("POST", one + "/{order}"))
        key = client_key.with_body
        self.routes = [OwnRoute(method, path, self.pass_on, guard=key, tag="responses") for method, path in paths]

    async def pass_on(self, request: Request) -> Response:
        """Passed to the engine that has given the response: retrieve, delete or cancel it, or list its items."""
        response_id, order = request.path_params["response_id"], request.path_params.get("order")
        path = f"/v1/responses/{quote(response_id, safe='')}" + (f"/{quote(order, safe='')}" if order else "")
        if request.url.query:
            path += f"?{quote(request.url.query, safe='=&%+,[]')}"
        key, body = key_of(request), await request.body() or None
        owner = key if key != GATEWAY else None
        engine, passed = await self._cluster.routes.pass_on(response_id, owner, request.method, path, body)
        return Response(passed.body, passed.status, {ENGINE_HEADER: engine}, passed.content_type)
