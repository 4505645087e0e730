"""Forecasts of bodies, by the features and the learner of a server, in the caller's own process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from secrets import token_bytes
from typing import Any

from llmserve.errors import BadRequest
from llmserve.forecasts.call_forecast import CallForecast
from llmserve.forecasts.lengths import Forecasts, Made
from llmserve.forecasts.state_file import StateFile
from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.parse import parse_call
from llmserve.request import Call
from predictor.forecaster import Forecaster as Learned
from predictor.online import OnlineLearner

CHAT = "/v1/chat/completions"
UNLIMITED = BodyLimits(
    prompt_chars_max=1 << 40, choices_max=1 << 20, messages_max=1 << 20, tools_max=1 << 20, stops_max=1 << 20
)
SECRET_BYTES = 16

Body = Mapping[str, Any] | str | bytes
"""JSON, or what is written as JSON."""


class Question:
    """A call whose forecast was asked for.

    forecast  what the call will take.  Its answer's length teaches the forecaster, by `answered`, once
    """

    __slots__ = ("_call", "_forecasts", "_made", "forecast")

    def __init__(self, forecasts: Forecasts, call: Call, made: Made) -> None:
        self._forecasts, self._call, self._made = forecasts, call, made
        expected = sum(made.lengths) / len(made.lengths) if made.lengths else made.median
        has_answers = call.bounds.choices > 0
        self.forecast = CallForecast(
            endpoint=call.wire.path,
            model=call.model,
            prompt_tokens=round(forecasts.prompt_tokens.estimate(call), 1),
            answers=call.bounds.choices,
            output_tokens=made.median if has_answers else None,
            expected_tokens=expected if has_answers else None,
            quantiles=made.lengths,
            source=made.source,
            sender=forecasts.history(made),
        )

    def answered(self, answer: Body | int) -> None:
        """Learn from the answer: its body, or the number of its tokens, of all choices together.

        An answer without counts of tokens, such as an error, teaches nothing.
        """
        call, cut, tokens = self._call, False, answer if isinstance(answer, int) else None
        if not isinstance(answer, int):
            whole = call.wire.form.whole(_json(answer))
            if whole is None or whole.failed:
                return
            cut, tokens = whole.cut, whole.usage.completion_tokens
            self._forecasts.learn_prompt(call, whole.usage.prompt_tokens)
        if tokens and call.bounds.choices:
            self._forecasts.learn_answer(call, self._made.own, tokens / call.bounds.choices, cut, "words")


class Forecaster:
    """Forecasts what calls will take, and learns from their answers. Not for several threads at once.

    At first nothing is known; after some dozen answers lengths are ranked. A forecast takes about a quarter of a
    millisecond, an answer somewhat less, and all that is learnt at most 40 MB.

    folder : in which `save` keeps what was learnt, and from which it is read; None: it is not kept. Raises ValueError
    for a folder of something else.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self._learner = OnlineLearner(secret=token_bytes(SECRET_BYTES))
        self._forecasts = Forecasts(Learned(None, self._learner, budget_s=0.0))
        self._kept = StateFile(Path(folder)) if folder is not None else None
        if self._kept is not None and (state := self._kept.read()) is not None:
            self._learner.restore(state["learner"])
            self._forecasts.prompt_tokens.restore(state["prompt_tokens"])

    def ask(self, body: Body, endpoint: str = CHAT, *, sender: str = "") -> Question:
        """What a call will take.

        body      of the call, which is not changed
        endpoint  of OpenAI's, Anthropic's or another API: see docs/guide/endpoints.md
        sender    name of the client, whose answers are weighed apart
        Raises BadRequest, which names the field, for a body that the endpoint does not take.
        """
        if endpoint not in ENDPOINTS:
            raise BadRequest(f"there is no endpoint {endpoint!r}; there are {', '.join(ENDPOINTS)}", param="endpoint")
        call = parse_call(endpoint, _json(body), UNLIMITED, sender=sender)
        made = self._forecasts.made_now(call, None)
        assert made is not None, "there is no trained predictor to ask"
        return Question(self._forecasts, call, made)

    def save(self) -> None:
        """Write what was learnt into the folder, which is made if it is not there. Raises OSError."""
        assert self._kept is not None, "a forecaster without a folder keeps nothing"
        self._kept.path.parent.mkdir(parents=True, exist_ok=True)
        prompt_tokens = self._forecasts.prompt_tokens.state()
        self._kept.write({"learner": self._learner.state(), "prompt_tokens": prompt_tokens})


def _json(value: Body) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()
