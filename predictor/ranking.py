"""How well predictions rank answers."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ranks = NDArray[np.intp]


def kendall_tau(x: ArrayLike, y: ArrayLike) -> float:
    """Kendall's tau-b in [-1, 1], which corrects for ties (Kendall 1945); nan when x or y is constant or empty.

    x, y : (n,) numbers. Takes O(n log n) per bit of n (Knight 1966).
    """
    first, second = _ranks(x), _ranks(y)
    both = first * (second.max(initial=0) + 1) + second
    pairs = first.size * (first.size - 1) // 2
    in_x, in_y = pairs - _ties(first), pairs - _ties(second)
    if not in_x or not in_y:
        return math.nan
    discordant = _inversions(second[np.argsort(both, kind="stable")])
    concordant = in_x + in_y - pairs + _ties(both) - discordant
    return (concordant - discordant) / math.sqrt(in_x * in_y)


def _ranks(values: ArrayLike) -> Ranks:
    """(n,) from 0; equal values share a rank."""
    return np.unique(np.asarray(values, float), return_inverse=True)[1]


def _ties(values: Ranks) -> int:
    """Number of pairs of equal values."""
    counts = np.unique(values, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _inversions(ranks: Ranks) -> int:
    """Number of pairs i < j with ranks[i] > ranks[j], counted at the highest bit in which two ranks differ."""
    inversions = 0
    for bit in reversed(range(int(ranks.max()).bit_length())):
        ranks = ranks[np.argsort(ranks >> (bit + 1), kind="stable")]
        alike, ones = ranks >> (bit + 1), (ranks >> bit) & 1
        before = np.cumsum(ones) - ones  # ones at earlier places
        in_group = before - before[np.searchsorted(alike, alike)]
        inversions += int(in_group[ones == 0].sum())
    return inversions
