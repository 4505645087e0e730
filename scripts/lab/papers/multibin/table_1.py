"""Table 1 and Fig. 10: the accuracy of this project's predictor, from the results of docs/results/prediction.md."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kit import ROOT

from papers.rows import Row

FIGURE = "Table 1"
MEASURED = ROOT / "docs" / "results" / "predictor-people.json"
ACCURACY, NEAR = "bin accuracy", "accuracy within one bin"
PUBLISHED = {  # per cent, by number of bins
    ACCURACY: {2: 86.14, 4: 62.97, 8: 42.29},
    NEAR: {4: 95.91, 8: 79.42},
}
FIELDS = {ACCURACY: "bin_accuracy", NEAR: "near_accuracy"}


def rows() -> Iterator[Row]:
    """No expected numbers: the paper's predictor was trained on other prompts (LMSYS-Chat-1M) and another model."""
    predictor = json.loads(MEASURED.read_text(encoding="utf-8"))["metrics"]["predictor"]
    for quantity, published in PUBLISHED.items():
        for bins, percent in published.items():
            share = predictor[FIELDS[quantity]][str(bins)]
            yield Row(FIGURE, {"k": bins}, quantity, "%", 100 * share, note=f"the paper's: {percent} %")
