"""One client's connection: HTTP/1.1 requests are parsed by httptools, and answered one after the other.

The connection holds a client to its limits before anything is made of a request:

head    64 KiB and 100 fields at most, complete within 10 s
body    the size that the handler allows, complete within 60 s; an upload: 60 s without a byte at most
answer  written as the client reads; a client that reads nothing for a while is cut off (Server.sweep)

A client may close its sending side after a request and is still answered. A client that has gone altogether looks the
same at first: an interim answer (100 Continue) makes its machine say so.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from email.utils import formatdate
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

import httptools

from llmserve.api.exchange import Exchange
from llmserve.api.streamed import BODY_S, pass_on
from llmserve.errors import BadRequest, BodyTooLarge, HeadTooLarge, RequestError, RequestTimeout, Unavailable

if TYPE_CHECKING:
    from llmserve.api.listening import Server

HEAD_BYTES_MAX = 64 << 10
FIELDS_MAX = 100
HEAD_S = 10.0
KEEP_ALIVE_S = 75.0
LINGER_S = 2.0  # a refused client may still send: without this wait its system would drop the refusal
GONE_CHECK_S = 0.02  # an interim answer's way to the client and back, at least
TCP_CLOSE = 7  # state of a socket in Linux's TCP_INFO whose other side has reset the connection


class Connection(asyncio.Protocol):
    """Parses requests, and gives each to the server's handler when its turn has come."""

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self.server = server
        self.peer = ""
        self.paused = False
        self.written = 0  # bytes in all answers so far
        self.sent = 0  # bytes that the client's system had taken at the last look
        self.progress_s = 0.0  # time of the last progress
        self.due_s = math.inf  # when what the client owes must be complete
        self._heard = -1  # bytes written when the silence of a stream began; -1: no stream is served
        self._quiet_since_s = 0.0
        self._parser = httptools.HttpRequestParser(self)
        self._head_bytes = self._fields = self._field_bytes = 0
        self._reading: Exchange | None = None  # the request that arrives
        self._has_head = False
        self._serving: Exchange | None = None
        self._waiting: deque[Exchange] = deque()  # complete requests behind the one that is served
        self._deaf = False  # what the client sends is not looked at any more
        self._half_closed = False
        self._closed = False
        self._resumed: asyncio.Future[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is served or has a head: then the connection may be closed."""
        return self._serving is None and not self._has_head

    # ---- the transport's callbacks ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=self.server.limits.buffer_bytes_max)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if peer else ""
        self.due_s = self.server.now_s() + HEAD_S
        self.server.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # the request is answered as if it had not asked for another protocol
            self.close_when_answered()
            return
        except httptools.HttpParserError as error:
            self.server.malformed(self.peer, error)
            self._refuse_reading(BadRequest("the request is not HTTP/1.1", code="malformed_request"))
            return
        reading = self._reading
        if reading is None:
            return
        if reading.error is None and not self._has_head and self._head_bytes > HEAD_BYTES_MAX:
            reading.error = HeadTooLarge(f"the head of the request is larger than {HEAD_BYTES_MAX:,} bytes")
        if reading.error is not None:
            self._refuse_reading(reading.error)

    def eof_received(self) -> bool:
        """Keep the connection open while a request is served."""
        if self._serving is None or self._serving.old or self._deaf:
            return False
        self._half_closed = True
        self._ask_whether_gone()
        return True

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self.paused = False
        self._wake()
        self.server.closed(self)
        del self._parser  # a cycle of references would keep both until the next full garbage collection
        for exchange in (self._serving, *self._waiting, self._reading):
            if exchange is not None:
                exchange.gone()

    # ---- the parser's callbacks ----

    def on_message_begin(self) -> None:
        self._reading = Exchange(self)
        self._has_head = False
        self._fields = self._field_bytes = 0
        if self._serving is None:
            self.due_s = self.server.now_s() + HEAD_S

    def on_url(self, url: bytes) -> None:
        assert self._reading is not None
        self._reading.query += url

    def on_header(self, name: bytes, value: bytes) -> None:
        reading = self._reading
        assert reading is not None
        self._fields += 1
        self._field_bytes += len(name) + len(value)
        if self._fields > FIELDS_MAX:
            reading.error = HeadTooLarge(f"the head of the request has more than {FIELDS_MAX} fields")
        elif self._field_bytes > HEAD_BYTES_MAX:
            reading.error = HeadTooLarge(f"the head of the request is larger than {HEAD_BYTES_MAX:,} bytes")
        else:
            reading.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        reading, parser = self._reading, self._parser
        assert reading is not None
        self._has_head, self._head_bytes = True, 0
        reading.method = parser.get_method().decode("latin-1")
        target = reading.query
        if not target.startswith(b"/") or b"#" in target:
            url = httptools.parse_url(target) if target != b"*" else None
            target = (url.path or b"/") + (b"?" + url.query if url.query else b"") if url is not None else b"*"
        path, _, reading.query = target.partition(b"?")
        reading.path = path.decode("latin-1") if b"%" not in path else unquote(path.decode("latin-1"))
        reading.old = parser.get_http_version() == "1.0"
        reading.keep_alive = parser.should_keep_alive()
        if reading.error is None:
            reading.error = self._refusal(reading)
        else:
            reading.keep_alive = False
        if reading.error is None and reading.headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.due_s = self.server.now_s() + BODY_S if self._serving is None else math.inf

    def _refusal(self, reading: Exchange) -> RequestError | None:
        limit = self.server.limits.body_bytes_max
        length = reading.headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > limit and reading.path not in self.server.limits.streamed:
            return BodyTooLarge(f"the body is larger than {limit:,} bytes")
        try:
            self.server.handler.admit(reading)
        except RequestError as error:
            return error
        return None

    def on_body(self, part: bytes) -> None:
        reading, server = self._reading, self.server
        assert reading is not None
        if reading.error is not None:
            return
        if reading.upload is not None:
            pass_on(self, reading, part)
            return
        reading.read += len(part)
        server.body_bytes += len(part)
        if reading.read > server.limits.body_bytes_max:
            reading.error = BodyTooLarge(f"the body is larger than {server.limits.body_bytes_max:,} bytes")
        elif server.buffered_bytes > server.limits.buffers_bytes_max:
            reading.error = Unavailable("too many bytes are in flight", code="buffers_full", retry_after_s=1.0)
        else:
            reading.add_body(part)

    def on_message_complete(self) -> None:
        reading, self._reading = self._reading, None
        assert reading is not None
        self._has_head = False
        reading.complete()
        self._queue(reading)

    # ---- one request after the other ----

    def _queue(self, exchange: Exchange) -> None:
        if self._serving is None:
            self._serve(exchange)
        else:
            self._waiting.append(exchange)
            self.transport.pause_reading()

    def _serve(self, exchange: Exchange) -> None:
        self._serving, self.due_s = exchange, math.inf
        self.server.busy(self)
        if exchange.error is not None:
            self.server.handler.refused(exchange, exchange.error)
            exchange.refuse(exchange.error)
        else:
            self.server.handler.handle(exchange)

    def _refuse_reading(self, error: RequestError) -> None:
        """Refuse the request that arrives without waiting for its rest, and read nothing more."""
        reading, self._reading = self._reading or Exchange(self), None
        self._deaf, self._has_head = True, False
        reading.error, reading.keep_alive = error, False
        self._queue(reading)

    def answered(self, exchange: Exchange) -> None:
        """Go on with the next request after the end of an answer."""
        if self._closed or exchange is not self._serving:
            return
        self._serving = None
        if not exchange.keep_alive or (self.server.closing and not self._waiting):
            self._close_softly()
        elif self._waiting:
            asyncio.get_running_loop().call_soon(self._serve_next)
        elif self._half_closed:
            self.transport.close()
        else:
            self.due_s = self.server.now_s() + KEEP_ALIVE_S
            self.server.idled(self)

    def _serve_next(self) -> None:
        if self._waiting and self._serving is None and not self._closed:
            following = self._waiting.popleft()
            if not self._waiting:
                self.transport.resume_reading()
            self._serve(following)

    # ---- the end of the connection ----

    def close_when_answered(self) -> None:
        """Close now if no request is served, else after the last answer. A body on its way is refused."""
        if self._reading is not None and self._has_head:
            self._refuse_reading(Unavailable("the server is shutting down", code="draining", retry_after_s=1.0))
        elif self._serving is None:
            self.transport.close()
        else:
            (self._waiting[-1] if self._waiting else self._serving).keep_alive = False

    def _close_softly(self) -> None:
        """Close after the client has got the last bytes, although it may still be sending."""
        if not self._deaf or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.resume_reading()
        self.transport.write_eof()
        self.due_s = self.server.now_s() + LINGER_S

    def overdue(self) -> str:
        """Close because the client is late. Returns what was late."""
        self.due_s = math.inf
        if self._reading is not None:
            late = "body" if self._has_head else "head"
            self._refuse_reading(RequestTimeout(f"the {late} of the request did not arrive in time"))
            return f"slow_{late}"
        self.transport.close()
        return "idle"

    def abort(self) -> None:
        self.transport.abort()

    def check_gone(self) -> None:
        """Close if the client that has closed its sending side has gone altogether."""
        if not self._half_closed or self._closed:
            return
        sock = self.transport.get_extra_info("socket")
        try:
            gone = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE
        except (OSError, AttributeError):  # no TCP, or not Linux: a closed side counts as gone
            gone = True
        if gone:
            self.transport.abort()

    def _ask_whether_gone(self) -> None:
        if self._serving is not None and not self._serving.started:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self._serving is not None and self._serving.on_silence is not None:
            self._serving.on_silence()
        loop = asyncio.get_running_loop()
        for pauses in (1, 10):
            loop.call_later(pauses * GONE_CHECK_S, self.check_gone)

    # ---- writing ----

    def write(self, data: bytes) -> None:
        if not self._closed:
            self.written += len(data)
            self.transport.write(data)

    def break_silence(self, now_s: float, after_s: float) -> None:
        """Write a comment into the stream that is served, if nothing was written for `after_s`."""
        on_silence = self._serving.on_silence if self._serving is not None else None
        if on_silence is None:
            self._heard = -1
        elif self.written != self._heard:
            self._heard, self._quiet_since_s = self.written, now_s
        elif now_s - self._quiet_since_s >= after_s:
            on_silence()
            self._heard, self._quiet_since_s = self.written, now_s

    async def writable(self) -> None:
        while self.paused and not self._closed:
            if self._resumed is None or self._resumed.done():
                self._resumed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._resumed)

    def _wake(self) -> None:
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)


def http_date() -> bytes:
    return formatdate(usegmt=True).encode()
