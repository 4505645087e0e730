"""The document of the API: /openapi.json for programs, and /docs for people, which loads nothing from other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

import llmserve
from llmserve.gateway.answers import json_response
from llmserve.gateway.api_document import engine_paths, forecast_path
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.forecasting import PATH as FORECAST
from llmserve.live.cluster import LiveCluster
from llmserve.tenants.guards import Guard
from llmserve.web.page import HEADERS

ENGINES = "Answered by an engine, where one has the path: /openapi.json says which paths there are now."


class DocumentEndpoints:
    """Describes the routes of all routers, and the paths that the engines of the cluster have."""

    def __init__(self, routers: Sequence[APIRouter], cluster: LiveCluster, client_key: Guard) -> None:
        self._routers = tuple(routers)
        self._cluster = cluster
        self._document: dict[str, Any] | None = None
        self.router = router = APIRouter(tags=["documents"])
        router.add_api_route("/openapi.json", self.openapi, dependencies=[Depends(client_key)])
        router.add_api_route("/docs", self.docs)

    async def openapi(self) -> Response:
        """This document, with the paths that the engines have now."""
        own = self._own()
        there = self._cluster.routes.having(self._cluster.fleet.handles.values())
        return json_response({**own, "paths": {**engine_paths(there), **own["paths"]}})

    async def docs(self) -> Response:
        """The same for people."""
        return Response(_page(self._own()), media_type="text/html; charset=utf-8", headers=HEADERS)

    def _own(self) -> dict[str, Any]:
        """The document of the server's own paths, which never change."""
        if self._document is None:
            routes = [route for router in (*self._routers, self.router) for route in router.routes]
            document = get_openapi(title="llmserve", version=llmserve.__version__, routes=routes)
            self._document = {**document, "paths": {**forecast_path(FORECAST), **document["paths"]}}
        return self._document


def _page(document: dict[str, Any]) -> str:
    operations = [
        (operation["tags"][0], method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    operations.sort(key=lambda operation: operation[0])
    engines = "".join([_row("POST", path, "", "client key") for path in ENDPOINTS])
    sections = [f"<h2>engines</h2><p>{ENGINES}</p><table>{engines}</table>"]
    for tag, group in groupby(operations, key=lambda operation: operation[0]):
        rows = [
            _row(method, path, operation.get("description", ""), _key(operation))
            for _, method, path, operation in group
        ]
        sections.append(f"<h2>{escape(tag)}</h2><table>{''.join(rows)}</table>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>llmserve: the API</title>'
        '<link rel="stylesheet" href="/page.css"></head><body><main><h1>The API of this server</h1>'
        '<p>For programs: <a href="/openapi.json">/openapi.json</a>. Keys are needed where the server has some.</p>'
        f"{''.join(sections)}</main></body></html>"
    )


def _key(operation: dict[str, Any]) -> str:
    return ", ".join([name for scheme in operation.get("security", ()) for name in scheme])


def _row(method: str, path: str, text: str, key: str) -> str:
    cells = (f"<code>{method}</code>", f"<code>{escape(path)}</code>", escape(text), escape(key))
    return "<tr>" + "".join([f"<td>{cell}</td>" for cell in cells]) + "</tr>"
