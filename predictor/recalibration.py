"""Predicted quantiles, corrected by the observed lengths.

    y    logarithm of an answer's real output tokens
    l_i  logarithm of its predicted quantile at level p_i
    s    width of the prediction: its standard deviation, if it is log-normal
    a    the median of the last y - l_mid: the common error of all predictions, of any width
    r_i  (y - a - l_i) / s, the residual at level i
    c_i  the p_i quantile of the last r_i: a share p_i of the last y is below l_i + a + s c_i
    v    the variance of c_i by chance alone
    w    c^2 / (c^2 + v), c^2 the mean over the levels: the share of the correction beyond chance

The corrected quantiles are l_i + w_a a + s w c_i, with w_a computed like w. The common shift comes first and is the
same for all requests: if the whole error were scaled by the widths, wide predictions would overtake narrow predictions,
and a predictor that meets a model of longer answers would lose its ranking, on which bins depend. The remaining error
is corrected level by level, as in conformalised quantile regression (Romano, Patterson, Candès 2019). So each level is
right over the window, and predictions keep their shapes; for a predictor that is right already, c_i is near zero. w is
the empirical Bayes estimate for corrections that scatter around zero; unlike n / (n + n_0), w removes a large and well
observed error completely.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bins.calibration import midpoints
from predictor.quantiles import LEVELS, MIDDLE, Array, Logs, ascending, sample_quantiles
from predictor.state import State, array, part

WIDTH_MIN = 0.05
"""In log tokens: one token in twenty. A smaller width is below the resolution of whole tokens."""
CHANCE = 2.0
"""n times v; for a normal r_i of unit width from 1.6 at the median to 5 at the outermost levels."""
REFIT_EVERY = 16

_LOW, _HIGH = 3, 11  # the levels 0.23 and 0.77
_NORMAL_DISTANCE = 1.456  # between these two levels of a normal distribution, in standard deviations
_P = midpoints(LEVELS)
_ROWS = np.arange(LEVELS)


def width(logs: Sequence[float]) -> float:
    """s, from inner quantiles, because the outermost quantiles of a prediction are often wild."""
    return max(WIDTH_MIN, (logs[_HIGH] - logs[_LOW]) / _NORMAL_DISTANCE)


class Recalibration:
    """The correction for one kind of requests, from the last `window` answers."""

    def __init__(self, window: int) -> None:
        assert window >= 1
        self._errors = np.empty((LEVELS, window))  # y - l_i
        self._widths = np.empty(window)
        self._capped = np.zeros(window, dtype=bool)
        self._count = 0  # answers so far
        self._unused = 0  # answers since the correction was fitted
        self._shift = 0.0  # w_a a
        self._correction: tuple[float, ...] = (0.0,) * LEVELS  # w c_i

    def corrected(self, logs: Sequence[float], s: float) -> Logs:
        """logs : (LEVELS,) as predicted; s : their width, in log tokens."""
        shift = self._shift
        return ascending([log + shift + s * c for log, c in zip(logs, self._correction, strict=True)])

    def learn(self, logs: Sequence[float], s: float, actual: float, capped: bool) -> None:
        """Learn from a prediction and the logarithm of the real length, or, if capped, of a lower bound."""
        at = self._count % self._capped.size
        self._errors[:, at] = [actual - log for log in logs]
        self._widths[at] = s
        self._capped[at] = capped
        self._count += 1
        self._unused += 1
        if self._unused > min(REFIT_EVERY - 1, self._count // 8):
            self._refit()

    def state(self) -> State:
        n = min(self._count, self._capped.size)
        return {
            "errors": self._errors[:, :n].copy(),
            "widths": self._widths[:n].copy(),
            "capped": self._capped[:n].copy(),
            "window": self._capped.size,
            "count": self._count,
            "unused": self._unused,
            "shift": self._shift,
            "correction": np.array(self._correction),
        }

    def restore(self, state: State) -> None:
        if part(state, "window") != self._capped.size:
            raise ValueError(f"the state's window is {state['window']} answers, this one's {self._capped.size}")
        count = int(part(state, "count"))
        n = min(count, self._capped.size)
        self._errors[:, :n] = array(state, "errors", (LEVELS, n))
        self._widths[:n] = array(state, "widths", (n,))
        self._capped[:n] = array(state, "capped", (n,), "b")
        self._count, self._unused = count, int(part(state, "unused"))
        self._shift = float(part(state, "shift"))
        self._correction = tuple(array(state, "correction", (LEVELS,)).tolist())

    def _refit(self) -> None:
        n = min(self._count, self._capped.size)
        errors, widths, capped = self._errors[:, :n], self._widths[:n], self._capped[:n]
        self._shift = common_shift(errors[MIDDLE], capped)
        residuals = (errors - self._shift) / widths
        if capped.any():
            c = np.array([float(sample_quantiles(residuals[i], capped, _P[i])) for i in range(LEVELS)])
            if np.isnan(c).any():
                c = _completed(c, residuals)
        else:
            c = _own_quantiles(np.sort(residuals, axis=1))
        self._correction = tuple(beyond_chance(c, n).tolist())
        self._unused = 0


def _own_quantiles(ascending: Array) -> Array:
    """(LEVELS,) the quantile of each row at the row's own level, as sample_quantiles. ascending : (LEVELS, n)."""
    n = ascending.shape[1]
    place = np.clip(_P * n - 0.5, 0.0, n - 1.0)
    below = np.minimum(place.astype(int), max(0, n - 2))
    above = np.minimum(below + 1, n - 1)
    low, high = ascending[_ROWS, below], ascending[_ROWS, above]
    quantiles: Array = low + (place - below) * (high - low)
    return quantiles


def beyond_chance(c: Array, n: int) -> Array:
    """w c, for corrections by n answers."""
    strength = float(np.mean(c**2))
    return c * (strength / (strength + CHANCE / n))


def common_shift(errors: Array, capped: NDArray[np.bool_]) -> float:
    """w_a a. errors : (n,) y - l_mid.  0 when most answers were capped: then only the levels are corrected."""
    low, a, high = sample_quantiles(errors, capped, np.array([0.25, 0.5, 0.75]))
    if np.isnan([low, a, high]).any():
        return 0.0
    spread = (high - low) / 1.349  # the standard deviation of a normal distribution
    return float(a**3 / (a**2 + CHANCE * spread**2 / errors.size)) if a else 0.0


def _completed(c: Array, residuals: Array) -> Array:
    """Corrections for levels above all uncapped answers: that of the highest known level, but at least to the caps."""
    levels = np.flatnonzero(~np.isnan(c))
    last = c[levels[-1]] if levels.size else 0.0
    return np.where(np.isnan(c), np.maximum(last, residuals.max(axis=1)), c)
