"""A client's call in flight, which gives the answer to the client."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from llmserve.engines.engine import EngineError, Headers
from llmserve.errors import RequestError
from llmserve.request import Call, Request
from llmserve.scheduling.messages import RequestEnded
from llmserve.wire.answer_forms import StreamReader
from llmserve.wire.error_objects import asked_rest_s
from llmserve.wire.event_stream import Usage


class Receipt(msgspec.Struct, frozen=True):
    """How the front-end served a request: the x-llmserve-* headers of its answer.

    cached_tokens : of the prompt, as the engine tells them with a whole answer; None: it does not, or has not yet
    """

    request_id: int
    bin: int
    batch: int
    engine: str
    queue_ms: float
    predicted_tokens: float | None
    cached_tokens: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The receipt as the field `llmserve` of a stream's last chunk."""
        fields = {"bin": self.bin, "batch": self.batch, "queue_ms": round(self.queue_ms, 1), "engine": self.engine}
        if self.predicted_tokens is not None:
            fields["predicted_tokens"] = round(self.predicted_tokens)
        return fields


def request_name(request_id: int, call: Call) -> str:
    """The x-request-id of the answer: the client's, if sent."""
    return dict(call.wire.headers).get("x-request-id") or f"llmserve-{request_id}"


def told_tokens(call: Call, predicted_tokens: float | None) -> float | None:
    """The prediction as the client is told. None: there is none.

    Forecasts come from all keys' answers. So where there are keys, a client is told a power of two: exact numbers would
    say whether another key has sent this very prompt, and how long its answer was.
    """
    if predicted_tokens is None or not call.bounds.choices:
        return None
    if not call.terms.key or call.terms.predicted_tokens is not None:
        return predicted_tokens
    return 2.0 ** round(math.log2(max(1.0, predicted_tokens)))


class Head(msgspec.Struct, frozen=True):
    """The status and headers of an answer. body : None when the body follows as a stream.  headers : the engine's"""

    status: int
    content_type: str
    retry_after: str | None
    receipt: Receipt
    body: bytes | None
    headers: Headers = ()


def _use(head: Head) -> tuple[int, float]:
    """How much a client can do with an engine's error: the least is the best. A busy engine says when to come again."""
    use = {429: 0, 503: 1, 529: 1, 404: 3}.get(head.status, 2)
    return use, asked_rest_s(head.retry_after, head.headers, time.time()) or math.inf


class Client(Protocol):
    """The receiver of a call's answer. `begin` with a body, `end` and `fail` are the last calls of its methods."""

    async def writable(self) -> None:
        """Wait until the client has read enough, or has gone."""
        ...

    def begin(self, head: Head) -> None: ...

    def write(self, data: bytes) -> bool:
        """Returns whether the client is behind: it reads slower than the answer is written."""
        ...

    @property
    def listens(self) -> bool:
        """Whether the client has got the head of a stream, although no answer has begun: comments may pass."""
        ...

    def end(self) -> None: ...

    def fail(self, error: RequestError, receipt: Receipt | None) -> None:
        """Tell the client that the call failed, before or after its answer began."""
        ...


class Charge(Protocol):
    """The use of one call of a key's limits; see charges.py."""

    def reserve(
        self, in_flight: InFlightCall, prompt_tokens: float, output_tokens: float
    ) -> Coroutine[Any, Any, None] | None:
        """Reserve these tokens. Returns what must be awaited until they are; None: they are.

        Raises RequestError when a limit refuses the call, here or when awaited; then nothing is reserved.
        """
        ...

    def started(self) -> None:
        """Note that an engine runs the call now."""
        ...

    def settle(self, in_flight: InFlightCall, prompt_tokens: float, output_tokens: float | None) -> None:
        """Give back what was not used of the reserve. output_tokens : None: all of it was used"""
        ...


class Trace(Protocol):
    """The trace of one call from engine to engine, for operators; see traces.py."""

    def started(self, in_flight: InFlightCall, now_s: float) -> None:
        """An engine is about to get the call. May add headers for the engine."""
        ...

    def left(self, in_flight: InFlightCall, now_s: float, ended: RequestEnded | None) -> None:
        """The call has ended on its engine. ended : None: the engine was lost"""
        ...


class Answering(Protocol):
    """The answer that an engine gives a call now (live/forwarding.py).

    turn  of the batch, for an engine that goes by priority; else 0
    """

    turn: float

    @property
    def heard_s(self) -> float | None:
        """On the event loop's clock, when the last sign of the answer came, or the request was sent; None: that says
        nothing of the engine now.
        """
        ...

    def lose(self, error: EngineError) -> None:
        """Give up the answer, which the engine has lost; its end follows."""
        ...

    def stop(self) -> None:
        """Abort the request; its end follows."""
        ...

    def close(self) -> None:
        """Abort the request. Nothing follows."""
        ...


