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
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bins.calibration import midpoints
from predictor.memory import OVERRULED_LEARNT, RecentlyUsed
from predictor.mixture import Mixture
from predictor.prompt import Prompt
from predictor.quantiles import LENGTH_MAX, LEVELS, Logs
from predictor.recalibration import WIDTH_MIN, Recalibration
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
UNCOUNTED_LEARNT = 30
"""One in so many answers that do not count is learnt, because later answers may show that they should have counted."""
YOUNG = 32
"""Answers of a model whose level is not settled: only the answers after it show the level at the time of an answer."""
LEAST = 4
"""Answers before the first forecast."""
ERRORS = 256
"""Latest errors of a model that give the spread."""
ERRORS_MIN = 16
"""Errors of a model before they give the spread; until then it is a normal distribution, as wide as for all models."""
SAVED_AT_ONCE = 100
FACTS = 5
"""Numbers that describe an answer in a state."""

_Z_MAX = 100.0  # far beyond any length
_STEP = 7919  # a prime: the visits go through the window in an order unlike that of the answers
_NORMAL = [NormalDist().inv_cdf(float(p)) for p in midpoints(LEVELS)]
_PER_ABSOLUTE = math.sqrt(math.pi / 2)  # standard deviation of a normal distribution over its mean absolute error


class Level:
    """A mean that follows the latest answers of a model. young : numbers of its answers that are not settled."""

    __slots__ = ("count", "value", "young")

    def __init__(self, value: float, count: float = 0.0) -> None:
        self.value, self.count = value, count
        self.young: deque[int] = deque()

    def follow(self, error: float, weight: float) -> None:
        self.count += weight
        self.value += weight * error * max(LEVEL_RATE, 1 / (self.count + LEAST))


class Example:
    """An answer in the window.  square : x x.  target : z while the level of its model is not settled; then z - b."""

    __slots__ = ("capped", "indices", "level", "sender", "square", "target", "values")

    def __init__(
        self,
        indices: NDArray[np.int64],
        values: NDArray[np.float32],
        target: float,
        capped: bool,
        sender: Sender,
        level: Level | None,
    ) -> None:
        self.indices, self.values, self.square = indices, values, float(values.dot(values))
        self.target, self.capped, self.sender, self.level = target, capped, sender, level

    def settle(self) -> None:
        """Compare with the level of the model as it is now, whatever it will be."""
        if self.level:
            self.target -= self.level.value
            self.level = None

    def facts(self, place_of: Mapping[int, int]) -> tuple[float, ...]:
        """Numbers that describe the answer in a state. place_of : of senders and levels, by their id."""
        level, target = place_of.get(id(self.level), -1), self.target
        if self.level and level < 0:  # of a model that is forgotten
            target -= self.level.value
        return len(self.indices), target, self.capped, place_of.get(id(self.sender), -1), level


class TextForecast(NamedTuple):
    """words : w x.  predicted : the predictor's z, if any.  base : b.
    middle : w x + b, or its mixture with `predicted`.  width : of the normal distribution of z around `middle`.
    """

    features: Features
    words: float
    predicted: float | None
    base: float
    middle: float
    width: float

    @property
    def logs(self) -> list[float]:
        """LEVELS quantiles of z, before their correction."""
        return [self.middle + self.width * normal for normal in _NORMAL]


