"""What the head of a request says: where it goes, how long the body is, and what of it is not spoken here."""

from __future__ import annotations

from urllib.parse import unquote

import httptools

from llmserve.errors import BadRequest, BodyTooLarge, HeadTooLarge, MethodNotAllowed, RequestError
from llmserve.gateway.paths import plain
from llmserve.http.exchange import Exchange

HEAD_BYTES_MAX = 64 << 10
FIELDS_MAX = 100
VERSIONS = ("1.0", "1.1")


def path_and_query(target: bytes) -> tuple[str, bytes]:
    """The decoded path and the query of a request's target, which may be a URL, or `*`. Raises HttpParserError."""
    if not target.startswith(b"/") or b"#" in target:
        url = httptools.parse_url(target) if target != b"*" else None
        target = (url.path or b"/") + (b"?" + url.query if url.query else b"") if url is not None else b"*"
    path, _, query = target.partition(b"?")
    if b"//" in path or path.endswith(b"/"):
        path = plain(path)
    return path.decode("latin-1") if b"%" not in path else unquote(path.decode("latin-1")), query


def framing_of(reading: Exchange) -> bytes:
    """The line of a head that says how long the body is; empty: there is no body."""
    if "transfer-encoding" in reading.headers:
        return b"transfer-encoding: chunked"
    length = reading.headers.get("content-length", "0")
    return f"content-length: {length}".encode() if length.strip("0") else b""


def unspoken(reading: Exchange, version: str) -> RequestError | None:
    """Why the request cannot be understood to its end; None: it can. Then nothing behind it is read, either."""
    coding = reading.headers.get("transfer-encoding", "chunked")
    error: RequestError
    if version not in VERSIONS:
        error = BadRequest(f"this server speaks HTTP/1.1, not HTTP/{version}", code="http_version")
    elif reading.method == "CONNECT":
        error = MethodNotAllowed("CONNECT is for proxies")
    elif coding.lower() != "chunked":
        error = BadRequest(f"`transfer-encoding`: must be chunked, not {coding}", code="transfer_encoding")
    else:
        return None
    reading.keep_alive = False
    return error


def excess_of(reading: Exchange, doubles: int, doubles_bytes: int) -> RequestError | None:
    """What makes a head too large. doubles : fields whose name was there before, of so many bytes"""
    headers = reading.headers
    if len(headers) + doubles > FIELDS_MAX:
        return HeadTooLarge(f"the head of the request has more than {FIELDS_MAX} fields")
    head_bytes = sum([len(name) + len(value) for name, value in headers.items()], doubles_bytes)
    if head_bytes + len(reading.query) > HEAD_BYTES_MAX:
        return HeadTooLarge(f"the head of the request is larger than {HEAD_BYTES_MAX:,} bytes")
    return None


def excess_so_far(fields: int, bodiless_bytes: int | None, head_bytes: int) -> RequestError | None:
    """What is too much of a request that is not complete.

    bodiless_bytes : that came of the body without a byte of content; None: the head is not complete
    """
    if bodiless_bytes is not None:
        if bodiless_bytes > HEAD_BYTES_MAX or fields > 2 * FIELDS_MAX:
            return BadRequest("the body has more around its chunks than in them", code="malformed_request")
    elif fields > FIELDS_MAX:
        return HeadTooLarge(f"the head of the request has more than {FIELDS_MAX} fields")
    elif head_bytes > HEAD_BYTES_MAX:
        return HeadTooLarge(f"the head of the request is larger than {HEAD_BYTES_MAX:,} bytes")
    return None


def too_large(reading: Exchange, bytes_max: int) -> BodyTooLarge:
    """bytes_max : of a body that a handler reads"""
    if reading.keeps_body:
        return BodyTooLarge(f"the body is larger than {bytes_max:,} bytes (--body-bytes-max)")
    return BodyTooLarge(f"{reading.method} {reading.path} takes no body, and this one is large")
