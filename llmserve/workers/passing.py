"""Requests for the server itself pass through a relay: the scheduler process answers them, one on each connection.

The head is written anew; the body and the answer pass as they come, at the pace of who reads them. A connection carries
one such request, and closes behind the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import cast
from urllib.parse import quote

from llmserve.calls.client_request import ClientExchange
from llmserve.errors import Unavailable
from llmserve.gateway.answers import Refusals
from llmserve.http.exchange import Answer
from llmserve.http.proxies import HEADER as FORWARDED

HOP_HEADERS = frozenset(("connection", "expect", "keep-alive", "te", "trailer", "upgrade", FORWARDED))
PATH_SAFE = "/%:@!$&'()*+,;=~"
PENDING_BYTES_MAX = 256 << 10  # of a body, while the connection is made
EARLY_BYTES_MAX = 64 << 10  # of an answer that comes before the whole body has


class Answered(Exception):
    """The scheduler process has answered before the body was complete. raw : its answer"""

    def __init__(self, raw: bytes) -> None:
        super().__init__("answered early")
        self.raw = raw

    @property
    def answer(self) -> Answer:
        head, _, body = self.raw.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        fields = [line.split(b": ", 1) for line in lines if b": " in line]
        dropped = (b"connection", b"content-length", b"date", b"transfer-encoding")
        headers = [(name.lower(), value) for name, value in fields if name.lower() not in dropped]
        return int(first.split(b" ")[1]), headers, body


class Passing(asyncio.Protocol):
    """One request on its way to the scheduler process; see exchange.BodySink."""

    def __init__(self, exchange: ClientExchange, path: str) -> None:
        self.on_full: Callable[[bool], None] | None = None
        self._exchange = exchange
        self._chunked = "content-length" not in exchange.headers and "transfer-encoding" in exchange.headers
        self._transport: asyncio.Transport | None = None
        self._pending = [_head_of(exchange)]
        self._pending_bytes = 0
        self._complete = self._closed = self._full = False
        self._early = b""
        self._ended = False  # the answer is there as a whole
        exchange.on_gone = self.discard
        self._connecting = asyncio.get_running_loop().create_task(self._connect(path))

    async def _connect(self, path: str) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, path)
        except OSError:
            self._lost()

    # ---- the request ----

    def feed(self, data: bytes) -> Exception | None:
        if self._early:
            return Answered(self._early)
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return None

    def complete(self) -> None:
        """Take note that the whole body was fed."""
        self._complete = True
        if self._chunked:
            self._write(b"0\r\n\r\n")
        if self._early:
            early, self._early = self._early, b""
            self._pass(early)
        if self._ended:
            self._end()

    def discard(self) -> None:
        self._closed = True
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            return
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes > PENDING_BYTES_MAX:
            self._hold(True)

    def _hold(self, full: bool) -> None:
        if full != self._full and self.on_full is not None:
            self._full = full
            self.on_full(full)

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._closed:
            self._transport.close()
            return
        self._transport.write(b"".join(self._pending))
        self._pending.clear()
        self._hold(False)

    def pause_writing(self) -> None:
        self._hold(True)

    def resume_writing(self) -> None:
        self._hold(False)

    def data_received(self, data: bytes) -> None:
        if self._complete:
            self._pass(data)
        elif len(self._early) < EARLY_BYTES_MAX:
            self._early += data
            self._hold(False)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost()

    def _lost(self) -> None:
        self._ended = True
        if self._closed:
            return
        if self._complete or not self._early:
            self._end()

    def _pass(self, data: bytes) -> None:
        exchange, transport = self._exchange, self._transport
        if not exchange.ended and exchange.pass_on(data) and transport is not None:
            transport.pause_reading()
            exchange.when_writable(partial(_resume, transport))

    def _end(self) -> None:
        exchange = self._exchange
        if exchange.ended:
            return
        if exchange.started:
            exchange.end()
        elif self._complete:
            exchange.refuse(Unavailable("the server starts again", code="restarting", retry_after_s=1.0))
        else:
            raw = b"HTTP/1.1 503 \r\nretry-after: 1\r\n\r\n"
            self._early = raw


class PassedOn:
    """Passes every request on; see app.OwnSite. path : of the scheduler process's socket"""

    def __init__(self, path: str, refusals: Refusals) -> None:
        self._path, self._refusals = path, refusals

    def enter(self, exchange: ClientExchange) -> None:
        exchange.sink = Passing(exchange, self._path)

    def handle(self, exchange: ClientExchange) -> None:
        assert isinstance(exchange.sink, Passing)
        exchange.sink.complete()

    def refusal(self, error: Exception, exchange: ClientExchange | None) -> Answer:
        return error.answer if isinstance(error, Answered) else self._refusals.answer(error, exchange)

    def methods(self, path: str) -> tuple[str, ...]:
        return ()


def _resume(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.resume_reading()


def _head_of(exchange: ClientExchange) -> bytes:
    target = quote(exchange.path, safe=PATH_SAFE).encode()
    if exchange.query:
        target += b"?" + exchange.query
    lines = [b"%b %b HTTP/1.1" % (exchange.method.encode(), target)]
    for name, value in exchange.headers.items():
        if name not in HOP_HEADERS:
            lines.append(b"%b: %b" % (name.encode("latin-1"), value.encode("latin-1")))
    before = exchange.headers.get(FORWARDED)
    client = f"{before}, {exchange.address}" if before else exchange.address
    lines += [b"%b: %b" % (FORWARDED.encode(), client.encode("latin-1")), b"connection: close", b"", b""]
    return b"\r\n".join(lines)
