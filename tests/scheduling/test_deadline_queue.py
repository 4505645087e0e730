"""The largest batch that can be in time: bisection gives the same as trying all subsets."""

import itertools
import math
import random
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from llmserve.request import Request
from llmserve.scheduling.queues.deadline_queue import DeadlineQueue, around_first, largest_feasible
from llmserve.scheduling.queues.waiting import QueuedRequest

QUEUES = 1_000
LINEAR_S = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]  # T(1), T(2), ...


def queued(request_id: int, deadline_s: float | None, arrived_at_s: float = 0.0) -> QueuedRequest:
    return QueuedRequest(Request(request_id, deadline_s=deadline_s), 0, arrived_at_s)


def queue_of(*deadlines_s: float | None) -> DeadlineQueue:
    """A queue of requests 0, 1, ... with these deadlines."""
    queue = DeadlineQueue(0)
    for request_id, deadline_s in enumerate(deadlines_s):
        queue.append(queued(request_id, deadline_s))
    return queue


def ids(requests: Sequence[QueuedRequest]) -> list[int]:
    return [entry.request.id for entry in requests]


def by_deadline(queue: DeadlineQueue) -> list[int]:
    return [request_id for _, request_id in queue._row]


def in_time(batch: Sequence[float], now_s: float, batch_s: Sequence[float]) -> bool:
    return all(now_s + batch_s[len(batch) - 1] <= deadline_s for deadline_s in batch)


def largest_of_all(deadlines_s: Sequence[float], now_s: float, batch_s: Sequence[float], size_max: int) -> int:
    """By definition: the size of the largest subset that is in time."""
    for size in range(min(size_max, len(deadlines_s)), 0, -1):
        if any(in_time(batch, now_s, batch_s) for batch in itertools.combinations(deadlines_s, size)):
            return size
    return 0


def random_times(rng: random.Random, sizes: int) -> list[float]:
    """Non-decreasing quarters of a second, so that sums are exact and deadlines can be met exactly."""
    return sorted([rng.randint(0, 16) / 4 for _ in range(sizes)])


# ---- the largest feasible batch ----


def test_a_batch_is_as_large_as_its_deadlines_allow() -> None:
    assert largest_feasible([queue_of(3.0, 3.0, 3.0, 3.0)], 0.0, LINEAR_S, 6) == 3


def test_urgent_requests_are_left_out_if_the_batch_becomes_larger() -> None:
    """The first could be in time alone, but then the four others could not."""
    queue = queue_of(1.0, 4.0, 4.0, 4.0, 4.0)
    assert largest_feasible([queue], 0.0, LINEAR_S, 6) == 4
    assert ids(queue.take_at(queue.first_at(LINEAR_S[3]), 4)) == [1, 2, 3, 4]


def test_a_request_that_ends_exactly_at_its_deadline_is_in_time() -> None:
    assert largest_feasible([queue_of(2.5)], 1.5, LINEAR_S, 6) == 1
    assert largest_feasible([queue_of(2.5)], 1.5 + 1e-6, LINEAR_S, 6) == 0


def test_sums_that_differ_by_rounding_are_equal() -> None:
    assert 0.1 + 0.2 > 0.3
    assert largest_feasible([queue_of(0.3)], 0.1, [0.2], 1) == 1


def test_requests_without_a_deadline_are_never_late() -> None:
    assert largest_feasible([queue_of(None, None, 1.0)], 1e6, LINEAR_S, 6) == 2


def test_a_batch_is_no_larger_than_an_engine_takes() -> None:
    assert largest_feasible([queue_of(None, None, None)], 0.0, LINEAR_S, 2) == 2
    assert largest_feasible([queue_of(None, None, None)], 0.0, LINEAR_S, 0) == 0
    assert largest_feasible([queue_of()], 0.0, LINEAR_S, 6) == 0


def test_preempted_requests_that_would_run_again_count() -> None:
    assert largest_feasible([queue_of(3.0)], 0.0, LINEAR_S, 6, running=[2.0, 3.0, 3.0]) == 3


