"""Faulty engines: times and events worked out by hand. A token takes a second."""

import pytest
from worlds.faults import Closed, Fault, FaultyEngine, Lost, Pace, Ready, RequestFault

from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    RequestCancelled,
    RequestEnded,
    TimerFired,
)
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import Delays, SimulatedCluster
from llmserve.simulation.engine_model import TimedEngine

LENGTHS = [4.0, 2.0, 8.0, 1.5]
INFO = EngineInfo("e", 2, False)


def engine(*faults: tuple[float, Fault], info: EngineInfo = INFO, **values: object) -> FaultyEngine:
    return FaultyEngine(lambda: TimedEngine(info, LENGTHS, step_s=1.0), faults, **values)  # type: ignore[arg-type]


def batch(*request_ids: int) -> Batch:
    return Batch(1, 0, tuple([Request(request_id) for request_id in request_ids]), 0.0, len(request_ids))


def remaining_events(faulty: FaultyEngine) -> list[tuple[float, Event]]:
    """All events that the engine still reports."""
    events = []
    while (at_s := faulty.next_end_s) is not None:
        event = faulty.end(at_s)
        if event is not None:
            events.append((at_s, event))
    return events


def ended(request_id: int, tokens: float) -> RequestEnded:
    return RequestEnded("e", request_id, "completed", tokens)


def test_without_faults_the_engine_behaves_as_its_model() -> None:
    faulty = engine()
    faulty.start(batch(0, 1), 3.0)
    assert remaining_events(faulty) == [(5.0, ended(1, 2.0)), (7.0, ended(0, 4.0))]


def test_a_slower_engine_ends_later_by_the_lost_time() -> None:
    """Two of four tokens at full speed, then one in four seconds, then the last at full speed."""
    faulty = engine((2.0, Pace(1 / 4)), (6.0, Pace(1.0)))
    faulty.start(batch(0), 0.0)
    assert remaining_events(faulty) == [(7.0, ended(0, 4.0))]


def test_a_hanging_engine_ends_nothing_until_it_goes_on() -> None:
    faulty = engine((1.0, Pace(0.0)), (11.0, Pace(1.0)))
    faulty.start(batch(0), 0.0)
    assert faulty.end(1.0) is None  # the pace changes without an event
    faulty.start(batch(1), 5.0)
    assert remaining_events(faulty) == [(13.0, ended(1, 2.0)), (14.0, ended(0, 4.0))]


def test_a_lost_engine_forgets_its_requests_and_comes_back_at_full_speed() -> None:
    faulty = engine((1.0, Pace(0.0)), (3.0, Lost()), (4.0, Closed()), (5.0, Ready(slots=7)))
    faulty.start(batch(0, 1), 0.0)
    assert remaining_events(faulty) == [
        (3.0, EngineLost("e")),
        (5.0, EngineReady(EngineInfo("e", 7, False))),
    ]
    faulty.start(batch(0), 6.0)
    assert remaining_events(faulty) == [(10.0, ended(0, 4.0))]


def test_the_given_share_of_clients_has_seen_bytes() -> None:
    chances = iter([0.9, 0.1])
    faulty = engine((1.0, Lost(answered=0.5)), chance=lambda: next(chances))
    faulty.start(batch(0, 2), 0.0)
    assert remaining_events(faulty) == [(1.0, EngineLost("e", answered=(2,)))]


def test_a_closed_engine_finishes_its_requests() -> None:
    faulty = engine((1.0, Closed()), (1.5, Closed()))
    faulty.start(batch(1), 0.0)
    assert remaining_events(faulty) == [(1.0, EngineClosed("e")), (2.0, ended(1, 2.0))]


def test_a_request_fault_is_injected_into_its_own_start() -> None:
    drawn = {0: RequestFault(1.0, "failed", fault=True, retryable=True), 1: RequestFault(9.0, "failed")}
    faulty = engine(request_fault=drawn.get)
    faulty.start(batch(0, 1), 0.0)
    assert remaining_events(faulty) == [
        (1.0, RequestEnded("e", 0, "failed", 0.0, fault=True, retryable=True)),
        (2.0, ended(1, 2.0)),
    ]


def test_an_early_end_leaves_the_rest_of_its_batch_running() -> None:
    faulty = engine(info=EngineInfo("e", 2, True), request_fault={2: RequestFault(3.0, "completed", 3.0)}.get)
    faulty.start(batch(0, 2), 0.0)
    assert remaining_events(faulty) == [(3.0, ended(2, 3.0)), (4.0, BatchEnded("e", 1, {0: 4.0}))]


