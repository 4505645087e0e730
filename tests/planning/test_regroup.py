"""The regrouper keeps a cluster's groups as planned: after a failed plan, the next is made and applied."""

import asyncio
from collections.abc import Callable

from llmserve.live.journal import Header, Journal
from llmserve.planning.assignment import PlannedGroup
from llmserve.planning.regroup import Planned, Regrouper
from llmserve.scheduling.messages import Event, PlanChanged, PlanGroups, ServingGroup, TimerFired
from llmserve.scheduling.rates import Rates
from llmserve.settings.policies import SchedulingConfig

LEFT = PlannedGroup("left", 1, ("m",), workers=("w",))
RIGHT = PlannedGroup("right", 1, ("n",), workers=("w",))


class Driver:
    """A driver as a regrouper sees it: a journal, and a method that takes plans."""

    def __init__(self) -> None:
        self.journal = Journal(Header(SchedulingConfig().resolved(barrier=True)))
        self.told: list[Event] = []

    def step(self, event: Event) -> None:
        self.told.append(event)

    async def rates_are(self, *rates: tuple[str, str, float]) -> None:
        self.journal.append(0.0, TimerFired(), [PlanGroups(rates)])
        await asyncio.sleep(0.05)  # the plan is made in a thread


def regrouped(replan: Callable[[Rates], Planned], *reports: Rates) -> list[Event]:
    """The events that a cluster gets when these rates come one after the other."""

    async def run() -> list[Event]:
        driver = Driver()
        regrouper = Regrouper(driver, (LEFT,), (ServingGroup("left", ("w",), ("m",)),), replan)  # type: ignore[arg-type]
        for rates in reports:
            await driver.rates_are(*rates)
        await regrouper.close()
        return driver.told

    return asyncio.run(run())


def test_new_rates_get_new_groups() -> None:
    events = regrouped(lambda rates: (RIGHT,), (("", "n", 1.0),))
    assert events == [PlanChanged((ServingGroup("right", ("w",), ("n",)),))]


def test_a_failed_plan_leaves_the_groups_and_the_next_plan_is_made() -> None:
    def replan(rates: Rates) -> Planned:
        if rates[0][1] == "m":
            raise RuntimeError("no plan")
        return (RIGHT,)

    events = regrouped(replan, (("", "m", 1.0),), (("", "n", 1.0),))
    assert events == [PlanChanged((ServingGroup("right", ("w",), ("n",)),))]


def test_contradictory_groups_are_not_applied_and_the_next_plan_is_made() -> None:
    def replan(rates: Rates) -> Planned:
        return (LEFT, RIGHT) if rates[0][1] == "m" else (RIGHT,)

    events = regrouped(replan, (("", "m", 1.0),), (("", "n", 1.0),))
    assert events == [PlanChanged((ServingGroup("right", ("w",), ("n",)),))]
