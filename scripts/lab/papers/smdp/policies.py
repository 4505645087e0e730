"""SMDP-J, Fig. 3 and 11, and SMDP-C, Fig. 4: which policies are optimal, and whether they are control limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from bins.average_cost import Policy
from papers.rows import Case, Row, claim
from papers.smdp.scenarios import (
    BATCH_MAX,
    FIXED_MJ,
    Effort,
    Scenario,
    affine_mj,
    affine_ms,
    conference,
    logarithmic_mj,
)

EIGHT = np.arange(1.0, 9.0)  # sizes of Cases 1 to 7
CASE_LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
CASE_WEIGHTS = (0.0, 0.5, 1.0, 100.0)
STATES_SHOWN = 17

# The text: Cases 1 to 3 have times that are independent of the size; Cases 2 and 3 are exponential with 2.4252 and
# 1.7465 ms; Case 4 is Case 1 with B_min = 5; Case 5 breaks the linear energy, and Case 6 the constant time; Case 7 is
# more general. Assumed: Case 1 is deterministic with Case 2's mean (the basic scenario's, over b = 1 .. 8), Case 5 has
# Fig. 8's energy, Case 6 the basic scenario's times, and Case 7 all three.
CASES = {
    1: Scenario(np.full(8, affine_ms(EIGHT).mean()), affine_mj(EIGHT)),
    2: Scenario(np.full(8, affine_ms(EIGHT).mean()), affine_mj(EIGHT), "exponential"),
    3: Scenario(np.full(8, affine_ms(EIGHT)[-1] / 2), affine_mj(EIGHT), "exponential"),
    4: Scenario(np.full(4, affine_ms(EIGHT).mean()), affine_mj(EIGHT)[4:], batch_min=5),
    5: Scenario(np.full(8, affine_ms(EIGHT).mean()), logarithmic_mj(EIGHT)),
    6: Scenario(affine_ms(EIGHT), affine_mj(EIGHT)),
    7: Scenario(affine_ms(EIGHT)[4:], logarithmic_mj(EIGHT)[4:], batch_min=5),
}


def control_limit(
    arrival_rate_per_ms: float, service_ms: float, batch_max: int, fixed_mj: float, energy_weight: float
) -> int:
    """Return the optimal threshold for exponential service times that are independent of the batch size.

    Source: SMDP-J, Proposition 4. fixed_mj is zeta_0.
    """
    chi = arrival_rate_per_ms * service_ms
    psi = chi / (1.0 + chi)
    # 0 < xi < 1. The equation also has the root 1; after division by (xi - 1), the left side grows with xi.
    low, high = 0.0, 1.0
    while high - low > 1e-15:
        xi = (low + high) / 2
        excess = (1.0 - psi) * sum(xi**k for k in range(1, batch_max + 1)) - psi
        low, high = (xi, high) if excess < 0 else (low, xi)
    r = xi / (1.0 - xi)
    for q in range(1, batch_max + 1):
        d = q * ((q + 1) / 2 + chi - r) - r**2 * xi**q + r * (r - chi)
        if d - energy_weight * fixed_mj * arrival_rate_per_ms**2 >= 0:
            return q
    return batch_max


def limit_of(policy: Policy) -> int:
    """Return the least state in which the policy serves."""
    return int(np.flatnonzero(policy)[0])


def exceptions(policy: Policy, batch_max: int) -> int:
    """Count the states in which the policy differs from a control limit that serves all that fit (eq. 31)."""
    states = np.arange(policy.size)
    return int((policy != np.where(states < limit_of(policy), 0, np.minimum(states, batch_max))).sum())


def policies(effort: Effort) -> Iterator[Row]:
    """Fig. 3 and 11: the policies of Cases 1 to 7."""
    limits: dict[tuple[int, float, float], int] = {}
    solved: dict[tuple[int, float, float], Policy] = {}
    for number, scenario in CASES.items():
        figure = "Fig. 3" if number <= 3 else "Fig. 11"
        for weight in CASE_WEIGHTS:
            for load in CASE_LOADS:
                key = (number, weight, load)
                queue = scenario.queue(load)
                policy = queue.solve(weight).policy[:STATES_SHOWN]
                limits[key], solved[key] = limit_of(policy), policy
                case: Case = {"Case": number, "w2": weight, "rho": load}
                yield Row.of_curve(figure, case, "requests served", "", "s", np.arange(policy.size), policy)
                if number <= 3:
                    rate = queue.arrival_rate_per_s / 1e3
                    mean_ms = float(scenario.service_ms[0])
                    exact = control_limit(rate, mean_ms, 8, FIXED_MJ, weight) if number > 1 else None
                    yield Row(figure, case, "control limit Q", "", limits[key], exact, 0.0, kind="computed")
    yield from _claims_on_policies(limits, solved)


def _claims_on_policies(
    limits: dict[tuple[int, float, float], int], solved: dict[tuple[int, float, float], Policy]
) -> Iterator[Row]:
    grid = [(weight, load) for weight in CASE_WEIGHTS for load in CASE_LOADS]
    odd = {number: sum(exceptions(solved[number, w, rho], 8) for w, rho in grid) for number in CASES}
    plain = not any(odd[number] for number in (1, 2, 3))
    yield claim("Fig. 3", {"Case": "1 to 3"}, "all policies are control limits", plain)
    rises = all(
        limits[number, less, load] <= limits[number, more, load]
        for number in (1, 2, 3)
        for load in CASE_LOADS
        for less, more in itertools.pairwise(CASE_WEIGHTS)
    )
    yield claim("Fig. 3", {"Case": "1 to 3"}, "the control limit rises with w2", rises)
    full = all(limits[number, 100.0, load] == 8 for number in (1, 2, 3) for load in CASE_LOADS)
    yield claim("Fig. 3", {"Case": "1 to 3", "w2": 100.0}, "every control limit is B_max", full)
    same = all(limits[2, 0.0, load] == limits[3, 0.0, load] for load in CASE_LOADS)
    yield claim("Fig. 3", {"Case": "2 and 3", "w2": 0.0}, "the control limits are the same", same)
    higher = all(limits[3, weight, load] >= limits[2, weight, load] for weight, load in grid if weight)
    yield claim("Fig. 3", {"Case": "2 and 3", "w2": "above 0"}, "those of Case 3 are never below Case 2's", higher)
    for weight in (0.0, 0.5, 1.0):
        policy = solved[4, weight, 0.1]
        beyond = bool((policy[9:] < 8).any())
        yield claim("Fig. 11", {"Case": 4, "w2": weight, "rho": 0.1}, "fewer than B_max served beyond B_max", beyond)
    twice = sum(bool(np.sum(np.diff(solved[5, w, rho] > 0)) > 1) for w, rho in grid)
    yield claim("Fig. 11", {"Case": 5}, "some have several thresholds", twice > 0, f"{twice} of {len(grid)}")
    fewer = sum(_leaves_room(solved[6, w, rho], 8) for w, rho in grid)
    yield claim("Fig. 11", {"Case": 6}, "some serve fewer than wait and fit", fewer > 0, f"{fewer} of {len(grid)}")
    most = odd[7] > max(odd[4], odd[5], odd[6])
    counts = ", ".join(f"Case {number}: {odd[number]}" for number in (4, 5, 6, 7))
    yield claim("Fig. 11", {"Case": 7}, "has the most exceptions to a control limit", most, f"states: {counts}")


def _leaves_room(policy: Policy, batch_max: int) -> bool:
    """Return whether the policy, in some state, serves fewer requests than wait and fit."""
    states = np.arange(policy.size)
    return bool(((policy > 0) & (policy < np.minimum(states, batch_max))).any())


def conference_policies(effort: Effort) -> Iterator[Row]:
    """SMDP-C, Fig. 4: policies with batches up to 32."""
    figure = "SMDP-C Fig. 4"
    limits: dict[tuple[float, float], int] = {}
    serving, odd = 0, 0
    for weight in (0.0, 0.1, 1.0, 500.0):
        for load in CASE_LOADS:
            policy = conference().queue(load).solve(weight).policy[: BATCH_MAX + 5]
            limits[weight, load] = limit_of(policy)
            serving += bool((policy[limits[weight, load] :] > 0).all())
            odd += exceptions(policy, BATCH_MAX) > 0
            case: Case = {"w2": weight, "rho": load}
            yield Row.of_curve(figure, case, "requests served", "", "s", np.arange(policy.size), policy)
            yield Row(figure, case, "least state served", "", limits[weight, load])
    latency = [limits[0.0, load] for load in CASE_LOADS]
    note = f"{min(latency)} to {max(latency)}"
    yield claim(figure, {"w2": 0.0}, "the control limits are close to 1", max(latency) <= 4, note)
    full = all(limits[500.0, load] == BATCH_MAX for load in CASE_LOADS)
    yield claim(figure, {"w2": 500.0}, "every control limit is B_max", full)
    note = f"{odd} of {len(limits)} serve fewer than wait and fit in some states above it"
    yield claim(figure, {}, "all wait below one limit and serve above it", serving == len(limits), note)
