"""Whether predictions rank answers, judged by the answers of a sliding window.

Bins help when the score (risk or median) ranks answers correctly; the scale does not matter. So trust goes by
Spearman's rank correlation r of the score with real lengths. Without any relation, r has mean 0 and standard deviation
1/sqrt(n - 1): below LOST standard deviations one bin serves, for the ranking is useless; from FOUND on, bins return.
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
CHECKS_PER_WINDOW = 8
WINDOW_MIN = 32  # answers: with fewer, even a perfect ranking hardly differs from chance


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of the predictions in the window.

    answers            number of answers in the window
    rank_correlation   Spearman's, of the bins' score with the real length; nan when either is constant
    bin_accuracy       share of answers predicted into their true bin, of `bins` equal-mass bins over the real lengths
    near_accuracy      ... or into a neighbour of that bin
    calibration_error  mean distance of the share of answers at or below each predicted quantile from the quantile's
                       level; nan when no prediction has quantiles
    """

    answers: int
    rank_correlation: float
    bin_accuracy: float
    near_accuracy: float
    calibration_error: float


class Trust:
    """The decision from answers whether bins by prediction are worth having (`trusted`).

    window : last answers to judge by, >= WINDOW_MIN. Predictions are trusted at the start; the first check needs half a
    window.
    """

    def __init__(self, window: int) -> None:
        if window < WINDOW_MIN:
            raise ValueError(f"a window of {window} answers cannot be judged: at least {WINDOW_MIN} are needed")
        self.trusted = True
        self.rank_correlation = math.nan
        self._least = window // 2
        self._check_every = window // CHECKS_PER_WINDOW
        self._since_check = 0
        self._window = window
        self._new: list[tuple[float, Request, float]] = []  # answers that the arrays below do not hold yet
        self._scores, self._predicted, self._actual = np.zeros((3, 0))  # of the window, in order of the answers
        self._quantiles: deque[tuple[tuple[float, ...], float]] = deque(maxlen=window)

    def observe(self, request: Request, score: float, output_tokens: float) -> bool:
        """Count the answer of a request with a prediction. True when this answer changed `trusted`."""
        self._new.append((score, request, output_tokens))
        self._since_check += 1
        if self._since_check < self._check_every:
            return False
        self._since_check = 0
        self._take_in()
        return self._actual.size >= self._least and self._check()

    def _take_in(self) -> None:
        """Add the new answers to the arrays, all at once: one by one would cost most of the time spent on an answer."""
        scores, requests, tokens = zip(*self._new, strict=True)
        new = np.array([scores, [request.predicted_tokens for request in requests], tokens], dtype=float)
        whole = np.concatenate([[self._scores, self._predicted, self._actual], new], axis=1)
        self._scores, self._predicted, self._actual = whole[:, -self._window :]
        self._quantiles.extend([(item.quantiles, size) for _, item, size in self._new if len(item.quantiles) > 1])
        self._new = []

    def accuracy(self, bins: int) -> Accuracy:
        """Accuracy over the present window."""
        if self._new:
            self._take_in()
        predicted, actual = self._predicted, self._actual
        if not actual.size:
            return Accuracy(0, math.nan, math.nan, math.nan, math.nan)
        edges = equal_mass_edges(actual, bins)
        miss = np.abs(index_of(edges, predicted) - index_of(edges, actual))
        return Accuracy(
            answers=actual.size,
            rank_correlation=spearman(self._scores, actual),
            bin_accuracy=float(np.mean(miss == 0)),
            near_accuracy=float(np.mean(miss <= 1)),
            calibration_error=self._calibration_error(),
        )

    def _check(self) -> bool:
        """Set `trusted` by the rank correlation. True when `trusted` changed."""
        self.rank_correlation = spearman(self._scores, self._actual)
        deviations = self.rank_correlation * math.sqrt(self._actual.size - 1)
        # nan compares as false: when all answers are equal, ranking is of no use.
        trusted = bool(deviations >= (LOST if self.trusted else FOUND))
        changed, self.trusted = trusted != self.trusted, trusted
        return changed

    def _calibration_error(self) -> float:
        if not self._quantiles:
            return math.nan
        count = len(self._quantiles[-1][0])
        same = [(quantiles, tokens) for quantiles, tokens in self._quantiles if len(quantiles) == count]
        return calibration_error(coverage([quantiles for quantiles, _ in same], [tokens for _, tokens in same]))


def spearman(x: Array, y: Array) -> float:
    """Rank correlation in [-1, 1], ties sharing their mean rank; nan when x or y is constant."""
    middle = (x.size - 1) / 2
    a, b = _ranks(x) - middle, _ranks(y) - middle
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else math.nan


def _ranks(values: Array) -> Array:
    order = values.argsort()
    ascending = values[order]
    ranks = np.empty(values.size)
    ranks[order] = np.arange(values.size)
    differs = ascending[1:] != ascending[:-1]
    if not differs.all():
        bounds = np.concatenate([[0], np.flatnonzero(differs) + 1, [values.size]])  # where each run of ties begins
        ranks[order] = np.repeat((bounds[:-1] + bounds[1:] - 1) / 2, np.diff(bounds))
    return ranks
