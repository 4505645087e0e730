"""SMDP-based dynamic batching (Xu, Zhou, Niu): the servers of the figures, and the effort of a measurement.

    SMDP-J  the journal version; SMDP-C the conference version (ICC 2023)
    rho     arrivals over what full batches can serve
    w2      milliseconds of mean response time that a watt is worth (w1 = 1)

The journal prints l(b) = 0.3051 b + 1.0524 ms, but its g needs coefficients with more digits. The coefficients here
give the two other printed times: 2.4252 ms, the mean over b = 1 .. 8, and 1.7465 ms, half of l(8).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bins.average_cost import Policy
from bins.service import ServiceTimes
from bins.smdp import Evaluation, Queue
from bins.smdp_model import Unstable

Array = NDArray[np.float64]

SLOPE_MS, FIXED_MS = 0.305058, 1.05244
SLOPE_MJ, FIXED_MJ = 19.899, 19.603
BATCH_MAX = 32
STATIC = (8, 16, 32)
BENCHMARKS = ("greedy", *(f"static {size}" for size in STATIC))
DISTRIBUTIONS: dict[str, Callable[..., ServiceTimes]] = {
    "deterministic": ServiceTimes.deterministic,
    "Erlang-2": ServiceTimes.erlang,
    "exponential": ServiceTimes.exponential,
    "hyperexponential": ServiceTimes.hyperexponential,
}
SQUARED_COV = {"deterministic": 0.0, "Erlang-2": 0.5, "exponential": 1.0, "hyperexponential": 2.0}

LATENCIES = 1_660_000  # of Table I and Fig. 6 (a)

EXACT = 1e-4  # tolerance of numbers that paper and reproduction compute exactly, with coefficients of six digits
ROUNDED = 2e-3  # tolerance of percentiles and means that the paper simulated, in addition to their intervals


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    points      of each trade-off curve
    s_max_step  of Fig. 10
    exhaustive  with the searches for s_max, which take minutes, and single thresholds at every load
    latencies   samples of each distribution
    """

    seed: int
    points: int = 60
    loads: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    s_max_step: int = 2
    exhaustive: bool = True
    latencies: int = LATENCIES

    @classmethod
    def quick(cls, seed: int) -> Effort:
        return cls(seed, 12, (0.3, 0.6, 0.7, 0.8), s_max_step=60, exhaustive=False, latencies=40_000)

    @property
    def weights(self) -> list[float]:
        """w2 of the trade-off curves, from latency only to power only."""
        return [0.0, *np.geomspace(0.02, 2000.0, self.points - 1).tolist()]


@dataclass(frozen=True)
class Scenario:
    """A server. service_ms, energy_mj : (sizes,) for batches of batch_min, batch_min + 1, ..."""

    service_ms: Array
    energy_mj: Array
    distribution: str = "deterministic"
    batch_min: int = 1
    _queues: dict[float, Queue] = field(default_factory=dict, repr=False, compare=False)

    def queue(self, load: float) -> Queue:
        """Return the queue whose arrival rate is `load` times the throughput of full batches."""
        if load not in self._queues:
            service = DISTRIBUTIONS[self.distribution](self.service_ms / 1e3, self.batch_min)
            rate_per_s = load * service.sizes[-1] / service.mean_s[-1]
            self._queues[load] = Queue(float(rate_per_s), service, self.energy_mj / 1e3)
        return self._queues[load]

    def requests_per_ms(self, size: int) -> float:
        """Return the throughput of batches of one size, one after the other."""
        return size / float(self.service_ms[size - self.batch_min])


def affine_ms(sizes: Array) -> Array:
    return SLOPE_MS * sizes + FIXED_MS


def affine_mj(sizes: Array) -> Array:
    return SLOPE_MJ * sizes + FIXED_MJ


def logarithmic_mj(sizes: Array) -> Array:
    """105 log b + 60, with the natural logarithm: at b = 32 the energy is below the basic scenario's."""
    return 105.0 * np.log(sizes) + 60.0


@cache
def basic(distribution: str = "deterministic") -> Scenario:
    sizes = np.arange(1.0, BATCH_MAX + 1)
    return Scenario(affine_ms(sizes), affine_mj(sizes), distribution)


@cache
def constant_time() -> Scenario:
    """Ideal parallelism: every batch takes 6.0859 ms (Fig. 7)."""
    return Scenario(np.full(BATCH_MAX, 6.0859), basic().energy_mj)


@cache
def logarithmic_energy() -> Scenario:
    return Scenario(basic().service_ms, logarithmic_mj(np.arange(1.0, BATCH_MAX + 1)))


@cache
def conference() -> Scenario:
    """SMDP-C prints its coefficients with fewer digits."""
    sizes = np.arange(1.0, BATCH_MAX + 1)
    return Scenario(0.3051 * sizes + 1.052, 19.90 * sizes + 19.60)


def benchmarks(queue: Queue) -> dict[str, Evaluation]:
    """Return the results of the paper's benchmarks that are stable."""
    results = {}
    for name, policy in benchmark_policies(queue).items():
        with suppress(Unstable):
            results[name] = queue.evaluate(policy)
    return results


def benchmark_policies(queue: Queue) -> dict[str, Policy]:
    return {"greedy": queue.greedy(), **{f"static {size}": queue.static(size) for size in STATIC}}
