"""Who keeps a cluster's groups as planned: whatever comes of one plan, the next is made and taken."""

import asyncio
from collections.abc import Callable

from llmserve.cluster.assignment import PlannedGroup
from llmserve.cluster.journal import Header, Journal
from llmserve.cluster.regroup import Planned, Regrouper
from llmserve.policies import SchedulingConfig
from llmserve.scheduling.messages import Event, PlanChanged, PlanGroups, ServingGroup, TimerFired
from llmserve.scheduling.rates import Rates

LEFT = PlannedGroup("left", 1, ("m",), workers=("w",))
RIGHT = PlannedGroup("right", 1, ("n",), workers=("w",))


class Cluster:
    """Of which a regrouper sees no more than its journal, and that it tells of plans."""

    def __init__(self) -> None:
        self.journal = Journal(Header(SchedulingConfig().resolved(barrier=True)))
        self.told: list[Event] = []

    def tell(self, event: Event) -> None:
        self.told.append(event)

    async def rates_are(self, *rates: tuple[str, str, float]) -> None:
        self.journal.append(0.0, TimerFired(), [PlanGroups(rates)])
        await asyncio.sleep(0.05)  # the plan is made in a thread


def regrouped(replan: Callable[[Rates], Planned], *reports: Rates) -> list[Event]:
    """What a cluster is told when such rates come one after the other."""

    async def run() -> list[Event]:
        cluster = Cluster()
        regrouper = Regrouper(cluster, (LEFT,), (ServingGroup("left", ("w",), ("m",)),), replan)  # type: ignore[arg-type]
        for rates in reports:
            await cluster.rates_are(*rates)
        await regrouper.close()
        return cluster.told

    return asyncio.run(run())


def test_other_rates_get_other_groups() -> None:
    events = regrouped(lambda rates: (RIGHT,), (("", "n", 1.0),))
    assert events == [PlanChanged((ServingGroup("right", ("w",), ("n",)),))]


def test_a_plan_that_cannot_be_made_leaves_the_groups_and_the_next_one_is_made() -> None:
    def replan(rates: Rates) -> Planned:
        if rates[0][1] == "m":
            raise RuntimeError("no plan")
        return (RIGHT,)

    events = regrouped(replan, (("", "m", 1.0),), (("", "n", 1.0),))
    assert events == [PlanChanged((ServingGroup("right", ("w",), ("n",)),))]


def test_a_plan_whose_groups_contradict_each_other_is_told_to_nobody_and_the_next_one_is_made() -> None:
    def replan(rates: Rates) -> Planned:
        return (LEFT, RIGHT) if rates[0][1] == "m" else (RIGHT,)

    events = regrouped(replan, (("", "m", 1.0),), (("", "n", 1.0),))
    assert events == [PlanChanged((ServingGroup("right", ("w",), ("n",)),))]
