"""What operators may ask for: who runs what, and to drain, resume or restart an engine; all with the admin key only."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.api.answers import json_response
from llmserve.api.limits import Doorkeeper
from llmserve.cluster.fleet import Desk, Fleet
from llmserve.errors import BadRequest, NotFound


class AdminOffice:
    """doorkeeper: whose keys are taken; None: there is no office."""

    def __init__(self, fleet: Fleet, doorkeeper: Doorkeeper | None) -> None:
        self._fleet = fleet
        self._doorkeeper = doorkeeper

    async def list_engines(self, request: Request) -> Response:
        self._admit(request)
        return json_response({"engines": [_describe(desk) for _, desk in sorted(self._fleet.desks.items())]})

    async def give_order(self, request: Request) -> Response:
        """drain and resume take effect at once; restart is under way when this answers, see list_engines."""
        self._admit(request)
        name, order = request.path_params["name"], request.path_params["order"]
        desk = self._fleet.desks.get(name)
        if desk is None:
            raise NotFound(f"there is no engine {name!r}; there are {', '.join(sorted(self._fleet.desks))}")
        if order in ("drain", "resume") and desk.restart is not None:
            raise BadRequest(f"engine {name} is being restarted")
        if order == "drain":
            if not desk.up:
                raise BadRequest(f"engine {name} is down: it takes no requests as it is, and will when it is back")
            self._fleet.drain(desk)
        elif order == "resume":
            self._fleet.resume(desk)
        elif order == "restart":
            if desk.engine.restart is None:
                raise BadRequest(f"engine {name} was not started here: drain it, then restart it where it runs")
            self._fleet.begin_restart(desk)
        else:
            raise NotFound(f"an engine can be told to drain, resume or restart, not {order!r}")
        return json_response(_describe(desk), 202 if order == "restart" else 200)

    def _admit(self, request: Request) -> None:
        if self._doorkeeper is None:
            raise NotFound("there is no /admin: start the server with --admin-key-file FILE to have it")
        self._doorkeeper.admit(request.headers.get("authorization"))


def _describe(desk: Desk) -> dict[str, Any]:
    return {
        "name": desk.name,
        "state": desk.state,
        "running": len(desk.running),
        "slots": desk.info.slots,
        "tokens_max": desk.info.tokens_max,
        "models": list(desk.models),
        "worker": desk.info.worker or None,
    }
