"""Means and products of what answers show, for regressions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

import numpy as np

FIT_EVERY = 32  # answers between two regressions; until the first, forecasts stay as they are and prompts are free
SPREAD_LEAST = 1e-9  # relative spread of a quantity, or variance of a logarithm; below this, all count as equal


class Moments:
    """Means and centred products of quantities of answers, whose weights decay.

    FIT_EVERY answers are added at once; single additions would cost most of the time spent on an answer.
    memory : answers after which an observation's weight has fallen to a third.
    youth : while fewer answers than that have come, the weight of the k-th is proportional to k ** youth. 0: all count
    alike

    count     weight of all added answers
    means     of each quantity
    products  (quantities, quantities) sums of the products of the differences from the means
    """

    def __init__(self, memory: int, youth: float = 0.0) -> None:
        self._memory, self._youth, self._seen = memory, youth, 0
        self._weights = (1.0 - 1.0 / memory) ** np.arange(FIT_EVERY, -1.0, -1.0)  # of the sums, then of each answer
        self._new: list[tuple[float, ...]] = []
        self._sums = np.zeros(1)  # (1 + quantities, 1 + quantities) products; the first quantity is one
        self.count = 0.0
        self.means: list[float] = []
        self.products: list[list[float]] = []

    def observe(self, *quantities: float) -> bool:
        """Count an answer. True when `count`, `means` and `products` have changed."""
        self._new.append((1.0, *quantities))
        if len(self._new) < FIT_EVERY:
            return False
        rows, self._new = np.array(self._new), []
        self._seen += FIT_EVERY
        weights = self._weights
        if self._seen < self._youth * self._memory:  # later, a weight falls no faster than the memory says
            weights = (np.arange(self._seen - FIT_EVERY, self._seen + 1) / self._seen) ** self._youth
        sums = self._sums = weights[0] * self._sums + (weights[1:] * rows.T) @ rows
        means = sums[0, 1:] / sums[0, 0]
        self.count, self.means = float(sums[0, 0]), means.tolist()
        self.products = (sums[1:, 1:] - sums[0, 0] * means[:, None] * means).tolist()
        return True


def least_squares(moments: Moments, causes: Sequence[int], effect: int) -> tuple[list[float], list[float]] | None:
    """Regress a quantity on others, with an overhead. Returns the slopes of these with their standard errors.

    None if they hardly differ, or do not differ independently. causes, effect : places among the quantities
    """
    products = moments.products
    spreads = [math.sqrt(max(0.0, products[cause][cause])) for cause in causes]
    if not all(spreads):
        return None
    spread_of = dict(zip(causes, spreads, strict=True))
    inverse = _inverse([[products[a][b] / (spread_of[a] * spread_of[b]) for b in causes] for a in causes])
    if inverse is None:
        return None
    with_effect = [products[cause][effect] / spread for cause, spread in zip(causes, spreads, strict=True)]
    slopes = [sum(map(mul, row, with_effect)) for row in inverse]
    explained = sum(map(mul, slopes, with_effect))
    noise = max(0.0, products[effect][effect] - explained) / (moments.count - len(causes) - 1.0)
    errors = [math.sqrt(noise * row[place]) / spreads[place] for place, row in enumerate(inverse)]
    return [slope / spread for slope, spread in zip(slopes, spreads, strict=True)], errors


def _inverse(matrix: list[list[float]]) -> list[list[float]] | None:
    """The inverse of a correlation matrix; None if its determinant is nearly 0. Of two or three rows, NumPy takes ten
    times as long.
    """
    size = len(matrix)
    rows = [[*row, *[float(column == place) for column in range(size)]] for place, row in enumerate(matrix)]
    determinant = 1.0
    for place in range(size):
        row = rows[place]
        determinant *= row[place]
        if determinant <= SPREAD_LEAST:
            return None
        pivot = [value / row[place] for value in row]
        rows = [
            pivot if other == place else [value - line[place] * own for value, own in zip(line, pivot, strict=True)]
            for other, line in enumerate(rows)
        ]
    return [row[size:] for row in rows]
