"""One request of a client, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from llmserve.errors import RequestError
from llmserve.gateway.answers import error_parts
from llmserve.http.proxies import HEADER as FORWARDED

if TYPE_CHECKING:
    from llmserve.calls.in_flight import InFlightCall
    from llmserve.gateway.endpoints import Endpoint
    from llmserve.http.connection import Connection
    from llmserve.jobs.uploads import Upload

Headers = Iterable[tuple[bytes, bytes]]
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
CONTROL = bytes([*range(32), 127])
NO_BODY = (204, 304)


class Exchange:
    """One request and its answer. `headers` has lower-case names; of a name that is there twice the first value.

    endpoint    of an engine, to which the request goes; None: the request is for this server
    common_headers  lines of the head of every answer
    on_end  called once, when the answer is written or the client has gone
    on_gone called when the client has gone before the answer's end
    on_silence  called when nothing was written for --keep-alive-s; None: the answer is no stream
    upload      takes the body as it arrives; None: the body is kept in memory, if `keeps_body`
    keeps_body  False: no handler reads the body
    expects_continue  the client waits to be asked for the body
    holder      who has the bytes that are kept: the key, or the address
    in_flight   the call that answers the request, while the server has followers (listening.py)
    status      of the answer; 0: none was given
    written     bytes of the answer, when it has ended
    """

    __slots__ = (
        *("method", "path", "query", "headers", "body", "keep_alive", "old", "error", "on_end", "on_gone", "key"),
        *("on_silence", "endpoint", "common_headers", "upload", "keeps_body", "expects_continue", "holder"),
        *("_connection", "_head", "_chunked", "ended", "_grown", "started", "read", "kept"),
        *("began_s", "in_flight", "seconds", "status", "written", "state"),
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
        self.on_silence: Callable[[], None] | None = None
        self.endpoint: Endpoint | None = None
        self.common_headers = b""
        self.key = ""  # name of the client's API key
        self.upload: Upload | None = None
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
        self.in_flight: InFlightCall | None = None
        self.state: Any = None  # the handler's own notes
        self.status = 0
        self.began_s = connection.server.now_s() if connection.server.followers else 0.0
        self.seconds = 0.0  # from the first byte of the request to the last of the answer
        self.written = 0

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

    @property
    def announces_body(self) -> bool:
        return self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers

    def replace_body(self, body: bytes) -> None:
        """Take the unpacked body for the packed one. Raises RequestError when its holder has too many bytes."""
        error = self._connection.server.keep(self, len(body) - len(self.body))
        if error is not None:
            raise error
        self.body = body

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def address(self) -> str:
        """The client's address, without its port; behind trusted proxies the one that they tell."""
        peer, proxies = self.peer.rpartition(":")[0], self._connection.server.limits.trusted_proxies
        return proxies.client_of(peer, self.headers.get(FORWARDED, "")) if proxies else peer

    @property
    def age_s(self) -> float:
        """Seconds since the first byte of the request."""
        return self._connection.server.now_s() - self.began_s

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
        if self.common_headers:
            lines.append(self.common_headers)
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
        self._head, self.started, self.status = b"".join(lines), True, status
        self.written = -self._connection.written

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
            self.error = error
            self.respond(*error_parts(error, self.endpoint))

    def gone(self) -> None:
        """Note that the client has gone."""
        if not self.ended:
            if self.on_gone is not None:
                self.on_gone()
            self._finish()

    def _finish(self) -> None:
        if not self.ended:
            self.ended, self.on_gone, self.on_silence, self._grown = True, None, None, None
            if self.kept:
                self._connection.server.forget(self)
            if self.upload is not None:
                self.upload.discard()
            on_end, self.on_end = self.on_end, None
            if on_end is not None:
                on_end()
            server = self._connection.server
            if server.followers:
                self.seconds = self.age_s
                self.written += self._connection.written if self.started else 0
                server.ended(self)

    def follow(self, in_flight: InFlightCall) -> None:
        """Note the call that answers the request, for those who follow the server."""
        if self._connection.server.followers:
            self.in_flight = in_flight