@pytest.mark.parametrize("seed", range(10))
def test_the_largest_batch_is_that_of_brute_force(seed: int) -> None:
    """On 1,000 random queues in all: with ties, without deadlines, in several bins, with running requests."""
    rng = random.Random(seed)
    sizes: set[int] = set()
    for _ in range(QUEUES // 10):
        batch_s, now_s, size_max = random_times(rng, 9), rng.randint(0, 8) / 4, rng.randint(1, 9)
        rows = [[_deadline(rng) for _ in range(rng.randint(0, 4))] for _ in range(rng.randint(1, 3))][:3]
        running = sorted([_deadline(rng) or math.inf for _ in range(rng.choice([0, 0, 3]))])
        every = [math.inf if deadline_s is None else deadline_s for row in rows for deadline_s in row] + running
        size = largest_feasible([queue_of(*row) for row in rows], now_s, batch_s, size_max, running)
        assert size == largest_of_all(every, now_s, batch_s, size_max)
        sizes.add(size)
    assert len(sizes) > 4, "the queues are all alike"


def _deadline(rng: random.Random) -> float | None:
    return rng.choice([None, *[rng.randint(1, 24) / 4] * 5])


def test_a_batch_by_its_earliest_deadline_is_that_of_brute_force() -> None:
    """Clockwork: the earliest deadline that can be met, and as many further requests as stay in time with it."""
    rng = random.Random(1)
    for _ in range(QUEUES):
        batch_s, now_s, size_max = random_times(rng, 8), rng.randint(0, 8) / 4, rng.randint(1, 8)
        deadlines_s = [_deadline(rng) for _ in range(rng.randint(0, 8))]
        row = sorted([math.inf if deadline_s is None else deadline_s for deadline_s in deadlines_s])
        place, size = around_first(queue_of(*deadlines_s), now_s, batch_s, size_max)
        met = [deadline_s for deadline_s in row if now_s + batch_s[0] <= deadline_s]
        if not met:
            assert (place, size) == (0, 0)
            continue
        assert row[place] == met[0]
        behind = row[row.index(met[0]) :]
        fitting = [
            count for count in range(1, min(size_max, len(behind)) + 1) if in_time(behind[:count], now_s, batch_s)
        ]
        assert size == max(fitting)


# ---- the queue ----


def test_the_earliest_deadline_is_first_and_undated_requests_are_last_in_order_of_arrival() -> None:
    queue = queue_of(None, 5.0, None, 2.0, 5.0)
    assert by_deadline(queue) == [3, 1, 4, 0, 2]
    assert queue.earliest_deadline_s == 2.0
    assert ids(queue.take(2)) == [3, 1]
    oldest = queue.oldest_undated()
    assert oldest is not None
    assert oldest.request.id == 0


def test_an_empty_queue_has_no_deadline_and_no_undated_request() -> None:
    assert queue_of().earliest_deadline_s == math.inf
    assert queue_of().oldest_undated() is None
    assert queue_of(3.0).oldest_undated() is None


def test_requests_are_taken_from_the_middle_and_from_both_ends() -> None:
    queue = queue_of(1.0, 2.0, 3.0, 4.0, 5.0)
    assert ids(queue.take_at(1, 2)) == [1, 2]
    assert ids(queue.take_at(0, 1)) == [0]
    assert ids(queue.take_at(1, 9)) == [4]
    assert by_deadline(queue) == [3]
    assert len(queue) == 1


@given(st.lists(st.tuples(st.sampled_from(["come", "come", "leave", "take", "all"]), st.integers(0, 40)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_the_queue_stays_in_order_under_any_changes(moves: list[tuple[str, int]]) -> None:
    queue, waiting, changes = DeadlineQueue(0), {}, 0
    for number, (move, value) in enumerate(moves):
        if move == "come":
            waiting[number] = queued(number, None if value % 5 == 0 else value / 4, arrived_at_s=float(number))
            queue.append(waiting[number])
        elif move == "all":
            assert {item.request.id for item in queue.take_all()} == set(waiting)
            waiting.clear()
        elif waiting:
            row_ids = by_deadline(queue)
            first = value % len(row_ids)
            leaving = [row_ids[first]] if move == "leave" else row_ids[first : first + 3]
            if move == "leave":
                queue.remove(waiting[leaving[0]])
            else:
                assert ids(queue.take_at(first, 3)) == leaving
            for request_id in leaving:
                del waiting[request_id]
        row = sorted([(math.inf if item.request.deadline_s is None else item.request.deadline_s, id_) for id_, item in
                      waiting.items()])  # fmt: skip
        assert by_deadline(queue) == [request_id for _, request_id in row]
        assert len(queue) == len(waiting) == len(list(queue))
        assert queue.changes >= changes
        changes = queue.changes
        assert queue.earliest_deadline_s == (row[0][0] if row else math.inf)
        undated = queue.oldest_undated()
        assert (None if undated is None else undated.request.id) == next(
            (id_ for at_s, id_ in row if at_s == math.inf), None
        )
