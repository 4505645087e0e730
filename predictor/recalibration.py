"""Predicted quantiles, mapped to what is really seen.

    y    logarithm of an answer's real output tokens
    l_i  logarithm of its predicted quantile at level p_i
    s    width of the prediction: what its standard deviation would be, were it log-normal
    r_i  (y - l_i) / s, the residual at level i
    c_i  the p_i quantile of the last r_i: with l_i + s c_i a share p_i of them would have been shorter
    v    the variance of c_i that chance alone would give
    w    c^2 / (c^2 + v), c^2 the mean over the levels: how much of the correction is more than chance

A request's quantiles become l_i + s w c_i. Each level is corrected by itself, as in conformalised quantile regression
(Romano, Patterson, Candès 2019), so that each is right over the window whatever the shapes of the predictions, which
are kept; a predictor that is right already has c_i near zero and is left alone. w is the empirical Bayes estimate for
corrections that scatter around zero; unlike n / (n + n_0) it leaves nothing of a large error that is well seen.
"""

from collections.abc import Sequence

import numpy as np

from predictor.quantiles import LEVELS, Array, Logs, ascending, midpoints, sample_quantiles

WIDTH_MIN = 0.05
"""In log tokens: one token in twenty. Narrower claims are about less than the counting of tokens."""
CHANCE = 2.0
"""n times v; for a normal r_i of unit width it is from 1.6, at the median, to 5, at the outermost levels."""
REFIT_EVERY = 16

_LOW, _HIGH = 3, 11  # the levels 0.23 and 0.77
_NORMAL_DISTANCE = 1.456  # between these two, of a normal distribution, in standard deviations
_P = midpoints(LEVELS)


def width(logs: Sequence[float]) -> float:
    """s : robust, for predictions often have one wild outermost quantile."""
    return max(WIDTH_MIN, (logs[_HIGH] - logs[_LOW]) / _NORMAL_DISTANCE)


class Recalibration:
    """The correction for one kind of requests, from the last `window` of its answers."""

    def __init__(self, window: int) -> None:
        assert window >= 1
        self._residuals = np.empty((LEVELS, window))
        self._capped = np.zeros(window, dtype=bool)
        self._seen = 0
        self._unused = 0  # answers since the correction was fitted
        self._correction: tuple[float, ...] = (0.0,) * LEVELS  # w c_i

    def corrected(self, logs: Sequence[float], s: float) -> Logs:
        """logs : (LEVELS,) as predicted; s : their width, in log tokens."""
        return ascending([log + s * correction for log, correction in zip(logs, self._correction, strict=True)])

    def learn(self, logs: Sequence[float], s: float, actual: float, capped: bool) -> None:
        """What was predicted, and the logarithm of the real length; when capped, of the least that it would be."""
        at = self._seen % self._capped.size
        self._residuals[:, at] = [(actual - log) / s for log in logs]
        self._capped[at] = capped
        self._seen += 1
        self._unused += 1
        if self._unused > min(REFIT_EVERY - 1, self._seen // 8):
            self._refit()

    def _refit(self) -> None:
        n = min(self._seen, self._capped.size)
        residuals, capped = self._residuals[:, :n], self._capped[:n]
        c = np.array([float(sample_quantiles(residuals[i], capped, _P[i])) for i in range(LEVELS)])
        if np.isnan(c).any():
            c = _completed(c, residuals)
        strength = float(np.mean(c**2))
        w = strength / (strength + CHANCE / n)
        self._correction = tuple((w * c).tolist())
        self._unused = 0


def _completed(c: Array, residuals: Array) -> Array:
    """Levels that no answer reached before its cap: corrected like the highest that one did, at least to the caps."""
    known = np.flatnonzero(~np.isnan(c))
    last = c[known[-1]] if known.size else 0.0
    return np.where(np.isnan(c), np.maximum(last, residuals.max(axis=1)), c)
