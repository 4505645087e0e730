"""The length of an answer from the words of its prompt, learnt while serving.

    x    the prompt's features (text_features.py)
    z    log(tokens + SOFT): differences among the shortest answers count less than their logarithms say
    b    the level of the model: a mean of its latest z - w x
    w x + b   the forecast of z

The weights w are a ridge regression of z - b on x over the latest answers, solved in its dual (Shalev-Shwartz and Zhang
2013): w is the sum of a_i x_i over the answers, and a visit of answer i sets a_i to its best value, given the others. Each
answer is visited when it comes, and VISITS earlier answers with it, in turn. So a few hundred answers are used as well as
by a regression over all of them, and there is no learning rate. Three kinds of answers only bound their a_i:

    capped        a_i >= 0: the full length is longer, so the answer can only raise forecasts
    absurd        |a_i| is at most that of an error of ERROR_MAX (Huber's loss)
    of a sender who sends more than all others together: counts as if it sent as many

The answers that leave the window keep their part of w. The spread of the forecasts is that of their latest errors, per
model, by `recalibration`.

Pure: no clock, no randomness but the order of visits, which is fixed. Not thread-safe.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bins.calibration import midpoints
from predictor.memory import RecentlyUsed
from predictor.prompt import Prompt
from predictor.quantiles import LENGTH_MAX, LEVELS, Logs
from predictor.recalibration import Recalibration
from predictor.text_features import BITS, Features, TextFeatures

SOFT = 30.0
"""Tokens."""
RIDGE = 2.0
WINDOW = 2000
"""Answers that are visited again."""
VISITS = 10
ERROR_MAX = 1.5
LEVEL_RATE = 0.02
"""Of the latest answer in a model's level: a level follows a change within some 100 answers."""
LEAST = 4
"""Answers before the first forecast."""
SENDERS_MAX = 1000
SHARE_RATE = 0.002
CORRELATION_RATE = 0.003
CORRELATED, WEIGHT_MIN, HEARD = 0.1, 0.02, 0.1
SMALL, JUDGED = 0.3, 100
ALONE = 0.98
"""A sender with a greater share has nobody to outweigh."""
KEPT = 0.997
"""Weight of an answer in a mixture, relative to the next answer."""
ERRORS = 256
"""Latest errors of a model that give the spread."""
_STEP = 7919  # a prime: the visits go through the window in an order unlike that of the answers
_RIDGES = np.diag([0.1, 0.3, 0.3])
_NORMAL = [NormalDist().inv_cdf(float(p)) for p in midpoints(LEVELS)]


class Mixture:
    """Forecasts from a text's forecast and a prediction: a ridge regression on both over about the latest 300 answers.

    It begins as the prediction alone.
    """

    def __init__(self) -> None:
        self._products = _RIDGES.copy()  # of the inputs with each other; at first the ridge alone
        self._errors = np.zeros(3)  # products of the inputs with the predictions' errors
        self._weights = [0.0, 0.0, 0.0]
        self._centre: tuple[float, float] | None = None

    def mixed(self, text: float, predicted: float) -> float:
        """All as z."""
        if self._centre is None:
            return predicted
        level, own, other = self._weights
        return predicted + level + own * (text - self._centre[0]) + other * (predicted - self._centre[1])

    def learn(self, text: float, predicted: float, actual: float, capped: bool) -> None:
        self._centre = self._centre or (text, predicted)
        mixed = self.mixed(text, predicted)
        error = mixed + _bounded(actual - mixed, capped) - predicted
        inputs = np.array([1.0, text - self._centre[0], predicted - self._centre[1]])
        self._products *= KEPT
        self._products += np.outer(inputs, inputs) + (1 - KEPT) * _RIDGES
        self._errors *= KEPT
        self._errors += error * inputs
        self._weights = np.linalg.solve(self._products, self._errors).tolist()


@dataclass(slots=True)
class Level:
    value: float
    count: int = 0


