"""An order of one's own, as docs/guide/as-a-library.md shows it: a file, a line that names it, and this test."""

from __future__ import annotations

from pathlib import Path

import pytest
from scheduling import longest_waiting
from scheduling.longest_waiting import LongestWaiting
from worlds.invariants import check

from llmserve.policies import ORDERS, SchedulingConfig
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    EngineLost,
    EngineReady,
    Event,
    PreemptBatch,
    RequestArrived,
    RequestEnded,
    StartBatch,
)
from llmserve.scheduling.scheduler import Scheduler
from llmserve.simulate import Scenario, simulate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "as-a-library.md"


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "longest-waiting", lambda config: LongestWaiting())


def config(**values: object) -> SchedulingConfig:
    return SchedulingConfig(order="longest-waiting", **values)  # type: ignore[arg-type]


def step(made: Scheduler, event: Event, now_s: float) -> list[Action]:
    actions = made.handle(event, now_s)
    check(made)
    return actions


def starts(actions: list[Action]) -> list[tuple[str, list[int]]]:
    return [
        (action.engine, [request.id for request in action.batch.requests])
        for action in actions
        if isinstance(action, StartBatch)
    ]


def test_what_has_waited_longest_stops_what_began_last() -> None:
    """The engine of model k is lost, and two that ran requests of m since then serve k, too."""
    made = config(bins=1, batch_size=1).resolved(barrier=True).scheduler()
    for name, model in (("a", "m"), ("b", "m"), ("c", "k")):
        step(made, EngineReady(EngineInfo(name, 1, True, models=(model,))), 0.0)
    assert starts(step(made, RequestArrived(Request(1, model="k")), 0.0)) == [("c", [1])]
    assert step(made, RequestArrived(Request(2, model="k")), 1.0) == []
    step(made, EngineLost("c", answered=(1,)), 2.0)
    assert starts(step(made, RequestArrived(Request(3, model="m")), 3.0)) == [("a", [3])]
    assert starts(step(made, RequestArrived(Request(4, model="m")), 4.0)) == [("b", [4])]
    for name in ("a", "b"):
        assert step(made, EngineReady(EngineInfo(name, 1, True, models=("m", "k"))), 5.0) == []
    (stop,) = step(made, RequestArrived(Request(5, model="k")), 6.0)
    assert stop == PreemptBatch("b", made.requests[4].run.batch_id, (4,))  # type: ignore[union-attr]
    assert starts(step(made, RequestEnded("b", 4, "cancelled"), 7.0)) == [("b", [2])]
    assert starts(step(made, RequestEnded("a", 3, "completed", 5.0), 8.0)) == [("a", [4])], "it came before 5"


def test_nobody_who_came_later_stops_anything() -> None:
    made = config(bins=1, batch_size=1).resolved(barrier=True).scheduler()
    step(made, EngineReady(EngineInfo("a", 1, True)), 0.0)
    step(made, RequestArrived(Request(1)), 0.0)
    assert step(made, RequestArrived(Request(2)), 1.0) == []
    assert starts(step(made, RequestEnded("a", 1, "completed", 5.0), 2.0)) == [("a", [2])]
    assert step(made, RequestArrived(Request(3)), 3.0) == []


def test_it_serves_whole_simulations_under_every_release() -> None:
    for release in ("window", "full", "greedy", "timeout"):
        scenario = Scenario(barrier=True, engines=2, requests=300, arrival_rate=2.0)
        assert simulate(scenario, config(bins=2, batch_size=4, release=release)).completed == 300


def test_the_page_shows_the_very_file() -> None:
    source = Path(longest_waiting.__file__).read_text()
    assert len(source.splitlines()) <= 40
    assert source.strip() in PAGE.read_text()
