"""One client's connection: HTTP/1.1 requests are parsed by httptools, and answered one after the other.

The connection holds a client to its limits before anything is made of a request:

head    64 KiB and 100 fields at most, complete within 10 s
body    the size that the handler allows, complete within 60 s
answer  written as the client reads; a client that reads nothing for a while is cut off (Server.sweep)

A client may close its sending side after a request and is still answered. A client that has gone altogether looks the
same at first: an interim answer (100 Continue) makes its machine say so.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from collections.abc import Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

import httptools

from llmserve.api.answers import error_parts
from llmserve.errors import BadRequest, BodyTooLarge, HeadTooLarge, RequestError, RequestTimeout, Unavailable

if TYPE_CHECKING:
    from llmserve.api.listening import Server

HEAD_BYTES_MAX = 64 << 10
FIELDS_MAX = 100
HEAD_S = 10.0
BODY_S = 60.0
KEEP_ALIVE_S = 75.0
LINGER_S = 2.0  # a refused client may still send: without this wait its system would drop the refusal
GONE_CHECK_S = 0.02  # an interim answer's way to the client and back, at least
TCP_CLOSE = 7  # state of a socket in Linux's TCP_INFO whose other side has reset the connection
Headers = Iterable[tuple[bytes, bytes]]
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
CONTROL = bytes([*range(32), 127])
NO_BODY = (204, 304)


class Exchange:
    """One request and its answer. `headers` has lower-case names; of a name that is there twice the first value.

    on_end  called once, when the answer is written or the client has gone
    on_gone called when the client has gone before the answer's end
    """

    __slots__ = (
        *("method", "path", "query", "headers", "body", "keep_alive", "old", "error", "on_end", "on_gone", "key"),
        *("_connection", "_head", "_chunked", "ended", "_parts", "started", "read"),
    )

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.method = self.path = ""
        self.query = b""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.keep_alive = True
        self.old = False  # the client speaks HTTP/1.0
        self.error: RequestError | None = None  # the answer, of a request that is refused before it is complete
        self.on_end: Callable[[], None] | None = None
        self.on_gone: Callable[[], None] | None = None
        self.key = ""  # name of the client's API key
        self.started = False  # the head of the answer was given
        self.read = 0  # bytes of the body so far
        self._parts: list[bytes] = []
        self._head = b""
        self._chunked = False
        self.ended = False

    # ---- the request ----

    def add_body(self, part: bytes) -> None:
        self._parts.append(part)

    def complete(self) -> None:
        self.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []

    @property
    def peer(self) -> str:
        return self._connection.peer

    # ---- the answer ----

    @property
    def paused(self) -> bool:
        """Whether the client reads slower than the answer is written."""
        return self._connection.paused

    async def writable(self) -> None:
        """Wait until the client has read enough, or has gone."""
        await self._connection.writable()

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        """Give the head of the answer; it is sent with the first bytes of the body. length : None: unknown."""
        assert not self.started, "the answer has begun"
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        for name, value in headers:
            lines += (name, b": ", value.translate(None, CONTROL), b"\r\n")
        lines += (b"date: ", self._connection.server.date, b"\r\n")
        if length is not None:
            lines.append(b"content-length: %d\r\n" % length)
        elif self.old:
            self.keep_alive = False
        elif status not in NO_BODY:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif self.old:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        self._head, self.started = b"".join(lines), True

    def write(self, data: bytes) -> None:
        if self.method == "HEAD" or not data:
            return
        head, self._head = self._head, b""
        self._connection.write(b"%b%x\r\n%b\r\n" % (head, len(data), data) if self._chunked else head + data)

    def flush(self) -> None:
        """Send the head, if it waits for the first bytes of the body."""
        head, self._head = self._head, b""
        if head:
            self._connection.write(head)

    def end(self) -> None:
        head, self._head = self._head, b""
        if rest := head + (b"0\r\n\r\n" if self._chunked and self.method != "HEAD" else b""):
            self._connection.write(rest)
        self._finish()
        self._connection.answered(self)

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers, len(body))
        self.write(body)
        self.end()

    def refuse(self, error: RequestError) -> None:
        """Answer with the error. Without effect on an answer that has begun."""
        if not self.started:
            self.respond(*error_parts(error))

    def gone(self) -> None:
        """Note that the client has gone."""
        if not self.ended:
            if self.on_gone is not None:
                self.on_gone()
            self._finish()

    def _finish(self) -> None:
        if not self.ended:
            self.ended, self.on_gone = True, None
            self._connection.server.body_bytes -= self.read
            on_end, self.on_end = self.on_end, None
            if on_end is not None:
                on_end()


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
        if length.isdigit() and int(length[:20]) > limit:
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
        if not exchange.keep_alive or self.server.closing:
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
            return
        if self._serving is None:
            self.transport.close()
            return
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
        loop = asyncio.get_running_loop()
        for pauses in (1, 10):
            loop.call_later(pauses * GONE_CHECK_S, self.check_gone)

    # ---- writing ----

    def write(self, data: bytes) -> None:
        if not self._closed:
            self.written += len(data)
            self.transport.write(data)

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
