"""Fig. 9: goodput against the SLO, at 3,000 requests a second."""

from __future__ import annotations

import math
from collections.abc import Iterator

from papers.rows import Row, claim
from papers.shepherd.load import COUNTED_FROM_S, GOODPUT, SPAN_S_MIN, goodputs
from papers.shepherd.runs import CLOCKWORK, FLEX, NEXUS, PLANNED_SHARE, RELEASED, WITHOUT_PREEMPTION
from papers.shepherd.worlds import BURSTY, STABLE, Effort, Key, Results, World, mean, mean_of, mean_row, ratio_row

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
    """Return a time that is long enough for requests to come and to be due in the counted interval."""
    return max(SPAN_S_MIN, COUNTED_FROM_S + 2 * slo_s, effort.spans * SPAN_S)


def rows(results: Results, effort: Effort) -> Iterator[Row]:
    slos_s = effort.some(SLOS_S)
    for trace in (STABLE, BURSTY):
        by_slo = {slo_s: results[FIGURE, trace, slo_s] for slo_s in slos_s}
        for slo_s, outcomes in by_slo.items():
            for policy in POLICIES:
                case = {"trace": trace, "slo_s": slo_s, "policy": policy}
                yield mean_row(FIGURE, case, GOODPUT, "1/s", goodputs(outcomes, policy))
        for policy in (CLOCKWORK, RELEASED, NEXUS):
            ratios = [
                ratio_row(
                    FIGURE,
                    {"trace": trace, "policy": policy},
                    RATIO,
                    goodputs(outcomes, FLEX),
                    goodputs(outcomes, policy),
                    note=f"at {1e3 * slo_s:g} ms" + ("; published: up to 38" if policy == NEXUS else ""),
                    expected=PUBLISHED[CLOCKWORK] if policy == CLOCKWORK else None,
                )
                for slo_s, outcomes in by_slo.items()
            ]
            finite = [row for row in ratios if row.measured is not None and row.measured < math.inf]
            yield max(finite, key=lambda row: row.measured or 0.0)
        tight, loose = by_slo[slos_s[0]], by_slo[slos_s[-1]]
        served = mean_of(loose, FLEX, "share_in_time")
        text = "with 500 ms almost all deadlines are met (FLEX)"
        yield claim(FIGURE, {"trace": trace}, text, served > 0.95, f"{100 * served:.1f} %")
        shares = {
            policy: mean(goodputs(tight, policy)) / mean(goodputs(loose, policy)) for policy in (FLEX, CLOCKWORK, NEXUS)
        }
        note = ", ".join(f"{policy} keeps {100 * share:.0f} %" for policy, share in shares.items())
        text = "from 500 to 50 ms Nexus loses more than Clockwork, and FLEX least"
        yield claim(FIGURE, {"trace": trace}, text, shares[FLEX] >= shares[CLOCKWORK] > shares[NEXUS], note)
