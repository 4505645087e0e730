"""The nouns every room speaks.

A `Request` and a `Batch` are what the scheduler sees and the journal keeps: identifiers, lengths, times, never
a prompt or an answer. A `Call` is what the client really sent; it stays between the HTTP entrance and the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from bins.profile import StepTimes
from predictor.prompt import Prompt


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion asked for by one client.

    id                unique within one server's or simulation's life
    predicted_tokens  predicted output tokens, the median; None when nothing predicts (the request then shares bin 0)
    deadline_s        on the scheduler's clock; None: no deadline
    quantiles         equally likely output lengths, ascending; () when only the median is known
    prompt_tokens     estimated; 0 when unknown
    choices           answers that share the prompt, each as long as predicted
    prefixes          hashes of ever longer beginnings of what the engine reads; () when nothing is to be kept together
    model             that is to answer; "" where there is only one
    stream            whose requests these are: the name of a key or an application; "" when nobody says
    """

    id: int
    predicted_tokens: float | None = None
    deadline_s: float | None = None
    quantiles: tuple[float, ...] = ()
    prompt_tokens: float = 0.0
    choices: int = 1
    prefixes: tuple[int, ...] = ()
    model: str = ""
    stream: str = ""

    @property
    def expected_tokens(self) -> float | None:
        """Mean predicted output tokens of one choice, where there are quantiles to take it of; else the median."""
        return sum(self.quantiles) / len(self.quantiles) if self.quantiles else self.predicted_tokens


class Batch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests released together from one bin, to run together; under some orders shorter ones ride along.

    A barrier engine starts a batch whole. A refill engine may start it in several parts, each with the same id.
    size: requests that it was formed of, whether or not they are all in this part.  model: of all of them.
    """

    id: int
    bin: int
    requests: tuple[Request, ...]
    formed_at_s: float
    size: int
    model: str = ""


class EngineInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine as the scheduler knows it.

    slots       requests it runs at once, >= 1
    barrier     True: runs one batch to its end (static batching); False: a slot refills as its request ends
    look_ahead  requests that a refill engine may hold beyond its slots, so that a slot does not wait for the way there
    tokens_max  tokens, prompts and answers, that its KV cache holds; None: not known, or no concern
    models      that it serves; (): whatever is asked for
    worker      the GPU that it shares with the other engines of this name: barrier engines of one worker run one batch
                at a time between them; "": it has one for itself
    speeds      what batches take, by model, where it is known ("": of every other model); in a journal
                {model: {"prefill_s": seconds, "step_s": [seconds, ...]}}
    """

    name: str
    slots: int
    barrier: bool
    look_ahead: int = 0
    tokens_max: int | None = None
    models: tuple[str, ...] = ()
    worker: str = ""
    speeds: dict[str, StepTimes] = {}

    def serves(self, model: str) -> bool:
        return not self.models or model in self.models


@dataclass(frozen=True, slots=True)
class Call:
    """What a client asked, as it came: forwarded to an engine unchanged but for `usage_added`.

    path               the endpoint, e.g. "/v1/chat/completions"
    body               JSON bytes for the engine
    prompt             what the length predictor reads
    stream             the client wants server-sent events
    usage_added        `stream_options.include_usage` was put into `body` by us: its event is kept from the client
    choices            answers asked for at once (`n` times the prompts): they share one count of output tokens
    output_tokens_max  the client's limit on each
    output_tokens_min  no answer is shorter than this (min_tokens; with ignore_eos the limit itself)
    slo_s              the answer is wanted within so many seconds of its arrival
    predicted_tokens   the client's own prediction, used instead of the predictor's
    opening            the first characters of what the engine reads, in its order
    prompt_ids         tokens of a prompt that came as token ids; 0: it came as text
    headers            of the client's, for the engine too: (lower-case name, value) pairs
    stream_name        whose requests these are: the name of the client's key or application; "" when nobody says
    """

    path: str
    body: bytes = field(repr=False)
    prompt: Prompt = field(repr=False)
    stream: bool
    usage_added: bool = False
    choices: int = 1
    output_tokens_max: int | None = None
    output_tokens_min: int | None = None
    slo_s: float | None = None
    predicted_tokens: float | None = None
    opening: str = field(default="", repr=False)
    prompt_ids: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    stream_name: str = ""

    @property
    def model(self) -> str:
        return self.prompt.model
