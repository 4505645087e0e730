"""When an idle engine whose slots refill should start: a threshold on how many wait for it.

    n           requests that run
    lambda      arrivals a second, Poisson
    mu(n)       ends a second: n over the time of a mean answer when n run beside each other
    p(n)        power above idle while n run
    T_n, E_n, H_n   time, energy above idle and request-seconds until one fewer runs

While anything runs, whoever comes joins it at once, for that costs next to nothing. So only an idle engine decides: it
waits for Q requests and starts them together, for the fewer starts, the less time it runs with few. Lengths are taken
as exponential; then n is a birth-death process, and from n down to n - 1

    T_n = (1 + lambda T_{n+1}) / mu(n),   E_n = (p(n) + lambda E_{n+1}) / mu(n),   H_n = (n + lambda H_{n+1}) / mu(n).

A cycle is the wait for Q arrivals, Q/lambda, and the way down from Q.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bins.service import Array
from bins.smdp_model import MS_PER_S, Unstable

BEYOND = 4  # times the slots: up to so many requests in the engine and before it are followed


@dataclass(frozen=True)
class RefillEngine:
    """step_s, step_j : (slots,) seconds and joules of a step while 1, 2, ... sequences run."""

    arrival_rate_per_s: float
    tokens_mean: float
    step_s: Array
    step_j: Array
    idle_power_w: float

    def thresholds(self) -> tuple[Array, Array]:
        """Mean response time (s) and mean power (W) of Q = 1 .. slots: (slots,) each. Raises Unstable."""
        rate, slots = self.arrival_rate_per_s, self.step_s.size
        n = np.arange(1, BEYOND * slots + 1)
        running = np.minimum(n, slots)
        per_end_s = self.tokens_mean * self.step_s[running - 1] / running
        power_w = self.step_j[running - 1] / self.step_s[running - 1] - self.idle_power_w
        down = np.zeros((3, n.size + 1))  # T, E, H
        full_s = float(per_end_s[-1])
        if rate * full_s >= 1.0:
            raise Unstable(f"{rate:.6g} requests a second are more than {slots} slots can serve")
        left_s = full_s / (1.0 - rate * full_s)  # beyond, a queue with one server: exact
        down[:, -1] = left_s, power_w[-1] * left_s, (n.size + 1) * left_s + rate * left_s**2
        each = np.stack([np.ones(n.size), power_w, n])
        for index in range(n.size - 1, -1, -1):
            down[:, index] = per_end_s[index] * (each[:, index] + rate * down[:, index + 1])
        time_s, energy_j, held = np.cumsum(down[:, :slots], axis=1)
        least = np.arange(1, slots + 1)
        cycle_s = least / rate + time_s
        response_s = (least * (least - 1) / (2 * rate) + held) / cycle_s / rate
        return response_s, self.idle_power_w + energy_j / cycle_s

    @property
    def load(self) -> float:
        """Arrivals over what all slots together can serve."""
        return self.arrival_rate_per_s * self.tokens_mean * float(self.step_s[-1]) / self.step_s.size

    def best(
        self, energy_weight: float, response_s_max: float | None = None, most: int | None = None
    ) -> tuple[int, float, float, bool]:
        """(Q, mean response time, mean power, whether the target is met): least cost, or least power in the target.

        most: largest Q to choose.
        """
        response_s, power_w = (each[:most] for each in self.thresholds())
        if response_s_max is None:
            index = int(np.argmin(MS_PER_S * response_s + energy_weight * power_w))
        elif (response_s <= response_s_max).any():
            index = int(np.argmin(np.where(response_s <= response_s_max, power_w, np.inf)))
        else:
            index = int(np.argmin(response_s))
        met = response_s_max is None or bool(response_s[index] <= response_s_max)
        return index + 1, float(response_s[index]), float(power_w[index]), met
