"""The length of an answer from the words of its prompt, learnt while serving.

    x    the prompt's features (text_features.py)
    z    log(tokens + SOFT): differences among the shortest answers count less than in the logarithm
    a    the level of all models: a mean of z - w x over the latest answers
    b    the level of the model: a mean of its latest z - w x - a
    a + u w x + v b + t p   the forecast of z, with the weights u, v and t that these parts have earned (mixture.py)
    p    a trained predictor's, if any: how far its prediction is from what it usually says of the model, corrected by
         what its encoder knows of the prompt (correction.py)

The weights w are a ridge regression of z - a on x over the latest answers (ridge.py). The spread of the forecasts is
that of their latest errors, per model (spread.py).

An answer teaches w, a and b the error of what is known when the answer ends, for other answers may have taught the
error of its forecast meanwhile. The mixture's weights and the spread are for forecasts, so an answer teaches them the
error of its forecast as it was served.

Pure: no clock, no I/O, no randomness. Not thread-safe.
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from predictor.answer_block import ERROR_MAX, Example
from predictor.correction import Correction
from predictor.levels import LEAST, RATE_OF_ALL, Level, levels_of, levels_state
from predictor.memory import OVERRULED_LEARNT, RecentlyUsed
from predictor.mixture import Mixture, Parts
from predictor.prediction import FEATURE, MARK_BYTES
from predictor.prompt import Prompt
from predictor.quantiles import LENGTH_MAX
from predictor.recalibration import WIDTH_MIN
from predictor.ridge import Ridge
from predictor.senders import NUMBERS, SENDERS_MAX, Sender
from predictor.spread import Z_MAX, Spread, normal_ratios
from predictor.state import Saving, State, array, part
from predictor.text_features import Features, TextFeatures

SOFT = 30.0
"""Tokens."""
ABSURD = 3.0
"""A greater error is taken for one of ABSURD."""
LEVEL_WEIGHT_MIN = 0.25
"""A level needs no correlation, so answers of small weight teach it too."""
UNCOUNTED_LEARNT = 30
"""One in so many answers that do not count is learnt, because later answers may show that they should have counted."""
NEWCOMERS = None
"""In place of a model's name: of the forecasts for models that had fewer than LEAST answers."""
_PER_ABSOLUTE = math.sqrt(math.pi / 2)  # standard deviation of a normal distribution over its mean absolute error


class TextForecast(msgspec.Struct, frozen=True):
    """words : w x.  level_of_all : a.  level : b.
    known : number of answers of the model that gave its level.
    predicted : the predictor's z, if any.  encoded : the prompt's features from its encoder.  correction : by them.
    likely : p; 0 without a prediction.
    middle : the forecast of z.  width : of the normal distribution of z around `middle`.
    taught : number of answers that the learner knew.
    """

    features: Features
    words: float
    predicted: float | None
    encoded: bytes
    correction: float
    likely: float
    level_of_all: float
    level: float
    known: float
    middle: float
    width: float
    taught: int

    @property
    def parts(self) -> Parts:
        return self.words, self.likely, self.level


class History(NamedTuple):
    """The answers to one sender.

    tokens : a typical length.  correlation : of lengths and forecasts.  weight : of each answer in what is learnt
    """

    answers: int
    tokens: float
    correlation: float
    weight: float


