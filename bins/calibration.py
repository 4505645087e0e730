"""Calibration of predicted quantiles: the share of answers at or below each quantile, against the quantile's level."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def midpoints(count: int) -> Array:
    """(count,) levels of `count` equally likely values: (i + 1/2) / count."""
    return (np.arange(count) + 0.5) / count


def coverage(quantiles: ArrayLike, actual: ArrayLike) -> Array:
    """(Q,) the share of answers at or below each predicted quantile.

    quantiles : (answers, Q) ascending, equally likely lengths.  actual : (answers,) lengths; at least one.
    Of the answers exactly at a quantile, as many count as bring the share nearest to the level. For lengths can tie, as
    at a ceiling, and then a correct quantile q only has P(length < q) <= level <= P(length <= q).
    """
    q, lengths = np.asarray(quantiles, dtype=float), np.asarray(actual, dtype=float)[:, None]
    below = np.mean(lengths < q, axis=0)
    at_or_below = np.mean(lengths <= q, axis=0)
    return np.clip(midpoints(q.shape[1]), below, at_or_below)


def calibration_error(shares: Array) -> float:
    """Mean distance of the shares from their levels. shares : as `coverage` returns them."""
    return float(np.mean(np.abs(shares - midpoints(shares.size))))
