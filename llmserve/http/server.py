"""The listening socket, and the server that accepts connections on the socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import os
import socket
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmserve.errors import ConfigError, ListenError, RequestError, Unavailable
from llmserve.gateway.answers import error_parts
from llmserve.http.connection import Connection, http_date
from llmserve.http.exchange import Exchange
from llmserve.http.heads import HEAD_BYTES_MAX
from llmserve.http.proxies import TrustedProxies
from llmserve.http.turns import Turns
from llmserve.runtime.freed_memory import give_back

log = logging.getLogger("llmserve")

ACCEPTS_AT_ONCE = 64
SWEEP_S = 0.5
EVICT_AFTER_S = 0.2  # a connection that has just opened may be about to send
QUEUE_S = 5.0  # for which clients may wait to be accepted
REFUSALS_MAX = 16  # connections that are refused, until the next sweep
LARGE_BYTES = 128 << 10  # glibc gives smaller bodies to the next request
FREED_BYTES, GIVE_BACK_EVERY_S = 8 << 20, 2.0  # of large bodies and connections, after which memory is given back
CONNECTION_BYTES = 4 << 10  # of memory, about
LINGERING_MAX = 256  # connections that were refused, and wait for their clients to stop sending
CLOSE_S, CLOSE_STALL_S = 30.0, 3.0
LOG_EVERY_S = 10.0
CONNECTIONS_MAX = 100_000
FILES_RESERVED = 64


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, *, may_serve_anyone: bool) -> None:
    """Raise ConfigError when other machines can reach the server and nothing restricts access."""
    if not is_loopback(host) and not may_serve_anyone:
        raise ConfigError(
            f"host {host} is reachable from other machines and no API key is required: give --api-key-file FILE, "
            "or --anonymous to serve anyone"
        )


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Call before any slow start. Raises ListenError when the port is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), backlog=2048, family=family)
    except OSError as error:
        raise ListenError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Handler(Protocol):
    """What is done with requests."""

    def admit(self, exchange: Exchange) -> None:
        """Look at a request whose head has arrived: who asks, and who takes the body (`keeps_body`, `upload`).

        Raises RequestError to refuse the request without its body.
        """
        ...

    def handle(self, exchange: Exchange) -> None:
        """Answer a complete request, now or later."""
        ...

    def refused(self, exchange: Exchange, error: RequestError) -> None:
        """Note that the connection answers a request with this error."""
        ...


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """body_bytes_max     of one request
    buffer_bytes_max   of one answer that its client has not taken: more slows the engine down
    buffers_bytes_max  of all requests and answers in memory
    client_stall_s     without a byte taken, until a client is cut off
    connections_max    None: half of the files that the process may open, for each client needs an engine's connection
    keep_alive_s       silence after which a stream gets a comment; 0: never
    trusted_proxies    whose word on the client's address counts
    streamed           paths whose bodies the handler takes as they arrive, and limits itself
    """

    body_bytes_max: int
    buffer_bytes_max: int
    buffers_bytes_max: int
    client_stall_s: float
    connections_max: int | None = None
    keep_alive_s: float = 0.0
    streamed: tuple[str, ...] = ()
    trusted_proxies: TrustedProxies = field(default_factory=lambda: TrustedProxies(()))


class Server:
    """Accepts connections, keeps the sums over them, and cuts off clients that are late.

    At connections_max the connection that is idle for longest makes room. If none is idle, clients wait in the system's
    queue until a connection ends; when that queue has not been empty for QUEUE_S, those in it get status 503.
    cut         connections that the server closed, by reason
    body_bytes  of all requests in memory
    followers   called with each request that has ended
    """

    def __init__(self, handler: Handler, listener: socket.socket, limits: DoorLimits) -> None:
        self.handler = handler
        self.limits = limits
        self.connections: set[Connection] = set()
        self.cut: Counter[str] = Counter()
        self.body_bytes = 0
        self.followers: list[Callable[[Exchange], None]] = []
        self.closing = False
        self.date = http_date()
        self.connections_max = limits.connections_max or _connections_max()
        self.turns = Turns()
        self._kept: dict[str, int] = {}  # bytes of requests in memory, by holder
        self._freed_bytes = 0  # of large bodies and connections, since memory was given back
        self._gave_back_s = -math.inf
        self._unread_bytes = 0  # of all answers, at the last sweep
        self._listener = listener
        self._listener.setblocking(False)
        self._idle: OrderedDict[Connection, float] = OrderedDict()  # since when, the longest first
        self._lingering: OrderedDict[Connection, None] = OrderedDict()  # in the order in which they were refused
        self._queued = False  # whether clients waited to be accepted, since the last sweep
        self._queued_since_s = math.inf  # since when
        self._refused: deque[socket.socket] = deque()  # their clients still read the refusal
        self._spare = os.open(os.devnull, os.O_RDONLY)  # makes room for a refusal when no file can be opened
        self._loop = asyncio.get_running_loop()
        self._accepting = False
        self._arriving: set[asyncio.Task[Any]] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._sweep_s = min(SWEEP_S, limits.keep_alive_s / 4) if limits.keep_alive_s else SWEEP_S
        self._malformed_logged_s = self._files_logged_s = -math.inf

    @property
    def buffered_bytes(self) -> int:
        """Bytes of requests, and of answers that their clients have not taken, in memory."""
        return self.body_bytes + self._unread_bytes

    @property
    def free_bytes(self) -> int:
        return self.limits.buffers_bytes_max - self.body_bytes - self._unread_bytes

    def keep(self, exchange: Exchange, size: int) -> RequestError | None:
        """Count bytes of a body that are kept in memory. Returns the error of a holder that would have too many.

        A holder has no more than what is still free: one alone gets half of the buffers, two a third each. So no client
        takes all, whatever the others do.
        """
        exchange.kept += size
        self.body_bytes += size
        self._kept[exchange.holder] = held = self._kept.get(exchange.holder, 0) + size
        if held <= self.free_bytes:
            return None
        return Unavailable(
            "too many bytes of your requests are in flight (--buffers-bytes-max)",
            code="buffers_full",
            retry_after_s=1.0,
        )

    def forget(self, exchange: Exchange) -> None:
        """The bytes of a body are not in memory any more."""
        self.body_bytes -= exchange.kept
        if held := self._kept.pop(exchange.holder) - exchange.kept:
            self._kept[exchange.holder] = held
        if exchange.kept > LARGE_BYTES:
            self._freed_bytes += exchange.kept
        exchange.kept = 0

    def now_s(self) -> float:
        return self._loop.time()

    def ended(self, exchange: Exchange) -> None:
        """Tell the followers of a request that has ended. Later: the call of one refused at once is not known yet."""
        self._loop.call_soon(self._tell, exchange)

    def _tell(self, exchange: Exchange) -> None:
        for follower in self.followers:
            try:
                follower(exchange)
            except Exception:  # the others must hear of it, too
                log.exception("a follower of ended requests failed")
        exchange.in_flight = None  # the call knows the exchange, too: a cycle would stay until a full collection

    # ---- connections ----

    def start(self) -> None:
        self._accept_again()
        self._sweep()

    def _accept_again(self) -> None:
        if not self._accepting and not self.closing:
            self._accepting = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _stop_accepting(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for number in range(ACCEPTS_AT_ONCE):
            is_full = len(self.connections) + len(self._arriving) >= self.connections_max and not self._evict()
            if is_full and number == 0:  # later on the system's queue may be empty
                self._queued, self._queued_since_s = True, min(self._queued_since_s, self.now_s())
            if is_full and self.now_s() - self._queued_since_s < QUEUE_S:
                self._stop_accepting()  # until a connection ends, or the next sweep
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._stop_accepting()  # until the next sweep
                self._accept_without_files(error)
                return
            sock.setblocking(False)
            if is_full:
                self._refuse(sock)
                continue
            arriving = self._loop.create_task(self._connect(sock))
            self._arriving.add(arriving)
            arriving.add_done_callback(self._arriving.discard)

    def _refuse(self, sock: socket.socket) -> None:
        """Answer a client that is not served. The socket stays open for a moment, for the client may still send."""
        error = Unavailable("this server has no room for another connection", code="connections_max", retry_after_s=1.0)
        status, headers, body = error_parts(error)
        headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        lines = b"".join([b"%b: %b\r\n" % field for field in headers])
        head = b"HTTP/1.1 %d \r\n%b\r\n" % (status, lines)
        with contextlib.suppress(OSError):
            sock.send(head + body)
            sock.shutdown(socket.SHUT_WR)
        self.cut["refused"] += 1
        self._refused.append(sock)
        self._end_refusals(REFUSALS_MAX)

    def _end_refusals(self, most: int = 0) -> None:
        while len(self._refused) > most:
            sock = self._refused.popleft()
            with contextlib.suppress(OSError):
                sock.recv(HEAD_BYTES_MAX)  # what is unread when a socket closes would reset the connection
            sock.close()

    def _accept_without_files(self, error: OSError) -> None:
        """Refuse the first client in the system's queue, and say why."""
        if self.now_s() - self._files_logged_s >= LOG_EVERY_S:
            self._files_logged_s = self.now_s()
            log.error("no connection can be accepted: %s", error.strerror)
        if error.errno not in (errno.EMFILE, errno.ENFILE) or self.closing:
            return
        self._end_refusals()
        os.close(self._spare)
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._refuse(sock)
            self._end_refusals()
        self._spare = os.open(os.devnull, os.O_RDONLY)

    async def _connect(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: Connection(self), sock)
        except OSError:  # the client has gone already
            sock.close()

    def _evict(self) -> bool:
        """Close the connection that is idle for longest. False: none is idle for long enough to be in nobody's use."""
        for connection, since_s in self._idle.items():
            if self.now_s() - since_s < EVICT_AFTER_S:
                return False
            self._cut(connection, "evicted")
            self.closed(connection)
            return True
        return False

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)
        self._idle[connection] = self.now_s()
        if self.closing:
            connection.close_when_answered()

    def busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def idled(self, connection: Connection) -> None:
        self._idle[connection] = self.now_s()

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._idle.pop(connection, None)
        self._lingering.pop(connection, None)
        self.turns.leave(connection)
        self._freed_bytes += CONNECTION_BYTES
        self._accept_again()

    def lingers(self, connection: Connection) -> None:
        """Note a connection that is closed once its client stops sending. Of very many the first are closed at once."""
        self._lingering[connection] = None
        if len(self._lingering) > LINGERING_MAX:
            first, _ = self._lingering.popitem(last=False)
            first.abort()

    def malformed(self, peer: str, error: Exception) -> None:
        """Log a request that is no HTTP, once in a while: anybody can send such."""
        self.cut["malformed"] += 1
        if self.now_s() - self._malformed_logged_s >= LOG_EVERY_S:
            self._malformed_logged_s = self.now_s()
            log.warning("%s sent no HTTP: %r; %d such requests so far", peer, str(error), self.cut["malformed"])

    # ---- sweeps ----

    def _sweep(self) -> None:
        """Look after every connection: who is late, who reads, who has heard nothing, how much is in memory."""
        self._sweeping = self._loop.call_later(self._sweep_s, self._sweep)
        self.date = http_date()
        now_s = self.now_s()
        buffers = []
        for connection in list(self.connections):
            try:
                if buffered := self._look_after(connection, now_s):
                    buffers.append((buffered, connection))
            except Exception:  # the others must be looked after, too
                log.exception("a connection failed, and is cut off")
                self._cut(connection, "failed")
        self._cut_largest(buffers)
        if self._freed_bytes > FREED_BYTES and now_s - self._gave_back_s > GIVE_BACK_EVERY_S:
            self._freed_bytes, self._gave_back_s = 0, now_s
            self._loop.run_in_executor(None, give_back)
        self._end_refusals()
        if not self._queued:
            self._queued_since_s = math.inf
        self._queued = False
        self._accept_again()

    def _look_after(self, connection: Connection, now_s: float) -> int:
        """Cut a connection that is late or stalled. Returns the bytes that the client of another has not taken."""
        if now_s >= connection.due_s:
            self.cut[connection.overdue()] += 1
        connection.check_gone()
        buffered = connection.transport.get_write_buffer_size()
        if not buffered:
            connection.progress_s = now_s
            if self.limits.keep_alive_s:
                connection.break_silence(now_s, self.limits.keep_alive_s)
        elif self._has_stalled(connection, buffered, now_s):
            self._cut(connection, "stalled")
            return 0
        return buffered

    def _has_stalled(self, connection: Connection, buffered: int, now_s: float) -> bool:
        sent = connection.written - buffered
        if sent != connection.sent:
            connection.sent, connection.progress_s = sent, now_s
        stall_s = min(CLOSE_STALL_S, self.limits.client_stall_s) if self.closing else self.limits.client_stall_s
        return now_s - connection.progress_s > stall_s

    def _cut_largest(self, buffers: list[tuple[int, Connection]]) -> None:
        """Cut off the clients that leave most unread, of each holder that has more than what is free."""
        self._unread_bytes = sum(buffered for buffered, _ in buffers)
        held = Counter(self._kept)
        for buffered, connection in buffers:
            held[connection.holder] += buffered
        for buffered, connection in sorted(buffers, key=lambda pair: -pair[0]):
            if held[connection.holder] > self.free_bytes:
                self._unread_bytes -= buffered
                held[connection.holder] -= buffered
                self._cut(connection, "buffers_full")

    def _cut(self, connection: Connection, reason: str) -> None:
        self.cut[reason] += 1
        connection.abort()

    # ---- the end ----

    async def close(self) -> None:
        """Accept nobody, let the last answers out, and close every connection within CLOSE_S.

        A client that reads nothing for CLOSE_STALL_S is cut off.
        """
        self.closing = True
        self._stop_accepting()
        for connection in list(self.connections):
            connection.close_when_answered()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self.connections or self._arriving:  # noqa: ASYNC110 (bounded, once)
                    await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._end_refusals()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def _connections_max() -> int:
    """Half of the files that this process may open, beside those in reserve for engines' probes, logs and pipes."""
    try:
        import resource
    except ImportError:
        return CONNECTIONS_MAX
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(1, min(CONNECTIONS_MAX, (files - min(FILES_RESERVED, files // 2)) // 2))


@contextlib.asynccontextmanager
async def accepting(handler: Handler, listener: socket.socket, limits: DoorLimits) -> AsyncIterator[Server]:
    """Serve on the socket inside the block."""
    server = Server(handler, listener, limits)
    server.start()
    try:
        yield server
    finally:
        await server.close()
