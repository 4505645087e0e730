"""Whether predicted quantiles keep their word: how many of the answers came out at or below each."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def midpoints(count: int) -> Array:
    """(count,) the levels that `count` equally likely values stand for: (i + 1/2) / count."""
    return (np.arange(count) + 0.5) / count


def coverage(quantiles: ArrayLike, actual: ArrayLike) -> Array:
    """(Q,) the share of answers at or below each predicted quantile.

    quantiles : (answers, Q) ascending, equally likely lengths.  actual : (answers,) lengths; at least one.
    Answers exactly at it count as far as the level needs them. A right quantile of lengths that can tie, as those at
    a ceiling do, has P(length < q) <= level <= P(length <= q): that much and no more can be asked of it.
    """
    q, lengths = np.asarray(quantiles, dtype=float), np.asarray(actual, dtype=float)[:, None]
    below = np.mean(lengths < q, axis=0)
    at_or_below = np.mean(lengths <= q, axis=0)
    return np.clip(midpoints(q.shape[1]), below, at_or_below)


def calibration_error(shares: Array) -> float:
    """Mean distance of the shares that `coverage` gives from their levels."""
    return float(np.mean(np.abs(shares - midpoints(shares.size))))
