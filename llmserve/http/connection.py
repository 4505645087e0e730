"""One client's connection: HTTP/1.1 requests are parsed by httptools, and answered one after the other.

The connection holds a client to its limits before anything is made of a request:

head    64 KiB and 100 fields at most, complete within 10 s
body    the size that the handler allows, complete within 60 s; an upload: see streamed.py
answer  written as the client reads; a client that reads nothing for a while is cut off (Server.sweep)

What one read of the socket brings of a body is collected before Python sees any of it, so that a body in chunks of one
byte costs little more than a body in one piece. A client that sends much reads on in its turn (turns.py).

A client may close its sending side after a request and is still answered. A client that has gone altogether looks the
same at first: an interim answer (100 Continue) makes its machine say so.

A wish for another protocol (`Upgrade`) is ignored (RFC 9110, 7.8). llhttp, the parser below httptools, then takes what
follows the head for that protocol's bytes: another parser gets a head without the wish, and reads the body behind that.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from typing import TYPE_CHECKING, cast

import httptools

from llmserve.errors import (
    BadRequest,
    RequestError,
    RequestTimeout,
    Unavailable,
)
from llmserve.http.exchange import Exchange
from llmserve.http.heads import (
    FIELDS_MAX,
    excess_of,
    excess_so_far,
    framing_of,
    path_and_query,
    too_large,
    unspoken,
)
from llmserve.http.streamed import BODY_S, DISK, pass_on
from llmserve.http.turns import LONG_READ_BYTES, TURN

if TYPE_CHECKING:
    from llmserve.http.server import Server

HEAD_S = 10.0
UNREAD_BODY_BYTES_MAX = 64 << 10  # of a body that no handler reads
KEEP_ALIVE_S = 75.0
LINGER_S = 2.0  # a refused client may still send: without this wait its system would drop the refusal
GONE_CHECK_S = 0.02  # an interim answer's way to the client and back, at least
TCP_CLOSE = 7  # state of a socket in Linux's TCP_INFO whose other side has reset the connection
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SLICE_BYTES = 4 << 10  # that are parsed before anyone looks at how many requests or fields they were
SINGLE_FIELDS = {"host", "authorization", "x-api-key"}  # another proxy may take the other one of two
LIST_FIELDS = {"x-forwarded-for", "content-encoding"}  # several are one list
BEHIND = 2  # why nothing is read: requests wait. TURN: see turns.py. DISK: see streamed.py


class Connection(asyncio.BufferedProtocol):
    """Parses requests, and gives each to the server's handler when its turn has come."""

    transport: asyncio.Transport
    on_body: Callable[[bytes], None]

    def __init__(self, server: Server) -> None:
        self.server = server
        self.peer = self._address = ""
        self.holder = ""  # of the bytes that this connection keeps in memory: the client's key, or its address
        self.paused = False
        self.written = 0  # bytes in all answers so far
        self.sent = 0  # bytes that the client's system had taken at the last look
        self.progress_s = 0.0  # time of the last progress
        self.due_s = math.inf  # when what the client owes must be complete
        self._heard = -1  # bytes written when the silence of a stream began; -1: no stream is served
        self._quiet_since_s = 0.0
        self._parts: list[bytes] = []  # of the body, in one read of the socket
        self.on_body = self._parts.append  # the parser's callback for each chunk
        self._parser = httptools.HttpRequestParser(self)
        self._headers: dict[str, str] = {}  # of the head that arrives, or fields behind a chunked body
        self._doubles = self._doubles_bytes = 0  # fields whose name was there before
        self._head_bytes = 0  # in reads that began within a head
        self._bodiless_bytes = 0  # in reads of a body that brought nothing of it
        self._framing = b""  # how long the body is, of a request that asks for another protocol
        self._reading: Exchange | None = None  # the request that arrives
        self._has_head = False
        self._serving: Exchange | None = None
        self._waiting: deque[Exchange] = deque()  # complete requests behind the one that is served
        self._has_served = False  # a request, since the last read: one is enough for a turn of the event loop
        self._deaf = False  # what the client sends is not looked at any more
        self._unheard = False  # something was not looked at
        self._rest = b""  # what came behind requests that wait
        self._held = 0  # reasons for which nothing is read
        self._half_closed = False
        self._closed = False
        self._resumed: asyncio.Future[None] | None = None

    # ---- the transport's callbacks ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=self.server.limits.buffer_bytes_max)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if peer else ""
        self._address = self.holder = peer[0] if peer else ""
        self.due_s = self.server.now_s() + HEAD_S
        self.server.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.server.turns.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if nbytes > LONG_READ_BYTES:
            self.hold(TURN)
            self.server.turns.wait(self)
        if self._deaf:
            self._unheard = True
            return
        self._has_served = False
        if self._reading is not None and not self._has_head:
            self._head_bytes += nbytes
        self._take(self.server.turns.buffer[:nbytes])

    def _take(self, data: memoryview) -> None:
        """Read what came. Of many short requests, those behind the first ones wait unread until these are answered."""
        size = len(data)
        if size <= SLICE_BYTES:
            self._parse(data)
        else:
            for start in range(0, size, SLICE_BYTES):
                if self._waiting:
                    self._rest = bytes(data[start:])
                    break
                if self._deaf or self._excess() is not None:
                    self._unheard = True
                    break
                self._parse(data[start : start + SLICE_BYTES])
        if self._reading is not None:
            self._look_at(self._reading, size)

    def _take_rest(self) -> None:
        rest, self._rest = self._rest, b""
        if self._deaf or self._closed:
            return
        self._has_served = False
        self._take(memoryview(rest))
        if not self._waiting:
            self.release(BEHIND)

    def _parse(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_on(data, upgrade)
        except httptools.HttpParserError as error:
            self._fail(error)

    def _parse_on(self, data: memoryview, upgrade: httptools.HttpParserUpgrade) -> None:
        """Read what is behind a head that asks for another protocol."""
        while not self._deaf:
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
        self._unheard = self._unheard or len(data) > upgrade.args[0]

    def _begin_body(self) -> None:
        """Let a parser that has seen no wish for another protocol read the body."""
        reading = self._reading
        assert reading is not None
        query = reading.query
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % self._framing)
        self._framing, reading.query = b"", query

    def _fail(self, error: httptools.HttpParserError) -> None:
        if self._deaf:  # bytes behind the last request
            self._unheard = True
            return
        self.server.malformed(self.peer, error)
        if "PRI" in str(error):
            refusal = BadRequest("this server speaks HTTP/1.1, not HTTP/2", code="http_version")
        else:
            refusal = BadRequest("the request is not HTTP/1.1", code="malformed_request")
        self._parts.clear()
        self._refuse_reading(refusal)

    def _look_at(self, reading: Exchange, nbytes: int) -> None:
        """Take what a read has brought of a request that is not complete."""
        if self._parts:
            self._take_body()
            self._bodiless_bytes = 0
        elif self._has_head:
            self._bodiless_bytes += nbytes
        if reading.error is None:
            reading.error = self._excess()
        if reading.error is not None:
            self._refuse_reading(reading.error)
        elif self._has_head and self._serving is None:
            if reading.keeps_body:
                self.server.busy(self)
            self._invite()

    def _excess(self) -> RequestError | None:
        """Why what has come of a request is too much, although it is not complete; None: it is not."""
        if self._reading is None:
            return None
        fields = len(self._headers) + self._doubles
        return excess_so_far(fields, self._bodiless_bytes if self._has_head else None, self._head_bytes)

    def eof_received(self) -> bool:
        """Keep the connection open while a request is served."""
        if (self._serving is None and not self._waiting) or (self._serving is not None and self._serving.old):
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
        self._serving = self._reading = None  # another cycle, with the bodies
        self._waiting.clear()

    # ---- the parser's callbacks ----

    def on_message_begin(self) -> None:
        if self._framing:
            return
        if self._deaf:
            raise EOFError("the last request was complete")  # stops the parser: see _fail
        self._reading = reading = Exchange(self)
        self._headers, self._has_head = reading.headers, False
        self._head_bytes = self._doubles = self._doubles_bytes = 0
        if self._serving is None:
            self.due_s = self.server.now_s() + HEAD_S

    def on_url(self, url: bytes) -> None:
        assert self._reading is not None
        self._reading.query += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        if key not in self._headers:
            self._headers[key] = value.rstrip().decode("latin-1")
        else:
            self._doubles += 1
            self._doubles_bytes += len(name) + len(value)
            if key in LIST_FIELDS:
                self._headers[key] += ", " + value.rstrip().decode("latin-1")
            if key in SINGLE_FIELDS and self._reading is not None and not self._has_head:
                self._reading.error = BadRequest(f"the request has two fields `{key}`", code="malformed_request")

    def on_headers_complete(self) -> None:
        reading, parser = self._reading, self._parser
        assert reading is not None
        if self._framing:
            return
        if self._head_bytes or len(reading.headers) + self._doubles > FIELDS_MAX:
            reading.error = excess_of(reading, self._doubles, self._doubles_bytes) or reading.error
        self._has_head, self._bodiless_bytes = True, 0
        reading.method = parser.get_method().decode("latin-1")
        reading.path, reading.query = path_and_query(reading.query if reading.method != "CONNECT" else b"*")
        version = parser.get_http_version()
        reading.old = version == "1.0"
        reading.keep_alive = parser.should_keep_alive()
        if reading.error is None:
            reading.error = unspoken(reading, version) or self._refusal(reading)
        else:
            reading.keep_alive = False
        if (expected := reading.headers.get("expect")) is not None:
            reading.expects_continue = expected.lower() == "100-continue" and not reading.old
        if parser.should_upgrade():
            self._framing = framing_of(reading)
        self.due_s = self.server.now_s() + BODY_S if self._serving is None else math.inf

    def _refusal(self, reading: Exchange) -> RequestError | None:
        """Why the request is refused at its head; None: it is not."""
        if "transfer-encoding" in reading.headers:
            self._headers = {}
            reading.keep_alive = reading.keep_alive and not reading.old
        length = reading.headers.get("content-length", "")
        body_bytes = int(length[:20]) if length.isdigit() else 0
        if body_bytes > self.server.limits.body_bytes_max and reading.path not in self.server.limits.streamed:
            return too_large(reading, self.server.limits.body_bytes_max)
        try:
            self.server.handler.admit(reading)
        except RequestError as error:
            return error
        address = reading.address if self.server.limits.trusted_proxies else self._address
        reading.holder = self.holder = reading.key or address
        if body_bytes > UNREAD_BODY_BYTES_MAX and not reading.keeps_body:
            return too_large(reading, self.server.limits.body_bytes_max)
        return None

    def _take_body(self) -> None:
        """Take what one read of the socket brought of the body."""
        reading, parts = self._reading, self._parts
        assert reading is not None
        part = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if reading.error is not None:
            return
        reading.read += len(part)
        if reading.upload is not None:
            pass_on(self, reading, part)
        elif reading.read > (self.server.limits.body_bytes_max if reading.keeps_body else UNREAD_BODY_BYTES_MAX):
            reading.error = too_large(reading, self.server.limits.body_bytes_max)
        elif reading.keeps_body:
            reading.error = self.server.keep(reading, len(part))
            if reading.error is None:
                reading.add_body(part)

    def on_message_complete(self) -> None:
        if self._framing:  # the parser takes the body for another protocol's bytes
            return
        if self._parts:
            self._take_body()
        reading, self._reading = self._reading, None
        assert reading is not None
        self._has_head = False
        self._deaf = not reading.keep_alive
        reading.complete()
        self._queue(reading)

    def _invite(self) -> None:
        """Ask for the body of a request that waits to be asked, when its turn has come."""
        reading = self._reading
        if reading is None or not self._has_head or not reading.expects_continue:
            return
        if reading.read:  # the client has not waited
            reading.expects_continue = False
        elif self._serving is None and not self._waiting:
            reading.expects_continue = False
            self.write(CONTINUE)

    # ---- reading ----

    def hold(self, reason: int) -> None:
        """Read nothing while there is a reason."""
        if not self._held and not self.transport.is_closing():
            self.transport.pause_reading()
        self._held |= reason

    def release(self, reason: int) -> None:
        held, self._held = self._held, self._held & ~reason
        if held and not self._held and not self._closed and not self.transport.is_closing():
            self.transport.resume_reading()

    # ---- one request after the other ----

    def _queue(self, exchange: Exchange) -> None:
        if self._serving is None and not self._waiting and not self._has_served:
            self._serve(exchange)
            return
        if self._serving is None and not self._waiting:
            asyncio.get_running_loop().call_soon(self._serve_next)
        self._waiting.append(exchange)
        self.hold(BEHIND)

    def _serve(self, exchange: Exchange) -> None:
        self._serving, self.due_s, self._has_served = exchange, math.inf, True
        self.server.busy(self)
        if exchange.error is not None:
            self.server.handler.refused(exchange, exchange.error)
            exchange.refuse(exchange.error)
        else:
            self.server.handler.handle(exchange)

    def _refuse_reading(self, error: RequestError) -> None:
        """Refuse the request that arrives without waiting for its rest, and read nothing more."""
        reading, self._reading = self._reading or Exchange(self), None
        self._deaf, self._unheard, self._has_head, self._framing = True, True, False, b""
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
        elif self._reading is not None:  # the next request is on its way
            self.due_s = self.server.now_s() + (BODY_S if self._has_head else HEAD_S)
            if not self._has_head or not self._reading.keeps_body:
                self.server.idled(self)
            self._invite()
        else:
            self.due_s = self.server.now_s() + KEEP_ALIVE_S
            self.server.idled(self)

    def _serve_next(self) -> None:
        if self._waiting and self._serving is None and not self._closed:
            following = self._waiting.popleft()
            if not self._waiting and self._rest:
                asyncio.get_running_loop().call_soon(self._take_rest)
            elif not self._waiting:
                self.release(BEHIND)
            self._serve(following)

    # ---- the end of the connection ----

    def close_when_answered(self) -> None:
        """Close now if no request is served, else after the last answer. A body on its way is refused."""
        if self._reading is not None and self._has_head:
            self._refuse_reading(Unavailable("the server is shutting down", code="draining", retry_after_s=1.0))
        elif self._waiting:
            self._waiting[-1].keep_alive = False
        elif self._serving is not None:
            self._serving.keep_alive = False
        else:
            self.transport.close()

    def _close_softly(self) -> None:
        """Close after the client has got the last bytes, although it may still be sending."""
        if not self._unheard or self._half_closed or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._deaf = True
        self.release(TURN | BEHIND | DISK)
        self.transport.write_eof()
        self.due_s = self.server.now_s() + LINGER_S
        self.server.lingers(self)

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
            self.write(CONTINUE)
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
