"""How far real lengths are from the text learner's forecasts: the quantiles around each forecast of a model.

    e_j   z - middle, the error of answer j, on the scale of the forecasts
    s_j   width of the forecast: the standard deviation of a normal distribution of e_j
    r_j   (e_j - a) / s_j, with `a` the common error, as in recalibration.py
    c_i   the quantile of the last r_j at level p_i, less that of the normal distribution

The quantiles around a forecast of width s are those of the normal distribution with the correction a + s c_i, shrunk as
far as it is chance (recalibration.py). They are the same for all forecasts of a model until they are fitted again.
"""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from bins.calibration import midpoints
from predictor.quantiles import LEVELS, sample_quantiles
from predictor.recalibration import REFIT_EVERY, WIDTH_MIN, beyond_chance, common_shift
from predictor.state import State, array, part

ERRORS = 256
"""Latest errors of a model that give the spread."""
ERRORS_MIN = 16
"""Errors of a model before they give the spread; until then it is a normal distribution, as wide as for all models."""
Z_MAX = 100.0
"""Far beyond the logarithm of any length."""

_P = midpoints(LEVELS)
_NORMAL = np.array([NormalDist().inv_cdf(float(p)) for p in _P])
_NORMAL_LIST = _NORMAL.tolist()


class Spread:
    """Of the answers of one model."""

    def __init__(self) -> None:
        self._errors, self._widths = np.empty(ERRORS), np.empty(ERRORS)
        self._capped = np.zeros(ERRORS, dtype=bool)
        self._count = 0  # answers so far
        self._unused = 0  # answers since the ratios were fitted
        self._ratios: list[float] = []

    def ratios(self, width: float) -> list[float]:
        """LEVELS ascending ratios of exp(z) to exp(middle). width : of the forecast, while there are few errors."""
        return self._ratios or normal_ratios(width)

    def learn(self, error: float, width: float, capped: bool) -> None:
        """capped : the answer's error is at least so large."""
        at = self._count % ERRORS
        self._errors[at], self._widths[at], self._capped[at] = error, width, capped
        self._count += 1
        self._unused += 1
        if self._count >= ERRORS_MIN and self._unused > min(REFIT_EVERY - 1, self._count // 8):
            self._fit(width)

    def _fit(self, width: float) -> None:
        n = min(self._count, ERRORS)
        errors, capped = self._errors[:n], self._capped[:n]
        shift = common_shift(errors, capped)
        residuals = (errors - shift) / self._widths[:n]
        c = sample_quantiles(residuals, capped, _P) - _NORMAL
        if (unknown := np.isnan(c)).any():  # above all uncapped answers: as the highest known, but at least to the caps
            last = c[~unknown][-1] if not unknown.all() else 0.0
            c = np.where(unknown, np.maximum(last, residuals.max() - _NORMAL), c)
        around = width * _NORMAL + shift + width * beyond_chance(c, n)
        self._ratios = np.exp(np.minimum(np.sort(around), Z_MAX)).tolist()
        self._unused = 0

    def state(self) -> State:
        n = min(self._count, ERRORS)
        return {
            "errors": np.array([self._errors[:n], self._widths[:n]]),
            "capped": self._capped[:n].copy(),
            "count": self._count,
            "unused": self._unused,
            "ratios": np.array(self._ratios),
        }

    def restore(self, state: State) -> None:
        """Raises ValueError for another kind of state."""
        self._count, self._unused = int(part(state, "count")), int(part(state, "unused"))
        n = min(self._count, ERRORS)
        self._errors[:n], self._widths[:n] = array(state, "errors", (2, n))
        self._capped[:n] = array(state, "capped", (n,), "b")
        ratios = array(state, "ratios", (LEVELS if self._count >= ERRORS_MIN else None,))
        if not (np.isfinite(ratios).all() and (ratios > 0).all() and (self._widths[:n] >= WIDTH_MIN).all()):
            raise ValueError("the state of a spread has numbers that are no ratios or widths")
        self._ratios = ratios.tolist()


@lru_cache(maxsize=16)  # the width changes only where an answer is learnt
def normal_ratios(width: float) -> list[float]:
    """As `Spread.ratios`, of a normal distribution."""
    return [math.exp(min(width * normal, Z_MAX)) for normal in _NORMAL_LIST]
