"""Fig. 11 (a): bursts to a fast model beside single requests to a slow model; and the overload of two GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from papers.rows import HOLDS, Row
from papers.shepherd import workloads
from papers.shepherd.load import goodputs
from papers.shepherd.runs import (
    CLOCKWORK,
    EDF,
    FFFS,
    FLEX,
    LARGEST,
    PRINTED,
    RELEASED,
    RELEASED_128,
    WITHOUT_PREEMPTION,
    Outcome,
    run,
)
from papers.shepherd.streams import Arrivals
from papers.shepherd.worlds import Effort, mean_row, ratio_row

FIGURE, OVERLOAD = "Fig. 11 (a)", "Overload"
IN_TIME = "requests in time"
POLICIES = (FLEX, WITHOUT_PREEMPTION, PRINTED, CLOCKWORK, LARGEST, RELEASED, RELEASED_128, EDF, FFFS)
SLOS_S = (0.25, 0.09)
ISOLATED, STEADY = "one burst", "steady state"
PERIODS = 20
EXACT = {  # of the isolated burst at 90 ms, by hand (tests/papers/test_reproduce_shepherd.py)
    FLEX: 358,
    WITHOUT_PREEMPTION: 58,
    CLOCKWORK: 58,
}
PUBLISHED = {  # (SLO, policy): FLEX's goodput over the policy's, from the text and the figure
    (0.25, WITHOUT_PREEMPTION): 1.0,
    (0.25, CLOCKWORK): 3.7,
    (0.09, WITHOUT_PREEMPTION): 6.2,
    (0.09, CLOCKWORK): 6.2,
}
RATIO = "FLEX's requests in time over it"

OVERLOAD_POLICIES = (FLEX, WITHOUT_PREEMPTION, PRINTED, CLOCKWORK, LARGEST, RELEASED, EDF, FFFS)
OVERLOAD_SEEDS, OVERLOAD_REQUESTS = 5, 18_000
LEAST_GAIN = 1.3  # of truly feasible batches over batches as printed


def rows(effort: Effort) -> Iterator[Row]:
    yield from _bursts(effort)
    yield from _overload(effort)


def _bursts(effort: Effort) -> Iterator[Row]:
    periods = max(3, round(effort.spans * PERIODS))
    for slo_s in SLOS_S:
        for name, arrivals in (
            (ISOLATED, workloads.isolated_burst(slo_s)),
            (STEADY, workloads.steady_bursts(slo_s, periods)),
        ):
            yield from _case(slo_s, name, arrivals, {policy: run(arrivals, policy, 1) for policy in POLICIES})


def _case(slo_s: float, name: str, arrivals: Arrivals, outcomes: dict[str, Outcome]) -> Iterator[Row]:
    fast, slow = workloads.MICRO
    unit = f"of {len(arrivals):,}"
    for policy, outcome in outcomes.items():
        case = {"slo_s": slo_s, "load": name, "policy": policy}
        note = f"{outcome.by_model[fast]} of the {fast} bursts, {outcome.by_model[slow]} single {slow}"
        exact = EXACT.get(policy) if (slo_s, name) == (0.09, ISOLATED) else None
        yield Row(FIGURE, case, IN_TIME, unit, float(outcome.in_time), exact, 0.0, note=note, kind="derived")
    for policy, outcome in outcomes.items():
        if policy == FLEX:
            continue
        # Published ratios are compared with the load that comes near: steady state at 250 ms, isolated burst at 90 ms.
        published = PUBLISHED.get((slo_s, policy)) if name == (STEADY if slo_s == 0.25 else ISOLATED) else None
        ratio = outcomes[FLEX].in_time / max(1, outcome.in_time)
        yield Row(FIGURE, {"slo_s": slo_s, "load": name, "policy": policy}, RATIO, "1", ratio, published, 0.1)


def _overload(effort: Effort) -> Iterator[Row]:
    requests = max(1_200, effort.spans * OVERLOAD_REQUESTS)
    seeds = [1_000 * effort.seed + index for index in range(1 if effort.ends else OVERLOAD_SEEDS)]
    outcomes = []
    for seed in seeds:
        arrivals = workloads.overload(np.random.default_rng(seed), requests)
        outcomes.append(
            {
                policy: run(arrivals, policy, workloads.OVERLOAD_GPUS, from_s=0.1, until_s=arrivals.times_s[-1])
                for policy in OVERLOAD_POLICIES
            }
        )
    for policy in OVERLOAD_POLICIES:
        case = {"policy": policy}
        yield mean_row(OVERLOAD, case, "goodput", "1/s", goodputs(outcomes, policy))
        late_per_s = [by_policy[policy].late / by_policy[policy].duration_s for by_policy in outcomes]
        yield mean_row(OVERLOAD, case, "answered late", "1/s", late_per_s)
        if policy == FLEX:
            continue
        gain = ratio_row(OVERLOAD, case, "FLEX's goodput over it", goodputs(outcomes, FLEX), goodputs(outcomes, policy))
        yield gain
        if policy == PRINTED:
            text = f"truly feasible batches are worth at least {LEAST_GAIN:g} times those as printed"
            holds = (gain.measured or 0.0) >= LEAST_GAIN
            yield Row(OVERLOAD, {}, text, HOLDS, float(holds), note=f"{gain.measured:.2f} times")