class TextLearner:
    """Learns from answers to texts.

    secret      key of the words' hashes, at most 64 bytes
    models_max  models with a level and a spread of their own
    """

    def __init__(self, secret: bytes, models_max: int) -> None:
        self._reader, self._ridge = TextFeatures(secret), Ridge()
        self._answers = self._foreseen = self._taught = self._added = 0
        self._error = 0.5  # mean absolute error
        self._level_of_all = Level(rate=RATE_OF_ALL)
        self._levels = RecentlyUsed[str, Level](models_max, Level)
        self._predicted = RecentlyUsed[str, Level](models_max, lambda: Level(self._level_of_all.value))  # predictions
        self._mixture = Mixture()
        self._correction: Correction | None = None  # made for the features of the first answer
        self._spreads = RecentlyUsed[tuple[str | None, bool], Spread](models_max, Spread)
        self._senders = RecentlyUsed[int, Sender](SENDERS_MAX, Sender)

    def read(self, prompt: Prompt) -> Features:
        return self._reader.read(prompt)

    def counts(self, features: Features) -> bool:
        """Whether the answers of the prompt's sender count; False: they may be nonsense."""
        sender = self._senders.get(features.sender)
        return sender is None or sender.counts

    def history(self, features: Features) -> History | None:
        """The answers to the prompt's sender; None: there were none yet."""
        sender = self._senders.get(features.sender)
        if sender is None or not sender.answers:
            return None
        tokens = min(max(math.exp(sender.mean) - SOFT, 1.0), LENGTH_MAX)
        return History(sender.answers, tokens, sender.correlation, sender.weight)

    def forecast(self, model: str, features: Features, predicted: float | None, encoded: bytes = b"") -> TextForecast:
        """predicted : the median of a trained predictor for the prompt, the logarithm of tokens.
        encoded : the features of the prediction (prediction.py).
        """
        return self._forecast(model, features, None if predicted is None else _soft(predicted), encoded)

    def _forecast(self, model: str, features: Features, prediction: float | None, encoded: bytes) -> TextForecast:
        level, words, level_of_all = self._levels.get(model), self._ridge.product(features), self._level_of_all.value
        of_model, known = (level.value, level.count) if level else (0.0, 0.0)
        likely = correction = 0.0
        if prediction is not None:
            usual, numbers = self._predicted.get(model), _numbers(encoded)
            if self._correction and _fits(self._correction, encoded, numbers):
                correction = self._correction.of(numbers)
            likely = (prediction - usual.value if usual else 0.0) + correction
        middle = level_of_all + self._mixture.mixed((words, likely, of_model))
        width = max(WIDTH_MIN, _PER_ABSOLUTE * self._error)
        return TextForecast(
            *(features, words, prediction, encoded, correction, likely),
            *(level_of_all, of_model, known, middle, width, self._taught),
        )

    def lengths(self, model: str, forecast: TextForecast) -> tuple[float, ...]:
        """LEVELS quantiles of the length in tokens; () before the first answers."""
        if self._added < LEAST:
            return ()
        spread = self._spreads.get(_spread_of(model, forecast))
        ratios = spread.ratios(forecast.width) if spread else normal_ratios(forecast.width)
        middle = math.exp(min(forecast.middle, Z_MAX))
        if middle * ratios[0] > 1 + SOFT and middle * ratios[-1] < LENGTH_MAX + SOFT:
            return tuple([middle * ratio - SOFT for ratio in ratios])
        return tuple([min(max(middle * ratio - SOFT, 1.0), LENGTH_MAX) for ratio in ratios])

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
            self._level_of_all.value = z
        sender = self._senders.used(forecast.features.sender)
        sender.learn(z, forecast.middle, self._answers)
        self._answers += 1
        if not words:
            return sender.counts
        if foreseen:
            self._foreseen += 1
            if self._foreseen % OVERRULED_LEARNT:
                return sender.counts
        served = forecast
        if forecast.taught < self._taught or not self._taught:
            # Many answers are in flight: other answers have taught the error of an early forecast already.
            forecast = self._forecast(model, forecast.features, forecast.predicted, forecast.encoded)
            if served.taught < LEAST:  # nothing was known, so nothing was served
                served = forecast
        self._taught += 1
        text = forecast.level_of_all + forecast.words
        error = z - text - forecast.level
        learnt = sender.counts or self._answers % UNCOUNTED_LEARNT == 0
        weight = max(sender.weight, LEVEL_WEIGHT_MIN) * (1 if stands else 1 / OVERRULED_LEARNT)
        self._levels.used(model).follow(_bounded(error, ERROR_MAX, capped), weight)
        self._level_of_all.follow(_bounded(z - text, ERROR_MAX, capped), weight)
        if learnt:
            shown = z - error + _bounded(error, ABSURD, False)
            example = Example(min(z, shown) if capped else shown, capped, sender, self._level_of_all)
            self._level_of_all.settle_later(example)
            self._ridge.learn(example, forecast.features, forecast.words)
            self._added += 1
        if learnt and stands:
            if forecast.predicted is not None:
                level, usual = forecast.level_of_all + forecast.level, self._predicted.used(model)
                predicted = forecast.predicted - usual.value
                self._correct(forecast, z - level - predicted, capped, sender.weight)
                usual.follow(predicted, weight)
            missed = z - served.middle
            shown = served.middle + _bounded(missed, ERROR_MAX, capped)
            self._mixture.learn(served.parts, shown - served.level_of_all)
            self._error += max(0.01, 1 / (self._added + LEAST)) * (abs(missed) - self._error)
            self._spreads.used(_spread_of(model, served)).learn(z - forecast.middle, missed, served.width, capped)
        return sender.counts

    def _correct(self, forecast: TextForecast, lacked: float, capped: bool, weight: float) -> None:
        """Learn what the prediction lacked. A capped answer teaches nothing if its length may be as predicted."""
        known = _numbers(forecast.encoded)
        error = _bounded(lacked - forecast.correction, ERROR_MAX, capped)
        if known.size == 0 or (capped and error == 0):
            return
        if self._correction is None or not _fits(self._correction, forecast.encoded, known):
            self._correction = Correction(forecast.encoded[:MARK_BYTES], known.size)
        self._correction.learn(known, forecast.correction + error, weight)

    def saving(self) -> Saving:
        """Make the state in slices; see state.py. It has no text: only hashes with the secret, lengths and weights, and
        sums of products of features.
        """
        of_all = self._level_of_all
        numbers = np.array([self._answers, self._foreseen, self._added, self._error])
        senders, levels = list(self._senders.entries()), list(self._levels.entries())
        place_of = {id(entry): place for place, (_, entry) in enumerate(senders)} | {id(of_all): 0}
        correction = self._correction.state() if self._correction else None
        ridge = yield from self._ridge.saving(place_of)
        spreads = []
        for (model, predicted), spread in self._spreads.entries():
            spreads.append({"model": model, "predicted": predicted, **spread.state()})
            yield
        return {
            "numbers": numbers,
            "ridge": ridge,
            "level_of_all": np.array([of_all.value, of_all.count]),
            "levels": levels_state(levels),
            "predicted": levels_state(list(self._predicted.entries())),
            "mixture": self._mixture.state(),
            "correction": correction,
            "sender_keys": np.array([key for key, _ in senders], dtype=np.uint64),
            "senders": np.array([sender.numbers() for _, sender in senders]).reshape(-1, NUMBERS),
            "spreads": spreads,
        }

    def restore(self, state: State) -> None:
        """Continue from a state of a learner with the same secret. Raises ValueError for a state that does not fit."""
        *counts, self._error = array(state, "numbers", (4,)).tolist()
        self._answers, self._foreseen, self._added = map(int, counts)
        value, count = array(state, "level_of_all", (2,)).tolist()
        self._level_of_all = Level(value, count, RATE_OF_ALL)
        keys = array(state, "sender_keys", (None,), "u")
        senders = array(state, "senders", (len(keys), NUMBERS)).tolist()
        self._senders.fill([(key, Sender.of(numbers)) for key, numbers in zip(keys.tolist(), senders, strict=True)])
        self._levels.fill(levels_of(part(state, "levels")))
        self._predicted.fill(levels_of(part(state, "predicted")))
        self._mixture = Mixture.of(part(state, "mixture"))
        correction = state.get("correction")  # a state of before has none
        self._correction = None if correction is None else Correction.restored(correction)
        spreads = []
        for saved in part(state, "spreads"):
            spread = Spread()
            spread.restore(saved)
            model = part(saved, "model")
            spreads.append(((model if model is NEWCOMERS else str(model), bool(part(saved, "predicted"))), spread))
        self._spreads.fill(spreads)
        # The last of both stands for the place -1: a sender that is forgotten, and no level.
        own_senders = [*(sender for _, sender in self._senders.entries()), Sender()]
        self._ridge.restore(part(state, "ridge"), own_senders, [self._level_of_all, None])


def _spread_of(model: str, forecast: TextForecast) -> tuple[str | None, bool]:
    """The key of the spread of such forecasts."""
    return model if forecast.known >= LEAST else NEWCOMERS, forecast.predicted is not None


def _numbers(encoded: bytes) -> NDArray[np.float64]:
    return np.frombuffer(encoded[MARK_BYTES:], dtype=FEATURE).astype(float)


def _fits(correction: Correction, encoded: bytes, known: NDArray[np.float64]) -> bool:
    """Whether these are features of the predictor that the correction is of."""
    return correction.encoder == encoded[:MARK_BYTES] and correction.size == known.size


def _soft(log: float) -> float:
    """z of the logarithm of a length."""
    return math.log(math.exp(log) + SOFT)


def _bounded(error: float, most: float, capped: bool) -> float:
    return min(max(error, 0.0 if capped else -most), most)
