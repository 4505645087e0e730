"""Measure all rows of Shepherd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from papers.rows import Report, Row, Rows
from papers.shepherd import load, micro, scaling, slo, table_5
from papers.shepherd.worlds import Effort, simulate_all

MICRO = 0.15  # share of the work that the bursts and the overload are, about


def measure(seed: int, quick: bool, report: Report, *, jobs: int = 1, trace: Path | None = None) -> Rows:
    """jobs : processes.  trace : file of function calls; None: synthetic traffic.

    Raises ConfigError if the trace cannot be read.
    """
    effort = Effort.of(seed, jobs, trace, quick=quick)
    rows = Rows()
    rows.extend(_rows(effort, report))
    return rows


def _rows(effort: Effort, report: Report) -> Iterator[Row]:
    report("bursts and overload", 0.0)
    yield from micro.rows(effort)
    worlds = load.worlds(effort) | slo.worlds(effort) | scaling.worlds(effort)
    results = simulate_all(worlds, effort, lambda text, share: report(text, MICRO + (1 - MICRO) * share))
    yield from load.rows(results, effort)
    yield from slo.rows(results, effort)
    yield from scaling.rows(results, effort)
    yield from table_5.rows()
