"""A client in this process that keeps what a call in flight gives it."""

from __future__ import annotations

import asyncio
from typing import Any

from llmserve.calls.in_flight import Head, InFlightCall, Receipt
from llmserve.errors import RequestError
from llmserve.live.cluster import LiveCluster
from llmserve.request import Call


class Reader:
    """chunks: of a stream so far.  error: that the call failed with."""

    listens = False

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.error: RequestError | None = None
        self._head: asyncio.Future[Head] = asyncio.get_running_loop().create_future()

    async def head(self) -> Head:
        """Raises the call's error when the call failed before its answer began."""
        return await asyncio.shield(self._head)

    async def writable(self) -> None:
        return

    def begin(self, head: Head) -> None:
        self._head.set_result(head)

    def write(self, data: bytes) -> bool:
        self.chunks.append(data)
        return False

    def end(self) -> None:
        assert self._head.done(), "an answer begins before it ends"

    def fail(self, error: RequestError, receipt: Receipt | None) -> None:
        self.error = error
        if not self._head.done():
            self._head.set_exception(error)
            self._head.exception()  # marks the exception as read


def submitted(cluster: LiveCluster, call: Call) -> tuple[InFlightCall, Reader]:
    reader = Reader()
    return cluster.calls.submit(call, reader), reader


async def answered(cluster: LiveCluster, call: Call) -> Any:
    """The head of the answer to this call."""
    return await submitted(cluster, call)[1].head()
