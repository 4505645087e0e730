"""Kendall's tau."""

import math

import numpy as np
import pytest
from scipy.stats import kendalltau

from predictor.ranking import kendall_tau


@pytest.mark.parametrize("count", [2, 3, 10, 257, 1000])
@pytest.mark.parametrize("values", [2, 30, 10**6])
def test_tau_is_scipys_with_and_without_ties(count: int, values: int) -> None:
    rng = np.random.default_rng(count)
    x = rng.integers(0, values, count)
    y = x // 2 + rng.integers(0, values, count)
    expected = kendalltau(x, y).statistic
    assert kendall_tau(x, y) == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert kendall_tau(y, x) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_the_same_order_is_1_and_the_reverse_order_is_minus_1() -> None:
    assert kendall_tau([1, 5, 7.5], [-3, 0, 100]) == 1
    assert kendall_tau([1, 5, 7.5], [100, 0, -3]) == -1


@pytest.mark.parametrize(("x", "y"), [([], []), ([1], [2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [4, 4, 4])])
def test_there_is_no_tau_without_two_different_values(x: list[float], y: list[float]) -> None:
    assert math.isnan(kendall_tau(x, y))
