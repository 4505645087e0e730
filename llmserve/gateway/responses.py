"""Responses that engines keep: /v1/responses/{id} is passed to the engine that knows the response."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from llmserve.live.cluster import LiveCluster
from llmserve.tenants.authentication import Keys
from llmserve.tenants.keys import DOOR
from llmserve.wire.headers import ENGINE_HEADER


class ResponseEndpoints:
    """No work for an engine: these requests wait in no queue and count against no limit."""

    def __init__(self, cluster: LiveCluster, keys: Keys) -> None:
        self._cluster, self._keys = cluster, keys

    def add_to(self, app: FastAPI) -> None:
        app.add_route("/v1/responses/{response_id}", self.pass_on, methods=["GET", "DELETE"])
        app.add_route("/v1/responses/{response_id}/{order}", self.pass_on, methods=["GET", "POST"])

    async def pass_on(self, request: Request) -> Response:
        key = self._keys.authenticate(request.headers.get("authorization"))
        response_id, order = request.path_params["response_id"], request.path_params.get("order")
        path = f"/v1/responses/{quote(response_id, safe='')}" + (f"/{quote(order, safe='')}" if order else "")
        if request.url.query:
            path += f"?{quote(request.url.query, safe='=&%+,[]')}"
        body = await request.body() or None
        asker = key if key != DOOR else None
        engine, passed = await self._cluster.routes.pass_on(response_id, asker, request.method, path, body)
        return Response(passed.body, passed.status, {ENGINE_HEADER: engine}, passed.content_type)
