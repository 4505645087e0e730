"""A small HTTP/1.1 client for one server: httptools parses, asyncio transports carry.

An answer's head is limited to HEAD_BYTES_MAX, its body by the reader, and its silence and whole time by a timer of the
connection. Connections are kept for the next request. The client follows no redirect, uses no proxy of the environment,
and unpacks nothing.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Self, cast
from urllib.parse import quote, urlsplit

from httptools import HttpParserError, HttpResponseParser

from llmserve.http.connecting import Connector, HttpError, printable

HEAD_BYTES_MAX = 64 << 10
BUFFER_BYTES_MAX = 256 << 10  # of a body that nobody takes: beyond this the connection is not read
KEPT_S = 4.0  # an idle connection; uvicorn, and so vLLM, closes idle connections after 5 s
DRAINED_S = 1.0  # the end of an answer that its reader does not need is waited for, to keep the connection
STALE_S = 1.0  # a kept connection that the server has closed is noticed so soon after a request
COPIED_BYTES_MAX = 16 << 10  # a shorter body is copied behind its head: that costs less than a second part to write
PAUSE_S = 0.05  # between two tries to connect while this process has no socket left
WHOLE_BYTES_MAX = 256 << 20  # of an answer that is read as a whole
FRAMING = frozenset((b"content-length", b"transfer-encoding"))
COMMON_HEADERS = frozenset((b"content-type", b"location", b"retry-after"))


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """headers : those that the client keeps, by lower-case name"""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class Response:
    """A request and its answer, whose body arrives while it is read. One reader at a time.

    data      the whole request, in parts
    idle_s    longest silence
    on_change called when something has arrived, and when the answer has ended or failed; never after `close`
    on_part   gets a part of the body that arrives while nothing waits and the answer goes on, and says whether the part
              was taken: then on_change is not called. None: nobody asks for parts
    headers   those that the client keeps, by lower-case name; the values of a repeated header are joined by commas
    chunks    of the body, which wait to be taken
    left      bytes that have come since they were last taken, if not all were taken at once
    complete  the whole body has arrived; parts of it may wait to be taken
    error     why nothing more arrives
    """

    __slots__ = (
        *("chunks", "complete", "connection", "data", "draining", "error", "headers", "idle_s", "left", "on_change"),
        *("on_part", "status", "_client", "_closed", "_connecting", "_parts", "_read"),
    )

    def __init__(
        self, client: HttpClient, data: tuple[bytes, ...], on_change: Callable[[], None] | None, idle_s: float
    ) -> None:
        self.data, self.idle_s = data, idle_s
        self.on_change = on_change
        self.on_part: Callable[[bytes], bool] | None = None
        self.connection: _Connection | None = None
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.chunks: list[bytes] = []
        self.left = 0
        self.complete = self.draining = False
        self.error: HttpError | None = None
        self._client = client
        self._closed = False
        self._connecting: asyncio.Task[None] | None = None
        self._parts: list[bytes] = []  # of the body, taken by `body`
        self._read = 0

    # ---- for the reader ----

    async def head(self) -> None:
        """Wait for status and headers. Raises HttpError; then, and when cancelled, the request is aborted."""
        try:
            while not self.status:
                if self.error is not None:
                    raise self.error
                await self._change()
        except BaseException:
            self.close()
            raise

    async def read(self, bytes_max: int) -> bytes:
        """As `body`, which it waits for."""
        while (body := self.body(bytes_max)) is None:
            await self._change()
        return body

    async def next_bytes(self) -> bytes:
        """The next bytes of the body, which it waits for; b"" at the end. Raises HttpError."""
        while not (data := self.take()) and not self.complete:
            await self._change()
        return data

    def body(self, bytes_max: int) -> bytes | None:
        """The whole body; None until it is complete. Raises HttpError, also when it is larger."""
        if self.chunks:
            part = self.take()
            self._parts.append(part)
            self._read += len(part)
        announced = self.headers.get(b"content-length")
        if self._read > bytes_max or (announced is not None and int(announced) > bytes_max):
            self.close()
            raise HttpError(f"a body of more than {bytes_max:,} bytes", large=True)
        if self.complete:
            return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        if self.error is not None:
            raise self.error
        return None

    def take(self) -> bytes:
        """What has arrived and was not taken, b"" for nothing. Raises HttpError when it breaks off there."""
        chunks = self.chunks
        if not chunks:
            if self.error is not None and not self.complete:
                raise self.error
            return b""
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if self.left:
            self.left = 0
            if self.connection is not None:
                self.connection.resume(self)
        return data

    def close(self) -> None:
        """Abort the request unless its answer is complete."""
        self._closed, self.on_change, self.on_part = True, None, None
        if self._connecting is not None:
            self._connecting.cancel()
        if not self.complete and self.connection is not None:
            self.connection.drop(self, HttpError("the answer was closed"))

    def drain(self) -> None:
        """Throw away the rest of an answer whose reader has all that counts; its connection is kept if it ends soon."""
        self._closed, self.on_change, self.on_part, self.draining = True, None, None, True
        self.chunks.clear()
        if not self.complete and self.connection is not None:
            self.connection.drain(self)

    def stalled(self) -> None:
        """Note that what was last taken says nothing: the silence goes on."""
        if self.connection is not None:
            self.connection.stalled(self)

    async def _change(self) -> None:
        changed = asyncio.get_running_loop().create_future()
        self.on_change = lambda: None if changed.done() else changed.set_result(None)
        try:
            await changed
        finally:
            self.on_change = None

    @property
    def heard_s(self) -> float | None:
        """On the event loop's clock, when the last byte that counts came, or else the request was sent.

        None: the request was not sent yet, or the reader is too slow for more to come.
        """
        return None if self.connection is None else self.connection.heard_s(self)

    # ---- for the client and its connections ----

    def connect(self, *, fresh: bool) -> None:
        """Send the request soon, on a new connection or one that is kept by then."""
        self._connecting = asyncio.get_running_loop().create_task(self._connect(fresh=fresh))

    async def _connect(self, *, fresh: bool) -> None:
        try:
            connection = await self._client.connection(fresh=fresh)
        except HttpError as error:
            self.fail(error)
        except Exception as error:
            self.fail(HttpError(f"no connection: {printable(repr(error))}"))
        else:
            self._connecting = None
            connection.send(self)

    def fail(self, error: HttpError) -> None:
        """A request on a kept connection that turns out to be closed is sent once more, on a new connection."""
        if error.stale and not self._closed:
            self.connect(fresh=True)
            return
        self.error = error
        self.changed()

    def changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


class _Connection(asyncio.Protocol):
    """A connection carries one request at a time. Its timer fires at least every KEPT_S, and is not set anew before.

    What one read brings of a body is collected before Python sees any of it.
    """

    on_body: Callable[[bytes], None]  # the parser's callback for each chunk

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []  # of a body, in one read
        self.on_body = self._parts.append
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        # Servers that end a line by LF alone, or write a space behind a chunk's size, are understood.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._kept = False  # an answer has ended on this connection
        self._keeps = False  # the server keeps the connection after this answer
        self._interim = False
        self._framed = False  # the head says where the body ends; else the body ends with the connection
        self._paused = False
        self._good = False  # the status of the answer
        self._kept_headers = client.headers_kept
        self._head_bytes = 0  # in complete fields
        self._idle_bytes = 0  # bytes since the last bytes of a body
        self._since_s = 0.0  # the last byte that counts, the request, or the end of the last answer
        self._before_s = 0.0  # the same before the last byte
        self._idle_s = 0.0
        self._ends_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, response: Response) -> None:
        """Send the request. The connection must carry no other."""
        if self._transport is None or not self.open:
            self._loop.call_soon(response.fail, HttpError("the connection was closed", stale=self._kept))
            return
        self._response = response
        response.connection = self
        self._head_bytes = self._idle_bytes = 0
        self._framed = self._keeps = False
        self._since_s = self._before_s = self._loop.time()
        self._ends_s = self._since_s + self._client.answer_s
        self._idle_s = response.idle_s
        self._arm(min(self._since_s + self._idle_s, self._ends_s))
        if len(response.data) == 1:
            self._transport.write(response.data[0])
        else:
            self._transport.writelines(response.data)

    def drop(self, response: Response, error: HttpError) -> None:
        """Close the connection if it still carries this answer."""
        if self._response is response:
            self.close(error)

    def drain(self, response: Response) -> None:
        """Wait for the end of this answer for a moment."""
        if self._response is response:
            self.resume(response)
            self._ends_s = min(self._ends_s, self._loop.time() + DRAINED_S)
            self._arm(self._ends_s)

    def stalled(self, response: Response) -> None:
        """Take back that the last bytes counted."""
        if self._response is response:
            self._since_s = self._before_s

    def heard_s(self, response: Response) -> float | None:
        """The last sign of this answer; None: the connection carries another, or is not read."""
        return self._since_s if self._response is response and not self._paused else None

    def close(self, error: HttpError) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.fail(error)
        if self._transport is not None:
            self._transport.abort()

    def resume(self, response: Response) -> None:
        if self._paused and self._response is response and self._transport is not None:
            self._paused = False
            self._since_s = self._loop.time()
            self._transport.resume_reading()

    # ---- time ----

    def _arm(self, at_s: float) -> None:
        at_s = min(at_s, self._since_s + KEPT_S)
        if self._timer is None or at_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_s = at_s
            self._timer = self._loop.call_at(at_s + 0.001, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        if self._response is None:
            due_s, error = self._since_s + KEPT_S, HttpError("the connection was not used")
        elif self._paused or self._ends_s < self._since_s + self._idle_s:
            due_s = self._ends_s
            error = HttpError(f"no end of the answer within {self._client.answer_s:g} s", late="answer")
        else:
            due_s = self._since_s + self._idle_s
            error = HttpError(f"nothing arrived for {self._idle_s:g} s", late="idle")
        if now_s >= due_s:
            self.close(error)
            return
        self._timer_s = min(due_s, now_s + KEPT_S)
        self._timer = self._loop.call_at(self._timer_s + 0.001, self._tick)

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._client.connections.add(self)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None or self._parser is None:
            self.close(HttpError("bytes that nobody asked for"))
            return
        self._before_s, self._since_s = self._since_s, self._loop.time()
        failure: HttpParserError | None = None
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            failure = error
        if parts := self._parts:
            self._idle_bytes = 0
            if self._good and not parts[-1].startswith(b":"):
                self._client.heard_s = self._since_s
            if response.on_part is not None and not response.chunks and not response.complete and failure is None:
                part = parts[0] if len(parts) == 1 else b"".join(parts)
                parts.clear()
                if response.on_part(part):
                    return
                parts.append(part)
            if not response.draining:
                response.chunks += parts
            parts.clear()
        else:
            self._idle_bytes += len(data)
        if failure is not None:
            self._broken(response, failure)
        elif response.complete:
            self._end()
            response.changed()
        elif self._idle_bytes > HEAD_BYTES_MAX:
            self.close(HttpError(f"more than {HEAD_BYTES_MAX:,} bytes that are no body"))
        elif response.status:
            response.changed()
            if response.chunks:
                self._leave(response, len(data))

    def _broken(self, response: Response, error: HttpParserError) -> None:
        """Close the connection, whose further bytes cannot be understood. A good answer before them is complete."""
        if response.complete:
            self._response = None
        self.close(HttpError(_reason(error)))
        if response.complete:
            response.changed()

    def _leave(self, response: Response, nbytes: int) -> None:
        """Count a read that the reader leaves where it is. If these are too many bytes, read nothing more."""
        response.left += nbytes
        if response.left > BUFFER_BYTES_MAX and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        if self._response is None:
            self._hung_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._parser = None  # the parser refers to this object
        self._client.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        response, self._response = self._response, None
        if response is None:
            if exc is not None:
                self._hung_up()
            return
        if exc is None and response.status and not self._framed:
            response.complete = True
            response.changed()
            return
        is_soon = self._loop.time() - self._since_s < STALE_S
        stale = self._kept and is_soon and not self._idle_bytes and not response.status
        message = f"the connection was lost: {printable(str(exc))}" if exc is not None else "the connection was closed"
        response.fail(HttpError(message, stale=stale))

    def _hung_up(self) -> None:
        """The server has closed the connection, which is idle."""
        if self._kept and self._client.on_hangup is not None:
            self._client.on_hangup(self._loop.time() - self._since_s)

    def _end(self) -> None:
        """Keep the connection for the next request if that is safe."""
        assert self._transport is not None
        self._response = None
        if not self._keeps or self._paused or self._transport.get_write_buffer_size():
            self._transport.abort()
            return
        self._kept = True
        self._since_s = self._loop.time()
        self._client.keep(self)

    # ---- httptools ----

    def on_message_begin(self) -> None:
        if self._response is None or self._response.complete:
            raise _Unwanted("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        name, response = name.lower(), self._response
        if name in self._kept_headers and response is not None and not response.status:  # no trailer
            headers = response.headers
            headers[name] = headers[name] + b", " + value if name in headers else value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._response is not None
        if self._head_bytes > HEAD_BYTES_MAX:
            raise _Unwanted(f"a head of more than {HEAD_BYTES_MAX:,} bytes")
        response, status = self._response, self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self._interim = True
            response.headers.clear()
            return
        headers = response.headers
        encoding = headers.get(b"transfer-encoding")
        if encoding is not None and encoding.strip().lower() != b"chunked":
            raise _Unwanted("a transfer-encoding that was not asked for")
        if not 200 <= status <= 599:
            raise _Unwanted(f"the status {status}")
        self._framed = encoding is not None or b"content-length" in headers
        self._good = status < 300
        response.status = status

    def on_message_complete(self) -> None:
        assert self._parser is not None
        assert self._response is not None
        if self._interim:
            self._interim = False
            return
        self._keeps = self._parser.should_keep_alive()
        self._response.complete = True


class _Unwanted(Exception):
    """Raised inside the parser's callbacks."""


