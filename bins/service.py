"""The time of a batch as a random variable, by the batch size.

    G_b       service time of a batch of b                                          SMDP-J, Section III
    p_k^[b]   probability of k Poisson arrivals during G_b                           SMDP-J, eq. 4
    F         distribution of the output lengths in a bin

G_b is a mixture of gamma distributions of the same shape. One part of infinite shape is a fixed time, one part of shape
1 an exponential time, two parts of shape 1 a hyperexponential time; many parts of infinite shape are an empirical
distribution. So p_k is a mixture of negative binomials, or of Poisson distributions, in closed form.

The batch of an LLM bin runs until its longest answer ends: G_b(x) = F(x / t_b)^b with t_b the time of a step of b.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bins.profile import batch_s

Array = NDArray[np.float64]

LOG_NEVER = -460.0  # log of 1e-200: smaller probabilities count as zero, for denormal numbers are slow
NUMBERS = 1 << 18  # of an array that is computed at once
HALVINGS = 60  # of an interval, down to rounding
POISSON_POLE = 1e3  # stands for an infinite pole
PARTS = 32  # equally likely values that represent the longest of b lengths


@dataclass(frozen=True)
class ServiceTimes:
    """sizes : (sizes,) int, consecutive.  parts_s : (sizes, parts) means, seconds, > 0.
    weights : (parts,) of the parts, sum 1.  shape : shape of each part's gamma distribution; inf: a fixed time.
    """

    sizes: NDArray[np.intp]
    parts_s: Array
    weights: Array
    shape: float = np.inf

    def __post_init__(self) -> None:
        sizes, parts_s = self.sizes, self.parts_s
        if sizes.ndim != 1 or not sizes.size or sizes[0] < 1 or (np.diff(sizes) != 1).any():
            raise ValueError("batch sizes must be consecutive and start at 1 or above")
        if parts_s.shape != (sizes.size, self.weights.size):
            raise ValueError(f"times must have shape {(sizes.size, self.weights.size)}, not {parts_s.shape}")
        if not ((parts_s > 0).all() and np.isfinite(parts_s).all()):
            raise ValueError("service times must be positive and finite")

    @classmethod
    def deterministic(cls, mean_s: ArrayLike, batch_min: int = 1) -> ServiceTimes:
        """Fixed times. mean_s : (sizes,) seconds, for batches of batch_min, batch_min + 1, ..."""
        return cls._of_shape(mean_s, batch_min, np.inf)

    @classmethod
    def erlang(cls, mean_s: ArrayLike, batch_min: int = 1, shape: int = 2) -> ServiceTimes:
        """Erlang times, with a squared coefficient of variation of 1 / shape."""
        return cls._of_shape(mean_s, batch_min, shape)

    @classmethod
    def exponential(cls, mean_s: ArrayLike, batch_min: int = 1) -> ServiceTimes:
        return cls._of_shape(mean_s, batch_min, 1.0)

    @classmethod
    def hyperexponential(cls, mean_s: ArrayLike, batch_min: int = 1) -> ServiceTimes:
        """Exponential with half (probability 2/3) or twice the mean (SMDP-J, Section VII-C): variance 2 mean^2."""
        mean = np.atleast_1d(np.asarray(mean_s, dtype=float))
        return cls(_sizes(mean, batch_min), mean[:, None] * [0.5, 2.0], np.array([2.0, 1.0]) / 3.0, 1.0)

    @classmethod
    def longest_of(
        cls, lengths: ArrayLike, step_s: ArrayLike, *, batch_min: int = 1, prefill_s: float = 0.0, parts: int = PARTS
    ) -> ServiceTimes:
        """Times of batches that run until their longest answer ends.

        lengths : sample of one bin's output lengths, tokens.  step_s : (sizes,) seconds of a step, by batch size.
        The mean of the longest is exact; its distribution is approximated by `parts` equally likely values, the means
        of as many slices.
        """
        step = np.atleast_1d(np.asarray(step_s, dtype=float))
        sizes = _sizes(step, batch_min)
        longest = longest_slices(lengths, sizes, parts)
        return cls(sizes, batch_s(longest, step[:, None], prefill_s), np.full(parts, 1.0 / parts))

    @classmethod
    def _of_shape(cls, mean_s: ArrayLike, batch_min: int, shape: float) -> ServiceTimes:
        mean = np.atleast_1d(np.asarray(mean_s, dtype=float))
        return cls(_sizes(mean, batch_min), mean[:, None], np.ones(1), shape)

    @cached_property
    def mean_s(self) -> Array:
        """(sizes,) mean l(b), seconds."""
        result: Array = self.parts_s @ self.weights
        return result

    @cached_property
    def second_moment_s2(self) -> Array:
        """(sizes,) E[G_b^2]."""
        result: Array = (self.parts_s**2 @ self.weights) * (1.0 + 1.0 / self.shape)
        return result

    def arrivals(self, rate_per_s: float, count: int) -> Array:
        """p_k^[b] for k = 0 .. count - 1: (sizes, count)."""
        k = np.arange(count)
        log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count)))])
        r = self.shape
        rising = np.concatenate([[0.0], np.cumsum(np.log(np.arange(count - 1) + r))]) if np.isfinite(r) else 0.0
        result = np.zeros((self.sizes.size, count))
        at_once = max(1, NUMBERS // result.size)  # parts, to save memory
        for begin in range(0, self.weights.size, at_once):
            parts = slice(begin, begin + at_once)
            mean = rate_per_s * self.parts_s[:, parts, None]  # (sizes, parts, 1)
            if np.isinf(r):
                log_p = k * np.log(mean) - mean - log_factorial
            else:
                log_p = k * np.log(mean / (r + mean)) + r * np.log(r / (r + mean)) + (rising - log_factorial)
            log_p[log_p < LOG_NEVER] = -np.inf
            result += np.einsum("p,spk->sk", self.weights[parts], np.exp(log_p, out=log_p))
        return result

    def arrivals_max(self, rate_per_s: float, probability: float) -> int:
        """A number of arrivals during a batch of any size that is exceeded with less than this probability.

        By Chernoff's bound with the best of some exponents t: P(K >= k) <= E[e^(tK)] e^(-tk).
        """
        mean = rate_per_s * float(self.parts_s.max())
        t = np.log1p(self._pole(mean) * np.geomspace(1e-6, 0.99, 200))
        return int(np.ceil(((_log_mgf(np.expm1(t) * mean, self.shape) - np.log(probability)) / t).min()))

    def tail_decay(self, rate_per_s: float, size: int) -> float:
        """eta > 0 with E[e^(eta (K - size))] = 1, for K arrivals during a batch of that size, on average fewer than it.

        Under batches of that size, the probability of long queues of s falls as e^(-eta s).
        """
        mean = rate_per_s * self.parts_s[size - int(self.sizes[0])]
        low, high = 0.0, float(np.log1p(self._pole(float(mean.max()))))
        with np.errstate(over="ignore"):
            for _ in range(HALVINGS):
                eta = (low + high) / 2
                falls = np.log(self.weights @ np.exp(_log_mgf(np.expm1(eta) * mean, self.shape))) < eta * size
                low, high = (eta, high) if falls else (low, eta)
        return low

    def _pole(self, mean: float) -> float:
        """x below which E[(1 + x)^K] is surely finite and moderate, for a part with this mean number of arrivals."""
        return float(self.shape) / mean if np.isfinite(self.shape) else POISSON_POLE / min(mean, 1.0)

    def draw(self, size: int, count: int, rng: np.random.Generator) -> Array:
        """`count` service times of batches of `size`, seconds."""
        part = rng.choice(self.weights.size, size=count, p=self.weights)
        mean: Array = self.parts_s[size - int(self.sizes[0]), part]
        if not np.isinf(self.shape):
            mean *= rng.gamma(self.shape, 1.0 / self.shape, count)
        return mean


def _log_mgf(x: Array, shape: float) -> Array:
    """log E[e^(x G)] of a gamma variable of mean 1 and this shape; inf beyond its pole."""
    if np.isinf(shape):
        return x
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x < shape, -shape * np.log1p(-x / shape), np.inf)


def _sizes(values: Array, batch_min: int) -> NDArray[np.intp]:
    return np.arange(batch_min, batch_min + values.size)


def longest_slices(lengths: ArrayLike, sizes: ArrayLike, parts: int) -> Array:
    """The longest of b draws from a sample as equally likely values: (sizes, parts), ascending along parts.

    Each value is the mean of the longest over a slice of probability 1 / parts, so the mean of the values is exactly
    E[longest]. Raises ValueError on an empty sample or lengths that are not positive and finite.
    """
    sample = np.sort(np.asarray(lengths, dtype=float).ravel())
    if not sample.size or not (np.isfinite(sample).all() and sample[0] > 0):
        raise ValueError("a bin's lengths must be positive and finite, and there must be some")
    b = np.asarray(sizes, dtype=float)[:, None]
    below = (np.arange(sample.size + 1) / sample.size) ** b  # (sizes, n + 1): P(longest <= i-th)
    total = np.concatenate([np.zeros((b.shape[0], 1)), np.cumsum(sample * np.diff(below), axis=1)], axis=1)
    cuts = np.arange(parts + 1) / parts
    reached = np.stack([np.interp(cuts, p, c) for p, c in zip(below, total, strict=True)])
    return np.diff(reached, axis=1) * parts
