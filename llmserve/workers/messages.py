"""What relays and the scheduler process tell each other: events in the past tense, orders in the imperative.

A relay numbers its calls. An attempt is one start of a call on an engine; what is said of an earlier one is ignored.
"""

from __future__ import annotations

import msgspec

from llmserve.calls.in_flight import Receipt
from llmserve.errors import RequestError
from llmserve.estimates.estimator import QueuePosition
from llmserve.forecasts.reading import ReadPrompt
from llmserve.programs.sources import Sent
from llmserve.programs.trail import Trail
from llmserve.request import Bounds, Terms
from llmserve.scheduling.messages import RequestEnded
from llmserve.wire.event_stream import Usage
from predictor.prompt import Prompt

Pairs = tuple[tuple[bytes, bytes], ...]


class ToldError(msgspec.Struct, frozen=True, array_like=True):
    """A RequestError, as it crosses to another process."""

    status: int
    type: str
    message: str
    param: str | None
    code: str | None
    retry_after_s: float | None
    headers: Pairs

    @classmethod
    def of(cls, error: RequestError) -> ToldError:
        parts = error.message, error.param, error.code, error.retry_after_s, error.headers
        return cls(error.status, error.type, *parts)

    @property
    def error(self) -> RequestError:
        error = RequestError(self.message, param=self.param, code=self.code, retry_after_s=self.retry_after_s)
        error.status, error.type = self.status, self.type  # type: ignore[misc]  # of this one error
        error.headers = self.headers
        return error


class ToldTrail(msgspec.Struct, frozen=True, array_like=True):
    """A Trail, as it crosses to another process. text : in UTF-8; is_text : whether the trail has it as a str"""

    marks: tuple[int, ...]
    step: int
    about: tuple[str, bytes]
    tool_call: str
    sent: Sent | None
    blocks: tuple[int, ...]
    text: bytes
    is_text: bool

    @classmethod
    def of(cls, trail: Trail) -> ToldTrail:
        text = trail.text
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else bytes(text)
        known = trail.marks, trail.step, trail.about, trail.tool_call, trail.sent, trail.blocks
        return cls(*known, data, isinstance(text, str))

    @property
    def trail(self) -> Trail:
        text = self.text.decode(errors="surrogatepass") if self.is_text else self.text
        return Trail(self.marks, self.step, self.about, self.tool_call, self.sent, self.blocks, text)


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """Send a call to an engine.

    requests  number of requests of the batch on this engine.  turn : of the batch
    limits    headers that tell the client of its key's limits.  queue : the call's route queue; "": none
    holds     whether the call holds a part of budgets, so that `Settled` will follow its end
    """

    number: int
    attempt: int
    receipt: Receipt
    requests: int
    turn: float | None
    model: str
    terms: Terms
    limits: Pairs
    queue: str
    holds: bool


# ---- a relay tells ----------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """A relay's first message. relay : its name, which no other relay has"""

    relay: str


class Arrived(msgspec.Struct, frozen=True, tag="arrived", array_like=True):
    """A request whose body is read. The body stays with the relay.

    headers   those that later stages, and the name of the request, need
    read      the prompt's words, for its forecast; None: they were not read
    waited_s  seconds since its arrival, where an earlier scheduler process was told of it; None: it is new
    All other fields are those of a Draft.
    """

    number: int
    path: str
    stream: bool
    headers: tuple[tuple[str, str], ...]
    address: str
    prompt: Prompt
    bounds: Bounds
    opening: str
    blocks: tuple[int, ...]
    block_share: float
    previous: str
    tier: str
    priority: int
    trail: ToldTrail | None
    key: str
    stream_name: str
    slo_s: float | None
    deadline_s: float | None
    predicted_tokens: float | None
    receipt: bool
    read: ReadPrompt | None = None
    waited_s: float | None = None


class GoesOn(msgspec.Struct, frozen=True, tag="goes_on", array_like=True):
    """A call that runs on an engine since an earlier scheduler process.

    started     as that one ordered it
    waited_s    seconds since its arrival.  ran_s : since its start
    answered, first_at_s, preemptions  as in `Ended`
    is_over     that one was told of the end, which follows again, in case its use of budgets was not written
    """

    arrived: Arrived
    started: Start
    waited_s: float
    ran_s: float
    answered: bool
    first_at_s: float | None
    preemptions: int
    is_over: bool


class Told(msgspec.Struct, frozen=True, tag="told", array_like=True):
    """The scheduler process has been told of all calls of earlier ones."""


class Began(msgspec.Struct, frozen=True, tag="began", array_like=True):
    """The client has got the first byte of an answer. at_s : on the cluster's clock"""

    number: int
    attempt: int
    first_token: bool
    at_s: float


class Ended(msgspec.Struct, frozen=True, tag="ended", array_like=True):
    """A call has ended on its engine.

    complete, error  see Delivery.  refused : status of the error answer that the relay keeps; 0: none
    preemptions      of the call, so far.  All other fields are those of Measured
    """

    number: int
    attempt: int
    ended: RequestEnded
    complete: bool
    answered: bool
    error: str
    refused: int
    preemptions: int
    counts: Usage | None
    tokens: int
    cut: bool
    names: tuple[str, ...]
    first_at_s: float | None
    last_at_s: float | None


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled", array_like=True):
    """The client of a call has left."""

    number: int


