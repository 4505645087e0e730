"""Parts of the document of the server's API, /openapi.json, that are not of one route: bodies, paths of engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from llmserve.forecasts.call_forecast import CallForecast
from llmserve.gateway.endpoints import ENDPOINTS, FormFile


def json_body(kind: type) -> dict[str, Any]:
    """The body of a path that reads JSON of this type, for `openapi_extra`."""
    (schema,), kinds = msgspec.json.schema_components((kind,), ref_template="{name}")
    return {"requestBody": _body("application/json", _inlined(schema, kinds))}


def engine_paths(paths: Iterable[str]) -> dict[str, Any]:
    """These paths of engines, with what this server knows of each: the engines say the rest."""
    return {path: {"post": _of_engine(path)} for path in paths}


def forecast_path(path: str) -> dict[str, Any]:
    """The path that answers with forecasts, which takes the body of any endpoint of engines."""
    endpoint = {"name": "endpoint", "in": "query", "schema": {"type": "string", "enum": list(ENDPOINTS)}}
    (schema,), kinds = msgspec.json.schema_components((CallForecast,), ref_template="{name}")
    answer = {"application/json": {"schema": _inlined(schema, kinds)}}
    operation = {
        "tags": ["forecasts"],
        "summary": "What a call would take",
        "description": "Takes the body of any endpoint of engines; no engine gets it.",
        "parameters": [{**endpoint, "description": "of which the body is; without it the body's fields say so"}],
        "requestBody": _body("application/json", {"type": "object"}),
        "responses": {"200": {"description": "The forecast", "content": answer}},
        "security": [{"client key": []}],
    }
    return {path: {"post": operation}}


def _of_engine(path: str) -> dict[str, Any]:
    media_type = "multipart/form-data" if isinstance(ENDPOINTS[path].reads, FormFile) else "application/json"
    return {
        "tags": ["engines"],
        "summary": "Answered by an engine",
        "requestBody": _body(media_type, {"type": "object"}),
        "responses": {"200": {"description": "The engine's answer"}},
    }


def _body(media_type: str, schema: Any) -> dict[str, Any]:
    return {"required": True, "content": {media_type: {"schema": schema}}}


def _inlined(schema: Any, kinds: dict[str, Any]) -> Any:
    """The schema without references to others."""
    if isinstance(schema, list):
        return [_inlined(value, kinds) for value in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(kinds[schema["$ref"]], kinds)
    return {name: _inlined(value, kinds) for name, value in schema.items()}
