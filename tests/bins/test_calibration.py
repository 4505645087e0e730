"""Predicted quantiles and the shares of answers below them."""

import numpy as np
import pytest

from bins.calibration import calibration_error, coverage, midpoints


def test_equally_likely_values_are_the_quantiles_at_the_middles_of_equal_parts() -> None:
    assert midpoints(4).tolist() == [0.125, 0.375, 0.625, 0.875]


def test_right_quantiles_have_their_levels_below_them() -> None:
    actual = np.arange(1000) + 0.5
    quantiles = np.tile(1000 * midpoints(5), (1000, 1))
    assert coverage(quantiles, actual) == pytest.approx(midpoints(5))
    assert calibration_error(coverage(quantiles, actual)) == pytest.approx(0.0, abs=1e-12)


def test_quantiles_that_are_all_too_short_are_off_by_their_levels() -> None:
    shares = coverage([[1.0, 2.0]] * 3, [9.0] * 3)
    assert shares.tolist() == [0.0, 0.0]
    assert calibration_error(shares) == pytest.approx(0.5)


def test_answers_equal_to_a_quantile_count_as_far_as_its_level_needs() -> None:
    assert coverage([[64.0] * 5] * 8, [64.0] * 8) == pytest.approx(midpoints(5))
