"""Equal-mass bins over output lengths.

k bins are k half-open intervals [0, e_1), [e_1, e_2), ..., [e_{k-1}, inf) of output tokens, so they are given by
their k - 1 interior edges. Equal mass (each bin gets 1/k of the requests) is Multi-Bin Batching's choice and its
optimum for uniform lengths (Section 4, Theorem 4.2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Edges = tuple[float, ...]
"""Interior edges, strictly increasing; () is one bin."""


def equal_mass_edges(lengths: ArrayLike, bins: int) -> Edges:
    """Edges that split a sample into `bins` parts of as equal mass as its ties allow.

    lengths : (n,) output tokens, n >= 1, any order, finite.  bins : >= 1.
    An edge lies halfway between two neighbouring distinct lengths, so no tie is split and no bin is empty; a sample
    with fewer distinct lengths than bins gives as many bins as it has distinct lengths.
    Raises ValueError on an empty or non-finite sample or bins < 1.
    """
    sample = np.asarray(lengths, dtype=float).ravel()
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}")
    if sample.size == 0 or not np.isfinite(sample).all():
        raise ValueError("edges need at least one length, and finite lengths only")
    distinct, counts = np.unique(sample, return_counts=True)
    cuts = (distinct[1:] + distinct[:-1]) / 2
    mass_below = np.cumsum(counts)[:-1] / sample.size  # (distinct - 1,) share of the sample below each cut
    chosen = _nearest_increasing(mass_below, np.arange(1, bins) / bins)
    return tuple(float(edge) for edge in cuts[chosen])


def _nearest_increasing(mass_below: NDArray[np.float64], targets: NDArray[np.float64]) -> list[int]:
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


def index_of(edges: ArrayLike, lengths: ArrayLike) -> NDArray[np.intp]:
    """Bin of each length: shape of `lengths`, values 0 .. len(edges). A length on an edge is in the upper bin."""
    return np.searchsorted(np.asarray(edges, dtype=float), np.asarray(lengths, dtype=float), side="right")


class OnlineEdges:
    """Equal-mass edges that follow what is put into the bins: predicted lengths, or risks (bins/risk.py).

    Fitted to what arrives, bins get equal shares of it however far predictions are off.
    Keeps the last `window` values in a ring. It starts with `sample` (predictions for prompts like the training's, in a
    fixed shuffled order, so that traffic displaces it evenly) and fits again after every `refit_every` observations.
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
    ) -> None:
        if bins < 1 or window < 1 or refit_every < 0:
            raise ValueError("bins and window must be at least 1, refit_every at least 0")
        if edges is not None and (len(edges) != bins - 1 or not all(np.diff(edges) > 0)):
            raise ValueError(f"{bins} bins need {bins - 1} strictly increasing edges, not {list(edges)}")
        self.bins = bins
        self._ring = np.zeros(window)
        start = np.random.default_rng(0).permutation(np.asarray(sample, dtype=float))[:window]
        self._ring[: start.size] = start
        self._filled = int(start.size)
        self._next = self._filled % window
        self._refit_every = refit_every
        self._since_refit = 0
        if edges is not None:
            self.edges: Edges = tuple(float(edge) for edge in edges)
        else:
            self.edges = equal_mass_edges(start, bins) if start.size else ()

    def bin_of(self, length: float) -> int:
        """Bin of one value under the edges in force (a scalar bisect: it is on every request's path)."""
        return bisect_right(self.edges, length)

    def observe(self, length: float) -> bool:
        """Count one value; True when this one made the edges be fitted again."""
        self._ring[self._next] = length
        self._next = (self._next + 1) % self._ring.size
        self._filled = min(self._filled + 1, self._ring.size)
        self._since_refit += 1
        if self.bins == 1 or not self._refit_every or self._since_refit < self._refit_every:
            return False
        self._since_refit = 0
        self.edges = equal_mass_edges(self._ring[: self._filled], self.bins)
        return True
