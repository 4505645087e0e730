"""The risk: how much longer a request makes its batch."""

import numpy as np
import pytest

from bins.risk import risk, risks


def test_the_risk_is_the_expected_longest_of_a_batch_of_such_requests() -> None:
    lengths = [10.0, 40.0, 70.0, 300.0]
    draws = np.random.default_rng(0).choice(lengths, (200_000, 8))
    assert risk(lengths, 8) == pytest.approx(draws.max(axis=1).mean(), rel=0.002)


def test_alone_in_a_batch_it_is_the_mean_and_in_a_huge_one_the_longest() -> None:
    assert risk([10.0, 20.0, 60.0], 1) == pytest.approx(30.0)
    assert risk([10.0, 20.0, 60.0], 1000) == pytest.approx(60.0)


def test_a_certain_length_is_its_own_risk() -> None:
    assert risk([50.0], 8) == 50.0
    assert risk([50.0] * 15, 128) == pytest.approx(50.0)


def test_an_array_of_requests_gives_the_same() -> None:
    lengths = np.sort(np.random.default_rng(1).lognormal(4, 1, (5, 15)), axis=1)
    assert risks(lengths, 32) == pytest.approx([risk(row.tolist(), 32) for row in lengths])


def test_an_empty_array_has_no_risk() -> None:
    with pytest.raises(ValueError, match="at least one length"):
        risk([], 8)
