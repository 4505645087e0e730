"""The processes of a server with relays: this one starts all others, and starts those again that have died.

It forks before anything slow is loaded, holds the listening sockets, so that clients of a relay that starts again wait
in the system's queue, and does nothing else. Signals go to the scheduler process, whose end ends the relays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmserve.workers.balance import Balance, Sharing

log = logging.getLogger("llmserve")

AGAIN_S = 0.2  # between a death and the next start
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


@dataclass(frozen=True)
class Place:
    """The place of a process among the others.

    listener  of a relay; None: this is the scheduler process
    messages, requests  paths of the scheduler process's sockets
    parent    readable when the process that has started this one is gone
    relays    their number.  predecessors : scheduler processes that have died
    sharing   of connections, of a relay; None: of no other
    """

    listener: socket.socket | None
    messages: Path
    requests: Path
    parent: int
    relays: int
    predecessors: int
    sharing: Sharing | None = None


def relays_of(workers: int | Literal["auto"]) -> int:
    """The number of relays; 1: a single process does everything. workers : of the settings

    By the cores that this process may use, less the scheduler process's: with one core or two, relays gain nothing.
    """
    return max(1, len(os.sched_getaffinity(0)) - 1) if workers == "auto" else workers


def started(listeners: Sequence[socket.socket], folder: Path, *, has_file: bool) -> Place | int:
    """Start a scheduler process, and a relay for each socket.

    Returns in each of them its place, and in this process the exit status, when all have ended.
    folder   for the sockets of the scheduler process.  has_file : whether SIGHUP reads files again; else it is a stop
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    return _Parent(listeners, folder, has_file=has_file).run()


class _Parent:
    """The process that has started the others."""

    def __init__(self, listeners: Sequence[socket.socket], folder: Path, *, has_file: bool) -> None:
        self._listeners, self._folder = listeners, folder
        self._has_file = has_file
        self._balance = Balance(len(listeners))
        self._reads, self._writes = os.pipe()  # nobody writes: the end of this process ends the pipe
        self._relays: dict[int, socket.socket] = {}
        self._scheduler = self._schedulers = 0
        self._stopping = False
        self._status = 0

    def run(self) -> Place | int:
        if (place := self._fork(None)) is not None:
            return place
        for listener in self._listeners:
            if (place := self._fork(listener)) is not None:
                return place
        while self._scheduler or self._relays:
            number = signal.sigwait(SIGNALS)
            if number == signal.SIGCHLD:
                if (place := self._children_ended()) is not None:
                    return place
            elif number == signal.SIGHUP and self._has_file:
                _signal(self._scheduler, signal.SIGHUP)  # which tells the relays, if it takes the settings
            else:
                self._stopping = True
                _signal(self._scheduler, signal.SIGTERM)
        return self._status

    def _fork(self, listener: socket.socket | None) -> Place | None:
        """Start a process. Returns its place there, and None here."""
        pid = os.fork()
        if pid == 0:
            os.close(self._writes)
            os.setpgid(0, 0)  # signals of a terminal are for the parent, which passes them on
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            sockets = self._folder / "messages", self._folder / "requests"
            sharing = Sharing(self._balance, self._listeners.index(listener)) if listener is not None else None
            return Place(listener, *sockets, self._reads, len(self._listeners), self._schedulers, sharing)
        if listener is None:
            self._scheduler = pid
            self._schedulers += 1
        else:
            self._relays[pid] = listener
        return None

    def _children_ended(self) -> Place | None:
        """Start those again that have died. Returns as `_fork`."""
        while True:
            try:
                pid, state = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid == 0:
                return None
            if (place := self._ended(pid, os.waitstatus_to_exitcode(state))) is not None:
                return place

    def _ended(self, pid: int, status: int) -> Place | None:
        if pid == self._scheduler:
            self._scheduler = 0
            if self._stopping or status >= 0:
                self._stopping = True  # it has stopped itself, or cannot start
                self._status = status if status >= 0 else 1
                for relay in self._relays:
                    _signal(relay, signal.SIGTERM)
                return None
            log.error("the scheduler process has died (%d), and starts again", status)
            time.sleep(AGAIN_S)
            return self._fork(None)
        listener = self._relays.pop(pid, None)
        if listener is not None:
            self._balance.leave(self._listeners.index(listener))
        if listener is None or self._stopping:
            return None
        log.error("a relay has died (%d), and starts again", status)
        time.sleep(AGAIN_S)
        return self._fork(listener)


def _signal(pid: int, number: signal.Signals) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
