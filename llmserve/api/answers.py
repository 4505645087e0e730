"""Responses that the front-end itself makes: JSON, and errors in OpenAI's format."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from llmserve.errors import RequestError


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_response(error: RequestError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return json_response(error.body(), error.status, headers)
