"""Learning from the lengths of the answers, while serving and without training.

    predictor's quantiles --recalibration--> calibrated --text learner--> mixed --memory--> forecast --answer--> observe

The predictor may be missing, slow, dead, biased or trained for other traffic. `recalibration` maps its quantiles to
the observed lengths; `text_learner` forecasts from the words of the prompt, corrects the prediction by what its encoder
knows of the prompt, and mixes both; `memory` takes over where the recent lengths of an application or a template
forecast better. The learner starts empty, and every part is bounded. Before the first answers of a model that is the
first, nothing is known.

Pure: no clock, no randomness, no I/O. Not thread-safe.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from predictor.memory import Memory, RecentlyUsed, Verdict, keys_of
from predictor.prediction import Prediction
from predictor.prompt import Prompt
from predictor.quantiles import LENGTH_MAX, LEVELS, MIDDLE, ascending, at_levels, log_length
from predictor.recalibration import Recalibration, width
from predictor.state import Saving, State, part, whole
from predictor.text_features import Features
from predictor.text_learner import History, TextForecast, TextLearner

READINGS_MAX = 64
"""Prompts whose features and keys are kept for the same prompt; then all are forgotten."""
READING_CHARACTERS_MAX = 1000
"""Longer prompts are read again, so that all readings take less than 0.5 MB."""
FORESEEN = 0.1
"""Error of a template's median, in log tokens, below which words have little to learn from the answer."""

__all__ = ["LEVELS", "Forecast", "OnlineLearner", "bounded"]


class _Trace(msgspec.Struct, frozen=True):
    """How a forecast was made, for learning from the answer's length."""

    kind: tuple[str, bool, bool]  # model; has stop strings; the predictor gives one length only
    predicted: Sequence[float]  # the predictor's logarithms at LEVELS; () without a predictor
    width: float
    chain: tuple[bytes, ...]
    verdict: Verdict
    text: TextForecast | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """lengths : LEVELS ascending, equally likely output tokens, each at least 1; () when nothing is known.
    source : "predictor", "memory" (of a template or application), "learner" (of texts), "recent" (of the model); or "".
    """

    lengths: tuple[float, ...]
    source: str
    _trace: _Trace = field(repr=False, compare=False)

    @property
    def median(self) -> float | None:
        return self.lengths[MIDDLE] if self.lengths else None

    @property
    def model(self) -> str:
        """The model of the forecast answer."""
        return self._trace.kind[0]


