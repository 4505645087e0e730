"""Counts by model and stream: requests, tokens, latencies, deadlines and preemptions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from llmserve.observe.counters import Families
from llmserve.request import Request

Outcome = Literal["completed", "failed", "cancelled", "rejected"]
OUTCOMES: tuple[Outcome, ...] = ("completed", "failed", "cancelled", "rejected")
STREAMS_MAX = 1_000  # streams with their own labels; clients choose stream names freely
OTHER_STREAMS = "other"


class StreamCounts:
    """The streams of all models."""

    def __init__(self, families: Families) -> None:
        self.requests = families.counter("llmserve_stream_requests")
        self.tokens = families.counter("llmserve_stream_output_tokens")
        self.latency = families.histogram("llmserve_stream_latency_seconds")
        self.deadlines = families.counter("llmserve_deadlines")
        self.preempted = families.counter("llmserve_preempted_requests")
        self._batches = families.counter("llmserve_preempted_batches")
        self._seconds = families.counter("llmserve_preempted_seconds")
        self._by_labels: dict[tuple[str, str], Stream] = {}
        self._names: set[str] = set()
        self._models_preempted: set[str] = set()

    def of(self, request: Request) -> Stream:
        """Return the counters of the request's stream. After STREAMS_MAX names, new names share OTHER_STREAMS."""
        name = request.stream
        if name not in self._names:
            if len(self._names) < STREAMS_MAX:
                self._names.add(name)
            else:
                name = OTHER_STREAMS
        stream = self._by_labels.get((request.model, name))
        if stream is None:
            stream = self._by_labels[request.model, name] = Stream(self, request.model, name)
        return stream

    def keep(self, models: Collection[str]) -> None:
        """Remove the counters of all other models: new names of adapters may appear without limit."""
        for model, name in [key for key in self._by_labels if key[0] not in models]:
            del self._by_labels[model, name]
            self.tokens.remove(model, name)
            self.latency.remove(model, name)
            self.preempted.remove(model, name)
            for outcome in OUTCOMES:
                self.requests.remove(model, name, outcome)
            for met in ("met", "missed"):
                self.deadlines.remove(model, name, met)
        for model in [model for model in self._models_preempted if model not in models]:
            self._models_preempted.discard(model)
            self._batches.remove(model)
            self._seconds.remove(model)

    def preempt_batch(self, model: str, ran_s: float) -> None:
        self._models_preempted.add(model)
        self._batches.of(model).inc()
        self._seconds.of(model).inc(ran_s)


class Stream:
    """The counters of one stream. A lookup by label per request would cost more than the rest of this module."""

    def __init__(self, streams: StreamCounts, model: str, name: str) -> None:
        self.tokens = streams.tokens.of(model, name)
        self.latency = streams.latency.of(model, name)
        self.preempted = streams.preempted.of(model, name)
        self._requests = {outcome: streams.requests.of(model, name, outcome) for outcome in OUTCOMES}
        self._met = streams.deadlines.of(model, name, "met")
        self._missed = streams.deadlines.of(model, name, "missed")

    def end(self, request: Request, outcome: Outcome, now_s: float) -> None:
        """Count the end of a request. A cancelled request has no deadline any more."""
        self._requests[outcome].inc()
        if request.deadline_s is not None and outcome != "cancelled":
            in_time = outcome == "completed" and now_s <= request.deadline_s
            (self._met if in_time else self._missed).inc()
