"""Endpoints for operators. All need the admin key.

Who waits; list the engines; drain, resume or restart one; show what keys use; read keys, limits and engines again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.errors import BadRequest, ConfigError, NotFound
from llmserve.gateway.answers import json_response
from llmserve.gateway.api_document import json_body
from llmserve.gateway.own_routes import OwnRoute
from llmserve.live.cluster import LiveCluster
from llmserve.live.engine_state import EngineEvent, refusal
from llmserve.live.handle import EngineHandle
from llmserve.machines.peers import Peers, ToServer
from llmserve.observe.programs_seen import programs_seen
from llmserve.tenants.guards import Guard
from llmserve.tenants.limits import KeyLimits

PROGRAMS_MAX = 1000  # of the answer of /admin/queue
ORDERS = {"drain": EngineEvent.DRAIN, "resume": EngineEvent.RESUME, "restart": EngineEvent.RESTART}


class AdminEndpoints:
    """The endpoints below /admin.

    limits  of the clients' keys
    reload  reads keys, limits and engines again. Raises ConfigError
    """

    def __init__(
        self, cluster: LiveCluster, admin_key: Guard, limits: KeyLimits, reload: Callable[[], Awaitable[None]]
    ) -> None:
        self._cluster = cluster
        self._fleet = cluster.fleet
        self._limits = limits
        self._reload = reload
        self._peers = Peers(cluster, limits)
        route = partial(OwnRoute, tag="admin")
        self.routes = [
            route("GET", "/admin/queue", self.list_waiting, guard=admin_key),
            route("GET", "/admin/engines", self.list_engines, guard=admin_key),
            route("GET", "/admin/usage", self.usage, guard=admin_key),
            route("POST", "/admin/reload", self.reload, guard=admin_key),
            route("POST", "/admin/peers", self.peers, guard=admin_key.with_body, extra=json_body(ToServer)),
            route("POST", "/admin/engines/{name:path}/{order}", self.engine_action, guard=admin_key),
        ]

    async def list_engines(self, _: Request) -> Response:
        """The engines, what each is doing, and what the sources of engines tell."""
        engines = [self._describe(handle) for _, handle in sorted(self._fleet.handles.items())]
        looked = sorted(self._cluster.membership.looked.items())
        sources = [
            {"source": text, "engines": list(one.engines), "trouble": one.trouble or None} for text, one in looked
        ]
        return json_response({"engines": engines, "sources": sources})

    async def list_waiting(self, _: Request) -> Response:
        """The requests that wait, in the order in which they would start; and the programs that are present."""
        cluster = self._cluster
        programs = programs_seen(cluster, PROGRAMS_MAX)
        return json_response(
            {
                "waiting": cluster.scheduler.waiting,
                "queues": cluster.estimator.rows(),
                "program_counts": programs.counts,
                "programs": programs.programs,
            }
        )

    async def engine_action(self, request: Request) -> Response:
        """Drain, resume or restart an engine. A restart is still in progress at the answer: see the list of engines."""
        name, order = request.path_params["name"], request.path_params["order"]
        handle = self._fleet.handles.get(name)
        if handle is None:
            raise NotFound(f"there is no engine {name!r}; the engines are {', '.join(sorted(self._fleet.handles))}")
        if order not in ORDERS:
            raise NotFound(f"the actions of an engine are drain, resume and restart, not {order!r}")
        if (why := refusal(handle.state, ORDERS[order])) is not None:
            raise BadRequest(f"engine {name} {why}")
        if order == "drain":
            self._fleet.drain(handle)
        elif order == "resume":
            self._fleet.resume(handle)
        elif handle.engine.restart is None:
            raise BadRequest(f"engine {name} was not started by llmserve: drain it, then restart it where it runs")
        else:
            self._fleet.restart(handle)
        return json_response(self._describe(handle), 202 if order == "restart" else 200)

    async def usage(self, _: Request) -> Response:
        """What keys have used since the start, and what is spent of their budgets."""
        limits = self._limits
        budgets = [budget.described() for account in limits.accounts for budget in account.budgets]
        return json_response({"usage": limits.usage.shown() if limits.usage is not None else [], "budgets": budgets})

    async def peers(self, request: Request) -> Response:
        """Take this server's parts of the limits; tell the controller of the cluster what came since the last time."""
        return json_response(self._peers.exchange(await request.body()))

    async def reload(self, _: Request) -> Response:
        """Read keys, limits and engines again. An error of the files is status 400; then nothing has changed."""
        try:
            await self._reload()
        except ConfigError as error:
            raise BadRequest(str(error), code="configuration") from error
        return json_response({"engines": sorted(self._fleet.handles)})

    def _describe(self, handle: EngineHandle) -> dict[str, Any]:
        """drains_in_s : predicted seconds until the last running request ends, 0 when none runs."""
        drained_s = self._cluster.estimator.drained_s(handle.running.values())
        return {
            "name": handle.name,
            "kind": str(handle.probed.program) if handle.state.seen else None,
            "state": handle.word,
            "running": len(handle.running),
            "drains_in_s": round(drained_s, 1),
            "slots": handle.info.slots,
            "tokens_max": handle.info.tokens_max,
            "kept_programs": self._cluster.scheduler.group.programs.kept(handle.name)[0],
            "models": list(handle.models),
            "worker": handle.info.worker or None,
            "source": self._cluster.membership.source_of(handle.name) or None,
        }
