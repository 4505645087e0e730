"""The accuracy of predicted lengths against the real lengths, and the throughput that bins by the predictions gain.

A prediction is Q ascending, equally likely lengths: the quantiles at the levels (i + 0.5) / Q. Their median is the
point prediction; a point predictor has Q = 1.

Bins of accuracies are equal-mass over the *training* answers' lengths, as in Multi-Bin's appendix C.1 (Table 1), and
half-open: bin i holds the lengths in [edge i, edge i + 1).

The gain is for a saturated server: Multi-Bin's section 4 on a sample of lengths instead of a distribution. With an
endless backlog, each batch of B answers is drawn at random from one bin, and takes as long as its longest answer:

    M(S)  E[longest of B drawn from S] = sum_j l_(j) ((j/n)^B - ((j-1)/n)^B)    l_(1) <= ... <= l_(n) the lengths in S
    p_i   share of the answers in bin i
    gain  M(all answers) / sum_i p_i M(bin i)                                   throughput with bins / without
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bins.calibration import calibration_error, coverage, midpoints
from bins.edges import index_of
from bins.risk import risks
from predictor.ranking import kendall_tau

Array = NDArray[np.float64]
Bins = NDArray[np.intp]
Gains = dict[int, dict[int, float]]
"""By batch size, then by number of bins."""

BIN_COUNTS = (2, 4, 8)
GAIN_BIN_COUNTS = (2, 4, 8, 16, 32)
BATCH_SIZES = (8, 32, 128)
COMPARED_BINS, COMPARED_GAIN_BINS, COMPARED_BATCH_SIZE = 4, 8, 8


@dataclass(frozen=True, slots=True)
class Scores:
    """mae_tokens : mean absolute error of the point prediction. A capped answer is a lower bound, so its error is 0 if
    the prediction is longer.
    kendall_tau : tau-b in [-1, 1]; nan when predictions or lengths are constant.

    bin_accuracy, near_accuracy : by number of bins, the share of answers predicted into their own bin / into their own
    bin or a neighbour. distinct_bins : number of bins that can hold answers; smaller than the requested number when
    many answers have the same length, and then the accuracies are of that easier task.

    likely_accuracy, likely_near_accuracy : the same for the best choices from a predicted distribution: the likeliest
    bin / the likeliest three bins side by side. None for a point prediction.

    coverage : (Q,) share of answers at or below each predicted quantile, see `coverage`.  calibration_error : mean
    distance of the coverage from the levels. Both None for a point prediction.  pinball_tokens : mean pinball loss over
    answers and levels (for a point prediction: half of the mean absolute error with capped answers as they are).

    gains : of equal-mass bins by the point prediction.
    """

    mae_tokens: float
    kendall_tau: float
    bin_accuracy: dict[int, float]
    near_accuracy: dict[int, float]
    distinct_bins: dict[int, int]
    likely_accuracy: dict[int, float] | None
    likely_near_accuracy: dict[int, float] | None
    coverage: tuple[float, ...] | None
    calibration_error: float | None
    pinball_tokens: float
    gains: Gains

    def as_json(self) -> dict[str, Any]:
        """For a metrics file: plain numbers, rounded to the precision of a sample of some thousand answers."""
        shares, error = self.coverage, self.calibration_error
        return {
            "mae_tokens": round(self.mae_tokens, 2),
            "kendall_tau": None if np.isnan(self.kendall_tau) else round(self.kendall_tau, 4),
            "bin_accuracy": {str(k): round(share, 4) for k, share in self.bin_accuracy.items()},
            "near_accuracy": {str(k): round(share, 4) for k, share in self.near_accuracy.items()},
            "distinct_bins": {str(k): count for k, count in self.distinct_bins.items()},
            "likely_accuracy": _shares_as_json(self.likely_accuracy),
            "likely_near_accuracy": _shares_as_json(self.likely_near_accuracy),
            "coverage": None if shares is None else [round(share, 4) for share in shares],
            "calibration_error": None if error is None else round(error, 4),
            "pinball_tokens": round(self.pinball_tokens, 2),
            "gains": gains_as_json(self.gains),
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """value : on all answers.  low, high : 95 % interval over resamples of the answers."""

    value: float
    low: float
    high: float


def evaluate(
    quantiles: ArrayLike,
    actual: ArrayLike,
    training_lengths: ArrayLike,
    *,
    capped: ArrayLike | None = None,
    ceilings: ArrayLike | None = None,
) -> Scores:
    """Scores of the predictions.

    quantiles : (answers, Q) ascending, or (answers,), tokens.  actual : (answers,) output tokens, in the same order;
    at least one answer.  training_lengths : any number of output tokens, over which bins are equal-mass.
    capped : (answers,) bool, the answer was cut.  ceilings : (answers,) max_tokens, or nan for none; predictions are
    clipped to the ceilings as in serving. A capped answer needs a ceiling: without a ceiling its coverage and its
    pinball loss count as if the answer had ended there.
    Lengths are whole numbers, so predictions are rounded before they are put into bins.
    """
    q, truth = as_served(quantiles, ceilings), np.asarray(actual, float)
    assert truth.shape == (len(q),)
    assert truth.size > 0
    point = np.median(q, axis=1)
    edges = {count: equal_mass_edges(training_lengths, count) for count in BIN_COUNTS}
    misses = {count: np.abs(bins_of(point, e) - bins_of(truth, e)) for count, e in edges.items()}
    shares = coverage(q, truth) if q.shape[1] > 1 else None
    likely = {count: _likely_shares(q, truth, e) for count, e in edges.items()} if q.shape[1] > 1 else None
    return Scores(
        mae_tokens=float(np.mean(absolute_errors(point, truth, capped))),
        kendall_tau=kendall_tau(point, truth),
        bin_accuracy={count: float(np.mean(miss == 0)) for count, miss in misses.items()},
        near_accuracy={count: float(np.mean(miss <= 1)) for count, miss in misses.items()},
        distinct_bins={count: len(e) + 1 for count, e in edges.items()},
        likely_accuracy=None if likely is None else {count: exact for count, (exact, _) in likely.items()},
        likely_near_accuracy=None if likely is None else {count: near for count, (_, near) in likely.items()},
        coverage=None if shares is None else tuple(shares.tolist()),
        calibration_error=None if shares is None else calibration_error(shares),
        pinball_tokens=pinball_loss(q, truth),
        gains=gains_of(lambda k, _: equal_mass_bins(point, k), truth),
    )


# --- predictions ------------------------------------------------------------------------------------------------


def as_served(quantiles: ArrayLike, ceilings: ArrayLike | None) -> Array:
    """(answers, Q): the predictions, each limited to its answer's max_tokens (nan: no limit)."""
    q = np.asarray(quantiles, float)
    q = q[:, None] if q.ndim == 1 else q
    return q if ceilings is None else np.fmin(q, np.asarray(ceilings, float)[:, None])


