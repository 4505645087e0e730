"""A client's call in flight: the forwarding task writes the answer, and the HTTP server reads the answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from llmserve.engines.event_stream import UsageFilter
from llmserve.errors import RequestError
from llmserve.request import Call, Request
from llmserve.scheduling.messages import RequestEnded


@dataclass(frozen=True, slots=True)
class Receipt:
    """How the front-end served a request: the x-llmserve-* headers of its answer."""

    request_id: int
    bin: int
    batch: int
    engine: str
    queue_ms: float
    predicted_tokens: float | None


@dataclass(frozen=True, slots=True)
class Head:
    """The status and headers of an answer. body : None when the body follows as a stream."""

    status: int
    content_type: str
    retry_after: str | None
    receipt: Receipt
    body: bytes | None


class InFlightCall:
    """One client call in flight: the HTTP server awaits `head()`, then reads `chunks()`."""

    def __init__(self, call: Call, request_id: int, *, buffer_bytes_max: int, client_stall_s: float) -> None:
        self.call = call
        self.request = Request(request_id)
        self.arrived_at_s = 0.0
        self.receipt: Receipt | None = None
        self.forecast: Any = None  # the forecaster's own object; goes back to the forecaster with the real length
        self.usage: UsageFilter | None = None  # counts the tokens of a stream
        self.cut = False  # the answer ran into a limit
        self.task: asyncio.Task[RequestEnded] | None = None  # the task that forwards the answer
        self.gone = False  # the client has left
        self.answered = False  # the client has received bytes
        self.stopping = False  # the task is being stopped by a preemption: the call may start again
        self.preemptions = 0
        self.refused: Head | None = None  # the engine's own error answer, for the client if no retry succeeds
        self._head: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._buffer_bytes_max = buffer_bytes_max
        self._client_stall_s = client_stall_s
        self._closed = False
        self._error: RequestError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    # ---- for the HTTP server ----

    async def head(self) -> Head:
        """Raises RequestError when the call failed before an answer began."""
        # Shielded: a cancelled reader must not cancel the future.
        return await asyncio.shield(self._head)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The bytes of the stream. Raises RequestError when the stream broke off."""
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

    @property
    def streamed_tokens(self) -> int:
        """Tokens of the stream so far, of all its choices."""
        return self.usage.output_tokens if self.usage is not None else 0

    def leave(self) -> None:
        """Note that the client reads no more."""
        self.gone = True
        _wake(self._writer)

    # ---- for the forwarding task ----

    @property
    def complete(self) -> bool:
        """Whether the whole answer is in the buffer, or has failed."""
        if self._closed or self._error is not None:
            return True
        return self._head.done() and not self._head.cancelled() and self._head.result().body is not None

    def begin(self, head: Head) -> None:
        self.answered = True
        if not self._head.done():
            self._head.set_result(head)

    async def feed(self, chunk: bytes) -> None:
        """Add bytes to the buffer, and wait while the buffer is over its limit. Raises ClientStalled after too long."""
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
            self._head.exception()  # marks the exception as read: a client that has left never reads it
        self._error = error
        _wake(self._reader)


class ClientStalled(Exception):
    """A client has left its full buffer unread for too long."""


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
