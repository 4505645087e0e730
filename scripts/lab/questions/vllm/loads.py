"""The load of a round: prompts, answer lengths, predictions of the lengths, and arrivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

KENDALL_TAU = 0.63  # of the trained predictor on people's prompts: docs/results/prediction.md

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ServiceTime:
    """Seconds of an answer of n tokens on the idle engine: start_s + token_s * n."""

    start_s: float
    token_s: float

    def __call__(self, tokens: Floats | Ints) -> Floats:
        return self.start_s + self.token_s * np.asarray(tokens, float)

    @classmethod
    def fitted(cls, tokens: Sequence[int], seconds: Sequence[float]) -> ServiceTime:
        """Fit by least squares of relative errors, because slow-downs of short answers depend on small times."""
        slope, start = np.polyfit(tokens, seconds, deg=1, w=1 / np.asarray(seconds))
        return cls(max(0.0, float(start)), float(slope))


@dataclass(frozen=True)
class Load:
    """The requests of a round. Arrays by request, in the order of arrival.

    predictions : kind -> predicted output tokens, >= 1
    """

    prompts: list[str]
    tokens: Ints
    arrivals_s: Floats
    predictions: Mapping[str, Ints]

    @property
    def taus(self) -> dict[str, float]:
        """Kendall's tau of each kind of prediction."""
        return {kind: float(kendalltau(values, self.tokens).statistic) for kind, values in self.predictions.items()}


def error_sigma(tokens: Ints, tau: float = KENDALL_TAU, *, seed: int = 0) -> float:
    """Sigma of the lognormal error with which predictions have this Kendall's tau."""
    sample = np.tile(tokens, max(1, 4000 // tokens.size))
    errors = np.random.default_rng(seed).standard_normal(sample.size)

    def reached(sigma: float) -> float:
        return float(kendalltau(np.log(sample) + sigma * errors, sample).statistic)

    low, high = 0.0, 20.0  # reached() falls as sigma grows
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) > tau else (low, middle)
    return (low + high) / 2


def draw_predictions(tokens: Ints, rng: np.random.Generator) -> dict[str, Ints]:
    """Predictions of every kind, in whole tokens, because vLLM's priorities are whole numbers."""
    erred = tokens * np.exp(error_sigma(tokens) * rng.standard_normal(tokens.size))
    return {"oracle": tokens, "predicted": np.maximum(1, np.rint(erred)).astype(int), "random": rng.permutation(tokens)}


def poisson_arrivals_s(count: int, rate_per_s: float, rng: np.random.Generator) -> Floats:
    """A Poisson process under the condition that `count` requests arrive in count / rate seconds: the load is exact."""
    return np.sort(rng.uniform(0.0, count / rate_per_s, count))


def nearest_indices(targets: Floats, tokens: Ints, rng: np.random.Generator) -> Ints:
    """For each target length the index of a prompt with the nearest length, at random among equally near prompts."""
    lengths = np.unique(tokens)
    nearest = lengths[np.argmin(np.abs(targets[:, None] - lengths), axis=1)]  # (targets, lengths)
    return np.array([rng.choice(np.flatnonzero(tokens == length)) for length in nearest])
