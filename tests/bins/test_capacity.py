"""The theory of Multi-Bin: the paper's numbers, and brute force or Monte Carlo where it prints none."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bins.capacity import (
    batch_time,
    batch_time_exponential,
    batch_time_uniform,
    batch_time_window,
    best_bins,
    bins_needed_uniform,
    forming_s,
    latency,
    throughput,
    throughput_exponential,
    throughput_exponential_bound,
    throughput_max,
    throughput_uniform,
    utilisation,
)
from bins.edges import equal_mass_edges, exponential_edges, index_of, optimal_edges

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def lognormal(count: int, seed: int) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).lognormal(5.2, 0.8, count), 1024.0)


# ---- uniform lengths ----


@pytest.mark.parametrize(
    ("bins", "published"),
    [(1, 6.4475), (2, 8.4342), (3, 9.3996), (4, 9.9703), (5, 10.3472), (8, 10.9692), (16, 11.5476), (32, 11.8603)],
)
def test_uniform_throughput_is_that_of_theorem_4_2(bins: int, published: float) -> None:
    assert throughput_uniform(bins, 128, 1, 20) == pytest.approx(published, abs=5e-5)


def test_most_throughput_is_the_batch_size_over_the_mean() -> None:
    assert throughput_max(128, 10.5) == pytest.approx(12.190, abs=5e-4)
    assert throughput_uniform(10**9, 128, 1, 20) == pytest.approx(throughput_max(128, 10.5), rel=1e-8)


def test_a_fine_uniform_sample_in_equal_mass_bins_takes_the_time_of_theorem_4_2() -> None:
    fine = np.linspace(1, 20, 40_001)
    for bins, size in product((1, 2, 5, 8), (1, 8, 128)):
        time_s = batch_time(fine, equal_mass_edges(fine, bins), size)
        assert time_s == pytest.approx(batch_time_uniform(bins, size, 1, 20), rel=2e-4)


@pytest.mark.parametrize("gap", [0.2, 0.5, 1.0, 2.0, 5.0])
def test_bins_needed_are_the_fewest_within_the_gap(gap: float) -> None:
    """Theorem 4.3 against a search for the fewest bins."""
    target_per_s = throughput_max(128, 10.5) - gap
    fewest = next(bins for bins in range(1, 1000) if throughput_uniform(bins, 128, 1, 20) >= target_per_s)
    assert bins_needed_uniform(128, 1, 20, gap) == fewest


@given(st.integers(1, 300), st.integers(2, 256))
def test_the_gap_that_some_bins_leave_needs_those_bins(bins: int, size: int) -> None:
    gap = throughput_max(size, 10.5) - throughput_uniform(bins, size, 1, 20)
    assert bins_needed_uniform(size, 1, 20, gap) == bins


def test_bins_needed_are_one_where_bins_gain_nothing() -> None:
    assert bins_needed_uniform(128, 7, 7, 1e-6) == 1
    assert bins_needed_uniform(1, 1, 20, 1e-6) == 1
    assert bins_needed_uniform(128, 1, 20, 100.0) == 1


# ---- exponential lengths ----


def test_one_bin_of_exponential_lengths_takes_the_harmonic_number_of_means() -> None:
    assert batch_time_exponential(1, 3, 10.0) == pytest.approx(10 * (1 + 1 / 2 + 1 / 3))
    assert throughput_exponential_bound(1, 200, 10.0) == pytest.approx(throughput_exponential(1, 200, 10.0))


@pytest.mark.parametrize(("bins", "size"), [(2, 8), (4, 8), (8, 200), (32, 1024)])
def test_exponential_batch_time_is_its_defining_integral(bins: int, size: int) -> None:
    from scipy.integrate import quad

    cuts = [0.0, *exponential_edges(size, bins, 1.0)]
    total = math.exp(-cuts[-1]) * (cuts[-1] + sum(1 / number for number in range(1, size + 1)))
    for low, high in pairwise(cuts):
        p = -math.expm1(low - high)
        below, _ = quad(lambda x, low=low, p=p: (-math.expm1(low - x) / p) ** size, low, high, limit=200)
        total += math.exp(-low) * p * (high - below)
    assert batch_time_exponential(bins, size, 1.0) == pytest.approx(total, rel=1e-9)
    assert batch_time_exponential(bins, size, 10.0) == pytest.approx(10 * total, rel=1e-9)


@pytest.mark.parametrize("bins", [1, 2, 4, 8])
def test_exponential_batch_time_is_that_of_drawn_batches(bins: int) -> None:
    """mu = 0.1, B = 200, as in Fig. 9: each of 40,000 batches has lengths of one bin, drawn by inversion."""
    rng = np.random.default_rng(3)
    cuts = np.array([0.0, *exponential_edges(200, bins, 10.0), math.inf])
    below = -np.expm1(-cuts / 10.0)
    bin_of = rng.choice(bins, size=40_000, p=np.diff(below))
    largest = rng.random(40_000) ** (1 / 200)  # the largest of 200 uniform numbers
    drawn = -10.0 * np.log1p(-(below[bin_of] + largest * np.diff(below)[bin_of]))
    error = drawn.std() / math.sqrt(drawn.size)
    assert batch_time_exponential(bins, 200, 10.0) == pytest.approx(drawn.mean(), abs=4 * error)


@pytest.mark.parametrize("bins", [2, 3, 4, 8])
def test_lemma_a1_is_within_two_hundredths_of_a_percent_and_equal_mass_loses_a_quarter(bins: int) -> None:
    """mu = 0.1, B = 200: against the best edges of a fine sample, and against equal mass on it (24 to 30 %)."""
    fine = -10.0 * np.log1p(-(np.arange(400_000) + 0.5) / 400_000)
    least_s = batch_time(fine, optimal_edges(fine, bins, 200, parts=1024), 200)
    lemma = batch_time(fine, exponential_edges(200, bins, 10.0), 200)
    assert lemma <= 1.0002 * least_s
    loss = 1 - lemma / batch_time(fine, equal_mass_edges(fine, bins), 200)
    assert 0.24 <= loss <= 0.30
    assert batch_time_exponential(bins, 200, 10.0) == pytest.approx(lemma, rel=2e-3)  # the sample has no long tail


@given(st.integers(1, 64), st.integers(2, 2000))
def test_the_bound_for_exponential_lengths_holds_and_throughput_grows_with_the_bins(bins: int, size: int) -> None:
    per_s = throughput_exponential(bins, size, 10.0)
    assert throughput_exponential_bound(bins, size, 10.0) <= per_s * (1 + 1e-12)
    assert per_s < throughput_exponential(bins + 1, size, 10.0) < throughput_max(size, 10.0)


def test_batches_of_one_exponential_request_take_its_mean() -> None:
    assert batch_time_exponential(5, 1, 10.0) == 10.0
    assert throughput_exponential_bound(5, 1, 10.0) == pytest.approx(0.1)


# ---- any lengths ----


def test_two_lengths_by_hand() -> None:
    """Lengths 1 and 9, batches of 2: three of four batches contain a 9, unless each length has its own bin."""
    assert batch_time([1, 9], (), 2) == pytest.approx(0.25 * 1 + 0.75 * 9)
    assert batch_time([1, 9], (5,), 2) == pytest.approx(5.0)
    assert throughput([1, 9], (5,), 2) == pytest.approx(2 / 5)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3), st.sets(st.integers(1, 9), max_size=3))
def test_batch_time_is_the_mean_over_all_possible_batches(lengths: list[int], size: int, cuts: set[int]) -> None:
    edges = [cut + 0.5 for cut in sorted(cuts)]
    in_bins = index_of(edges, lengths)
    expected = 0.0
    for bin_index in np.unique(in_bins):
        part = np.array(lengths)[in_bins == bin_index]
        expected += part.size / len(lengths) * np.mean([max(batch) for batch in product(part, repeat=size)])
    assert batch_time(lengths, edges, size) == pytest.approx(expected, rel=1e-12)


@given(LENGTHS, st.integers(1, 200), st.floats(1.5, 39.5))
def test_batches_take_no_less_than_the_mean_and_one_more_edge_never_slows_them(
    lengths: list[int], size: int, edge: float
) -> None:
    without_edge, with_edge = batch_time(lengths, (), size), batch_time(lengths, (edge,), size)
    assert np.mean(lengths) * (1 - 1e-12) <= with_edge <= without_edge * (1 + 1e-12)


def test_a_window_of_one_batch_equals_no_bins_and_a_wider_one_is_faster() -> None:
    lengths = lognormal(20_000, 1)
    times_s = [batch_time_window(lengths, width, 8, np.random.default_rng(2)) for width in (8, 64, 256)]
    assert times_s[0] == pytest.approx(batch_time(lengths, (), 8), rel=0.02)
    assert times_s[0] > times_s[1] > times_s[2] > lengths.mean()


def test_sorting_the_backlog_gives_the_published_gain() -> None:
    """PAPERS: N = 800 sorted at once is 2.40 times as fast as no bins; windows of 256 at least 2.2 times."""
    lengths = lognormal(100_000, 3)
    alone = batch_time(lengths, (), 8)
    assert alone / batch_time_window(lengths, 800, 8, np.random.default_rng(4)) == pytest.approx(2.40, abs=0.02)
    assert alone / batch_time_window(lengths, 256, 8, np.random.default_rng(4)) >= 2.28


def test_sorting_changes_nothing_where_lengths_are_equal_or_batches_single() -> None:
    time_s = batch_time_window([3.0], 4, 2, np.random.default_rng(0), windows=5)
    assert time_s == 3.0
    time_s = batch_time_window([2.0, 4.0], 2, 1, np.random.default_rng(0), windows=50_000)
    assert time_s == pytest.approx(3.0, abs=0.02)


# ---- latency ----


@pytest.mark.parametrize("edges", [(), (6.0,), (2.0, 15.0), (1.5, 1.6, 19.0)])
def test_lemma_5_1_is_the_latency_with_enough_engines_whatever_the_edges(edges: tuple[float, ...]) -> None:
    """Poisson arrivals of uniform lengths, by hand: a bin's batch begins when its eighth request arrives."""
    rng, size, rate_per_s, count = np.random.default_rng(5), 8, 4.0, 400_000
    arrived_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    lengths = rng.uniform(1, 20, count)
    latencies_s = []
    for bin_index in range(len(edges) + 1):
        members = np.flatnonzero(index_of(edges, lengths) == bin_index)
        batches = members[: members.size // size * size].reshape(-1, size)
        ended_s = arrived_s[batches].max(axis=1) + lengths[batches].max(axis=1)
        latencies_s.append((ended_s[:, None] - arrived_s[batches]).ravel())
    time_s = batch_time(lengths, edges, size)
    expected_s = latency(len(edges) + 1, size, rate_per_s, time_s)
    assert expected_s == pytest.approx(np.concatenate(latencies_s).mean(), rel=0.02)
    assert expected_s - time_s == pytest.approx(forming_s(len(edges) + 1, size, rate_per_s))


def test_lemma_5_1_as_printed() -> None:
    assert latency(3, 128, 5.0, batch_time_uniform(3, 128, 1, 20)) == pytest.approx(
        128 / 9.3996 + 127 * 3 / 10, rel=1e-5
    )


def test_utilisation_is_one_where_arrivals_are_the_throughput() -> None:
    time_s = batch_time_uniform(4, 128, 1, 20)
    assert utilisation(128, throughput_uniform(4, 128, 1, 20), time_s) == pytest.approx(1.0)
    assert utilisation(128, 5.0, time_s, engines=2) == pytest.approx(5.0 / (2 * 9.9703), rel=1e-5)


# ---- the best number of bins ----


def test_best_bins_has_the_most_throughput_within_the_target() -> None:
    """Against all numbers of bins."""
    lengths, rate_per_s, step_s = lognormal(2_000, 6), 4.0, 0.01
    tried = []
    for bins in range(1, 13):
        time_s = step_s * batch_time(lengths, optimal_edges(lengths, bins, 8), 8)
        tried.append((latency(bins, 8, rate_per_s, time_s), 8 / time_s, bins))
    for target_s in (7.0, 8.0, 10.0):
        best = best_bins(lengths, 8, rate_per_s, latency_target_s=target_s, bins_max=12, step_s=step_s)
        assert best is not None
        assert best.bins == max((option for option in tried if option[0] <= target_s), key=lambda option: option[1])[2]
        assert best.latency_s <= target_s
        assert best.edges == optimal_edges(lengths, best.bins, 8)
        assert best.throughput_per_s == pytest.approx(8 / best.batch_time_s)


def test_there_are_no_best_bins_within_a_target_that_none_meets() -> None:
    lengths = lognormal(500, 7)
    assert best_bins(lengths, 8, 4.0, latency_target_s=1.0, step_s=0.01) is None


def test_best_bins_uses_the_given_edges_and_no_more_bins_than_distinct_lengths() -> None:
    lengths = [1.0, 1.0, 5.0, 5.0]
    best = best_bins(lengths, 2, 100.0, latency_target_s=100.0, edges=equal_mass_edges)
    assert best is not None
    assert (best.bins, best.edges, best.batch_time_s) == (2, (3.0,), 3.0)


# ---- errors ----


def test_bad_input_is_an_error_that_names_it() -> None:
    rng = np.random.default_rng(0)
    for call, message in (
        (lambda: batch_time([], (), 8), "lengths must be positive"),
        (lambda: batch_time([1.0, 0.0], (), 8), "lengths must be positive"),
        (lambda: batch_time([1.0, math.inf], (), 8), "lengths must be positive"),
        (lambda: batch_time([1.0], (3.0, 3.0), 8), "edges must be strictly increasing"),
        (lambda: batch_time([1.0], (math.nan,), 8), "edges must be strictly increasing"),
        (lambda: batch_time([1.0], (), 0), "batch_size must be at least 1"),
        (lambda: batch_time_uniform(0, 8, 1, 20), "bins must be at least 1"),
        (lambda: batch_time_uniform(1, 8, 20, 1), "0 <= low <= high"),
        (lambda: batch_time_uniform(1, 8, 0, 0), "0 <= low <= high"),
        (lambda: throughput_max(8, 0), "mean must be positive"),
        (lambda: bins_needed_uniform(8, 1, 20, 0), "gap must be positive"),
        (lambda: batch_time_exponential(2, 8, -1), "mean must be positive"),
        (lambda: throughput_exponential_bound(2, 0, 1), "batch_size must be at least 1"),
        (lambda: batch_time_window([1.0], 12, 8, rng), "window must be a multiple of 8, not 12"),
        (lambda: batch_time_window([1.0], 4, 8, rng), "window must be a multiple of 8, not 4"),
        (lambda: latency(1, 8, 0, 1), "arrival_rate_per_s must be positive"),
        (lambda: latency(1, 8, 1, math.nan), "batch_time_s must be positive"),
        (lambda: utilisation(8, 1, 1, engines=0), "engines must be at least 1"),
        (lambda: best_bins([1.0], 8, 1, latency_target_s=0), "latency_target_s must be positive"),
        (lambda: best_bins([1.0], 8, 1, latency_target_s=1, step_s=0), "step_s must be positive"),
        (lambda: best_bins([1.0], 8, 1, latency_target_s=1, bins_max=0), "bins must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
