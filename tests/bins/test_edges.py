"""Edges: known answers, brute force, ties, drift."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bins.capacity import batch_time, batch_time_exponential
from bins.edges import OnlineEdges, answered_edges, equal_mass_edges, exponential_edges, index_of, optimal_edges


def test_uniform_lengths_are_cut_at_their_quantiles() -> None:
    lengths = np.arange(1, 101)
    assert equal_mass_edges(lengths, 4) == (25.5, 50.5, 75.5)


def test_one_bin_has_no_edge() -> None:
    assert equal_mass_edges([3, 1, 2], 1) == ()


def test_a_tie_is_never_split_and_no_bin_is_empty() -> None:
    lengths = [5] * 90 + [6] * 5 + [7] * 5
    edges = equal_mass_edges(lengths, 3)
    assert edges == (5.5, 6.5)
    assert np.bincount(index_of(edges, lengths)).tolist() == [90, 5, 5]


def test_fewer_distinct_lengths_than_bins_give_one_bin_per_length() -> None:
    assert equal_mass_edges([2, 2, 9, 9], 8) == (5.5,)
    assert equal_mass_edges([4, 4, 4], 8) == ()


def test_a_length_on_an_edge_belongs_to_the_upper_bin() -> None:
    assert index_of((10.0, 20.0), [9.9, 10.0, 19.9, 20.0, 1e9]).tolist() == [0, 1, 1, 2, 2]


def test_index_of_keeps_the_shape() -> None:
    assert index_of((10.0,), [[1, 11], [12, 2]]).tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("lengths", [[], [1.0, float("nan")], [float("inf")]])
def test_a_useless_sample_is_an_error(lengths: list[float]) -> None:
    with pytest.raises(ValueError, match="finite lengths"):
        equal_mass_edges(lengths, 4)


def test_zero_bins_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        equal_mass_edges([1.0], 0)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=300), st.integers(1, 12))
def test_every_bin_is_filled_and_each_edge_is_the_nearest_to_its_quantile(lengths: list[int], bins: int) -> None:
    edges = equal_mass_edges(lengths, bins)
    distinct = len(set(lengths))
    assert len(edges) == min(bins, distinct) - 1
    assert np.all(np.diff(edges) > 0)
    counts = np.bincount(index_of(edges, lengths), minlength=len(edges) + 1)
    assert counts.min() > 0
    # An edge that no neighbour displaces is off its quantile by at most half of the tie there.
    largest_tie = np.unique(lengths, return_counts=True)[1].max()
    if bins <= distinct and largest_tie * bins <= len(lengths):
        below = np.cumsum(counts)[:-1]
        expected = np.arange(1, bins) / bins * len(lengths)
        assert np.all(np.abs(below - expected) <= largest_tie / 2 + 1e-9)


@given(st.integers(2, 16), st.integers(0, 2**32 - 1))
def test_distinct_lengths_get_bins_of_equal_mass_within_one_request(bins: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).random(500)
    counts = np.bincount(index_of(equal_mass_edges(lengths, bins), lengths))
    assert counts.max() - counts.min() <= 1 + (500 % bins > 0)


# ---- exponential lengths ----


def test_exponential_edges_are_those_of_lemma_a1() -> None:
    """B = 2, by hand: L_1 = 1.5, L_2 = 1 + log 1.5, and l_1 = log L_2, l_2 = log L_2 + log L_1, in means."""
    assert exponential_edges(2, 1, 10.0) == ()
    assert exponential_edges(2, 2, 10.0) == pytest.approx([4.054651])
    assert exponential_edges(2, 3, 10.0) == pytest.approx([3.403683, 7.458334])


@given(st.integers(2, 5000), st.integers(2, 100), st.floats(1e-3, 1e6))
def test_exponential_edges_ascend_and_leave_the_last_bin_a_harmonic_share(size: int, bins: int, mean: float) -> None:
    edges = exponential_edges(size, bins, mean)
    assert len(edges) == bins - 1
    assert np.all(np.diff([0.0, *edges]) > 0)
    last_but_one = edges[-1] - (edges[-2] if bins > 2 else 0.0)
    harmonic = (1 / np.arange(1, size + 1)).sum()
    assert last_but_one == pytest.approx(mean * np.log(harmonic), rel=1e-6)


@pytest.mark.parametrize(("size", "bins", "mean"), [(1, 2, 1.0), (8, 0, 1.0), (8, 2, 0.0), (8, 2, float("inf"))])
def test_exponential_edges_of_nothing_are_an_error(size: int, bins: int, mean: float) -> None:
    with pytest.raises(ValueError, match=r"are needed|at least 2"):
        exponential_edges(size, bins, mean)


# ---- the best edges of a sample ----


@given(st.lists(st.integers(1, 25), min_size=1, max_size=40), st.integers(1, 5), st.sampled_from([1, 2, 8, 128, 1024]))
def test_optimal_edges_are_the_best_of_all_edges(lengths: list[int], bins: int, size: int) -> None:
    distinct = np.unique(lengths)
    cuts = (distinct[1:] + distinct[:-1]) / 2
    count = min(bins, distinct.size) - 1
    best = min(batch_time(lengths, chosen, size) for chosen in combinations(cuts, count))
    edges = optimal_edges(lengths, bins, size)
    assert len(edges) == count
    assert set(edges) <= set(cuts)
    assert batch_time(lengths, edges, size) == pytest.approx(best, rel=1e-9)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200), st.integers(1, 20), st.integers(1, 300))
def test_optimal_edges_are_never_slower_than_equal_mass(lengths: list[int], bins: int, size: int) -> None:
    best = batch_time(lengths, optimal_edges(lengths, bins, size), size)
    assert best <= batch_time(lengths, equal_mass_edges(lengths, bins), size) * (1 + 1e-9)


@given(st.integers(2, 40), st.sampled_from([1, 8, 200]), st.floats(0.0, 2.0), st.integers(0, 2**32 - 1))
def test_with_more_lengths_than_parts_no_bin_is_empty_and_equal_mass_is_not_better(
    bins: int, size: int, sigma: float, seed: int
) -> None:
    lengths = np.random.default_rng(seed).lognormal(5.2, sigma, 1000)
    edges = optimal_edges(lengths, bins, size, parts=128)
    assert np.bincount(index_of(edges, lengths), minlength=len(edges) + 1).min() > 0
    assert len(edges) == min(bins, np.unique(lengths).size) - 1
    equal = batch_time(lengths, equal_mass_edges(lengths, bins), size)
    assert batch_time(lengths, edges, size) <= equal * (1 + 2e-3)


@pytest.mark.parametrize("bins", [2, 4, 8])
@pytest.mark.parametrize("size", [32, 200])
def test_optimal_edges_of_exponential_lengths_are_as_good_as_those_of_lemma_a1(bins: int, size: int) -> None:
    """They are no worse on a fine sample; for large batches the Lemma's edges are almost the best, too."""
    fine = -np.log1p(-(np.arange(200_000) + 0.5) / 200_000)
    best = batch_time(fine, optimal_edges(fine, bins, size), size)
    lemma = batch_time(fine, exponential_edges(size, bins, 1.0), size)
    assert best <= lemma * (1 + 2e-4)
    assert best >= lemma * (1 - (1e-3 if size == 200 else 3e-3))
    assert best == pytest.approx(batch_time_exponential(bins, size, 1.0), rel=3e-3)


