"""Asks a running server for commands that look at it from outside."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urljoin, urlsplit

from llmserve.errors import ConfigError, NoAnswer
from llmserve.http.client import HttpClient, WholeAnswer
from llmserve.http.connecting import HttpError
from llmserve.tenants.key_file import read_key_to_send

ANSWER_S = 10.0
REDIRECTS = (301, 302, 303, 307, 308)
REDIRECTS_MAX = 10
TOLD_BYTES_MAX = 1000  # of an answer's body in an error
URL = "http://127.0.0.1:8000"
NEEDS_KEY = {401: "refuses the key: give --key-file FILE"}


def add_server(parser: argparse.ArgumentParser, *, what: str = "", own_flags: bool = True) -> None:
    """Add the flags that name a server and a key, alike in all commands. what : for which actions, with a colon

    own_flags : the command has no flags of `serve`, so that --admin-key-file may mean the same as --key-file
    """
    parser.add_argument("--url", metavar="URL", default=URL, help=f"{what}address of the server (default: {URL})")
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help=f"{what}file whose first key is sent; the server's own file will do",
    )
    if own_flags:
        parser.add_argument("--admin-key-file", type=Path, dest="key_file", help=argparse.SUPPRESS)  # as it was called


def key_of(args: argparse.Namespace) -> str | None:
    """The key that is sent; None: none. Raises ConfigError for a bad file."""
    return read_key_to_send(args.key_file) if args.key_file is not None else None


class Place:
    """A line of the terminal that says what is waited for, until something else is to be printed."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, text: str) -> None:
        if sys.stderr.isatty() and text:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False


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
