"""Forecasts for a server: a trained predictor within a time limit, corrected by the answers since then."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from predictor.online import Forecast, OnlineLearner, bounded
from predictor.prediction import Prediction
from predictor.prompt import Prompt
from predictor.text_features import Features
from predictor.text_learner import History

log = logging.getLogger(__name__)


class Predictor(Protocol):
    """Predicts the length of an answer; may raise any exception, may be slow."""

    async def predict(self, prompt: Prompt) -> Prediction: ...


class Forecaster:
    """A forecast takes at most about `budget_s`. After that, or without a predictor, the forecast comes from earlier
    answers alone.

    fallbacks : number of forecasts made without the predictor, by reason ("slow", "failed").
    """

    def __init__(self, predictor: Predictor | None, learner: OnlineLearner, *, budget_s: float) -> None:
        self.fallbacks: Counter[str] = Counter()
        self.learner = learner
        self._predictor = predictor
        self._budget_s = budget_s
        self._failing = False

    @property
    def secrets(self) -> Mapping[str, bytes]:
        """The secret for a TextFeatures that reads prompts elsewhere, under ""; {}: no text is read."""
        secret = self.learner.secret
        return {} if secret is None else {"": secret}

    def forecast_now(
        self,
        prompt: Prompt,
        *,
        least: float | None = None,
        most: float | None = None,
        features: Features | None = None,
    ) -> Forecast | None:
        """As `forecast`, where no predictor has to be asked; else None."""
        if self._predictor is not None:
            return None
        return _bounded(self.learner.forecast(prompt, None, features), least, most)

    async def forecast(
        self,
        prompt: Prompt,
        *,
        least: float | None = None,
        most: float | None = None,
        features: Features | None = None,
    ) -> Forecast:
        """Equally likely lengths of the answer, between `least` (min_tokens) and `most` (max_tokens).

        features : of the prompt, where it was read elsewhere; see `secrets`
        """
        forecast = self.learner.forecast(prompt, await self._predict(prompt), features)
        return _bounded(forecast, least, most)

    def revise(self, forecast: Forecast, *, least: float | None = None, most: float | None = None) -> Forecast:
        """The forecast of the same answer by what was learnt since. least, most : as in `forecast`"""
        later = self.learner.revise(forecast)
        return _bounded(later, least, most)

    def history(self, forecast: Forecast) -> History | None:
        """The answers to the sender of a forecast's prompt; None: none is known."""
        return self.learner.history(forecast)

    def observe(self, forecast: Forecast, output_tokens: float, *, capped: bool = False, words: bool = True) -> None:
        """Learn the length of the answer. capped : the answer was cut at its max_tokens.  words : see OnlineLearner"""
        self.learner.observe(forecast, output_tokens, capped, words)

    async def _predict(self, prompt: Prompt) -> Prediction | None:
        if self._predictor is None:
            return None
        try:
            async with asyncio.timeout(self._budget_s):
                prediction = await self._predictor.predict(prompt)
        except TimeoutError:
            self._fell_back("slow", f"no prediction within {self._budget_s:g} s")
        except Exception as error:
            self._fell_back("failed", str(error))
        else:
            self._failing = False
            return prediction
        return None

    def _fell_back(self, reason: str, why: str) -> None:
        """Count each fallback; log only the first until the predictor answers again."""
        self.fallbacks[reason] += 1
        if not self._failing:
            log.warning("the length predictor failed (%s); forecasts come from earlier answers", why)
        self._failing = True


def _bounded(forecast: Forecast, least: float | None, most: float | None) -> Forecast:
    lengths = bounded(forecast.lengths, least=least, most=most)
    return forecast if lengths is forecast.lengths else replace(forecast, lengths=lengths)


class ForecasterByModel:
    """A forecaster for each of some models, and one forecaster for all other models. They learn separately.

    forecasters : by model.
    """

    def __init__(self, forecasters: Mapping[str, Forecaster], *, others: Forecaster) -> None:
        self._forecasters = forecasters
        self._others = others

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Fallbacks of all models together."""
        return sum((forecaster.fallbacks for forecaster in self._forecasters.values()), Counter(self._others.fallbacks))

    @property
    def secrets(self) -> Mapping[str, bytes]:
        """By model; "": of all others."""
        of_models = {model: one.secrets[""] for model, one in self._forecasters.items() if one.secrets}
        return {**of_models, **self._others.secrets}

    def forecast_now(
        self,
        prompt: Prompt,
        *,
        least: float | None = None,
        most: float | None = None,
        features: Features | None = None,
    ) -> Forecast | None:
        return self._of(prompt.model).forecast_now(prompt, least=least, most=most, features=features)

    async def forecast(
        self,
        prompt: Prompt,
        *,
        least: float | None = None,
        most: float | None = None,
        features: Features | None = None,
    ) -> Forecast:
        return await self._of(prompt.model).forecast(prompt, least=least, most=most, features=features)

    def revise(self, forecast: Forecast, *, least: float | None = None, most: float | None = None) -> Forecast:
        return self._of(forecast.model).revise(forecast, least=least, most=most)

    def history(self, forecast: Forecast) -> History | None:
        return self._of(forecast.model).history(forecast)

    def observe(self, forecast: Forecast, output_tokens: float, *, capped: bool = False, words: bool = True) -> None:
        self._of(forecast.model).observe(forecast, output_tokens, capped=capped, words=words)

    def _of(self, model: str) -> Forecaster:
        return self._forecasters.get(model, self._others)
