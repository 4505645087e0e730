"""How good predicted lengths are, against the answers' real ones.

Bins are equal-mass over the *training* answers' lengths, as in Multi-Bin's appendix C.1 (Table 1), and half-open:
bin i holds the lengths in [edge i, edge i + 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import kendalltau

from predictor.dataset import Row

BIN_COUNTS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Metrics:
    """mae_tokens : mean absolute error. kendall_tau : tau-b in [-1, 1]; nan when a side is constant.

    bin_accuracy, near_accuracy : by number of bins, the share of answers predicted into their own bin / into it or
    one of its neighbours. distinct_bins : how many of the bins are not empty by construction; fewer than asked for
    when many answers share one length, and then the accuracies are of that easier task.
    """

    mae_tokens: float
    kendall_tau: float
    bin_accuracy: dict[int, float]
    near_accuracy: dict[int, float]
    distinct_bins: dict[int, int]

    def as_json(self) -> dict[str, Any]:
        """For a metrics file: plain numbers, rounded to what a sample of some thousands can tell."""
        return {
            "mae_tokens": round(self.mae_tokens, 2),
            "kendall_tau": None if np.isnan(self.kendall_tau) else round(self.kendall_tau, 4),
            "bin_accuracy": {str(k): round(share, 4) for k, share in self.bin_accuracy.items()},
            "near_accuracy": {str(k): round(share, 4) for k, share in self.near_accuracy.items()},
            "distinct_bins": {str(k): count for k, count in self.distinct_bins.items()},
        }


def evaluate(predicted: ArrayLike, actual: ArrayLike, training_lengths: Sequence[int]) -> Metrics:
    """predicted, actual : (answers,) output tokens, in the same order; at least one.

    Lengths are whole numbers, so a prediction is rounded before it is put into a bin.
    """
    guess, truth = np.asarray(predicted, float), np.asarray(actual, float)
    assert guess.shape == truth.shape
    assert guess.ndim == 1
    assert guess.size > 0
    edges = {count: equal_mass_edges(training_lengths, count) for count in BIN_COUNTS}
    misses = {count: np.abs(_bins(np.rint(guess), e) - _bins(truth, e)) for count, e in edges.items()}
    return Metrics(
        mae_tokens=float(np.mean(np.abs(guess - truth))),
        kendall_tau=float(kendalltau(guess, truth).statistic),
        bin_accuracy={count: float(np.mean(miss == 0)) for count, miss in misses.items()},
        near_accuracy={count: float(np.mean(miss <= 1)) for count, miss in misses.items()},
        distinct_bins={count: len(e) + 1 for count, e in edges.items()},
    )


def baselines(training: Sequence[Row], rows: Sequence[Row]) -> dict[str, list[float]]:
    """What needs no model: each baseline's predicted output tokens for the rows, by its name.

    constant : the median training answer, the best constant under L1. prompt length : a straight line in the prompt's
    characters, fitted to the training rows by least squares.
    """
    lengths = [row.output_tokens for row in training]
    line = np.polyfit([len(row.prompt) for row in training], lengths, deg=1)
    return {
        "constant": [float(np.median(lengths))] * len(rows),
        "prompt length": np.polyval(line, [len(row.prompt) for row in rows]).tolist(),
    }


def equal_mass_edges(lengths: Sequence[int], count: int) -> NDArray[np.float64]:
    """The inner edges of `count` bins that hold as many of the lengths each; fewer when lengths repeat too much."""
    quantiles = np.quantile(lengths, np.arange(1, count) / count)
    return np.unique(quantiles[quantiles > np.min(lengths)])


def _bins(lengths: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.searchsorted(edges, lengths, side="right")
