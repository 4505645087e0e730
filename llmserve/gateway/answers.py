"""Responses that the front-end itself makes: JSON, and errors in OpenAI's format."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

from llmserve.calls.client_request import ClientExchange
from llmserve.errors import (
    BadRequest,
    BodyTooLarge,
    HeadTooLarge,
    MethodNotAllowed,
    RequestError,
    RequestTimeout,
    Unavailable,
)
from llmserve.http.errors import Refusal
from llmserve.http.exchange import Answer
from llmserve.wire.answer_forms import AnswerForm

log = logging.getLogger("llmserve")

REFUSALS = {
    kind.status: kind
    for kind in (BadRequest, MethodNotAllowed, RequestTimeout, BodyTooLarge, HeadTooLarge, Unavailable)
}
SETTINGS = {"body_too_large": "--body-bytes-max", "buffers_full": "--buffers-bytes-max"}
"""Which setting allows more, by the reason of a refusal."""
CODES = {"body_not_read": "body_too_large"}
"""Reasons that clients know by another code."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_parts(error: RequestError, form: AnswerForm | None = None) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of an error's answer. form : None: OpenAI's"""
    body = error.body() if form is None else form.error(error)
    headers = [(b"content-type", b"application/json"), *error.headers]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    return error.status, headers, msgspec.json.encode(body)


def error_response(error: RequestError) -> Response:
    status, headers, body = error_parts(error)
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})


def error_of(refusal: Refusal) -> RequestError:
    """The error that a client gets for what the HTTP server refuses."""
    setting = SETTINGS.get(refusal.reason)
    return REFUSALS[refusal.status](
        f"{refusal.message} ({setting})" if setting is not None else refusal.message,
        code=CODES.get(refusal.reason, refusal.reason),
        retry_after_s=refusal.retry_after_s,
    )


class Refusals:
    """What clients are told of errors. count : called with the code of each request that is refused"""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count

    def answer(self, error: Exception, exchange: ClientExchange | None) -> Answer:
        """The answer to a request that is refused; it is counted, if it was one."""
        if exchange is None:
            assert isinstance(error, Refusal), "only connections are refused without a request"
            return error_parts(error_of(error))
        known = self.known(error, exchange.method, exchange.path, exchange.state.key)
        if not exchange.started:
            exchange.state.error = known
        return error_parts(known, exchange.state.form)

    def known(self, error: Exception, method: str, path: str, key: str = "") -> RequestError:
        """Count a refusal. An error that is not meant for clients is logged, and becomes one that is."""
        if isinstance(error, Refusal):
            error = error_of(error)
        if not isinstance(error, RequestError):
            log.error("%s %s failed", method, path, exc_info=error, extra={"fields": {"key": key} if key else {}})
            error = RequestError("the front-end failed on this request", code="internal_error")
        self._count(error.code or error.type)
        return error
