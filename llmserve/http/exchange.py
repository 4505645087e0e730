"""One request of a client and its answer, the handler that answers, and what all connections of a server share."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, Protocol, TypeVar

from llmserve.http.buffers import Buffers
from llmserve.http.errors import Refusal
from llmserve.http.limits import ServerLimits
from llmserve.http.outflow import Outflow
from llmserve.http.proxies import HEADER as FORWARDED

log = logging.getLogger("llmserve")

LOG_EVERY_S = 10.0
LINGERING_MAX = 256  # connections that were refused, and wait for their clients to stop sending
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
CONTROL = bytes([*range(32), 127])
NO_BODY = (204, 304)

Headers = Iterable[tuple[bytes, bytes]]
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]  # status, headers, body
State = TypeVar("State")


class Handler(Protocol[State]):
    """The program behind a server. State : the program's own notes on one request"""

    def new_state(self) -> State:
        """The notes on a request whose first byte has arrived."""
        ...

    def admit(self, exchange: Exchange[State]) -> Exception | None:
        """Look at a request whose head has arrived: who asks, and who takes the body (`keeps_body`, `sink`).

        Returns the error with which the request is refused without its body; None: it is not refused.
        """
        ...

    def handle(self, exchange: Exchange[State]) -> None:
        """Answer a complete request, now or later."""
        ...

    def refusal(self, error: Exception, exchange: Exchange[State] | None) -> Answer:
        """The answer to a request that is refused. exchange : None for a connection that is not accepted

        error : of this library (Refusal), of `admit`, or of whoever has called Exchange.refuse
        """
        ...


class BodySink(Protocol):
    """The place of a body that is taken as it arrives.

    on_full  set by the connection; called with True when the client must wait, and with False when it need not any more
    """

    on_full: Callable[[bool], None] | None

    def feed(self, data: bytes) -> Exception | None:
        """Take the next bytes. Returns the error with which the request is refused."""
        ...

    def discard(self) -> None:
        """Forget a body that nobody has taken over. Called at the end of every request."""
        ...


