"""The data types shared by all packages.

The scheduler and the journal use `Request` and `Batch`, which hold identifiers, lengths and times, but never a prompt
or an answer. A `Call` holds the client's HTTP request; only the HTTP layer and the engine clients use calls.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from bins.profile import StepTimes
from predictor.prompt import Prompt

BLOCK_TOKENS = 16  # tokens per block of vLLM's cache: each choice wastes up to one block
BLOCK_BYTES = 512  # of a block whose hash a Request has: some 128 tokens of English


# Defaults of Request, Terms and Draft: a journal leaves out a field only where its value is this very object.
EVEN = 1.0  # the weight of a share
LAST = 0.0  # no item of the same job follows
NO_BLOCKS = 0.0  # tokens of a block of a prompt that has none


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion request of a client.

    id                unique within one run of a server or a simulation
    predicted_tokens  predicted output tokens, the median; None without a prediction (the request then uses bin 0)
    deadline_s        on the scheduler's clock; None: no deadline
    quantiles         equally likely output lengths, ascending; () when only the median is known
    prompt_tokens     estimated; 0 when unknown
    choices           answers that share the prompt, each as long as predicted; 0: the prompt is all the work
    blocks            hashes of the prompt's whole blocks, each of all the prompt up to the block's end; () for a short
                      prompt
    block_tokens      tokens of each block, estimated
    model             id of the model; "" for a single model
    stream            name of the client's key or application; "" when unknown
    sender            hash of who sent the request: of the client's key, or without keys of the prompt; 0 when unknown
    share             who answers for the cost: the engines' time is shared fairly between shares; "": one for all such
    weight            of the share: with twice the weight it is served twice as much, > 0
    background        a line of a job: it takes what other requests leave, until its latest start has come
    after_tokens      predicted output tokens of the lines of its job that follow it
    program           hash of the program that the request is a step of (llmserve/programs); 0: unknown
    parent            program in which this one was begun, or from which it branched off; 0: none, or unknown
    kind              hash of the system prompt and the tools; 0: it has neither
    step              1: a turn begins, with a person's message; n: the turn goes on after n - 1 answers; 0: unknown
    """

    id: int
    predicted_tokens: float | None = None
    deadline_s: float | None = None
    quantiles: tuple[float, ...] = ()
    prompt_tokens: float = 0.0
    choices: int = 1
    blocks: tuple[int, ...] = ()
    block_tokens: float = NO_BLOCKS
    model: str = ""
    stream: str = ""
    sender: int = 0
    share: str = ""
    weight: float = EVEN
    background: bool = False
    after_tokens: float = LAST
    program: int = 0
    parent: int = 0
    kind: int = 0
    step: int = 0

    @property
    def expected_tokens(self) -> float | None:
        """Mean predicted output tokens of one choice, from the quantiles; without quantiles the median."""
        return sum(self.quantiles) / len(self.quantiles) if self.quantiles else self.predicted_tokens

    @property
    def sequences(self) -> int:
        """Sequences that run at once on the engine."""
        return self.choices or 1

    def total_tokens(self, expected_tokens: float) -> int:
        """Tokens in an engine's memory at the end of the request. expected_tokens : of each choice"""
        return math.ceil(self.prompt_tokens + self.choices * (expected_tokens + BLOCK_TOKENS))


class Batch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests that were released together from one bin, to run together. Some orders add shorter requests.

    A barrier engine starts a batch as a whole. A refill engine may start a batch in parts with the same id.
    size: number of requests when the batch was formed, in all parts.  model: of all requests.
    turn: for an engine that goes by priority, the batch's key in the order; None: the order has no such key
    """

    id: int
    bin: int
    requests: tuple[Request, ...]
    formed_at_s: float
    size: int
    model: str = ""
    turn: float | None = None


class EngineInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The scheduler's description of an engine.

    slots       requests that the engine runs at once, >= 1
    barrier     True: runs each batch to its end (static batching); False: a slot refills when its request ends
    look_ahead  requests that a refill engine may hold beyond its slots, so that a free slot need not wait for the
                network
    tokens_max  KV cache capacity in tokens, for prompts and answers; None: unknown, or not limited
    models      models that the engine serves; (): any model
    worker      name of the GPU; engines with the same name share the GPU, and barrier engines of one worker run only
                one batch at a time in total; "": the engine shares its GPU with no other engine
    speeds      known durations of batches, by model ("": every other model); in a journal
                {model: {"prefill_s": seconds, "step_s": [seconds, ...]}}
    paces       measured over known durations, by model, from before the start
    by_priority whether the engine starts the requests that wait in it by their priority, which is the batch's turn
    models_at_once  models that the engine has in its memory at once, where it loads models on demand; 0: all of them
    loaded      the models that it has there, by its own word, which counts while it runs nothing; None: it does not say
    weights     the model that it loads for a name in `models`, where that is not the name itself
    loads_s     seconds of a load, by model, from before the start
    prefix_cache  whether the engine keeps prompts in its cache for the next that begin so
    """

    name: str
    slots: int
    barrier: bool
    look_ahead: int = 0
    tokens_max: int | None = None
    models: tuple[str, ...] = ()
    worker: str = ""
    speeds: dict[str, StepTimes] = {}
    paces: dict[str, float] = {}
    by_priority: bool = False
    models_at_once: int = 0
    loaded: tuple[str, ...] | None = None
    weights: dict[str, str] = {}
    loads_s: dict[str, float] = {}
    prefix_cache: bool = True

    def serves(self, model: str) -> bool:
        return not self.models or model in self.models


