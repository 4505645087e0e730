"""Asks a running server for commands that look at it from outside."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Mapping
from urllib.parse import quote, urljoin, urlsplit

from llmserve.errors import ConfigError, NoAnswer
from llmserve.http.client import HttpClient, WholeAnswer
from llmserve.http.connecting import HttpError

ANSWER_S = 10.0
REDIRECTS = (301, 302, 303, 307, 308)
REDIRECTS_MAX = 10
TOLD_BYTES_MAX = 1000  # of an answer's body in an error


def ask(url: str, path: str, key: str | None, refusals: Mapping[int, str], method: str = "GET") -> bytes:
    """The body of a path of the server at `url`, never by a proxy.

    refusals : by status: why the server refuses, for the user.
    Raises ConfigError for a bad URL and for these refusals, NoAnswer for everything else.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"the URL of the server must begin with http:// or https://, not {url!r}")
    address = url.rstrip("/").removesuffix("/v1") + path
    try:
        answer = asyncio.run(_answer(address, method, {"authorization": f"Bearer {key}"} if key else {}))
    except (HttpError, ValueError) as error:
        refused = isinstance(error, HttpError) and error.refused
        reason = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)) if refused else error
        raise NoAnswer(f"{url} does not answer: {reason}") from error
    if answer.status in refusals:
        raise ConfigError(f"{url} {refusals[answer.status]}")
    if not 200 <= answer.status < 300:
        told = answer.body[:TOLD_BYTES_MAX].decode(errors="replace")
        raise NoAnswer(f"{address} answers with status {answer.status}: {told}")
    return answer.body


async def _answer(address: str, method: str, headers: Mapping[str, str]) -> WholeAnswer:
    """The answer to a request, after redirections if it only reads. Raises HttpError or ValueError."""
    for _ in range(REDIRECTS_MAX):
        parts = urlsplit(address)
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (f"?{parts.query}" if parts.query else "")
        base = f"{parts.scheme}://{parts.netloc}"
        async with HttpClient(base, connect_s=ANSWER_S, idle_s=ANSWER_S, answer_s=float("inf")) as client:
            answer = await client.answer(method, path, headers)
        place = answer.headers.get(b"location")
        if method != "GET" or answer.status not in REDIRECTS or place is None:
            return answer
        address = urljoin(address, place.decode("latin-1"))
    return answer
