import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bins.calibration import midpoints
from predictor.quantiles import LENGTH_MAX, LEVELS, ascending, at_levels, crps, log_length, sample_quantiles

NONE_CAPPED = np.zeros(5, dtype=bool)
logs = st.lists(st.floats(0, 16), min_size=LEVELS, max_size=LEVELS).map(lambda xs: tuple(sorted(xs)))


def test_each_value_of_a_sample_is_the_quantile_at_the_middle_of_its_step():
    values = np.array([3.0, 1.0, 2.0, 5.0, 4.0])
    assert sample_quantiles(values, NONE_CAPPED, midpoints(5)).tolist() == [1, 2, 3, 4, 5]
    assert sample_quantiles(values, NONE_CAPPED, np.array([0.01, 0.2, 0.99])).tolist() == [1, 1.5, 5]


def test_capped_values_shift_the_mass_to_the_longer_ones_as_kaplan_and_meier_do():
    # deaths at 1 (of 4 at risk) and at 3 (of 2): the share that is longer is 3/4 after 1, 3/8 after 3
    values, capped = np.array([1.0, 2.0, 3.0, 4.0]), np.array([False, True, False, True])
    middles = np.array([1 / 8, 1 - (3 / 4 + 3 / 8) / 2])
    assert sample_quantiles(values, capped, middles) == pytest.approx([1, 3])
    assert sample_quantiles(values, capped, np.array([0.62])).tolist() == [3]
    assert np.isnan(sample_quantiles(values, capped, np.array([0.63]))).all()


def test_all_capped_answers_give_no_quantiles():
    assert np.isnan(sample_quantiles(np.ones(5), ~NONE_CAPPED, midpoints(15))).all()


def test_the_median_of_a_capped_sample_is_that_of_the_uncapped_one():
    rng = np.random.default_rng(1)
    values, caps = rng.normal(size=20_000), rng.normal(0.5, size=20_000)
    observed = np.minimum(values, caps)
    assert float(sample_quantiles(observed, values > caps, np.array(0.5))) == pytest.approx(0, abs=0.03)
    assert np.median(observed) < -0.2  # the result without the flags


def test_any_number_of_quantiles_becomes_fifteen_on_the_same_line():
    for count in (2, 3, 7, 99):
        assert list(at_levels((10 * midpoints(count)).tolist())) == pytest.approx((10 * midpoints(LEVELS)).tolist())
    assert list(at_levels([4.0])) == [4.0] * LEVELS


def test_lengths_are_bounded_by_one_token_and_the_longest_possible_answer():
    assert log_length(0.2) == 0
    assert log_length(1e300) == math.log(LENGTH_MAX)
    assert ascending([3.0, -1.0, 2.0, 99.0]) == (0, 2, 3, math.log(LENGTH_MAX))


@given(logs, st.floats(0, 16))
def test_the_score_is_twice_the_mean_pinball_loss(forecast, actual):
    p, error = midpoints(LEVELS), actual - np.array(forecast)
    pinball = np.mean(np.maximum(p * error, (p - 1) * error))
    assert crps(forecast, actual, capped=False) == pytest.approx(2 * pinball, abs=1e-9)


def test_of_a_capped_answer_only_quantiles_below_the_cap_are_scored():
    assert crps((7.0,) * LEVELS, 5.0, capped=True) == 0
    assert crps((4.0,) * LEVELS, 5.0, capped=True) == 1