class OnlineLearner:
    """Forecasts lengths from predictions, and learns from the answers' real lengths.

    keys_max         remembered templates and applications, about 1.5 kB each; 0: none
    lengths_per_key  last lengths of each key; below 8 no key ever takes over
    window           last answers of a model that correct its predictions, or are the forecast without predictions
    models_max       remembered models (two entries with and without stop strings), up to 80 kB each
    secret           key of the hashes under which templates, applications and words are remembered; at most 64 bytes
    learns_text      whether lengths are learnt from the words of prompts, in at most 17 MiB
    """

    def __init__(
        self,
        *,
        keys_max: int = 10_000,
        lengths_per_key: int = 32,
        window: int = 512,
        models_max: int = 128,
        secret: bytes = b"",
        learns_text: bool = True,
    ) -> None:
        if min(lengths_per_key, window, models_max) < 1 or keys_max < 0:
            raise ValueError("lengths_per_key, window and models_max must be at least 1, keys_max at least 0")
        self.memory = Memory(keys_max, lengths_per_key, window, models_max)
        self.raw_invalid = 0
        self._secret = secret
        self._window = window
        self._models_max = models_max
        self._text = TextLearner(secret, models_max) if learns_text else None
        self._readings: dict[Prompt, tuple[bool, Features | None, tuple[bytes, ...]]] = {}
        self._recalibrations = RecentlyUsed[tuple[str, bool, bool], Recalibration](
            models_max, lambda: Recalibration(window)
        )

    @property
    def secret(self) -> bytes | None:
        """For a TextFeatures that reads prompts elsewhere; None: no text is read."""
        return None if self._text is None else self._secret

    def forecast(self, prompt: Prompt, prediction: Prediction | None, features: Features | None = None) -> Forecast:
        """prediction : of a predictor for this prompt; None: no prediction.
        features : of the prompt, where a TextFeatures with the same secret has read it; None: it is read here

        A prediction with values that are no lengths (not finite, not positive) counts in `raw_invalid` and is ignored.
        """
        raw, encoded = prediction or (None, b"")
        predicted = self._read(raw)
        kind = (prompt.model, bool(prompt.stop), raw is not None and len(raw) == 1)
        s = 1.0 if kind[2] or not predicted else width(predicted)
        features, chain = self._reading(prompt, features)
        return self._forecast(kind, predicted, s, chain, features, encoded)

    def _reading(self, prompt: Prompt, features: Features | None) -> tuple[Features | None, tuple[bytes, ...]]:
        """The prompt's features and keys. Both stay the same while its sender's answers count, or do not."""
        # A long text is never kept, and takes long to hash.
        kept = self._readings.get(prompt) if len(prompt.text) <= READING_CHARACTERS_MAX else None
        if kept or self._text is None:
            features = kept[1] if kept else None
        elif features is None:
            features = self._text.read(prompt)
        shared = not (self._text and features) or self._text.counts(features)
        if kept and kept[0] == shared:
            return features, kept[2]
        chain = keys_of(prompt, self._secret, shared)
        texts = (prompt.text, prompt.system, prompt.model, prompt.format, prompt.sender, *prompt.stop)
        if sum(map(len, texts)) <= READING_CHARACTERS_MAX:
            if len(self._readings) >= READINGS_MAX:
                self._readings.clear()
            self._readings[prompt] = shared, features, chain
        return features, chain

    def history(self, forecast: Forecast) -> History | None:
        """The answers to the sender of a forecast's prompt; None: none is known."""
        text = forecast._trace.text
        return self._text.history(text.features) if self._text is not None and text is not None else None

    def revise(self, forecast: Forecast) -> Forecast:
        """The forecast of the same request by what was learnt since. Its prompt is not read again.

        To be given to `observe` instead of the earlier forecast. Keys are still judged by their first forecasts: an
        order by later forecasts picks the requests whose later forecasts are too short, which would speak against the
        key that tells requests apart.
        """
        trace = forecast._trace
        features, encoded = (trace.text.features, trace.text.encoded) if trace.text else (None, b"")
        later = self._forecast(trace.kind, trace.predicted, trace.width, trace.chain, features, encoded)
        verdict = msgspec.structs.replace(later._trace.verdict, by_key=trace.verdict.by_key)
        return replace(later, _trace=msgspec.structs.replace(later._trace, verdict=verdict))

    def _forecast(
        self,
        kind: tuple[str, bool, bool],
        predicted: Sequence[float],
        s: float,
        chain: tuple[bytes, ...],
        features: Features | None,
        encoded: bytes,
    ) -> Forecast:
        calibrated = text = learnt = None
        tokens: tuple[float, ...] = ()
        if predicted:
            recalibration = self._recalibrations.get(kind)
            calibrated = recalibration.corrected(predicted, s) if recalibration else ascending(predicted)
        if self._text and features:
            text = self._text.forecast(kind[0], features, calibrated[MIDDLE] if calibrated else None, encoded)
            tokens = self._text.lengths(kind[0], text)
            learnt = tuple(map(math.log, tokens)) or None
        verdict = self.memory.judge(chain, calibrated, learnt)
        lengths = tokens if verdict.logs is learnt else tuple(map(math.exp, verdict.logs))
        return Forecast(lengths, verdict.source, _Trace(kind, predicted, s, chain, verdict, text))

    def _read(self, raw: Sequence[float] | None) -> Sequence[float]:
        """Logarithms at LEVELS; () without a valid prediction."""
        if raw is None:
            return ()
        if len(raw) == 0 or not all(0.0 < length < math.inf for length in raw):  # False for nan too
            self.raw_invalid += 1
            return ()
        return at_levels(sorted([log_length(length) for length in raw]))

    def observe(self, forecast: Forecast, output_tokens: float, capped: bool = False, words: bool = True) -> None:
        """Learn the real length of an answer. To be called once per forecast.

        capped : the answer was cut at its request's max_tokens; its full length is at least output_tokens. An answer
        without a token (cancelled or failed) is ignored.
        words : whether the answer teaches the words of its prompt, which takes most of the time. A fair sample of the
        answers may do so; all of them judge their sender, and teach templates and the predictor's recalibration.
        """
        if not 0.0 < output_tokens <= LENGTH_MAX:
            return
        actual, trace = log_length(output_tokens), forecast._trace
        counts = True
        if self._text and trace.text:
            overruled = bool(trace.verdict.overruled)
            foreseen = overruled and abs(actual - trace.verdict.logs[MIDDLE]) < FORESEEN
            counts = self._text.learn(trace.kind[0], trace.text, actual, capped, not overruled, foreseen, words)
        predicted = bool(trace.predicted)
        coarsest_learnt = self.memory.learn(trace.chain, trace.verdict, actual, capped, predicted, counts)
        if coarsest_learnt and trace.predicted:
            self._recalibrations.used(trace.kind).learn(trace.predicted, trace.width, actual, capped)

    def saving(self) -> Saving:
        """Make the state in slices; see predictor/state.py."""
        recalibrations = []
        for kind, recalibration in self._recalibrations.entries():
            recalibrations.append({"kind": list(kind), **recalibration.state()})
            yield
        memory = yield from self.memory.saving()
        text = (yield from self._text.saving()) if self._text else None
        return {"secret": self._secret.hex(), "recalibrations": recalibrations, "memory": memory, "text": text}

    def state(self) -> State:
        """What was learnt, and the secret of the hashes; see predictor/state.py."""
        return whole(self.saving())

    def restore(self, state: State) -> None:
        """Continue from a state, with its secret. Raises ValueError for a state of other sizes, or none at all."""
        secret, recalibrations = bytes.fromhex(part(state, "secret")), []
        for saved in part(state, "recalibrations"):
            model, has_stop, single = part(saved, "kind")
            recalibration = Recalibration(self._window)
            recalibration.restore(saved)
            recalibrations.append(((str(model), bool(has_stop), bool(single)), recalibration))
        self.memory.restore(part(state, "memory"))
        self._recalibrations.fill(recalibrations)
        saved = part(state, "text")
        # Of before, the words had another meaning, and are left out.
        if self._text and saved is not None and "level_of_all" in saved:
            self._text = TextLearner(secret, self._models_max)
            self._text.restore(saved)
        self._secret = secret
        self._readings.clear()


def bounded(lengths: tuple[float, ...], *, least: float | None = None, most: float | None = None) -> tuple[float, ...]:
    """The ascending lengths of a forecast under a request's min_tokens and max_tokens; `most` wins over `least`."""
    if lengths and least is not None and lengths[0] < least:
        lengths = tuple([max(length, least) for length in lengths])
    if lengths and most is not None and lengths[-1] > most:
        lengths = tuple([min(length, most) for length in lengths])
    return lengths
