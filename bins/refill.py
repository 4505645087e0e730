"""When an idle refill engine should start: a threshold on the number of waiting requests.

    n           running requests
    lambda      arrivals a second, Poisson
    mu(n)       ends a second: n over the time of a mean answer while n requests run
    p(n)        power above idle while n requests run
    T_n, E_n, H_n   time, energy above idle and request-seconds until n - 1 requests run

On a busy engine, a new request starts at once, for that costs next to nothing. So only an idle engine decides: it waits
for Q requests and starts them together, for fewer starts mean less time with few running requests. Lengths are modelled
as exponential; then n is a birth-death process, and from n down to n - 1

    T_n = (1 + lambda T_{n+1}) / mu(n),   E_n = (p(n) + lambda E_{n+1}) / mu(n),   H_n = (n + lambda H_{n+1}) / mu(n).

A cycle is the wait for Q arrivals, Q/lambda, and the way down from Q.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bins.service import Array
from bins.smdp_model import MS_PER_S, Unstable

BEYOND = 4  # requests at the engine, running or waiting, are modelled up to this multiple of its slots


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
        last_s = full_s / (1.0 - rate * full_s)  # from the last n on, an exact queue with one server
        down[:, -1] = last_s, power_w[-1] * last_s, (n.size + 1) * last_s + rate * last_s**2
        per_s = np.stack([np.ones(n.size), power_w, n])  # growth of T, E, H a second
        for index in range(n.size - 1, -1, -1):
            down[:, index] = per_end_s[index] * (per_s[:, index] + rate * down[:, index + 1])
        time_s, energy_j, request_s = np.cumsum(down[:, :slots], axis=1)
        least = np.arange(1, slots + 1)
        cycle_s = least / rate + time_s
        response_s = (least * (least - 1) / (2 * rate) + request_s) / cycle_s / rate
        return response_s, self.idle_power_w + energy_j / cycle_s

    @property
    def load(self) -> float:
        """Arrivals a second over the most that all slots together can serve."""
        return self.arrival_rate_per_s * self.tokens_mean * float(self.step_s[-1]) / self.step_s.size

    def best(
        self, energy_weight: float, response_s_max: float | None = None, most: int | None = None
    ) -> tuple[int, float, float, bool]:
        """(Q, mean response time, mean power, whether the target is met), for least cost or least power in the target.

        most: largest Q to choose.  Raises Unstable.
        """
        response_s, power_w = (means[:most] for means in self.thresholds())
        if response_s_max is None:
            index = int(np.argmin(MS_PER_S * response_s + energy_weight * power_w))
        elif (response_s <= response_s_max).any():
            index = int(np.argmin(np.where(response_s <= response_s_max, power_w, np.inf)))
        else:
            index = int(np.argmin(response_s))
        met = response_s_max is None or bool(response_s[index] <= response_s_max)
        return index + 1, float(response_s[index]), float(power_w[index]), met
