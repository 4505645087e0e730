"""FLEX as Algorithm 2 is printed: batches that hold requests which they make late."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from papers.shepherd.printed_flex import Chosen, PrintedFlex, as_printed
from worlds.invariants import check

from bins.profile import StepTimes
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    EngineReady,
    Event,
    PreemptBatch,
    RequestArrived,
    StartBatch,
)
from llmserve.scheduling.queues.deadline_queue import ROUNDING_S, DeadlineQueue, largest_feasible
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig

QUEUES = 1_000
LINEAR_S = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]  # T(1), T(2), ..., so that T(0) is 0


def queue(*deadlines_s: float) -> DeadlineQueue:
    """Requests 0, 1, ... with these deadlines."""
    made = DeadlineQueue(0)
    for request_id, deadline_s in enumerate(deadlines_s):
        made.append(QueuedRequest(Request(request_id, deadline_s=deadline_s), 0, 0.0))
    return made


def step(made: Scheduler, event: Event, now_s: float = 0.0) -> list[Action]:
    actions = made.handle(event, now_s)
    check(made)
    return actions


def scheduler(order: PrintedFlex) -> Scheduler:
    """With a GPU on which a batch of b takes b seconds."""
    config = SchedulingConfig(order="clockwork", batch_size=6, bins=1)
    made = config.resolved(barrier=True).scheduler((1.0,), order=order)
    step(made, EngineReady(EngineInfo("gpu0", 6, barrier=True, speeds={"": StepTimes(0.0, tuple(LINEAR_S))})))
    return made


def arrive(made: Scheduler, deadlines_s: dict[int, float], now_s: float) -> list[Action]:
    """By request id."""
    actions: list[Action] = []
    for request_id, deadline_s in deadlines_s.items():
        actions += step(made, RequestArrived(Request(request_id, 1.0, deadline_s)), now_s)
    return actions


def started(actions: list[Action]) -> list[list[int]]:
    return [[request.id for request in action.batch.requests] for action in actions if isinstance(action, StartBatch)]


# ---- the batch ----


def test_a_batch_holds_requests_that_it_makes_late() -> None:
    """T(b) = b: 0 could be in time after nothing, 1 after one, 2 after two, and so each joins. The batch of 4 takes
    4 s: only the last is in time, while two would have been.
    """
    made = queue(1.0, 1.5, 2.5, 4.0)
    assert as_printed(made, 0.0, LINEAR_S, 6) == (4, [0, 1, 2, 3])
    late = [made.deadline_at(place) for place in range(4) if made.deadline_at(place) < LINEAR_S[3]]
    assert late == [1.0, 1.5, 2.5]
    assert largest_feasible([made], 0.0, LINEAR_S, 6) == 2


@pytest.mark.parametrize(
    ("deadlines_s", "batch_s", "places"),
    [
        ((0.5, 0.5, 1.5), LINEAR_S, [0, 2]),
        ((0.5, 0.5, 1.5), [1.0, 1.25, 1.5], [2]),  # T(0) = 0.75
        ((0.5,), [1.0], []),  # of one size only, T(0) is T(1)
        ((0.5,), [1.0, 3.0], [0]),  # T(0) is never below 0
        ((), LINEAR_S, []),
    ],
)
def test_who_would_be_late_at_the_size_before_it_joins_is_passed_over(
    deadlines_s: tuple[float, ...], batch_s: list[float], places: list[int]
) -> None:
    assert as_printed(queue(*deadlines_s), 0.0, batch_s, 6) == (len(places), places)


def test_a_batch_stops_at_what_an_engine_takes() -> None:
    assert as_printed(queue(9.0, 9.0, 9.0), 0.0, LINEAR_S, 2) == (2, [0, 1])


def test_those_that_run_join_by_their_deadlines() -> None:
    assert as_printed(queue(1.0, 9.0), 0.0, LINEAR_S, 6, [0.5, 9.0]) == (4, [0, 1])
    assert as_printed(queue(1.0, 9.0), 0.0, LINEAR_S, 3, [0.5, 9.0]) == (3, [0])


def algorithm_2(row: Sequence[tuple[float, int]], now_s: float, batch_s: Sequence[float], most: int) -> list[int]:
    """One by one, as it is printed. row : (deadline, place), ascending; places below 0 run."""
    times_s = [max(0.0, 2 * batch_s[0] - batch_s[1]), *batch_s]
    chosen: list[int] = []
    for deadline_s, place in row:
        if len(chosen) < most and deadline_s >= now_s + times_s[len(chosen)] - ROUNDING_S:
            chosen.append(place)
    return chosen


def test_batches_are_those_of_the_algorithm_line_by_line() -> None:
    rng = random.Random(1)
    for _ in range(QUEUES):
        batch_s = sorted([rng.randint(0, 16) / 4 for _ in range(8)])
        now_s, most = rng.randint(0, 8) / 4, rng.randint(1, 8)
        waiting_s = sorted([rng.randint(1, 24) / 4 for _ in range(rng.randint(0, 8))])
        running_s = sorted([rng.randint(1, 24) / 4 for _ in range(rng.choice([0, 0, 3]))])
        row = sorted([(at_s, place) for place, at_s in enumerate(waiting_s)] + [(at_s, -1) for at_s in running_s])
        chosen = algorithm_2(row, now_s, batch_s, most)
        count, places = as_printed(queue(*waiting_s), now_s, batch_s, most, running_s)
        assert (count, places) == (len(chosen), [place for place in chosen if place >= 0])


def test_who_is_chosen_leaves_the_queue_and_the_others_stay() -> None:
    made = queue(1.0, 2.0, 3.0, 4.0)
    chosen = Chosen(made, [0, 2, 3])
    assert chosen.earliest_deadline_s == 1.0
    assert [each.request.id for each in chosen.take_at(0, 3)] == [0, 2, 3]
    assert [each.request.id for each in made] == [1]
    assert made.deadline_at(0) == 2.0


# ---- through the scheduler ----


def test_batches_hold_requests_that_are_late_and_leave_out_those_between() -> None:
    """While request 0 runs until 1 s, five come. At 1 s two may join that are due at 2 s or later, for T(1) is over
    then; the third must be due at 3 s or later, which request 3 is not. The batch of four ends at 5 s: all are late.
    """
    made = scheduler(PrintedFlex(None))
    (first,) = arrive(made, {0: 1.0}, 0.0)
    assert isinstance(first, StartBatch)
    arrive(made, {1: 2.1, 2: 2.2, 3: 2.5, 4: 3.5, 5: 4.5}, 0.5)
    assert started(step(made, BatchEnded("gpu0", first.batch.id, {0: 1.0}), 1.0)) == [[1, 2, 4, 5]]
    assert [each.request.id for each in made.queues("").bins[0]] == [3]


def test_a_batch_makes_room_for_one_so_many_times_its_size() -> None:
    made = scheduler(PrintedFlex(2.0))
    assert started(arrive(made, {0: 9.0}, 0.0)) == [[0]]
    actions = arrive(made, {1: 9.0}, 0.1)
    assert [type(action) for action in actions] == [PreemptBatch], "two of its size, one of them that which runs"