@pytest.mark.parametrize(
    ("size", "gains"),
    [(8, (9.5, 11.9, 7.9)), (32, (20.6, 18.3, 9.2)), (128, (24.3, 18.3, 9.0))],
    ids=["8", "32", "128"],
)
def test_gains_over_equal_mass_are_those_in_the_documentation(size: int, gains: tuple[float, ...]) -> None:
    """Lognormal lengths, mu = 5.2, sigma = 0.8, cap 1024: gain in percent at 2, 4 and 8 bins, on another sample."""
    fitted, judge = (np.minimum(np.random.default_rng(seed).lognormal(5.2, 0.8, 100_000), 1024) for seed in (1, 2))
    for bins, gain in zip((2, 4, 8), gains, strict=True):
        optimal = batch_time(judge, optimal_edges(fitted, bins, size), size)
        equal = batch_time(judge, equal_mass_edges(fitted, bins), size)
        assert 100 * (equal / optimal - 1) == pytest.approx(gain, abs=1.0)


@pytest.mark.parametrize("size", [8, 128])
def test_more_bins_than_are_useful_do_no_harm_on_unseen_lengths(size: int) -> None:
    rng = np.random.default_rng(4)
    fitted, judge = rng.lognormal(5.2, 0.8, 1000), rng.lognormal(5.2, 0.8, 50_000)
    times_s = [batch_time(judge, optimal_edges(fitted, bins, size), size) for bins in (8, 32, 128, 400)]
    assert np.all(np.diff(times_s) < 0)
    assert len(optimal_edges(fitted[:200], 2000, size)) == 199


