"""The lengths that bins hold: first a sample, then answers."""

from __future__ import annotations

import numpy as np
import pytest

from bins.service import longest_slices
from llmserve.scheduling.lengths import ENOUGH, LEVELS, SeenLengths

SAMPLE = tuple(float(length) for length in range(10, 210))  # 200 lengths


def test_at_first_a_sample_stands_for_the_lengths_by_its_own_scores() -> None:
    short, long_ = SeenLengths(1_000, SAMPLE).by_bin((110.0,), 2)
    levels = (np.arange(LEVELS) + 0.5) / LEVELS
    assert short == pytest.approx(10 + 100 * levels - 0.5, abs=0.5)
    assert long_ == pytest.approx(110 + 100 * levels - 0.5, abs=0.5)


def test_lengths_of_a_bin_are_equally_likely_and_ascending() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(5.0, 1.0, 5_000)
    (lengths,) = SeenLengths(5_000, drawn.tolist()).by_bin((), 1)
    assert len(lengths) == LEVELS
    assert list(lengths) == sorted(lengths)
    assert np.mean(lengths) == pytest.approx(drawn.mean(), rel=1e-3)
    assert lengths[LEVELS // 2] == pytest.approx(np.quantile(drawn, 0.5 + 0.5 / LEVELS), rel=0.01)


def test_the_longest_of_a_batch_is_as_long_as_in_the_data() -> None:
    """Levels in the middle of slices would make the longest a tenth too short."""
    drawn = np.random.default_rng(0).lognormal(5.0, 0.8, 5_000)
    (lengths,) = SeenLengths(5_000, drawn.tolist()).by_bin((), 1)
    expected, estimated = (float(longest_slices(sample, [32], 1)[0, 0]) for sample in (drawn, lengths))
    assert estimated == pytest.approx(expected, rel=0.03)


def test_answers_displace_the_sample() -> None:
    answers = SeenLengths(100, SAMPLE)
    for _ in range(50):
        answers.observe(20.0, 1_000.0)
    (half,) = answers.by_bin((), 1)
    assert sum(length == 1_000.0 for length in half) == LEVELS // 2
    for _ in range(50):
        answers.observe(20.0, 1_000.0)
    assert answers.by_bin((), 1) == ((1_000.0,) * LEVELS,)


def test_the_oldest_answers_are_forgotten_first() -> None:
    answers = SeenLengths(16)
    for tokens in range(1, 41):
        answers.observe(1.0, float(tokens))
    (lengths,) = answers.by_bin((), 1)
    assert (min(lengths), max(lengths)) == (pytest.approx(25.0, abs=0.5), pytest.approx(40.0, abs=0.5))


def test_bins_are_chosen_by_score_and_hold_answer_lengths() -> None:
    """Scores of 50 were answered with 500 tokens, those of 400 with 30."""
    answers = SeenLengths(64)
    for _ in range(32):
        answers.observe(50.0, 500.0)
        answers.observe(400.0, 30.0)
    assert answers.by_bin((100.0,), 2) == ((500.0,) * LEVELS, (30.0,) * LEVELS)


def test_a_bin_with_few_answers_takes_the_lengths_of_all_bins() -> None:
    answers = SeenLengths(64)
    for _ in range(64 - ENOUGH + 1):
        answers.observe(50.0, 500.0)
    for _ in range(ENOUGH - 1):
        answers.observe(400.0, 30.0)
    of_all = answers.by_bin((), 1)[0]
    assert answers.by_bin((100.0,), 2)[1] == of_all
    answers.observe(400.0, 30.0)  # one more answer is enough
    assert answers.by_bin((100.0,), 2)[1] == (30.0,) * LEVELS


def test_a_score_on_an_edge_belongs_to_the_upper_bin() -> None:
    answers = SeenLengths(64)
    for _ in range(32):
        answers.observe(99.0, 1.0)
        answers.observe(100.0, 2.0)
    assert answers.by_bin((100.0,), 2) == ((1.0,) * LEVELS, (2.0,) * LEVELS)


def test_a_request_without_a_prediction_counts_for_the_first_bin() -> None:
    answers = SeenLengths(32)
    for _ in range(16):
        answers.observe(None, 7.0)
        answers.observe(300.0, 9.0)
    assert answers.by_bin((100.0,), 2) == ((7.0,) * LEVELS, (9.0,) * LEVELS)


def test_bins_whose_edges_are_not_known_yet_take_all_lengths() -> None:
    lengths = SeenLengths(1_000, SAMPLE).by_bin((), 4)
    assert lengths == (lengths[0],) * 4


def test_without_data_a_guess_stands_for_the_lengths() -> None:
    assert SeenLengths(10, guess_tokens=64.0).by_bin((), 2) == ((64.0,) * LEVELS,) * 2


def test_lengths_are_positive_because_a_batch_takes_time() -> None:
    answers = SeenLengths(8)
    for _ in range(8):
        answers.observe(1.0, 0.01)
    assert min(answers.by_bin((), 1)[0]) > 0


def test_a_long_sample_is_cut_evenly() -> None:
    """Samples are sorted but taken in a shuffled order: the kept part still has the sample's mean."""
    levels = SeenLengths(500, sorted(np.random.default_rng(1).uniform(0, 100, 20_000))).by_bin((), 1)[0]
    assert np.mean(levels) == pytest.approx(50.0, rel=0.1)
