"""Types of arrays, and how far apart two numbers may be that count as equal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ROUNDING = 1e-9  # relative: of products and sums of floating-point numbers
SLACK = 2e-6  # GPUs, and GPUs' memories: what HiGHS may leave a row violated by, and a little more
