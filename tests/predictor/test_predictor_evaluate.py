"""Measures of a predictor, on answers with known results."""

import json
import math
from itertools import product
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from bins.calibration import midpoints
from predictor.baselines import baselines, out_of_fold_baselines
from predictor.dataset import Row
from predictor.errors import DatasetError
from predictor.evaluate import (
    Difference,
    bin_probabilities,
    compare,
    confusion,
    equal_mass_bins,
    equal_mass_edges,
    evaluate,
    expected_longest,
    gains_of,
    saturated_gain,
)
from predictor.figures import calibration_figure, confusion_figure, gains_figure
from predictor.prompt import Prompt

ONE_TO_EIGHT = list(range(1, 9))


# --- accuracies -------------------------------------------------------------------------------------------------


def test_perfect_predictions_have_perfect_metrics() -> None:
    metrics = evaluate(ONE_TO_EIGHT, ONE_TO_EIGHT, ONE_TO_EIGHT)
    assert metrics.mae_tokens == metrics.pinball_tokens == 0
    assert metrics.kendall_tau == pytest.approx(1)
    assert metrics.bin_accuracy == metrics.near_accuracy == {2: 1, 4: 1, 8: 1}


def test_metrics_of_known_errors() -> None:
    metrics = evaluate([2.0, 2.4, 3.0, 4.0, 5.0, 6.0, 7.0, 1.0], ONE_TO_EIGHT, ONE_TO_EIGHT)
    assert metrics.mae_tokens == pytest.approx((1 + 0.4 + 7) / 8)
    assert metrics.bin_accuracy == {2: 7 / 8, 4: 7 / 8, 8: 6 / 8}
    assert metrics.near_accuracy == {2: 1.0, 4: 7 / 8, 8: 7 / 8}


def test_the_point_prediction_is_the_median_of_the_quantiles() -> None:
    quantiles = [[0.1, length, 10 * length] for length in ONE_TO_EIGHT]
    metrics = evaluate(quantiles, ONE_TO_EIGHT, ONE_TO_EIGHT)
    assert metrics.mae_tokens == 0
    assert metrics.bin_accuracy[8] == 1


def test_the_likeliest_bin_is_derived_from_the_distribution() -> None:
    edges = np.array([10.0, 100.0])
    certain, split = np.full((1, 15), 50.0), np.array([[3.0] * 6 + [90.0] * 4 + [800.0] * 5])
    assert bin_probabilities(certain, edges)[0] == pytest.approx([0, 1, 0], abs=0.01)
    assert bin_probabilities(split, edges)[0] == pytest.approx([0.42, 0.25, 0.33], abs=0.05)
    metrics = evaluate(np.vstack([split] * 3), [3.0, 90.0, 800.0], [1] * 50 + [10] * 50 + [100] * 50 + [1000] * 50)
    assert metrics.likely_accuracy is not None
    assert metrics.likely_accuracy[4] == pytest.approx(1 / 3)
    assert metrics.bin_accuracy[4] == pytest.approx(1 / 3)
    assert evaluate([1.0, 2.0], [1, 2], [1, 2]).likely_accuracy is None


def test_the_likeliest_bins_beat_the_medians_where_medians_shrink() -> None:
    rng = np.random.default_rng(0)
    centre = rng.normal(4, 1, 4000)
    lengths = np.exp(centre + 1.5 * rng.normal(size=4000)).round().clip(1)
    spread = 1.5 * np.array([NormalDist().inv_cdf((i + 0.5) / 15) for i in range(15)])
    metrics = evaluate(np.exp(centre[:, None] + spread), lengths, lengths.tolist())
    assert metrics.likely_accuracy is not None
    assert metrics.likely_near_accuracy is not None
    assert metrics.likely_accuracy[8] > metrics.bin_accuracy[8] + 0.02
    assert metrics.likely_near_accuracy[8] > metrics.near_accuracy[8]


def test_bins_are_equal_mass_and_collapse_when_lengths_repeat() -> None:
    assert equal_mass_edges(range(1, 101), 4).tolist() == pytest.approx([25.75, 50.5, 75.25])
    assert equal_mass_edges([5] * 90 + [9] * 10, 4).tolist() == []
    assert evaluate([5, 9], [5, 9], [5] * 60 + [9] * 40).distinct_bins == {2: 1, 4: 2, 8: 2}


