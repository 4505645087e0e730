"""What the head of a request says: where it goes, how long the body is, and what of it is not spoken here."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import httptools

from llmserve.http.errors import Refusal
from llmserve.http.exchange import Exchange

HEAD_BYTES_MAX = 64 << 10
FIELDS_MAX = 100
VERSIONS = ("1.0", "1.1")
_SLASHES = re.compile(rb"//+")


def path_and_query(target: bytes) -> tuple[str, bytes]:
    """The decoded path and the query of a request's target, which may be a URL, or `*`. Raises HttpParserError."""
    if not target.startswith(b"/") or b"#" in target:
        url = httptools.parse_url(target) if target != b"*" else None
        target = (url.path or b"/") + (b"?" + url.query if url.query else b"") if url is not None else b"*"
    path, _, query = target.partition(b"?")
    if b"//" in path or path.endswith(b"/"):
        path = _plain(path)
    return path.decode("latin-1") if b"%" not in path else unquote(path.decode("latin-1")), query


def _plain(path: bytes) -> bytes:
    """The path as most servers read it: with single slashes, and without one at its end. Before %2F is decoded."""
    if b"//" in path:
        path = _SLASHES.sub(b"/", path)
    return path[:-1] if len(path) > 1 and path.endswith(b"/") else path


def framing_of(exchange: Exchange[Any]) -> bytes:
    """The line of a head that says how long the body is; empty: there is no body."""
    if "transfer-encoding" in exchange.headers:
        return b"transfer-encoding: chunked"
    length = exchange.headers.get("content-length", "0")
    return f"content-length: {length}".encode() if length.strip("0") else b""


def unspoken(exchange: Exchange[Any], version: str) -> Refusal | None:
    """Why the request cannot be understood to its end; None: it can. Then nothing behind it is read, either."""
    coding = exchange.headers.get("transfer-encoding", "chunked")
    if version not in VERSIONS:
        refusal = Refusal(400, "http_version", f"this server speaks HTTP/1.1, not HTTP/{version}")
    elif exchange.method == "CONNECT":
        refusal = Refusal(405, "method_not_allowed", "CONNECT is for proxies")
    elif coding.lower() != "chunked":
        refusal = Refusal(400, "transfer_encoding", f"`transfer-encoding`: must be chunked, not {coding}")
    else:
        return None
    exchange.keep_alive = False
    return refusal


def excess_of(exchange: Exchange[Any], doubles: int, doubles_bytes: int) -> Refusal | None:
    """What makes a head too large. doubles : fields whose name was there before, of so many bytes"""
    headers = exchange.headers
    if len(headers) + doubles > FIELDS_MAX:
        return _too_many_fields()
    head_bytes = sum([len(name) + len(value) for name, value in headers.items()], doubles_bytes)
    return _head_too_large() if head_bytes + len(exchange.query) > HEAD_BYTES_MAX else None


def excess_so_far(fields: int, bodiless_bytes: int | None, head_bytes: int) -> Refusal | None:
    """What is too much of a request that is not complete.

    bodiless_bytes : that came of the body without a byte of content; None: the head is not complete
    """
    if bodiless_bytes is not None:
        if bodiless_bytes > HEAD_BYTES_MAX or fields > 2 * FIELDS_MAX:
            return Refusal(400, "malformed_request", "the body has more around its chunks than in them")
    elif fields > FIELDS_MAX:
        return _too_many_fields()
    elif head_bytes > HEAD_BYTES_MAX:
        return _head_too_large()
    return None


def _too_many_fields() -> Refusal:
    return Refusal(431, "head_too_large", f"the head of the request has more than {FIELDS_MAX} fields")


def _head_too_large() -> Refusal:
    return Refusal(431, "head_too_large", f"the head of the request is larger than {HEAD_BYTES_MAX:,} bytes")


def too_large(exchange: Exchange[Any], bytes_max: int) -> Refusal:
    """bytes_max : of a body that a handler reads"""
    if exchange.keeps_body:
        return Refusal(413, "body_too_large", f"the body is larger than {bytes_max:,} bytes")
    return Refusal(413, "body_not_read", f"{exchange.method} {exchange.path} takes no body, and this one is large")
