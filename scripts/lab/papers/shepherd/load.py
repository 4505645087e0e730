"""Fig. 7: goodput and utilisation against load; and Fig. 8: latencies at the lowest and the highest load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from papers.rows import Row, claim
from papers.shepherd.runs import (
    CLOCKWORK,
    EDF,
    FFFS,
    FLEX,
    LARGEST,
    NEXUS,
    PLANNED_SHARE,
    PRINTED,
    RELEASED,
    RELEASED_128,
    SHARES,
    WITHOUT_PREEMPTION,
)
from papers.shepherd.workloads import SLO_S
from papers.shepherd.worlds import (
    BURSTY,
    STABLE,
    Effort,
    Key,
    Outcomes,
    Results,
    World,
    mean,
    mean_of,
    mean_row,
    ratio_row,
    values,
)

FIGURE, LATENCIES, READINGS = "Fig. 7", "Fig. 8", "Fig. 7, readings"
GOODPUT, UTILISATION, WASTED, BATCH = "goodput", "utilisation", "wasted share of the GPUs' time", "requests in a batch"
LATENCY, NEAR = "latency of requests in time", "share of requests in time that take over 80 % of the SLO"
RATIO = "FLEX's goodput over it"
QUANTITIES = (  # (quantity, unit, name in Outcome)
    (GOODPUT, "1/s", "goodput_per_s"),
    (UTILISATION, "1", "utilisation"),
    (WASTED, "1", "wasted_share"),
    (BATCH, "1", "batch_size"),
)

SPANS_S = {3_000.0: 3.0, 12_000.0: 1.2, 24_000.0: 1.0, 144_000.0: 0.55}
"""Simulated seconds at each arrival rate per second."""
COUNTED_FROM_S = 0.3  # earlier requests meet an empty system
SPAN_S_MIN = 0.6
LOW_PER_S, QUICK_HIGH_PER_S = 3_000.0, 6_000.0
ALL_PER_S = 24_000.0  # up to this rate every policy is simulated
MAIN = (FLEX, CLOCKWORK, RELEASED, NEXUS, PLANNED_SHARE)
REST = (WITHOUT_PREEMPTION, PRINTED, LARGEST, RELEASED_128, FFFS, EDF)
READ = (CLOCKWORK, RELEASED, LARGEST, RELEASED_128, NEXUS, PLANNED_SHARE)
PUBLISHED = {STABLE: {CLOCKWORK: 4.6, NEXUS: 7.1}, BURSTY: {CLOCKWORK: 5.2, NEXUS: 18.1}}
UTILISATION_MAX = {STABLE: 0.89, BURSTY: 0.55}  # Nexus's, published


def worlds(effort: Effort) -> dict[Key, list[World]]:
    return {
        (FIGURE, trace, rate_per_s): [
            World(
                trace,
                effort.minute(seed),
                rate_per_s,
                SLO_S,
                (*MAIN, *REST) if rate_per_s <= ALL_PER_S else MAIN,
                seed,
                SPAN_S_MIN if effort.ends else SPANS_S[rate_per_s],
                COUNTED_FROM_S,
            )
            for seed in effort.run_seeds()
        ]
        for trace in (STABLE, BURSTY)
        for rate_per_s in rates(effort)
    }


def rates(effort: Effort) -> Sequence[float]:
    return (LOW_PER_S, QUICK_HIGH_PER_S) if effort.ends else tuple(SPANS_S)


def all_per_s(rates_per_s: Sequence[float]) -> float:
    """Return the highest rate at which every policy is simulated."""
    return max(rate_per_s for rate_per_s in rates_per_s if rate_per_s <= ALL_PER_S)


def rows(results: Results, effort: Effort) -> Iterator[Row]:
    for trace in (STABLE, BURSTY):
        for rate_per_s in rates(effort):
            outcomes = results[FIGURE, trace, rate_per_s]
            for policy in outcomes[0]:
                case = {"trace": trace, "rate": rate_per_s, "policy": policy}
                for quantity, unit, name in QUANTITIES:
                    yield mean_row(FIGURE, case, quantity, unit, values(outcomes, policy, name))
        yield from _ratios(results, trace, effort)
        yield from _statements(results, trace, effort)
    yield from _latencies(results, effort)


def goodputs(outcomes: Outcomes, policy: str) -> list[float]:
    return values(outcomes, policy, "goodput_per_s")


def _ratios(results: Results, trace: str, effort: Effort) -> Iterator[Row]:
    """FLEX's goodput over every other policy's at high loads. The published ratios are for the highest load."""
    highest = rates(effort)[-1]
    for rate_per_s in rates(effort):
        if rate_per_s < all_per_s(rates(effort)):
            continue
        outcomes = results[FIGURE, trace, rate_per_s]
        for policy in outcomes[0]:
            if policy == FLEX or not sum(goodputs(outcomes, policy)):
                continue
            baseline = {RELEASED: CLOCKWORK, PLANNED_SHARE: NEXUS}.get(policy, policy)
            expected = PUBLISHED[trace].get(baseline) if rate_per_s == highest else None
            yield ratio_row(
                READINGS if policy in READ else FIGURE,
                {"trace": trace, "rate": rate_per_s, "policy": policy},
                RATIO,
                goodputs(outcomes, FLEX),
                goodputs(outcomes, policy),
                expected=expected,
            )


def _statements(results: Results, trace: str, effort: Effort) -> Iterator[Row]:
    """Statements of the text about the figure."""
    loads = [results[FIGURE, trace, rate_per_s] for rate_per_s in rates(effort)]
    case = {"trace": trace}
    for policy in (FLEX, CLOCKWORK, NEXUS):
        share = mean_of(loads[0], policy, "share_in_time")
        yield claim(FIGURE, case, most_in_time(policy), share > 0.9, f"{100 * share:.1f} % of them")
    for policy in (FLEX, CLOCKWORK):
        least = min(min(values(outcomes, policy, "utilisation")) for outcomes in loads)
        text = f"utilisation with {policy} is over 95 % at every load"
        yield claim(FIGURE, case, text, least > 0.95, f"{100 * least:.1f} % at least")
    for policy in (NEXUS, PLANNED_SHARE):
        most = max(mean_of(outcomes, policy, "utilisation") for outcomes in loads)
        yield claim(FIGURE, case, under(policy, trace), most < UTILISATION_MAX[trace], f"up to {100 * most:.0f} %")
    means = [mean(goodputs(outcomes, FLEX)) for outcomes in loads]
    rising = all(after > before for before, after in pairwise(means))
    text = "FLEX's goodput keeps increasing with load"
    yield claim(FIGURE, case, text, rising, ", ".join(f"{goodput:,.0f}" for goodput in means) + " requests/s")


def most_in_time(policy: str) -> str:
    return f"at {LOW_PER_S:g} requests/s {policy} meets most deadlines"


def under(policy: str, trace: str) -> str:
    return f"utilisation with {policy} remains under {100 * UTILISATION_MAX[trace]:.0f} %"


def _latencies(results: Results, effort: Effort) -> Iterator[Row]:
    near: dict[str, float] = {}
    for load, rate_per_s in (("low", LOW_PER_S), ("high", rates(effort)[-1])):
        for policy in (FLEX, CLOCKWORK, RELEASED, NEXUS):
            latencies_s = [by_policy[policy].latencies_s for by_policy in results[FIGURE, STABLE, rate_per_s]]
            case = {"load": load, "policy": policy}
            quantiles_s = [mean([run_s[place] for run_s in latencies_s]) for place in range(len(SHARES))]
            yield Row.of_curve(LATENCIES, case, LATENCY, "s", "share of requests", SHARES, quantiles_s)
            near[policy] = mean([_share_beyond(run_s, 0.8 * SLO_S) for run_s in latencies_s])
            yield Row(LATENCIES, case, NEAR, "1", near[policy])
            spread = mean([run_s[75] - run_s[25] for run_s in latencies_s])
            yield Row(LATENCIES, case, "interquartile range of latency", "s", spread)
    for policy in (CLOCKWORK, RELEASED, NEXUS):
        text = f"at high load more of {policy}'s latencies are close to the SLO than of FLEX's"
        note = f"{100 * near[policy]:.0f} and {100 * near[FLEX]:.0f} % take over 80 % of it"
        yield claim(LATENCIES, {"load": "high"}, text, near[policy] > near[FLEX], note)


def _share_beyond(latencies_s: Sequence[float], bound_s: float) -> float:
    return sum(latency_s > bound_s for latency_s in latencies_s) / max(1, len(latencies_s))
