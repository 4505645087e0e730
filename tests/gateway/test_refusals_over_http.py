"""What clients are told of the requests that the HTTP server refuses."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import llmserve.http
from llmserve.errors import BadRequest, BodyTooLarge, RequestError, Unavailable
from llmserve.gateway.answers import REFUSALS, error_of, error_parts
from llmserve.http.errors import Refusal


@pytest.mark.parametrize(
    ("refusal", "kind", "code", "message"),
    [
        (Refusal(400, "http_version", "not HTTP/2"), BadRequest, "http_version", "not HTTP/2"),
        (Refusal(413, "body_too_large", "too large"), BodyTooLarge, "body_too_large", "too large (--body-bytes-max)"),
        (Refusal(413, "body_not_read", "GET / takes no body"), BodyTooLarge, "body_too_large", "GET / takes no body"),
        (Refusal(503, "buffers_full", "too many"), Unavailable, "buffers_full", "too many (--buffers-bytes-max)"),
    ],
)
def test_a_refusal_is_an_error_that_names_the_setting_that_allows_more(
    refusal: Refusal, kind: type[RequestError], code: str, message: str
) -> None:
    error = error_of(refusal)
    assert (type(error), error.code, error.message) == (kind, code, message)


def test_when_a_client_may_try_again_is_told() -> None:
    _, headers, _ = error_parts(error_of(Refusal(503, "draining", "no", retry_after_s=1.0)))
    assert (b"retry-after", b"1") in headers


def test_each_status_with_which_the_http_server_refuses_has_an_error() -> None:
    calls = [
        node
        for path in Path(llmserve.http.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refusal"
    ]
    statuses = {ast.literal_eval(call.args[0]) for call in calls}
    assert statuses == set(REFUSALS)
