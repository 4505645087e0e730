"""Processor time of a piece of work, for tests that compare how costs grow."""

from __future__ import annotations

import time
from collections.abc import Callable


def cpu_s(work: Callable[[], object]) -> float:
    """Least CPU time of three runs."""
    times = []
    for _ in range(3):
        since_s = time.process_time()
        work()
        times.append(time.process_time() - since_s)
    return min(times)
