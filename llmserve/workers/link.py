"""A link between two processes: messages over a socket, those of one turn of the event loop in one write.

A frame is its length in four bytes, and a list of messages as MessagePack. The other side is this program, too: what
cannot be read is a bug, and ends the link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import msgspec

log = logging.getLogger("llmserve")

LENGTH_BYTES = 4
FRAME_MESSAGES_MAX = 1_000  # so that no frame blocks the other side for long


class Link(asyncio.Protocol):
    """One side of a link.

    reads    the union of the messages that the other side sends
    on_open  called when the link is there; on_lost : when it is lost
    take     called with each message
    """

    def __init__(
        self,
        reads: Any,
        on_open: Callable[[Link], None],
        take: Callable[[Any], None],
        on_lost: Callable[[Link], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(list[reads])
        self._encoder = msgspec.msgpack.Encoder()
        self._on_open, self.take, self._on_lost = on_open, take, on_lost
        self._transport: asyncio.Transport | None = None
        self._waiting: list[Any] = []
        self._partial = bytearray()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def tell(self, message: Any) -> None:
        """Send a message soon, behind all that were told before. What is told to a lost link is lost."""
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(message)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._transport is None or self._transport.is_closing():
            return
        for start in range(0, len(waiting), FRAME_MESSAGES_MAX):
            data = self._encoder.encode(waiting[start : start + FRAME_MESSAGES_MAX])
            self._transport.write(len(data).to_bytes(LENGTH_BYTES) + data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        partial = self._partial
        partial += data
        place, size = 0, len(partial)
        while size - place >= LENGTH_BYTES:
            end = place + LENGTH_BYTES + int.from_bytes(partial[place : place + LENGTH_BYTES])
            if end > size:
                break
            messages = self._decoder.decode(memoryview(partial)[place + LENGTH_BYTES : end].tobytes())
            place = end
            for message in messages:
                try:
                    self.take(message)
                except Exception:  # of one call; the others go on
                    log.exception("a message of another process was not understood: %s", type(message).__name__)
        del partial[:place]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_lost(self)
