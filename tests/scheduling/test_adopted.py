"""Requests that run when their scheduler begins: an earlier one has started them, and its process has died."""

from __future__ import annotations

import random

import pytest
from test_engines import engine, placed
from test_scheduler import arrive, new_scheduler
from worlds.invariants import check

from llmserve.live.journal import Header, Step, replay
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    AnswerBegan,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
)
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig

A, B = engine("a", slots=2), engine("b", slots=2)


def adopted(request_id: int, on: EngineInfo = A, **fields: object) -> RequestAdopted:
    return RequestAdopted(Request(request_id, 10.0), on, **fields)  # type: ignore[arg-type]


def ended(request_id: int, name: str = "a", outcome: str = "completed", **fields: object) -> RequestEnded:
    return RequestEnded(name, request_id, outcome, **fields)  # type: ignore[arg-type]


def began_with(*adoptions: RequestAdopted, engines: tuple[EngineInfo, ...] = (A,), **config: object) -> Scheduler:
    """A scheduler that hears of what runs before any engine is ready."""
    scheduler = new_scheduler(batch_size=1, release="greedy", **{"order": "fffs", **config})  # type: ignore[arg-type]
    for event in (*adoptions, *map(EngineReady, engines)):
        step(scheduler, event)
    return scheduler


def step(scheduler: Scheduler, event: Event, now_s: float = 0.0) -> list[Action]:
    actions = scheduler.handle(event, now_s)
    check(scheduler)
    return actions


def test_what_runs_already_holds_its_slot_until_it_ends() -> None:
    scheduler = began_with(adopted(1), adopted(2))
    assert placed(arrive(scheduler, 3)) == []
    assert placed(step(scheduler, ended(1, output_tokens=10.0), 1.0)) == [(3, "a")]


def test_what_runs_already_is_started_by_nobody() -> None:
    scheduler = began_with()
    assert step(scheduler, adopted(1)) == []


def test_what_an_engine_fails_runs_elsewhere_unless_its_client_has_got_a_part() -> None:
    scheduler = began_with(adopted(1), adopted(2, began=True), engines=(A, B))
    assert placed(step(scheduler, ended(1, outcome="failed", fault=True, retryable=True), 1.0)) == [(1, "b")]
    assert placed(step(scheduler, EngineLost("a", answered=(2,)), 2.0)) == []
    assert not scheduler.has(2)


def test_a_client_that_leaves_ends_it() -> None:
    scheduler = began_with(adopted(1))
    assert step(scheduler, RequestCancelled(1), 1.0) == [AbortRequest("a", 1)]
    assert step(scheduler, ended(1, outcome="cancelled"), 1.0) == []
    assert not scheduler.requests


def test_its_whole_time_on_the_engine_counts() -> None:
    scheduler = began_with(adopted(1, ran_s=9.0))
    step(scheduler, ended(1, output_tokens=100.0), 1.0)
    assert scheduler.models[""].service.seconds_per_token == pytest.approx(0.1, rel=0.2)


def test_its_share_is_charged_as_if_it_had_started_here() -> None:
    request = Request(1, 1_000.0, prompt_tokens=50.0, share="ann")
    here, there = began_with(), began_with(RequestAdopted(request, A))
    step(here, RequestArrived(request))
    for scheduler in (here, there):
        step(scheduler, ended(1, output_tokens=10.0), 1.0)
    charged = here.group.served()
    assert charged[0][1]["ann"] > 0.0
    assert there.group.served() == charged


def test_an_engine_that_never_comes_does_not_hold_the_request_for_ever() -> None:
    scheduler = began_with(adopted(1), engines=())
    assert [type(action) for action in step(scheduler, EngineLost("a"), 1.0)] in ([], [FailRequest])
    for action in step(scheduler, RequestCancelled(1), 2.0):
        assert not isinstance(action, AbortRequest)
    assert not scheduler.requests


@pytest.mark.parametrize("order", ["fffs", "boost", "shortest"])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_follows_the_counts_are_right_and_a_replay_is_the_same(order: str, seed: int) -> None:
    rng = random.Random(seed)
    config = SchedulingConfig(batch_size=1, order=order, release="greedy").resolved(barrier=False)
    scheduler, now_s, steps = Header(config).scheduler(), 0.0, list[Step]()

    def tell(event: Event) -> None:
        actions = step(scheduler, event, now_s)
        steps.append(Step(now_s, event, tuple(actions)))

    for number in range(1, 9):
        tell(
            RequestAdopted(Request(number, rng.choice((None, 5.0, 50.0))), rng.choice((A, B)), 3.0, rng.random() < 0.5)
        )
    waiting = list(range(9, 60))
    for _ in range(200):
        now_s += rng.expovariate(5.0)
        running = [(run.engine, number) for number, queued in scheduler.requests.items() if (run := queued.run)]
        kind = rng.random()
        if kind < 0.1:
            tell(rng.choice((EngineReady(A), EngineReady(B), EngineLost("a"))))
        elif kind < 0.4 and waiting:
            tell(RequestArrived(Request(waiting.pop(), rng.choice((None, 5.0, 50.0)))))
        elif kind < 0.5 and scheduler.requests:
            tell(RequestCancelled(rng.choice(sorted(scheduler.requests))))
        elif kind < 0.6 and running:
            tell(AnswerBegan(rng.choice(running)[1]))
        elif running:
            name, number = rng.choice(running)
            failed = rng.random() < 0.2
            outcome = "failed" if failed else "completed"
            tell(ended(number, name, outcome, output_tokens=7.0, fault=failed, retryable=failed))
    assert replay(Header(config), steps) == steps
