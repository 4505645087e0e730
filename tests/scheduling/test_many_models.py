"""Engines that list thousands of models: what a changed list costs, in calls of functions, which no machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from llmserve.engines.engine import ServedModel
from llmserve.live.known_models import KnownModels
from llmserve.observe.counters import Families
from llmserve.observe.stream_counts import StreamCounts
from llmserve.observe.table import TABLE
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import EngineReady, RequestArrived
from llmserve.settings.policies import SchedulingConfig


def calls(work: Callable[[], object]) -> int:
    """Number of functions, built-in ones too, that the work calls."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def listing(models: int, name: str) -> EngineInfo:
    return EngineInfo("e", 8, False, models=tuple([f"{name}{number}" for number in range(models)]))


def replaced_in_the_scheduler(models: int, **settings: str) -> int:
    scheduler = SchedulingConfig(**settings).resolved(barrier=False).scheduler()  # type: ignore[arg-type]
    scheduler.handle(EngineReady(listing(models, "a")), 0.0)
    for number in range(20):
        scheduler.handle(RequestArrived(Request(number, model=f"a{number}")), 0.0)
    return calls(lambda: scheduler.handle(EngineReady(listing(models, "b")), 1.0))


def replaced_in_the_fleet(models: int) -> int:
    known = KnownModels()
    before, after = ({f"{name}{number}": ServedModel(f"{name}{number}") for number in range(models)} for name in "ab")
    known.change({}, before)
    return calls(lambda: known.change(before, after))


def replaced_in_the_metrics(models: int) -> int:
    streams = StreamCounts(Families(TABLE))
    for number in range(models):
        streams.of(Request(number, model=f"a{number}"))
    return calls(lambda: streams.keep({f"b{number}" for number in range(models)}))


@pytest.mark.parametrize(
    "replace",
    [
        replaced_in_the_scheduler,
        lambda models: replaced_in_the_scheduler(models, release="table"),
        lambda models: replaced_in_the_scheduler(models, release="timeout"),
        replaced_in_the_fleet,
        replaced_in_the_metrics,
    ],
    ids=["scheduler", "plans", "timed releases", "fleet", "metrics"],
)
def test_three_times_as_many_models_that_change_cost_three_times_as_much(replace: Callable[[int], int]) -> None:
    assert replace(1500) < 3.5 * replace(500)
