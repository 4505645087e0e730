"""An engine that tells what its prefix cache stores and drops, as vLLM 0.32.0 does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import zmq.asyncio

from llmserve.kv_events.following import END


class Publisher:
    """Both sockets. Messages may be kept back from the first: the second has them.

    endpoint, replay : of the sockets.  asked : the numbers from which messages were asked for again
    """

    def __init__(self, folder: Path) -> None:
        self.endpoint, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.asked: list[int] = []
        self._kept: list[tuple[int, bytes]] = []
        self._number = 0
        self._socket: zmq.asyncio.Socket | None = None

    async def tell(self, *events: object, lost: bool = False) -> None:
        """Send a message. lost : on its way"""
        batch = msgspec.msgpack.encode([1764285000.25, list(events), 0])
        self._kept.append((self._number, batch))
        if not lost:
            assert self._socket is not None, "the sockets are open inside `running`"
            await self._socket.send_multipart([b"", self._number.to_bytes(8), batch])
        self._number += 1

    def restart(self) -> None:
        """Begin anew, as another process would."""
        self._kept, self._number = [], 0

    async def _answer(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            client, _, start = await socket.recv_multipart()
            self.asked.append(int.from_bytes(start))
            for number, batch in self._kept:
                if number >= self.asked[-1]:
                    await socket.send_multipart([client, b"", b"", number.to_bytes(8), batch])
            await socket.send_multipart([client, b"", b"", END, b""])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Publisher]:
        """Open both sockets, and wait for the follower that must come."""
        context = zmq.asyncio.Context()
        self._socket, replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._socket.bind(self.endpoint)
        replay.bind(self.replay)
        answering = asyncio.create_task(self._answer(replay))
        try:
            yield self
        finally:
            answering.cancel()
            context.destroy(linger=0)

    async def followed(self) -> None:
        """Wait until somebody follows."""
        assert self._socket is not None, "the sockets are open inside `running`"
        await self._socket.recv_multipart()


def stored(hashes: list[int], tokens: list[int], parent: int | None = None) -> dict[str, object]:
    """Blocks of equal size."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(tokens) // len(hashes),
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def removed(*hashes: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


CLEARED: dict[str, object] = {"type": "AllBlocksCleared"}
