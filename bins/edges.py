"""Bins over output lengths: how to choose the edges.

    k             bins
    B             requests in a batch
    l_1 < ... < l_{k-1}      interior edges

k bins are k half-open intervals [0, l_1), [l_1, l_2), ..., [l_{k-1}, inf) of output tokens, given by their k - 1
interior edges. A batch takes as long as its longest request, so its expected time is

    sum_i Pr(bin = i) E[longest of B | bin = i]             Multi-Bin, eq. 2; bins/capacity.py evaluates it

Equal mass (each bin gets 1/k of the requests) is Multi-Bin's choice and optimal for uniform lengths (Lemma 4.1). For
exponential lengths, the edges of Lemma A.1 are nearly optimal; for any sample, dynamic programming finds the optimum.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Edges = tuple[float, ...]
"""Interior edges, strictly increasing; () is one bin."""


def equal_mass_edges(lengths: ArrayLike, bins: int) -> Edges:
    """Edges that split a sample into `bins` parts, of mass as equal as ties allow.

    lengths : (n,) output tokens, n >= 1, any order, finite.  bins : >= 1.
    An edge lies halfway between two neighbouring distinct lengths, so no tie is split and no bin is empty. With fewer
    distinct lengths than bins, there are as many bins as distinct lengths.
    Raises ValueError on an empty or non-finite sample or bins < 1.
    """
    distinct, counts = _distinct(lengths, bins)
    mass_below = np.cumsum(counts)[:-1] / counts.sum()  # (distinct - 1,) share of the sample below each cut
    chosen = _nearest_increasing(mass_below, np.arange(1, bins) / bins)
    return _edges_before(distinct, np.array(chosen, dtype=int) + 1)


def _distinct(lengths: ArrayLike, bins: int) -> tuple[Floats, NDArray[np.intp]]:
    """The distinct lengths of a sample, ascending, and their counts."""
    sample = np.asarray(lengths, dtype=float).ravel()
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}")
    if sample.size == 0 or not np.isfinite(sample).all():
        raise ValueError("edges need at least one length, and finite lengths only")
    return np.unique(sample, return_counts=True)


def _nearest_increasing(mass_below: Floats, targets: Floats) -> list[int]:
    """Index of the nearest cut for each target. The indices increase strictly; all cuts if there are too few."""
    cuts, count = mass_below.size, min(targets.size, mass_below.size)
    if count < targets.size:
        return list(range(cuts))
    chosen: list[int] = []
    for position, target in enumerate(targets):
        lowest = chosen[-1] + 1 if chosen else 0
        highest = cuts - (count - position)
        right = int(np.searchsorted(mass_below, target))
        left = right - 1
        nearer_left = left >= 0 and (right >= cuts or target - mass_below[left] <= mass_below[right] - target)
        chosen.append(min(max(left if nearer_left else right, lowest), highest))
    return chosen


def exponential_edges(batch_size: int, bins: int, mean: float) -> Edges:
    """Edges for exponentially distributed lengths.

    mean : > 0; the edges are in its unit.  batch_size : >= 2 with several bins, for the edges do not affect batches of
    one.
    l_i = mean * sum_{j=1..i} log L_{k-j} minimises an upper bound on the batch time, in which each bin but the last
    takes its upper edge. The bound is tighter for larger batches: with these edges, batches take at most 0.014 % longer
    than the optimum with B = 200, 1.6 % with B = 8. Source: Multi-Bin, Lemma A.1.
    """
    if bins < 1 or not (math.isfinite(mean) and mean > 0):
        raise ValueError(f"at least 1 bin and a positive mean are needed, not {bins} and {mean}")
    if bins > 1 and batch_size < 2:
        raise ValueError(f"batch_size must be at least 2 to choose edges by, not {batch_size}")
    logs = [math.log(exponential_steps(batch_size, m)) for m in range(bins - 1, 0, -1)]  # log L_{k-1} ... log L_1
    return tuple((mean * np.cumsum(logs)).tolist())


def exponential_steps(batch_size: int, count: int) -> float:
    """L_m of Multi-Bin, Lemma A.1, for m = count >= 1: L_1 = H_B = 1 + 1/2 + ... + 1/B, L_m = 1 + log L_{m-1}.

    mean * L_k bounds the expected time of a batch with k bins of exponential lengths (bins/capacity.py).
    """
    value = float((1.0 / np.arange(1, batch_size + 1)).sum())
    for _ in range(count - 1):
        value = 1.0 + math.log(value)
    return value


def optimal_edges(lengths: ArrayLike, bins: int, batch_size: int, *, parts: int = 256) -> Edges:
    """Edges that minimise the expected batch time over a sample of lengths, sum_i p_i E[longest of B | bin i].

    lengths : (n,) output tokens, n >= 1, any order, finite.  bins, batch_size : >= 1.
    parts : number of groups of neighbouring lengths that are never cut, at least `bins`. Up to this number of distinct
    lengths the edges are exact; with more lognormal lengths, batches take up to 0.2 % longer than the optimum with
    sigma 0.8, up to 0.7 % with sigma 2.
    Edges lie between distinct lengths, as in equal_mass_edges: no tie is split, no bin is empty, and there are fewer
    bins if there are fewer distinct lengths or groups. A further bin never makes batches slower. The mean wait for a
    batch to fill is that of any k bins (bins/capacity.py); but if few requests have long answers, they get a bin of
    their own, which fills slowly.
    Takes O(n log n + bins parts^2): for 4096 lengths and 8 bins, 2 ms with parts = 128 and 4 ms with 256.
    Raises ValueError on an empty or non-finite sample, bins < 1, batch_size < 1 or parts < 1.
    """
    distinct, counts = _distinct(lengths, bins)
    _check_sizes(batch_size, parts)
    first = _group_starts(distinct, counts, max(parts, bins))
    mean, size = _groups(distinct, counts, first)
    chosen = first[_best_cuts(_batch_times(mean, size, batch_size), min(bins, first.size))]
    return _edges_before(distinct, chosen)


def _check_sizes(batch_size: int, parts: int) -> None:
    if batch_size < 1 or parts < 1:
        raise ValueError(f"batch_size and parts must be at least 1, not {batch_size} and {parts}")


def _edges_before(distinct: Floats, starts: NDArray[np.intp]) -> Edges:
    """Edges halfway between each of these distinct lengths and its predecessor. starts : indices, >= 1."""
    return tuple(((distinct[starts - 1] + distinct[starts]) / 2).tolist())


def _groups(distinct: Floats, counts: NDArray[np.intp], first: NDArray[np.intp]) -> tuple[Floats, Floats]:
    """(groups,) mean length and number of requests of each group. first : indices at which the groups begin."""
    size = np.add.reduceat(counts, first).astype(float)
    return np.add.reduceat(counts * distinct, first) / size, size


def _group_starts(distinct: Floats, counts: NDArray[np.intp], parts: int) -> NDArray[np.intp]:
    """Indices at which groups of neighbouring lengths begin, at most `parts`; one group per length if that is enough.

    A group holds at most 2 / parts of the mass (more only in a tie) and spans at most 2 / parts of the range. By mass
    alone the last group would hold all of the longest answers, where a cut gains most.
    """
    if distinct.size <= parts:
        return np.arange(distinct.size)
    mass = (np.cumsum(counts) - counts / 2) / counts.sum()
    span = (distinct - distinct[0]) / (distinct[-1] - distinct[0])
    group = np.minimum((mass + span) / 2 * parts, parts - 1).astype(int)
    return np.flatnonzero(np.diff(group, prepend=-1))


def _batch_times(mean: Floats, size: Floats, batch_size: int) -> Floats:
    """Number of requests in a bin times the expected longest of a batch from the bin, for every possible bin.

    mean, size : (groups,) length and number of requests of each group, ascending in length.
    Returns (groups + 1, groups); [j, i] is the bin of the groups i, ..., j - 1, and inf where i >= j.
    With probability q all B requests lie below the bin's last group; else the longest is in the last group, of length
    x. So one more group changes E to q E + (1 - q) x, with q the B-th power of the share below. Each row follows from
    the previous row; all terms are positive, and q may underflow to 0.
    """
    groups = mean.size
    below = np.concatenate([[0.0], np.cumsum(size)])
    in_bin = np.maximum(below[1:, None] - below[:-1], 1.0)  # (last group, first group); 1 where there is no bin
    before_last = np.maximum(below[:-1, None] - below[:-1], 0.0)
    q = (before_last / in_bin) ** batch_size
    times = np.full((groups + 1, groups), np.inf)
    longest = np.zeros(groups)  # (first groups,) of the bins that end with the loop's group
    for last, length in enumerate(mean.tolist()):
        starts = slice(last + 1)
        longest[starts] = length + q[last, starts] * (longest[starts] - length)
        times[last + 1, starts] = in_bin[last, starts] * longest[starts]
    return times


def _best_cuts(times: Floats, bins: int) -> NDArray[np.intp]:
    """Groups at which the second and later bins begin, for the least sum of times. times : as from _batch_times."""
    groups = times.shape[1]
    ends = np.arange(groups + 1)
    best = times[:, 0]  # (ends,) least sum for the groups before each end, with the bins added so far
    starts = []
    for _ in range(bins - 1):
        sums = times + best[:groups]  # (end of the last bin, its start)
        starts.append(sums.argmin(axis=1))
        best = sums[ends, starts[-1]]
    cuts = [groups]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1]]))
    return np.array(cuts[:0:-1], dtype=int)


def answered_edges(
    scores: ArrayLike, lengths: ArrayLike, bins: int, batch_size: int, *, parts: int = 48, gain_min: float = 0.02
) -> Edges:
    """Edges over scores that minimise the expected batch time, by the lengths of the answers.

    scores : (n,) values that chose the requests' bins.  lengths : (n,) output tokens of their answers; n >= 1, finite.
    As optimal_edges, but the longest of a batch is taken from the bin's answers instead of its scores. The worse scores
    predict lengths, the less edges can gain; edges that take scores for lengths would even lose, for they would keep
    bins of long scores small without need. Returns equal_mass_edges if the gain over these is less than `gain_min` of
    the time: a sample of some thousand answers cannot tell a smaller gain from chance.
    Scores and lengths are divided into at most `parts` groups each. Takes O(n log n + (parts + bins) parts^2): 4 ms for
    4096 answers. Raises ValueError as optimal_edges does, and when the numbers of lengths and scores differ.
    """
    score, length = np.asarray(scores, dtype=float).ravel(), np.asarray(lengths, dtype=float).ravel()
    if score.size != length.size:
        raise ValueError(f"{score.size} scores are not of {length.size} answers")
    _check_sizes(batch_size, parts)
    distinct, counts = _distinct(score, bins)
    first = _group_starts(distinct, counts, max(parts, bins))
    values, value_counts = _distinct(length, 1)
    level = _group_starts(values, value_counts, parts)
    levels, _ = _groups(values, value_counts, level)
    level_of = np.searchsorted(values[level], length, side="right") - 1
    equal = equal_mass_edges(score, bins)
    members = _count(index_of(equal, score), level_of, len(equal) + 1, level.size)
    equal_times = _answered_times(members, levels, batch_size)
    group_of = np.searchsorted(distinct[first], score, side="right") - 1
    times = _answered_times(_count(group_of, level_of, first.size, level.size), levels, batch_size)
    cuts = _best_cuts(times, min(bins, first.size))
    bounds = [0, *cuts.tolist(), first.size]
    least = sum(times[end, start] for start, end in pairwise(bounds))
    if least > (1.0 - gain_min) * sum(equal_times[index + 1, index] for index in range(len(equal) + 1)):
        return equal
    chosen = first[cuts]
    return _edges_before(distinct, chosen)


def _count(group_of: NDArray[np.intp], level_of: NDArray[np.intp], groups: int, levels: int) -> Floats:
    """(groups, levels) number of requests of each group at or below each level."""
    counts = np.bincount(group_of * levels + level_of, minlength=groups * levels)
    return counts.reshape(groups, levels).cumsum(axis=1).astype(float)


def _answered_times(counts: Floats, levels: Floats, batch_size: int) -> Floats:
    """As _batch_times, for groups of mixed lengths.  counts : as from _count.  levels : (levels,) tokens."""
    groups = counts.shape[0]
    below = np.concatenate([np.zeros((1, levels.size)), counts.cumsum(axis=0)])
    times = np.full((groups + 1, groups), np.inf)
    for start in range(groups):
        members = below[start + 1 :] - below[start]  # (ends, levels)
        size = members[:, -1]
        shorter = (members[:, :-1] / size[:, None]) ** batch_size  # the longest of a batch is at or below the level
        times[start + 1 :, start] = size * (levels[-1] - shorter @ np.diff(levels))
    return times


def index_of(edges: ArrayLike, lengths: ArrayLike) -> NDArray[np.intp]:
    """Bin of each length, in the shape of `lengths`: 0 .. len(edges). A length on an edge is in the upper bin."""
    return np.searchsorted(np.asarray(edges, dtype=float), np.asarray(lengths, dtype=float), side="right")


class OnlineEdges:
    """Edges that follow the arriving values: predicted lengths, or risks (bins/risk.py).

    Because edges are fitted to arriving values, bins get equal shares of them however wrong predictions are.
    fit : makes edges from the last `window` values (n,), n >= 1; default: equal mass.
    sample : starting values (predictions for prompts like the training's); they are shuffled in a fixed order, so that
    traffic replaces them evenly. Edges are fitted again after every `refit_every` observations.
    With a sample or fixed `edges`, bins exist from the first request on; with neither, one bin serves until
    `refit_every` values have arrived. refit_every = 0 never changes the first edges.
    """

    def __init__(
        self,
        bins: int,
        *,
        edges: Sequence[float] | None = None,
        sample: Sequence[float] = (),
        window: int = 4096,
        refit_every: int = 256,
        fit: Callable[[Floats], Edges] | None = None,
    ) -> None:
        if bins < 1 or window < 1 or refit_every < 0:
            raise ValueError("bins and window must be at least 1, refit_every at least 0")
        if edges is not None and (
            len(edges) != bins - 1 or not np.isfinite(edges).all() or not all(np.diff(edges) > 0)
        ):
            raise ValueError(f"{bins} bins need {bins - 1} strictly increasing finite edges, not {list(edges)}")
        self.bins = bins
        self._fit = fit or (lambda values: equal_mass_edges(values, bins))
        start = np.random.default_rng(0).permutation(np.asarray(sample, dtype=float))[:window]
        self._window = window
        self._values = start  # the last values, in order of arrival
        self._new: list[float] = []  # values since the last fit, added all at once
        self._refit_every = refit_every if bins > 1 else 0
        if edges is not None:
            self.edges: Edges = tuple(float(edge) for edge in edges)
        else:
            self.edges = self._fit(start) if start.size and bins > 1 else ()

    @property
    def values(self) -> Floats:
        """(n,) the last values, in order of arrival."""
        return np.concatenate([self._values, self._new])[-self._window :]

    def bin_of(self, length: float) -> int:
        """Bin of one value by the present edges (a scalar bisect, for every request pays for it)."""
        return bisect_right(self.edges, length)

    def observe(self, length: float) -> bool:
        """Count one value. True when the edges have been fitted again."""
        if not self._refit_every:
            return False
        self._new.append(length)
        if len(self._new) < self._refit_every:
            return False
        self._values = np.concatenate([self._values, self._new])[-self._window :]
        self._new = []
        self.edges = self._fit(self._values)
        return True
