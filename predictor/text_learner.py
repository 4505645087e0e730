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

import numpy as np

from bins.calibration import midpoints
from predictor.memory import RecentlyUsed
from predictor.prompt import Prompt
from predictor.quantiles import LENGTH_MAX, LEVELS, Logs
from predictor.recalibration import Recalibration
from predictor.text_features import BITS, Features, TextFeatures

SOFT = 20.0
"""Tokens."""
RIDGE = 3.0
WINDOW = 2000
"""Answers that are visited again."""
VISITS = 12
ERROR_MAX = 1.5
LEVEL_RATE = 0.02
"""Of the latest answer in a model's level: a level follows a change within some 100 answers."""
LEAST = 4
"""Answers before the first forecast."""
ERRORS = 256
"""Latest errors of a model that give the spread."""
_STEP = 7919  # a prime: the visits go through the window in an order unlike that of the answers
_NORMAL = [NormalDist().inv_cdf(float(p)) for p in midpoints(LEVELS)]


@dataclass(slots=True)
class Example:
    """An answer in the window. give : RIDGE over the answer's weight.  dual : a_i, within low and high."""

    features: Features
    square: float  # x x
    target: float
    give: float
    dual: float
    low: float
    high: float


@dataclass(slots=True)
class Level:
    value: float
    count: int = 0


@dataclass(frozen=True, slots=True)
class TextForecast:
    """middle : w x + b.  logs : LEVELS quantiles of z before their correction, around `middle`.  width : their width."""

    features: Features
    middle: float
    logs: tuple[float, ...]
    width: float


class TextLearner:
    """Learns from answers to texts. models_max : models with a level and a spread of their own."""

    def __init__(self, secret: bytes, models_max: int) -> None:
        self._reader = TextFeatures(secret)
        self._weights = np.zeros(1 << BITS, dtype=np.float32)
        self._scratch = np.zeros(1 << BITS, dtype=np.float32)
        self._examples: list[Example] = []
        self._count = 0
        self._visited = 0
        self._start = 0.0  # the level of a new model
        self._levels = RecentlyUsed[str, Level](models_max, lambda: Level(self._start))
        self._spread = 0.5  # mean absolute error
        self._recalibrations = RecentlyUsed[str, Recalibration](models_max, lambda: Recalibration(ERRORS))

    def forecast(self, prompt: Prompt) -> TextForecast:
        return self.again(prompt.model, self._reader.read(prompt))

    def again(self, model: str, features: Features) -> TextForecast:
        """The forecast for the features of an earlier forecast, by what is known now."""
        level = self._levels.get(model)
        middle = float(self._weights.take(features.indices).dot(features.values))
        middle += level.value if level else self._start
        width = 1.25 * self._spread
        return TextForecast(features, middle, tuple([middle + width * normal for normal in _NORMAL]), width)

    def quantiles(self, model: str, forecast: TextForecast) -> Logs | None:
        """LEVELS quantiles of the logarithm of the length; None before the first answers."""
        if self._count < LEAST:
            return None
        recalibration = self._recalibrations.get(model)
        corrected = recalibration.corrected(forecast.logs, forecast.width) if recalibration else forecast.logs
        return tuple([math.log(min(max(math.exp(z) - SOFT, 1.0), LENGTH_MAX)) for z in corrected])

    def learn(self, model: str, forecast: TextForecast, output_tokens: float, capped: bool, spread: bool) -> None:
        """Learn the length of an answer.

        spread : whether the error of the forecast counts in the spread of this model's forecasts.
        """
        z = math.log(output_tokens + SOFT)
        error = z - forecast.middle
        if capped:
            error = max(error, 0.0)
        if not self._count:
            self._start = z
        self._count += 1
        level = self._levels.used(model)
        level.count += 1
        bounded = min(max(error, -ERROR_MAX), ERROR_MAX)
        target = z - level.value
        level.value += bounded * max(LEVEL_RATE, 1 / (level.count + 4))
        self._start += 0.01 * (level.value - self._start)
        self._add(forecast.features, target, capped)
        if spread:
            if not capped:
                self._spread += max(0.01, 1 / (self._count + 4)) * (abs(bounded) - self._spread)
            self._recalibrations.used(model).learn(forecast.logs, forecast.width, z, capped)

    def _add(self, features: Features, target: float, capped: bool) -> None:
        give = RIDGE
        scratch, indices = self._scratch, features.indices
        np.add.at(scratch, indices, features.values)
        square = float(scratch.take(indices).dot(features.values))
        scratch[indices] = 0.0
        high = ERROR_MAX / give
        example = Example(features, square, target, give, 0.0, 0.0 if capped else -high, high)
        examples = self._examples
        if len(examples) < WINDOW:
            examples.append(example)
        else:
            examples[(self._count - 1) % WINDOW] = example
        self._visit(example)
        size = len(examples)
        for number in range(self._visited + 1, self._visited + 1 + min(VISITS, size)):
            self._visit(examples[number * _STEP % size])
        self._visited += VISITS

    def _visit(self, example: Example) -> None:
        indices, values = example.features
        weights, dual = self._weights, example.dual
        error = example.target - float(weights.take(indices).dot(values)) - example.give * dual
        best = dual + error / (example.square + example.give)
        example.dual = min(max(best, example.low), example.high)
        if example.dual != dual:
            np.add.at(weights, indices, (example.dual - dual) * values)
