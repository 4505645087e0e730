"""Many waiting requests are sorted again some at a time, whatever has changed for them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from test_scheduler import arrive, new_scheduler

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.choice.batch_times import Deadlines
from llmserve.scheduling.fair import FairShares
from llmserve.scheduling.messages import EngineReady, RequestArrived, RequestEnded, Tuned
from llmserve.scheduling.queues import model_queues
from llmserve.scheduling.queues.formed_queue import FormedQueue
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import BinQueue, FormedBatch, QueuedRequest, turn_of_arrival
from llmserve.scheduling.scheduler import Scheduler

FEW = 8  # requests that are sorted in one go, in these tests


@pytest.fixture(autouse=True)
def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_queues, "SORTED_AT_ONCE", FEW)
    monkeypatch.setattr(model_queues, "BINNED_AT_ONCE", FEW)


def sorted_out(scheduler: Scheduler, model: str = "") -> ModelQueues:
    """The queues once all that waits is sorted; each call sorts a part."""
    queues, calls = scheduler.queues(model), 0
    while queues.dirty:
        queues.sort_some()
        calls += 1
    assert calls > 1
    return queues


# ---- formed batches ----


class Keys:
    """Keys of batches that change, and the requests that were told of it."""

    def __init__(self) -> None:
        self.rng, self.told = random.Random(4), 0
        self.of: dict[int, float] = {}

    def key(self, batch: FormedBatch) -> float:
        return self.of[batch.id]

    def tell(self, requests: object) -> None:
        self.told += len(list(requests))  # type: ignore[call-overload]

    def draw(self, number: int) -> None:
        self.of[number] = self.rng.random()


def pushed(queue: FormedQueue, keys: Keys, numbers: range) -> Iterator[FormedBatch]:
    fair = FairShares()
    for number in numbers:
        keys.draw(number)
        request = QueuedRequest(Request(number), 0, 0.0)
        request.join(fair.of(f"share {number % 3}", 1.0))
        batch = FormedBatch(number, 0, 0.0, [request])
        queue.push(batch)
        yield batch


def test_the_first_batch_is_the_one_of_the_smallest_key_however_far_the_sort_has_come() -> None:
    keys = Keys()
    queue = FormedQueue(keys.key, keys.tell)
    waiting = list(pushed(queue, keys, range(300)))
    for number in keys.of:
        keys.draw(number)
    queue.mark_stale()
    while waiting:
        queue.sort_some(10)
        first = min(waiting, key=lambda batch: (batch.key, batch.id))
        assert queue.first() is first
        chosen = first if keys.rng.random() < 0.5 else keys.rng.choice(waiting)
        if keys.rng.random() < 0.2:
            keys.draw(chosen.id)
            queue.sort_again((chosen,))
        else:
            queue.take(chosen, 1)
            waiting.remove(chosen)
        assert sorted(queue.batches(), key=lambda batch: batch.id) == waiting
    assert not queue.has_fresh


def test_pushes_alone_end_a_sort_and_each_sorts_few() -> None:
    keys = Keys()
    queue = FormedQueue(keys.key, keys.tell)
    waiting = list(pushed(queue, keys, range(400)))
    for number in keys.of:
        keys.draw(number)
    queue.mark_stale()
    for batch in pushed(queue, keys, range(400, 600)):
        waiting.append(batch)
        assert keys.told <= 10
        keys.told = 0
    assert not queue.stale
    assert [batch.key for batch in queue.batches()] == sorted([keys.of[batch.id] for batch in waiting])


# ---- bins ----


@pytest.mark.parametrize("shares", [1, 3])
def test_requests_that_come_back_stand_by_arrival_among_those_that_come_and_go(shares: int) -> None:
    rng, fair, queue = random.Random(2), FairShares(), BinQueue(0)
    waiting: list[QueuedRequest] = []
    away: list[QueuedRequest] = []
    for number in range(2_000):
        chance = rng.random()
        if chance < 0.35:
            queued = QueuedRequest(Request(number), 0, float(number))
            queued.join(fair.of(f"share {number % shares}", 1.0))
            waiting.append(queued)
            queue.append(queued)
        elif chance < 0.5 and away:
            back = [away.pop(rng.randrange(len(away))) for _ in range(min(3, len(away)))]
            for queued in back:
                queued.join(queued.share)
            waiting = sorted([*waiting, *back], key=turn_of_arrival)
            queue.put_back(back)
        elif chance < 0.7 and waiting:
            queued = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(queued)
            queued.share.leave()
            away.append(queued)
        elif waiting and shares == 1:
            taken = queue.take(min(2, len(waiting)))
            assert taken == waiting[: len(taken)]
            del waiting[: len(taken)]
            for queued in taken:
                queued.share.leave()
            away += taken
        assert list(queue) == waiting
        assert not waiting or queue.oldest_at_s == waiting[0].arrived_at_s
        for share, part in queue.parts.items():
            assert list(part) == [queued for queued in waiting if queued.share is share]


# ---- what may change for all ----


def test_forecasts_are_calibrated_part_by_part_and_then_the_work_is_that_of_calibrated_ones() -> None:
    scheduler = new_scheduler(EngineInfo("gpu0", 1, False), order="boost", batch_size=1, release="greedy")
    arrive(scheduler, *[Request(number, 10.0 + number % 9) for number in range(40 + 4 * FEW)])
    queues = scheduler.queues("")
    for number in range(32):
        (running,) = scheduler.engines["gpu0"].running
        scheduler.handle(RequestEnded("gpu0", running, "completed", 100.0), float(number))
    assert queues.load is not None
    assert any(queued.likely_tokens == queued.expected_tokens for queued in queues.all_waiting())
    sorted_out(scheduler)
    waiting = queues.all_waiting()
    for queued in waiting:
        assert queued.likely_tokens == queues.load.calibration.tokens(queued.expected_tokens)
    assert queues.amount.work_us == sum([queued.work_us for queued in waiting])


@pytest.mark.parametrize("release", [{"release": "greedy"}, {"release": "window", "window": 6}])
def test_another_order_sorts_part_by_part(release: dict[str, object]) -> None:
    rng = random.Random(1)
    scheduler = new_scheduler(EngineInfo("gpu0", 4, True), batch_size=1, order="fffs", **release)
    scheduler.handle(RequestArrived(Request(0, 1.0)), 0.0)
    arrive(scheduler, *[Request(number, rng.uniform(1.0, 100.0)) for number in range(1, 6 * FEW)])
    scheduler.handle(Tuned({"order": "shortest", "patience": 1e6}), 0.0)
    sorted_out(scheduler)
    started, running = [], 0
    while scheduler.requests:
        scheduler.handle(RequestEnded("gpu0", running, "completed", 1.0), 1.0)
        started += [queued.request for queued in scheduler.requests.values() if queued.run is not None]
        running = started[-1].id if scheduler.requests else running
    assert [request.predicted_tokens for request in started] == sorted(request.predicted_tokens for request in started)


def test_models_that_come_to_share_an_engine_let_their_shares_compete_part_by_part() -> None:
    engines = [EngineInfo(name, 1, True, models=(name,)) for name in ("a", "b")]
    scheduler = new_scheduler(*engines, batch_size=2, release="greedy")
    for number in range(8 * FEW):
        model = "a" if number < 4 else "b"
        scheduler.handle(RequestArrived(Request(number, model=model, share=f"share {number % 2}")), 0.0)
    scheduler.handle(EngineReady(EngineInfo("both", 1, True, models=("a", "b"))), 1.0)
    queues, fair = sorted_out(scheduler, "b"), scheduler.queues("a").fair
    assert queues.fair is fair
    assert {queued.share.among for queued in queues.all_waiting()} == {fair}
    waiting = [queued for model in "ab" for queued in scheduler.queues(model).all_waiting()]
    assert {share.name: share.waiting for share in fair} == {
        f"share {number}": sum(queued.request.share == f"share {number}" for queued in waiting) for number in range(2)
    }
    for queue in queues.bins:
        assert all(list(part) == [one for one in queue if one.share is share] for share, part in queue.parts.items())


# ---- deadlines ----


def test_of_several_times_of_a_request_the_earliest_counts_until_it_is_estimated_again() -> None:
    times = {1: 5.0}
    deadlines = Deadlines(lambda queued, now_s: times[queued.request.id])
    queued = QueuedRequest(Request(1), 0, 0.0)
    for at_s in (5.0, 9.0, 3.0, 7.0):
        times[1] = at_s
        deadlines.watch(queued, 0.0)
    assert deadlines.next_at_s == 3.0
    assert list(deadlines.late({1: queued}, 3.0)) == []
    assert deadlines.next_at_s == 7.0
    late = deadlines.late({1: queued}, 7.0)
    assert next(late) is queued
