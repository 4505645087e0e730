"""What a server has just served, read from the steps of its journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from bins.profile import resolve
from llmserve.commands.simulate import Scenario, simulate
from llmserve.live.journal import Header, Step, read
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    EngineReady,
    Event,
    FailRequest,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
    Tuned,
)
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.twin.past import Past
from llmserve.simulation.twin.replay import repeated
from llmserve.simulation.twin.speed import costs_of

HEADER = Header(SchedulingConfig().resolved(barrier=False))


def steps_of(*steps: tuple[float, Event, list[StartBatch | FailRequest]]) -> list[Step]:
    return [Step(now_s, event, tuple(actions)) for now_s, event, actions in steps]


def start(*ids: int, now_s: float) -> StartBatch:
    return StartBatch("e", Batch(ids[0], 0, tuple([Request(number) for number in ids]), now_s, len(ids)))


def test_a_request_that_waits_on_a_full_engine_begins_when_a_slot_is_free() -> None:
    past = Past(HEADER).read(
        steps_of(
            (0.0, EngineReady(EngineInfo("e", 1, False, look_ahead=1)), []),
            (1.0, RequestArrived(Request(1)), [start(1, now_s=1.0)]),
            (2.0, RequestArrived(Request(2)), [start(2, now_s=2.0)]),
            (5.0, RequestEnded("e", 1, "completed", 40.0), []),
            (9.0, RequestEnded("e", 2, "completed", 40.0), []),
        )
    )
    first, second = past.recording().requests
    assert (first.begun_s, first.ended_s, first.running) == (1.0, 5.0, 1.0)
    assert (second.begun_s, second.ended_s, second.running) == (5.0, 9.0, 1.0)


def test_the_number_of_running_requests_is_a_mean_over_the_run() -> None:
    past = Past(HEADER).read(
        steps_of(
            (0.0, EngineReady(EngineInfo("e", 2, False)), []),
            (0.0, RequestArrived(Request(1)), [start(1, now_s=0.0)]),
            (1.0, RequestArrived(Request(2)), [start(2, now_s=1.0)]),
            (4.0, RequestEnded("e", 1, "completed", 40.0), []),
            (5.0, RequestEnded("e", 2, "completed", 40.0), []),
        )
    )
    assert [request.running for request in past.recording().requests] == [7.0 / 4.0, 7.0 / 4.0]


def test_requests_of_unknown_length_are_left_out_and_counted() -> None:
    """Refused ones ask for service all the same; those that wait are of the recording, too."""
    past = Past(HEADER).read(
        steps_of(
            (0.0, EngineReady(EngineInfo("e", 3, False)), []),
            *[(1.0, RequestArrived(Request(number)), [start(number, now_s=1.0)]) for number in (1, 2, 3)],
            (1.0, RequestArrived(Request(4)), []),
            (1.0, RequestArrived(Request(5)), [FailRequest(5, "queue_full")]),
            (1.0, RequestArrived(Request(6)), []),
            (2.0, RequestCancelled(6), []),
            (3.0, RequestCancelled(1), []),
            (3.5, RequestEnded("e", 1, "cancelled"), []),
            (4.0, RequestEnded("e", 2, "failed", fault=True), []),
            (5.0, RequestEnded("e", 3, "completed", 7.0), []),
        )
    )
    recording = past.recording()
    assert [(request.request.id, request.tokens) for request in recording.requests] == [(3, 7.0), (4, None), (5, None)]
    assert recording.left_out == {"cancelled": 2, "failed": 1}
    assert recording.ended == 1


def test_a_request_that_runs_again_is_one_request() -> None:
    past = Past(HEADER).read(
        steps_of(
            (0.0, EngineReady(EngineInfo("e", 1, False)), []),
            (1.0, RequestArrived(Request(1)), [start(1, now_s=1.0)]),
            (2.0, RequestEnded("e", 1, "failed", fault=True, retryable=True), [start(1, now_s=2.0)]),
            (4.0, RequestEnded("e", 1, "completed", 9.0), []),
        )
    )
    (request,) = past.recording().requests
    assert (request.arrived_s, request.begun_s, request.tokens) == (1.0, 2.0, 9.0)


def test_the_order_in_force_is_the_last_one() -> None:
    past = Past(HEADER).read(steps_of((1.0, Tuned({"order": "fffs"}), [])))
    assert past.recording().settings == {"order": "fffs"}


def test_the_last_minutes_are_those_before_the_last_step(tmp_path: Path) -> None:
    simulate(Scenario(requests=200, arrival_rate=1.0), SchedulingConfig(), journal_path=tmp_path / "j")
    header, steps = read(tmp_path / "j")
    recording = Past(header).read(steps).recording(1.0)
    assert 20 < len(recording.requests) < 100
    assert min(request.arrived_s for request in recording.requests) >= steps[-1].now_s - 60.0


@pytest.mark.parametrize("barrier", [False, True])
def test_the_speed_of_an_engine_is_found(tmp_path: Path, barrier: bool) -> None:
    """The simulated engine of a profile whose steps take longer, the more requests run."""
    scenario = Scenario(requests=600, load=0.7, profile="h100-llama-3.1-8b", barrier=barrier, prompts=None)
    simulate(scenario, SchedulingConfig(), journal_path=tmp_path / "j")
    header, steps = read(tmp_path / "j")
    recording = Past(header).read(steps).recording()
    (costs,) = costs_of(recording.requests, recording.engines).values()
    times = resolve("h100-llama-3.1-8b").step_times(8)
    assert costs.step_s[8] == pytest.approx(times.step_s[7], rel=0.03)
    assert costs.step_s[2] == pytest.approx(times.step_s[1], rel=0.05)


def test_a_repeated_recording_has_the_same_rate_and_the_same_requests() -> None:
    past = Past(HEADER)
    steps = [Step(0.0, EngineReady(EngineInfo("e", 100, False)), ())]
    for number in range(300):
        steps.append(Step(0.5 * number, RequestArrived(Request(number, 5.0)), (start(number, now_s=0.5 * number),)))
        steps.append(Step(0.5 * number, RequestEnded("e", number, "completed", 5.0), ()))
    recording = past.read(steps).recording()
    places = repeated(recording, 900)
    assert [index for _, index in places[:300]] == list(range(300))
    assert sorted(index for _, index in places[300:600]) == list(range(300))
    assert [index for _, index in places[300:600]] != list(range(300))
    times_s = [at_s for at_s, _ in places]
    assert times_s == sorted(times_s)
    assert times_s[-1] == pytest.approx(0.5 * 900, rel=0.02)
    assert repeated(recording, 900) == places
