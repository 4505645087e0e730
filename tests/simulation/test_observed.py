"""Which batches of a journal show an engine's costs, and the costs that they show."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from bins.fitting import Observation
from llmserve.live.journal import Step
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    BatchEnded,
    EngineLost,
    EngineReady,
    Event,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.simulation.observed import observations


def ready(engine: str = "gpu0", *, barrier: bool = True) -> Step:
    return Step(0.0, EngineReady(EngineInfo(engine, 8, barrier)), ())


def start(now_s: float, ids: Iterable[int], *, batch: int = 1, size: int | None = None, engine: str = "gpu0") -> Step:
    requests = tuple([Request(request_id) for request_id in ids])
    return step_of(now_s, TimerFired(), StartBatch(engine, Batch(batch, 0, requests, 0.0, size or len(requests))))


def step_of(now_s: float, event: Event, *actions: Action) -> Step:
    return Step(now_s, event, actions)


def ended(now_s: float, request_id: int, tokens: float = 10.0, *, engine: str = "gpu0", outcome: str = "completed"):
    return step_of(now_s, RequestEnded(engine, request_id, outcome, tokens))  # type: ignore[arg-type]


def test_a_batch_that_ended_at_once_took_the_steps_of_its_longest_answer():
    steps = [ready(), start(2.0, [1, 2]), step_of(5.0, BatchEnded("gpu0", 1, {1: 30.0, 2: 80.0}))]
    assert observations(steps) == [Observation(2, 80.0, 3.0)]


def test_a_batch_whose_requests_end_one_by_one_took_until_its_last_end():
    steps = [ready(), start(2.0, [1, 2, 3]), ended(3.0, 2, 5), ended(6.5, 1, 90), ended(7.0, 3, 80)]
    assert observations(steps) == [Observation(3, 90.0, 5.0)]


def test_a_batch_that_starts_as_the_one_before_ends_is_a_separate_batch():
    first_ends = step_of(
        4.0, BatchEnded("gpu0", 1, {1: 20.0}), StartBatch("gpu0", Batch(2, 0, (Request(2), Request(3)), 0.0, 2))
    )
    steps = [ready(), start(1.0, [1]), first_ends, step_of(9.0, BatchEnded("gpu0", 2, {2: 7.0, 3: 40.0}))]
    assert observations(steps) == [Observation(1, 20.0, 3.0), Observation(2, 40.0, 5.0)]


def test_batches_of_different_engines_are_independent():
    steps = [ready("a"), ready("b"), start(0.0, [1], batch=1, engine="a"), start(1.0, [2], batch=2, engine="b")]
    steps += [ended(2.0, 2, engine="b"), ended(4.0, 1, engine="a")]
    assert observations(steps) == [Observation(1, 10.0, 1.0), Observation(1, 10.0, 4.0)]


@pytest.mark.parametrize(
    "steps",
    [
        [ready(barrier=False), start(0, [1, 2]), ended(1, 1), ended(2, 2)],
        [ready(), start(0, [1], size=2), ended(1, 1)],
        [ready(), start(0, [1, 2]), ended(1, 1), ended(2, 2, 0.0, outcome="failed")],
        [ready(), start(0, [1, 2]), ended(1, 1), ended(2, 2, 0.0)],
        [
            ready(),
            start(0, [1, 2]),
            step_of(1, RequestCancelled(2), AbortRequest("gpu0", 2)),
            ended(1, 2, 0.0, outcome="cancelled"),
            ended(2, 1),
        ],
        [ready(), start(0, [1, 2]), step_of(1, RequestCancelled(2), AbortRequest("gpu0", 2)), ended(2, 2), ended(3, 1)],
        [ready(), start(0, [1, 2]), ended(1, 1), step_of(2, EngineLost("gpu0")), ended(3, 2)],
        [ready(), start(0, [1, 2])],
        [start(0, [1]), ended(1, 1)],
    ],
    ids=[
        "on a refill engine",
        "split",
        "failed in part",
        "of unknown length",
        "cancelled in part",
        "cancelled in part, in vain",
        "lost with its engine",
        "not ended",
        "on an engine that is not known",
    ],
)
def test_left_out_is_a_batch_that_was(steps: list[Step]):
    assert observations(steps) == []


def test_a_batch_that_ran_again_is_left_out_and_the_next_one_counts():
    steps = [ready("a"), ready("b"), start(0, [1, 2], engine="a"), step_of(1, EngineLost("a"))]
    steps += [start(1, [1, 2], engine="b"), ended(2, 1, engine="b"), ended(3, 2, engine="b")]
    steps += [start(3, [3], batch=2, engine="b"), ended(5, 3, engine="b")]
    assert observations(steps) == [Observation(1, 10.0, 2.0)]


def test_a_request_of_several_choices_has_no_known_longest_answer():
    several = StartBatch("gpu0", Batch(1, 0, (Request(1, choices=3),), 0.0, 1))
    assert observations([ready(), step_of(0.0, TimerFired(), several), ended(1.0, 1)]) == []


def test_other_events_meanwhile_do_not_matter():
    steps = [
        ready(),
        start(0, [1]),
        step_of(1, RequestArrived(Request(2))),
        step_of(2, RequestCancelled(2)),
        ended(3, 1),
    ]
    assert observations(steps) == [Observation(1, 10.0, 3.0)]
