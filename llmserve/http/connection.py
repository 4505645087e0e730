"""One client's connection as a machine without I/O: bytes and time in; requests, bytes and a closed transport out.

`received`, `ended`, `lost` and `tick` tell the connection what has happened; the connection calls the handler
(exchange.py) with requests, and writes to, holds back and closes a `Transport`. No event loop is known here:
protocol.py drives the connection on asyncio, a test by a playbook. Requests are answered one after the other, in
their order.

The connection holds a client to its limits before anything is made of a request:

head    64 KiB and 100 fields at most, complete within 10 s
body    the size that the handler allows, complete within 60 s; into a sink: see StreamedBody
answer  written as the client reads; a client that reads nothing for client_stall_s is cut off

due_s is the time at which what the client owes must be complete: `tick` must be called then, or soon after.

A client may close its sending side after a request and is still answered. A client that has gone altogether looks the
same at first: an interim answer (100 Continue) makes its machine say so.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from llmserve.http.errors import Refusal
from llmserve.http.exchange import BodySink, Exchange, Shared
from llmserve.http.heads import too_large
from llmserve.http.outflow import Outflow, Transport
from llmserve.http.reader import RequestReader

HEAD_S = 10.0
BODY_S = 60.0  # for a whole body in memory, or between two parts of a streamed one
BYTES_PER_S_MIN = 10_000  # of a streamed body
KEEP_ALIVE_S = 75.0
LINGER_S = 2.0  # a refused client may still send: without this wait its system would drop the refusal
CLOSE_STALL_S = 3.0  # as client_stall_s, of a server that closes
UNREAD_BODY_BYTES_MAX = 64 << 10  # of a body that no handler reads
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SLICE_BYTES = 4 << 10  # that are parsed before anyone looks at how many requests or fields they were
TURN, BEHIND, SINK = 1, 2, 4
"""Why nothing is read: other connections have their turn (protocol.py), requests wait, or a body's sink is full."""


