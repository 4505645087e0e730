"""Bytes of one client become requests: httptools parses, and what a head, or the framing of a body, costs is limited.

What one read brings of a body is collected before Python sees any of it, so that a body in chunks of one byte costs
little more than a body in one piece.

A wish for another protocol (`Upgrade`) is ignored (RFC 9110, 7.8). llhttp, the parser below httptools, then takes what
follows the head for that protocol's bytes: another parser gets a head without the wish, and reads the body behind that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import httptools

from llmserve.http.errors import Refusal
from llmserve.http.exchange import Exchange
from llmserve.http.heads import FIELDS_MAX, excess_of, excess_so_far, framing_of, path_and_query, unspoken

SINGLE_FIELDS = {"host", "authorization", "x-api-key"}  # another proxy may take the other one of two
LIST_FIELDS = {"x-forwarded-for", "content-encoding"}  # several are one list


class Receiver(Protocol):
    """The owner of a reader, called with what arrives."""

    def request_begins(self) -> Exchange[Any]: ...
    def head_ends(self, exchange: Exchange[Any]) -> None: ...
    def body_comes(self, exchange: Exchange[Any], part: bytes) -> None: ...
    def request_ends(self, exchange: Exchange[Any]) -> None: ...
    def malformed(self, error: Exception) -> None: ...


class RequestReader:
    """Requests of one connection, one after the other.

    exchange  the request that arrives; None: none does
    has_head  its head is complete
    deaf      the last request was complete: what comes is not looked at any more
    unheard   something was not looked at
    """

    on_body: Callable[[bytes], None]  # the parser's callback for each chunk

    def __init__(self, receiver: Receiver) -> None:
        self.exchange: Exchange[Any] | None = None
        self.has_head = self.deaf = self.unheard = False
        self._receiver = receiver
        self._parts: list[bytes] = []  # of the body, in one read of the socket
        self.on_body = self._parts.append
        self._parser = httptools.HttpRequestParser(self)
        self._headers: dict[str, str] = {}  # of the head that arrives, or fields behind a chunked body
        self._doubles = self._doubles_bytes = 0  # fields whose name was there before
        self._head_bytes = 0  # in reads that began within a head
        self._bodiless_bytes = 0  # in reads of a body that brought nothing of it
        self._framing = b""  # how long the body is, of a request that asks for another protocol

    # ---- for the connection ----

    def begin(self, nbytes: int) -> None:
        """Count bytes of a read, before `feed`."""
        if self.exchange is not None and not self.has_head:
            self._head_bytes += nbytes

    def feed(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_on(data, upgrade)
        except httptools.HttpParserError as error:
            self._fail(error)

    def end(self, nbytes: int) -> None:
        """Give what a read has brought of a request that is not complete. nbytes : of the read"""
        exchange = self.exchange
        assert exchange is not None
        if self._parts:
            self._give_body(exchange)
            self._bodiless_bytes = 0
        elif self.has_head:
            self._bodiless_bytes += nbytes
        if exchange.error is None:
            exchange.error = self.excess()

    def excess(self) -> Refusal | None:
        """Why what has come of a request is too much, although it is not complete; None: it is not."""
        if self.exchange is None:
            return None
        fields = len(self._headers) + self._doubles
        return excess_so_far(fields, self._bodiless_bytes if self.has_head else None, self._head_bytes)

    def stop(self) -> Exchange[Any] | None:
        """Read nothing more. Returns the request that was on its way."""
        exchange, self.exchange = self.exchange, None
        self.deaf, self.unheard, self.has_head, self._framing = True, True, False, b""
        return exchange

    def close(self) -> None:
        """Let go of the parser and the connection: they refer to this object."""
        self.exchange = None
        del self._parser, self._receiver

    # ---- a wish for another protocol ----

    def _feed_on(self, data: memoryview, upgrade: httptools.HttpParserUpgrade) -> None:
        """Read what is behind a head that asks for another protocol."""
        while not self.deaf:
            data = data[upgrade.args[0] :]
            if self._framing:
                self._begin_body()
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as another:
                upgrade = another
            except httptools.HttpParserError as error:
                self._fail(error)
            else:
                return
        self.unheard = self.unheard or len(data) > upgrade.args[0]

    def _begin_body(self) -> None:
        """Let a parser that has seen no wish for another protocol read the body."""
        exchange = self.exchange
        assert exchange is not None
        query = exchange.query
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % self._framing)
        self._framing, exchange.query = b"", query

    def _fail(self, error: httptools.HttpParserError) -> None:
        if self.deaf:  # bytes behind the last request
            self.unheard = True
            return
        self._parts.clear()
        self._receiver.malformed(error)

    def _give_body(self, exchange: Exchange[Any]) -> None:
        """Give what one read of the socket brought of the body."""
        parts = self._parts
        part = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if exchange.error is None:
            self._receiver.body_comes(exchange, part)

    # ---- the parser's callbacks ----

    def on_message_begin(self) -> None:
        if self._framing:
            return
        if self.deaf:
            raise EOFError("the last request was complete")  # stops the parser: see _fail
        self.exchange = exchange = self._receiver.request_begins()
        self._headers, self.has_head = exchange.headers, False
        self._head_bytes = self._doubles = self._doubles_bytes = 0

    def on_url(self, url: bytes) -> None:
        assert self.exchange is not None
        self.exchange.query += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        if key not in self._headers:
            self._headers[key] = value.rstrip().decode("latin-1")
        else:
            self._doubles += 1
            self._doubles_bytes += len(name) + len(value)
            if key in LIST_FIELDS:
                self._headers[key] += ", " + value.rstrip().decode("latin-1")
            if key in SINGLE_FIELDS and self.exchange is not None and not self.has_head:
                self.exchange.error = Refusal(400, "malformed_request", f"the request has two fields `{key}`")

    def on_headers_complete(self) -> None:
        exchange, parser = self.exchange, self._parser
        assert exchange is not None
        if self._framing:
            return
        if self._head_bytes or len(exchange.headers) + self._doubles > FIELDS_MAX:
            exchange.error = excess_of(exchange, self._doubles, self._doubles_bytes) or exchange.error
        self.has_head, self._bodiless_bytes = True, 0
        exchange.method = parser.get_method().decode("latin-1")
        exchange.path, exchange.query = path_and_query(exchange.query if exchange.method != "CONNECT" else b"*")
        version = parser.get_http_version()
        exchange.old = version == "1.0"
        exchange.keep_alive = parser.should_keep_alive() and exchange.error is None
        if exchange.error is None:
            exchange.error = unspoken(exchange, version)
        if (expected := exchange.headers.get("expect")) is not None:
            exchange.expects_continue = expected.lower() == "100-continue" and not exchange.old
        if parser.should_upgrade():
            self._framing = framing_of(exchange)
        if "transfer-encoding" in exchange.headers:
            self._headers = {}
            exchange.keep_alive = exchange.keep_alive and not exchange.old
        self._receiver.head_ends(exchange)

    def on_message_complete(self) -> None:
        if self._framing:  # the parser takes the body for another protocol's bytes
            return
        exchange = self.exchange
        assert exchange is not None
        if self._parts:
            self._give_body(exchange)
        self.exchange, self.has_head, self.deaf = None, False, not exchange.keep_alive
        exchange.complete()
        self._receiver.request_ends(exchange)