class HttpClient:
    """Requests to the server at `url`, over as many connections as there are requests at once.

    connect_s, idle_s, answer_s  longest connecting, longest silence in an answer, and longest time of a whole answer
    beside  another client of the server, with which this one shares the server's addresses
    headers_kept  names of an answer's headers, in lower case; the others are not kept
    idle_most  idle connections that are kept, the youngest; None: all
    on_hangup  called when the server closes an idle connection, with the seconds that this was idle
    tls     of https; None: the system's authorities, without a certificate of one's own
    tls_name  in the server's certificate; None: the host of the URL
    Raises ValueError for a URL that is not http or https.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_s: float,
        idle_s: float,
        answer_s: float,
        beside: HttpClient | None = None,
        headers_kept: Collection[bytes] = COMMON_HEADERS,
        idle_most: int | None = None,
        tls: ssl.SSLContext | None = None,
        tls_name: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL of http or https")
        self.idle_s = idle_s
        self.answer_s = answer_s
        self.headers_kept = FRAMING.union(headers_kept)
        self.heard_s = -math.inf  # on the event loop's clock, when bytes of a good answer came that are no comment
        self.connections: set[_Connection] = set()
        if beside is not None:
            self._connector: Connector = beside._connector
        else:
            tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
            port = parts.port or (443 if tls is not None else 80)
            self._connector = Connector(parts.hostname, port, tls, connect_s, tls_name)
        self._prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        self._authority = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        if parts.port is not None:
            self._authority += f":{parts.port}"
        self.on_hangup: Callable[[float], None] | None = None
        self._idle: list[_Connection] = []
        self._idle_most = idle_most

    def opening(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        """The first lines of a request, for `request`; further headers may be appended."""
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"host: {self._authority}", "accept-encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "".join(f"{line}\r\n" for line in lines).encode("latin-1")

    def ask(
        self,
        opening: bytes,
        body: bytes | None,
        on_change: Callable[[], None] | None,
        *,
        fresh: bool = False,
        idle_s: float | None = None,
    ) -> Response:
        """Send a request, if `fresh` on a connection of its own. Close the response after use.

        idle_s : longest silence; None: the client's
        """
        framing = b"\r\n" if body is None else b"content-length: %d\r\n\r\n" % len(body)
        data: tuple[bytes, ...] = (opening + framing,) if body is None else (opening + framing, body)
        if body is not None and len(body) < COPIED_BYTES_MAX:
            data = (b"".join((opening, framing, body)),)
        response = Response(self, data, on_change, self.idle_s if idle_s is None else idle_s)
        connection = None if fresh else self._kept()
        if connection is not None:
            connection.send(response)
        else:
            response.connect(fresh=fresh)
        return response

    async def request(self, opening: bytes, body: bytes | None = None, *, fresh: bool = False) -> Response:
        """As `ask`, and wait for the head of the answer. Raises HttpError."""
        response = self.ask(opening, body, None, fresh=fresh)
        await response.head()
        return response

    async def answer(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> WholeAnswer:
        """Send a request, and wait for the whole answer. Raises HttpError."""
        response = await self.request(self.opening(method, path, headers or {}), body)
        try:
            return WholeAnswer(response.status, response.headers, await response.read(WHOLE_BYTES_MAX))
        finally:
            response.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for connection in list(self.connections):
            connection.close(HttpError("the client was closed"))

    # ---- connections ----

    def keep(self, connection: _Connection) -> None:
        self._idle.append(connection)
        if self._idle_most is not None and len(self._idle) > self._idle_most:
            self._idle.pop(0).close(HttpError("younger connections are kept"))

    def forget(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _kept(self) -> _Connection | None:
        """The youngest kept connection that is open."""
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        return None

    async def connection(self, *, fresh: bool) -> _Connection:
        """A kept connection, the youngest first, or a new one.

        Without a socket left it waits, unless `fresh`, for one or for a kept connection, for connect_s at most.
        """
        loop = asyncio.get_running_loop()
        until_s = 0.0
        while True:
            if not fresh and (kept := self._kept()) is not None:
                return kept
            try:
                return await self._connector.connect(lambda: _Connection(self))
            except HttpError as error:
                until_s = until_s or loop.time() + self._connector.connect_s
                if fresh or not error.local or loop.time() > until_s:
                    raise
            await asyncio.sleep(PAUSE_S)


def _reason(error: HttpParserError) -> str:
    """What is wrong with an answer, in words of this project or of the parser."""
    reason = error.__context__ if isinstance(error.__context__, _Unwanted) else error
    return f"no proper HTTP: {printable(str(reason))}"