class Sender:
    """What the answers of one sender count: little while its lengths do not follow the forecasts.

    Nonsense cannot be forecast. A sender of nonsense is known by the correlation of its lengths with their forecasts, which
    is near zero. Until a sender with a large share of the answers has shown a correlation, its answers count little.

    share   of the latest answers, when answer number `place` came
    weight  of an answer, in (0, 1]
    """

    __slots__ = ("_count", "_moments", "_place", "_share", "weight")

    def __init__(self) -> None:
        self._share, self._place, self._count = 0.0, 0, 0
        self._moments = [0.0] * 5  # means of z and of its forecast, their variances and covariance
        self.weight = 1.0

    def learn(self, actual: float, forecast: float, place: int) -> None:
        """actual, forecast : as z.  place : number of answers before."""
        self._share = self._share * (1 - SHARE_RATE) ** (place - self._place) + SHARE_RATE
        self._place = place
        self._count += 1
        rate = max(1 / self._count, CORRELATION_RATE)
        mean, mean_forecast, variance, variance_forecast, covariance = self._moments
        error, error_forecast = actual - mean, forecast - mean_forecast
        self._moments = [
            mean + rate * error,
            mean_forecast + rate * error_forecast,
            (1 - rate) * (variance + rate * error * error),
            (1 - rate) * (variance_forecast + rate * error_forecast * error_forecast),
            (1 - rate) * (covariance + rate * error * error_forecast),
        ]
        share = self._share / (1 - (1 - SHARE_RATE) ** (place + 1))
        if share > ALONE or (share < SMALL and self._count < JUDGED):
            self.weight = 1.0
            return
        product = self._moments[2] * self._moments[3]
        correlation = self._moments[4] / math.sqrt(product) if product > 0 else 0.0
        shown = correlation - 1 / math.sqrt(min(self._count, 1 / CORRELATION_RATE))
        self.weight = min(max(shown / CORRELATED, WEIGHT_MIN), 1.0)


class Example(NamedTuple):
    """An answer in the window."""

    indices: NDArray[np.int64]
    values: NDArray[np.float32]
    square: float  # x x
    target: float
    capped: bool
    sender: Sender


@dataclass(frozen=True, slots=True)
class TextForecast:
    """text : w x + b.  middle : the same, or its mixture with a prediction.  logs : quantiles of z around `middle`, before
    their correction.  width : theirs.
    """

    features: Features
    text: float
    predicted: float | None
    middle: float
    logs: tuple[float, ...]
    width: float


