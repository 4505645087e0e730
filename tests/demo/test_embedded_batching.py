"""Static batches: which request waits for which."""

import pytest

from llmserve.demo.batching import BatchQueue, Seat, StaticBatches, seat_of


def batches() -> StaticBatches[str]:
    return StaticBatches(gather_s=1.0)


def test_a_request_without_headers_is_a_batch_of_one():
    waiting = batches()
    waiting.add("a", None, now_s=0.0)
    waiting.add("b", None, now_s=0.0)
    assert [waiting.take(0.0), waiting.take(0.0), waiting.take(0.0)] == [["a"], ["b"], None]


def test_a_batch_is_formed_when_its_last_member_arrives():
    waiting = batches()
    waiting.add("a", Seat("x", 2), now_s=0.0)
    assert waiting.take(0.5) is None
    waiting.add("b", Seat("x", 2), now_s=0.5)
    assert waiting.take(0.5) == ["a", "b"]


def test_batches_run_in_order_of_formation():
    waiting = batches()
    waiting.add("a1", Seat("a", 2), now_s=0.0)
    waiting.add("b1", Seat("b", 2), now_s=0.0)
    waiting.add("b2", Seat("b", 2), now_s=0.1)
    waiting.add("c", None, now_s=0.2)
    waiting.add("a2", Seat("a", 2), now_s=0.3)
    assert [waiting.take(0.3) for _ in range(3)] == [["b1", "b2"], ["c"], ["a1", "a2"]]


def test_a_batch_with_a_missing_member_starts_after_the_gather_limit():
    waiting = batches()
    waiting.add("a", Seat("x", 3), now_s=2.0)
    waiting.add("b", Seat("x", 3), now_s=2.9)
    assert waiting.wake_at_s == 3.0
    assert waiting.take(2.99) is None
    assert waiting.take(3.0) == ["a", "b"]
    assert waiting.wake_at_s is None


def test_a_batch_does_not_wait_for_a_member_that_leaves():
    waiting = batches()
    waiting.add("a", Seat("x", 2), now_s=0.0)
    waiting.add("b", Seat("y", 3), now_s=0.0)
    waiting.add("c", Seat("y", 3), now_s=0.0)
    assert waiting.remove("b")
    waiting.add("d", Seat("y", 3), now_s=0.0)
    assert waiting.take(0.0) == ["c", "d"]
    assert waiting.remove("a")
    assert waiting.take(9.0) is None


def test_a_batch_does_not_wait_for_a_refused_first_or_last_member():
    waiting = batches()
    waiting.cancel_seat(Seat("x", 2), now_s=0.0)
    waiting.add("a", Seat("x", 2), now_s=0.0)
    assert waiting.take(0.0) == ["a"]
    waiting.add("b", Seat("y", 2), now_s=0.0)
    waiting.cancel_seat(Seat("y", 2), now_s=0.0)
    assert waiting.take(0.0) == ["b"]


def test_a_member_that_leaves_a_formed_batch_is_dropped_and_an_empty_batch_never_runs():
    waiting = batches()
    for member, seat in (("a", Seat("x", 2)), ("b", Seat("x", 2)), ("c", None)):
        waiting.add(member, seat, now_s=0.0)
    assert len(waiting) == 3
    assert waiting.remove("a")
    assert waiting.remove("c")
    assert not waiting.remove("c")
    assert [waiting.take(0.0), waiting.take(0.0)] == [["b"], None]


def test_a_member_that_contradicts_its_batch_is_refused():
    waiting = batches()
    waiting.add("a", Seat("x", 2), now_s=0.0)
    with pytest.raises(ValueError, match="has 2 members, not 3"):
        waiting.add("b", Seat("x", 3), now_s=0.0)


def test_clear_removes_all_requests():
    waiting = batches()
    waiting.add("a", Seat("x", 2), now_s=0.0)
    waiting.add("b", None, now_s=0.0)
    assert sorted(waiting.clear()) == ["a", "b"]
    assert waiting.take(9.0) is None


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"x-llmserve-batch": "a"}, "together"),
        ({"x-llmserve-batch-size": "2"}, "together"),
        ({"x-llmserve-batch": "a", "x-llmserve-batch-size": "two"}, "positive integer"),
        ({"x-llmserve-batch": "a", "x-llmserve-batch-size": "0"}, "positive integer"),
        ({"x-llmserve-batch": "a", "x-llmserve-batch-size": "9"}, "at most 8"),
    ],
)
def test_wrong_batch_headers_are_refused(headers: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        seat_of(headers, size_max=8)


def test_batch_headers_name_batch_and_size():
    assert seat_of({}, 8) is None
    assert seat_of({"x-llmserve-batch": "a", "x-llmserve-batch-size": "8"}, 8) == Seat("a", 8)


async def test_the_queue_wakes_after_the_gather_limit():
    queue: BatchQueue[str] = BatchQueue(gather_s=0.01)
    queue.add("a", Seat("x", 2))
    assert await queue.take() == ["a"]
