"""Bytes to one client: how many were written, and whether the client takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Transport(Protocol):
    """What carries a connection's bytes: these methods of asyncio.Transport."""

    def write(self, data: bytes, /) -> None: ...
    def write_eof(self) -> None: ...
    def can_write_eof(self) -> bool: ...
    def get_write_buffer_size(self) -> int: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def is_closing(self) -> bool: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class Outflow:
    """The writing side of a connection.

    written  bytes of all answers so far
    paused   whether more waits to be taken than a writer should add to
    closed   whether the client has gone: then nothing is written
    """

    def __init__(self, transport: Transport, now_s: float) -> None:
        self.written = 0
        self.paused = self.closed = False
        self._transport = transport
        self._taken = 0  # bytes that the client's system had taken at the last look
        self._progress_s = now_s  # when it last took some, or had all
        self._heard = -1  # bytes written when the silence of a stream began; -1: no stream is served
        self._quiet_since_s = 0.0
        self._waiters: list[Callable[[], None]] = []

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.written += len(data)
            self._transport.write(data)

    # ---- a client that reads slowly ----

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """Wake those who wait to write more."""
        self.paused = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()

    def close(self) -> None:
        self.closed = True
        self.resume()

    def when_writable(self, waiter: Callable[[], None]) -> None:
        """Call the waiter once, when the client has read enough, or has gone."""
        self._waiters.append(waiter)

    def has_stalled(self, unread: int, now_s: float, stall_s: float) -> bool:
        """Whether the client has taken nothing for stall_s. unread : bytes that it has not taken"""
        taken = self.written - unread
        if not unread or taken != self._taken:
            self._taken, self._progress_s = taken, now_s
        return now_s - self._progress_s > stall_s

    # ---- a stream without news ----

    def break_silence(self, on_silence: Callable[[], None] | None, now_s: float, after_s: float) -> None:
        """Call on_silence, which writes, if nothing was written for after_s. None: no stream is served"""
        if on_silence is None:
            self._heard = -1
        elif self.written != self._heard:
            self._heard, self._quiet_since_s = self.written, now_s
        elif now_s - self._quiet_since_s >= after_s:
            on_silence()
            self._heard, self._quiet_since_s = self.written, now_s
