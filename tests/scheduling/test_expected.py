"""Requests wait for engines that are expected: started, restarted, or lost and watched."""

from dataclasses import dataclass, field

import msgspec
import pytest
from worlds.invariants import check

from llmserve.live.journal import Header, Step, replay
from llmserve.request import EngineInfo, Request
from llmserve.scheduling import engine_book
from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    EngineClosed,
    EngineExpected,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    RequestArrived,
    RequestCancelled,
    StartBatch,
    TimerFired,
)
from llmserve.settings.policies import SchedulingConfig

LOST = EngineLost("gpu0", expected=True)
CONFIG = {"bins": 1, "batch_size": 1, "release": "greedy", "order": "fffs", "engine_wait_s": 5.0}


@dataclass
class Driven:
    """A scheduler and the journal of what it was told. After each step its invariants are checked."""

    header: Header
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = self.header.scheduler()

    def step(self, event: Event, now_s: float = 0.0) -> list[Action]:
        actions = self.scheduler.handle(event, now_s)
        check(self.scheduler)
        self.steps.append(Step(now_s, event, tuple(actions)))
        return actions

    def arrive(self, request_id: int, now_s: float = 0.0, model: str = "a") -> list[Action]:
        return self.step(RequestArrived(Request(request_id, 4.0, model=model)), now_s)

    def check_replay(self) -> None:
        header, steps = msgspec.json.decode(
            msgspec.json.encode([self.header, self.steps]), type=tuple[Header, list[Step]]
        )
        assert replay(header, steps) == self.steps


def driven(*events: Event, **config: object) -> Driven:
    scheduling = SchedulingConfig(**{**CONFIG, **config}).resolved(barrier=True)  # type: ignore[arg-type]
    it = Driven(Header(scheduling))
    for event in events:
        it.step(event)
    return it


def gpu(*models: str, name: str = "gpu0", slots: int = 1) -> EngineInfo:
    return EngineInfo(name, slots, barrier=False, models=models)


def started(actions: list[Action]) -> list[tuple[str, int]]:
    starts = [action for action in actions if isinstance(action, StartBatch)]
    return [(start.engine, request.id) for start in starts for request in start.batch.requests]


def failed(actions: list[Action]) -> list[tuple[int, str]]:
    return [(action.request_id, action.reason) for action in actions if isinstance(action, FailRequest)]


def test_requests_wait_for_a_lost_engine_and_run_when_it_is_back() -> None:
    it = driven(EngineReady(gpu("a", slots=2)), LOST)
    assert it.arrive(1, 1.0) + it.arrive(2, 2.0) == []
    assert started(it.step(EngineReady(gpu("a", slots=2)), 3.0)) == [("gpu0", 1), ("gpu0", 2)]
    assert it.scheduler.wake_at_s is None
    it.check_replay()


def test_each_request_waits_for_engine_wait_s() -> None:
    it = driven(EngineReady(gpu("a")))
    it.arrive(1)
    it.arrive(2)
    it.step(LOST, 1.0)
    it.arrive(3, 4.0)
    assert it.scheduler.wake_at_s == 6.0
    assert sorted(failed(it.step(TimerFired(), 6.0))) == [(1, "no_engine"), (2, "no_engine")]
    assert failed(it.step(TimerFired(), 9.0)) == [(3, "no_engine")]
    assert it.arrive(4, 60.0) == [], "a long loss refuses nobody at once"
    it.check_replay()


def test_nobody_waits_for_a_drained_engine() -> None:
    it = driven(EngineReady(gpu("a")), EngineClosed("gpu0"))
    assert failed(it.arrive(1)) == [(1, "no_engine")]
    it.step(EngineLost("gpu0", expected=True))  # it is restarted after all
    assert it.arrive(2) == []
    it.step(EngineClosed("gpu0"))
    assert failed(it.arrive(3)) == [(3, "no_engine")]
    it.check_replay()


def test_an_engine_that_was_removed_and_is_added_again_is_expected_again() -> None:
    it = driven(EngineReady(gpu("a")), EngineClosed("gpu0"), EngineLost("gpu0"), EngineExpected(gpu()))
    assert it.arrive(1) == []
    assert started(it.step(EngineReady(gpu("a")), 1.0)) == [("gpu0", 1)]
    it.step(EngineExpected(gpu()), 2.0)
    it.step(EngineClosed("gpu0"), 3.0)
    assert failed(it.arrive(2, 3.0)) == [(2, "no_engine")]
    it.check_replay()


def test_the_queue_limit_holds_for_those_that_wait_for_an_engine() -> None:
    it = driven(EngineReady(gpu("a")), LOST, queue_requests_max=2)
    assert it.arrive(1) + it.arrive(2) == []
    assert failed(it.arrive(3)) == [(3, "queue_full")]


def test_before_an_engine_was_ever_up_it_may_serve_any_model() -> None:
    it = driven(EngineExpected(gpu()))
    assert it.arrive(1, model="a") + it.arrive(2, model="b") == []
    actions = it.step(EngineReady(gpu("a")), 1.0)
    assert started(actions) == [("gpu0", 1)]
    assert failed(actions) == [(2, "model_not_found")]
    assert list(it.scheduler.models) == ["a"]
    it.check_replay()


def test_a_model_is_not_missing_while_another_engine_may_serve_it() -> None:
    it = driven(EngineExpected(gpu()), EngineExpected(gpu(name="gpu1")))
    it.arrive(1, model="b")
    assert it.step(EngineReady(gpu("a")), 1.0) == []
    assert started(it.step(EngineReady(gpu("b", name="gpu1")), 2.0)) == [("gpu1", 1)]


def test_models_that_clients_invent_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_book, "UNLISTED_MODELS_MAX", 3)
    it = driven(EngineExpected(gpu()))
    assert [failed(it.arrive(number, model=f"m{number}")) for number in range(4)] == [[], [], [], [(3, "no_engine")]]
    assert it.arrive(4, model="m0") == [], "a model for which others wait"
    it.step(RequestCancelled(1), 1.0)
    assert it.arrive(5, 1.0, model="m5") == []
    assert sorted(failed(it.step(TimerFired(), 5.0))) == [(0, "no_engine"), (2, "no_engine"), (4, "no_engine")]
    assert list(it.scheduler.models) == ["m5"]
    it.check_replay()


def test_an_expected_engine_gets_no_request_before_it_is_ready() -> None:
    it = driven(EngineReady(gpu("a")), EngineExpected(gpu(name="gpu1")))
    assert started(it.arrive(1)) == [("gpu0", 1)]
    assert it.arrive(2) == []
    batch_id = it.scheduler.engines["gpu0"].running[1].batch_id
    assert started(it.step(BatchEnded("gpu0", batch_id, {1: 1.0}), 1.0)) == [("gpu0", 2)]
