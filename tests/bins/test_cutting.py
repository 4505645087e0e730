"""Where a batch of neighbours by length is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bins.cutting import Cutting, least_waste

ANSWERS = 2_000


def observed(
    error: float = 0.0, *, batch_s: float = 1e6, arrivals: int = 1, answers: int = ANSWERS, bias: float = 1.0
) -> Cutting:
    """Batches that have seen answers, their errors (of logarithms), and `arrivals` in the time of one batch."""
    rng = np.random.default_rng(0)
    cutting = Cutting()
    forecasts = np.exp(rng.uniform(2.0, 7.0, answers))
    for forecast, scatter in zip(forecasts, rng.standard_normal(answers), strict=True):
        cutting.answered(float(forecast), float(bias * forecast * math.exp(error * scatter)))
    for _ in range(arrivals):
        cutting.arrived()
    cutting.size([batch_s], 1, engines=1, place=0, request_id=0)
    return cutting


def size(cutting: Cutting, forecasts: Sequence[float], waiting: int | None = None, engines: int = 1) -> int:
    return cutting.size(forecasts, len(forecasts) if waiting is None else waiting, engines, place=0, request_id=1)


# ---- which requests go ----


def test_a_much_longer_request_does_not_delay_the_others() -> None:
    assert size(observed(), [10.0, 11.0, 12.0, 1000.0]) == 3


def test_requests_of_similar_lengths_stay_together() -> None:
    assert size(observed(), [90.0, 95.0, 100.0, 110.0]) == 4


def test_a_batch_is_not_cut_while_many_others_wait() -> None:
    """Alone, the shorter 100 tokens save 900; then each of the others waits 100 longer."""
    assert size(observed(), [100.0, 1000.0], waiting=9) == 1
    assert size(observed(), [100.0, 1000.0], waiting=11) == 2


def test_with_several_engines_an_extra_batch_delays_the_others_less() -> None:
    """The others wait a quarter of 100 longer."""
    assert size(observed(), [100.0, 1000.0], waiting=36, engines=4) == 1
    assert size(observed(), [100.0, 1000.0], waiting=40, engines=4) == 2


def test_a_batch_is_not_cut_while_many_arrive() -> None:
    """In 1,000 tokens 4 arrive, or 16: each of them waits 100 longer."""
    assert size(observed(batch_s=1000.0, arrivals=4), [100.0, 1000.0]) == 1
    assert size(observed(batch_s=1000.0, arrivals=16), [100.0, 1000.0]) == 2


def test_no_batch_is_cut_before_answers_have_shown_what_forecasts_mean() -> None:
    assert size(observed(answers=31), [10.0, 1000.0]) == 2
    assert size(observed(answers=33), [10.0, 1000.0]) == 1


def test_requests_without_trusted_forecasts_stay_together() -> None:
    assert size(observed(), [0.0, 0.0, 0.0]) == 3


def test_rough_forecasts_cut_less_than_exact_ones() -> None:
    forecasts = [100.0] * 7 + [120.0]
    assert size(observed(0.0), forecasts) == 7
    assert size(observed(1.0), forecasts) == 8


def test_a_constant_factor_of_all_forecasts_changes_nothing() -> None:
    forecasts = [10.0, 30.0, 31.0, 200.0, 1000.0]
    assert size(observed(bias=0.2), forecasts) == size(observed(bias=5.0), forecasts) == size(observed(), forecasts)


@given(st.lists(st.floats(1.0, 2000.0), min_size=1, max_size=10), st.integers(0, 20))
def test_the_cut_is_the_best_of_all_two_batches(lengths: list[float], others: int) -> None:
    """The sum of latencies when the first j run, then the rest, then the others; without a cut, j = b."""
    lengths = sorted(lengths)
    waiting = len(lengths) + others

    def latencies(j: int) -> float:
        first = lengths[j - 1]
        second = first + lengths[-1] if j < len(lengths) else first
        return j * first + (waiting - j) * second

    cut = size(observed(), lengths, waiting)
    assert latencies(cut) <= min(latencies(j) for j in range(1, len(lengths) + 1)) * (1.0 + 1e-5)


@pytest.mark.parametrize("error", [0.3, 0.7])
@pytest.mark.parametrize("count", [8, 32, 128])
def test_the_longest_answer_is_estimated_within_a_tenth(error: float, count: int) -> None:
    rng = np.random.default_rng(1)
    forecasts = sorted(np.exp(rng.normal(4.0, 0.5, count)).tolist())
    answers = np.array(forecasts) * np.exp(error * rng.standard_normal((20_000, count)))
    longest = np.maximum.accumulate(answers, axis=1).mean(axis=0)
    estimate = observed(error)._longest(forecasts)
    shares = np.array(estimate) / estimate[-1] / (longest / longest[-1])
    assert abs(shares[count // 2] - 1.0) < 0.1


# ---- the request whose turn it is ----


def test_a_request_lets_shorter_ones_pass_for_no_longer_than_its_own_batch_takes() -> None:
    cutting, passed = observed(), 0.0
    for _ in range(50):  # more arrive, however many have passed
        count = cutting.size([99.0] * 30 + [1000.0], 31, 1, place=30, request_id=1)
        if count == 31:
            break
        assert count == 30
        passed += 99.0
    assert passed == 990.0


def test_another_request_begins_anew() -> None:
    cutting = observed()
    sizes = [cutting.size([600.0] * 30 + [1000.0], 31, 1, place=30, request_id=which) for which in (1, 1, 2, 2)]
    assert sizes == [30, 31, 30, 31]


# ---- other neighbours that go before ----


def test_neighbours_of_much_more_use_go_before_a_batch_that_is_not_full_of_its_like() -> None:
    forecasts = [10.0] * 13 + [1000.0] * 3
    assert observed().before(forecasts, start=8, count=8, request_id=1) in range(6)
    assert observed().before([10.0] * 8 + [1000.0] * 8, start=8, count=8, request_id=1) is None


def test_others_go_before_for_no_longer_than_the_own_batch_takes() -> None:
    cutting, forecasts, passed = observed(), [90.0] * 29 + [1000.0] * 3, 0.0
    while cutting.before(forecasts, start=24, count=8, request_id=1) is not None:
        passed += 90.0
    assert passed == 990.0
    assert cutting.before(forecasts, start=24, count=8, request_id=2) is not None


def test_nothing_goes_before_until_answers_have_shown_what_forecasts_mean() -> None:
    forecasts = [10.0] * 13 + [1000.0] * 3
    assert observed(answers=31).before(forecasts, start=8, count=8, request_id=1) is None
    assert observed().before([0.0] * 16, start=8, count=8, request_id=1) is None


@given(st.lists(st.floats(1.0, 2000.0), min_size=4, max_size=12), st.integers(2, 4), st.integers(0, 11))
def test_of_all_neighbours_in_time_those_of_most_use_go_before(lengths: list[float], count: int, start: int) -> None:
    lengths, start = sorted(lengths), min(start, len(lengths) - count)

    def use(at: int) -> float:
        return sum(lengths[at : at + count]) / (count * lengths[at + count - 1])

    best = max(
        use(at) for at in range(len(lengths) - count + 1) if lengths[at + count - 1] <= lengths[start + count - 1]
    )
    before = observed().before(lengths, start, count, request_id=1)
    if abs(best / use(start) - 1.25) > 1e-5:
        assert (before is not None) == (best > 1.25 * use(start))
    assert before is None or use(before) == pytest.approx(best)


# ---- neighbours ----


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=12), st.integers(1, 12))
def test_of_all_neighbours_those_of_least_waste_are_found(lengths: list[float], count: int) -> None:
    lengths, count = sorted(lengths), min(count, len(lengths))

    def waste(start: int) -> float:
        return sum(lengths[start + count - 1] - length for length in lengths[start : start + count])

    best = min(waste(start) for start in range(len(lengths) - count + 1))
    assert waste(least_waste(lengths, count)) == pytest.approx(best, abs=1e-9)
