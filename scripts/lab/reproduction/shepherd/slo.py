"""Fig. 9: goodput against the SLO, at 3,000 requests a second."""

from __future__ import annotations

import math
from collections.abc import Iterator

from reproduction.rows import Row, claim
from reproduction.shepherd.load import COUNTED_FROM_S, GOODPUT, SPAN_S_MIN, goodputs, mean
from reproduction.shepherd.runs import CLOCKWORK, FLEX, NEXUS, PLANNED_SHARE, RELEASED, WITHOUT_PREEMPTION
from reproduction.shepherd.worlds import BURSTY, STABLE, Effort, Found, Key, World, mean_row, ratio_row

FIGURE = "Fig. 9"
RATE_PER_S = 3_000.0
SPAN_S = 1.5
SEEDS = 1
SLOS_S = (0.05, 0.09, 0.15, 0.25, 0.5)
POLICIES = (FLEX, WITHOUT_PREEMPTION, CLOCKWORK, RELEASED, NEXUS, PLANNED_SHARE)
PUBLISHED = {CLOCKWORK: 1.3, NEXUS: 38.0}  # "up to"
RATIO = "FLEX's goodput over it, at the SLO where that is the most"


def worlds(effort: Effort) -> dict[Key, list[World]]:
    return {
        (FIGURE, trace, slo_s): [
            World(trace, effort.minute(seed), RATE_PER_S, slo_s, POLICIES, seed, _span_s(slo_s, effort), COUNTED_FROM_S)
            for seed in effort.run_seeds(SEEDS)
        ]
        for trace in (STABLE, BURSTY)
        for slo_s in effort.some(SLOS_S)
    }


def _span_s(slo_s: float, effort: Effort) -> float:
    """So that requests can come, and be due, while they are counted."""
    return max(SPAN_S_MIN, COUNTED_FROM_S + 2 * slo_s, effort.spans * SPAN_S)


def rows(found: Found, effort: Effort) -> Iterator[Row]:
    slos_s = effort.some(SLOS_S)
    for trace in (STABLE, BURSTY):
        for slo_s in slos_s:
            for policy in POLICIES:
                case = {"trace": trace, "slo_s": slo_s, "policy": policy}
                yield mean_row(FIGURE, case, GOODPUT, "1/s", goodputs(found[FIGURE, trace, slo_s], policy))
        for policy in (CLOCKWORK, RELEASED, NEXUS):
            by_slo = [(goodputs(found[FIGURE, trace, slo_s], FLEX), slo_s) for slo_s in slos_s]
            ratios = [
                ratio_row(
                    FIGURE,
                    {"trace": trace, "policy": policy},
                    RATIO,
                    flex,
                    goodputs(found[FIGURE, trace, slo_s], policy),
                    note=f"at {1e3 * slo_s:g} ms" + ("; published: up to 38" if policy == NEXUS else ""),
                    expected=PUBLISHED[CLOCKWORK] if policy == CLOCKWORK else None,
                )
                for flex, slo_s in by_slo
            ]
            finite = [row for row in ratios if row.measured is not None and row.measured < math.inf]
            yield max(finite, key=lambda row: row.measured or 0.0)
        served = mean([one[FLEX].share_in_time for one in found[FIGURE, trace, slos_s[-1]]])
        text = "with 500 ms almost all deadlines are met (FLEX)"
        yield claim(FIGURE, {"trace": trace}, text, served > 0.95, f"{100 * served:.1f} %")
        falls = {
            policy: mean(goodputs(found[FIGURE, trace, slos_s[0]], policy))
            / mean(goodputs(found[FIGURE, trace, slos_s[-1]], policy))
            for policy in (FLEX, CLOCKWORK, NEXUS)
        }
        note = ", ".join(f"{policy} keeps {100 * kept:.0f} %" for policy, kept in falls.items())
        text = "from 500 to 50 ms Nexus loses more than Clockwork, and FLEX least"
        yield claim(FIGURE, {"trace": trace}, text, falls[FLEX] >= falls[CLOCKWORK] > falls[NEXUS], note)
