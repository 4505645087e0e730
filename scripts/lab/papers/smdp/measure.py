"""Measure all rows of the two SMDP papers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from papers.rows import Report, Row, Rows, in_parts
from papers.smdp.latencies import latencies, objectives
from papers.smdp.policies import conference_policies, policies
from papers.smdp.scenarios import Effort, basic, conference
from papers.smdp.tradeoffs import (
    basic_tradeoffs,
    constant_times,
    costs,
    distributions,
    logarithmic_energies,
    thresholds,
)
from papers.smdp.truncation import table_2, table_3, truncations


def measure(seed: int, quick: bool, report: Report) -> Rows:
    effort = Effort.quick(seed) if quick else Effort(seed)
    rows = Rows()
    weights = np.linspace(0.0, 15.0, 31)
    longer = np.linspace(0.0, 20.0, 41)
    # The number of a part is the seconds that it takes in a full run.
    parts: tuple[tuple[str, float, Callable[[], Iterator[Row]]], ...] = (
        ("Table I, Fig. 6 (a): latencies", 12, lambda: latencies(effort)),
        ("Table II: least s_max", 28, lambda: table_2(effort)),
        ("Table III: other algorithms", 1, lambda: table_3(effort)),
        ("Fig. 3 and 11: policies", 1, lambda: policies(effort)),
        ("Fig. 4: costs", 1, lambda: costs("Fig. 4", basic(), weights)),
        ("Fig. 5: trade-offs", 4, lambda: basic_tradeoffs(effort)),
        ("Fig. 6 (b), (c): objectives", 5, lambda: objectives(effort)),
        ("Fig. 7: constant times", 2, lambda: constant_times(effort)),
        ("Fig. 8: logarithmic energy", 3, lambda: logarithmic_energies(effort)),
        ("Fig. 9: distributions", 8, lambda: distributions(effort)),
        ("Single thresholds", 5, lambda: thresholds(effort)),
        ("Fig. 10: truncation", 86, lambda: truncations(effort)),
        ("SMDP-C, Fig. 4: policies", 1, lambda: conference_policies(effort)),
        ("SMDP-C, Fig. 5: costs", 1, lambda: costs("SMDP-C Fig. 5", conference(), longer)),
    )
    rows.extend(in_parts(parts, report))
    return rows