def test_a_confusion_counts_answers_by_real_and_predicted_bin() -> None:
    edges = equal_mass_edges(ONE_TO_EIGHT, 2)
    assert confusion([1, 2, 3, 8, 5, 6, 7, 8], ONE_TO_EIGHT, edges).tolist() == [[3, 1], [0, 4]]


def test_a_constant_prediction_has_no_rank_correlation() -> None:
    metrics = evaluate([4.0] * 8, ONE_TO_EIGHT, ONE_TO_EIGHT)
    assert math.isnan(metrics.kendall_tau)
    assert json.loads(json.dumps(metrics.as_json()))["kendall_tau"] is None


# --- capped answers ---------------------------------------------------------------------------------------------


def test_a_capped_answer_has_no_error_when_it_was_predicted_to_be_longer() -> None:
    predicted, actual = [150, 80, 150], [100, 100, 100]
    assert evaluate(predicted, actual, [100], capped=[True, True, False]).mae_tokens == pytest.approx((0 + 20 + 50) / 3)
    assert evaluate(predicted, actual, [100]).mae_tokens == pytest.approx((50 + 20 + 50) / 3)


def test_predictions_end_at_the_ceiling_where_there_is_one() -> None:
    assert evaluate([150, 150], [100, 150], [100], ceilings=[100, math.nan]).mae_tokens == 0


# --- quantiles --------------------------------------------------------------------------------------------------

LEVELS = midpoints(15)
LENGTHS = np.arange(1, 151)
EXACT = np.tile(LENGTHS.size * LEVELS + 0.5, (LENGTHS.size, 1))  # (answers, 15): every answer is one of 1 .. 150


def test_the_true_distributions_quantiles_are_calibrated() -> None:
    metrics = evaluate(EXACT, LENGTHS, LENGTHS)
    assert metrics.coverage == pytest.approx(LEVELS)
    assert metrics.calibration_error == pytest.approx(0, abs=1e-12)


def test_too_long_quantiles_cover_too_much_and_too_narrow_ones_too_little_on_either_side() -> None:
    longer, narrower = evaluate(1.5 * EXACT, LENGTHS, LENGTHS), evaluate(75 + 0.5 * (EXACT - 75), LENGTHS, LENGTHS)
    assert longer.coverage is not None
    assert narrower.coverage is not None
    assert longer.coverage[5] == pytest.approx(1.5 * LEVELS[5], abs=0.01)
    assert narrower.coverage[0] == pytest.approx(0.5 - 0.5 * (0.5 - LEVELS[0]), abs=0.01)
    assert narrower.coverage[-1] == pytest.approx(0.5 + 0.5 * (LEVELS[-1] - 0.5), abs=0.01)
    assert longer.calibration_error == pytest.approx(np.mean(np.minimum(1.5 * LEVELS, 1) - LEVELS), abs=0.01)


def test_answers_that_tie_at_their_ceiling_do_not_look_uncalibrated() -> None:
    cut = np.minimum(LENGTHS, 100)
    assert evaluate(EXACT, cut, LENGTHS, ceilings=np.full(150, 100.0)).calibration_error == pytest.approx(0, abs=1e-12)


def test_a_point_prediction_has_no_calibration_and_half_its_absolute_error_as_pinball_loss() -> None:
    metrics = evaluate([4.0, 8.0], [1, 10], [1, 10])
    assert metrics.coverage is None
    assert metrics.calibration_error is None
    assert metrics.pinball_tokens == pytest.approx(metrics.mae_tokens / 2) == pytest.approx(1.25)


def test_the_pinball_loss_of_two_quantiles_by_hand() -> None:
    """Levels 1/4 and 3/4: the answer 8 is 6 above the lower (x 1/4) and 4 below the upper (x 1/4)."""
    assert evaluate([[2.0, 12.0]] * 2, [8, 8], [8]).pinball_tokens == pytest.approx((6 / 4 + 4 / 4) / 2)


# --- gains ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 4))
def test_the_expected_longest_of_a_batch_is_the_mean_over_all_batches(lengths: list[int], batch_size: int) -> None:
    every_batch = [max(batch) for batch in product(lengths, repeat=batch_size)]
    assert expected_longest(lengths, batch_size) == pytest.approx(np.mean(every_batch))


THROUGHPUT = {1: 6.4475, 2: 8.4342, 4: 9.9703, 8: 10.9692, 16: 11.5476, 32: 11.8603}


