"""Spans of requests, sent by OTLP: at the gateway, in the queue, on an engine. Imported only with --traces-sample.

    POST /v1/chat/completions        from the first byte of the request to the last of the answer
        queue                        from arrival to the start on an engine; again before each further start
        engine 10.0.0.1:8000         from the start to the end there; the engine's own spans are below this one

A request without `traceparent` is traced by chance, before any span is made; with one, its sampled flag decides. The
names of attributes are from OpenTelemetry's conventions for generative AI; llmserve's own begin with `llmserve`. Spans
have no prompt and no answer.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from llmserve import __version__
from llmserve.calls.in_flight import InFlightCall
from llmserve.request import Call
from llmserve.scheduling.messages import RequestEnded

if TYPE_CHECKING:
    from llmserve.calls.client_request import ClientExchange

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")
OPERATIONS = {"chat/completions": "chat", "completions": "text_completion"}
PROPAGATOR = TraceContextTextMapPropagator()


def otlp() -> SpanProcessor:
    """Sends spans in batches, from a thread, to OTEL_EXPORTER_OTLP_ENDPOINT."""
    return BatchSpanProcessor(OTLPSpanExporter())


class Traces:
    """The traces of requests: which requests are traced, and when a trace ends.

    sample   share of the requests without a traceparent, 0 to 1
    order    the order in force, in words
    now_s    the cluster's clock
    processor  takes the spans
    """

    def __init__(
        self, sample: float, order: Callable[[], str], now_s: Callable[[], float], processor: SpanProcessor
    ) -> None:
        resource = Resource.create({"service.version": __version__})
        if resource.attributes.get("service.name", "").startswith("unknown_service"):  # type: ignore[union-attr]
            resource = resource.merge(Resource({"service.name": "llmserve"}))  # OTEL_SERVICE_NAME names another
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("llmserve", __version__)
        self.order = order
        self.now_s = now_s
        self._sample = sample

    def begin(self, call: Call, exchange: ClientExchange) -> RequestTrace | None:
        """The trace of a request; None: it has none."""
        parent = exchange.headers.get("traceparent")
        known = TRACEPARENT.fullmatch(parent) if parent is not None else None
        if known is not None:
            return RequestTrace(self, call, exchange) if int(known[1], 16) & 1 else None
        return RequestTrace(self, call, exchange) if random.random() < self._sample else None

    def ended(self, exchange: ClientExchange) -> None:
        """End the trace of a request that has ended, if there is one. Called for each request."""
        call = exchange.state.call
        if call is not None and isinstance(call.trace, RequestTrace):
            call.trace.end(call, exchange)

    async def close(self) -> None:
        """Send the last spans."""
        await asyncio.to_thread(self._provider.shutdown)


class RequestTrace:
    """The spans of one request; see in_flight.Trace."""

    def __init__(self, traces: Traces, call: Call, exchange: ClientExchange) -> None:
        now_ns = time.time_ns()
        self._traces = traces
        self._zero_ns = now_ns - int(1e9 * traces.now_s())  # wall time of the cluster's zero
        self._waits_since_ns = now_ns
        self._engine: Span | None = None
        self._gateway = self._tracer.start_span(
            f"POST {exchange.path}",
            context=PROPAGATOR.extract(exchange.headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "url.path": exchange.path, **_requested(call, "llmserve")},
            start_time=now_ns - int(1e9 * exchange.age_s),
        )

    @property
    def _tracer(self) -> Tracer:
        return self._traces.tracer

    def started(self, in_flight: InFlightCall, now_s: float) -> None:
        """End the wait in the queue; begin the span of the engine, and give the engine its name."""
        now_ns, receipt, call = self._ns(now_s), in_flight.receipt, in_flight.call
        assert receipt is not None, "a call that starts has a receipt"
        self._queue(in_flight, now_ns, {"llmserve.bin": receipt.bin, "llmserve.batch": receipt.batch})
        self._engine = self._tracer.start_span(
            f"engine {receipt.engine}",
            context=set_span_in_context(self._gateway),
            kind=SpanKind.CLIENT,
            attributes={
                **_requested(call, "openai"),
                "server.address": receipt.engine,
                "llmserve.attempt": in_flight.attempts,
            },
            start_time=now_ns,
        )
        own = self._engine.get_span_context()
        parent = ("traceparent", f"00-{own.trace_id:032x}-{own.span_id:016x}-01")
        others = tuple([header for header in call.wire.headers if header[0] != "traceparent"])
        wire = msgspec.structs.replace(call.wire, headers=(*others, parent))
        in_flight.call = msgspec.structs.replace(call, wire=wire)

    def left(self, in_flight: InFlightCall, now_s: float, ended: RequestEnded | None) -> None:
        """End the span of the engine. ended : None: the engine was lost"""
        span, self._engine = self._engine, None
        if span is None:
            return
        outcome = "lost" if ended is None else "fault" if ended.fault else ended.outcome
        span.set_attribute("llmserve.outcome", outcome)
        if outcome in ("lost", "fault", "failed"):
            span.set_attribute("error.type", outcome)
            span.set_status(Status(StatusCode.ERROR))
        if in_flight.measured.first_at_s is not None:
            span.add_event("first token", timestamp=self._ns(in_flight.measured.first_at_s))
        _count_tokens(span, in_flight)
        self._waits_since_ns = self._ns(now_s)
        span.end(self._waits_since_ns)

    def end(self, in_flight: InFlightCall, exchange: ClientExchange) -> None:
        """End all spans: the client has its answer, or has gone."""
        now_s, gateway = self._traces.now_s(), self._gateway
        if self._engine is not None:
            self.left(in_flight, now_s, None)
        elif in_flight.attempts == 0:
            self._queue(in_flight, self._ns(now_s), {})
        if exchange.status:
            gateway.set_attribute("http.response.status_code", exchange.status)
        gateway.set_attribute("llmserve.request_id", in_flight.name)
        if in_flight.call.terms.key:
            gateway.set_attribute("llmserve.key", in_flight.call.terms.key)
        _count_tokens(gateway, in_flight)
        if error := in_flight.delivery.error or ("client_gone" if in_flight.delivery.gone else ""):
            gateway.set_attribute("error.type", error)
            if exchange.status >= 500 or exchange.status < 400:
                gateway.set_status(Status(StatusCode.ERROR))
        gateway.end(self._ns(now_s))

    def _queue(self, in_flight: InFlightCall, until_ns: int, further: dict[str, AttributeValue]) -> None:
        """The span of a wait in the queue, with the forecast that the order went by."""
        request = in_flight.request
        attributes: dict[str, AttributeValue] = {"llmserve.order": self._traces.order(), **further}
        if request.predicted_tokens is not None:
            attributes["llmserve.predicted_tokens"] = request.predicted_tokens
        if request.quantiles:
            attributes["llmserve.predicted_tokens.least"] = request.quantiles[0]
            attributes["llmserve.predicted_tokens.most"] = request.quantiles[-1]
        if in_flight.forecast is not None:
            attributes["llmserve.forecast"] = in_flight.forecast.source or "none"
        context = set_span_in_context(self._gateway)
        span = self._tracer.start_span("queue", context=context, attributes=attributes, start_time=self._waits_since_ns)
        span.end(until_ns)

    def _ns(self, now_s: float) -> int:
        return self._zero_ns + int(1e9 * now_s)


def _requested(call: Call, provider: str) -> dict[str, AttributeValue]:
    path = call.wire.path.removeprefix("/v1/")
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": OPERATIONS.get(path, path),
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": call.model,
    }
    if call.bounds.output_tokens_max is not None:
        attributes["gen_ai.request.max_tokens"] = call.bounds.output_tokens_max
    if call.bounds.choices > 1:
        attributes["gen_ai.request.choice.count"] = call.bounds.choices
    return attributes


def _count_tokens(span: Span, in_flight: InFlightCall) -> None:
    counts = in_flight.measured.counts
    if counts is not None and counts.prompt_tokens is not None:
        span.set_attribute("gen_ai.usage.input_tokens", counts.prompt_tokens)
    if counts is not None and counts.cached_tokens is not None:
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", counts.cached_tokens)
    if counts is not None and counts.completion_tokens is not None:
        span.set_attribute("gen_ai.usage.output_tokens", counts.completion_tokens)
