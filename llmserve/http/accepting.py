"""The listening socket, and how connections are accepted, or refused when there is no room for them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

from llmserve.http.errors import Refusal
from llmserve.http.exchange import LOG_EVERY_S, Shared
from llmserve.http.heads import HEAD_BYTES_MAX
from llmserve.http.tls import HANDSHAKE_S, SHUTDOWN_S

log = logging.getLogger("llmserve")

ACCEPTS_AT_ONCE = 64
QUEUE_S = 5.0  # for which clients may wait to be accepted
REFUSALS_MAX = 16  # connections that are refused, until the next sweep
CONNECTIONS_MAX = 100_000
FILES_RESERVED = 64


def listening_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket. Call before any slow start. Raises OSError when the port is not available.

    shared : several sockets, each made so, listen on one port; the system deals connections out to them
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), backlog=2048, family=family, reuse_port=shared)


def base_url(listener: socket.socket, *, tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class Acceptor:
    """The accepting side of a listening socket.

    At connections_max the connection that is idle for longest makes room. If none is idle, clients wait in the system's
    queue until a connection ends; when that queue has not been empty for QUEUE_S, those in it are refused.
    protocol : makes the protocol of a connection.  evict : makes room for a connection, and returns whether it has
    tls  of connections from now on; None: plain

    open    connections, with those that are being made
    passes  called with each connection that is accepted: whether somebody else takes it; None: nobody does
    """

    def __init__(
        self,
        listener: socket.socket,
        shared: Shared,
        protocol: Callable[[], asyncio.BufferedProtocol],
        evict: Callable[[], bool],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tls = tls
        self.open = 0
        self.passes: Callable[[socket.socket], bool] | None = None
        self.connections_max = shared.limits.connections_max or _connections_max()
        self.arriving: set[asyncio.Task[Any]] = set()
        self._listener = listener
        self._listener.setblocking(False)
        self._shared = shared
        self._protocol = protocol
        self._evict = evict
        self._loop = asyncio.get_running_loop()
        self._accepting = False
        self._queued = False  # whether clients waited to be accepted, since the last sweep
        self._queued_since_s = math.inf  # since when
        self._refused: deque[socket.socket] = deque()  # their clients still read the refusal
        self._spare = os.open(os.devnull, os.O_RDONLY)  # makes room for a refusal when no file can be opened
        self._files_logged_s = -math.inf

    def start(self) -> None:
        """Accept connections, if none were accepted before."""
        if not self._accepting and not self._shared.closing:
            self._accepting = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.fileno())

    def sweep(self) -> None:
        """Close the connections that were refused, and look at the queue again."""
        self._end_refusals()
        if not self._queued:
            self._queued_since_s = math.inf
        self._queued = False
        self.start()

    def close(self) -> None:
        self.stop()
        self._end_refusals()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _accept(self) -> None:
        connections, now_s = self._shared.connections, self._shared.now_s()
        for number in range(ACCEPTS_AT_ONCE):
            is_full = len(connections.all) + len(self.arriving) >= self.connections_max and not self._evict()
            if is_full and number == 0:  # later on the system's queue may be empty
                self._queued, self._queued_since_s = True, min(self._queued_since_s, now_s)
            if is_full and now_s - self._queued_since_s < QUEUE_S:
                self.stop()  # until a connection ends, or the next sweep
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self.stop()  # until the next sweep
                self._accept_without_files(error)
                return
            sock.setblocking(False)
            if self.passes is not None and self.passes(sock):
                continue
            if is_full:
                self._refuse(sock)
                continue
            self.take(sock)

    def take(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted, here or elsewhere."""
        sock.setblocking(False)
        self.open += 1
        arriving = self._loop.create_task(self._connect(sock))
        self.arriving.add(arriving)
        arriving.add_done_callback(self.arriving.discard)

    async def _connect(self, sock: socket.socket) -> None:
        try:
            if self.tls is None:
                await self._loop.connect_accepted_socket(self._protocol, sock)
            else:
                await self._loop.connect_accepted_socket(
                    self._protocol,
                    sock,
                    ssl=self.tls,
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=SHUTDOWN_S,
                )
        except OSError:  # the client has gone already, or does not speak TLS as the server does
            self.open -= 1
            sock.close()

    def _refuse(self, sock: socket.socket) -> None:
        """Answer a client that is not served. The socket stays open for a moment, for the client may still send.

        Over TLS there is no answer, for a handshake is most of what a connection costs.
        """
        if self.tls is not None:
            self._shared.cut["refused"] += 1
            sock.close()
            return
        refusal = Refusal(503, "connections_max", "this server has no room for another connection", retry_after_s=1.0)
        status, headers, body = self._shared.handler.refusal(refusal, None)
        headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        lines = b"".join([b"%b: %b\r\n" % field for field in headers])
        head = b"HTTP/1.1 %d \r\n%b\r\n" % (status, lines)
        with contextlib.suppress(OSError):
            sock.send(head + body)
            sock.shutdown(socket.SHUT_WR)
        self._shared.cut["refused"] += 1
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
        if self._shared.now_s() - self._files_logged_s >= LOG_EVERY_S:
            self._files_logged_s = self._shared.now_s()
            log.error("no connection can be accepted: %s", error.strerror)
        if error.errno not in (errno.EMFILE, errno.ENFILE) or self._shared.closing:
            return
        self._end_refusals()
        os.close(self._spare)
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._refuse(sock)
            self._end_refusals()
        self._spare = os.open(os.devnull, os.O_RDONLY)


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
