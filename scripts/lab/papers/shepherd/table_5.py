"""Table 5: the published times of HERD's solver beside the times of docs/results/herd.json, if that file exists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median

from kit import ROOT

from papers.rows import Row

FIGURE = "Table 5"
SOLVER_S = {200: 0.55, 400: 2.51, 600: 4.28, 800: 8.53, 1_000: 13.26}
KIND = "usual"
RESULTS = ROOT / "docs" / "results" / "herd.json"


def rows() -> Iterator[Row]:
    """Yield the median over seeds for each number of models and form; nothing without measurements."""
    for (models, form), seconds in sorted(_measured().items()):
        note = f"published: {SOLVER_S[models]:g} s" if models in SOLVER_S else ""
        yield Row(FIGURE, {"models": models, "form": form}, "time to a plan", "s", median(seconds), note=note)


def _measured() -> dict[tuple[int, str], list[float]]:
    """Return the seconds with each seed, by number of models and form.

    Source: the usual instances of scripts/lab/questions/herd/run.py.
    """
    try:
        cases = json.loads(RESULTS.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    seconds: dict[tuple[int, str], list[float]] = {}
    for case in cases:
        if case["kind"] == KIND:
            seconds.setdefault((case["models"], case["form"]), []).append(case["plan_s"])
    return seconds
