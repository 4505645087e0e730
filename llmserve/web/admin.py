"""Endpoints for operators. All need the admin key.

Who waits; list the engines; drain, resume or restart one; create and revoke keys, and show what they use; read keys,
limits and engines again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
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
from llmserve.scheduling.choice.orders import WAIT_MOST
from llmserve.tenants.guards import Guard
from llmserve.tenants.key_editing import create_key, revoke_key
from llmserve.tenants.key_file import key_rows, read_key_file
from llmserve.tenants.limits import KeyLimits

T = TypeVar("T")

PROGRAMS_MAX = 1000  # of the answer of /admin/queue
ORDERS = {"drain": EngineEvent.DRAIN, "resume": EngineEvent.RESUME, "restart": EngineEvent.RESTART}


class AdminEndpoints:
    """The endpoints below /admin.

    limits  of the clients' keys
    reload  reads keys, limits and engines again. Raises ConfigError
    key_file  of the clients' keys; None: there is none
    """

    def __init__(
        self,
        cluster: LiveCluster,
        admin_key: Guard,
        limits: KeyLimits,
        reload: Callable[[], Awaitable[None]],
        key_file: Path | None = None,
    ) -> None:
        self._key_file = key_file
        self._changing_keys = asyncio.Lock()
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
            route("GET", "/admin/keys", self.list_keys, guard=admin_key),
            route("POST", "/admin/keys", self.create_key, guard=admin_key.with_body),
            route("DELETE", "/admin/keys/{name:path}", self.revoke_key, guard=admin_key),
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
                "wait_bounds_s": self._wait_bounds_s(),
                "program_counts": programs.counts,
                "programs": programs.programs,
            }
        )

    def _wait_bounds_s(self) -> dict[str, float]:
        """Seconds within which every request of a model starts while forecasts of the work are right, under boost."""
        loads = {model: queues.load for model, queues in self._cluster.scheduler.models.items()}
        return {model: WAIT_MOST * load.waits.longest_s for model, load in loads.items() if load is not None}

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

    async def list_keys(self, _: Request) -> Response:
        """The keys of the file of keys, with their limits; never the keys themselves."""
        return json_response({"keys": key_rows(await asyncio.to_thread(read_key_file, self._keys(), warns=False))})

    async def create_key(self, request: Request) -> Response:
        """Add a key to the file of keys: a JSON object with its `name`, and with limits, weight and budgets if wanted.
        The answer has the key, which nobody can read in the file."""
        try:
            fields = msgspec.json.decode(await request.body(), type=dict[str, Any])
            name = fields.pop("name")
        except (msgspec.MsgspecError, KeyError):
            raise BadRequest("the body must be a JSON object with the key's `name`", param="name") from None
        if not isinstance(name, str):
            raise BadRequest("`name` must be a text", param="name")
        key = await self._change_keys(lambda path: create_key(path, name, fields))
        return json_response({"name": name, "key": key}, 201)

    async def revoke_key(self, request: Request) -> Response:
        """Take a key out of the file of keys. Its requests in progress end normally."""
        name = request.path_params["name"]
        await self._change_keys(lambda path: revoke_key(path, name))
        return json_response({"name": name, "revoked": True})

    def _keys(self) -> Path:
        if self._key_file is None:
            raise NotFound("there is no file of keys: start the server with --api-key-file FILE")
        return self._key_file

    async def _change_keys(self, change: Callable[[Path], T]) -> T:
        """Change the file of keys, and read it again; if it cannot be read, the file is as before."""
        path = self._keys()
        async with self._changing_keys:
            try:
                before = await asyncio.to_thread(path.read_bytes)
                changed = await asyncio.to_thread(change, path)
                try:
                    await self._reload()
                except ConfigError:
                    await asyncio.to_thread(path.write_bytes, before)
                    raise
            except (ConfigError, OSError) as error:
                raise BadRequest(str(error), code="configuration") from error
        return changed

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
