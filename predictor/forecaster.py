"""What a server asks: the trained predictor, under a limit of time, and what was learnt from the answers since."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from predictor.online import Forecast, OnlineLearner, bounded
from predictor.prompt import Prompt

log = logging.getLogger(__name__)


class Predictor(Protocol):
    """Predicts equally likely output tokens; may raise anything, may be slow."""

    async def predict(self, prompt: Prompt) -> Sequence[float]: ...


class Forecaster:
    """Forecasts cost a request `budget_s` at most, whatever the predictor does; then, or without a predictor, what was
    seen of earlier answers serves alone.

    fallbacks : forecasts without their predictor, by reason ("slow", "failed").
    """

    def __init__(self, predictor: Predictor | None, learner: OnlineLearner, *, budget_s: float) -> None:
        self.fallbacks: Counter[str] = Counter()
        self.learner = learner
        self._predictor = predictor
        self._budget_s = budget_s
        self._failing = False

    async def forecast(self, prompt: Prompt, *, least: float | None = None, most: float | None = None) -> Forecast:
        """The answer's equally likely lengths, between its least (min_tokens) and its most (max_tokens)."""
        forecast = self.learner.forecast(prompt, await self._predict(prompt))
        return replace(forecast, lengths=bounded(forecast.lengths, least=least, most=most))

    def observe(self, forecast: Forecast, output_tokens: float, *, capped: bool = False) -> None:
        """How long the answer became. capped : it was cut at its max_tokens."""
        self.learner.observe(forecast, output_tokens, capped)

    async def _predict(self, prompt: Prompt) -> Sequence[float] | None:
        if self._predictor is None:
            return None
        try:
            async with asyncio.timeout(self._budget_s):
                lengths = await self._predictor.predict(prompt)
        except TimeoutError:
            self._fell_back("slow", f"it took more than {self._budget_s:g} s")
        except Exception as error:
            self._fell_back("failed", str(error))
        else:
            self._failing = False
            return lengths
        return None

    def _fell_back(self, reason: str, why: str) -> None:
        """Counted each time, said once until the predictor answers again."""
        self.fallbacks[reason] += 1
        if not self._failing:
            log.warning("the length predictor failed (%s); earlier answers serve instead", why)
        self._failing = True


class ForecasterByModel:
    """A forecaster for each of some models, and one for all others: what one learns the others do not hear of.

    forecasters : by model.
    """

    def __init__(self, forecasters: Mapping[str, Forecaster], *, others: Forecaster) -> None:
        self._forecasters = forecasters
        self._others = others

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Of all models together."""
        return sum((one.fallbacks for one in self._forecasters.values()), Counter(self._others.fallbacks))

    async def forecast(self, prompt: Prompt, *, least: float | None = None, most: float | None = None) -> Forecast:
        return await self._of(prompt.model).forecast(prompt, least=least, most=most)

    def observe(self, forecast: Forecast, output_tokens: float, *, capped: bool = False) -> None:
        self._of(forecast.model).observe(forecast, output_tokens, capped=capped)

    def _of(self, model: str) -> Forecaster:
        return self._forecasters.get(model, self._others)
