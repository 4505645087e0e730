"""Table 5: how long HERD's solver takes, beside what docs/results/herd.md measured, where that has been."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from reproduction.rows import Row

FIGURE = "Table 5"
SOLVER_S = {200: 0.55, 400: 2.51, 600: 4.28, 800: 8.53, 1_000: 13.26}
KIND = "usual"
RESULTS = Path(__file__).resolve().parents[4] / "docs" / "results" / "herd.json"


def rows() -> Iterator[Row]:
    """Of each number of models and form, the median over seeds; nothing where it has not been measured."""
    for (models, form), seconds in sorted(_measured().items()):
        note = f"published: {SOLVER_S[models]:g} s" if models in SOLVER_S else ""
        yield Row(FIGURE, {"models": models, "form": form}, "time to a plan", "s", median(seconds), note=note)


def _measured() -> dict[tuple[int, str], list[float]]:
    """Seconds under each seed, by number of models and form.

    Source: scripts/lab/benchmark_herd.py, its usual instances.
    """
    try:
        found = json.loads(RESULTS.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    seconds: dict[tuple[int, str], list[float]] = {}
    for each in found:
        if each["kind"] == KIND:
            seconds.setdefault((each["models"], each["form"]), []).append(each["plan_s"])
    return seconds
