import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy.stats import spearmanr

from bins.calibration import midpoints
from predictor.quantiles import LEVELS, at_levels, crps
from predictor.recalibration import Recalibration, width

NORMAL = np.array([NormalDist().inv_cdf(p) for p in midpoints(LEVELS)])
WINDOW = 512


def world(answers, seed=0, sigma=0.5):
    """(answers,) logarithms of lengths, and (answers, LEVELS) the right quantiles of each."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(5, 0.7, answers)
    return rng.normal(centre, sigma), centre[:, None] + sigma * NORMAL


def corrected_in_turn(actual, predicted, capped=None, recalibration=None):
    """Each prediction, corrected by the answers before it."""
    recalibration = recalibration or Recalibration(WINDOW)
    capped = np.zeros(actual.size, dtype=bool) if capped is None else capped
    corrected = []
    for y, logs, cut in zip(actual.tolist(), predicted.tolist(), capped.tolist(), strict=True):
        s = width(logs) if logs[0] < logs[-1] else 1.0
        corrected.append(recalibration.corrected(logs, s))
        recalibration.learn(logs, s, y, cut)
    return np.array(corrected)


def miscalibration(actual, logs):
    """The largest distance between a level and the share of answers below its quantiles."""
    return np.abs((actual[:, None] < logs).mean(axis=0) - midpoints(LEVELS)).max()


def skewed(logs):
    return logs + 0.4 * (NORMAL + 0.5 * (NORMAL**2))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda logs: logs - math.log(2),
        lambda logs: logs[:, 7:8] + 3 * (logs - logs[:, 7:8]),
        lambda logs: logs[:, 7:8] + (logs - logs[:, 7:8]) / 4,
        skewed,
        lambda logs: logs[:, 7:8] + 0 * logs,
    ],
    ids=["half as long", "too wide", "too narrow", "skewed", "a point"],
)
def test_the_errors_of_a_predictor_are_corrected(wrong):
    actual, right = world(6000)
    predicted = wrong(right)
    corrected = corrected_in_turn(actual, predicted)
    assert miscalibration(actual, predicted) > 0.15
    assert miscalibration(actual[WINDOW:], corrected[WINDOW:]) < 0.02  # chance alone: 2.5 sqrt(1/4 / 5500) = 0.017


def test_a_predictor_that_is_far_too_short_keeps_its_ranking_however_its_widths_differ():
    actual, right = world(1500)
    widths = np.random.default_rng(1).uniform(0.2, 2.0, (1500, 1))
    predicted = right[:, 7:8] - 1.8 + widths * NORMAL  # a sixth of the real lengths, with useless widths
    corrected = corrected_in_turn(actual, predicted)
    after_window = slice(WINDOW, None)
    rank_before, rank_after = (
        spearmanr(logs[after_window, 7], actual[after_window]).statistic for logs in (predicted, corrected)
    )
    assert rank_after > rank_before - 0.01
    assert abs(np.median(actual[after_window] - corrected[after_window, 7])) < 0.1


def test_a_calibrated_predictor_is_not_harmed():
    actual, predicted = world(4000)
    corrected = corrected_in_turn(actual, predicted)
    crps_before = np.mean([crps(tuple(q), y, False) for q, y in zip(predicted, actual, strict=True)])
    crps_after = np.mean([crps(tuple(q), y, False) for q, y in zip(corrected, actual, strict=True)])
    assert crps_after < 1.005 * crps_before


def test_a_drift_is_followed_within_a_window():
    actual, predicted = world(3 * WINDOW)
    actual[WINDOW:] += math.log(3)
    corrected = corrected_in_turn(actual, predicted)
    assert np.median(actual[-WINDOW:] - corrected[-WINDOW:, 7]) == pytest.approx(0, abs=0.1)


def test_a_bias_is_mostly_corrected_after_sixteen_answers():
    actual, predicted = world(17)
    corrected = corrected_in_turn(actual, predicted - math.log(4))
    assert corrected[-1, 7] - predicted[-1, 7] == pytest.approx(0, abs=0.4)  # three standard errors


def test_each_request_keeps_its_own_shape():
    actual, right = world(4000)
    uncertain = slice(WINDOW, None, 2)  # half of the requests are twice as uncertain, as predicted
    actual[::2] = right[::2, 7] + 2 * (actual[::2] - right[::2, 7])
    right[::2] = right[::2, 7:8] + 2 * (right[::2] - right[::2, 7:8])
    corrected = corrected_in_turn(actual, right[:, 7:8] + 3 * (right - right[:, 7:8]))
    assert miscalibration(actual[uncertain], corrected[uncertain]) < 0.04
    certain = slice(WINDOW + 1, None, 2)
    assert miscalibration(actual[certain], corrected[certain]) < 0.04


def test_capped_answers_do_not_make_forecasts_shorter():
    actual, predicted = world(4000)
    caps = np.random.default_rng(7).normal(5.2, 0.7, 4000)
    corrected = corrected_in_turn(np.minimum(actual, caps), predicted - math.log(2), actual > caps)
    assert 0.2 < np.mean(actual > caps) < 0.6
    assert miscalibration(actual[WINDOW:], corrected[WINDOW:]) < 0.05


def test_capped_answers_do_not_correct_longer_predictions():
    _, predicted = world(200)
    short = predicted[:, 0] - 1
    assert corrected_in_turn(short, predicted, np.ones(200, dtype=bool)) == pytest.approx(predicted)


def test_before_any_answer_a_point_prediction_has_equal_quantiles():
    point = at_levels([math.log(70)])
    assert Recalibration(WINDOW).corrected(point, 1.0) == (math.log(70),) * LEVELS


def test_the_worst_of_predictors_still_gives_ascending_finite_lengths():
    actual = np.random.default_rng(3).uniform(0, 16, 600)
    predicted = np.sort(np.random.default_rng(4).uniform(0, 16, (600, LEVELS)), axis=1)
    predicted[::3] = predicted[::3, :1]  # degenerate
    corrected = corrected_in_turn(actual, predicted)
    assert (np.diff(corrected, axis=1) >= 0).all()
    assert (corrected >= 0).all()
    assert np.isfinite(np.exp(corrected)).all()
