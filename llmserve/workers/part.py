"""The scheduler process's side of relays, as a part of the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from llmserve.gateway.part import Admissions
from llmserve.live.cluster import LiveCluster
from llmserve.observe.metrics import Metrics
from llmserve.part import BehindRelays, Commit, Part, Server, do_nothing
from llmserve.settings.tree import Config
from llmserve.tenants.limits import KeyLimits
from llmserve.tenants.part import KnownKeys

if TYPE_CHECKING:
    from llmserve.workers.desk import Desk

IDS_EACH = 10**12  # of a scheduler process: so many requests have ids of their own, whichever process they came to


class Relays(Part):
    """Takes what relays tell, where relays hold the connections: the very last part, when all is ready for requests."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        behind = server.find(BehindRelays)
        if behind is None:
            yield
            return
        from llmserve.workers.desk import Desk

        cluster, metrics = server.get(LiveCluster), server.get(Metrics)
        limits, ledger = server.get(KeyLimits), server.get(KnownKeys).ledger
        desk = server.add(Desk(cluster, server.get(Admissions), limits, ledger, metrics, behind.relays))
        cluster.on_drain.append(desk.drain)
        metrics.follow_server(desk)
        metrics.follow_relays(desk)
        cluster.calls.number_after(behind.predecessors * IDS_EACH)
        async with desk.listening(str(behind.messages)):
            if behind.predecessors:  # before any engine may start a request: the slots that are in use are known then
                await desk.restored()
            yield

    @contextlib.asynccontextmanager
    async def run(self, server: Server) -> AsyncIterator[None]:
        if (desk := _desk_of(server)) is None:
            yield
            return
        admitting = asyncio.create_task(desk.admit_held())
        try:
            yield
        finally:
            admitting.cancel()

    def change(self, server: Server, before: Config, after: Config) -> Commit:
        """Relays take what this process has taken."""
        desk = _desk_of(server)
        return do_nothing if desk is None else desk.renew


def _desk_of(server: Server) -> Desk | None:
    if server.find(BehindRelays) is None:
        return None
    from llmserve.workers.desk import Desk

    return server.find(Desk)