@pytest.mark.parametrize("size", [128, 1024, 100_000])
def test_large_batches_do_not_underflow(size: int) -> None:
    """The longest of very many requests is the longest possible: bins of equal requests are cut where lengths jump."""
    lengths = [*range(1, 101), *range(900, 1000)]
    assert optimal_edges(lengths, 2, size) == (500.0,)


def test_a_few_outliers_get_their_own_bin() -> None:
    lengths = np.concatenate([np.random.default_rng(5).uniform(1, 20, 5000), [4000.0, 5000.0]])
    (edge,) = optimal_edges(lengths, 2, 8)
    assert 20 < edge < 4000


def test_almost_equal_lengths_make_fewer_bins_and_none_is_empty() -> None:
    """Most lengths are 10, one is a million, and the rest have too little mass and range to be separated."""
    lengths = np.concatenate([np.full(20_000, 10.0), np.linspace(11, 20, 300), [1e6]])
    edges = optimal_edges(lengths, 32, 8)
    assert 3 <= len(edges) + 1 < 32
    assert np.bincount(index_of(edges, lengths), minlength=len(edges) + 1).min() > 0
    assert batch_time(lengths, edges, 8) == pytest.approx(lengths.mean(), rel=1e-3)


def test_equal_mass_is_optimal_for_uniform_lengths() -> None:
    """Lemma 4.1."""
    fine = np.linspace(0, 1, 256)
    assert optimal_edges(fine, 4, 8) == pytest.approx([0.25, 0.5, 0.75], abs=0.01)


@pytest.mark.parametrize(
    ("lengths", "bins", "size", "parts"),
    [([], 2, 8, 256), ([1.0, float("nan")], 2, 8, 256), ([1.0], 0, 8, 256), ([1.0], 2, 0, 256), ([1.0], 2, 8, 0)],
)
def test_optimal_edges_of_nothing_are_an_error(lengths: list[float], bins: int, size: int, parts: int) -> None:
    with pytest.raises(ValueError, match=r"finite lengths|at least 1"):
        optimal_edges(lengths, bins, size, parts=parts)


# ---- edges over inexact scores ----


