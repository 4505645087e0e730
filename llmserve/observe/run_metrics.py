"""Metrics by model and engine: how requests ran there, what they waited for, how long they took, and their tokens.

A run is one start of a request on an engine. Clients cannot make labels here: an engine that runs a request has listed
its model.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from llmserve.calls.in_flight import InFlightCall
from llmserve.observe.counters import Families

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
RunOutcome = Literal["completed", "failed", "fault", "cancelled", "preempted", "lost"]
RUN_OUTCOMES: tuple[RunOutcome, ...] = ("completed", "failed", "fault", "cancelled", "preempted", "lost")
OUTCOMES_IN_WORDS = (
    "completed, failed (the engine refused it), fault (the engine's own), cancelled, preempted, lost (with the engine)"
)
BY = ("model", "engine")


class RunMetrics:
    """The metrics of all pairs of a model and an engine."""

    def __init__(self, families: Families) -> None:
        counters, histograms = families.counters, families.histograms
        self.runs = counters(
            "llmserve_engine_requests",
            f"Runs of requests that ended, by outcome: {OUTCOMES_IN_WORDS}",
            [*BY, "outcome"],
        )
        self.retries = counters(
            "llmserve_retries",
            "Those of these runs that followed a fault, a refusal or a loss of the request",
            [*BY, "outcome"],
        )
        self.waiting = histograms("llmserve_waiting_seconds", "From arrival to each start on an engine", SECONDS, BY)
        self.first_token = histograms(
            "llmserve_time_to_first_token_seconds",
            "Of streams: from arrival to the first event of the answer",
            FIRST_TOKEN_SECONDS,
            BY,
        )
        self.between_tokens = histograms(
            "llmserve_time_between_tokens_seconds",
            "Of complete streams: mean time between two tokens of an answer, one value for each answer",
            TOKEN_SECONDS,
            BY,
        )
        self.latency = histograms("llmserve_latency_seconds", "From arrival to the end of the answer", SECONDS, BY)
        self.prompt_tokens = counters(
            "llmserve_prompt_tokens", "Tokens of prompts that were answered, as the engines count them", BY
        )
        self.output_tokens = counters("llmserve_output_tokens", "Output tokens of complete answers", BY)
        self._by_labels: dict[tuple[str, str], EngineRuns] = {}

    def of(self, model: str, engine: str) -> EngineRuns:
        runs = self._by_labels.get((model, engine))
        if runs is None:
            runs = self._by_labels[model, engine] = EngineRuns(self, model, engine)
        return runs

    def keep(self, models: Collection[str], engines: Collection[str]) -> None:
        """Remove the metrics of all other models and engines."""
        for labels in [pair for pair in self._by_labels if pair[0] not in models or pair[1] not in engines]:
            del self._by_labels[labels]
            for histograms in (self.waiting, self.first_token, self.between_tokens, self.latency):
                histograms.remove(*labels)
            for counters in (self.prompt_tokens, self.output_tokens):
                counters.remove(*labels)
            for outcome in RUN_OUTCOMES:
                self.runs.remove(*labels, outcome)
                self.retries.remove(*labels, outcome)

    def answered(self, call: InFlightCall) -> None:
        """Count the times and the tokens of a call that has ended."""
        if call.receipt is None:
            return
        runs = self.of(call.request.model, call.receipt.engine)
        if call.counts is not None and call.counts.prompt_tokens:
            runs.prompt_tokens.inc(call.counts.prompt_tokens)
        if call.first_at_s is None:
            return
        runs.first_token.observe(call.first_at_s - call.arrived_at_s)
        if (seconds := call.seconds_between_tokens) is not None:
            runs.between_tokens.observe(seconds)


class EngineRuns:
    """The metrics of one model on one engine."""

    __slots__ = (
        *("_retries", "_runs"),
        *("between_tokens", "first_token", "latency", "output_tokens", "prompt_tokens", "waiting"),
    )

    def __init__(self, metrics: RunMetrics, model: str, engine: str) -> None:
        self.waiting = metrics.waiting.of(model, engine)
        self.first_token = metrics.first_token.of(model, engine)
        self.between_tokens = metrics.between_tokens.of(model, engine)
        self.latency = metrics.latency.of(model, engine)
        self.prompt_tokens = metrics.prompt_tokens.of(model, engine)
        self.output_tokens = metrics.output_tokens.of(model, engine)
        self._runs = {outcome: metrics.runs.of(model, engine, outcome) for outcome in RUN_OUTCOMES}
        self._retries = {outcome: metrics.retries.of(model, engine, outcome) for outcome in RUN_OUTCOMES}

    def end(self, outcome: RunOutcome, *, retry: bool) -> None:
        """Count the end of a run. retry : the request had failed before"""
        self._runs[outcome].inc()
        if retry:
            self._retries[outcome].inc()
