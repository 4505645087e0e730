"""How bursty arrivals are."""

import math

import numpy as np
from numpy.typing import NDArray


def index_of_dispersion(times_s: NDArray[np.float64], window_s: float, duration_s: float) -> float:
    """Variance over mean of the arrivals in whole windows before duration_s: 1 for a Poisson process, more in bursts.

    times_s : (count,)
    """
    windows = math.floor(duration_s / window_s * (1 + 1e-12))
    window = np.floor_divide(times_s, window_s).astype(np.intp)
    counts = np.bincount(window[window < windows], minlength=windows)
    return float(counts.var(ddof=1) / counts.mean())