def absolute_errors(point: Array, actual: Array, capped: ArrayLike | None) -> Array:
    """(answers,) tokens; 0 for a capped answer, which is at least `actual` long, with a longer prediction."""
    errors = np.abs(point - actual)
    return errors if capped is None else np.where(np.asarray(capped, bool) & (point > actual), 0.0, errors)


def pinball_loss(quantiles: Array, actual: Array) -> float:
    """Tokens, mean over answers and levels; its expectation is least for the true quantiles."""
    short = actual[:, None] - quantiles  # (answers, Q)
    level = midpoints(quantiles.shape[1])
    return float(np.mean(np.maximum(level * short, (level - 1) * short)))


# --- accuracies -------------------------------------------------------------------------------------------------


def equal_mass_edges(lengths: ArrayLike, count: int) -> Array:
    """The inner edges of `count` bins with equal numbers of lengths; fewer edges when lengths repeat too much."""
    quantiles = np.quantile(np.asarray(lengths, float), np.arange(1, count) / count)
    return np.unique(quantiles[quantiles > np.min(lengths)])


def bins_of(lengths: Array, edges: Array) -> Bins:
    """The bin of each rounded length: 0 .. len(edges)."""
    return index_of(edges, np.rint(lengths))


def bin_probabilities(quantiles: Array, edges: Array) -> Array:
    """(answers, bins): the predicted probability of each bin.

    quantiles : (answers, Q) ascending, Q > 1. The logarithm of the length is taken as uniform between two quantiles,
    and over half a step beyond the outermost quantiles. A bin begins with the first whole number not below its edge.
    """
    logs = np.log(quantiles)
    first, last = logs[:, :1] - (logs[:, 1:2] - logs[:, :1]) / 2, logs[:, -1:] + (logs[:, -1:] - logs[:, -2:-1]) / 2
    points = np.hstack([first, logs, last])
    levels = np.concatenate([[0.0], midpoints(quantiles.shape[1]), [1.0]])
    inner = np.log(np.ceil(edges) - 0.5)
    below = np.array([np.interp(inner, row, levels) for row in points])
    return np.diff(below, axis=1, prepend=0.0, append=1.0)


def _likely_shares(quantiles: Array, actual: Array, edges: Array) -> tuple[float, float]:
    """Shares of answers in the likeliest bin, and in the likeliest three neighbours."""
    probabilities = bin_probabilities(quantiles, edges)
    padded = np.pad(probabilities, ((0, 0), (1, 1)))
    three = padded[:, :-2] + probabilities + padded[:, 2:]
    truth = bins_of(actual, edges)
    near = np.abs(three.argmax(axis=1) - truth) <= 1
    return float(np.mean(probabilities.argmax(axis=1) == truth)), float(np.mean(near))


def _shares_as_json(shares: dict[int, float] | None) -> dict[str, float] | None:
    return None if shares is None else {str(k): round(share, 4) for k, share in shares.items()}


