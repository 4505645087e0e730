"""A client of llmserve itself: a gateway passes requests on to the server of a group, as if that were an engine.

The group's server has the queue, and has tried its engines: its errors go to the client. Only what is the group's own
lets the gateway try elsewhere: 503 (it is stopping, or has no engine), 429 (its queue is full), a model that it has
lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmserve.engines.engine import NOTHING, EngineError, Health
from llmserve.engines.openai import HttpAnswer, OpenAIEngine
from llmserve.http.client import Response
from llmserve.request import Batch, Call
from llmserve.wire.error_objects import ErrorObject, Verdict
from llmserve.wire.headers import BATCH_HEADER, BIN_HEADER, ENGINE_HEADER, PREDICTED_HEADER, QUEUE_HEADER
from llmserve.wire.terms import header_of

SLOTS = 100_000  # requests at once: the group's server queues them, and says when its queue is full
NUMBERS = {
    BIN_HEADER: ("bin", int),
    BATCH_HEADER: ("batch", int),
    QUEUE_HEADER: ("queue_ms", float),
    PREDICTED_HEADER: ("predicted_tokens", float),
}


class GroupAnswer(HttpAnswer):
    """The answer of a group's server. served : fields of the receipt, as the group's server tells them"""

    __slots__ = ("served",)

    def __init__(self, response: Response, engine: OpenAIEngine) -> None:
        super().__init__(response, engine)
        self.served = NOTHING

    def _read_head(self, response: Response) -> None:
        super()._read_head(response)
        self.served = _served(response)

    @property
    def heard_s(self) -> None:
        """A group has a queue of its own order, and finds itself what its engines have lost."""
        return

    def stalled(self) -> None:
        """A group's comments say that the request waits in its queue."""

    def judge(self, error: ErrorObject | None, *, names_model: bool) -> Verdict:
        verdict = super().judge(error, names_model=names_model)
        own = self.status in (404, 408, 429, 503)
        return verdict if own else Verdict(fault=False, refused=False)


def _served(response: Response) -> dict[str, Any]:
    headers = response.headers
    engine = headers.get(ENGINE_HEADER.encode())
    if engine is None:
        return {}
    fields: dict[str, Any] = {"engine": engine.decode("latin-1")}
    for header, (name, number) in NUMBERS.items():
        if (text := headers.get(header.encode())) is not None:
            try:
                fields[name] = number(text)
            except ValueError:  # another server has written these headers
                return {}
    return fields


class GroupServer(OpenAIEngine):
    """The server of a group, at a URL. Needs the gateways' key as api_key."""

    def ask(self, call: Call, batch: Batch, on_change: Callable[[], None]) -> HttpAnswer:
        opening = self._opening(call) + header_of(call.terms)
        for name, value in call.wire.headers:
            opening += f"{name}: {value}\r\n".encode("latin-1")
        return self._asked(GroupAnswer, opening, call, None, on_change)

    async def probe(self) -> Health:
        """A group that has just started lists no model, until its engines have come: its requests wait, as if it were
        down. Raises EngineError."""
        health = await super().probe()
        if not health.models:
            raise EngineError(f"group {self.info.name} has no engine yet")
        return health
