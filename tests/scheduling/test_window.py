"""Batches of requests with similar lengths, without edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler import arrive, new_scheduler, step

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.choice.orders import arrival, due_at_s
from llmserve.scheduling.messages import Action, BatchEnded, RequestCancelled, StartBatch
from llmserve.scheduling.queues.waiting import BinQueue, QueuedRequest
from llmserve.scheduling.queues.window_queue import WindowQueue
from llmserve.scheduling.scheduler import Scheduler
from llmserve.scheduling.trust import Trust
from llmserve.settings.policies import SchedulingConfig

BARRIER = EngineInfo("gpu0", slots=8, barrier=True)


def queued(request_id: int, tokens: float, deadline_s: float | None = None) -> QueuedRequest:
    """A request that arrived at as many seconds as its id."""
    request = QueuedRequest(Request(request_id, tokens, deadline_s), 0, float(request_id), tokens)
    request.sort_length = tokens
    return request


def queue_of(*lengths: float, window: int = 100) -> WindowQueue:
    """Requests 0, 1, ... with these lengths, in order of arrival."""
    queue = WindowQueue(0, window, arrival)
    for request_id, tokens in enumerate(lengths):
        queue.append(queued(request_id, tokens))
    return queue


def ids(requests: list[QueuedRequest]) -> list[int]:
    return sorted(entry.request.id for entry in requests)


# ---- which requests form a batch ----


def test_the_first_request_goes_with_those_of_the_most_similar_lengths() -> None:
    assert ids(queue_of(100, 500, 90, 480, 110).take(3)) == [0, 2, 4]


def test_the_first_request_goes_although_others_are_more_similar() -> None:
    assert ids(queue_of(300, 10, 10, 10, 400, 400).take(2)) in ([0, 4], [0, 5])


def test_of_batches_with_the_first_request_the_one_that_wastes_least_goes() -> None:
    """With 200: batch 100, 200 wastes 100 slots; batch 200, 290 wastes 90."""
    assert ids(queue_of(200, 100, 290).take(2)) == [0, 2]


def test_requests_of_equal_length_go_in_order_of_arrival() -> None:
    queue = queue_of(*[0.0] * 6)
    assert [ids(queue.take(2)) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_requests_beyond_the_window_are_not_considered() -> None:
    queue = queue_of(100, 900, 500, 100, window=3)
    assert ids(queue.take(2)) == [0, 2]
    assert ids(queue.take(2)) == [1, 3]


def test_all_requests_can_be_taken_at_once_also_beyond_the_window() -> None:
    queue = queue_of(5, 1, 3, 2, 4, window=2)
    assert [entry.request.id for entry in queue.take_all()] == [0, 1, 2, 3, 4]
    assert len(queue) == 0
    queue.append(queued(9, 7.0))
    assert ids(queue.take(1)) == [9]


def test_an_earlier_request_displaces_the_last_in_the_window() -> None:
    queue = WindowQueue(0, 2, due_at_s)
    for entry in (queued(0, 10, 50.0), queued(1, 500, 60.0), queued(2, 20, 40.0)):
        queue.append(entry)
    assert ids(queue.take(2)) == [0, 2]


def test_a_cancelled_request_frees_its_place_in_the_window() -> None:
    queue = queue_of(100, 900, 500, 101, window=3)
    queue.remove(next(entry for entry in queue if entry.request.id == 1))
    assert ids(queue.take(2)) == [0, 3]
    assert len(queue) == 1


def test_a_request_cancelled_beyond_the_window_leaves_no_trace() -> None:
    queue = queue_of(5, 6, window=2)
    for request_id in range(2, 1_000):
        beyond = queued(request_id, 7.0)
        queue.append(beyond)
        queue.remove(beyond)
    assert len(queue._beyond) < 100
    assert ids(queue.take(2)) == [0, 1]


@given(
    st.lists(st.integers(1, 6).map(float), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_the_batch_is_the_best_of_all_that_hold_the_first_request(
    lengths: list[float], count: int, window: int
) -> None:
    count = min(count, window, len(lengths))
    row = sorted((tokens, request_id) for request_id, tokens in enumerate(lengths[:window]))
    rows = [row[start : start + count] for start in range(len(row) - count + 1)]
    batch = [(entry.sort_length, entry.request.id) for entry in queue_of(*lengths, window=window).take(count)]

    def waste(row: list[tuple[float, int]]) -> float:
        return sum(row[-1][0] - tokens for tokens, _ in row)

    assert batch in rows
    assert waste(batch) == min(waste(row) for row in rows if (lengths[0], 0) in row)


@given(st.data())
def test_no_request_in_the_window_is_passed_over_too_often_or_lost(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3))
    window = size + data.draw(st.integers(0, 6))
    queue = WindowQueue(0, window, arrival)
    waiting: dict[int, QueuedRequest] = {}
    passed_over: dict[int, int] = {}
    for move in data.draw(st.lists(st.sampled_from(["come", "come", "come", "take", "leave"]), max_size=60)):
        if move == "come":
            new = queued(len(passed_over), data.draw(st.sampled_from([1.0, 5.0, 5.5, 90.0])))
            waiting[new.request.id], passed_over[new.request.id] = new, 0
            queue.append(new)
        elif move == "leave" and waiting:
            queue.remove(waiting.pop(data.draw(st.sampled_from(sorted(waiting)))))
        elif move == "take" and len(queue) >= size:
            first = sorted(waiting)[:window]
            batch = ids(queue.take(size))
            assert batch[0] == first[0]
            for request_id in batch:
                del waiting[request_id]
            for request_id in set(first) - set(batch):
                passed_over[request_id] += 1
        assert [entry.request.id for entry in queue] == sorted(waiting)
        assert max(passed_over.values(), default=0) < window
    assert ids(queue.take_all()) == sorted(waiting)


@given(st.data())
def test_cut_batches_lose_no_request_and_delay_the_next_one_by_no_more_than_its_own_batch(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    queue = learnt(WindowQueue(0, size + data.draw(st.integers(0, 6)), arrival))
    waiting: dict[int, float] = {}
    passed, number = 0.0, 1_000
    for move in data.draw(st.lists(st.sampled_from(["come", "come", "come", "take"]), max_size=80)):
        if move == "come":
            number += 1
            waiting[number] = data.draw(st.sampled_from([1.0, 5.0, 40.0, 90.0]))
            queue.append(queued(number, waiting[number]))
        elif waiting:
            first = min(waiting)
            batch = ids(queue.take(min(size, len(queue), queue.window)))
            lengths = [waiting.pop(request_id) for request_id in batch]
            passed = 0.0 if first in batch else passed + max(lengths)
            assert passed <= 90.0
        assert [entry.request.id for entry in queue] == sorted(waiting)


def test_a_window_that_has_seen_answers_leaves_out_a_much_longer_request() -> None:
    queue = learnt(WindowQueue(0, 100, arrival))
    for request_id, tokens in ((1_001, 10.0), (1_002, 900.0), (1_003, 11.0)):
        queue.append(queued(request_id, tokens))
    assert ids(queue.take(3)) == [1_001, 1_003]
    assert ids(queue.take(1)) == [1_002]


def test_requests_that_come_back_are_no_new_arrivals() -> None:
    """Their number would be taken for the rate of arrivals, and the window would not be cut."""
    queue = learnt(WindowQueue(0, 100, arrival))
    for request_id, tokens in ((1_001, 10.0), (1_002, 900.0), (1_003, 11.0)):
        queue.append(queued(request_id, tokens))
    for _ in range(1_000):
        for entry in queue.take_all():
            queue.append(entry)
    assert ids(queue.take(3)) == [1_001, 1_003]


def learnt(queue: WindowQueue) -> WindowQueue:
    """A window that has seen answers as long as forecast, and the time of some batches."""
    for request_id in range(40):
        own = queued(request_id, 10.0 + request_id)
        queue.append(own)
        queue.take(1)
        queue.answered(own, own.sort_length)
    return queue


# ---- when batches form ----


def windowed(*engines: EngineInfo, **config: object) -> Scheduler:
    return new_scheduler(*engines, **{"release": "window", **config})


def started(actions: list[Action]) -> list[list[int]]:
    """The requests of each batch that starts, by length."""
    return [[request.id for request in action.batch.requests] for action in actions if isinstance(action, StartBatch)]


def end(scheduler: Scheduler, batch_id: int, *request_ids: int, now_s: float = 1.0) -> list[Action]:
    return step(scheduler, BatchEnded("gpu0", batch_id, dict.fromkeys(request_ids, 5.0)), now_s)


def test_no_batch_is_formed_before_an_engine_is_free_for_it() -> None:
    scheduler = windowed(BARRIER)
    assert started(arrive(scheduler, Request(1, 50.0))) == [[1]]
    assert arrive(scheduler, Request(2, 10.0), Request(3, 90.0), Request(4, 11.0), Request(5, 80.0)) == []
    assert not scheduler.queues("").formed
    assert started(end(scheduler, 1, 1)) == [[2, 4]]
    assert started(end(scheduler, 2, 2, 4)) == [[5, 3]]


def test_an_idle_engine_takes_a_partial_batch() -> None:
    scheduler = windowed(BARRIER, EngineInfo("gpu1", slots=8, barrier=True))
    assert started(arrive(scheduler, 1, 2, 3)) == [[1], [2]]


def test_the_order_decides_which_request_is_first() -> None:
    scheduler = windowed(BARRIER, order="edf")
    arrive(scheduler, Request(1, 50.0), Request(2, 10.0, 90.0), Request(3, 400.0, 30.0), Request(4, 11.0, 90.0))
    arrive(scheduler, Request(5, 390.0))
    assert started(end(scheduler, 1, 1)) == [[5, 3]]


def test_a_cancelled_request_is_in_no_batch() -> None:
    scheduler = windowed(BARRIER)
    arrive(scheduler, Request(1, 50.0), Request(2, 10.0), Request(3, 90.0), Request(4, 11.0))
    step(scheduler, RequestCancelled(4))
    assert started(end(scheduler, 1, 1)) == [[2, 3]]


def test_without_trust_batches_are_first_come_first_served() -> None:
    scheduler = windowed(BARRIER)
    scheduler.queues("").binning.trust.trusted = False
    arrive(scheduler, Request(1, 50.0), Request(2, 10.0), Request(3, 90.0), Request(4, 11.0))
    assert started(end(scheduler, 1, 1)) == [[2, 3]]


def test_when_trust_is_back_waiting_requests_are_batched_by_length() -> None:
    class Again(Trust):
        def observe(self, request: Request, score: float, output_tokens: float) -> bool:
            self.trusted = True
            return True

    scheduler = windowed(BARRIER)
    scheduler.queues("").binning.trust = Again(32)
    scheduler.queues("").binning.trust.trusted = False
    arrive(scheduler, Request(1, 50.0), Request(2, 10.0), Request(3, 90.0), Request(4, 11.0))
    assert started(end(scheduler, 1, 1)) == [[2, 4]]


def test_a_request_without_a_prediction_counts_as_a_mean_answer() -> None:
    scheduler = windowed(BARRIER)
    arrive(scheduler, Request(1, 300.0))
    arrive(scheduler, Request(2), Request(3, 9000.0), Request(4, scheduler.queues("").service.tokens_mean + 1))
    assert started(end(scheduler, 1, 1)) == [[2, 4]]


# ---- when the window is chosen ----


def test_barrier_engines_use_windows_unless_bins_are_set() -> None:
    def resolved(barrier: bool, **config: object) -> tuple[str | None, int | None]:
        settled = SchedulingConfig(**config).resolved(barrier)  # type: ignore[arg-type]
        return settled.release, settled.bins

    assert resolved(True) == ("window", 1)
    assert resolved(True, bins=4) == ("greedy", 4)
    assert resolved(True, edges=(10.0, 20.0)) == ("greedy", 3)
    assert resolved(True, edges_by="answers") == ("greedy", 8)
    assert resolved(True, release="table") == ("table", 8)
    assert resolved(True, release="window", bins=2) == ("window", 2)
    assert resolved(False) == ("greedy", 8)


def test_windows_hold_32_batches_by_default() -> None:
    queue = windowed(batch_size=3).queues("").bins[0]
    assert isinstance(queue, WindowQueue)
    assert queue.window == 96


def test_only_the_window_release_has_windows() -> None:
    assert type(new_scheduler(release="greedy").queues("").bins[0]) is BinQueue
    with pytest.raises(ValueError, match="window has no effect under release greedy"):
        new_scheduler(release="greedy", window=5)


def test_a_window_that_holds_no_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="window: 7 requests are fewer than a batch of 8"):
        new_scheduler(release="window", batch_size=8, window=7)
