"""Throughput and latency with bins: the theory of Multi-Bin, with its misprints repaired.

    k              bins
    B              requests in a batch
    l_min, l_max   least and largest length, where lengths are uniform
    1 / mu         mean length, where they are exponential
    l_i            edge between the bins i and i + 1
    H_B            1 + 1/2 + ... + 1/B
    L_1 = H_B, L_m = 1 + log L_{m-1}                                   Lemma A.1
    E[t_k]         expected time of a batch with k bins                eq. 2
    lambda         arrivals a second

A batch takes as long as its longest request. Functions without an arrival rate measure times in the unit of the lengths
and throughputs in requests per such a unit: lengths in seconds, or tokens if a step takes a unit of time. Functions
with an arrival rate measure times in seconds, and `step_s` converts lengths to seconds.

Throughput is the throughput of one engine at saturation, which always has a full batch to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bins.edges import Edges, exponential_edges, exponential_steps, index_of, optimal_edges
from bins.risk import risks

Floats = NDArray[np.float64]

ROUNDING = 1e-9  # relative: a number of bins this little above a whole number is that whole number
PRECISION = 1e-17  # bound on the omitted rest of a series whose sum is of the order of 1


# ---- uniform lengths, equal-mass bins -----------------------------------------------------------------------------


def batch_time_uniform(bins: int, batch_size: int, low: float, high: float) -> float:
    """E[t_k] for lengths uniform on [low, high]: mean + (E[longest of B] - mean) / k.

    0 <= low <= high, high > 0.  Source: Theorem 4.2, with E[longest of B] = (B high + low) / (B + 1) as in eq. 17
    (eq. 8, 10 and 11 print the two weights swapped). For edges of equal mass, which are optimal (Lemma 4.1).
    """
    _check_counts(bins, batch_size)
    if not (0 <= low <= high < math.inf and high > 0):
        raise ValueError(f"lengths must be uniform on an interval 0 <= low <= high, high > 0, not [{low}, {high}]")
    mean = (low + high) / 2
    longest = (batch_size * high + low) / (batch_size + 1)
    return mean + (longest - mean) / bins


def throughput_uniform(bins: int, batch_size: int, low: float, high: float) -> float:
    """Requests per unit of time: B / E[t_k]. Source: Theorem 4.2."""
    return batch_size / batch_time_uniform(bins, batch_size, low, high)


def throughput_max(batch_size: int, mean: float) -> float:
    """c_max = B / mean: the throughput without any padding, the limit of many bins. Source: Remark 4.3, eq. 5.

    mean : mean length, > 0. For B = 128 on [1, 20] the throughput is 12.190 (the paper prints 12.3).
    """
    _check_counts(1, batch_size)
    _check_positive("mean", mean)
    return batch_size / mean


def bins_needed_uniform(batch_size: int, low: float, high: float, gap: float) -> int:
    """Least number of bins whose throughput is at least c_max - gap, for uniform lengths.

    gap : requests per unit of time, > 0; no number of bins reaches a gap of 0.  Source: Theorem 4.3, eq. 6.
    """
    _check_positive("gap", gap)
    excess = batch_time_uniform(1, batch_size, low, high) - (low + high) / 2
    mean = (low + high) / 2
    needed = (throughput_max(batch_size, mean) - gap) * excess / (gap * mean)
    return max(1, math.ceil(needed * (1 - ROUNDING)))


# ---- exponential lengths, the edges of Lemma A.1 --------------------------------------------------------------------


def batch_time_exponential(bins: int, batch_size: int, mean: float) -> float:
    """E[t_k] for exponential lengths of that mean at the edges of Lemma A.1, exactly: sum_i p_i E[longest | bin i].

    Exponential lengths have no memory, so the last bin takes l_{k-1} + mean H_B. Another bin has width d and upper edge
    u; a length above its lower edge is below u with probability p = 1 - exp(-d / mean). This bin takes u less the
    integral of (F / p)^B over the bin: u - mean (p / (B + 1) + p^2 / (B + 2) + ...). The paper only has the bound u.
    """
    _check_counts(bins, batch_size)
    _check_positive("mean", mean)
    if batch_size == 1:  # a batch is one request, so all edges are equal, and Lemma A.1 has no edges
        return mean
    cuts = np.array([0.0, *exponential_edges(batch_size, bins, 1.0)])
    above = np.exp(-cuts)  # (bins,) probability of a length above each bin's lower edge
    total = above[-1] * (cuts[-1] + exponential_steps(batch_size, 1))
    for lower, upper, width in zip(above[:-1], cuts[1:], np.diff(cuts), strict=True):
        p = -math.expm1(-width)
        total += lower * p * (upper - _power_series(p, batch_size))
    return mean * float(total)


def _power_series(p: float, batch_size: int) -> float:
    """sum_{r >= 1} p^r / (B + r), 0 < p < 1: the integral of (u / p)^B / (1 - u) over [0, p]."""
    terms = math.ceil(math.log(PRECISION * (1 - p)) / math.log(p))
    r = np.arange(1, terms + 1)
    return float((p**r / (batch_size + r)).sum())


def throughput_exponential(bins: int, batch_size: int, mean: float) -> float:
    """Requests per unit of time: B / E[t_k] at the edges of Lemma A.1, exactly (batch_time_exponential)."""
    return batch_size / batch_time_exponential(bins, batch_size, mean)


def throughput_exponential_bound(bins: int, batch_size: int, mean: float) -> float:
    """Lower bound on the requests per unit of time: B mu / L_k, with mu = 1 / mean.

    Source: Corollary A.1.1, which prints log L_{k-1-j} for log L_{k-j}; with the misprint repaired, its two sums
    collapse to L_k at the edges of Lemma A.1.
    """
    _check_counts(bins, batch_size)
    _check_positive("mean", mean)
    return batch_size / (mean * exponential_steps(batch_size, bins))


# ---- any lengths --------------------------------------------------------------------------------------------------


def batch_time(lengths: ArrayLike, edges: ArrayLike, batch_size: int) -> float:
    """E[t] = sum_i p_i E[longest of B | bin i], exactly, for requests drawn from a sample (eq. 2).

    lengths : (n,) n >= 1, any order, finite, > 0.  edges : interior edges, strictly increasing, in the same unit.
    An empty bin contributes nothing. To judge edges that were fitted to a sample, give another sample: edges overfit
    bins of few lengths.
    """
    sample = _sample(lengths)
    _check_counts(1, batch_size)
    cuts = np.asarray(edges, dtype=float)
    if cuts.ndim != 1 or np.isnan(cuts).any() or not (np.diff(cuts) > 0).all():
        raise ValueError(f"edges must be strictly increasing numbers in one row, not {edges!r}")
    starts = np.searchsorted(index_of(cuts, sample), np.arange(1, cuts.size + 1))
    parts = [part for part in np.split(sample, starts) if part.size]
    return sum(part.size / sample.size * float(risks(part, batch_size)) for part in parts)


def throughput(lengths: ArrayLike, edges: ArrayLike, batch_size: int) -> float:
    """Requests per unit of time: B / E[t] (Proposition 4.1). Arguments: see batch_time."""
    return batch_size / batch_time(lengths, edges, batch_size)


def batch_time_window(
    lengths: ArrayLike, window: int, batch_size: int, rng: np.random.Generator, *, windows: int = 2000
) -> float:
    """Mean time of a batch when a window of requests is sorted and cut into batches, instead of using bins.

    lengths : (n,) n >= 1, finite, > 0.  window : waiting requests, a multiple of batch_size; in order of length, each
    `batch_size` requests are a batch. With window = batch_size the result is the time without bins.
    Monte Carlo over `windows` windows: 2000 of 256 lognormal lengths (sigma 0.8) give a standard error of 0.2 %.
    """
    sample = _sample(lengths)
    _check_counts(1, batch_size)
    if window < batch_size or window % batch_size or windows < 1:
        raise ValueError(f"window must be a multiple of {batch_size}, not {window}; windows at least 1, not {windows}")
    waiting = np.sort(rng.choice(sample, size=(windows, window)), axis=1)
    return float(waiting[:, batch_size - 1 :: batch_size].mean())


# ---- latency ------------------------------------------------------------------------------------------------------


def forming_s(bins: int, batch_size: int, arrival_rate_per_s: float) -> float:
    """Mean wait of a request for its batch to be full, in seconds: k (B - 1) / (2 lambda). Source: Lemma 5.1, eq. 64.

    Holds for any edges: the mean wait in a bin of probability p is (B - 1) / (2 p lambda), and a share p of the
    requests waits there.
    """
    _check_counts(bins, batch_size)
    _check_positive("arrival_rate_per_s", arrival_rate_per_s)
    return bins * (batch_size - 1) / (2 * arrival_rate_per_s)


def latency(bins: int, batch_size: int, arrival_rate_per_s: float, batch_time_s: float) -> float:
    """Mean seconds from arrival to the end of a batch that starts as soon as it is full: k (B-1)/(2 lambda) + E[t].

    Poisson arrivals. Source: Lemma 5.1, there for uniform lengths. The lemma assumes infinitely many engines. With
    finitely many, batches also wait for an engine, the longer the higher the `utilisation`, so this is a lower bound;
    `llmserve simulate` measures the latency with that wait.
    """
    _check_positive("batch_time_s", batch_time_s)
    return forming_s(bins, batch_size, arrival_rate_per_s) + batch_time_s


def utilisation(batch_size: int, arrival_rate_per_s: float, batch_time_s: float, engines: int = 1) -> float:
    """rho = lambda E[t] / (B engines): share of time for which engines are busy; at 1 and above the queue grows."""
    _check_counts(1, batch_size)
    _check_positive("arrival_rate_per_s", arrival_rate_per_s)
    _check_positive("batch_time_s", batch_time_s)
    if engines < 1:
        raise ValueError(f"engines must be at least 1, not {engines}")
    return arrival_rate_per_s * batch_time_s / (batch_size * engines)


@dataclass(frozen=True, slots=True)
class Binning:
    """Edges with their throughput and latency.

    edges             interior edges, in the unit of the lengths
    batch_time_s      E[t], mean time of a batch
    throughput_per_s  of one engine at saturation, requests a second
    latency_s         mean latency of Lemma 5.1: no batch waits for an engine
    """

    edges: Edges
    batch_time_s: float
    throughput_per_s: float
    latency_s: float

    @property
    def bins(self) -> int:
        return len(self.edges) + 1


def best_bins(
    lengths: ArrayLike,
    batch_size: int,
    arrival_rate_per_s: float,
    *,
    latency_target_s: float,
    bins_max: int = 32,
    edges: Callable[[ArrayLike, int], Edges] | None = None,
    step_s: float = 1.0,
) -> Binning | None:
    """The edges of highest throughput whose latency is within a target; among equals the fewest. None: none meet it.

    lengths : (n,) finite, > 0; length * step_s is seconds.  bins_max : largest number of bins tried.
    edges : function of a sample and a number of bins, such as equal_mass_edges; default: optimal_edges for this
    batch_size. The latency is that of Lemma 5.1 (see `latency`): full batches cannot meet a target that is missed here;
    to meet a target that is met here, there must be enough engines (see `utilisation`).
    """
    _check_counts(bins_max, batch_size)
    for name, value in (("latency_target_s", latency_target_s), ("step_s", step_s)):
        _check_positive(name, value)
    best = None
    for bins in range(1, bins_max + 1):
        chosen = optimal_edges(lengths, bins, batch_size) if edges is None else edges(lengths, bins)
        time_s = step_s * batch_time(lengths, chosen, batch_size)
        latency_s = latency(len(chosen) + 1, batch_size, arrival_rate_per_s, time_s)
        binning = Binning(chosen, time_s, batch_size / time_s, latency_s)
        if latency_s <= latency_target_s and (best is None or binning.throughput_per_s > best.throughput_per_s):
            best = binning
    return best


# ---- checking -----------------------------------------------------------------------------------------------------


def _sample(lengths: ArrayLike) -> Floats:
    """(n,) ascending."""
    sample = np.sort(np.asarray(lengths, dtype=float).ravel())
    if not sample.size or not (np.isfinite(sample).all() and sample[0] > 0):
        raise ValueError("lengths must be positive and finite, and there must be some")
    return sample


def _check_counts(bins: int, batch_size: int) -> None:
    for name, value in (("bins", bins), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")
