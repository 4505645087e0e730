"""What web pages may do on a server without keys: as little as on one with keys.

Any page that somebody opens may send requests to that person's own machine. It cannot read the answers, but they cost
an engine's time, and a deletion needs no reading. And a page whose name suddenly leads to this machine (DNS rebinding)
is of the same origin: it reads, too. Programs send neither an Origin nor Sec-Fetch-Site, and are not affected.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from llmserve.errors import Forbidden
from llmserve.http.exchange import Exchange

SAFE = ("GET", "HEAD", "OPTIONS")  # without effect, and no page of another origin reads their answers
LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".localdomain", ".test")
KNOWN_MAX = 1024


class Browsers:
    """origins : whose pages may call; `*`: all.  hosts : further names of this server; `*`: any

    on_loopback : whether the server listens on loopback only, so that nobody but this machine has names for it
    """

    def __init__(self, origins: Iterable[str], hosts: Iterable[str], *, on_loopback: bool) -> None:
        self._origins = frozenset(origins)
        own = {host.lower() for host in hosts} | {_name_of(urlsplit(origin).netloc) for origin in self._origins}
        self._hosts = frozenset(own)
        self._checks_hosts = on_loopback and "*" not in self._hosts and "*" not in self._origins
        self._known: set[str] = set()  # hosts that have passed

    def check(self, exchange: Exchange[Any]) -> None:
        """Raises Forbidden."""
        headers = exchange.headers
        host = headers.get("host", "")
        if self._checks_hosts and host and host not in self._known:
            self._check_host(host)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if (origin is None and site is None) or exchange.method in SAFE or site in ("same-origin", "none"):
            return
        if "*" in self._origins or origin in self._origins:
            return
        if site is None and origin is not None and urlsplit(origin).netloc in (host, headers.get("x-forwarded-host")):
            return  # browsers tell the site to https and to loopback only
        raise Forbidden(
            f"pages of {(origin or 'other sites')[:256]} may not call this server: --cors-origin allows it",
            code="origin_not_allowed",
        )

    def _check_host(self, host: str) -> None:
        name = _name_of(host)
        if name not in self._hosts and not _is_local(name):
            raise Forbidden(
                f"{name[:256]!r} is no name of this server, which listens on loopback without keys: --allowed-host "
                "allows the name, --api-key-file all names",
                code="host_not_allowed",
            )
        if len(self._known) < KNOWN_MAX:
            self._known.add(host)


def _name_of(host: str) -> str:
    """The name or address, of what stands in `Host`, without the port."""
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _is_local(name: str) -> bool:
    """Whether no public name server can lead a page to this name: an address, or a name of a local network."""
    if "." not in name and ":" not in name:
        return True
    if name.endswith(LOCAL_SUFFIXES):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