def answered(count: int, sigma: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores with a lognormal error, and the lengths of the answers."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(5.2, 0.8, count), 1024)
    return lengths * rng.lognormal(0, sigma, count), lengths


def time_of(scores: np.ndarray, lengths: np.ndarray, edges: tuple[float, ...], size: int) -> float:
    """Expected time of a batch of requests that were binned by score, tokens."""
    bin_of = index_of(edges, scores)
    return sum(
        np.mean(bin_of == index) * batch_time(lengths[bin_of == index], (), size) for index in range(len(edges) + 1)
    )


@pytest.mark.parametrize("size", [8, 128])
@pytest.mark.parametrize("bins", [2, 4])
def test_where_scores_are_lengths_edges_by_answers_are_the_optimal_ones(bins: int, size: int) -> None:
    scores, lengths = answered(4096, 0.0, seed=1)
    _, other_lengths = answered(40_000, 0.0, seed=2)
    optimal = batch_time(other_lengths, optimal_edges(lengths, bins, size), size)
    assert batch_time(other_lengths, answered_edges(scores, lengths, bins, size), size) == pytest.approx(
        optimal, rel=0.01
    )


@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("size", [8, 32, 128])
def test_edges_by_answers_are_as_good_as_equal_mass_where_edges_by_scores_are_worse(size: int, sigma: float) -> None:
    scores, lengths = answered(4096, sigma, seed=3)
    other_lengths = answered(60_000, sigma, seed=4)
    for bins in (2, 8):
        equal = time_of(*other_lengths, equal_mass_edges(scores, bins), size)
        assert time_of(*other_lengths, answered_edges(scores, lengths, bins, size), size) < 1.01 * equal
    if (size, sigma) == (128, 0.7):
        assert time_of(*other_lengths, optimal_edges(scores, 2, size), size) > 1.1 * time_of(
            *other_lengths, equal_mass_edges(scores, 2), size
        )


def test_edges_by_answers_gain_where_scores_are_good_enough() -> None:
    scores, lengths = answered(4096, 0.3, seed=5)
    other_lengths = answered(60_000, 0.3, seed=6)
    equal = time_of(*other_lengths, equal_mass_edges(scores, 2), 32)
    assert time_of(*other_lengths, answered_edges(scores, lengths, 2, 32), 32) < equal / 1.08


def test_edges_by_answers_of_useless_scores_are_of_equal_mass() -> None:
    rng = np.random.default_rng(7)
    scores, lengths = rng.uniform(1, 100, 4096), rng.lognormal(5, 1, 4096)
    assert answered_edges(scores, lengths, 4, 8) == equal_mass_edges(scores, 4)
    assert answered_edges(scores, np.full(4096, 7.0), 4, 8) == equal_mass_edges(scores, 4)


def test_edges_by_answers_that_are_the_best_of_all_cuts() -> None:
    """Few scores and lengths, so that none are grouped: brute force."""
    rng = np.random.default_rng(8)
    for _ in range(20):
        scores = rng.integers(1, 10, 60).astype(float)
        lengths = scores * rng.integers(1, 3, 60)
        cuts = (np.unique(scores)[1:] + np.unique(scores)[:-1]) / 2
        least_s = min(time_of(scores, lengths, pair, 4) for pair in combinations(cuts.tolist(), 2))
        edges = answered_edges(scores, lengths, 3, 4, gain_min=0.0)
        assert time_of(scores, lengths, edges, 4) == pytest.approx(least_s)


def test_scores_without_their_answers_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 scores are not of 1 answers"):
        answered_edges([1.0, 2.0], [1.0], 2, 8)


# ---- edges that follow the traffic ----


def test_edges_are_computed_by_the_given_function() -> None:
    edges = OnlineEdges(2, refit_every=3, window=2, fit=lambda values: (float(values.max()),))
    assert [edges.observe(length) for length in (30, 10, 20)] == [False, False, True]
    assert edges.edges == (20.0,)


def test_one_bin_needs_no_fit() -> None:
    def fit(values: np.ndarray) -> tuple[float, ...]:
        raise AssertionError("nobody asked")

    edges = OnlineEdges(1, sample=[1.0, 2.0], refit_every=1, fit=fit)
    assert not edges.observe(3.0)
    assert edges.bin_of(9.0) == 0


def test_first_edges_come_from_the_sample() -> None:
    assert OnlineEdges(2, sample=range(1, 101)).edges == (50.5,)


def test_without_sample_or_edges_one_bin_serves_until_lengths_are_observed() -> None:
    edges = OnlineEdges(2, refit_every=4)
    assert edges.bin_of(1e6) == 0
    assert [edges.observe(length) for length in (10, 20, 30, 40)] == [False, False, False, True]
    assert edges.edges == (25.0,)
    assert [edges.bin_of(length) for length in (24, 25, 26)] == [0, 1, 1]


def test_edges_follow_traffic_that_drifts() -> None:
    edges = OnlineEdges(4, sample=range(1, 101), window=200, refit_every=50)
    drifted = np.random.default_rng(1).uniform(1_000, 2_000, 400)
    for length in drifted:
        edges.observe(length)
    counts = np.bincount(index_of(edges.edges, drifted[-200:]), minlength=4)
    assert counts.tolist() == [50, 50, 50, 50]


def test_a_sample_is_displaced_evenly_not_from_its_short_end() -> None:
    edges = OnlineEdges(2, sample=range(1_000), window=1_000, refit_every=500)
    for length in np.random.default_rng(2).permutation(1_000)[:500]:
        edges.observe(float(length))
    assert edges.edges[0] == pytest.approx(500, rel=0.1)


def test_refit_every_zero_keeps_the_edges() -> None:
    edges = OnlineEdges(2, edges=[100.0], refit_every=0)
    assert not any(edges.observe(1.0) for _ in range(1_000))
    assert edges.edges == (100.0,)


@pytest.mark.parametrize(
    "edges", [[10.0, 10.0], [20.0, 10.0], [10.0], [10.0, float("nan")], [float("nan"), 10.0], [10.0, float("inf")]]
)
def test_configured_edges_must_fit_the_number_of_bins(edges: list[float]) -> None:
    with pytest.raises(ValueError, match="3 bins need 2 strictly increasing finite edges"):
        OnlineEdges(3, edges=edges)


def test_the_only_edge_must_be_a_number() -> None:
    with pytest.raises(ValueError, match="2 bins need 1 strictly increasing finite edges"):
        OnlineEdges(2, edges=[float("nan")])