class Delivery:
    """The answer on its way to the client.

    gone      the client has left
    answered  the client has received bytes
    complete  the client has the whole answer, or was told of a failure
    behind    the client had too many unread bytes at the last ones; it may be waited for
    error     code of the failure that the client was told of
    refused   an engine's error answer, for the client if no other engine has a better one
    """

    __slots__ = ("_client", "answered", "behind", "complete", "error", "gone", "refused")

    def __init__(self, client: Client) -> None:
        self.gone = self.answered = self.complete = self.behind = False
        self.error = ""
        self.refused: Head | None = None
        self._client = client

    @property
    def over(self) -> bool:
        """Whether the client hears no more."""
        return self.complete or self.gone

    def begin(self, head: Head) -> None:
        """Give the client the head of the answer, and the body if the head has one."""
        self.answered = True
        if self.complete or self.gone:
            return
        self.complete = head.body is not None
        if head.status >= 400:
            self.error = f"engine_status_{head.status}"
        self._client.begin(head)

    def refuse(self, head: Head) -> None:
        """Keep an engine's error answer for the client, unless an earlier one tells the client more."""
        if self.refused is None or _use(head) <= _use(self.refused):
            self.refused = head

    @property
    def listens(self) -> bool:
        """Whether comments may pass before the answer begins."""
        return self._client.listens and not (self.answered or self.complete or self.gone)

    def feed(self, chunk: bytes) -> None:
        """Give the client bytes of a stream."""
        if not (self.complete or self.gone):
            self.behind = self._client.write(chunk)

    async def writable(self) -> None:
        """Wait until the client has read enough, or has gone."""
        await self._client.writable()

    def close(self) -> None:
        """End the stream."""
        if not (self.complete or self.gone):
            self.complete = True
            self._client.end()

    def fail(self, error: RequestError, receipt: Receipt | None) -> None:
        """Tell the client of a failure, unless the whole answer was given."""
        if not (self.complete or self.gone):
            self.complete = True
            self.error = error.code or error.type
            self._client.fail(error, receipt)


class Measured:
    """What is measured of an answer.

    usage       counts the tokens of a stream.  tokens_an_event : which these likely are, until the engine has counted
    counts      the engine's counts of the whole answer
    cut         whether the answer ran into a limit
    first_at_s  when the first event of a stream was forwarded
    last_at_s   when the last event of a complete stream was
    names       ids that the next request of the program may bring: of the answer, and of the tool calls there
    """

    __slots__ = ("counts", "cut", "first_at_s", "last_at_s", "names", "tokens_an_event", "usage")

    def __init__(self) -> None:
        self.usage: StreamReader | None = None
        self.tokens_an_event = 1.0
        self.counts: Usage | None = None
        self.cut = False
        self.names: tuple[str, ...] = ()
        self.first_at_s: float | None = None
        self.last_at_s: float | None = None

    @property
    def streamed_tokens(self) -> int:
        """Tokens of the stream so far, of all its choices."""
        usage = self.usage
        if usage is None:
            return 0
        return usage.output_tokens if usage.counted else round(usage.events * self.tokens_an_event)

    def seconds_between_tokens(self, choices: int) -> float | None:
        """Mean time between two tokens of a complete stream; None: there are not two."""
        if self.first_at_s is None or self.last_at_s is None:
            return None
        steps = self.streamed_tokens / choices - 1.0
        return (self.last_at_s - self.first_at_s) / steps if steps > 0 else None


def _nobody(*_: object) -> Answering:
    raise AssertionError("a call that no engine gets")


class InFlightCall:
    """One client call, from the arrival to the scheduler's last word.

    forward    begins an engine's answer to the call (live/forwarding.py)
    forecast   the forecaster's own object; goes back to the forecaster with the real length
    charge     None: the call uses no limits, or has been settled
    receipt    of the last start on an engine
    answering  None: no engine runs the call
    stopping   whether the call is being stopped by a preemption: the call may start again
    attempts   starts on engines, so far
    """

    def __init__(
        self,
        call: Call,
        request_id: int,
        client: Client,
        charge: Charge | None = None,
        trace: Trace | None = None,
        forward: Callable[..., Answering] = _nobody,
    ) -> None:
        self.call = call
        self.forward = forward
        self.request = Request(request_id)
        self.arrived_at_s = 0.0
        self.forecast: Any = None
        self.charge = charge
        self.trace = trace
        self.receipt: Receipt | None = None
        self.answering: Answering | None = None
        self.stopping = False
        self.attempts = self.preemptions = 0
        self.measured = Measured()
        self.delivery = Delivery(client)

    @property
    def name(self) -> str:
        """The request in the log, and for its client."""
        return request_name(self.request.id, self.call)

    def ran_s(self, now_s: float) -> float:
        """Seconds since the start on an engine."""
        assert self.receipt is not None, "a call that has started has a receipt"
        return max(0.0, now_s - self.arrived_at_s - self.receipt.queue_ms / 1e3)

    def generated_tokens(self, seconds_per_token: float, now_s: float) -> float:
        """Tokens of each answer so far: those that have streamed, or by the time. seconds_per_token : of the model"""
        if self.call.wire.stream:
            return self.measured.streamed_tokens / self.request.sequences
        return self.ran_s(now_s) / seconds_per_token

    def fail(self, error: RequestError) -> None:
        """Tell the client of a failure, unless the whole answer was given."""
        self.delivery.fail(error, self.receipt)
