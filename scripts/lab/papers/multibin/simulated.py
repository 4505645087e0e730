"""Measure the simulated rows of Multi-Bin, and the rows of its predictor."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from papers.multibin import example, exponential, gsm8k, table_1, uniform
from papers.multibin.worlds import Effort, simulate_all
from papers.rows import Report, Row, Rows


def measure(seed: int, quick: bool, report: Report, *, jobs: int = 1, gsm8k_file: Path | None = None) -> Rows:
    """jobs : processes.  gsm8k_file : answers to GSM8K; None: no Fig. 6"""
    effort = Effort.quick(seed, jobs, gsm8k_file) if quick else Effort(seed, jobs, gsm8k_file)
    rows = Rows()
    with tempfile.TemporaryDirectory() as folder:
        rows.extend(_rows(effort, Path(folder), report))
    return rows


def _rows(effort: Effort, folder: Path, report: Report) -> Iterator[Row]:
    lengths = gsm8k.read_lengths(effort.gsm8k) if effort.gsm8k is not None else None
    worlds = uniform.worlds(effort) | exponential.worlds(effort)
    if lengths is not None:
        worlds |= gsm8k.worlds(effort, lengths, folder)
    summaries = simulate_all(worlds, effort, report)
    yield from example.rows(folder)
    yield from uniform.rows(summaries, effort)
    yield from exponential.rows(summaries, effort)
    if lengths is not None:
        yield from gsm8k.rows(summaries, lengths, effort)
    yield from table_1.rows()
