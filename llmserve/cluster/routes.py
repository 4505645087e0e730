"""Which engines can serve a call: those that have its endpoint, or the one that knows what the call goes on from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from llmserve.cluster.answer_forms import COMPLETION
from llmserve.cluster.fleet import EngineHandle, Fleet
from llmserve.cluster.in_flight import InFlightCall
from llmserve.cluster.lanes import Lane
from llmserve.engines.engine import EngineError, Passed
from llmserve.errors import EngineFailed, NotFound, RequestError, Unavailable
from llmserve.request import Call

RESPONSES = "/v1/responses"
RESPONSES_MAX = 50_000  # whose engine is remembered
LANES_UNLISTED_MAX = 256  # so many lanes, and models that no engine lists yet get no more


class _Origin(NamedTuple):
    """Who knows a response. engine : name.  key : name of the key that asked for it"""

    engine: str
    key: str


class Routes:
    """paths : of the endpoints that this server passes to engines"""

    def __init__(self, fleet: Fleet) -> None:
        self.paths: tuple[str, ...] = ()
        self._fleet = fleet
        self._origins: OrderedDict[str, _Origin] = OrderedDict()  # by id of the response, the oldest first

    def routed(self, call: Call) -> Call:
        """The call with the lane in which it waits. Raises NotFound when no engine of its model has the endpoint."""
        serving = self._fleet.serving(call.model)
        able = [handle for handle in serving if call.path in handle.endpoints]
        if serving and not able:
            raise self.missing(call)
        if call.previous and (origin := self._origins.get(call.previous)) is not None:
            lane = Lane(call.model, engine=self._handle_of(origin, call.previous, call.prompt.sender, call.model).name)
            if len(able) == 1:
                return call
        elif call.choices and len(able) == len(serving):
            return call
        else:
            lane = Lane(call.model, call.path)
        if not serving and self._fleet.lanes >= LANES_UNLISTED_MAX:  # clients invent names
            raise Unavailable("no engine has told its models yet", code="no_engine", retry_after_s=1.0)
        self._fleet.open_lane(lane)
        return replace(call, lane=lane.name)

    def no_endpoint(self, handle: EngineHandle, call: Call, status: int, body: bytes) -> RequestError | None:
        """What the client is told when an engine has answered 404 or 405; None: the engine's own words.

        An engine that lists no endpoints speaks of the path unless it names the model or the earlier response.
        """
        if call.path in handle.endpoints:
            names = [name.encode() for name in (call.model, call.previous) if name]
            if handle.endpoints.told is not None or call.form in (None, COMPLETION) or any(n in body for n in names):
                return None
            self._fleet.lacks(handle, call.path)
        if any(call.path in other.endpoints for other in self._fleet.serving(call.model)):
            message = f"engine {handle.name} has no {call.path}; another engine may have it: ask again"
            return Unavailable(message, code="endpoint_not_found", retry_after_s=1.0)
        return self.missing(call)

    def missing(self, call: Call) -> NotFound:
        """The error when no engine of a call's model has its endpoint."""
        there = self.having(self._fleet.serving(call.model))
        return NotFound(
            f"no engine of the model {call.model!r} has {call.path}; there are {', '.join(there) or 'no endpoints'}",
            code="endpoint_not_found",
        )

    def having(self, handles: Iterable[EngineHandle]) -> list[str]:
        """The endpoints that one of these engines has, or may have."""
        each = [handle.endpoints for handle in handles]
        return [path for path in self.paths if any(path in endpoints for endpoints in each)]

    # ---- responses that engines keep ----

    def note(self, in_flight: InFlightCall, response_id: str) -> None:
        """Remember which engine knows a response."""
        assert in_flight.receipt is not None, "an answer comes from an engine"
        self._origins[response_id] = _Origin(in_flight.receipt.engine, in_flight.call.prompt.sender)
        if len(self._origins) > RESPONSES_MAX:
            self._origins.popitem(last=False)

    async def pass_on(
        self, response_id: str, key: str, method: str, path: str, body: bytes | None
    ) -> tuple[str, Passed]:
        """Ask the engine that gave a response; if that is not remembered each engine, until one knows the response.

        Returns the engine's name and its answer. Raises RequestError.
        """
        told: tuple[str, Passed] | None = None
        for handle in self._knowing(response_id, key):
            try:
                told = handle.name, await handle.engine.pass_on(method, path, body)
            except EngineError as error:
                raise EngineFailed(str(error)) from error
            if told[1].status != 404:
                break
        if told is None:
            raise _unknown(response_id)
        return told

    def _knowing(self, response_id: str, key: str) -> list[EngineHandle]:
        origin = self._origins.get(response_id)
        if origin is not None:
            return [self._handle_of(origin, response_id, key)]
        return [handle for handle in self._fleet.handles.values() if handle.up and RESPONSES in handle.endpoints]

    def _handle_of(self, origin: _Origin, response_id: str, key: str, model: str = "") -> EngineHandle:
        handle = self._fleet.handles.get(origin.engine)
        if handle is None or origin.key != key or (model and model not in handle.models):
            raise _unknown(response_id)
        return handle


def _unknown(response_id: str) -> NotFound:
    return NotFound(f"there is no response {response_id!r}", code="response_not_found")
