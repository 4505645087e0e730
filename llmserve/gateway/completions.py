"""Requests that engines answer: each is admitted, queued, and answered as its engine answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from llmserve.calls.client_request import ClientExchange
from llmserve.calls.in_flight import Head, InFlightCall, Receipt, Trace, request_name
from llmserve.errors import RequestError
from llmserve.estimates.estimator import QueuePosition
from llmserve.gateway.answers import error_parts
from llmserve.gateway.draft import Draft
from llmserve.gateway.intake import Intake
from llmserve.gateway.keep_alive import EVENT_STREAM, comment_of, counts_events
from llmserve.gateway.stages import Admission
from llmserve.http.exchange import CONTROL
from llmserve.programs.sources import PROGRAM_HEADER
from llmserve.request import Call
from llmserve.tenants.buckets import Headers
from llmserve.tenants.keys import GATEWAY
from llmserve.wire.answer_forms import Silence, error_of_body
from llmserve.wire.headers import (
    BATCH_HEADER,
    BIN_HEADER,
    CACHED_HEADER,
    ENGINE_HEADER,
    PREDICTED_HEADER,
    QUEUE_HEADER,
    STREAM_HEADERS,
)

if TYPE_CHECKING:
    from llmserve.live.cluster import LiveCluster

REQUEST_ID = b"x-request-id: %b\r\n"  # the client's, if sent
_LINES = f"{BIN_HEADER}: %d\r\n{BATCH_HEADER}: %d\r\n{QUEUE_HEADER}: %.1f\r\n{ENGINE_HEADER}: %b\r\n"
RECEIPT = REQUEST_ID + _LINES.encode()
PREDICTED = f"{PREDICTED_HEADER}: %.0f\r\n".encode()
PROGRAM = f"{PROGRAM_HEADER}: %012x\r\n".encode()
CACHED = f"{CACHED_HEADER}: %d\r\n".encode()

BeginTrace = Callable[[Call, ClientExchange], Trace | None]
"""Begins to trace a request; None: this one is not traced."""


class Completions(Intake):
    """Admits and queues the requests for engines.

    clients   the stages of clients' requests
    gateways  the stages of requests with the key of gateways, which differ from those of clients in the last list
    """

    def __init__(
        self,
        cluster: LiveCluster,
        clients: Admission,
        gateways: Admission,
        begin_trace: BeginTrace | None = None,
    ) -> None:
        super().__init__(clients)
        self._cluster = cluster
        self._gateways = gateways
        self._begin_trace = begin_trace

    def _take(self, draft: Draft, exchange: ClientExchange) -> None:
        account = draft.account
        assert account is not None, "a request that was admitted has an account"
        call = (self._gateways if account.name == GATEWAY else self._admission).decide(draft)
        answer = ClientAnswer(call, exchange, account)
        trace = self._begin_trace(call, exchange) if self._begin_trace is not None else None
        in_flight = self._cluster.calls.submit(call, answer, account.charge(call.model), trace)
        if exchange.followed:
            exchange.state.call = in_flight
        if not exchange.ended:
            exchange.on_gone = partial(self._cluster.calls.cancel, in_flight)
            if call.wire.stream:
                exchange.on_silence = partial(self._keep_alive, answer, in_flight)

    def _keep_alive(self, answer: ClientAnswer, in_flight: InFlightCall) -> None:
        answer.keep_alive(in_flight, self._cluster.estimator.position_of(in_flight))


def receipt_lines(receipt: Receipt, call: Call) -> bytes:
    """The lines of an answer's head that say how the front-end served its call."""
    name, engine = request_name(receipt.request_id, call).encode(), receipt.engine.encode()
    lines = RECEIPT % (name, receipt.bin, receipt.batch, receipt.queue_ms, engine.translate(None, CONTROL))
    if receipt.predicted_tokens is not None:
        lines += PREDICTED % receipt.predicted_tokens
    if call.terms.program:
        lines += PROGRAM % call.terms.program
    return lines if receipt.cached_tokens is None else lines + CACHED % receipt.cached_tokens


class LimitsTold(Protocol):
    """What an answer tells its client of the limits of the key.

    is_limited : whether the key has any
    """

    @property
    def is_limited(self) -> bool: ...

    def headers(self, model: str) -> Headers: ...


class ClientAnswer:
    """Writes the answer of a call to the client's connection.

    call : as its engine gets it
    """

    __slots__ = ("_account", "_exchange", "call", "write")

    def __init__(self, call: Call, exchange: ClientExchange, account: LimitsTold) -> None:
        self.call = call
        self._exchange = exchange
        self._account = account
        self.write = exchange.write

    @property
    def listens(self) -> bool:
        return self._exchange.started

    async def writable(self) -> None:
        await self._exchange.writable()

    def begin(self, head: Head) -> None:
        exchange = self._exchange
        if exchange.started:  # by a comment, with status 200
            if head.body is not None:
                self._write_error(error_of_body(head.status, head.body), head.receipt)
            return
        exchange.common_headers += receipt_lines(head.receipt, self.call)
        headers = [(b"content-type", head.content_type.encode("latin-1", "replace"))]
        if self._account.is_limited:
            headers += self._account.headers(self.call.model)
        if head.retry_after is not None:
            headers.append((b"retry-after", head.retry_after.encode("latin-1", "replace")))
        headers += head.headers
        if head.body is not None:
            exchange.respond(head.status, headers, head.body)
            return
        told = dict(head.headers)
        headers += [(name, value) for name, value in STREAM_HEADERS if name not in told]
        exchange.start(head.status, headers, None)
        if not head.content_type.startswith(EVENT_STREAM):
            exchange.on_silence = None

    def end(self) -> None:
        self._exchange.end()

    def fail(self, error: RequestError, receipt: Receipt | None) -> None:
        if self._exchange.started:  # the status is already sent
            self._write_error(self.call.wire.form.error(error), receipt)
            return
        status, headers, body = error_parts(error, self._exchange.state.form)
        if receipt is not None:
            self._exchange.common_headers += receipt_lines(receipt, self.call)
        self._exchange.respond(status, headers, body)

    def _write_error(self, body: dict[str, Any], receipt: Receipt | None) -> None:
        """End the stream with an error, in the form of its endpoint."""
        if receipt is not None and self.call.terms.receipt:
            body = {**body, "llmserve": receipt.fields}
        self._exchange.write(self.call.wire.form.last_events(body))
        self._exchange.end()

    def keep_alive(self, in_flight: InFlightCall, queued: QueuePosition | None) -> None:
        """Write a comment that tells the call's place, and what the client counts as a sign of life."""
        if in_flight.measured.usage is not None and in_flight.measured.usage.in_parts:
            return
        if not self._exchange.started:
            self._exchange.common_headers += REQUEST_ID % request_name(in_flight.request.id, self.call).encode()
            headers = [(b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()), *STREAM_HEADERS]
            self._exchange.start(200, headers, None)
        silence = Silence(
            comment_of(queued, running=in_flight.answering is not None),
            in_flight.delivery.answered,
            in_flight.measured.usage,
            counts_events(self._exchange.headers),
        )
        self._exchange.write(self.call.wire.form.keep_alive(silence))
