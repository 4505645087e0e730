"""The events of one engine, from its socket to the scheduler.

The engine numbers its messages. After a gap the missing ones are asked for at the engine's second socket, if it has
one, which keeps some. A number that runs backwards is of an engine that has restarted, with an empty cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from llmserve.kv_events.chains import Chains
from llmserve.kv_events.reading import Cleared, Removed, read_events
from llmserve.scheduling.messages import BLOCKS_MAX, CacheChanged

if TYPE_CHECKING:
    import zmq.asyncio

log = logging.getLogger("llmserve")

REPLAY_S = 2.0  # longest silence of an engine that sends its messages again
END = b"\xff" * 8  # the number of the message after the last
QUEUED_MAX = 100_000  # messages that the socket keeps: as many as vLLM does

Count = Callable[[str, int], None]


class Following:
    """One engine.

    endpoint, replay  of its sockets; replay "": it has no second one
    chains  its blocks
    notify  takes what the scheduler hears
    count   takes what the metrics count, with its number
    """

    def __init__(
        self, engine: str, endpoint: str, replay: str, notify: Callable[[CacheChanged], None], count: Count
    ) -> None:
        self.engine, self.endpoint, self.replay = engine, endpoint, replay
        self.chains = Chains()
        self._notify, self._count = notify, count
        self._heard = False
        self._next = 0  # number of the next message
        self._last = -1  # number of the last message of the first socket
        self._unreadable = False

    async def follow(self, context: zmq.asyncio.Context) -> None:
        """Take the engine's messages, until the task is cancelled."""
        import zmq

        with context.socket(zmq.SUB) as socket:
            socket.set(zmq.RCVHWM, QUEUED_MAX)
            socket.connect(self.endpoint)
            socket.subscribe(b"")
            while True:
                *_, number, batch = await socket.recv_multipart()
                await self._take(int.from_bytes(number), batch, context)

    async def _take(self, number: int, batch: bytes, context: zmq.asyncio.Context) -> None:
        restarted, self._last = number <= self._last, number
        if restarted:
            self._next = 0
            self._clear()
        if number > self._next and self.replay:
            async for earlier, again in self._replayed(context):
                if earlier == self._next:
                    self._apply(earlier, again)
        if number >= self._next:  # else the replay had it
            if number > self._next:
                self._count("missed", number - self._next)
            self._apply(number, batch)

    async def _replayed(self, context: zmq.asyncio.Context) -> AsyncIterator[tuple[int, bytes]]:
        """The messages that the engine has kept, from the next on."""
        import zmq

        with context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.connect(self.replay)
            await socket.send_multipart([b"", self._next.to_bytes(8)])
            while True:
                try:
                    async with asyncio.timeout(REPLAY_S):
                        *_, number, batch = await socket.recv_multipart()
                except TimeoutError:
                    log.warning("engine %s sends no KV events again at %s", self.engine, self.replay)
                    return
                if number == END:
                    return
                yield int.from_bytes(number), batch

    def _apply(self, number: int, batch: bytes) -> None:
        if not self._heard:
            self._heard = True
            log.info("engine %s tells what its cache stores and drops (%s)", self.engine, self.endpoint)
        self._next = number + 1
        self._count("messages", 1)
        try:
            for change in self._changes(batch):
                self._notify(change)
        except ValueError as error:
            if not self._unreadable:
                log.warning("engine %s: a message of its KV events is left out: %s", self.engine, error)
            self._unreadable = True

    def _changes(self, batch: bytes) -> Iterator[CacheChanged]:
        """What a message means for the prompts' blocks, in its order."""
        for event in read_events(batch):
            if isinstance(event, Cleared):
                self._clear()
                continue
            drops = isinstance(event, Removed)
            blocks = self.chains.remove(event.hashes) if isinstance(event, Removed) else self.chains.store(event)
            if blocks:
                self._count("dropped" if drops else "stored", len(blocks))
            for start in range(0, len(blocks), BLOCKS_MAX):
                part = tuple(blocks[start : start + BLOCKS_MAX])
                yield CacheChanged(self.engine, () if drops else part, part if drops else ())

    def _clear(self) -> None:
        self.chains.clear()
        self._count("cleared", 1)
        self._notify(CacheChanged(self.engine, cleared=True))
