"""The document of the API: /openapi.json for programs, and /docs for people, which loads nothing from other hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import llmserve
from llmserve.gateway.answers import json_response
from llmserve.gateway.api_document import engine_paths, forecast_path
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.forecasting import PATH as FORECAST
from llmserve.gateway.own_routes import OwnRoute
from llmserve.live.cluster import LiveCluster
from llmserve.tenants.guards import Guard
from llmserve.web.page import HEADERS

ENGINES = "Answered by an engine, where one has the path: /openapi.json says which paths there are now."


class DocumentEndpoints:
    """Describes these routes and its own, and the paths that the engines of the cluster have."""

    def __init__(self, routes: Sequence[OwnRoute], cluster: LiveCluster, client_key: Guard) -> None:
        self._routes = tuple(routes)
        self._cluster = cluster
        self._document: dict[str, Any] | None = None
        self.routes = [
            OwnRoute("GET", "/openapi.json", self.openapi, guard=client_key, tag="documents"),
            OwnRoute("GET", "/docs", self.docs, tag="documents"),
        ]

    async def openapi(self, _: Request) -> Response:
        """This document, with the paths that the engines have now."""
        own = self._own()
        there = self._cluster.routes.having(self._cluster.fleet.handles.values())
        return json_response({**own, "paths": {**engine_paths(there), **own["paths"]}})

    async def docs(self, _: Request) -> Response:
        """The same for people."""
        return Response(_page(self._own()), media_type="text/html; charset=utf-8", headers=HEADERS)

    def _own(self) -> dict[str, Any]:
        """The document of the server's own paths, which never change."""
        if self._document is None:
            self._document = document((*self._routes, *self.routes))
            self._document["paths"] = {**forecast_path(FORECAST), **self._document["paths"]}
        return self._document


def document(routes: Iterable[OwnRoute]) -> dict[str, Any]:
    """The document of these routes, as OpenAPI has it."""
    paths: dict[str, dict[str, Any]] = {}
    shown = [route for route in routes if route.tag]
    for route in shown:
        paths.setdefault(route.path_format, {})[route.method.lower()] = route.operation()
    keys = sorted({route.guard.name for route in shown if route.guard is not None})
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmserve", "version": llmserve.__version__},
        "paths": paths,
        "components": {"securitySchemes": {key: {"type": "http", "scheme": "bearer"} for key in keys}},
    }


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