def test_a_batch_may_be_reported_one_by_one() -> None:
    faulty = engine(info=EngineInfo("e", 2, True), one_by_one=True)
    faulty.start(batch(0, 1), 0.0)
    assert remaining_events(faulty) == [(4.0, ended(0, 4.0)), (4.0, ended(1, 2.0))]


def test_an_aborted_request_is_dropped_even_by_a_hanging_engine() -> None:
    faulty = engine((0.0, Pace(0.0)))
    assert remaining_events(faulty) == []
    faulty.start(batch(0), 1.0)
    faulty.abort(0, 2.0)
    assert faulty.next_end_s is None


def test_a_coarse_clock_lets_ends_coincide() -> None:
    faulty = engine(tick_s=4.0)
    faulty.start(batch(1, 3), 0.0)
    assert remaining_events(faulty) == [(4.0, ended(3, 1.5)), (4.0, ended(1, 2.0))]


def test_a_lost_engine_may_report_old_ends_but_none_of_running_requests() -> None:
    faulty = engine((1.0, Lost()), (1.0, Ready()), stale_s=1.0)
    faulty.start(batch(0, 1), 0.0)
    events = [faulty.end(1.0), faulty.end(1.0)]
    faulty.start(batch(0), 1.0)
    assert events == [EngineLost("e"), EngineReady(INFO)]
    assert remaining_events(faulty) == [(2.0, ended(1, 1.0)), (5.0, ended(0, 4.0))]


# ---- in the simulated body ----


def simulated(faulty: FaultyEngine, delays: Delays | None = None) -> tuple[SimulatedCluster, list[tuple[float, Event]]]:
    steps: list[tuple[float, Event]] = []

    def listen(now_s: float, event: Event, actions: list[Action]) -> None:
        steps.append((now_s, event))

    scheduler = SchedulingConfig(bins=1, release="timeout", batch_wait_s=0.5, batch_size=2).resolved(False).scheduler()
    return SimulatedCluster(scheduler, [faulty], delays=delays, on_step=listen), steps


def test_a_request_whose_engine_died_runs_again_when_it_is_back() -> None:
    cluster, steps = simulated(engine((3.0, Lost()), (5.0, Ready())))
    cluster.run(iter([(0.0, Request(0)), (0.0, Request(1))]), flush=False)
    assert steps[3:] == [
        (2.0, ended(1, 2.0)),
        (3.0, EngineLost("e")),
        (5.0, EngineReady(INFO)),
        (9.0, ended(0, 4.0)),
    ]


def test_external_events_precede_engine_events_of_the_same_instant() -> None:
    cluster, steps = simulated(engine())
    cluster.notify(RequestCancelled(1), 2.0)
    cluster.run(iter([(0.0, Request(0)), (0.0, Request(1))]), flush=False)
    assert steps[3:] == [
        (2.0, RequestCancelled(1)),
        (2.0, RequestEnded("e", 1, "cancelled")),
        (4.0, ended(0, 4.0)),
    ]


def test_an_end_may_cross_the_abort_of_its_request() -> None:
    delays = Delays(abort_s=lambda: 1.5, plan_s=lambda: 0.0, timer_at_s=lambda wanted_s: wanted_s)
    cluster, steps = simulated(engine(), delays)
    cluster.notify(RequestCancelled(1), 1.0)
    cluster.notify(RequestCancelled(0), 1.0)
    cluster.run(iter([(0.0, Request(0)), (0.0, Request(1))]), flush=False)
    assert steps[5:] == [
        (2.0, ended(1, 2.0)),
        (2.5, RequestEnded("e", 1, "cancelled")),
        (2.5, RequestEnded("e", 0, "cancelled")),
    ]


def test_a_late_timer_releases_late() -> None:
    delays = Delays(abort_s=lambda: 0.0, plan_s=lambda: 0.0, timer_at_s=lambda wanted_s: wanted_s + 0.25)
    cluster, steps = simulated(engine(), delays)
    cluster.run(iter([(0.0, Request(1))]), flush=False)
    assert steps[2:] == [(0.75, TimerFired()), (2.75, ended(1, 2.0))]


def test_events_of_the_past_are_refused() -> None:
    cluster, _ = simulated(engine())
    cluster.run(iter([(1.0, Request(1))]))
    with pytest.raises(AssertionError, match="too late"):
        cluster.notify(RequestCancelled(1), 0.5)
