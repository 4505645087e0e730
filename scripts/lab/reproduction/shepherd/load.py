"""Fig. 7: goodput and utilisation against load; and Fig. 8: latencies at the lowest and the highest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from reproduction.rows import Curve, Row, claim
from reproduction.shepherd.runs import (
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
    Outcome,
)
from reproduction.shepherd.workloads import SLO_S
from reproduction.shepherd.worlds import BURSTY, STABLE, Effort, Found, Key, World, mean_row, ratio_row

FIGURE, LATENCIES, READINGS = "Fig. 7", "Fig. 8", "Fig. 7, readings"
GOODPUT, UTILISATION, WASTED, BATCH = "goodput", "utilisation", "wasted share of the GPUs' time", "requests in a batch"
LATENCY, NEAR = "latency of requests in time", "share of requests in time that take over 80 % of the SLO"
RATIO = "FLEX's goodput over it"

SPANS_S = {3_000.0: 3.0, 12_000.0: 1.2, 24_000.0: 1.0, 144_000.0: 0.55}
"""Seconds that are simulated at each arrival rate per second."""
COUNTED_FROM_S = 0.3  # on: until then the first requests meet a system that is empty
SPAN_S_MIN = 0.6
LOW_PER_S, QUICK_HIGH_PER_S = 3_000.0, 6_000.0
ALL_PER_S = 24_000.0  # up to which every policy is simulated
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
                span_s(rate_per_s, effort),
                COUNTED_FROM_S,
            )
            for seed in effort.run_seeds()
        ]
        for trace in (STABLE, BURSTY)
        for rate_per_s in rates(effort)
    }


def rates(effort: Effort) -> Sequence[float]:
    return (LOW_PER_S, QUICK_HIGH_PER_S) if effort.ends else tuple(SPANS_S)


def span_s(rate_per_s: float, effort: Effort) -> float:
    return SPAN_S_MIN if effort.ends else SPANS_S[rate_per_s]


def all_per_s(rates_per_s: Sequence[float]) -> float:
    """The highest rate at which every policy is simulated."""
    return max(rate_per_s for rate_per_s in rates_per_s if rate_per_s <= ALL_PER_S)


def rows(found: Found, effort: Effort) -> Iterator[Row]:
    for trace in (STABLE, BURSTY):
        for rate_per_s in rates(effort):
            yield from _measured(trace, rate_per_s, found[FIGURE, trace, rate_per_s])
        yield from _ratios(found, trace, effort)
        yield from _said(found, trace, effort)
    yield from _latencies(found, effort)


def of(outcomes: Sequence, policy: str) -> list[Outcome]:
    return [each[policy] for each in outcomes if policy in each]


def goodputs(outcomes: Sequence, policy: str) -> list[float]:
    return [each.goodput_per_s for each in of(outcomes, policy)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _measured(trace: str, rate_per_s: float, outcomes: Sequence) -> Iterator[Row]:
    for policy in outcomes[0]:
        case = {"trace": trace, "rate": rate_per_s, "policy": policy}
        each = of(outcomes, policy)
        yield mean_row(FIGURE, case, GOODPUT, "1/s", [one.goodput_per_s for one in each])
        yield mean_row(FIGURE, case, UTILISATION, "1", [one.utilisation for one in each])
        yield mean_row(FIGURE, case, WASTED, "1", [one.wasted_share for one in each])
        yield mean_row(FIGURE, case, BATCH, "1", [one.batch_size for one in each])


def _ratios(found: Found, trace: str, effort: Effort) -> Iterator[Row]:
    """Over every other policy, at high loads; what the paper says is of the highest."""
    highest = rates(effort)[-1]
    for rate_per_s in rates(effort):
        if rate_per_s < all_per_s(rates(effort)):
            continue
        outcomes = found[FIGURE, trace, rate_per_s]
        for policy in outcomes[0]:
            if policy == FLEX or not sum(goodputs(outcomes, policy)):
                continue
            said = {RELEASED: CLOCKWORK, PLANNED_SHARE: NEXUS}.get(policy, policy)
            expected = PUBLISHED[trace].get(said) if rate_per_s == highest else None
            yield ratio_row(
                READINGS if policy in READ else FIGURE,
                {"trace": trace, "rate": rate_per_s, "policy": policy},
                RATIO,
                goodputs(outcomes, FLEX),
                goodputs(outcomes, policy),
                expected=expected,
            )


def _said(found: Found, trace: str, effort: Effort) -> Iterator[Row]:
    """What the text says of the figure."""
    low, *more = [found[FIGURE, trace, rate_per_s] for rate_per_s in rates(effort)]
    case = {"trace": trace}
    for policy in (FLEX, CLOCKWORK, NEXUS):
        share = mean([one.share_in_time for one in of(low, policy)])
        text = f"at {LOW_PER_S:g} requests/s {policy} meets most deadlines"
        yield claim(FIGURE, case, text, share > 0.9, f"{100 * share:.1f} % of them")
    for policy in (FLEX, CLOCKWORK):
        least = min(one.utilisation for each in (low, *more) for one in of(each, policy))
        text = f"utilisation with {policy} is over 95 % at every load"
        yield claim(FIGURE, case, text, least > 0.95, f"{100 * least:.1f} % at least")
    for policy in (NEXUS, PLANNED_SHARE):
        most = max(mean([one.utilisation for one in of(each, policy)]) for each in (low, *more))
        text = f"utilisation with {policy} remains under {100 * UTILISATION_MAX[trace]:.0f} %"
        yield claim(FIGURE, case, text, most < UTILISATION_MAX[trace], f"up to {100 * most:.0f} %")
    means = [mean(goodputs(each, FLEX)) for each in (low, *more)]
    rising = all(after > before for before, after in pairwise(means))
    text = "FLEX's goodput keeps increasing with load"
    yield claim(FIGURE, case, text, rising, ", ".join(f"{each:,.0f}" for each in means) + " requests/s")


def _latencies(found: Found, effort: Effort) -> Iterator[Row]:
    high_per_s = rates(effort)[-1]
    for load, rate_per_s in (("low", LOW_PER_S), ("high", high_per_s)):
        outcomes = found[FIGURE, STABLE, rate_per_s]
        for policy in (FLEX, CLOCKWORK, RELEASED, NEXUS):
            each = of(outcomes, policy)
            times = [mean([one.latencies_s[at] for one in each]) for at in range(len(SHARES))]
            case = {"load": load, "policy": policy}
            curve = Curve.of("share of requests", SHARES, times)
            yield Row(LATENCIES, case, LATENCY, "s", None, curve=curve)
            near = mean([_share_beyond(one, 0.8 * SLO_S) for one in each])
            yield Row(LATENCIES, case, NEAR, "1", near)
            # How evenly: the middle half of the requests lies within so many seconds.
            spread = mean([one.latencies_s[75] - one.latencies_s[25] for one in each])
            yield Row(LATENCIES, case, "interquartile range of latency", "s", spread)
    outcomes = found[FIGURE, STABLE, high_per_s]
    for policy in (CLOCKWORK, RELEASED, NEXUS):
        theirs, flex = (
            mean([_share_beyond(one, 0.8 * SLO_S) for one in of(outcomes, name)]) for name in (policy, FLEX)
        )
        text = f"at high load more of {policy}'s latencies are close to the SLO than of FLEX's"
        note = f"{100 * theirs:.0f} and {100 * flex:.0f} % take over 80 % of it"
        yield claim(LATENCIES, {"load": "high"}, text, theirs > flex, note)


def _share_beyond(outcome: Outcome, latency_s: float) -> float:
    return sum(each > latency_s for each in outcome.latencies_s) / max(1, len(outcome.latencies_s))
