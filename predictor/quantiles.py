"""Forecasts as equally likely values: from a sample, with a fixed number of values, and their scores.

A forecast of LEVELS equally likely values is the quantiles at the midpoint levels (i + 1/2) / LEVELS. All values are
logarithms of tokens: the ratio of two lengths matters, for ten tokens as for a thousand.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from operator import mul

import numpy as np
from numpy.typing import NDArray

from bins.calibration import midpoints

Array = NDArray[np.float64]
Logs = tuple[float, ...]
"""LEVELS ascending logarithms of output tokens, equally likely."""

LEVELS = 15
MIDDLE = LEVELS // 2
LENGTH_MAX = 1e7
"""Tokens; more than any model writes. Bounds absurd predictions and corrections."""


def log_length(tokens: float) -> float:
    """The logarithm of a positive length, limited to [1, LENGTH_MAX] tokens."""
    return math.log(min(max(tokens, 1.0), LENGTH_MAX))


def ascending(logs: Sequence[float]) -> Logs:
    """Sorted, and within [1, LENGTH_MAX] tokens.

    Sorting quantiles that cross never makes them worse (Chernozhukov, Fernández-Val, Galichon 2010).
    """
    in_order, most = sorted(logs), math.log(LENGTH_MAX)
    if in_order[0] < 0.0 or in_order[-1] > most:
        return tuple([min(max(log, 0.0), most) for log in in_order])
    return tuple(in_order)


def at_levels(logs: Sequence[float]) -> Sequence[float]:
    """Any number of ascending, equally likely values -> LEVELS values; a single value is repeated.

    Linear between the values' own levels and, along the outermost slopes, beyond those levels.
    """
    if len(logs) == LEVELS:
        return logs
    result: list[float] = (_interpolation(len(logs)) @ np.array(logs)).tolist()
    return result


@lru_cache(maxsize=16)
def _interpolation(count: int) -> Array:
    """(LEVELS, count) weights of `count` values in each of the LEVELS values."""
    if count == 1:
        return np.ones((LEVELS, 1))
    place = midpoints(LEVELS) * count - 0.5  # of each level among the values' levels, as a fractional index
    below = np.clip(np.floor(place).astype(int), 0, count - 2)
    weights = np.zeros((LEVELS, count))
    weights[np.arange(LEVELS), below] = 1 - (place - below)
    weights[np.arange(LEVELS), below + 1] = place - below
    return weights


def sample_quantiles(values: Array, capped: NDArray[np.bool_], levels: Array) -> Array:
    """Quantiles of a sample with capped values, which are lower bounds.

    values, capped : (n,), n >= 1.  levels : any shape, in (0, 1).  Returns the shape of `levels`.
    The distribution is Kaplan and Meier's (1958); a value's level is the middle of its step (Hazen's, without capped
    values). nan at levels that only the largest, capped values reach, where the sample has no information.
    """
    if not capped.any():
        return np.interp(levels, _midpoints(values.size), np.sort(values))
    order = np.lexsort((capped, values))  # a capped value counts as longer than an equal uncapped value
    exact = ~capped[order]
    longer = np.cumprod(np.where(exact, 1 - 1 / np.arange(values.size, 0, -1), 1.0))  # share of longer values
    if not exact.any():
        return np.full(levels.shape, np.nan)
    middle_of_step = 1 - (longer + np.concatenate(([1.0], longer[:-1]))) / 2
    quantiles = np.interp(levels, middle_of_step[exact], values[order][exact])
    return np.where(levels > 1 - longer[-1], np.nan, quantiles)


@lru_cache(maxsize=64)
def _midpoints(count: int) -> Array:
    return midpoints(count)


def crps(logs: Logs, actual: float, capped: bool) -> float:
    """Continuous ranked probability score of a forecast; less is better. Twice its mean pinball loss.

    The score judges the whole forecast: it penalises errors, and too much or too little certainty. The error of the
    median alone would prefer an overconfident forecast to an honest forecast with a slightly worse median. For a capped
    answer only the part of the forecast below the cap counts (Avati et al. 2019, survival CRPS).
    """
    if capped:
        logs = tuple([min(log, actual) for log in logs])
    below = bisect_left(logs, actual)
    error = sum(logs[below:]) - sum(logs[:below]) + actual * (2 * below - LEVELS)  # sum of |log - actual|
    spread: float = sum(map(mul, _SPREAD_WEIGHTS, logs))
    return max(0.0, error - spread) / LEVELS


_SPREAD_WEIGHTS = tuple((2 * i + 1 - LEVELS) / LEVELS for i in range(LEVELS))