class Over(msgspec.Struct, frozen=True, tag="over", array_like=True):
    """The client's request has ended, with or without an answer."""

    number: int


class PromptCounted(msgspec.Struct, frozen=True, tag="prompt", array_like=True):
    """An engine has counted the tokens of a prompt."""

    number: int
    tokens: int


class ResponseKept(msgspec.Struct, frozen=True, tag="kept", array_like=True):
    """An engine keeps a response."""

    number: int
    response_id: str
    engine: str


class Suspected(msgspec.Struct, frozen=True, tag="suspected", array_like=True):
    """An engine has failed a request. The reply comes when it is known whether the engine is down."""

    question: int
    engine: str
    model: str
    unreachable: bool


class NotThere(msgspec.Struct, frozen=True, tag="not_there", array_like=True):
    """An engine has answered 404 or 405. The reply is what the client is told, if not the engine's own words."""

    question: int
    number: int
    engine: str
    status: int
    body: bytes


class AskPlace(msgspec.Struct, frozen=True, tag="ask_place", array_like=True):
    """A stream waits: what is its place in the queue?"""

    number: int


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """A running answer. heard_s : see Answering; None: it says nothing of the engine now"""

    number: int
    attempt: int
    heard_s: float | None
    began: bool
    tokens: int


class Progress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """What a relay sees, twice a second.

    running  answers of engines.  heard : the last byte of each engine, by name
    refused  requests that were refused since the last time, by code
    connections, buffered_bytes, cut  of the relay's server.  cpu_s : processor time of the relay's process so far
    """

    running: tuple[Seen, ...]
    heard: dict[str, float]
    refused: dict[str, int]
    connections: int
    buffered_bytes: int
    cut: dict[str, int]
    cpu_s: float


# ---- the scheduler process tells --------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """The first message.

    secret   of the hashes of prompts.  zero_s : of the cluster's clock, on the system's monotonic clock
    readers  secrets for forecasts/reading.PromptReaders
    """

    secret: bytes
    zero_s: float
    readers: dict[str, bytes]


class Settled(msgspec.Struct, frozen=True, tag="settled", array_like=True):
    """What a call has used of budgets is written, and its end need not be told again."""

    number: int


class UseKeys(msgspec.Struct, frozen=True, tag="use_keys", array_like=True):
    """The keys of clients from now on: their names, by digest. tenants : that tokens may name; None: any"""

    names: dict[bytes, str]
    tenants: tuple[str, ...] | None


class RenewCertificates(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """Read the files of certificates again: the scheduler process has found them good."""


class UseEngine(msgspec.Struct, frozen=True, tag="use_engine", array_like=True):
    """An engine that calls may be sent to from now on.

    sign     of a turn as the field `priority`, see Prober
    outages  of the engine, so far: after a further one it may take other fields than before
    """

    name: str
    url: str
    api_key: str | None
    sign: int
    outages: int


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """Abort an answer; its end follows. preempting : the call may start again"""

    number: int
    attempt: int
    preempting: bool


class GiveUp(msgspec.Struct, frozen=True, tag="give_up", array_like=True):
    """Give up an answer, which the engine has lost; its end follows."""

    number: int
    attempt: int
    message: str


class Drop(msgspec.Struct, frozen=True, tag="drop", array_like=True):
    """Abort an answer; nothing follows."""

    number: int
    attempt: int


class Refuse(msgspec.Struct, frozen=True, tag="refuse", array_like=True):
    """Refuse a request that was never queued."""

    number: int
    error: ToldError


class Fail(msgspec.Struct, frozen=True, tag="fail", array_like=True):
    """Tell the client that its call has failed."""

    number: int
    error: ToldError
    receipt: Receipt | None


class TellRefused(msgspec.Struct, frozen=True, tag="tell_refused", array_like=True):
    """Give the client the error answer of an engine that the relay has kept."""

    number: int


class Place(msgspec.Struct, frozen=True, tag="place", array_like=True):
    """The place of a stream that waits. queued : None: it has none"""

    number: int
    request_id: int
    queued: QueuePosition | None


class Reply(msgspec.Struct, frozen=True, tag="reply", array_like=True):
    """The answer to a question."""

    question: int
    error: ToldError | None = None


class Drain(msgspec.Struct, frozen=True, tag="drain", array_like=True):
    """Refuse new requests: the server shuts down."""

    retry_after_s: float


FromRelay = (
    Hello
    | Arrived
    | GoesOn
    | Told
    | Began
    | Ended
    | Cancelled
    | Over
    | PromptCounted
    | ResponseKept
    | Suspected
    | NotThere
    | AskPlace
    | Progress
)
ToRelay = (
    Welcome
    | UseKeys
    | RenewCertificates
    | UseEngine
    | Start
    | Settled
    | Stop
    | GiveUp
    | Drop
    | Refuse
    | Fail
    | TellRefused
    | Place
    | Reply
    | Drain
)
