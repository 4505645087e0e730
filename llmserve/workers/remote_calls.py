"""Calls whose connections a relay holds, as the scheduler process sees them.

Such a call is an `InFlightCall` like all others. Its client, and the answers of its engines, are the objects of this
module: they tell the relay what to do.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from llmserve.calls.in_flight import Head, InFlightCall, Receipt
from llmserve.engines.engine import EngineError
from llmserve.errors import RequestError
from llmserve.live.calls import Calls
from llmserve.live.handle import EngineHandle
from llmserve.request import Batch
from llmserve.scheduling.messages import RequestEnded
from llmserve.tenants.limits import Account
from llmserve.wire.answer_forms import StreamReader
from llmserve.workers import messages
from llmserve.workers.link import Link
from llmserve.workers.messages import ToldError


class RelayLink(Protocol):
    """What a call needs of its relay."""

    link: Link

    def introduce(self, handle: EngineHandle) -> None:
        """Tell the relay where an engine is, unless the relay knows."""
        ...


class StreamSeen:
    """What a relay has seen of a stream, for those who look at streams (live/watchdog.py)."""

    __slots__ = ("began", "output_tokens")

    counted = True  # by the relay

    def __init__(self, began: bool, output_tokens: int) -> None:
        self.began, self.output_tokens = began, output_tokens

    @property
    def reader(self) -> StreamReader:
        return cast(StreamReader, self)


class RemoteAnswer:
    """An engine's answer that a relay forwards; see forwarding.Forwarded. turn : of the batch"""

    __slots__ = ("_calls", "_remote", "attempt", "handle", "heard_s", "in_flight", "turn")

    def __init__(
        self, calls: Calls, handle: EngineHandle, in_flight: InFlightCall, turn: float | None, remote: RemoteCall
    ) -> None:
        self.handle, self.in_flight = handle, in_flight
        self.turn = turn or 0.0
        self.attempt = in_flight.attempts
        self.heard_s: float | None = asyncio.get_running_loop().time()
        self._calls, self._remote = calls, remote

    def stop(self) -> None:
        link = self._remote.relay.link
        if link.is_open:
            link.tell(messages.Stop(self._remote.number, self.attempt, self.in_flight.stopping))
        else:
            asyncio.get_running_loop().call_soon(self._end_lost)

    def _end_lost(self) -> None:
        """The relay has died, and the connection to the engine with it."""
        if self.in_flight.answering is self:
            self._calls.ended(self, RequestEnded(self.handle.name, self.in_flight.request.id, "cancelled"))

    def lose(self, error: EngineError) -> None:
        self._remote.relay.link.tell(messages.GiveUp(self._remote.number, self.attempt, str(error)))

    def close(self) -> None:
        self._remote.relay.link.tell(messages.Drop(self._remote.number, self.attempt))


class RemoteCall:
    """A request of a relay's client; see in_flight.Client.

    account  of the API key, until the request is over; None: it was refused, or is over
    in_flight  None: the request was never queued
    """

    __slots__ = ("account", "in_flight", "number", "relay")

    listens = False

    def __init__(self, relay: RelayLink, number: int) -> None:
        self.relay, self.number = relay, number
        self.account: Account | None = None
        self.in_flight: InFlightCall | None = None

    def forward(self, calls: Calls, handle: EngineHandle, in_flight: InFlightCall, batch: Batch, /) -> RemoteAnswer:
        """Have the relay send the call to an engine; see forwarding.Forwards."""
        receipt, account, call = in_flight.receipt, self.account, in_flight.call
        assert receipt is not None, "a call that starts has a receipt"
        self.relay.introduce(handle)
        in_flight.measured.usage = None
        limits = tuple(account.headers(call.model)) if account is not None and account.is_limited else ()
        self.relay.link.tell(
            messages.Start(
                self.number,
                in_flight.attempts,
                receipt,
                len(batch.requests),
                batch.turn,
                call.model,
                call.terms,
                limits,
                call.route_queue,
                account is not None and bool(account.budgets),
            )
        )
        return RemoteAnswer(calls, handle, in_flight, batch.turn, self)

    def go_on(
        self, calls: Calls, handle: EngineHandle, in_flight: InFlightCall, started: messages.Start
    ) -> RemoteAnswer:
        """Take over an answer that the relay forwards since an earlier scheduler process."""
        self.relay.introduce(handle)
        in_flight.attempts = started.attempt
        return RemoteAnswer(calls, handle, in_flight, started.turn, self)

    @property
    def answering(self) -> RemoteAnswer | None:
        """The answer that the relay forwards; None: none, or it was given up here meanwhile."""
        answering = self.in_flight.answering if self.in_flight is not None else None
        return answering if isinstance(answering, RemoteAnswer) else None

    def release(self) -> None:
        """The client's request is over: it counts no more against the limit of requests at once."""
        if self.account is not None:
            self.account.release()
            self.account = None

    @property
    def over(self) -> bool:
        """Whether both sides are done with the call."""
        return self.account is None and (self.in_flight is None or self.in_flight.answering is None)

    # ---- Client ----

    async def writable(self) -> None:
        return

    def begin(self, head: Head) -> None:
        """Only an error that the relay has kept begins here."""
        self.relay.link.tell(messages.TellRefused(self.number))

    def write(self, data: bytes) -> bool:
        raise AssertionError("tokens never come here")

    def end(self) -> None:
        raise AssertionError("streams end in the relay")

    def fail(self, error: RequestError, receipt: Receipt | None) -> None:
        self.relay.link.tell(messages.Fail(self.number, ToldError.of(error), receipt))