class Connection:
    """The machine of one connection: requests reach the handler one after the other.

    peer    of the client, with the port
    holder  of the bytes that this connection keeps in memory: who has sent the last request, or the client's address
    due_s   when what the client owes must be complete
    half_closed  the client sends nothing more
    """

    def __init__(self, shared: Shared, transport: Transport, peer: tuple[Any, ...] | None) -> None:
        now_s = shared.now_s()
        self.shared = shared
        self.transport = transport
        self.peer = f"{peer[0]}:{peer[1]}" if peer else ""
        self.holder = self._address = peer[0] if peer else ""
        self._is_proxied = bool(shared.limits.trusted_proxies)  # perhaps: then a request tells its client's address
        self.out = Outflow(transport, now_s)
        self.due_s = now_s + HEAD_S
        self.half_closed = False
        self._reader = RequestReader(self)
        self._streamed: StreamedBody | None = None
        self._serving: Exchange[Any] | None = None
        self._waiting: deque[Exchange[Any]] = deque()  # complete requests behind the one that is served
        self._has_served = False  # a request, since the last read: one is enough for a turn of the event loop
        self._rest = b""  # what came behind requests that wait
        self._held = 0  # reasons for which nothing is read
        shared.connections.add(self, now_s)
        if shared.closing:
            self.close_when_answered()

    # ---- what happens ----

    def received(self, data: memoryview) -> None:
        """Take bytes of the client. They are the caller's again afterwards."""
        reader = self._reader
        if reader.deaf:
            reader.unheard = True
            return
        self._has_served = False
        reader.begin(len(data))
        self._take(data)

    def ended(self) -> bool:
        """Note that the client sends nothing more. Returns whether it is still answered."""
        serving = self._serving
        if (serving is None and not self._waiting) or (serving is not None and serving.old):
            return False
        self.half_closed = True
        if serving is not None and not serving.started:
            self.out.write(CONTINUE)
        elif serving is not None and serving.on_silence is not None:
            serving.on_silence()
        return True

    def lost(self) -> None:
        """Note that the connection is closed."""
        self.out.close()
        self.shared.connections.discard(self)
        exchanges = [self._serving, *self._waiting, self._reader.exchange]
        self._reader.close()
        for exchange in exchanges:
            if exchange is not None:
                exchange.gone()
        self._serving = self._streamed = None  # cycles of references would stay until a full garbage collection
        self._waiting.clear()

    def tick(self, now_s: float) -> int:
        """Do what is due. Returns the bytes that the client has not taken; 0 if it has just been cut off."""
        shared = self.shared
        if now_s >= self.due_s:
            shared.cut[self._overdue()] += 1
        unread = self.transport.get_write_buffer_size()
        stall_s = shared.limits.client_stall_s
        if self.out.has_stalled(unread, now_s, min(CLOSE_STALL_S, stall_s) if shared.closing else stall_s):
            self.cut("stalled")
            return 0
        if not unread and shared.limits.keep_alive_s:
            on_silence = self._serving.on_silence if self._serving is not None else None
            self.out.break_silence(on_silence, now_s, shared.limits.keep_alive_s)
        return unread

    def go_on(self) -> None:
        """Serve the next request that waits, or read what came behind them. Called by `call_soon`."""
        if self.out.closed:
            return
        if self._waiting:
            if self._serving is None:
                self._serve_next()
        elif self._rest:
            self._take_rest()

    # ---- reading ----

    def hold(self, reason: int) -> None:
        """Read nothing while there is a reason."""
        if not self._held and not self.transport.is_closing():
            self.transport.pause_reading()
        self._held |= reason

    def release(self, reason: int) -> None:
        held, self._held = self._held, self._held & ~reason
        if held and not self._held and not self.out.closed and not self.transport.is_closing():
            self.transport.resume_reading()

    def _take(self, data: memoryview) -> None:
        """Read what came. Of many short requests, those behind the first ones wait unread until these are answered."""
        reader, size = self._reader, len(data)
        if size <= SLICE_BYTES:
            reader.feed(data)
        else:
            for start in range(0, size, SLICE_BYTES):
                if self._waiting:
                    self._rest = bytes(data[start:])
                    break
                if reader.deaf or reader.excess() is not None:
                    reader.unheard = True
                    break
                reader.feed(data[start : start + SLICE_BYTES])
        if reader.exchange is not None:
            self._look_at(reader.exchange, size)

    def _take_rest(self) -> None:
        rest, self._rest = self._rest, b""
        if self._reader.deaf:
            return
        self._has_served = False
        self._take(memoryview(rest))
        if not self._waiting:
            self.release(BEHIND)

    def _look_at(self, exchange: Exchange[Any], nbytes: int) -> None:
        """Take what a read has brought of a request that is not complete."""
        self._reader.end(nbytes)
        if exchange.error is not None:
            self._refuse_reading(exchange.error)
        elif self._reader.has_head and self._serving is None:
            if exchange.keeps_body:
                self.shared.connections.idle.pop(self, None)
            self._invite()

    def _invite(self) -> None:
        """Ask for the body of a request that waits to be asked, when its turn has come."""
        exchange = self._reader.exchange
        if exchange is None or not self._reader.has_head or not exchange.expects_continue:
            return
        if exchange.read:  # the client has not waited
            exchange.expects_continue = False
        elif self._serving is None and not self._waiting:
            exchange.expects_continue = False
            self.out.write(CONTINUE)

    # ---- what the reader reads ----

    def request_begins(self) -> Exchange[Any]:
        if self._serving is None:
            self.due_s = self.shared.now_s() + HEAD_S
        return Exchange(self)

    def head_ends(self, exchange: Exchange[Any]) -> None:
        if exchange.error is None:
            exchange.error = self._refusal(exchange)
        self.due_s = self.shared.now_s() + BODY_S if self._serving is None else math.inf

    def _refusal(self, exchange: Exchange[Any]) -> Exception | None:
        """Why the request is refused at its head; None: it is not."""
        limits = self.shared.limits
        length = exchange.headers.get("content-length", "")
        body_bytes = int(length[:20]) if length.isdigit() else 0
        if body_bytes > limits.body_bytes_max and exchange.path not in limits.streamed:
            return too_large(exchange, limits.body_bytes_max)
        error = self.shared.handler.admit(exchange)
        if error is not None:
            return error
        if not exchange.holder:
            exchange.holder = exchange.address if self._is_proxied else self._address
        self.holder = exchange.holder
        if body_bytes > UNREAD_BODY_BYTES_MAX and not exchange.keeps_body:
            return too_large(exchange, limits.body_bytes_max)
        return None

    def body_comes(self, exchange: Exchange[Any], part: bytes) -> None:
        body_bytes_max = self.shared.limits.body_bytes_max
        exchange.read += len(part)
        if exchange.sink is not None:
            if self._streamed is None:
                self._streamed = StreamedBody(self, exchange.sink)
            exchange.error = self._streamed.feed(part)
        elif exchange.read > (body_bytes_max if exchange.keeps_body else UNREAD_BODY_BYTES_MAX):
            exchange.error = too_large(exchange, body_bytes_max)
        elif exchange.keeps_body:
            exchange.error = exchange.keep(len(part))
            if exchange.error is None:
                exchange.add_body(part)

    def request_ends(self, exchange: Exchange[Any]) -> None:
        self._streamed = None
        self._queue(exchange)

    def malformed(self, error: Exception) -> None:
        self.shared.malformed(self.peer, error)
        if "PRI" in str(error):
            refusal = Refusal(400, "http_version", "this server speaks HTTP/1.1, not HTTP/2")
        else:
            refusal = Refusal(400, "malformed_request", "the request is not HTTP/1.1")
        self._refuse_reading(refusal)

    def _refuse_reading(self, error: Exception) -> None:
        """Refuse the request that arrives without waiting for its rest, and read nothing more."""
        exchange = self._reader.stop() or Exchange(self)
        self._streamed = None
        exchange.error, exchange.keep_alive = error, False
        self._queue(exchange)

    # ---- one request after the other ----

    def _queue(self, exchange: Exchange[Any]) -> None:
        if self._serving is None and not self._waiting and not self._has_served:
            self._serve(exchange)
            return
        if self._serving is None and not self._waiting:
            self.shared.call_soon(self.go_on)
        self._waiting.append(exchange)
        self.hold(BEHIND)

    def _serve(self, exchange: Exchange[Any]) -> None:
        self._serving, self.due_s, self._has_served = exchange, math.inf, True
        self.shared.connections.idle.pop(self, None)
        if exchange.error is not None:
            exchange.refuse(exchange.error)
        else:
            self.shared.handler.handle(exchange)

    def _serve_next(self) -> None:
        following = self._waiting.popleft()
        if not self._waiting and self._rest:
            self.shared.call_soon(self.go_on)
        elif not self._waiting:
            self.release(BEHIND)
        self._serve(following)

    def answered(self, exchange: Exchange[Any]) -> None:
        """Go on with the next request after the end of an answer."""
        if self.out.closed or exchange is not self._serving:
            return
        self._serving = None
        reader, shared = self._reader, self.shared
        if not exchange.keep_alive or (shared.closing and not self._waiting):
            self._close_softly()
        elif self._waiting:
            shared.call_soon(self.go_on)
        elif self.half_closed:
            self.transport.close()
        elif reader.exchange is not None:  # the next request is on its way
            now_s = shared.now_s()
            self.due_s = now_s + (BODY_S if reader.has_head else HEAD_S)
            if not reader.has_head or not reader.exchange.keeps_body:
                shared.connections.idle[self] = now_s
            self._invite()
        else:
            now_s = shared.now_s()
            self.due_s = now_s + KEEP_ALIVE_S
            shared.connections.idle[self] = now_s

    # ---- the end of the connection ----

    def close_when_answered(self) -> None:
        """Close now if no request is served, else after the last answer. A body on its way is refused."""
        if self._reader.exchange is not None and self._reader.has_head:
            self._refuse_reading(Refusal(503, "draining", "the server is shutting down", retry_after_s=1.0))
        elif self._waiting:
            self._waiting[-1].keep_alive = False
        elif self._serving is not None:
            self._serving.keep_alive = False
        else:
            self.transport.close()

    def cut(self, reason: str) -> None:
        """Close at once. reason : under which the connection is counted"""
        self.shared.cut[reason] += 1
        self.transport.abort()

    def _close_softly(self) -> None:
        """Close after the client has got the last bytes, although it may still be sending."""
        if not self._reader.unheard or self.half_closed or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._reader.deaf = True
        self.release(TURN | BEHIND | SINK)
        self.transport.write_eof()
        self.due_s = self.shared.now_s() + LINGER_S
        first = self.shared.connections.linger(self)
        if first is not None:
            first.transport.abort()

    def _overdue(self) -> str:
        """Close because the client is late. Returns what was late."""
        self.due_s = math.inf
        if self._reader.exchange is not None:
            late = "body" if self._reader.has_head else "head"
            self._refuse_reading(Refusal(408, "request_timeout", f"the {late} of the request did not arrive in time"))
            return f"slow_{late}"
        self.transport.close()
        return "idle"


