"""Nexus's fixed schedules: who runs what when, by hand."""

from __future__ import annotations

import pytest
from papers.shepherd.nexus import Cycle, Slot
from papers.shepherd.nexus_order import Nexus, Schedule
from papers.shepherd.worker import SimulatedWorker
from worlds.invariants import check

from bins.profile import StepTimes
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import Action, BatchEnded, EngineReady, Event, RequestArrived, StartBatch, TimerFired
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster

MS = 1e-3
SPEEDS = {model: StepTimes(10 * MS, tuple([size * MS for size in range(1, 9)])) for model in "xy"}  # 10 + b ms


def follow(*schedules: Schedule, engines: tuple[str, ...] = ("gpu0",)) -> Scheduler:
    config = SchedulingConfig(order="clockwork", batch_size=8, bins=1, edges_refit_every=0, trust_window=1_000)
    made = config.resolved(True).scheduler(scores=(1.0,) * 10, order=Nexus(schedules))
    for name in engines:
        made.handle(EngineReady(EngineInfo(name, 8, barrier=True, models=("x", "y"), speeds=SPEEDS)), 0.0)
    return made


def slot(offset_ms: float, model: str, size: int) -> Slot:
    return Slot(model, size, offset_ms * MS, batch_s=0.0, rate_per_s=0.0)


def cycle(duty_ms: float, *slots: tuple[float, str, int], from_s: float = 0.0, engine: str = "gpu0") -> Schedule:
    """slots : (offset_ms, model, batch_size)."""
    return Schedule(from_s, {engine: Cycle(duty_ms * MS, tuple([slot(*fields) for fields in slots]))})


def step(made: Scheduler, event: Event, now_ms: float) -> list[Action]:
    actions = made.handle(event, now_ms * MS)
    check(made)
    return actions


def arrive(made: Scheduler, ids: range, model: str, now_ms: float, slo_ms: float = 250.0) -> list[Action]:
    actions: list[Action] = []
    for request_id in ids:
        request = Request(request_id, 1.0, (now_ms + slo_ms) * MS, model=model)
        actions += step(made, RequestArrived(request), now_ms)
    return actions


def end(made: Scheduler, action: Action, now_ms: float) -> list[Action]:
    assert isinstance(action, StartBatch)
    tokens = {request.id: 1.0 for request in action.batch.requests}
    return step(made, BatchEnded(action.engine, action.batch.id, tokens), now_ms)


def started(actions: list[Action]) -> list[tuple[str, str, list[int]]]:
    return [
        (action.engine, action.batch.model, [request.id for request in action.batch.requests])
        for action in actions
        if isinstance(action, StartBatch)
    ]


def test_an_engine_idles_until_its_slot_and_says_when_that_is() -> None:
    """A cycle of 60 ms: x at 0, y at 30. What comes at 5 waits: y for 30, x for 60."""
    made = follow(cycle(60, (0, "x", 4), (30, "y", 4)))
    assert started(arrive(made, range(2), "x", 5)) == []
    assert started(arrive(made, range(2, 4), "y", 6)) == []
    assert made.wake_at_s == pytest.approx(30 * MS)
    (batch,) = step(made, TimerFired(), 30)
    assert started([batch]) == [("gpu0", "y", [2, 3])]
    assert started(end(made, batch, 42)) == []
    assert made.wake_at_s == pytest.approx(60 * MS)
    assert started(step(made, TimerFired(), 60)) == [("gpu0", "x", [0, 1])]


def test_a_slot_takes_no_more_than_its_size_and_leaves_the_rest_for_the_next_cycle() -> None:
    """Three of x every 20 ms."""
    made = follow(cycle(20, (0, "x", 3)))
    arrive(made, range(5), "x", 1)
    (batch,) = step(made, TimerFired(), 20)
    assert started([batch]) == [("gpu0", "x", [0, 1, 2])]
    assert started(end(made, batch, 33)) == []
    assert started(step(made, TimerFired(), 40)) == [("gpu0", "x", [3, 4])]


def test_slots_that_follow_each_other_without_a_pause_are_all_kept() -> None:
    """Batches of two take 12 ms, the cycle is twice that: each end is the next slot's beginning, a thousand times. The
    first x comes at 1 ms, too late for the slot at 0; of y only one has come at 12, and one is left for the last slot.
    """
    made = follow(cycle(24, (0, "x", 2), (12, "y", 2)))
    worker = SimulatedWorker(EngineInfo("gpu0", 8, barrier=True, models=("x", "y"), speeds=SPEEDS), [1.0] * 4_000)
    models: list[str] = []
    cluster = SimulatedCluster(
        made, [worker], on_step=lambda _, __, actions: models.extend([model for _, model, _ in started(actions)])
    )
    due = (((1 + 6 * index) * MS, Request(index, 1.0, 1e6, model="xy"[index % 2])) for index in range(2_000))
    cluster.run(due)
    assert models == ["y", "x"] * 500 + ["y"]
    assert worker.busy_s == pytest.approx((999 * 12 + 2 * 11) * MS)
    assert cluster.now_s == pytest.approx((1_001 * 12 + 11) * MS)  # not a slot was missed


def test_what_would_be_late_at_the_end_of_its_batch_is_left_out() -> None:
    """At 20 ms a batch of b ends at 30 + b: those due at 31.5 can only be in time alone, the others together."""
    made = follow(cycle(20, (0, "x", 8)))
    arrive(made, range(2), "x", 1, slo_ms=30.5)
    arrive(made, range(2, 5), "x", 2)
    assert started(step(made, TimerFired(), 20)) == [("gpu0", "x", [2, 3, 4])]


def test_the_next_schedule_replaces_the_first_when_its_time_has_come() -> None:
    """Until 50 ms x every 20; from then on y every 30: at 50, 80, ... The slot at 60 is none any more."""
    made = follow(cycle(20, (0, "x", 4)), cycle(30, (0, "y", 4), from_s=50 * MS))
    arrive(made, range(1), "x", 41)
    arrive(made, range(1, 2), "y", 42)
    assert made.wake_at_s == pytest.approx(50 * MS)
    (batch,) = step(made, TimerFired(), 50)
    assert started([batch]) == [("gpu0", "y", [1])]
    assert started(end(made, batch, 61)) == []
    assert started(step(made, TimerFired(), 80)) == []


def test_each_engine_follows_its_own_cycle_and_one_without_idles() -> None:
    schedule = Schedule(0.0, {"gpu0": Cycle(20 * MS, (slot(0, "x", 1),)), "gpu1": Cycle(30 * MS, (slot(10, "x", 2),))})
    made = follow(schedule, engines=("gpu0", "gpu1", "gpu2"))
    arrive(made, range(6), "x", 1)
    assert made.wake_at_s == pytest.approx(10 * MS)
    assert started(step(made, TimerFired(), 10)) == [("gpu1", "x", [0, 1])]
    assert made.wake_at_s == pytest.approx(20 * MS)
    assert started(step(made, TimerFired(), 20)) == [("gpu0", "x", [2])]


def test_before_the_first_schedule_everything_waits() -> None:
    made = follow(cycle(20, (0, "x", 4), from_s=1.0))
    assert started(arrive(made, range(2), "x", 500, slo_ms=2_000)) == []
    assert made.wake_at_s == pytest.approx(1.0)
    assert started(step(made, TimerFired(), 1_000)) == [("gpu0", "x", [0, 1])]
