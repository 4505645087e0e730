"""Responses that the front-end itself makes: JSON, and errors in OpenAI's format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from llmserve.errors import RequestError

if TYPE_CHECKING:
    from llmserve.gateway.endpoints import Endpoint


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_parts(error: RequestError, endpoint: Endpoint | None = None) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of an error's answer. endpoint : whose form it has; None: OpenAI's"""
    body = error.body() if endpoint is None else endpoint.form.error(error)
    headers = [(b"content-type", b"application/json"), *error.headers]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    return error.status, headers, msgspec.json.encode(body)


def error_response(error: RequestError) -> Response:
    status, headers, body = error_parts(error)
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})
