"""Whether predictions rank the answers."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from llmserve.request import Request
from llmserve.scheduling.trust import Trust, spearman


def observed(predicted: list[float], actual: list[float], window: int = 64) -> tuple[Trust, list[int]]:
    """A judge that has observed these pairs, and the indices at which its verdict changed."""
    trust = Trust(window)
    pairs = enumerate(zip(predicted, actual, strict=True))
    return trust, [i for i, (guess, truth) in pairs if trust.observe(Request(i, guess), guess, truth)]


def noise(n: int, seed: int) -> list[float]:
    return [float(x) for x in np.random.default_rng(seed).lognormal(4, 1, n)]


def test_spearman_equals_scipys_with_ties() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        x, y = rng.integers(0, 6, (2, 40)).astype(float)
        assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)
    assert math.isnan(spearman(np.ones(9), np.arange(9.0)))


def test_right_predictions_are_never_distrusted_whatever_their_scale() -> None:
    lengths = noise(2000, 0)
    assert observed([x**0.3 / 50 for x in lengths], lengths)[1] == []


def test_weak_but_real_predictions_are_kept() -> None:
    lengths, other = noise(2000, 0), noise(2000, 1)
    blurred = [x**0.8 * y for x, y in zip(lengths, other, strict=True)]
    assert observed(blurred, lengths, window=256)[1] == []


def test_shuffled_predictions_are_distrusted_within_a_window_and_stay_so() -> None:
    trust, changes = observed(noise(2000, 0), noise(2000, 1), window=256)
    assert len(changes) == 1
    assert changes[0] < 256
    assert not trust.trusted


def test_right_predictions_regain_trust_by_themselves() -> None:
    first, lengths = noise(600, 0), noise(1200, 1)
    trust, changes = observed(first + lengths[600:], lengths, window=256)
    assert len(changes) == 2
    assert changes[1] < 600 + 256
    assert trust.trusted


def test_answers_of_one_length_need_one_bin() -> None:
    assert not observed(noise(64, 0), [512.0] * 64)[0].trusted


def test_accuracy_over_the_window() -> None:
    lengths = [float(x) for x in range(1, 65)]
    accuracy = observed(lengths, lengths)[0].accuracy(bins=4)
    assert (accuracy.answers, accuracy.rank_correlation) == (64, pytest.approx(1.0))
    assert (accuracy.bin_accuracy, accuracy.near_accuracy) == (1.0, 1.0)
    reverse = observed(lengths, lengths[::-1])[0].accuracy(bins=4)
    assert (reverse.bin_accuracy, reverse.near_accuracy) == (0.0, 0.5)


def test_calibration_is_the_share_of_answers_below_each_quantile() -> None:
    trust = Trust(100)
    levels = (np.arange(5) + 0.5) / 5
    for i in range(100):
        trust.observe(Request(i, 50.0, quantiles=tuple(100 * levels)), 50.0, i + 0.5)
    assert trust.accuracy(2).calibration_error == pytest.approx(0.0, abs=0.011)
    for i in range(100):
        trust.observe(Request(i, 50.0, quantiles=(1.0, 2.0, 3.0, 4.0, 5.0)), 50.0, i + 0.5)
    assert trust.accuracy(2).calibration_error == pytest.approx(0.5 - 0.03, abs=0.011)


def test_answers_cut_at_their_limit_do_not_count_as_bad_calibration() -> None:
    trust = Trust(64)
    for i in range(64):
        trust.observe(Request(i, 64.0, quantiles=(64.0,) * 5), 64.0, 64.0)
    assert trust.accuracy(2).calibration_error == 0.0


def test_a_window_too_short_to_judge_by_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        Trust(31)