def test_uniform_lengths_gain_as_in_multi_bins_equation_17() -> None:
    """B = 128, lengths uniform on [1, 20], equal-mass bins: its throughput, tabulated to four decimals."""
    actual = 1 + 19 * midpoints(64_000)
    assert 128 / expected_longest(actual, 128) == pytest.approx(THROUGHPUT[1], rel=2e-5)
    gains = gains_of(lambda k, _: equal_mass_bins(actual, k), actual)[128]
    assert gains == pytest.approx({k: THROUGHPUT[k] / THROUGHPUT[1] for k in gains}, rel=5e-5)
    assert evaluate(np.sqrt(actual), actual, [1]).gains[128] == pytest.approx(gains)  # only the order counts


def test_one_bin_gains_nothing() -> None:
    assert saturated_gain(np.zeros(8), ONE_TO_EIGHT, 8) == pytest.approx(1)


def test_bins_of_equal_answers_gain_the_whole_spread() -> None:
    """Batches of 2 take 1 or 3 in separate bins; mixed they take 3 in three of four cases."""
    assert saturated_gain([0, 0, 1, 1], [1, 1, 3, 3], 2) == pytest.approx((0.25 * 1 + 0.75 * 3) / 2)


def test_shuffled_predictions_gain_nothing() -> None:
    actual = 1 + 19 * midpoints(64_000)
    gains = evaluate(np.random.default_rng(0).permutation(actual), actual, [1]).gains
    assert [gain for by_count in gains.values() for gain in by_count.values()] == pytest.approx([1] * 15, abs=0.01)


def test_a_constant_gains_as_much_as_random_bins_in_any_order_of_the_answers() -> None:
    actual = np.sort(np.random.default_rng(0).lognormal(5, 1, 2000))
    gains = evaluate(np.full(2000, 7.0), actual, [1]).gains
    assert gains == gains_of(lambda k, _: equal_mass_bins(np.zeros(2000), k), actual)
    assert gains[8][8] == pytest.approx(1, abs=0.05)
    assert evaluate(actual, actual, [1]).gains[8][8] > 2


def test_equal_mass_bins_follow_the_scores_and_differ_by_at_most_one_answer() -> None:
    assert equal_mass_bins([30, 10, 20, 50, 40], 2).tolist() == [0, 0, 0, 1, 1]
    assert np.bincount(equal_mass_bins(np.zeros(11), 4)).tolist() == [3, 3, 3, 2]
    assert sorted(equal_mass_bins([5, 6], 4).tolist()) == [0, 2]  # fewer answers than bins leave some empty


# --- two predictors ---------------------------------------------------------------------------------------------


def test_a_predictor_does_not_differ_from_itself() -> None:
    differences = compare(LENGTHS, LENGTHS, LENGTHS, LENGTHS.tolist(), resamples=20)
    assert set(differences) == {
        *("MAE, tokens", "4-bin accuracy"),
        *("gain at B=8, 8 bins by median", "gain at B=8, 8 bins by risk"),
    }
    assert all(difference == Difference(0, 0, 0) for difference in differences.values())


def test_the_interval_of_a_clear_difference_leaves_zero_out_and_holds_the_difference() -> None:
    blurred = LENGTHS + np.random.default_rng(0).normal(0, 40, LENGTHS.size)
    differences = compare(LENGTHS, blurred, LENGTHS, LENGTHS.tolist(), resamples=200)
    error, accuracy, gain, by_risk = differences.values()
    assert error.low < error.value < error.high < 0 < accuracy.low < accuracy.value < accuracy.high
    assert 0 < gain.low < gain.value
    assert by_risk == gain  # the risk of a point prediction is the prediction
    assert error.value == pytest.approx(-evaluate(blurred, LENGTHS, LENGTHS.tolist()).mae_tokens)
    assert differences == compare(LENGTHS, blurred, LENGTHS, LENGTHS.tolist(), resamples=200)


def test_possibly_long_answers_make_a_difference_by_risk_and_none_by_median() -> None:
    """Half of the answers are certain, the others may be twenty times as long; one predictor knows which."""
    rng = np.random.default_rng(0)
    wild = rng.random(2000) < 0.5
    actual = np.where(wild & (rng.random(2000) < 0.2), 200, 10)
    knowing = np.array([[10, 10, 10, 10, 200 if is_wild else 10] for is_wild in wild])
    differences = compare(knowing, np.full((2000, 5), 10), actual, actual, resamples=50)
    assert differences["gain at B=8, 8 bins by median"] == Difference(0, 0, 0)
    by_risk = differences["gain at B=8, 8 bins by risk"]
    assert 0.2 < by_risk.low < by_risk.value < by_risk.high