class Shared:
    """What the connections of one server share.

    now_s      the clock
    call_soon  calls a function in the next turn of the event loop
    on_ended   called with each request that has ended; None: nobody wants to know
    date       the value of the header
    cut        connections that the server closed, by reason
    """

    def __init__(
        self,
        handler: Handler[Any],
        limits: ServerLimits,
        now_s: Callable[[], float],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.now_s = now_s
        self.call_soon = call_soon
        self.on_ended: Callable[[Exchange[Any]], object] | None = None
        self.buffers = Buffers(limits.buffers_bytes_max)
        self.connections = OpenConnections()
        self.cut: Counter[str] = Counter()
        self.closing = False
        self.date = http_date()
        self._malformed_logged_s = -math.inf

    def malformed(self, peer: str, error: Exception) -> None:
        """Log a request that is no HTTP, once in a while: anybody can send such."""
        self.cut["malformed"] += 1
        if self.now_s() - self._malformed_logged_s >= LOG_EVERY_S:
            self._malformed_logged_s = self.now_s()
            log.warning("%s sent no HTTP: %r; %d such requests so far", peer, str(error), self.cut["malformed"])


class OpenConnections:
    """The open connections of a server.

    idle       since when, the longest first
    lingering  refused, and waiting for their clients to stop sending; in the order in which they were refused
    """

    def __init__(self) -> None:
        self.all: set[Any] = set()
        self.idle: OrderedDict[Any, float] = OrderedDict()
        self._lingering: OrderedDict[Any, None] = OrderedDict()

    def add(self, connection: Any, now_s: float) -> None:
        self.all.add(connection)
        self.idle[connection] = now_s

    def discard(self, connection: Any) -> None:
        self.all.discard(connection)
        self.idle.pop(connection, None)
        self._lingering.pop(connection, None)

    def linger(self, connection: Any) -> Any:
        """Note a connection that lingers. Returns the first of very many, which is to be closed at once; or None."""
        self._lingering[connection] = None
        return self._lingering.popitem(last=False)[0] if len(self._lingering) > LINGERING_MAX else None


class Channel(Protocol):
    """The connection of an exchange."""

    shared: Shared
    out: Outflow
    peer: str

    def answered(self, exchange: Exchange[Any]) -> None: ...


class Exchange(Generic[State]):
    """One request and its answer. `headers` has lower-case names; of a name that is there twice the first value.

    state       the handler's own notes
    common_headers  lines of the head of every answer
    on_end  called once, when the answer is written or the client has gone
    on_gone called when the client has gone before the answer's end
    on_silence  called when nothing was written for keep_alive_s; None: the answer is no stream
    sink        takes the body as it arrives; None: the body is kept in memory, if `keeps_body`
    keeps_body  False: no handler reads the body
    expects_continue  the client waits to be asked for the body
    holder      who has the bytes that are kept: whom the handler names, else the client's address
    error       with which the request was refused
    status      of the answer; 0: none was given
    seconds     from the first byte of the request to the last of the answer, when it has ended; 0.0 without `on_ended`
    written     bytes of the answer, when it has ended
    """

    __slots__ = (
        *("method", "path", "query", "headers", "body", "old"),
        *("state", "common_headers", "on_end", "on_gone", "on_silence"),
        *("sink", "keeps_body", "expects_continue", "holder", "read", "kept", "_grown"),
        *("keep_alive", "error", "started", "ended", "_head", "_chunked", "_connection", "_out"),
        *("began_s", "seconds", "status", "written"),
    )

    def __init__(self, connection: Channel) -> None:
        self._connection = connection
        self._out = connection.out
        self.method = self.path = ""
        self.query = b""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.keep_alive = True
        self.old = False  # the client speaks HTTP/1.0
        self.error: Exception | None = None
        self.on_end: Callable[[], None] | None = None
        self.on_gone: Callable[[], None] | None = None
        self.on_silence: Callable[[], None] | None = None
        self.common_headers = b""
        self.sink: BodySink | None = None
        self.started = False  # the head of the answer was given
        self.keeps_body = True
        self.expects_continue = False
        self.holder = ""
        self.read = 0  # bytes of the body so far
        self.kept = 0  # of these, in memory
        self._grown: bytearray | None = None  # the body, while it comes in several parts
        self._head = b""
        self._chunked = False
        self.ended = False
        self.status = 0
        shared = connection.shared
        self.began_s = shared.now_s() if shared.on_ended is not None else 0.0
        self.seconds = 0.0
        self.written = 0
        self.state: State = shared.handler.new_state()

    # ---- the request ----

    def add_body(self, part: bytes) -> None:
        if self._grown is not None:
            self._grown += part
        elif self.body:
            self._grown, self.body = bytearray(self.body) + part, b""
        else:
            self.body = part

    def complete(self) -> None:
        if self._grown is not None:
            self.body, self._grown = bytes(self._grown), None

    def keep(self, size: int) -> Refusal | None:
        """Count bytes of the body that are kept in memory. Returns the refusal of a holder that has too many."""
        self.kept += size
        return self._connection.shared.buffers.keep(self.holder, size)

    @property
    def announces_body(self) -> bool:
        return self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers

    def replace_body(self, body: bytes) -> None:
        """Take the unpacked body for the packed one. Raises Refusal when its holder has too many bytes."""
        refusal = self.keep(len(body) - len(self.body))
        if refusal is not None:
            raise refusal
        self.body = body

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def address(self) -> str:
        """The client's address, without its port; behind trusted proxies the one that they tell."""
        peer, proxies = self.peer.rpartition(":")[0], self._connection.shared.limits.trusted_proxies
        return proxies.client_of(peer, self.headers.get(FORWARDED, "")) if proxies else peer

    @property
    def followed(self) -> bool:
        """Whether somebody hears of the end of the request."""
        return self._connection.shared.on_ended is not None

    @property
    def age_s(self) -> float:
        """Seconds since the first byte of the request; meaningless if it is not `followed`."""
        return self._connection.shared.now_s() - self.began_s

    # ---- the answer ----

    async def writable(self) -> None:
        """Wait until the client has read enough, or has gone."""
        out = self._out
        while out.paused and not out.closed:
            resumed = asyncio.get_running_loop().create_future()
            out.when_writable(partial(_set, resumed))
            await resumed

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        """Give the head of the answer; it is sent with the first bytes of the body. length : None: unknown."""
        assert not self.started, "the answer has begun"
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        for name, value in headers:
            lines += (name, b": ", value.translate(None, CONTROL), b"\r\n")
        if self.common_headers:
            lines.append(self.common_headers)
        lines += (b"date: ", self._connection.shared.date, b"\r\n")
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
        self._head, self.started, self.status = b"".join(lines), True, status
        self.written = -self._out.written

    def write(self, data: bytes) -> bool:
        """Write bytes of the body. Returns whether the client is behind: it reads slower than the answer is written."""
        out = self._out
        if data and self.method != "HEAD":
            head, self._head = self._head, b""
            out.write(b"%b%x\r\n%b\r\n" % (head, len(data), data) if self._chunked else head + data)
        return out.paused

    def flush(self) -> None:
        """Send the head, if it waits for the first bytes of the body."""
        head, self._head = self._head, b""
        if head:
            self._out.write(head)

    def end(self) -> None:
        head, self._head = self._head, b""
        if rest := head + (b"0\r\n\r\n" if self._chunked and self.method != "HEAD" else b""):
            self._out.write(rest)
        self._finish()
        self._connection.answered(self)

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers, len(body))
        self.write(body)
        self.end()

    def when_writable(self, waiter: Callable[[], None]) -> None:
        """Call the waiter once, when the client has read enough, or has gone."""
        self._out.when_writable(waiter)

    def pass_on(self, data: bytes) -> bool:
        """Write bytes of an answer that another server has made, with its head. The connection closes behind it.

        Returns whether the client is behind.
        """
        out = self._out
        if not self.started:
            self.started, self.keep_alive = True, False
            self.written = -out.written
        out.write(data)
        return out.paused

    def refuse(self, error: Exception) -> None:
        """Answer with the error. An answer that has begun stays as it is; the handler hears of the error anyway."""
        answer = self._connection.shared.handler.refusal(error, self)
        if not self.started:
            self.error = error
            self.respond(*answer)

    def gone(self) -> None:
        """Note that the client has gone."""
        if not self.ended:
            if self.on_gone is not None:
                self.on_gone()
            self._finish()

    def _finish(self) -> None:
        if not self.ended:
            self.ended, self.on_gone, self.on_silence, self._grown = True, None, None, None
            shared = self._connection.shared
            if self.kept:
                shared.buffers.release(self.holder, self.kept)
                self.kept = 0
            if self.sink is not None:
                self.sink.discard()
            on_end, self.on_end = self.on_end, None
            if on_end is not None:
                on_end()
            if shared.on_ended is not None:
                self.seconds = self.age_s
                self.written += self._out.written if self.started else 0
                shared.on_ended(self)


def _set(resumed: asyncio.Future[None]) -> None:
    if not resumed.done():
        resumed.set_result(None)


def http_date() -> bytes:
    return formatdate(usegmt=True).encode()
