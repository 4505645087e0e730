"""Measure all rows of the two SMDP papers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from reproduction.rows import Report, Row, Rows
from reproduction.smdp.latencies import latencies, objectives
from reproduction.smdp.policies import conference_policies, policies
from reproduction.smdp.scenarios import Effort, basic, conference
from reproduction.smdp.tradeoffs import (
    basic_tradeoffs,
    constant_times,
    costs,
    distributions,
    logarithmic_energies,
    thresholds,
)
from reproduction.smdp.truncation import table_2, table_3, truncations


def measure(seed: int, quick: bool, report: Report) -> Rows:
    effort = Effort.quick(seed) if quick else Effort(seed)
    rows = Rows()
    weights = np.linspace(0.0, 15.0, 31)
    longer = np.linspace(0.0, 20.0, 41)
    parts: tuple[tuple[str, Callable[[], Iterator[Row]]], ...] = (
        ("Table I, Fig. 6 (a): latencies", lambda: latencies(effort)),
        ("Table II: least s_max", lambda: table_2(effort)),
        ("Table III: other algorithms", lambda: table_3(effort)),
        ("Fig. 3 and 11: policies", lambda: policies(effort)),
        ("Fig. 4: costs", lambda: costs("Fig. 4", basic(), weights)),
        ("Fig. 5: trade-offs", lambda: basic_tradeoffs(effort)),
        ("Fig. 6 (b), (c): objectives", lambda: objectives(effort)),
        ("Fig. 7: constant times", lambda: constant_times(effort)),
        ("Fig. 8: logarithmic energy", lambda: logarithmic_energies(effort)),
        ("Fig. 9: distributions", lambda: distributions(effort)),
        ("Single thresholds", lambda: thresholds(effort)),
        ("Fig. 10: truncation", lambda: truncations(effort)),
        ("SMDP-C, Fig. 4: policies", lambda: conference_policies(effort)),
        ("SMDP-C, Fig. 5: costs", lambda: costs("SMDP-C Fig. 5", conference(), longer)),
    )
    for done, (name, part) in enumerate(parts):
        report(name, done / len(parts))
        rows.extend(part())
    return rows
