"""A user's own order, as docs/guide/as-a-library.md shows it: a file that a setting names, and this test."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from scheduling import longest_waiting
from scheduling.checked_step import step

from llmserve.__main__ import main
from llmserve.commands.simulate import Scenario, simulate
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    EngineLost,
    EngineReady,
    PreemptBatch,
    RequestArrived,
    RequestEnded,
    StartBatch,
)
from llmserve.settings.policies import SchedulingConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "as-a-library.md"


NAME = "scheduling.longest_waiting:LongestWaiting"


def config(**values: object) -> SchedulingConfig:
    return SchedulingConfig(order=NAME, **values)  # type: ignore[arg-type]


def starts(actions: list[Action]) -> list[tuple[str, list[int]]]:
    return [
        (action.engine, [request.id for request in action.batch.requests])
        for action in actions
        if isinstance(action, StartBatch)
    ]


def test_the_request_that_waited_longest_preempts_the_one_that_began_last() -> None:
    """The engine of model k is lost. Two engines that have run requests of m since then serve k, too."""
    scheduler = config(bins=1, batch_size=1).resolved(barrier=True).scheduler()
    for name, model in (("a", "m"), ("b", "m"), ("c", "k")):
        step(scheduler, EngineReady(EngineInfo(name, 1, True, models=(model,))), 0.0)
    assert starts(step(scheduler, RequestArrived(Request(1, model="k")), 0.0)) == [("c", [1])]
    assert step(scheduler, RequestArrived(Request(2, model="k")), 1.0) == []
    step(scheduler, EngineLost("c", answered=(1,)), 2.0)
    assert starts(step(scheduler, RequestArrived(Request(3, model="m")), 3.0)) == [("a", [3])]
    assert starts(step(scheduler, RequestArrived(Request(4, model="m")), 4.0)) == [("b", [4])]
    for name in ("a", "b"):
        assert step(scheduler, EngineReady(EngineInfo(name, 1, True, models=("m", "k"))), 5.0) == []
    (stop,) = step(scheduler, RequestArrived(Request(5, model="k")), 6.0)
    assert stop == PreemptBatch("b", scheduler.requests[4].run.batch_id, (4,))  # type: ignore[union-attr]
    assert starts(step(scheduler, RequestEnded("b", 4, "cancelled"), 7.0)) == [("b", [2])]
    assert starts(step(scheduler, RequestEnded("a", 3, "completed", 5.0), 8.0)) == [("a", [4])], "4 arrived before 5"


def test_a_later_request_preempts_nothing() -> None:
    scheduler = config(bins=1, batch_size=1).resolved(barrier=True).scheduler()
    step(scheduler, EngineReady(EngineInfo("a", 1, True)), 0.0)
    step(scheduler, RequestArrived(Request(1)), 0.0)
    assert step(scheduler, RequestArrived(Request(2)), 1.0) == []
    assert starts(step(scheduler, RequestEnded("a", 1, "completed", 5.0), 2.0)) == [("a", [2])]
    assert step(scheduler, RequestArrived(Request(3)), 3.0) == []


def test_the_order_serves_whole_simulations_under_every_release() -> None:
    for release in ("window", "full", "greedy", "timeout"):
        scenario = Scenario(barrier=True, engines=2, requests=300, arrival_rate=2.0)
        assert simulate(scenario, config(bins=2, batch_size=4, release=release)).completed == 300


def test_the_page_shows_the_file_verbatim() -> None:
    source = Path(longest_waiting.__file__).read_text()
    assert len(source.splitlines()) <= 40
    assert source.strip() in PAGE.read_text()


def test_the_command_line_names_the_order(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--requests", "200", "--arrival-rate", "2", "--barrier", "--json", "--order"]
    assert main([*command, NAME]) == 0
    own = msgspec.json.decode(capsys.readouterr().out)
    assert main([*command, "shortest"]) == 0
    assert own["completed"] == 200
    assert own["latency_s_mean"] != msgspec.json.decode(capsys.readouterr().out)["latency_s_mean"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:order", "order nowhere:order: ModuleNotFoundError: No module named 'nowhere'"),
        ("scheduling.longest_waiting:Shortest", "AttributeError: .* has no attribute 'Shortest'"),
        ("pathlib:Path", "order pathlib:Path: Path\\(\\) returns a PosixPath, not a FixedOrder or MomentOrder"),
        ("soon", "order .the command line.: expected fffs, shortest, .* or MODULE:FUNCTION, not 'soon'"),
    ],
)
def test_a_name_of_no_order_is_an_error(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["simulate", "--requests", "10"], ["serve", "--port", "0"]):
        assert main([*command, "--order", name]) == 2
        assert re.search(message, capsys.readouterr().err)
