"""The plan that a server follows: as the server of a group, or as the gateway of all."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from llmserve.live.cluster import LiveCluster
from llmserve.live.part import Served
from llmserve.part import Commit, Part, Server, do_nothing
from llmserve.planning import group_plan
from llmserve.settings.tree import Config


class Plan(Part):
    """What the server serves by its plan. Of --group it keeps the group's engines only."""

    def check(self, config: Config) -> Config:
        return group_plan.with_plan(config) if config.engines.plan is not None else config

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        config, homes = server.config, group_plan.homes_of(server.config)
        models = homes.models if homes is not None else group_plan.planned_models(config)
        server.add(Served(group_plan.served_models(config), models, homes))
        yield

    def change(self, server: Server, before: Config, after: Config) -> Commit:
        """The file of a gateway's plan is read again."""
        if before.engines.plan is None or after.engines.plan is None:
            return do_nothing
        group_plan.with_plan(after)
        homes = group_plan.homes_of(after)
        return do_nothing if homes is None else lambda: server.get(LiveCluster).fleet.follow(homes)
