"""Which lines enter the queue next, and when jobs end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from llmserve.jobs.run.item_queue import Arranged, Forecast, Handed, ItemQueue, Shapes, arranged


def shapes(tokens: Sequence[float], prefixes: Sequence[int] | None = None) -> Shapes:
    return Shapes(np.arange(len(tokens)), np.array(tokens, float), np.array(prefixes or [0] * len(tokens), np.uint64))


def lines(*tokens: float) -> Arranged:
    return arranged(shapes(tokens), barrier=True, slots=0)


def forecast(feeder: ItemQueue, job: str, now_s: float, tokens_per_s: float) -> Forecast:
    return feeder.forecast(job, now_s, lambda model: tokens_per_s, now_s)


def test_the_job_whose_window_ends_first_is_first() -> None:
    feeder = ItemQueue(lines_max=3)
    feeder.add("late", 200.0, lines(10.0, 10.0))
    feeder.add("soon", 100.0, lines(30.0, 20.0))
    assert feeder.take(0.0) == [Handed("soon", 0, 20.0), Handed("soon", 1, 0.0), Handed("late", 0, 10.0)]
    assert feeder.take(0.0) == []


def test_each_line_that_ends_makes_room_for_one() -> None:
    feeder = ItemQueue(lines_max=2)
    feeder.add("job", 100.0, lines(5.0, 4.0, 3.0))
    feeder.take(0.0)
    feeder.ended("job", 0, 1.0, 5.0)
    assert feeder.take(1.0) == [Handed("job", 2, 0.0)]
    feeder.ended("job", 0, 1.0, 5.0)  # again: no effect
    assert feeder.take(1.0) == []


def test_a_line_that_comes_back_is_the_next_of_its_job() -> None:
    feeder = ItemQueue(lines_max=1)
    feeder.add("job", 100.0, lines(5.0, 4.0))
    feeder.take(0.0)
    feeder.back("job", 0)
    assert feeder.take(1.0) == [Handed("job", 0, 4.0)]


def test_a_job_that_is_removed_hands_over_nothing_more() -> None:
    feeder = ItemQueue(lines_max=2)
    feeder.add("job", 100.0, lines(5.0, 4.0, 3.0))
    feeder.take(0.0)
    assert feeder.remove("job") == [0, 1]
    assert feeder.take(0.0) == []


def test_lines_of_one_prefix_are_together() -> None:
    order = arranged(
        shapes([10.0 + number for number in range(40)], [0, 1] * 20), barrier=False, slots=1
    ).numbers.tolist()
    assert sorted(order) == list(range(40))
    assert [number % 2 for number in order] == [0] * 20 + [1] * 20


def test_a_prefix_of_one_line_alone_does_not_count() -> None:
    alone = shapes([1.0, 5.0, 3.0, 4.0, 2.0], [9, 7, 8, 5, 6])
    assert arranged(alone, barrier=True, slots=1).numbers.tolist() == [1, 3, 2, 4, 0]


def test_each_stretch_has_all_lengths_and_the_shortest_are_last() -> None:
    lengths = shapes([float(number) for number in range(160)])
    order = arranged(lengths, barrier=False, slots=1).numbers.tolist()
    for first in range(0, 128, 16):
        assert 60 < sum(order[first : first + 16]) / 16 < 115  # the mean of those that are mixed is 88.5
    assert order[-18:] == list(range(17, -1, -1)), "18 lines of 0 to 17 tokens take as long as the longest of 159"
    assert arranged(lengths, barrier=False, slots=100).numbers[-80:].tolist() == list(range(79, -1, -1))
    assert arranged(lengths, barrier=True, slots=1).numbers.tolist() == list(range(159, -1, -1))


def test_a_job_ends_after_those_before_it_at_the_present_rate() -> None:
    feeder = ItemQueue()
    feeder.add("first", 1_000.0, lines(*[10.0] * 10))
    feeder.add("second", 2_000.0, lines(*[10.0] * 10))
    feeder.take(0.0)
    for number in range(5):
        feeder.ended("first", number, 2.0 * (number + 1), 10.0)
    assert forecast(feeder, "first", 10.0, 100.0).ends_at_s == pytest.approx(20.0, rel=0.02)
    assert forecast(feeder, "second", 10.0, 100.0).ends_at_s == pytest.approx(40.0, rel=0.02)


def test_a_job_that_would_be_late_ends_with_its_window_as_far_as_its_share_allows() -> None:
    feeder = ItemQueue()
    feeder.add("job", 15.0, lines(*[10.0] * 10))
    feeder.take(0.0)
    for number in range(5):
        feeder.ended("job", number, 2.0 * (number + 1), 10.0)
    speeds_up = forecast(feeder, "job", 10.0, 20.0)
    assert (speeds_up.ends_at_s, speeds_up.in_time) == (15.0, True)
    cannot = forecast(feeder, "job", 10.0, 5.0)
    assert (cannot.ends_at_s, cannot.in_time) == (20.0, False)


def test_answers_longer_than_forecast_move_the_ends_of_jobs() -> None:
    feeder = ItemQueue(lines_max=100)
    feeder.add("a", 1e9, arranged(shapes([100.0] * 100), barrier=True, slots=0), factor=0.5)
    assert forecast(feeder, "a", 0.0, 10.0).ends_at_s == pytest.approx(500.0), "half of 10,000 tokens at 10 a second"
    feeder.take(0.0)
    for number in range(80):
        feeder.ended("a", number, 0.0, 200.0)
    factor = (16 * 50 + 80 * 200) / (96 * 100)
    assert forecast(feeder, "a", 0.0, 10.0).ends_at_s == pytest.approx(factor * 2000 / 10)
    before = forecast(feeder, "a", 0.0, 10.0).ends_at_s
    assert feeder.forecast_new(2e9, "", 50.0, 0.0, 10.0, 0.0).ends_at_s == pytest.approx(before + 5.0)
    assert feeder.forecast_new(1.0, "", 50.0, 0.0, 10.0, 0.0).in_time is False


# ---- sub-queues -----------------------------------------------------------------------------------------------------


def of_models(*models: int) -> Arranged:
    """Lines of ten tokens, of these models."""
    count = len(models)
    return Arranged(np.arange(count, dtype=np.int32), np.full(count, 10, np.float32), np.array(models, np.uint16))


def taken(feeder: ItemQueue, now_s: float = 0.0) -> Counter[str]:
    return Counter([handed.job for handed in feeder.take(now_s)])


def test_keys_share_the_queue_and_then_the_models_of_a_key() -> None:
    feeder = ItemQueue(lines_max=40)
    feeder.add("red", 1.0, of_models(*[0] * 100, *[1] * 100), key="red", models=("a", "b"))
    feeder.add("blue", 9.0, of_models(*[0] * 100), key="blue", models=("a",))
    assert taken(feeder) == {"red": 20, "blue": 20}


def test_each_model_has_room_for_its_slots_beside() -> None:
    feeder = ItemQueue(lines_max=20, slots=lambda model: {"a": 30}.get(model, 1))
    feeder.add("red", 1.0, of_models(*[0] * 100, *[1] * 100), models=("a", "b"))
    assert taken(feeder) == {"red": 10 + 30 + 10 + 1}


def test_a_lane_that_is_parked_leaves_its_part_to_others_and_tries_one_line_after_a_while() -> None:
    feeder = ItemQueue(lines_max=20)
    feeder.add("red", 1.0, of_models(*[0] * 100), key="red", models=("a",))
    feeder.add("blue", 9.0, of_models(*[0] * 100), key="blue", models=("a",))
    taken(feeder)
    sub_queue = feeder.sub_queue_of("red", 0)
    assert sub_queue is not None
    sub_queue.park("budget", 0.0, 30.0)
    for number in range(10):
        feeder.back("red", number)
    assert taken(feeder, 1.0) == {"blue": 10}, "all of the room is the other key's"
    assert feeder.look_at_s(1.0) == 30.0
    assert sub_queue.why_parked(1.0) == "budget"
    assert taken(feeder, 30.0) == {"red": 1}
    assert taken(feeder, 31.0) == {}
    feeder.ended("red", 9, 31.0, 10.0)
    assert sub_queue.why_parked(31.0) is None
    assert taken(feeder, 31.0) == {"red": 10}


def test_a_parked_lane_is_tried_each_minute_whatever_its_refusal_says() -> None:
    feeder = ItemQueue()
    feeder.add("job", 1e9, of_models(0, 0), models=("a",))
    feeder.take(0.0)
    sub_queue = feeder.sub_queue_of("job", 0)
    assert sub_queue is not None
    sub_queue.park("budget", 0.0, 86_400.0)
    assert sub_queue.until_s == 60.0
    assert forecast(feeder, "job", 0.0, 10.0).ends_at_s == pytest.approx(86_402.0), "its end is known all the same"


def test_a_closed_lane_has_no_end_and_delays_nobody() -> None:
    feeder = ItemQueue(lines_max=4)
    feeder.add("down", 1.0, of_models(*[0] * 100), models=("a",))
    feeder.add("up", 9.0, of_models(*[0] * 10), models=("b",))
    for sub_queue in feeder.sub_queues:
        sub_queue.closed = "no_engine" if sub_queue.model == "a" else None
    assert taken(feeder) == {"up": 4}
    assert forecast(feeder, "up", 0.0, 10.0).ends_at_s == pytest.approx(10.0)
    assert forecast(feeder, "down", 0.0, 10.0).ends_at_s == float("inf")


def test_many_sub_queues_have_a_few_lines_each() -> None:
    feeder = ItemQueue(lines_max=16)
    for key in range(100):
        feeder.add(str(key), 1.0, of_models(*[0] * 100), key=str(key), models=("a",))
    assert set(taken(feeder).values()) == {8}