def confusion(quantiles: ArrayLike, actual: ArrayLike, edges: Array) -> NDArray[np.intp]:
    """(bins, bins) number of answers by their real bin (rows) and the bin of the point prediction (columns)."""
    counts = np.zeros((len(edges) + 1, len(edges) + 1), np.intp)
    point = np.median(as_served(quantiles, None), axis=1)
    np.add.at(counts, (bins_of(np.asarray(actual, float), edges), bins_of(point, edges)), 1)
    return counts


# --- gains ------------------------------------------------------------------------------------------------------


def expected_longest(lengths: ArrayLike, batch_size: int) -> float:
    """E[longest of `batch_size` lengths drawn at random, with replacement].  lengths : (n,), n >= 1, any order."""
    return float(risks(np.sort(np.asarray(lengths, float)), batch_size))


def saturated_gain(bins: ArrayLike, actual: ArrayLike, batch_size: int) -> float:
    """Throughput with these bins over throughput without, for full batches as long as their longest answers.

    bins : (answers,) int.  actual : (answers,) output tokens.
    The answers stand for their distribution. This underestimates the longest answer of a batch, and more so in a small
    bin than in the whole sample: gains are too large when bins hold few answers compared with a batch. The gain of
    random bins, whose true value is 1, shows how much too large.
    """
    index, lengths = np.asarray(bins), np.asarray(actual, float)
    longest = sum(
        np.count_nonzero(index == i) * expected_longest(lengths[index == i], batch_size) for i in np.unique(index)
    )
    return float(expected_longest(lengths, batch_size) * lengths.size / longest)


def equal_mass_bins(scores: ArrayLike, bins: int) -> Bins:
    """(answers,) bin of each answer: the answers in the order of their scores, cut into nearly equal parts.

    Equal scores are in a fixed random order, so that a constant makes random bins instead of bins by row order.
    """
    values = np.asarray(scores, float)
    order = np.lexsort((np.random.default_rng(0).permutation(values.size), values))
    parts = np.empty(values.size, np.intp)
    parts[order] = np.arange(values.size) * bins // values.size
    return parts


def gains_of(assign: Callable[[int, int], Bins], actual: ArrayLike) -> Gains:
    """Saturated gains of the bins of `assign(bins, batch_size)`.

    actual : (answers,) output tokens, in the order of the bins that `assign` returns.
    """
    return {
        size: {count: saturated_gain(assign(count, size), actual, size) for count in GAIN_BIN_COUNTS}
        for size in BATCH_SIZES
    }


def gains_as_json(gains: Gains) -> dict[str, dict[str, float]]:
    return {str(size): {str(k): round(gain, 4) for k, gain in by_count.items()} for size, by_count in gains.items()}


# --- two predictors ---------------------------------------------------------------------------------------------


def compare(
    first: ArrayLike,
    second: ArrayLike,
    actual: ArrayLike,
    training_lengths: ArrayLike,
    *,
    capped: ArrayLike | None = None,
    ceilings: ArrayLike | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Difference]:
    """`first` minus `second` in MAE, 4-bin accuracy and gains at 8 bins and B = 8, with paired bootstrap intervals.

    The gains are of bins by median and by risk, the default of a server. Arguments as for `evaluate`; both predict the
    same answers. Paired: both predictors are measured on the same answers of each resample. Percentile intervals.
    """
    truth = np.asarray(actual, float)
    served = [as_served(quantiles, ceilings) for quantiles in (first, second)]
    points = [np.median(quantiles, axis=1) for quantiles in served]
    scores = {"median": points, "risk": [risks(quantiles, COMPARED_BATCH_SIZE) for quantiles in served]}
    edges = equal_mass_edges(training_lengths, COMPARED_BINS)
    errors = np.subtract(*(absolute_errors(point, truth, capped) for point in points))  # (answers,)
    hits = np.subtract(*(1.0 * (bins_of(point, edges) == bins_of(truth, edges)) for point in points))  # (answers,)

    def gain(score: Array, rows: NDArray[np.intp]) -> float:
        return saturated_gain(equal_mass_bins(score[rows], COMPARED_GAIN_BINS), truth[rows], COMPARED_BATCH_SIZE)

    def differences(rows: NDArray[np.intp]) -> tuple[float, ...]:
        gains = (gain(score, rows) - gain(other, rows) for score, other in scores.values())
        return float(np.mean(errors[rows])), float(np.mean(hits[rows])), *gains

    rng = np.random.default_rng(seed)
    values = differences(np.arange(truth.size))
    drawn = [differences(rng.integers(truth.size, size=truth.size)) for _ in range(resamples)]
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0).tolist()  # each (statistics,)
    names = (
        "MAE, tokens",
        f"{COMPARED_BINS}-bin accuracy",
        *(f"gain at B={COMPARED_BATCH_SIZE}, {COMPARED_GAIN_BINS} bins by {name}" for name in scores),
    )
    return {name: Difference(*numbers) for name, *numbers in zip(names, values, low, high, strict=True)}
