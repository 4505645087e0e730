"""Prequential evaluation of the server's learner (Dawid 1984): each answer is forecast, then learnt.

The forecasts of a stream are an array (answers, LEVELS) of equally likely lengths in tokens, ascending. A row is nan
where nothing was known, as at the first answer. Such answers have no part in the scores.

Pure: no clock, no I/O, no randomness.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.dataset import Row
from predictor.evaluate import absolute_errors
from predictor.online import Forecast, OnlineLearner, bounded
from predictor.prediction import Prediction
from predictor.quantiles import LEVELS, MIDDLE
from predictor.ranking import kendall_tau

Forecasts = NDArray[np.float64]

RANGES = tuple(pairwise((0, 100, 300, 600, 1000, 2000, 4000, 8000)))
"""Ranges of answers that are scored, by the number of answers seen before."""
ANSWERS_MAX = RANGES[-1][1]
LOW, HIGH = 1, LEVELS - 2
"""Places of the quantiles 0.1 and 0.9, between which 80 % of the answers belong."""
NOTHING = (math.nan,) * LEVELS


def forecast_stream(
    learner: OnlineLearner,
    rows: Iterable[Row],
    predictions: Sequence[Prediction] | None = None,
    *,
    in_flight: int = 1,
) -> Forecasts:
    """(rows, LEVELS) forecasts of the rows' answers, each made when all earlier answers have been learnt.

    in_flight : at least 1; requests that a server answers at once. Answers are learnt in turn, so with 64 the last 63
    rows have not been learnt when a row is forecast.
    predictions : of a trained predictor; None: no predictor.
    A forecast is at most the row's max_tokens, as in a server.
    """
    made = []
    unanswered: deque[tuple[Row, Forecast]] = deque()
    for place, row in enumerate(rows):
        forecast = learner.forecast(row.prompt, None if predictions is None else predictions[place])
        unanswered.append((row, forecast))
        if len(unanswered) >= in_flight:
            answered, earlier = unanswered.popleft()
            learner.observe(earlier, answered.output_tokens, answered.capped)
        made.append(bounded(forecast.lengths, most=row.output_tokens_max) or NOTHING)
    return np.array(made).reshape(-1, LEVELS)


def scores(forecasts: Forecasts, rows: Sequence[Row]) -> dict[str, float | None]:
    """Scores of the forecasts of these rows; None where there is nothing to score.

    tau         Kendall's tau-b of the median with the length
    mae_tokens  mean absolute error of the median; see predictor.evaluate.absolute_errors for capped answers
    coverage80  share of the lengths between the quantiles 0.1 and 0.9, both included
    """
    known = ~np.isnan(forecasts[:, MIDDLE])
    forecasts = forecasts[known]
    actual = np.array([row.output_tokens for row in rows], float)[known]
    capped = np.array([row.capped for row in rows], bool)[known]
    if not actual.size:
        return {"tau": None, "mae_tokens": None, "coverage80": None}
    medians = forecasts[:, MIDDLE]
    tau = kendall_tau(medians, actual)
    return {
        "tau": None if math.isnan(tau) else round(tau, 4),
        "mae_tokens": round(float(absolute_errors(medians, actual, capped).mean()), 2),
        "coverage80": round(float(np.mean((forecasts[:, LOW] <= actual) & (actual <= forecasts[:, HIGH]))), 4),
    }


def scores_by_range(forecasts: Forecasts, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Scores of each of RANGES, as far as the rows go: the last range may end early."""
    return [
        {"from": first, "to": min(last, len(rows)), **scores(forecasts[first:last], rows[first:last])}
        for first, last in RANGES
        if first < len(rows)
    ]
