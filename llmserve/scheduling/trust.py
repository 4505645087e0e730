"""Does the prediction say anything about the answers? Judged by what came true, over a sliding window.

Bins help when what they go by (risk or median) puts answers into the right order; its scale does not matter. So the
judge is Spearman's rank correlation r of that score with real lengths. Without any relation r has mean 0 and standard
deviation 1/sqrt(n - 1): below LOST of these, ranking is no better than none and one bin serves; above FOUND, bins come
back.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bins.calibration import calibration_error, coverage
from bins.edges import equal_mass_edges, index_of
from llmserve.request import Request

Array = NDArray[np.float64]

LOST, FOUND = 2.0, 4.0  # standard deviations of r without any relation
LOOKS_PER_WINDOW = 8
WINDOW_MIN = 32  # answers: in fewer, even a perfect ranking is hardly beyond chance


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How predictions came true, over the window.

    answers            in the window
    rank_correlation   Spearman's, of what bins go by with the real length; nan when either is constant
    bin_accuracy       share predicted into their own one of `bins` equal-mass bins over the real lengths
    near_accuracy      ... or into one of its neighbours
    calibration_error  mean distance of the share of answers at or below each predicted quantile from the quantile's
                       level; nan when no prediction has quantiles
    """

    answers: int
    rank_correlation: float
    bin_accuracy: float
    near_accuracy: float
    calibration_error: float


class Trust:
    """Told each prediction with its answer; `trusted` says whether bins by prediction are worth having.

    window : answers looked back on, >= WINDOW_MIN. It starts trusting, and first judges when the window is half full.
    """

    def __init__(self, window: int) -> None:
        if window < WINDOW_MIN:
            raise ValueError(f"a window of {window} answers cannot be judged: at least {WINDOW_MIN} are needed")
        self.trusted = True
        self.rank_correlation = math.nan
        self._least = window // 2
        self._look_every = window // LOOKS_PER_WINDOW
        self._since_look = 0
        self._scores, self._predicted, self._actual = np.zeros((3, window))  # rings
        self._next = self._filled = 0
        self._quantiles: deque[tuple[tuple[float, ...], float]] = deque(maxlen=window)

    def observe(self, request: Request, score: float, output_tokens: float) -> bool:
        """Count the answer of a request with a prediction; True when this one changed `trusted`."""
        place = self._next
        self._scores[place], self._predicted[place] = score, request.predicted_tokens
        self._actual[place] = output_tokens
        self._next = (self._next + 1) % self._actual.size
        self._filled = min(self._filled + 1, self._actual.size)
        if len(request.quantiles) > 1:
            self._quantiles.append((request.quantiles, output_tokens))
        self._since_look += 1
        if self._since_look < self._look_every or self._filled < self._least:
            return False
        self._since_look = 0
        return self._look()

    def accuracy(self, bins: int) -> Accuracy:
        """Over the window as it is now."""
        if not self._filled:
            return Accuracy(0, math.nan, math.nan, math.nan, math.nan)
        predicted, actual = self._predicted[: self._filled], self._actual[: self._filled]
        edges = equal_mass_edges(actual, bins)
        miss = np.abs(index_of(edges, predicted) - index_of(edges, actual))
        return Accuracy(
            answers=self._filled,
            rank_correlation=self._spearman(),
            bin_accuracy=float(np.mean(miss == 0)),
            near_accuracy=float(np.mean(miss <= 1)),
            calibration_error=self._calibration_error(),
        )

    def _look(self) -> bool:
        self.rank_correlation = self._spearman()
        deviations = self.rank_correlation * math.sqrt(self._filled - 1)
        # nan compares as false: when all answers are alike, ranking is of no use.
        trusted = bool(deviations >= (LOST if self.trusted else FOUND))
        changed, self.trusted = trusted != self.trusted, trusted
        return changed

    def _spearman(self) -> float:
        return spearman(self._scores[: self._filled], self._actual[: self._filled])

    def _calibration_error(self) -> float:
        if not self._quantiles:
            return math.nan
        count = len(self._quantiles[-1][0])
        same = [(quantiles, tokens) for quantiles, tokens in self._quantiles if len(quantiles) == count]
        return calibration_error(coverage([each for each, _ in same], [tokens for _, tokens in same]))


def spearman(x: Array, y: Array) -> float:
    """Rank correlation in [-1, 1], ties sharing their mean rank; nan when x or y is constant."""
    ranks = [_ranks(x), _ranks(y)]
    centred = [each - each.mean() for each in ranks]
    scale = math.sqrt(float(centred[0] @ centred[0]) * float(centred[1] @ centred[1]))
    return float(centred[0] @ centred[1]) / scale if scale > 0 else math.nan


def _ranks(values: Array) -> Array:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Array = (last - (counts - 1) / 2)[place]
    return ranks
