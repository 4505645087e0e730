"""What a call will take, as `POST /v1/forecast` and the library llmserve.forecast tell whoever asks."""

from __future__ import annotations

import msgspec


class Work(msgspec.Struct, frozen=True):
    """Seconds of an engine's slot, at the pace of the model's answers so far.

    prompt_s  for the tokens of the prompt that no engine has in its cache.  answer_s : for all answers to the prompt
    """

    prompt_s: float
    answer_s: float


class SenderHistory(msgspec.Struct, frozen=True):
    """What is known of the answers to one sender: to one key, or to all clients that have none.

    answers        of the sender, so far
    output_tokens  a typical length of them
    correlation    of their lengths with what was forecast from the text alone, -1 to 1
    weight         of each answer in what is learnt, 0 to 1: little of a sender whose lengths look like nonsense
    """

    answers: int
    output_tokens: float
    correlation: float
    weight: float


class CallForecast(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="forecast"):
    """What a call will take.

    endpoint       of the call, such as "/v1/chat/completions"
    model          as the server names it
    prompt_tokens  estimated
    cached_tokens  of these, in the prefix cache of the engine that has most of them
    answers        to the call; 0: the prompt is all the work
    output_tokens  of each answer, the median; None: nothing is known
    expected_tokens  of each answer, the mean; None: nothing is known
    quantiles      equally likely lengths of an answer, ascending; () when there is at most a median
    source         what knew the lengths: "predictor", "memory" (of a template or application), "learner" (of texts),
                   "recent" (of the model), "client"; "none"; "" for a call without answers
    in_force       whether the server orders by forecasts now; None: no server is there
    work           None: the model has not answered yet
    kind           hash of the system prompt and the tools; "" for neither
    sender         None: nothing is known
    """

    endpoint: str
    model: str = ""
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    answers: int = 1
    output_tokens: float | None = None
    expected_tokens: float | None = None
    quantiles: tuple[float, ...] = ()
    source: str = ""
    in_force: bool | None = None
    work: Work | None = None
    kind: str = ""
    sender: SenderHistory | None = None

    def quantile(self, level: float) -> float | None:
        """The length below which an answer stays with this probability, 0 to 1; None: nothing is known.

        Between the quantiles by interpolation; beyond the outer ones, which have half a share of the answers outside,
        the outer ones.
        """
        lengths = self.quantiles
        if not lengths:
            return self.output_tokens
        place = min(max(level * len(lengths) - 0.5, 0.0), len(lengths) - 1.0)
        below = min(int(place), len(lengths) - 2) if len(lengths) > 1 else 0
        above = min(below + 1, len(lengths) - 1)
        return lengths[below] + (place - below) * (lengths[above] - lengths[below])
