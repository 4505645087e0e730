"""Equal-mass edges: known answers, ties, drift."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bins.edges import OnlineEdges, equal_mass_edges, index_of


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


def test_fewer_distinct_lengths_than_bins_give_as_many_bins_as_lengths() -> None:
    assert equal_mass_edges([2, 2, 9, 9], 8) == (5.5,)
    assert equal_mass_edges([4, 4, 4], 8) == ()


def test_a_length_on_an_edge_belongs_to_the_upper_bin() -> None:
    assert index_of((10.0, 20.0), [9.9, 10.0, 19.9, 20.0, 1e9]).tolist() == [0, 1, 1, 2, 2]


def test_index_of_keeps_the_shape() -> None:
    assert index_of((10.0,), [[1, 11], [12, 2]]).tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("lengths", [[], [1.0, float("nan")], [float("inf")]])
def test_a_sample_that_says_nothing_is_an_error(lengths: list[float]) -> None:
    with pytest.raises(ValueError, match="finite lengths"):
        equal_mass_edges(lengths, 4)


def test_no_bin_at_all_is_an_error() -> None:
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
    # An edge that no neighbour displaces misses its quantile by half of the tie there, at most.
    largest_tie = np.unique(lengths, return_counts=True)[1].max()
    if bins <= distinct and largest_tie * bins <= len(lengths):
        below = np.cumsum(counts)[:-1]
        wanted = np.arange(1, bins) / bins * len(lengths)
        assert np.all(np.abs(below - wanted) <= largest_tie / 2 + 1e-9)


@given(st.integers(2, 16), st.integers(0, 2**32 - 1))
def test_distinct_lengths_get_bins_of_equal_mass_within_one_request(bins: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).random(500)
    counts = np.bincount(index_of(equal_mass_edges(lengths, bins), lengths))
    assert counts.max() - counts.min() <= 1 + (500 % bins > 0)


def test_first_edges_come_from_the_sample() -> None:
    assert OnlineEdges(2, sample=range(1, 101)).edges == (50.5,)


def test_without_sample_or_edges_one_bin_serves_until_lengths_are_seen() -> None:
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


def test_refit_every_zero_keeps_the_edges_for_good() -> None:
    edges = OnlineEdges(2, edges=[100.0], refit_every=0)
    assert not any(edges.observe(1.0) for _ in range(1_000))
    assert edges.edges == (100.0,)


@pytest.mark.parametrize("edges", [[10.0, 10.0], [20.0, 10.0], [10.0], [10.0, float("nan")]])
def test_configured_edges_must_fit_the_number_of_bins(edges: list[float]) -> None:
    with pytest.raises(ValueError, match="3 bins need 2 strictly increasing edges"):
        OnlineEdges(3, edges=edges)