class StreamedBody:
    """A body on the way into its sink. A client that sends faster than the sink takes is held back.

    Such a body is large, and its client may be slow: it has BODY_S, and a second more for each BYTES_PER_S_MIN that
    came. Between two parts no more than BODY_S may pass. Time for which the sink holds the client back does not count.
    """

    def __init__(self, connection: Connection, sink: BodySink) -> None:
        self._connection = connection
        self._sink = sink
        self._due_s = connection.shared.now_s() + BODY_S
        self._full_since_s = 0.0
        sink.on_full = self._hold

    def feed(self, part: bytes) -> Exception | None:
        self._due_s += len(part) / BYTES_PER_S_MIN
        error = self._sink.feed(part)
        if self._connection.due_s != math.inf:
            self._set_due(self._connection.shared.now_s())
        return error

    def _hold(self, full: bool) -> None:
        connection, now_s = self._connection, self._connection.shared.now_s()
        if full:
            self._full_since_s, connection.due_s = now_s, math.inf
            connection.hold(SINK)
        else:
            self._due_s += now_s - self._full_since_s
            self._set_due(now_s)
            connection.release(SINK)

    def _set_due(self, now_s: float) -> None:
        connection = self._connection
        if connection._streamed is self and connection._serving is None:
            connection.due_s = min(now_s + BODY_S, self._due_s)
