"""Forecasts of what calls will take, tokens of prompts and answers, and what is learnt from the real numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from llmserve.calls.in_flight import InFlightCall
from llmserve.calls.prompt_size import PromptTokensByModel
from llmserve.engines.engine import ServedModel
from llmserve.forecasts.call_forecast import SenderHistory
from llmserve.forecasts.record import LengthRecord
from llmserve.forecasts.revisions import Forecast
from llmserve.request import Call
from predictor.prompt import Prompt

PROMPT_TOKENS = 1.0
"""What a request without an answer counts as in an order by lengths: an engine reads a prompt in a step."""
WHOLE = 1.5 * 2.0**52
"""A float of less than 2**51, plus and less this, is a whole number, rounded as by `round`."""
Taught = Literal["nothing", "templates", "words"]
"""What an answer teaches, to save time: nothing, its templates, or its templates and its words."""


class Made(msgspec.Struct, frozen=True, gc=False):
    """The forecast of an answer as it was made, within the limits of client and model.

    median, lengths  output tokens; the equally likely lengths ascend. (None, ()) without a prediction. A client's own
                     prediction is a median without lengths
    source           what knew the lengths, such as "learner"; "client": the client itself; "none": nothing is known;
                     "": there is no answer to forecast
    own              the forecaster's own object, which goes back to the forecaster with the real length; None: it made
                     no forecast
    """

    median: float | None
    lengths: tuple[float, ...] = ()
    source: str = ""
    own: Any = None


class LengthForecast(Protocol):
    """Equally likely output lengths, tokens, ascending; () when nothing is known. The middle length is the median.

    source : what knew the lengths, such as "learner"; "" when nothing is known.
    """

    @property
    def source(self) -> str: ...

    @property
    def lengths(self) -> tuple[float, ...]: ...

    @property
    def median(self) -> float | None: ...


class LengthForecaster(Protocol):
    """A predictor of the lengths of answers, in bounded time, which learns from the real lengths."""

    @property
    def fallbacks(self) -> Mapping[str, int]: ...

    @property
    def secrets(self) -> Mapping[str, bytes]:
        """With which prompts may be read elsewhere (Call.features), by model; "": of all others, if there are any."""
        ...

    def forecast_now(
        self, prompt: Prompt, *, least: float | None, most: float | None, features: Any | None
    ) -> Any | None:
        """The forecast, if no trained predictor has to be asked; else None, and `forecast` asks."""
        ...

    async def forecast(
        self, prompt: Prompt, *, least: float | None, most: float | None, features: Any | None
    ) -> Any: ...

    def observe(self, forecast: Any, output_tokens: float, *, capped: bool, words: bool) -> None: ...


@runtime_checkable
class RevisingForecaster(LengthForecaster, Protocol):
    """A forecaster that renews a forecast after further learning, without encoding the prompt again."""

    def revise(self, forecast: Any, *, least: float | None, most: float | None) -> Any: ...


NO_ANSWER, UNKNOWN = Made(PROMPT_TOKENS), Made(None, (), "none")


@runtime_checkable
class RememberingForecaster(LengthForecaster, Protocol):
    """A forecaster that knows the senders of prompts by their earlier answers."""

    def history(self, forecast: Any) -> Any: ...


class Forecasts:
    """The forecaster of answers, which learns from the real lengths, and the sizes of prompts.

    forecaster     None: only clients predict lengths
    record         gets the real lengths, too; None: lengths are not recorded
    prompt_tokens  None: no sizes of prompts are known from before the start

    sources     number of requests by the source of their first forecast; "client": the client's own; "none": nothing
    learnt      answers from which the forecaster has learnt
    """

    def __init__(
        self,
        forecaster: LengthForecaster | None = None,
        record: LengthRecord | None = None,
        prompt_tokens: PromptTokensByModel | None = None,
    ) -> None:
        self._forecaster = forecaster
        self._reviser = forecaster if isinstance(forecaster, RevisingForecaster) else None
        self._rememberer = forecaster if isinstance(forecaster, RememberingForecaster) else None
        self._record = record
        self.prompt_tokens = PromptTokensByModel() if prompt_tokens is None else prompt_tokens
        self.sources: Counter[str] = Counter()
        self.learnt = 0

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Number of forecasts made without the predictor, by reason."""
        return self._forecaster.fallbacks if self._forecaster is not None else {}

    @property
    def secrets(self) -> Mapping[str, bytes]:
        """For those that read prompts elsewhere; see LengthForecaster."""
        return self._forecaster.secrets if self._forecaster is not None else {}

    def made_now(self, call: Call, model: ServedModel | None) -> Made | None:
        """The forecast of the answer to a call; None: the trained predictor has to be asked, by `made`."""
        bounds = call.bounds
        if not bounds.choices:
            return NO_ANSWER
        most = _most(call, model)
        if call.terms.predicted_tokens is not None:
            return Made(min(call.terms.predicted_tokens, math.inf if most is None else most), (), "client")
        if self._forecaster is None:
            return UNKNOWN
        least = bounds.output_tokens_min
        forecast = self._forecaster.forecast_now(call.prompt, least=least, most=most, features=call.features)
        return None if forecast is None else _made(forecast)

    async def made(self, call: Call, model: ServedModel | None) -> Made:
        """The forecast of the trained predictor, where `made_now` has none."""
        assert self._forecaster is not None, "made_now has nothing to wait for"
        least, most = call.bounds.output_tokens_min, _most(call, model)
        return _made(await self._forecaster.forecast(call.prompt, least=least, most=most, features=call.features))

    async def expected(self, call: Call, model: ServedModel | None) -> float | None:
        """Mean likely tokens of an answer to a call that does not come yet; None: nothing is known."""
        made = self.made_now(call, model) or await self.made(call, model)
        return sum(made.lengths) / len(made.lengths) if made.lengths else made.median

    def history(self, made: Made) -> SenderHistory | None:
        """What is known of the answers to the sender of the call; None: nothing."""
        known = self._rememberer.history(made.own) if self._rememberer is not None and made.own is not None else None
        return None if known is None else SenderHistory(*known)

    def revise(self, in_flight: InFlightCall, model: ServedModel | None) -> Forecast | None:
        """As `predict`, by what was learnt since; None: the forecast stays, and a client's own always does."""
        if self._reviser is None or in_flight.forecast is None:
            return None
        call = in_flight.call
        least, most = call.bounds.output_tokens_min, _most(call, model)
        in_flight.forecast = self._reviser.revise(in_flight.forecast, least=least, most=most)
        return _rounded(in_flight.forecast)

    def learn(self, in_flight: InFlightCall, output_tokens: float, taught: Taught) -> bool:
        """As `learn_answer`, of a call in flight."""
        return self.learn_answer(in_flight.call, in_flight.forecast, output_tokens, in_flight.measured.cut, taught)

    def learn_answer(self, call: Call, own: Any, output_tokens: float, cut: bool, taught: Taught) -> bool:
        """Learn from the length of a completed answer, and record it. True when other forecasts may be revised now.

        An answer that the client forced to its length (min_tokens, ignore_eos) says nothing about other answers.
        own : of the forecast.  output_tokens : of one answer.  cut : whether the answer ran into a limit
        """
        most = call.bounds.output_tokens_max
        if call.bounds.output_tokens_min is not None and output_tokens <= call.bounds.output_tokens_min:
            return False
        capped = cut or (most is not None and output_tokens >= most)
        learns = False
        if self._forecaster is not None and own is not None and taught != "nothing":
            learns = True
            self._forecaster.observe(own, output_tokens, capped=capped, words=taught == "words")
            self.learnt += 1
        if self._record is not None and call.bounds.choices == 1:
            self._record.write(call, round(output_tokens), capped=capped)
        return self._reviser is not None and learns

    def learn_prompt(self, call: Call, tokens: int | None) -> None:
        """Learn from the engine's count of prompt tokens.

        Prompts of token ids have no characters to count, and of a prompt that goes on from an earlier response only
        the end is here.
        """
        if tokens and call.prompt.text and not call.previous:
            self.prompt_tokens.observe(call, tokens)

    def close(self) -> None:
        if self._record is not None:
            self._record.close()


def _most(call: Call, model: ServedModel | None) -> float | None:
    """Tokens that the answer can have at most, by the client's limit and the model's context; None: unknown."""
    most, context = call.bounds.output_tokens_max, model.context_tokens if model is not None else None
    if context is None:
        return most
    room = max(1, context - max(0, call.bounds.context_min - 1))  # beside the prompt
    return room if most is None else min(most, room)


def _made(forecast: LengthForecast) -> Made:
    return Made(*_rounded(forecast), forecast.source or "none", forecast)


def _rounded(forecast: LengthForecast) -> Forecast:
    # `round(length, 1)` takes many times as long, and even `round(10.0 * length)` would be a hundredth of a request.
    return forecast.median, tuple([(10.0 * length + WHOLE - WHOLE) / 10.0 for length in forecast.lengths])
