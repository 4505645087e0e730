"""How far real lengths are from the text learner's forecasts: the quantiles around each forecast of a model.

    e_j   z - middle, the error of answer j's forecast as it was served, on the scale of the forecasts
    f_j   the error of a forecast by what is known when the answer has come
    s_j   width of the forecast: the standard deviation of a normal distribution of e_j
    a     the common error of the last f_j, as in recalibration.py
    r_j   (e_j - the common error of the last e_j) / s_j
    c_i   the quantile of the last r_j at level p_i, less that of the normal distribution

With many answers in flight, a forecast is served before many answers that are learnt when its own has come. Intervals
are for forecasts as they are served, so the e_j tell how wide they are. But after a change of all lengths the e_j lag
behind what is known, and their common error would move forecasts that have followed the change already.

The quantiles around a forecast of width s are those of the normal distribution with the correction a + s c_i, shrunk as
far as it is chance (recalibration.py). The widths follow the latest errors of all models at once, so the spread of a
model of few answers follows them between its own fits, too.
"""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from bins.calibration import midpoints
from predictor.quantiles import LEVELS, Array, sample_quantiles
from predictor.recalibration import REFIT_EVERY, WIDTH_MIN, beyond_chance, common_shift
from predictor.state import State, array, part

ERRORS = 256
"""Latest errors of a model that give the spread."""
ERRORS_MIN = 16
"""Errors of a model before they give the spread; until then it is a normal distribution, as wide as for all models."""
RESIDUAL_MAX = 8.0
"""Beyond it a forecast was far too narrow, as after many equal lengths, and says little about wider ones."""
Z_MAX = 100.0
"""Far beyond the logarithm of any length."""

_P = midpoints(LEVELS)
_NORMAL = np.array([NormalDist().inv_cdf(float(p)) for p in _P])
_NORMAL_LIST = _NORMAL.tolist()


class Spread:
    """Of the answers of one model."""

    def __init__(self) -> None:
        self._errors, self._widths = np.empty((2, ERRORS)), np.empty(ERRORS)  # f_j, e_j
        self._capped = np.zeros(ERRORS, dtype=bool)
        self._count = 0  # answers so far
        self._unused = 0  # answers since the ratios were fitted
        self._shift = 0.0  # a
        self._shape: Array | None = None  # the normal distribution's quantiles + c_i

    def ratios(self, width: float) -> list[float]:
        """LEVELS ascending ratios of exp(z) to exp(middle). width : of the forecast."""
        if self._shape is None:
            return normal_ratios(width)
        ratios: list[float] = np.exp(np.minimum(self._shift + width * self._shape, Z_MAX)).tolist()
        return ratios

    def learn(self, error: float, served_error: float, width: float, capped: bool) -> None:
        """error, served_error : f_j, e_j.  width : s_j.  capped : the answer's errors are at least so large."""
        at = self._count % ERRORS
        self._errors[:, at], self._widths[at], self._capped[at] = (error, served_error), width, capped
        self._count += 1
        self._unused += 1
        if self._count >= ERRORS_MIN and self._unused > min(REFIT_EVERY - 1, self._count // 8):
            self._fit()

    def _fit(self) -> None:
        n = min(self._count, ERRORS)
        (errors, served), capped = self._errors[:, :n], self._capped[:n]
        residuals = np.clip((served - common_shift(served, capped)) / self._widths[:n], -RESIDUAL_MAX, RESIDUAL_MAX)
        c = sample_quantiles(residuals, capped, _P) - _NORMAL
        if (unknown := np.isnan(c)).any():  # above all uncapped answers: as the highest known, but at least to the caps
            last = c[~unknown][-1] if not unknown.all() else 0.0
            c = np.where(unknown, np.maximum(last, residuals.max() - _NORMAL), c)
        self._shift, self._shape = common_shift(errors, capped), np.sort(_NORMAL + beyond_chance(c, n))
        self._unused = 0

    def state(self) -> State:
        n = min(self._count, ERRORS)
        return {
            "errors": self._errors[:, :n].copy(),
            "widths": self._widths[:n].copy(),
            "capped": self._capped[:n].copy(),
            "count": self._count,
            "unused": self._unused,
            "shift": self._shift,
            "shape": np.zeros(0) if self._shape is None else self._shape,
        }

    def restore(self, state: State) -> None:
        """Raises ValueError for another kind of state."""
        self._count, self._unused = int(part(state, "count")), int(part(state, "unused"))
        n = min(self._count, ERRORS)
        self._errors[:, :n], self._widths[:n] = array(state, "errors", (2, n)), array(state, "widths", (n,))
        self._capped[:n] = array(state, "capped", (n,), "b")
        shift, shape = (
            float(part(state, "shift")),
            array(state, "shape", (LEVELS if self._count >= ERRORS_MIN else None,)),
        )
        if not (math.isfinite(shift) and np.isfinite(shape).all() and (self._widths[:n] >= WIDTH_MIN).all()):
            raise ValueError("the state of a spread has numbers that are no errors or widths")
        self._shift, self._shape = shift, shape if shape.size else None


@lru_cache(maxsize=16)  # the width changes only where an answer is learnt
def normal_ratios(width: float) -> list[float]:
    """As `Spread.ratios`, of a normal distribution."""
    return [math.exp(min(width * normal, Z_MAX)) for normal in _NORMAL_LIST]
