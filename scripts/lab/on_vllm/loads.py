"""The requests of a round: prompts, lengths, predictions of them, and arrivals."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

KENDALL_TAU = 0.63  # the trained predictor on people's prompts: docs/results/prediction.md

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ServiceTime:
    """Seconds that the idle engine takes for an answer of n tokens: start_s + token_s * n."""

    start_s: float
    token_s: float

    def __call__(self, tokens: Floats | Ints) -> Floats:
        return self.start_s + self.token_s * np.asarray(tokens, float)

    @classmethod
    def fitted(cls, tokens: Sequence[int], seconds: Sequence[float]) -> ServiceTime:
        """Least squares of relative errors: slow-downs of short answers depend on small times."""
        slope, start = np.polyfit(tokens, seconds, deg=1, w=1 / np.asarray(seconds))
        return cls(max(0.0, float(start)), float(slope))


@dataclass(frozen=True)
class Load:
    """The requests of a round. Arrays by request, in the order of arrival.

    told : kind of prediction -> predicted output tokens, >= 1
    """

    prompts: list[str]
    tokens: Ints
    arrivals_s: Floats
    told: Mapping[str, Ints]

    @property
    def taus(self) -> dict[str, float]:
        """Kendall's tau of each kind of prediction that was drawn."""
        return {kind: float(kendalltau(values, self.tokens).statistic) for kind, values in self.told.items()}


def error_sigma(tokens: Ints, tau: float = KENDALL_TAU, *, seed: int = 0) -> float:
    """Standard deviation of the lognormal error with which lengths are predicted with this Kendall's tau."""
    sample = np.tile(tokens, max(1, 4000 // tokens.size))
    errors = np.random.default_rng(seed).standard_normal(sample.size)

    def reached(sigma: float) -> float:
        return float(kendalltau(np.log(sample) + sigma * errors, sample).statistic)

    low, high = 0.0, 20.0  # reached() falls as sigma grows
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) > tau else (low, middle)
    return (low + high) / 2


def predictions(tokens: Ints, rng: np.random.Generator) -> dict[str, Ints]:
    """One draw of every kind, in whole tokens: what vLLM's priorities can say, llmserve is told too."""
    erred = tokens * np.exp(error_sigma(tokens) * rng.standard_normal(tokens.size))
    return {"oracle": tokens, "predicted": np.maximum(1, np.rint(erred)).astype(int), "random": rng.permutation(tokens)}


def poisson_arrivals_s(count: int, rate_per_s: float, rng: np.random.Generator) -> Floats:
    """A Poisson process, given that exactly `count` requests arrive in count / rate seconds: its load is exact."""
    return np.sort(rng.uniform(0.0, count / rate_per_s, count))


def nearest_indices(wanted: Floats, tokens: Ints, rng: np.random.Generator) -> Ints:
    """For each wanted length the index of a prompt of nearest length, any of those that are equally near."""
    lengths = np.unique(tokens)
    nearest = lengths[np.argmin(np.abs(wanted[:, None] - lengths), axis=1)]  # (wanted, lengths)
    return np.array([rng.choice(np.flatnonzero(tokens == length)) for length in nearest])


def read_trace(path: Path) -> tuple[Floats, Floats]:
    """arrival_s and output_tokens of a trace's rows, sorted by arrival."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    rows = [(float(row["arrival_s"]), float(row["output_tokens"])) for row in csv.DictReader(text.splitlines())]
    arrivals_s, tokens = np.array(sorted(rows)).T
    return arrivals_s, tokens