class TextLearner:
    """Learns from answers to texts.

    secret      key of the words' hashes, at most 64 bytes
    models_max  models with a level and a spread of their own
    """

    def __init__(self, secret: bytes, models_max: int) -> None:
        self._reader, self._models_max = TextFeatures(secret), models_max
        self._weights = np.zeros(1 << BITS, dtype=np.float32)
        self._examples: list[Example] = []
        self._duals: list[float] = []  # a_i
        self._answers = self._foreseen = self._added = self._visited = 0
        self._start = 0.0  # the level of a new model
        self._error = 0.5  # mean absolute error
        self._levels = RecentlyUsed[str, Level](models_max, lambda: Level(self._start))
        self._predicted = RecentlyUsed[str, Level](models_max, lambda: Level(self._start))  # of the predictions
        self._mixture = Mixture()
        self._recalibrations = RecentlyUsed[tuple[str, bool], Recalibration](models_max, lambda: Recalibration(ERRORS))
        self._spreads: dict[tuple[str, bool], list[float]] = {}  # by model, as `_spread_of`; emptied by each answer
        self._senders = RecentlyUsed[int, Sender](SENDERS_MAX, Sender)

    def read(self, prompt: Prompt) -> Features:
        return self._reader.read(prompt)

    def counts(self, features: Features) -> bool:
        """Whether the answers of the prompt's sender count; False: they may be nonsense."""
        sender = self._senders.get(features.sender)
        return sender is None or sender.counts

    def forecast(self, model: str, features: Features, predicted: float | None) -> TextForecast:
        """predicted : the median of a trained predictor for the prompt, the logarithm of tokens."""
        return self._forecast(model, features, None if predicted is None else _soft(predicted))

    def _forecast(self, model: str, features: Features, prediction: float | None) -> TextForecast:
        level = self._levels.get(model)
        base, words = level.value if level else self._start, self._product(features)
        middle = base + words
        if prediction is not None:
            usual = self._predicted.get(model)
            middle = base + self._mixture.mixed(words, prediction - usual.value if usual else 0.0)
        width = max(WIDTH_MIN, _PER_ABSOLUTE * self._error)
        return TextForecast(features, words, prediction, base, middle, width)

    def _product(self, features: Features) -> float:
        """w x"""
        return float(self._weights.take(features.indices).dot(features.values))

    def quantiles(self, model: str, forecast: TextForecast) -> Logs | None:
        """LEVELS quantiles of the logarithm of the length; None before the first answers."""
        if self._added < LEAST:
            return None
        kind = model, forecast.predicted is not None
        spread = self._spreads.get(kind) or self._spread_of(kind, forecast.width)
        middle = math.exp(min(forecast.middle, _Z_MAX))
        if middle * spread[0] > 1 + SOFT and middle * spread[-1] < LENGTH_MAX + SOFT:
            return tuple([math.log(middle * ratio - SOFT) for ratio in spread])
        return tuple([math.log(min(max(middle * ratio - SOFT, 1.0), LENGTH_MAX)) for ratio in spread])

    def _spread_of(self, kind: tuple[str, bool], width: float) -> list[float]:
        """LEVELS quantiles of tokens + SOFT over exp(middle), the same for all forecasts of a model until it learns."""
        around = [width * normal for normal in _NORMAL]
        recalibration = self._recalibrations.get(kind)
        if recalibration and recalibration.count >= ERRORS_MIN:
            around = recalibration.corrected_around(around, width)
        if len(self._spreads) >= self._models_max:
            self._spreads.clear()
        spread = self._spreads[kind] = [math.exp(min(z, _Z_MAX)) for z in around]
        return spread

    def learn(
        self,
        model: str,
        forecast: TextForecast,
        actual: float,
        capped: bool,
        stands: bool,
        foreseen: bool = False,
        words: bool = True,
    ) -> bool:
        """Learn the logarithm of a real length, or, if capped, of a lower bound.

        stands : whether the model's forecast stands; False: a template's is better. Then the answer teaches the weights
        of its words, but little about other prompts.  foreseen : whether a template forecast it well; one in
        OVERRULED_LEARNT of these answers is learnt, for they cost as much as others.  words : False: only the sender is
        judged. Returns whether the answer counts; False: it may be nonsense.
        """
        z = _soft(actual)
        if not self._answers:
            self._start = z
        sender = self._senders.used(forecast.features.sender)
        sender.learn(z, forecast.middle, self._answers)
        self._answers += 1
        if not words:
            return sender.counts
        if foreseen:
            self._foreseen += 1
            if self._foreseen % OVERRULED_LEARNT:
                return sender.counts
        self._spreads.clear()
        # Many answers are in flight: other answers have taught the error of an early forecast already.
        forecast = self._forecast(model, forecast.features, forecast.predicted)
        text = forecast.base + forecast.words
        error = _bounded(z - text, ERROR_MAX, capped)
        learnt = sender.counts or self._answers % UNCOUNTED_LEARNT == 0
        level = self._levels.used(model)
        weight = max(sender.weight, LEVEL_WEIGHT_MIN) * (1 if stands else 1 / OVERRULED_LEARNT)
        level.follow(error, weight)
        self._start += LEVEL_RATE / 2 * (level.value - self._start)
        if learnt:
            shown = text + _bounded(z - text, ABSURD, False)
            self._add(forecast, min(z, shown) if capped else shown, capped, sender, level)
        if learnt and stands:
            if forecast.predicted is not None:
                shown = forecast.middle + _bounded(z - forecast.middle, ERROR_MAX, capped)
                usual = self._predicted.used(model)
                predicted = forecast.predicted - usual.value
                self._mixture.learn(forecast.words, predicted, shown - forecast.base)
                usual.follow(predicted, weight)
            self._error += max(0.01, 1 / (self._added + LEAST)) * (abs(error) - self._error)
            recalibration = self._recalibrations.used((model, forecast.predicted is not None))
            recalibration.learn(forecast.logs, forecast.width, z, capped)
        return sender.counts

    def _add(self, forecast: TextForecast, target: float, capped: bool, sender: Sender, level: Level) -> None:
        """Put an answer into the window, and visit it and VISITS others."""
        place, number = self._added % WINDOW, self._added
        self._added += 1
        indices, values, _ = forecast.features
        example = Example(indices, values, target, capped, sender, level)
        if place == len(self._examples):
            self._examples.append(example)
            self._duals.append(0.0)
        else:
            self._examples[place], self._duals[place] = example, 0.0
        level.young.append(number)
        if len(level.young) > YOUNG:
            settled = level.young.popleft()
            if settled >= self._added - WINDOW:
                self._examples[settled % WINDOW].settle()
        size, first = len(self._examples), self._visited + 1
        self._visited += min(VISITS if size < WINDOW else VISITS_LATER, size)
        self._visit([place, *[number * _STEP % size for number in range(first, self._visited + 1)]])

    def _visit(self, places: list[int]) -> None:
        examples, weights, duals, add_at = self._examples, self._weights, self._duals, np.add.at
        for place in places:
            example = examples[place]
            indices, values, dual, ridge = example.indices, example.values, duals[place], RIDGE / example.sender.weight
            most = ERROR_MAX / ridge
            target = example.target - example.level.value if example.level else example.target
            error = target - float(weights.take(indices).dot(values)) - ridge * dual
            best = min(max(dual + error / (example.square + ridge), 0.0 if example.capped else -most), most)
            if best != dual:
                add_at(weights, indices, (best - dual) * values)
                duals[place] = best

    def saving(self) -> Saving:
        """Make the state in slices; see state.py. It has no text: only hashes with the secret, lengths and weights."""
        weights, examples, duals = self._weights.copy(), list(self._examples), np.array(self._duals)
        counts = self._answers, self._foreseen, self._added, self._visited
        numbers = np.array([*counts, self._start, self._error])
        senders, levels = list(self._senders.entries()), list(self._levels.entries())
        yield
        place_of = {id(entry): place for entries in (senders, levels) for place, (_, entry) in enumerate(entries)}
        indices, values, facts = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.float32)], [np.zeros((0, FACTS))]
        for start in range(0, len(examples), SAVED_AT_ONCE):
            some = examples[start : start + SAVED_AT_ONCE]
            indices.append(np.concatenate([example.indices for example in some]).astype(np.int32))
            values.append(np.concatenate([example.values for example in some]))
            facts.append(np.array([example.facts(place_of) for example in some]))
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
            "examples": np.concatenate(facts),
            "duals": duals,
            "levels": _levels_state(levels),
            "predicted": _levels_state(list(self._predicted.entries())),
            "mixture": self._mixture.state(),
            "sender_keys": np.array([key for key, _ in senders], dtype=np.uint64),
            "senders": np.array([sender.numbers() for _, sender in senders]).reshape(-1, NUMBERS),
            "recalibrations": recalibrations,
        }

    def restore(self, state: State) -> None:
        """Continue from a state of a learner with the same secret. Raises ValueError for a state that does not fit."""
        self._weights = array(state, "weights", (1 << BITS,)).astype(np.float32)
        self._spreads.clear()
        *counts, self._start, self._error = array(state, "numbers", (6,)).tolist()
        self._answers, self._foreseen, self._added, self._visited = map(int, counts)
        keys = array(state, "sender_keys", (None,), "u")
        senders = array(state, "senders", (len(keys), NUMBERS)).tolist()
        self._senders.fill([(key, Sender.of(numbers)) for key, numbers in zip(keys.tolist(), senders, strict=True)])
        self._levels.fill(_levels_of(part(state, "levels")))
        self._predicted.fill(_levels_of(part(state, "predicted")))
        self._mixture = Mixture.of(part(state, "mixture"))
        recalibrations = []
        for saved in part(state, "recalibrations"):
            recalibration = Recalibration(ERRORS)
            recalibration.restore(saved)
            recalibrations.append(((str(part(saved, "model")), bool(part(saved, "predicted"))), recalibration))
        self._recalibrations.fill(recalibrations)
        self._restore_examples(state)

    def _restore_examples(self, state: State) -> None:
        facts = array(state, "examples", (None, FACTS))
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
        # The last of both stands for the place -1: a sender that is forgotten, and no level.
        senders = [*(sender for _, sender in self._senders.entries()), Sender()]
        levels = [*(level for _, level in self._levels.entries()), None]
        for name, column, entries in (("senders", 3, senders), ("models", 4, levels)):
            if len(facts) and not -1 <= facts[:, column].min() <= facts[:, column].max() < len(entries) - 1:
                raise ValueError(f"the state of the text learner names {name} that it does not have")
        self._duals = duals.tolist()
        self._examples = [
            Example(own, own_values, target, bool(capped), senders[int(sender)], levels[int(level)])
            for own, own_values, (_, target, capped, sender, level) in zip(
                np.split(indices, ends[:-1]), np.split(values, ends[:-1]), facts.tolist(), strict=False
            )
        ]
        for number in range(self._added - len(facts), self._added):
            if level := self._examples[number % WINDOW].level:
                level.young.append(number)


def _levels_state(entries: Sequence[tuple[str, Level]]) -> State:
    values = np.array([(level.value, level.count) for _, level in entries]).reshape(-1, 2)
    return {"models": [model for model, _ in entries], "values": values}


def _levels_of(state: State) -> list[tuple[str, Level]]:
    models = part(state, "models")
    values = array(state, "values", (len(models), 2)).tolist()
    return [(str(model), Level(*numbers)) for model, numbers in zip(models, values, strict=True)]


def _soft(log: float) -> float:
    """z of the logarithm of a length."""
    return math.log(math.exp(log) + SOFT)


def _bounded(error: float, most: float, capped: bool) -> float:
    return min(max(error, 0.0 if capped else -most), most)
