"""The plan that a server follows: its groups of workers, and the models that it serves."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from llmserve.live.cluster import LiveCluster
from llmserve.live.part import Served
from llmserve.part import Commit, Part, Server, do_nothing
from llmserve.planning import group_plan
from llmserve.planning.assignment import assign
from llmserve.planning.regroup import Regrouper
from llmserve.runtime.extras import need
from llmserve.settings.tree import Config


class Plan(Part):
    """What the server serves by its plan. Of --group it keeps the group's engines only."""

    def check(self, config: Config) -> Config:
        if config.engines.replan_every_s is not None:
            need("plan", "scipy", why="replan_every_s")
        return group_plan.with_plan(config) if config.engines.plan is not None else config

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        config = server.config
        server.add(
            Served(
                group_plan.served_models(config),
                group_plan.planned_models(config),
                assign(group_plan.planned_groups(config), {}, {}),
                group_plan.replan_when(config),
            )
        )
        yield


class Regrouping(Part):
    """Keeps the groups of the scheduler in line with the plan, which may change while the server runs."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        config, groups = server.config, server.get(Served).groups
        if not groups:
            yield
            return
        planned, replan = group_plan.planned_groups(config), group_plan.replanner(config)
        regrouper = server.add(Regrouper(server.get(LiveCluster).driver, planned, groups, replan))
        regrouper.start()
        try:
            yield
        finally:
            await regrouper.close()

    def change(self, server: Server, before: Config, after: Config) -> Commit:
        """The file of the plan is read again."""
        regrouper = server.find(Regrouper)
        if regrouper is None:
            return do_nothing
        group_plan.with_plan(after)
        planned = group_plan.planned_groups(after)
        return lambda: regrouper.change_to(planned)
