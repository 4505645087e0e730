"""Predicted lengths of a simulation's requests: the real lengths, or lengths with the errors of a predictor.

    l_1 .. l_n  a sample of output lengths, over which bins are equal-mass (bins/edges.py)
    K           number of bins of the mistakes, which may differ from the scheduler's
    T           (K, K), T[i, j]: the probability that a request of bin i is predicted into bin j (rows sum to 1)

A mistake in bins (`neighbour`, `confusion`) draws the predicted bin from T. If that is the request's own bin, the
prediction is exact; otherwise the prediction is a length of the sample in that bin.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bins.edges import Edges, equal_mass_edges, index_of
from llmserve.errors import ConfigError
from llmserve.simulation.files import open_text, records

PREDICTIONS_HELP = (
    "oracle | none | lognormal:SIGMA (oracle times a lognormal error) | quantiles:SIGMA (the same, with quantiles of "
    "the error) | neighbour:K,P (of K equal-mass bins, each neighbour of the right bin with probability P) | "
    "confusion:FILE[:K] (bins confused as in a predictor's evaluation, or in a K x K matrix: real bins are rows) | "
    "residuals:FILE (errors of a predictor for answers of similar length: columns predicted_tokens and "
    "output_tokens) | predictor:FOLDER (a trained predictor's, for --prompts) | online:FILE[:COLUMN] (a server's "
    "without a trained predictor: FILE is the one of --prompts, and each answer is learnt when it ends)"
)
TRAINED = "predictor:"  # before the folder of a trained predictor
ONLINE = "online:"  # before a file of prompts
PREDICTED, ACTUAL = ("predicted_tokens", "predicted"), ("output_tokens", "actual")  # names that the columns may have
ALIKE_SHARE, ALIKE_LEAST = 0.05, 32  # share, and least number, of the residuals that count as of similar length

LEVELS = tuple([(number - 0.5) / 15 for number in range(1, 16)])  # levels of predicted quantiles, equally likely

Lengths = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predicted lengths of requests.

    medians    (count,) tokens, > 0
    quantiles  (count, Q) equally likely lengths of each request, ascending; None: only medians are predicted
    """

    medians: Lengths
    quantiles: NDArray[np.float64] | None = None

    @classmethod
    def of(cls, quantiles: ArrayLike) -> Predictions:
        """quantiles : (count, Q) as above; column Q // 2 is the median."""
        table = np.asarray(quantiles, dtype=float)
        return cls(table[:, table.shape[1] // 2], table)


def predict(
    text: str,
    lengths: Lengths,
    rng: np.random.Generator,
    *,
    sample: Lengths | None = None,
    edges: Edges | None = None,
) -> Predictions | None:
    """Predictions for requests of these lengths; None: no predictions.

    text : one of PREDICTIONS_HELP except predictor:FOLDER and online:FILE, which need prompts.  lengths : (count,)
    tokens.
    sample : similar lengths, over which the bins of mistakes are equal-mass (default: `lengths`).
    edges : edges of the bins of mistakes, used when they give the right number of bins.
    Raises ConfigError on another text, or a file that cannot be used.
    """
    kind, _, rest = text.partition(":")
    if text == "oracle":
        return Predictions(lengths.astype(float))
    if text == "none":
        return None
    if kind in ("lognormal", "quantiles"):
        return _scattered(_sigma(text, rest), lengths, rng, with_quantiles=kind == "quantiles")
    if kind == "residuals" and rest:
        return Predictions(_resampled(lengths, *read_residuals(rest), rng))
    if kind == "neighbour":
        mistakes = neighbour_mistakes(*_neighbour(text, rest))
    elif kind == "confusion" and rest:
        mistakes = read_confusion(rest)
    else:
        raise ConfigError(f"predictions {text!r} is not one of {PREDICTIONS_HELP}")
    return Predictions(_mistaken(lengths, mistakes, lengths if sample is None else sample, edges, rng))


# ---- errors of a known distribution -----------------------------------------------------------------------------


def _scattered(sigma: float, lengths: Lengths, rng: np.random.Generator, *, with_quantiles: bool) -> Predictions:
    """Medians with a lognormal error. with_quantiles : also quantiles at LEVELS, of the median times such an error."""
    medians = lengths * rng.lognormal(0.0, sigma, lengths.size)
    if not with_quantiles:
        return Predictions(medians)
    probit = NormalDist().inv_cdf
    spread = np.array([math.exp(sigma * probit(level)) for level in LEVELS])
    return Predictions(medians, medians[:, None] * spread)


def _sigma(text: str, rest: str) -> float:
    try:
        sigma = float(rest)
    except ValueError:
        sigma = math.nan
    if not 0 <= sigma < math.inf:
        raise ConfigError(f"predictions {text!r} is not one of {PREDICTIONS_HELP}")
    return sigma


# ---- mistakes in bins -------------------------------------------------------------------------------------------


def neighbour_mistakes(bins: int, probability: float) -> NDArray[np.float64]:
    """T of Multi-Bin's section 4.3: each neighbour of the right bin with this probability. The first and the last bin
    have one neighbour, and so fewer mistakes. bins : >= 1.  probability : in [0, 1/2].
    """
    beside = probability * (np.eye(bins, k=1) + np.eye(bins, k=-1))
    mistakes: NDArray[np.float64] = beside + np.diag(1.0 - beside.sum(axis=1))
    return mistakes


def _neighbour(text: str, rest: str) -> tuple[int, float]:
    try:
        bins, probability = rest.split(",")
        if int(bins) < 1 or not 0 <= float(probability) <= 0.5:
            raise ValueError
    except ValueError:
        raise ConfigError(f"predictions {text!r}: neighbour:K,P with K >= 1 and 0 <= P <= 0.5 is needed") from None
    return int(bins), float(probability)


def _mistaken(
    lengths: Lengths,
    mistakes: NDArray[np.float64],
    sample: Lengths,
    edges: Edges | None,
    rng: np.random.Generator,
) -> Lengths:
    """(count,) predictions with mistakes in bins, as the module describes. mistakes : T."""
    bins = len(mistakes)
    if edges is None or len(edges) != bins - 1:
        edges = equal_mass_edges(sample, bins)
    by_bin = np.split(np.sort(sample), np.searchsorted(np.sort(sample), edges))
    if len(edges) != bins - 1 or not all(part.size for part in by_bin):
        raise ConfigError(f"predictions: the lengths are too much alike for mistakes in {bins} bins")
    real = index_of(edges, lengths)
    # The first bin whose cumulated probability is above a uniform number; rounding must not exceed the last bin.
    predicted = (rng.random(lengths.size)[:, None] >= np.cumsum(mistakes, axis=1)[real][:, :-1]).sum(axis=1)
    medians = lengths.astype(float)
    for index in range(bins):
        wrong = (predicted == index) & (real != index)
        medians[wrong] = rng.choice(by_bin[index], size=int(wrong.sum()))
    return medians


# ---- errors of a real predictor ---------------------------------------------------------------------------------


def read_confusion(place: str) -> NDArray[np.float64]:
    """T of FILE[:K], counts or shares: rows are real bins, columns are predicted bins; each row is scaled to sum 1.

    JSON: the matrix, or an evaluation of `llmserve evaluate`, whose `confusion` has a matrix for each K. CSV:
    the matrix. Raises ConfigError naming the file.
    """
    name, _, bins = place.rpartition(":") if place.rpartition(":")[2].isdigit() else (place, "", "")
    with open_text(name, "confusion file") as file:
        try:
            text = file.read()
            content = json.loads(text) if text.lstrip()[:1] in ("{", "[") else _csv_numbers(text)
            counts = np.array(_matrix(content, bins), dtype=float)
        except (OSError, EOFError, TypeError, ValueError) as error:
            raise ConfigError(f"the confusion file {name!r}: {error}") from error
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or (bins and len(counts) != int(bins)):
        raise ConfigError(f"the confusion file {name!r} must hold a matrix of {bins or 'K'} x {bins or 'K'} numbers")
    if not (np.isfinite(counts).all() and (counts >= 0).all() and (counts.sum(axis=1) > 0).all()):
        raise ConfigError(f"the confusion file {name!r} must hold counts or shares, and a positive sum in every row")
    shares: NDArray[np.float64] = counts / counts.sum(axis=1, keepdims=True)
    return shares


def _csv_numbers(text: str) -> list[list[float]]:
    return [[float(cell) for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def _matrix(content: Any, bins: str) -> Any:
    """The matrix of this number of bins in the content of a file. bins : "" for the only matrix. Raises ValueError."""
    if not isinstance(content, Mapping):
        return content
    by_bins = content.get("confusion", content)
    if not isinstance(by_bins, Mapping):
        return by_bins
    if bins in by_bins:
        return by_bins[bins]
    if len(by_bins) != 1 or bins:
        raise ValueError(f"choose one of {', '.join(by_bins)} bins: confusion:FILE:K")
    return next(iter(by_bins.values()))


def read_residuals(name: str) -> tuple[Lengths, NDArray[np.float64]]:
    """(rows,) actual lengths, ascending, and (rows,) predicted over actual of the same answers.

    name : a CSV file or JSON lines with the columns PREDICTED and ACTUAL, by any of their names. Raises ConfigError.
    """
    pairs = [(_positive(row, PREDICTED, name, line), _positive(row, ACTUAL, name, line)) for line, row in _rows(name)]
    if not pairs:
        raise ConfigError(f"the residuals file {name!r} has no rows")
    predicted, actual = np.array(pairs).T
    order = np.argsort(actual, kind="stable")
    return actual[order], (predicted / actual)[order]


def _rows(name: str) -> Sequence[tuple[int, Mapping[str, Any]]]:
    rows = list(records(name, "residuals file"))
    for line, row in rows:
        if not isinstance(row, Mapping):
            raise ConfigError(f"the residuals file {name!r}, line {line}: not a row with the names of the columns")
    return rows


def _positive(row: Mapping[str, Any], columns: tuple[str, ...], name: str, line: int) -> float:
    value = next((row[column] for column in columns if row.get(column) is not None), None)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"the residuals file {name!r}, line {line}: {columns[0]} must be above 0, not {value!r}")
    return number


def _resampled(lengths: Lengths, actual: Lengths, ratios: NDArray[np.float64], rng: np.random.Generator) -> Lengths:
    """Each length times the ratio of an answer, drawn from the answers that are nearest in rank.

    actual : (rows,) ascending.  ratios : (rows,) of the same answers.
    """
    alike = min(actual.size, max(ALIKE_LEAST, round(ALIKE_SHARE * actual.size)))
    first = np.clip(np.searchsorted(actual, lengths) - alike // 2, 0, actual.size - alike)
    medians: Lengths = lengths * ratios[first + rng.integers(alike, size=lengths.size)]
    return medians
