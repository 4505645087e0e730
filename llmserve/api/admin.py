"""What operators may ask for: who runs what, and to drain, resume or restart an engine; all with the admin key only."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.api.answers import json_response
from llmserve.api.limits import KeyLimits
from llmserve.cluster.fleet import EngineHandle, Fleet
from llmserve.errors import BadRequest, NotFound


class AdminEndpoints:
    """key_limits: whose keys are taken; None: there is no office."""

    def __init__(self, fleet: Fleet, key_limits: KeyLimits | None) -> None:
        self._fleet = fleet
        self._key_limits = key_limits

    async def list_engines(self, request: Request) -> Response:
        self._admit(request)
        return json_response({"engines": [_describe(handle) for _, handle in sorted(self._fleet.handles.items())]})

    async def engine_action(self, request: Request) -> Response:
        """drain and resume take effect at once; restart is under way when this answers, see list_engines."""
        self._admit(request)
        name, order = request.path_params["name"], request.path_params["order"]
        handle = self._fleet.handles.get(name)
        if handle is None:
            raise NotFound(f"there is no engine {name!r}; there are {', '.join(sorted(self._fleet.handles))}")
        if order in ("drain", "resume") and handle.restart is not None:
            raise BadRequest(f"engine {name} is being restarted")
        if order == "drain":
            if not handle.up:
                raise BadRequest(f"engine {name} is down: it takes no requests as it is, and will when it is back")
            self._fleet.drain(handle)
        elif order == "resume":
            self._fleet.resume(handle)
        elif order == "restart":
            if handle.engine.restart is None:
                raise BadRequest(f"engine {name} was not started here: drain it, then restart it where it runs")
            self._fleet.begin_restart(handle)
        else:
            raise NotFound(f"an engine can be told to drain, resume or restart, not {order!r}")
        return json_response(_describe(handle), 202 if order == "restart" else 200)

    def _admit(self, request: Request) -> None:
        if self._key_limits is None:
            raise NotFound("there is no /admin: start the server with --admin-key-file FILE to have it")
        self._key_limits.authenticate(request.headers.get("authorization"))


def _describe(handle: EngineHandle) -> dict[str, Any]:
    return {
        "name": handle.name,
        "state": handle.state,
        "running": len(handle.running),
        "slots": handle.info.slots,
        "tokens_max": handle.info.tokens_max,
        "models": list(handle.models),
        "worker": handle.info.worker or None,
    }
