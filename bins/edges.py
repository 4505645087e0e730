"""Bins over output lengths: where to cut.

    k             bins
    B             requests in a batch
    l_1 < ... < l_{k-1}      interior edges

k bins are k half-open intervals [0, l_1), [l_1, l_2), ..., [l_{k-1}, inf) of output tokens, so they are given by
their k - 1 interior edges. A batch takes as long as its longest request, so its expected time is

    sum_i Pr(bin = i) E[longest of B | bin = i]             Multi-Bin, eq. 2; bins/capacity.py evaluates it

Equal mass (each bin gets 1/k of the requests) is Multi-Bin's choice and best for uniform lengths (Lemma 4.1). For
exponential lengths Lemma A.1 has edges that are all but the best; for any sample, dynamic programming finds the best.
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
    """Edges that split a sample into `bins` parts of as equal mass as its ties allow.

    lengths : (n,) output tokens, n >= 1, any order, finite.  bins : >= 1.
    An edge lies halfway between two neighbouring distinct lengths, so no tie is split and no bin is empty; a sample
    with fewer distinct lengths than bins gives as many bins as it has distinct lengths.
    Raises ValueError on an empty or non-finite sample or bins < 1.
    """
    distinct, counts = _distinct(lengths, bins)
    mass_below = np.cumsum(counts)[:-1] / counts.sum()  # (distinct - 1,) share of the sample below each cut
    chosen = _nearest_increasing(mass_below, np.arange(1, bins) / bins)
    return _edges_before(distinct, np.array(chosen, dtype=int) + 1)


def _distinct(lengths: ArrayLike, bins: int) -> tuple[Floats, NDArray[np.intp]]:
    """The distinct lengths of a sample, ascending, and how often each stands in it."""
    sample = np.asarray(lengths, dtype=float).ravel()
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}")
    if sample.size == 0 or not np.isfinite(sample).all():
        raise ValueError("edges need at least one length, and finite lengths only")
    return np.unique(sample, return_counts=True)


def _nearest_increasing(mass_below: Floats, targets: Floats) -> list[int]:
    """For each target the index of the nearest cut, each index used once and enough left for the rest."""
    cuts, wanted = mass_below.size, min(targets.size, mass_below.size)
    if wanted < targets.size:
        return list(range(cuts))
    chosen: list[int] = []
    for position, target in enumerate(targets):
        lowest = chosen[-1] + 1 if chosen else 0
        highest = cuts - (wanted - position)
        right = int(np.searchsorted(mass_below, target))
        left = right - 1
        nearer_left = left >= 0 and (right >= cuts or target - mass_below[left] <= mass_below[right] - target)
        chosen.append(min(max(left if nearer_left else right, lowest), highest))
    return chosen


def exponential_edges(batch_size: int, bins: int, mean: float) -> Edges:
    """Edges for exponentially distributed lengths.

    mean : > 0; the edges are in its unit.  batch_size : >= 2 when there are edges to choose, for batches of one take
    their mean whatever the bins.
    l_i = mean * sum_{j=1..i} log L_{k-j} minimises the bound that takes each bin but the last at its upper edge. It is
    the closer the larger the batches: they take 0.014 % longer than the least possible with B = 200, 1.6 % with B = 8,
    at most. Source: Multi-Bin, Lemma A.1.
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
    """Edges for which batches of a sample's lengths take the least expected time, sum_i p_i E[longest of B | bin i].

    lengths : (n,) output tokens, n >= 1, any order, finite.  bins, batch_size : >= 1.
    parts : groups of neighbouring lengths that are never cut, or `bins` when that is more; up to so many distinct
    lengths the edges are exact; with more, lognormal ones, they take up to 0.2 % longer than the best where sigma is
    0.8, up to 0.7 % where it is 2.
    Edges lie between distinct lengths as those of equal_mass_edges do: no tie is split, no bin is empty, and there are
    fewer bins where there are fewer distinct lengths, or groups. Another bin never makes batches slower. The mean wait
    for a batch to fill is that of any k bins (bins/capacity.py); but where few requests have long answers they get a
    bin of their own, and for them it fills slowly.
    Takes O(n log n + bins parts^2): of 4096 lengths for 8 bins, 2 ms with parts = 128 and 4 ms with 256.
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
    """Edges halfway between each of these distinct lengths, by index, and the one before it."""
    return tuple(((distinct[starts - 1] + distinct[starts]) / 2).tolist())


def _groups(distinct: Floats, counts: NDArray[np.intp], first: NDArray[np.intp]) -> tuple[Floats, Floats]:
    """(groups,) mean length and number of requests of each group. first : where they begin."""
    size = np.add.reduceat(counts, first).astype(float)
    return np.add.reduceat(counts * distinct, first) / size, size


def _group_starts(distinct: Floats, counts: NDArray[np.intp], parts: int) -> NDArray[np.intp]:
    """Where groups of neighbouring lengths begin, at most `parts` of them; each length its own where that suffices.

    A group holds at most 2 / parts of the mass, but for a tie, and spans at most 2 / parts of the range: by mass alone
    the last group would hold the longest answers together, which is where the first cut pays most.
    """
    if distinct.size <= parts:
        return np.arange(distinct.size)
    mass = (np.cumsum(counts) - counts / 2) / counts.sum()
    span = (distinct - distinct[0]) / (distinct[-1] - distinct[0])
    group = np.minimum((mass + span) / 2 * parts, parts - 1).astype(int)
    return np.flatnonzero(np.diff(group, prepend=-1))


def _batch_times(mean: Floats, size: Floats, batch_size: int) -> Floats:
    """Requests in a bin times the expected longest of a batch from it, for every bin that could be.

    mean, size : (groups,) length and number of requests of each group, ascending in length.
    Returns (groups + 1, groups), at [j, i] of the bin of the groups i, ..., j - 1; inf where there is none.
    The longest of B is in the bin's last group, of length x, but with probability q that all are below it: with one
    more group E becomes q E + (1 - q) x, q the B-th power of the share below. So each row follows from the one before;
    all terms are positive, and where q underflows it is nothing.
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
    """Where the second and later bins begin, so that the sum of their times is least. times : as of _batch_times."""
    groups = times.shape[1]
    ends = np.arange(groups + 1)
    best = times[:, 0]  # (ends,) least sum for the groups before each, with as many bins as were tried
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
    """Edges over scores, for which batches take the least expected time by how long the answers came out.

    scores : (n,) what requests were put into bins by.  lengths : (n,) output tokens of their answers; n >= 1, finite.
    As optimal_edges, but a bin's longest answer is that of its answers, not that of its scores: the worse scores tell
    lengths, the less there is to gain, and edges that take scores for lengths would lose (bins of long scores would be
    kept small for nothing). Where the gain over equal mass is less than `gain_min` of the time it is equal mass: so
    little a sample of some thousand answers cannot tell from chance.
    Both are looked at in at most `parts` groups. Takes O(n log n + (parts + bins) parts^2): 4 ms of 4096 answers.
    Raises ValueError as optimal_edges does, and when there are not as many lengths as scores.
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
    """How many of each group are at or below each level: (groups, levels)."""
    counts = np.bincount(group_of * levels + level_of, minlength=groups * levels)
    return counts.reshape(groups, levels).cumsum(axis=1).astype(float)


def _answered_times(counts: Floats, levels: Floats, batch_size: int) -> Floats:
    """As _batch_times, of groups whose members are so long.  counts : as of _count.  levels : (levels,) tokens."""
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
    """Bin of each length: shape of `lengths`, values 0 .. len(edges). A length on an edge is in the upper bin."""
    return np.searchsorted(np.asarray(edges, dtype=float), np.asarray(lengths, dtype=float), side="right")


class OnlineEdges:
    """Edges that follow what is put into the bins: predicted lengths, or risks (bins/risk.py).

    Fitted to what arrives, bins get equal shares of it however far predictions are off.
    fit : makes the edges from the last `window` values (n,), n >= 1; equal mass unless another is given.
    It starts with `sample` (predictions for prompts like the training's, in a fixed shuffled order, so that traffic
    displaces it evenly) and fits again after every `refit_every` observations.
    With a starting sample, or fixed `edges`, bins exist from the first request on; with neither, one bin serves
    until `refit_every` values have been seen. refit_every = 0 keeps the first edges for good.
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
        self._seen = start  # values, in order of arrival
        self._new: list[float] = []  # since the last fit: they join the others all at once
        self._refit_every = refit_every if bins > 1 else 0
        if edges is not None:
            self.edges: Edges = tuple(float(edge) for edge in edges)
        else:
            self.edges = self._fit(start) if start.size and bins > 1 else ()

    def bin_of(self, length: float) -> int:
        """Bin of one value under the edges in force (a scalar bisect: it is on every request's path)."""
        return bisect_right(self.edges, length)

    def observe(self, length: float) -> bool:
        """Count one value; True when this one made the edges be fitted again."""
        if not self._refit_every:
            return False
        self._new.append(length)
        if len(self._new) < self._refit_every:
            return False
        self._seen = np.concatenate([self._seen, self._new])[-self._window :]
        self._new = []
        self.edges = self._fit(self._seen)
        return True