class TextLearner:
    """Learns from answers to texts.

    secret      key of the words' hashes, at most 64 bytes
    models_max  models with a level and a spread of their own
    """

    def __init__(self, secret: bytes, models_max: int) -> None:
        self._reader = TextFeatures(secret)
        self._weights = np.zeros(1 << BITS, dtype=np.float32)
        self._scratch = np.zeros(1 << BITS, dtype=np.float32)
        self._examples: list[Example] = []
        self._duals: list[float] = []  # a_i
        self._count = 0
        self._visited = 0
        self._answers = 0
        self._start = 0.0  # the level of a new model
        self._error = 0.5  # mean absolute error
        self._levels = RecentlyUsed[str, Level](models_max, lambda: Level(self._start))
        self._mixtures = RecentlyUsed[str, Mixture](models_max, Mixture)
        self._senders = RecentlyUsed[str, Sender](SENDERS_MAX, Sender)
        self._recalibrations = RecentlyUsed[tuple[str, bool], Recalibration](models_max, lambda: Recalibration(ERRORS))

    def read(self, prompt: Prompt) -> Features:
        return self._reader.read(prompt)

    def forecast(self, model: str, features: Features, predicted: float | None) -> TextForecast:
        """predicted : a trained predictor's median for the prompt, the logarithm of tokens."""
        level = self._levels.get(model)
        text = float(self._weights.take(features.indices).dot(features.values))
        text += level.value if level else self._start
        middle = text
        prediction = None if predicted is None else _soft(predicted)
        if prediction is not None:
            middle = (self._mixtures.get(model) or Mixture()).mixed(text, prediction)
        width = 1.25 * self._error
        logs = tuple([middle + width * normal for normal in _NORMAL])
        return TextForecast(features, text, prediction, middle, logs, width)

    def quantiles(self, model: str, forecast: TextForecast) -> Logs | None:
        """LEVELS quantiles of the logarithm of the length; None before the first answers."""
        if self._count < LEAST:
            return None
        recalibration = self._recalibrations.get((model, forecast.predicted is not None))
        corrected = recalibration.corrected(forecast.logs, forecast.width) if recalibration else forecast.logs
        return tuple([math.log(min(max(math.exp(z) - SOFT, 1.0), LENGTH_MAX)) for z in corrected])

    def learn(self, model: str, sender: str, forecast: TextForecast, actual: float, capped: bool, spread: bool) -> bool:
        """Learn the logarithm of a real length, or, if capped, of a lower bound.

        spread : whether the error of the forecast counts in the spread of the model's forecasts.
        """
        z = _soft(actual)
        error = _bounded(z - forecast.text, capped)
        if not self._count:
            self._start = z
        level = self._levels.used(model)
        level.count += 1
        target = z - level.value
        teacher = self._senders.used(sender)
        teacher.learn(z, forecast.middle, self._answers)
        self._answers += 1
        level.value += teacher.weight * error * max(LEVEL_RATE, 1 / (level.count + 4))
        self._start += 0.01 * (level.value - self._start)
        if teacher.weight >= HEARD or not self._answers % 10:
            self._add(forecast.features, target, capped, teacher)
        if forecast.predicted is not None:
            self._mixtures.used(model).learn(forecast.text, forecast.predicted, z, capped)
        if spread and teacher.weight >= HEARD:
            self._error += max(0.01, 1 / (self._count + 4)) * (abs(error) - self._error)
            recalibration = self._recalibrations.used((model, forecast.predicted is not None))
            recalibration.learn(forecast.logs, forecast.width, z, capped)
        return teacher.weight >= HEARD

    def _add(self, features: Features, target: float, capped: bool, sender: Sender) -> None:
        """Put an answer into the window, and visit it and VISITS others."""
        place = self._count % WINDOW
        self._count += 1
        example = Example(*features, self._square(features), target, capped, sender)
        if place == len(self._examples):
            self._examples.append(example)
            self._duals.append(0.0)
        else:
            self._examples[place], self._duals[place] = example, 0.0
        size = len(self._examples)
        first = self._visited + 1
        self._visited += min(VISITS, size)
        self._visit([place, *[number * _STEP % size for number in range(first, self._visited + 1)]])

    def _square(self, features: Features) -> float:
        """x x; an index may be there twice."""
        indices, values = features
        self._scratch[indices] = 0.0
        np.add.at(self._scratch, indices, values)
        return float(self._scratch.take(indices).dot(values))

    def _visit(self, places: list[int]) -> None:
        weights, duals, add_at = self._weights, self._duals, np.add.at
        for place in places:
            indices, values, square, target, capped, sender = self._examples[place]
            dual, give = duals[place], RIDGE / sender.weight
            high = ERROR_MAX / give
            error = target - float(weights.take(indices).dot(values)) - give * dual
            best = min(max(dual + error / (square + give), 0.0 if capped else -high), high)
            if best != dual:
                add_at(weights, indices, (best - dual) * values)
                duals[place] = best


def _soft(log: float) -> float:
    """z of the logarithm of a length."""
    return math.log(math.exp(log) + SOFT)


def _bounded(error: float, capped: bool) -> float:
    return min(max(error, 0.0 if capped else -ERROR_MAX), ERROR_MAX)
