"""What the handle needs of an engine. A seam three methods wide."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from llmserve.request import Batch, Call, EngineInfo


class EngineError(Exception):
    """An engine did not do its work: refused, reset, silent too long, or cut off in the middle.

    unreachable  nobody listens there: the engine is down, not merely this request
    """

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


ENGINE_FAULTS = (500, 502, 503, 504)  # statuses that are the engine's fault, not the request's


class ServedModel(msgspec.Struct, frozen=True):
    """A model as an engine lists it; context_tokens is vLLM's max_model_len where it is told."""

    id: str
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """What a probe found.

    slots        requests that it runs at once, where that is read from the engine; else None
    tokens_max   tokens that its KV cache holds, where it tells
    slots_found  these are all the slots there are, as far as looks at it tell
    """

    models: tuple[ServedModel, ...]
    slots: int | None = None
    tokens_max: int | None = None
    slots_found: bool = True


class Answer(Protocol):
    """An answer that has begun: its status line is there, its body follows.

    fault  it is none, by the engine's fault: the request may run elsewhere
    """

    status: int
    fault: bool
    content_type: str
    retry_after: str | None

    async def read(self) -> bytes:
        """The whole body. Raises EngineError when the engine stops in the middle."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, in pieces of any size. Raises EngineError likewise."""
        ...


class Engine(Protocol):
    """Runs requests somewhere else. Leaving the context of `open` before the end aborts the request there.

    restart  ends its process and starts it again, ready; None for an engine that somebody else runs
    """

    info: EngineInfo
    restart: Callable[[], Awaitable[None]] | None

    def open(self, call: Call, batch: Batch) -> AbstractAsyncContextManager[Answer]:
        """Send a call as a member of a batch. Raises EngineError when no answer begins."""
        ...

    async def probe(self) -> Health:
        """The models it serves now, and what it can hold. Raises EngineError when it is not ready."""
        ...

    async def close(self) -> None: ...
