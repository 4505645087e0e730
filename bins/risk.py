"""Bins by risk: how much a request lengthens its batch.

    Q           equally likely lengths l_1 <= ... <= l_Q of one request: its predicted quantiles at levels (i - 1/2)/Q
    B           requests in a batch
    risk(l, B)  E[longest of B draws from these lengths] = sum_i l_i ((i/Q)^B - ((i-1)/Q)^B)

A batch runs as long as its longest answer. So an answer that is longer than predicted delays its whole batch, while a
shorter answer costs nearly nothing. The median ignores this difference. The risk is the expected time of a batch of B
requests like this one (in tokens, at one step each): requests of equal risk belong together. For B = 1 the risk is the
mean, for a certain length it is that length, and it grows with B from the mean towards the longest length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import mul

import numpy as np
from numpy.typing import ArrayLike, NDArray


def risks(lengths: ArrayLike, batch_size: int) -> NDArray[np.float64]:
    """Risk of each request. lengths : (..., Q) tokens, ascending along the last axis. Returns (...)."""
    quantiles = np.asarray(lengths, dtype=float)
    result: NDArray[np.float64] = quantiles @ longest_shares(quantiles.shape[-1], batch_size)
    return result


def risk(lengths: Sequence[float], batch_size: int) -> float:
    """Risk of one request, in plain floats for speed, because every request pays for it."""
    weighted: Iterable[float] = map(mul, _shares(len(lengths), batch_size), lengths)
    return sum(weighted)


def longest_shares(count: int, batch_size: int) -> NDArray[np.float64]:
    """(count,) probability that the longest of `batch_size` draws is the i-th of `count` equally likely lengths."""
    if count < 1 or batch_size < 1:
        raise ValueError(f"risk needs at least one length and one request, not {count} and {batch_size}")
    return np.diff((np.arange(count + 1) / count) ** batch_size)


@lru_cache(maxsize=64)
def _shares(count: int, batch_size: int) -> tuple[float, ...]:
    return tuple(longest_shares(count, batch_size).tolist())
