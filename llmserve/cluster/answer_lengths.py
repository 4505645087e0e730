"""Predicted lengths of answers, and what the predictor learns from the real lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from llmserve.cluster.in_flight import InFlightCall
from llmserve.cluster.record import LengthRecord
from llmserve.engines.engine import ServedModel
from predictor.prompt import Prompt


class LengthForecast(Protocol):
    """Equally likely output lengths, tokens, ascending; () when nothing is known. The middle length is the median."""

    @property
    def lengths(self) -> tuple[float, ...]: ...

    @property
    def median(self) -> float | None: ...


class LengthForecaster(Protocol):
    """Predicts the lengths of answers in bounded time, and learns from their real lengths."""

    @property
    def fallbacks(self) -> Mapping[str, int]: ...

    async def forecast(self, prompt: Prompt, *, least: float | None, most: float | None) -> Any: ...

    def observe(self, forecast: Any, output_tokens: float, *, capped: bool) -> None: ...


class AnswerLengths:
    """Asks the forecaster for each call, and hands the real lengths to the forecaster and the record.

    forecaster  None: only clients predict lengths
    record      None: lengths are not recorded
    """

    def __init__(self, forecaster: LengthForecaster | None, record: LengthRecord | None) -> None:
        self._forecaster = forecaster
        self._record = record

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Number of forecasts made without the predictor, by reason."""
        return self._forecaster.fallbacks if self._forecaster is not None else {}

    async def predict(
        self, in_flight: InFlightCall, model: ServedModel | None
    ) -> tuple[float | None, tuple[float, ...]]:
        """(median, equally likely lengths) of the answer, output tokens, within the limits of client and model.

        (None, ()) without a prediction. A client's own prediction is a median without lengths.
        """
        call = in_flight.call
        most = call.output_tokens_max or (model.context_tokens if model is not None else None)
        if call.predicted_tokens is not None:
            return min(call.predicted_tokens, most or math.inf), ()
        if self._forecaster is None:
            return None, ()
        least = call.output_tokens_min
        forecast: LengthForecast = await self._forecaster.forecast(call.prompt, least=least, most=most)
        in_flight.forecast = forecast
        return forecast.median, tuple([round(length, 1) for length in forecast.lengths])

    def learn(self, in_flight: InFlightCall, output_tokens: float) -> None:
        """Learn from the length of a completed answer.

        An answer that the client forced to its length (min_tokens, ignore_eos) says nothing about other answers.
        """
        call, most = in_flight.call, in_flight.call.output_tokens_max
        if call.output_tokens_min is not None and output_tokens <= call.output_tokens_min:
            return
        capped = in_flight.cut or (most is not None and output_tokens >= most)
        if self._forecaster is not None and in_flight.forecast is not None:
            self._forecaster.observe(in_flight.forecast, output_tokens, capped=capped)
        if self._record is not None and call.choices == 1:
            self._record.write(call, round(output_tokens), capped=capped)

    def close(self) -> None:
        if self._record is not None:
            self._record.close()