class Written(msgspec.Struct, frozen=True):
    """What the front-end wrote into a body, between two places, instead of the client's bytes."""

    start: int
    stop: int
    before: bytes


class Wire(msgspec.Struct, frozen=True, gc=False):
    """What an engine is sent, and how its answer is read. The engine gets the client's bytes, except for `written`.

    path          the endpoint, e.g. "/v1/chat/completions"
    body          bytes for the engine
    stream        the client requests server-sent events
    written       the gateway's `stream_options.include_usage` in `body`; None: none was added
    headers       headers of the client that are sent to the engine: (lower-case name, value) pairs
    content_type  of the body; "" for JSON
    form          how the answer is read (wire/answer_forms.py); None: as a completion
    """

    path: str
    body: bytes
    stream: bool = False
    written: Written | None = None
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = ""
    form: Any = None

    @property
    def usage_added(self) -> bool:
        """Whether the gateway asks for the event with the counts of a stream, and hides the event from the client."""
        return self.written is not None

    @property
    def sent_body(self) -> bytes:
        """The body without what was added."""
        written = self.written
        if written is None:
            return self.body
        return self.body[: written.start] + written.before + self.body[written.stop :]

    def with_value(self, place: slice, value: bytes) -> Wire:
        """The same with another value in the body, which is not a part of what was written."""
        written, longer = self.written, len(value) - (place.stop - place.start)
        if written is not None and place.start < written.start:
            written = Written(written.start + longer, written.stop + longer, written.before)
        body = self.body[: place.start] + value + self.body[place.stop :]
        return msgspec.structs.replace(self, body=body, written=written)


class Bounds(msgspec.Struct, frozen=True, gc=False):
    """What is certain of a call's length before the call runs.

    choices            number of answers (`n` times the prompts), which share one count of output tokens; 0: none,
                       the prompt is all the work
    output_tokens_max  the client's limit of each answer
    output_tokens_min  least length of each answer (min_tokens; with ignore_eos the limit itself)
    prompt_ids         number of tokens of a prompt in the form of token ids; 0 for text
    tokens_min         tokens that all prompts and answers have together at least
    context_min        tokens that the longest prompt with one answer has at least
    """

    choices: int = 1
    output_tokens_max: int | None = None
    output_tokens_min: int | None = None
    prompt_ids: int = 0
    tokens_min: int = 0
    context_min: int = 0


class Terms(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """For whom a call is served, and on which terms: all that the body does not say.

    A gateway in front of other servers forwards the terms of each call in one header (wire/terms.py), so the
    fields are also a message between two servers.

    key               name of the client's API key; "" when unknown
    share, weight     who answers for the cost, and its weight; see Request
    stream_name       name of the client's key or application; "" when unknown
    slo_s             deadline, seconds after the arrival
    predicted_tokens  the client's own prediction, used instead of the predictor's
    receipt           the client asks for the receipt in the last chunk of its stream
    background        a batch item, see Request; after_tokens, program, parent, kind, step : likewise
    """

    key: str = ""
    share: str = ""
    weight: float = EVEN
    stream_name: str = msgspec.field(default="", name="stream")
    slo_s: float | None = None
    predicted_tokens: float | None = None
    receipt: bool = False
    background: bool = False
    after_tokens: float = LAST
    program: int = 0
    parent: int = 0
    kind: int = 0
    step: int = 0


class Call(msgspec.Struct, frozen=True, gc=False):
    """A client's request for an engine. The stages of its admission make it once (gateway/stages.py).

    prompt          input of the length predictor
    features        of the prompt, for the forecaster, where they were read elsewhere; None: the forecaster reads them
    opening         the first characters of the prompt, in the order of the engine's template
    blocks          hashes of the prompt's blocks, see Request; block_share : each block's share of the prompt
    previous        id of the earlier response that the prompt goes on from; "" for none
    tier, priority  `service_tier` and `priority` of the body: what the client asks for
    deadline_s      deadline on the cluster's clock; None: by `terms.slo_s`
    route queue            name of the queue, see live/route_queues.py; "": the model's own
    member          of a program, which hears of the call's end (programs/known_programs.py); None: nobody is told
    """

    wire: Wire
    prompt: Prompt
    bounds: Bounds = Bounds()
    terms: Terms = Terms()
    opening: str = ""
    blocks: tuple[int, ...] = ()
    block_share: float = 0.0
    previous: str = ""
    tier: str = ""
    priority: int = 0
    deadline_s: float | None = None
    route_queue: str = ""
    member: Any = None
    features: Any = None

    @property
    def path(self) -> str:
        return self.wire.path

    @property
    def model(self) -> str:
        return self.prompt.model

    def __repr__(self) -> str:
        return f"Call to {self.path}"  # a line of the log never has a prompt
