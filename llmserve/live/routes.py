"""Which engines can serve a call: engines with the call's endpoint, or the engine that holds the previous response."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llmserve.calls.origins import Origin, Origins
from llmserve.engines.engine import EngineError, Passed
from llmserve.errors import EngineFailed, NotFound, RequestError, Unavailable
from llmserve.live.fleet import Fleet
from llmserve.live.handle import EngineHandle
from llmserve.live.route_queues import RouteQueue
from llmserve.request import Bounds, Call
from llmserve.wire.answer_forms import COMPLETION

RESPONSES = "/v1/responses"
ROUTE_QUEUES_UNLISTED_MAX = 256  # so many route queues, and models that no engine lists yet get no more


class Routes:
    """The engines that can serve each call.

    paths : of the endpoints that this server passes to engines
    origins : of responses that engines keep
    has_keys : whether clients have keys; then a response belongs to one key, and an unknown response to nobody
    engines_are_groups : the engines are servers of llmserve, which know the keys of their responses
    """

    def __init__(self, fleet: Fleet) -> None:
        self.paths: tuple[str, ...] = ()
        self.has_keys: Callable[[], bool] = lambda: False
        self.engines_are_groups = False
        self._fleet = fleet
        self.origins = Origins()

    def route_queue_of(self, path: str, model: str, previous: str, key: str, bounds: Bounds) -> str:
        """Name of the route queue in which a call waits; "": the model's own queue.

        previous, key : the earlier response from which the call goes on, and the name of its client's key
        Raises NotFound when no engine of the model has the endpoint.
        """
        serving = self._fleet.serving(model)
        able = [handle for handle in serving if path in handle.endpoints]
        if serving and not able:
            raise self.missing(path, model)
        origin = self.origins.get(previous) if previous else None
        if previous and origin is None and self.has_keys() and not self.engines_are_groups:
            raise _unknown(previous)
        if origin is not None:
            route_queue = RouteQueue(model, engine=self._handle_of(origin, previous, key, model).name)
            if len(able) == 1:
                return ""
        elif bounds.choices and len(able) == len(serving):
            return ""
        else:
            route_queue = RouteQueue(model, path)
        if not serving and self._fleet.route_queues >= ROUTE_QUEUES_UNLISTED_MAX:  # clients invent names
            raise Unavailable("no engine has told its models yet", code="no_engine", retry_after_s=1.0)
        self._fleet.open_route_queue(route_queue)
        return route_queue.name

    def no_endpoint(self, handle: EngineHandle, call: Call, status: int, body: bytes) -> RequestError | None:
        """What the client is told when an engine has answered 404 or 405; None: the engine's own words.

        An engine that lists no endpoints speaks of the path unless it names the model or the earlier response.
        """
        if call.wire.path in handle.endpoints:
            names = [name.encode() for name in (call.model, call.previous) if name]
            is_completion = call.wire.form in (None, COMPLETION)
            if handle.endpoints.told is not None or is_completion or any(name in body for name in names):
                return None
            self._fleet.lacks(handle, call.wire.path)
        if any(call.wire.path in other.endpoints for other in self._fleet.serving(call.model)):
            message = f"engine {handle.name} has no {call.wire.path}; another engine may have it: ask again"
            return Unavailable(message, code="endpoint_not_found", retry_after_s=1.0)
        return self.missing(call.wire.path, call.model)

    def missing(self, path: str, model: str) -> NotFound:
        """The error when no engine of a model has an endpoint."""
        there = self.having([handle for handle in self._fleet.serving(model) if handle.endpoints.told is not None])
        listed = f"; there are {', '.join(there)}" if there else ""
        return NotFound(f"no engine of the model {model!r} has {path}{listed}", code="endpoint_not_found")

    def having(self, handles: Iterable[EngineHandle]) -> list[str]:
        """The endpoints of these engines, as far as the engines list or have not refused them."""
        each = [handle.endpoints for handle in handles]
        return [path for path in self.paths if any(path in endpoints for endpoints in each)]

    # ---- responses that engines keep ----

    def note(self, response_id: str, engine: str, call: Call) -> None:
        """Remember which engine has answered a call by a response."""
        self.origins.note(response_id, Origin(engine, call.terms.key))

    async def pass_on(
        self, response_id: str, key: str | None, method: str, path: str, body: bytes | None
    ) -> tuple[str, Passed]:
        """Ask the engine that gave a response; if that is not remembered each engine, until one knows the response.

        key : name of the key that asks; None: of a gateway, which knows whose the response is.
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

    def _knowing(self, response_id: str, key: str | None) -> list[EngineHandle]:
        origin = self.origins.get(response_id)
        if origin is not None:
            return [self._handle_of(origin, response_id, key)]
        if key is not None and self.has_keys():
            raise _unknown(response_id)
        return [handle for handle in self._fleet.handles.values() if handle.up and RESPONSES in handle.endpoints]

    def _handle_of(self, origin: Origin, response_id: str, key: str | None, model: str = "") -> EngineHandle:
        handle = self._fleet.handles.get(origin.engine)
        if handle is None or key not in (None, origin.key) or (model and model not in handle.models):
            raise _unknown(response_id)
        return handle


def _unknown(response_id: str) -> NotFound:
    return NotFound(f"there is no response {response_id!r}", code="response_not_found")
