"""The length of an answer from the words of its prompt, learnt while serving.

    x    the prompt's features (text_features.py)
    z    log(tokens + SOFT): differences among the shortest answers count less than in the logarithm
    b    the level of the model: a mean of its latest z - w x
    w x + b   the forecast of z; with a trained predictor, its mixture with the predictor's (mixture.py)

The weights w are a ridge regression of z - b on x over the latest answers, solved in its dual (Shalev-Shwartz and
Zhang 2013): w is the sum of a_i x_i over the answers i, and a visit of an answer gives its a_i the best value, given
the others. An answer is visited when it comes, and VISITS earlier answers with it, in turn. So a few hundred answers
teach as much as in a regression over all of them, and there is no learning rate. Three kinds of answers are bounded:

    capped        a_i >= 0: the full length is longer, so the answer can only raise forecasts
    absurd        |a_i| is at most that of an error of ERROR_MAX (Huber's loss)
    nonsense      the answers of a sender of nonsense have a small weight, and so a small a_i (senders.py)

Answers that leave the window keep their part of w. The spread of the forecasts is that of their latest errors, per
model, by `recalibration`.

Pure: no clock, no I/O, no randomness. Not thread-safe.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bins.calibration import midpoints
from predictor.memory import OVERRULED_LEARNT, RecentlyUsed
from predictor.mixture import Mixture
from predictor.prompt import Prompt
from predictor.quantiles import LENGTH_MAX, LEVELS, Logs
from predictor.recalibration import Recalibration
from predictor.senders import NUMBERS, SENDERS_MAX, Sender
from predictor.state import Saving, State, array, part
from predictor.text_features import BITS, Features, TextFeatures

SOFT = 30.0
"""Tokens."""
RIDGE = 2.0
WINDOW = 2000
"""Answers that are visited again."""
VISITS, VISITS_LATER = 10, 6
"""With each answer, before and after the window is full."""
ERROR_MAX, ABSURD = 1.5, 3.0
"""A greater error teaches as much as one of ERROR_MAX, and is taken for one of ABSURD."""
LEVEL_RATE = 0.03
"""Weight of an answer in the level of its model: a level follows a change within some 100 answers."""
LEVEL_WEIGHT_MIN = 0.25
"""A level needs no correlation, so answers of small weight teach it too."""
UNCOUNTED_LEARNT = 10
"""One in so many answers that do not count is learnt, because later answers may show that they should have counted."""
LEAST = 4
"""Answers before the first forecast."""
ERRORS = 256
"""Latest errors of a model that give the spread."""
ERRORS_MIN = 16
"""Errors of a model before they give the spread; until then it is a normal distribution, as wide as for all models."""
SAVED_AT_ONCE = 100

_STEP = 7919  # a prime: the visits go through the window in an order unlike that of the answers
_NORMAL = [NormalDist().inv_cdf(float(p)) for p in midpoints(LEVELS)]
_PER_ABSOLUTE = math.sqrt(math.pi / 2)  # standard deviation of a normal distribution over its mean absolute error


@dataclass(slots=True)
class Level:
    value: float
    count: float = 0.0


class Example(NamedTuple):
    """An answer in the window. square : x x."""

    indices: NDArray[np.int64]
    values: NDArray[np.float32]
    square: float
    target: float
    capped: bool
    sender: Sender


@dataclass(frozen=True, slots=True)
class TextForecast:
    """text : w x + b.  predicted : the predictor's z, if any.  middle : `text`, or its mixture with `predicted`.
    logs : LEVELS quantiles of z around `middle`, before their correction.  width : theirs.
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
        self._answers = self._added = self._visited = 0
        self._start = 0.0  # the level of a new model
        self._error = 0.5  # mean absolute error
        self._levels = RecentlyUsed[str, Level](models_max, lambda: Level(self._start))
        self._mixtures = RecentlyUsed[str, Mixture](models_max, Mixture)
        self._recalibrations = RecentlyUsed[tuple[str, bool], Recalibration](models_max, lambda: Recalibration(ERRORS))
        self._senders = RecentlyUsed[int, Sender](SENDERS_MAX, Sender)

    def read(self, prompt: Prompt) -> Features:
        return self._reader.read(prompt)

    def forecast(self, model: str, features: Features, predicted: float | None) -> TextForecast:
        """predicted : the median of a trained predictor for the prompt, the logarithm of tokens."""
        return self._forecast(model, features, None if predicted is None else _soft(predicted))

    def _forecast(self, model: str, features: Features, prediction: float | None) -> TextForecast:
        level = self._levels.get(model)
        text = float(self._weights.take(features.indices).dot(features.values))
        text += level.value if level else self._start
        middle = text
        if prediction is not None:
            mixture = self._mixtures.get(model)
            middle = mixture.mixed(text, prediction) if mixture else prediction
        width = _PER_ABSOLUTE * self._error
        logs = tuple([middle + width * normal for normal in _NORMAL])
        return TextForecast(features, text, prediction, middle, logs, width)

    def quantiles(self, model: str, forecast: TextForecast) -> Logs | None:
        """LEVELS quantiles of the logarithm of the length; None before the first answers."""
        if self._added < LEAST:
            return None
        recalibration = self._recalibrations.get((model, forecast.predicted is not None))
        corrected = forecast.logs
        if recalibration and recalibration.count >= ERRORS_MIN:
            corrected = recalibration.corrected(forecast.logs, forecast.width)
        return tuple([math.log(min(max(math.exp(z) - SOFT, 1.0), LENGTH_MAX)) for z in corrected])

    def learn(self, model: str, forecast: TextForecast, actual: float, capped: bool, stands: bool) -> bool:
        """Learn the logarithm of a real length, or, if capped, of a lower bound.

        stands : whether the model's forecast stands; False: a template's is better. Then the answer teaches the weights
        of its words, but little about other prompts. Returns whether the answer counts; False: it may be nonsense.
        """
        z = _soft(actual)
        if not self._answers:
            self._start = z
        # Many answers are in flight: other answers have taught the error of an early forecast already.
        forecast = self._forecast(model, forecast.features, forecast.predicted)
        error = _bounded(z - forecast.text, ERROR_MAX, capped)
        sender = self._senders.used(forecast.features.sender)
        sender.learn(z, forecast.middle, self._answers)
        self._answers += 1
        learnt = sender.counts or self._answers % UNCOUNTED_LEARNT == 0
        level = self._levels.used(model)
        shown = forecast.text + _bounded(z - forecast.text, ABSURD, False)
        target = (min(z, shown) if capped else shown) - level.value
        weight = max(sender.weight, LEVEL_WEIGHT_MIN) * (1 if stands else 1 / OVERRULED_LEARNT)
        level.count += weight
        level.value += weight * error * max(LEVEL_RATE, 1 / (level.count + LEAST))
        self._start += LEVEL_RATE / 2 * (level.value - self._start)
        if learnt:
            self._add(forecast.features, target, capped, sender)
            mixed = forecast.middle + _bounded(z - forecast.middle, ERROR_MAX, capped)
            if forecast.predicted is not None and stands:
                self._mixtures.used(model).learn(forecast.text, forecast.predicted, mixed)
        if learnt and stands:
            self._error += max(0.01, 1 / (self._added + LEAST)) * (abs(error) - self._error)
            recalibration = self._recalibrations.used((model, forecast.predicted is not None))
            recalibration.learn(forecast.logs, forecast.width, z, capped)
        return sender.counts

    def _add(self, features: Features, target: float, capped: bool, sender: Sender) -> None:
        """Put an answer into the window, and visit it and VISITS others."""
        place = self._added % WINDOW
        self._added += 1
        indices, values, _ = features
        example = Example(indices, values, self._square(indices, values), target, capped, sender)
        if place == len(self._examples):
            self._examples.append(example)
            self._duals.append(0.0)
        else:
            self._examples[place], self._duals[place] = example, 0.0
        size, first = len(self._examples), self._visited + 1
        self._visited += min(VISITS if size < WINDOW else VISITS_LATER, size)
        self._visit([place, *[number * _STEP % size for number in range(first, self._visited + 1)]])

    def _square(self, indices: NDArray[np.int64], values: NDArray[np.float32]) -> float:
        """x x. An index that is there twice stands for the sum of its values."""
        self._scratch[indices] = 0.0
        np.add.at(self._scratch, indices, values)
        return float(self._scratch.take(indices).dot(values))

    def _visit(self, places: list[int]) -> None:
        weights, duals, add_at = self._weights, self._duals, np.add.at
        for place in places:
            indices, values, square, target, capped, sender = self._examples[place]
            dual, ridge = duals[place], RIDGE / sender.weight
            most = ERROR_MAX / ridge
            error = target - float(weights.take(indices).dot(values)) - ridge * dual
            best = min(max(dual + error / (square + ridge), 0.0 if capped else -most), most)
            if best != dual:
                add_at(weights, indices, (best - dual) * values)
                duals[place] = best

    def saving(self) -> Saving:
        """Make the state in slices; see state.py. It has no text: only hashes with the secret, lengths and weights."""
        weights, examples, duals = self._weights.copy(), list(self._examples), np.array(self._duals)
        numbers = np.array([self._answers, self._added, self._visited, self._start, self._error])
        senders, levels = list(self._senders.entries()), list(self._levels.entries())
        yield
        place_of = {id(sender): place for place, (_, sender) in enumerate(senders)}
        indices, values = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.float32)]
        for start in range(0, len(examples), SAVED_AT_ONCE):
            some = examples[start : start + SAVED_AT_ONCE]
            indices.append(np.concatenate([example.indices for example in some]).astype(np.int32))
            values.append(np.concatenate([example.values for example in some]))
            yield
        facts = [
            (len(example.indices), example.square, example.target, example.capped, place_of.get(id(example.sender), -1))
            for example in examples
        ]
        yield
        recalibrations = []
        for (model, predicted), recalibration in self._recalibrations.entries():
            recalibrations.append({"model": model, "predicted": predicted, **recalibration.state()})
            yield
        return {
            "weights": weights,
            "numbers": numbers,
            "indices": np.concatenate(indices),
            "values": np.concatenate(values),
            "examples": np.array(facts, dtype=np.float64).reshape(-1, 5),
            "duals": duals,
            "level_models": [model for model, _ in levels],
            "levels": np.array([(level.value, level.count) for _, level in levels]).reshape(-1, 2),
            "mixtures": [{"model": model, **mixture.state()} for model, mixture in self._mixtures.entries()],
            "sender_keys": np.array([key for key, _ in senders], dtype=np.uint64),
            "senders": np.array([sender.numbers() for _, sender in senders]).reshape(-1, NUMBERS),
            "recalibrations": recalibrations,
        }

    def restore(self, state: State) -> None:
        """Continue from a state of a learner with the same secret. Raises ValueError for a state that does not fit."""
        self._weights = array(state, "weights", (1 << BITS,)).astype(np.float32)
        answers, added, visited, start, error = array(state, "numbers", (5,)).tolist()
        self._answers, self._added, self._visited = int(answers), int(added), int(visited)
        self._start, self._error = start, error
        keys = array(state, "sender_keys", (None,), "u")
        senders = array(state, "senders", (len(keys), NUMBERS)).tolist()
        self._senders.fill([(key, Sender.of(numbers)) for key, numbers in zip(keys.tolist(), senders, strict=True)])
        models = part(state, "level_models")
        levels = array(state, "levels", (len(models), 2)).tolist()
        self._levels.fill([(str(model), Level(*numbers)) for model, numbers in zip(models, levels, strict=True)])
        self._mixtures.fill([(str(part(saved, "model")), Mixture.of(saved)) for saved in part(state, "mixtures")])
        recalibrations = []
        for saved in part(state, "recalibrations"):
            recalibration = Recalibration(ERRORS)
            recalibration.restore(saved)
            recalibrations.append(((str(part(saved, "model")), bool(part(saved, "predicted"))), recalibration))
        self._recalibrations.fill(recalibrations)
        self._restore_examples(state)

    def _restore_examples(self, state: State) -> None:
        facts = array(state, "examples", (None, 5))
        indices = array(state, "indices", (None,), "i").astype(np.int64)
        values = array(state, "values", indices.shape).astype(np.float32)
        duals = array(state, "duals", (len(facts),))
        ends = np.cumsum(facts[:, 0]).astype(int)
        if len(facts) != min(self._added, WINDOW) or (ends[-1] if len(ends) else 0) != len(indices):
            raise ValueError("the state of the text learner has another number of examples or features")
        if len(indices) and not 0 <= indices.min() <= indices.max() < 1 << BITS:
            raise ValueError("the state of the text learner names features that do not exist")
        if not all(np.isfinite(part).all() for part in (self._weights, facts, values, duals)):
            raise ValueError("the state of the text learner has numbers that are not finite")
        senders = [
            *(sender for _, sender in self._senders.entries()),
            Sender(),
        ]  # the last for a sender forgotten since
        if len(facts) and not -1 <= facts[:, 4].min() <= facts[:, 4].max() < len(senders):
            raise ValueError("the state of the text learner names senders that it does not have")
        self._duals = duals.tolist()
        self._examples = [
            Example(own, own_values, square, target, bool(capped), senders[int(at)])
            for own, own_values, (_, square, target, capped, at) in zip(
                np.split(indices, ends[:-1]), np.split(values, ends[:-1]), facts.tolist(), strict=False
            )
        ]


def _soft(log: float) -> float:
    """z of the logarithm of a length."""
    return math.log(math.exp(log) + SOFT)


def _bounded(error: float, most: float, capped: bool) -> float:
    return min(max(error, 0.0 if capped else -most), most)
