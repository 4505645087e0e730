"""Learning from the lengths of the answers, while serving and without training.

    predictor's quantiles --recalibration--> calibrated --memory--> forecast --answer--> observe

The predictor may be missing, slow, dead, biased or meant for other traffic. What it says is mapped to what is really
seen (`recalibration`); where an application's or a template's recent lengths forecast better, they take over
(`memory`). It starts cold, every part is bounded, and without a predictor it is all there is: then a model's recent
lengths serve where nothing finer is known.

Pure: no clock, no randomness, no I/O. Not safe for threads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from predictor.memory import Memory, RecentlyUsed, Verdict, keys_of
from predictor.prompt import Prompt
from predictor.quantiles import LENGTH_MAX, LEVELS, MIDDLE, ascending, at_levels, log_length
from predictor.recalibration import Recalibration, width

__all__ = ["LEVELS", "Forecast", "OnlineLearner", "bounded"]


@dataclass(frozen=True, slots=True)
class _Trace:
    """What was said of a request, to be judged by its answer's length."""

    kind: tuple[str, bool, bool]  # model; has stop strings; the predictor says one length only
    predicted: Sequence[float]  # logarithms at LEVELS, as the predictor said; () without one
    width: float
    chain: tuple[bytes, ...]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Forecast:
    """lengths : LEVELS ascending, equally likely output tokens, each at least 1; () when nothing at all is known.
    source : who said so: "predictor", "memory" (of a template or application), "recent" (of the model); or "".
    """

    lengths: tuple[float, ...]
    source: str
    _trace: _Trace = field(repr=False, compare=False)

    @property
    def median(self) -> float | None:
        return self.lengths[MIDDLE] if self.lengths else None

    @property
    def model(self) -> str:
        """Whose answer was forecast."""
        return self._trace.kind[0]


class OnlineLearner:
    """Told of predictions and of the answers' real lengths, it forecasts.

    keys_max         templates and applications that are remembered, some 1.5 kB each; 0: none
    lengths_per_key  last lengths that each of them keeps; with fewer than 8 none is ever trusted
    window           last answers of a model that correct its predictions, and that stand for it without any
    models_max       models (twice, if they are asked with and without stop strings), up to 80 kB each
    """

    def __init__(
        self, *, keys_max: int = 10_000, lengths_per_key: int = 32, window: int = 512, models_max: int = 128
    ) -> None:
        if min(lengths_per_key, window, models_max) < 1 or keys_max < 0:
            raise ValueError("lengths_per_key, window and models_max must be at least 1, keys_max at least 0")
        self.memory = Memory(keys_max, lengths_per_key, window, models_max)
        self.raw_invalid = 0
        self._recalibrations = RecentlyUsed[tuple[str, bool, bool], Recalibration](
            models_max, lambda: Recalibration(window)
        )

    def forecast(self, prompt: Prompt, raw: Sequence[float] | None) -> Forecast:
        """raw : a predictor's equally likely output tokens for this prompt, one or more; None when there is none.

        One that has values that are no lengths (not finite, not positive) is counted in `raw_invalid` and not used.
        """
        predicted = self._read(raw)
        kind = (prompt.model, bool(prompt.stop), raw is not None and len(raw) == 1)
        s = 1.0 if kind[2] or not predicted else width(predicted)
        calibrated = None
        if predicted:
            recalibration = self._recalibrations.get(kind)
            calibrated = recalibration.corrected(predicted, s) if recalibration else ascending(predicted)
        chain = keys_of(prompt)
        verdict = self.memory.judge(chain, calibrated)
        lengths = tuple([math.exp(log) for log in verdict.logs])
        return Forecast(lengths, verdict.source, _Trace(kind, predicted, s, chain, verdict))

    def _read(self, raw: Sequence[float] | None) -> Sequence[float]:
        """Logarithms at LEVELS; () when there is nothing of use."""
        if raw is None:
            return ()
        if len(raw) == 0 or not all(0.0 < length < math.inf for length in raw):  # nan is neither
            self.raw_invalid += 1
            return ()
        return at_levels(sorted([log_length(length) for length in raw]))

    def observe(self, forecast: Forecast, output_tokens: float, capped: bool = False) -> None:
        """The real length of an answer, once.

        capped : it was cut at its request's max_tokens, so that its own length is at least output_tokens. An answer
        without a token, cancelled or failed, tells nothing and is ignored.
        """
        if not 0.0 < output_tokens <= LENGTH_MAX:
            return
        actual, trace = log_length(output_tokens), forecast._trace
        coarsest = self.memory.learn(trace.chain, trace.verdict, actual, capped, predicted=bool(trace.predicted))
        if coarsest and trace.predicted:
            self._recalibrations.used(trace.kind).learn(trace.predicted, trace.width, actual, capped)


def bounded(lengths: tuple[float, ...], *, least: float | None = None, most: float | None = None) -> tuple[float, ...]:
    """The lengths of a forecast under a request's min_tokens and max_tokens; `most` wins over `least`."""
    if least is not None:
        lengths = tuple([max(length, least) for length in lengths])
    if most is not None:
        lengths = tuple([min(length, most) for length in lengths])
    return lengths
