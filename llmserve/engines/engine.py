"""The interface between an engine's handle and the engine: `ask`, `probe` and `close`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from llmserve.engines.dialects import NOTHING_TOLD, UNKNOWN_PROGRAM, Program, Told
from llmserve.engines.slots import SlotsLearner
from llmserve.http.connecting import HttpError
from llmserve.request import Batch, Call, EngineInfo
from llmserve.wire.error_objects import ErrorObject, Verdict


class EngineError(Exception):
    """An engine refused a request, reset the connection, was silent too long, or broke off the answer.

    unreachable  no process listens on the engine's port: the engine is down, not only this request
    local        this process has no socket left: the engine is not to blame
    code         of the error for the client, when no other engine answers; None: the general one
    late         an answer to a request, or to a probe, has passed a limit of time: the engine may still work on it
    answered     the engine has answered, in a way that cannot be passed on: it would work for nothing once more
    refused      the engine has declined the request, and another may take it
    lost         the engine does not work on the request any more, although it goes on with others
    """

    def __init__(
        self,
        message: str,
        *,
        unreachable: bool = False,
        local: bool = False,
        code: str | None = None,
        late: bool = False,
        answered: bool = False,
        refused: bool = False,
        lost: bool = False,
    ) -> None:
        super().__init__(message)
        self.lost = lost
        self.unreachable = unreachable
        self.local = local
        self.code = code
        self.late = late
        self.answered = answered
        self.refused = refused


def late_error(name: str, error: HttpError) -> EngineError:
    """The error of an answer that takes longer than a setting allows."""
    message = f"engine {name} has not answered in time: {error}, see --engine-{error.late}-s"
    return EngineError(message, code="engine_timeout", late=True)


def no_answer(name: str, error: HttpError) -> EngineError:
    """Only a refused connection means unreachable; a timeout does not."""
    if error.local:
        return EngineError(f"this server has no socket left for engine {name}: {error}", local=True)
    if error.late and error.late != "probe":
        return late_error(name, error)
    return EngineError(f"engine {name} does not answer: {error}", unreachable=error.refused, late=bool(error.late))


class Endpoints:
    """The paths of an engine's endpoints.

    told : as the engine lists them; None: it publishes no list, so every path counts until the engine rejects it
    """

    def __init__(self, told: frozenset[str] | None = None) -> None:
        self.told = told
        self._refused: set[str] = set()

    def __contains__(self, path: str) -> bool:
        return path not in self._refused if self.told is None else path in self.told

    def refuse(self, path: str) -> None:
        """Note that the engine has no such path, although it does not list its paths."""
        self._refused.add(path)


class ServedModel(msgspec.Struct, frozen=True):
    """A model in an engine's list.

    context_tokens  longer requests are refused by the engine; None: not told
    created         Unix time, as the engine says; 0: not told.  owned_by : likewise; "": not told
    """

    id: str
    context_tokens: int | None = None
    created: int = 0
    owned_by: str = ""

    def in_context(self, context_tokens: int | None) -> ServedModel:
        return msgspec.structs.replace(self, context_tokens=context_tokens)


@dataclass(frozen=True, slots=True)
class Health:
    """The result of a probe.

    slots        requests that the engine runs at once, if learned from the engine; else None
    tokens_max   capacity of the engine's KV cache in tokens; None if unknown
    slots_found  the engine has no more slots than `slots`, according to the probes so far
    paths        of the engine's endpoints; None: not listed
    load_known   the engine says how many requests run and wait in it
    told         all that the engine says of itself
    program      which program the engine is
    """

    models: tuple[ServedModel, ...]
    slots: int | None = None
    tokens_max: int | None = None
    slots_found: bool = True
    paths: frozenset[str] | None = None
    load_known: bool = True
    told: Told = NOTHING_TOLD
    program: Program = UNKNOWN_PROGRAM


class Passed(msgspec.Struct, frozen=True):
    """An engine's whole answer to a request that was passed on."""

    status: int
    content_type: str
    body: bytes


NOTHING: Mapping[str, Any] = MappingProxyType({})
Headers = tuple[tuple[bytes, bytes], ...]


class Answer(Protocol):
    """An answer on its way. Each method raises EngineError once the engine gives none, or has broken it off.

    The others are there when `arrived` has said so:
    status       200 to 299, or 400 to 599
    retry_after  printable ASCII, as content_type
    headers      further ones for the client, with lower-case names
    complete     the whole body has arrived; parts of it may wait to be taken
    goes_on      more of the body arrives: it is neither complete nor broken off
    served       fields of the receipt that the engine knows better: it is a server of llmserve itself

    heard_s      on the event loop's clock, when the last sign of the answer came, or the request was sent; None: that
                 says nothing of the engine now
    """

    status: int
    content_type: str
    retry_after: str | None
    headers: Headers
    served: Mapping[str, Any]

    @property
    def complete(self) -> bool: ...

    @property
    def goes_on(self) -> bool: ...

    @property
    def heard_s(self) -> float | None: ...

    def arrived(self) -> bool:
        """Whether the status and the headers are there."""
        ...

    def body(self) -> bytes | None:
        """The whole body; None until it is complete."""
        ...

    def take(self) -> bytes:
        """All of the body that has arrived and was not taken; b"" for nothing."""
        ...

    def pass_to(self, on_part: Callable[[bytes], bool]) -> None:
        """Offer each further part of the body to `on_part` as it arrives, while nothing waits to be taken.

        on_part : says whether it has taken the part. If not, the part waits as if nobody had been asked.
        """
        ...

    def judge(self, error: ErrorObject | None, *, names_model: bool) -> Verdict:
        """What follows from an error status, or from an error within an answer; see error_objects.judge."""
        ...

    def stalled(self) -> None:
        """Note that what was last taken says nothing: it is silence."""
        ...

    def drain(self) -> None:
        """Note that nothing of the answer is needed any more, although it may not be complete."""
        ...

    def close(self) -> None:
        """Abort the request, unless the answer is complete."""
        ...


class Engine(Protocol):
    """A client of an engine.

    slots    learns how many requests the engine runs at once; None: `info` is all that is to know
    restart  restart the engine's process and wait until it is ready; None for an engine that llmserve did not start
    on_hangup  called when the engine's process may have ended, as far as an idle connection shows that
    """

    info: EngineInfo
    slots: SlotsLearner | None
    restart: Callable[[], Awaitable[None]] | None
    on_hangup: Callable[[], None] | None

    def ask(self, call: Call, batch: Batch, on_change: Callable[[], None]) -> Answer:
        """Send a call as a member of a batch. The caller must close the answer.

        on_change : called from the event loop whenever more of the answer is there, or nothing more will come
        """
        ...

    async def pass_on(self, method: str, path: str, body: bytes | None) -> Passed:
        """Send a small request that is no work for the engine, and read its answer. Raises EngineError."""
        ...

    async def probe(self) -> Health:
        """Read the engine's models and limits. Raises EngineError when the engine is not ready."""
        ...

    async def close(self) -> None: ...
