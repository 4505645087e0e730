"""The interface between an engine's handle and the engine: `open`, `probe` and `close`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from llmserve.request import Batch, Call, EngineInfo


class EngineError(Exception):
    """An engine refused a request, reset the connection, was silent too long, or broke off the answer.

    unreachable  no process listens on the engine's port: the engine is down, not only this request
    local        this process has no socket left: the engine is not to blame
    code         of the error for the client, when no other engine answers; None: the general one
    """

    def __init__(
        self, message: str, *, unreachable: bool = False, local: bool = False, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.unreachable = unreachable
        self.local = local
        self.code = code


class ServedModel(msgspec.Struct, frozen=True):
    """A model in an engine's list; context_tokens is vLLM's max_model_len, or None if the engine omits it."""

    id: str
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The result of a probe.

    slots        requests that the engine runs at once, if learned from the engine; else None
    tokens_max   capacity of the engine's KV cache in tokens; None if unknown
    slots_found  the engine has no more slots than `slots`, according to the probes so far
    """

    models: tuple[ServedModel, ...]
    slots: int | None = None
    tokens_max: int | None = None
    slots_found: bool = True


class Answer(Protocol):
    """An answer whose head has arrived and can be passed on, and whose body follows.

    status       200 to 299, or 400 to 599
    fault        the engine failed (5xx, 408): the request may run on another engine. 429 is no fault: the engine asks
                 the client to come back later, and says when
    retry_after  printable ASCII, as content_type
    served       fields of the receipt that the engine knows better: it is a server of llmserve itself
    """

    status: int
    fault: bool
    content_type: str
    retry_after: str | None
    served: Mapping[str, Any]

    async def read(self) -> bytes:
        """Return the whole body. Raises EngineError when the engine breaks off the answer."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, in pieces of any size. Raises EngineError as `read` does."""
        ...

    def close(self) -> None:
        """Abort the request, unless the answer is complete."""
        ...


class Engine(Protocol):
    """A client of an engine.

    restart  restart the engine's process and wait until it is ready; None for an engine that llmserve did not start
    """

    info: EngineInfo
    restart: Callable[[], Awaitable[None]] | None

    async def open(self, call: Call, batch: Batch) -> Answer:
        """Send a call as a member of a batch, and wait for the answer's head. The caller must close the answer.

        Raises EngineError when no status line arrives; then, and when cancelled, the request is aborted.
        """
        ...

    async def probe(self) -> Health:
        """Read the engine's models and limits. Raises EngineError when the engine is not ready."""
        ...

    async def close(self) -> None: ...
