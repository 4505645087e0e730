"""New connections to one server, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

ADDRESSES_S = 60.0  # how long the addresses of a name are remembered
NO_SOCKET = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)

Carried = TypeVar("Carried", bound=asyncio.Protocol)


class HttpError(Exception):
    """No answer, or a broken one. The message is printable, and names no server.

    refused  no process listens on the port
    local    this process has no socket left: the server is not to blame
    stale    a kept connection was closed before any byte of an answer
    large    a body is larger than its reader takes
    late     a limit of time for an answer has passed, of a request that was sent: "idle", "answer" or "probe"; "": none
    """

    def __init__(
        self,
        message: str,
        *,
        refused: bool = False,
        local: bool = False,
        stale: bool = False,
        large: bool = False,
        late: str = "",
    ) -> None:
        super().__init__(message)
        self.large = large
        self.late = late
        self.refused = refused
        self.local = local
        self.stale = stale


class Connector:
    """Connects to a port of a host within connect_s. tls : None for plain TCP.  name : in the host's certificate"""

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, connect_s: float, name: str | None = None
    ) -> None:
        self._name = name or host
        self.connect_s = connect_s
        self._host = host
        self._port = port
        self._tls = tls
        self._addresses: list[str] = []
        self._addresses_until_s = 0.0

    async def connect(self, factory: Callable[[], Carried]) -> Carried:
        """A connection and its protocol, made by `factory`. Raises HttpError."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self.connect_s
        try:
            async with asyncio.timeout_at(ends_s):
                addresses = await self._resolve()
        except OSError as error:
            raise _failed([error], self.connect_s) from error
        errors: list[OSError] = []
        for number, address in enumerate(addresses):
            try:  # each address gets its share of the time that is left
                async with asyncio.timeout((ends_s - loop.time()) / (len(addresses) - number)):
                    _, connection = await loop.create_connection(
                        factory,
                        address,
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._name if self._tls is not None else None,
                    )
            except OSError as error:
                errors.append(error)
            else:
                self._addresses = [address, *[other for other in addresses if other != address]]
                return connection
        raise _failed(errors, self.connect_s) from errors[-1]

    async def _resolve(self) -> list[str]:
        """The server's addresses, the last good one first. When the name does not resolve, those from before."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._addresses_until_s:
            return self._addresses
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError:
            if not self._addresses:
                raise
            return self._addresses
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        addresses.sort(key=lambda address: address not in self._addresses[:1])
        self._addresses, self._addresses_until_s = addresses, loop.time() + ADDRESSES_S
        return addresses


def _failed(errors: list[OSError], connect_s: float) -> HttpError:
    """The error of a connection that was not made. errors : of each address"""
    texts = [f"no connection within {connect_s:g} s" if isinstance(e, TimeoutError) else str(e) for e in errors]
    return HttpError(
        printable("; ".join(dict.fromkeys(texts))),
        refused=all(error.errno == errno.ECONNREFUSED for error in errors),
        local=any(error.errno in NO_SOCKET for error in errors),
    )


def printable(text: str, length_max: int = 300) -> str:
    """Text from outside for a line of the log or an error: what is not printable is escaped, too long a text is cut."""
    text = text if len(text) <= length_max else text[:length_max] + " ..."
    return text if text.isprintable() else repr(text)[1:-1]
