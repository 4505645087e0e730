"""Forecasts as equally likely values: how they are made of a sample, brought to one size, and scored.

A forecast of LEVELS equally likely values states the quantiles at the midpoint levels (i + 1/2) / LEVELS. Everything
is in logarithms of tokens: what matters of a length is its ratio to the others, for ten tokens as for a thousand.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bins.calibration import midpoints

Array = NDArray[np.float64]
Logs = tuple[float, ...]
"""LEVELS ascending logarithms of output tokens, equally likely."""

LEVELS = 15
MIDDLE = LEVELS // 2
LENGTH_MAX = 1e7
"""Tokens; more than any model writes. Bounds what a mad predictor, or a mad correction, can say."""


def log_length(tokens: float) -> float:
    """The logarithm of a positive length, which is taken to be at least one token and at most LENGTH_MAX."""
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
    """Any number of ascending, equally likely values -> LEVELS of them; one value is repeated.

    Linear between the given levels and, along the outermost slopes, beyond them.
    """
    if len(logs) == LEVELS:
        return logs
    result: list[float] = (_interpolation(len(logs)) @ np.array(logs)).tolist()
    return result


@lru_cache(maxsize=16)
def _interpolation(count: int) -> Array:
    """(LEVELS, count) the weights of the given values in each of the LEVELS."""
    if count == 1:
        return np.ones((LEVELS, 1))
    place = midpoints(LEVELS) * count - 0.5  # of each level among the given ones, in steps between two
    left = np.clip(np.floor(place).astype(int), 0, count - 2)
    weights = np.zeros((LEVELS, count))
    weights[np.arange(LEVELS), left] = 1 - (place - left)
    weights[np.arange(LEVELS), left + 1] = place - left
    return weights


def sample_quantiles(values: Array, capped: NDArray[np.bool_], levels: Array) -> Array:
    """Quantiles of a sample in which some values are only known to be at least what they are.

    values, capped : (n,), n >= 1.  levels : any shape, in (0, 1).  Returns the shape of `levels`.
    The distribution is Kaplan and Meier's (1958); a value's level is the middle of its step (Hazen's, without capped
    ones). nan where the sample says nothing: at levels that are only reached beyond the largest, capped, values.
    """
    if not capped.any():
        return np.interp(levels, midpoints(values.size), np.sort(values))
    order = np.lexsort((capped, values))  # of equal values the capped ones are the longer
    seen = ~capped[order]
    longer = np.cumprod(np.where(seen, 1 - 1 / np.arange(values.size, 0, -1), 1.0))  # share that is longer than each
    if not seen.any():
        return np.full(levels.shape, np.nan)
    middle_of_step = 1 - (longer + np.concatenate(([1.0], longer[:-1]))) / 2
    quantiles = np.interp(levels, middle_of_step[seen], values[order][seen])
    return np.where(levels > 1 - longer[-1], np.nan, quantiles)


def crps(logs: Logs, actual: float, capped: bool) -> float:
    """Continuous ranked probability score of a forecast; less is better. Twice its mean pinball loss.

    It judges the whole forecast: being far off costs, and so does claiming more, or less, certainty than there is;
    the median's error would prefer an overconfident forecast to an honest one a hair beside it. Of a capped answer
    only what the forecast said below its cap is judged (Avati et al. 2019, survival CRPS).
    """
    if capped:
        logs = tuple([min(log, actual) for log in logs])
    error = sum([abs(log - actual) for log in logs])
    return max(0.0, error - sum(map(float.__mul__, _SPREAD_WEIGHTS, logs))) / LEVELS


_SPREAD_WEIGHTS = tuple((2 * i + 1 - LEVELS) / LEVELS for i in range(LEVELS))
