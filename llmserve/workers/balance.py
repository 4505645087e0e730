"""Relays pass connections to each other that they have accepted, so that all have about as many.

The system deals connections out to the sockets of a port by chance. Of many each relay gets its share; of few, as from
another proxy, one may get most, and these carry many requests each. So a relay that has more connections than another
passes a new one on, before a byte of it is read.
"""

from __future__ import annotations

import asyncio
import mmap
import socket

from llmserve.http.server import Server

ITEM_BYTES = 8
GONE = 1 << 62  # connections of a relay that does not run: nobody passes it one
SLACK = 1 / 8  # of the connections that the least busy relay has: a difference that is not worth passing one on


class Balance:
    """The numbers of connections of all relays, and a way to pass connections to each. Make it before the processes.

    relays : their number
    """

    def __init__(self, relays: int) -> None:
        self._counts = memoryview(mmap.mmap(-1, ITEM_BYTES * relays)).cast("Q")
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(relays)]
        self._takes = [takes for takes, _ in pairs]
        self._gives = [gives for _, gives in pairs]
        for end in (*self._takes, *self._gives):
            end.setblocking(False)

    def taking(self, relay: int) -> socket.socket:
        """What is readable when a connection has been passed to a relay."""
        return self._takes[relay]

    def leave(self, relay: int) -> None:
        """A relay has died: it is passed nothing until the next in its place runs."""
        self._counts[relay] = GONE

    def note(self, relay: int, connections: int) -> None:
        self._counts[relay] = connections

    def better(self, relay: int, connections: int) -> int | None:
        """The relay that shall have a further connection of this one; None: this one. connections : that it has"""
        self._counts[relay] = connections
        counts = self._counts.tolist()
        least = min(counts)
        if connections > least + SLACK * least:
            return counts.index(least)
        self._counts[relay] = connections + 1
        return None

    def give(self, relay: int, connection: socket.socket) -> bool:
        """Pass a connection on. False: it cannot be taken now."""
        try:
            socket.send_fds(self._gives[relay], [b"c"], [connection.fileno()])
        except OSError:
            return False
        self._counts[relay] += 1
        connection.close()
        return True

    def take(self, relay: int) -> socket.socket | None:
        """A connection that was passed to a relay; None: there is no further one."""
        try:
            _, files, _, _ = socket.recv_fds(self._takes[relay], 1, 1)
        except BlockingIOError:
            return None
        return socket.socket(fileno=files[0]) if files else None


class Sharing:
    """The balance as one relay takes part in it."""

    def __init__(self, balance: Balance, relay: int) -> None:
        self._balance, self._relay = balance, relay

    def follow(self, server: Server) -> None:
        """Pass connections of the server on, and take those that others pass. Call inside the running event loop."""
        balance, relay = self._balance, self._relay

        def passes(connection: socket.socket) -> bool:
            better = balance.better(relay, server.connected)
            return better is not None and balance.give(better, connection)

        def take() -> None:
            while (connection := balance.take(relay)) is not None:
                server.take(connection)
                self.note(server)

        self.note(server)
        server.pass_on(passes)
        asyncio.get_running_loop().add_reader(balance.taking(relay), take)

    def note(self, server: Server) -> None:
        self._balance.note(self._relay, server.connected)
