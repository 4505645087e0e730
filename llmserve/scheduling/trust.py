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
        self._window = window
        self._new: list[tuple[float, Request, float]] = []  # since the arrays below were made
        self._scores, self._predicted, self._actual = np.zeros((3, 0))  # of the window, in order of the answers
        self._quantiles: deque[tuple[tuple[float, ...], float]] = deque(maxlen=window)

    def observe(self, request: Request, score: float, output_tokens: float) -> bool:
        """Count the answer of a request with a prediction; True when this one changed `trusted`."""
        self._new.append((score, request, output_tokens))
        self._since_look += 1
        if self._since_look < self._look_every:
            return False
        self._since_look = 0
        self._take_in()
        return self._actual.size >= self._least and self._look()

    def _take_in(self) -> None:
        """What is new into the arrays, all at once: filling them one by one would cost most of an answer's time."""
        scores, requests, tokens = zip(*self._new, strict=True)
        new = np.array([scores, [request.predicted_tokens for request in requests], tokens], dtype=float)
        whole = np.concatenate([[self._scores, self._predicted, self._actual], new], axis=1)
        self._scores, self._predicted, self._actual = whole[:, -self._window :]
        self._quantiles.extend([(each.quantiles, size) for _, each, size in self._new if len(each.quantiles) > 1])
        self._new = []

    def accuracy(self, bins: int) -> Accuracy:
        """Over the window as it is now."""
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

    def _look(self) -> bool:
        self.rank_correlation = spearman(self._scores, self._actual)
        deviations = self.rank_correlation * math.sqrt(self._actual.size - 1)
        # nan compares as false: when all answers are alike, ranking is of no use.
        trusted = bool(deviations >= (LOST if self.trusted else FOUND))
        changed, self.trusted = trusted != self.trusted, trusted
        return changed

    def _calibration_error(self) -> float:
        if not self._quantiles:
            return math.nan
        count = len(self._quantiles[-1][0])
        same = [(quantiles, tokens) for quantiles, tokens in self._quantiles if len(quantiles) == count]
        return calibration_error(coverage([each for each, _ in same], [tokens for _, tokens in same]))


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
        bounds = np.concatenate([[0], np.flatnonzero(differs) + 1, [values.size]])  # of each run of ties
        ranks[order] = np.repeat((bounds[:-1] + bounds[1:] - 1) / 2, np.diff(bounds))
    return ranks
