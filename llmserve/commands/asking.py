"""Asks a running server for commands that look at it from outside."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

from llmserve.errors import ConfigError, NoAnswer

ANSWER_S = 10.0


def get(url: str, path: str, key: str | None, refusals: Mapping[int, str]) -> bytes:
    """The body of a path of the server at `url`, never by a proxy.

    refusals : by status: why the server refuses, for the user.
    Raises ConfigError for a bad URL and for these refusals, NoAnswer for everything else.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"the URL of the server must begin with http:// or https://, not {url!r}")
    address = url.rstrip("/").removesuffix("/v1") + path
    request = urllib.request.Request(address, headers={"authorization": f"Bearer {key}"} if key else {})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=ANSWER_S) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        if error.code in refusals:
            raise ConfigError(f"{url} {refusals[error.code]}") from error
        raise NoAnswer(f"{address} answers with status {error.code}") from error
    except (OSError, ValueError) as error:  # a URLError is an OSError
        raise NoAnswer(f"{url} does not answer: {getattr(error, 'reason', error)}") from error