# --- baselines --------------------------------------------------------------------------------------------------


def row(text: str, output_tokens: int, model: str = "") -> Row:
    return Row(Prompt(text, model), output_tokens)


def test_the_simplest_baselines_are_the_median_and_a_line_in_the_prompts_length() -> None:
    training = [row("x" * n, 10 * n) for n in (1, 2, 6)]
    rows = [row("x" * n, 1) for n in (3, 4)]
    assert baselines(training, rows)["constant"].tolist() == [20, 20]
    assert baselines(training, rows)["prompt length"] == pytest.approx([30, 40])


def test_a_line_through_prompts_of_one_length_is_level() -> None:
    assert baselines([row("a", 10), row("b", 20)], [row("ccc", 1)])["prompt length"].tolist() == [15]


def test_the_ridge_knows_lengths_by_words_and_by_the_model() -> None:
    training = [
        row(f"{task} number {i}", length * factor, model)
        for i in range(20)
        for task, length in (("greet", 10), ("essay", 400))
        for model, factor in (("terse", 1), ("chatty", 2))
    ]
    questions = [("greet number 9", "terse"), ("greet number 9", "chatty"), ("essay number 9", "terse"), ("?", "new")]
    predicted = baselines(training, [row(text, 1, model) for text, model in questions])["TF-IDF ridge"]
    assert predicted[:3] == pytest.approx([10, 20, 400], rel=0.25)
    assert 10 <= predicted[3] <= 800  # unknown prompt: within the range of the data


def test_the_ridge_of_too_few_prompts_for_its_folds_is_their_geometric_mean() -> None:
    assert baselines([row("a", 10), row("b", 1000)], [row("c", 1)])["TF-IDF ridge"] == pytest.approx([100])


def test_out_of_fold_a_prompt_is_predicted_from_other_prompts_only() -> None:
    """Five prompts are five folds; the essay and its near duplicate share a fold."""
    tasks = ["greet", "count", "spell", "sing to us", "write an essay on the many uses of iron and of steel today"]
    rows = [row(text, 10 * (i + 1)) for i, text in enumerate(tasks) for _ in range(3)]
    rows.append(row(f"{tasks[4].upper()}!", 50))
    predictions = out_of_fold_baselines(rows)
    other_lengths = [10] * 3 + [20] * 3 + [30] * 3 + [40] * 3
    assert predictions["TF-IDF ridge"][-4:] == pytest.approx(
        [np.exp(np.mean(np.log(other_lengths)))] * 4
    )  # the mean of the 4 other prompts
    assert predictions["constant"].tolist() == [30] * 16
    with pytest.raises(DatasetError, match="too few different prompts"):
        out_of_fold_baselines(rows[:12])


# --- figures ----------------------------------------------------------------------------------------------------


def assert_drawn(path: Path) -> None:
    """Assert that the file is a picture of some size that is not all white."""
    pixels = imread(path)[..., :3]
    assert min(pixels.shape[:2]) > 500
    assert pixels[0].min() == 1
    assert 0.02 < np.mean(pixels.min(axis=-1) < 0.97) < 0.8
    assert len(np.unique((255 * pixels).astype(int) @ [1, 256, 65536])) > 20


def test_figures_are_drawn(tmp_path: Path) -> None:
    metrics = evaluate(EXACT, LENGTHS, LENGTHS)
    assert metrics.coverage is not None
    edges = {k: equal_mass_edges(LENGTHS.tolist(), k).tolist() for k in (2, 4, 8)}
    confusions = {k: confusion(LENGTHS[::-1], LENGTHS, np.array(e)) for k, e in edges.items()}
    confusion_figure(tmp_path / "confusion.png", confusions, edges, "confusion")
    calibration_figure(tmp_path / "calibration.png", {"one": metrics.coverage, "other": midpoints(9)}, "calibration")
    gains_figure(tmp_path / "gains.png", {"oracle": metrics.gains, "random": metrics.gains}, "gains")
    for name in ("confusion", "calibration", "gains"):
        assert_drawn(tmp_path / f"{name}.png")


def test_a_confusion_of_collapsed_bins_is_drawn(tmp_path: Path) -> None:
    confusions = {2: np.array([[3]]), 4: np.array([[0, 0], [1, 5]])}
    confusion_figure(tmp_path / "confusion.png", confusions, {2: [], 4: [7.0]}, "few lengths")
    assert imread(tmp_path / "confusion.png").size
