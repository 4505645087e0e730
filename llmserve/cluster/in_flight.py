"""A client's call on its way: what the HTTP entrance reads, and what the forwarding task hands over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from llmserve.errors import RequestError
from llmserve.request import Call, Request
from llmserve.scheduling.messages import RequestEnded


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the front-end did for an answer: the x-llmserve-* headers."""

    request_id: int
    bin: int
    batch: int
    engine: str
    queue_ms: float
    predicted_tokens: float | None


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins. body is None when it follows as a stream."""

    status: int
    content_type: str
    retry_after: str | None
    receipt: Receipt
    body: bytes | None


class InFlightCall:
    """One client call on its way: the HTTP entrance awaits `head()`, then reads `chunks()`."""

    def __init__(self, call: Call, request_id: int, *, buffer_bytes_max: int, client_stall_s: float) -> None:
        self.call = call
        self.request = Request(request_id)
        self.arrived_at_s = 0.0
        self.receipt: Receipt | None = None
        self.forecast: Any = None  # the forecaster's own, told how it came true
        self.cut = False  # its answer ran into a limit
        self.task: asyncio.Task[RequestEnded] | None = None  # the task that forwards its answer
        self.gone = False  # its client has left
        self.answered = False  # its client has been given bytes
        self.stopping = False  # its task was told to stop for others: it may be served again
        self.put_off = 0  # times that this happened
        self.refused: Head | None = None  # an engine's own error answer, kept in case no retry does better
        self._head: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._buffer_bytes_max = buffer_bytes_max
        self._client_stall_s = client_stall_s
        self._closed = False
        self._error: RequestError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    # ---- for the HTTP entrance ----

    async def head(self) -> Head:
        """Raises RequestError when the call failed before an answer began."""
        # Shielded: the task that waits here may be cancelled, and the future must still tell how the call ends.
        return await asyncio.shield(self._head)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The stream's bytes. Raises RequestError when it broke off."""
        while True:
            if self._chunks:
                data = b"".join(self._chunks) if len(self._chunks) > 1 else self._chunks[0]
                self._chunks.clear()
                self._buffered_bytes = 0
                _wake(self._writer)
                yield data
            elif self._closed:
                return
            elif self._error is not None:
                raise self._error
            else:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader

    def leave(self) -> None:
        """The client reads no more."""
        self.gone = True
        _wake(self._writer)

    # ---- for the forwarding task ----

    @property
    def complete(self) -> bool:
        """The client's answer is all here, or has failed: no more will come."""
        if self._closed or self._error is not None:
            return True
        return self._head.done() and not self._head.cancelled() and self._head.result().body is not None

    def begin(self, head: Head) -> None:
        self.answered = True
        if not self._head.done():
            self._head.set_result(head)

    async def feed(self, chunk: bytes) -> None:
        """Hand bytes over; waits while the client is too far behind. Raises ClientStalled when it stays there."""
        self._chunks.append(chunk)
        self._buffered_bytes += len(chunk)
        _wake(self._reader)
        while self._buffered_bytes > self._buffer_bytes_max and not self.gone:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._client_stall_s):
                    await self._writer
            except TimeoutError:
                raise ClientStalled from None

    def close(self) -> None:
        self._closed = True
        _wake(self._reader)

    def fail(self, error: RequestError) -> None:
        if not self._head.done():
            self._head.set_exception(error)
            self._head.exception()  # a client that has left never looks at it
        self._error = error
        _wake(self._reader)


class ClientStalled(Exception):
    """A client has left its full buffer unread for too long."""


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
