"""Counts by model and engine: runs of requests by outcome, waiting times, latencies and tokens.

A run is one start of a request on an engine. Clients cannot make labels here: an engine that runs a request has listed
its model.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from llmserve.calls.in_flight import InFlightCall
from llmserve.observe.counters import Families
from llmserve.wire.event_stream import Usage

RunOutcome = Literal["completed", "failed", "fault", "cancelled", "preempted", "lost"]
RUN_OUTCOMES: tuple[RunOutcome, ...] = ("completed", "failed", "fault", "cancelled", "preempted", "lost")
CACHED = ("yes", "no", "unknown")  # whether the engine had a token of a prompt in its cache; unknown: it does not tell


class RunCounts:
    """All pairs of a model and an engine."""

    def __init__(self, families: Families) -> None:
        self.runs = families.counter("llmserve_engine_requests")
        self.retries = families.counter("llmserve_retries")
        self.waiting = families.histogram("llmserve_waiting_seconds")
        self.first_token = families.histogram("llmserve_time_to_first_token_seconds")
        self.between_tokens = families.histogram("llmserve_time_between_tokens_seconds")
        self.latency = families.histogram("llmserve_latency_seconds")
        self.prompt_tokens = families.counter("llmserve_prompt_tokens")
        self.output_tokens = families.counter("llmserve_output_tokens")
        self.forecast_cached_tokens = families.counter("llmserve_forecast_cached_tokens")
        self.forecast_work = families.counter("llmserve_forecast_work_seconds")
        self.work = families.counter("llmserve_work_seconds")
        self._by_labels: dict[tuple[str, str], EngineRuns] = {}

    def of(self, model: str, engine: str) -> EngineRuns:
        runs = self._by_labels.get((model, engine))
        if runs is None:
            runs = self._by_labels[model, engine] = EngineRuns(self, model, engine)
        return runs

    def keep(self, models: Collection[str], engines: Collection[str]) -> None:
        """Remove the counts of all other models and engines."""
        for labels in [pair for pair in self._by_labels if pair[0] not in models or pair[1] not in engines]:
            del self._by_labels[labels]
            for histograms in (self.waiting, self.first_token, self.between_tokens, self.latency):
                histograms.remove(*labels)
            for counted in (self.output_tokens, self.forecast_cached_tokens, self.forecast_work, self.work):
                counted.remove(*labels)
            for cached in CACHED:
                self.prompt_tokens.remove(*labels, cached)
            for outcome in RUN_OUTCOMES:
                self.runs.remove(*labels, outcome)
                self.retries.remove(*labels, outcome)

    def answered(self, call: InFlightCall) -> None:
        """Count the times and the tokens of a call that has ended."""
        if call.receipt is None:
            return
        runs = self.of(call.request.model, call.receipt.engine)
        measured = call.measured
        if measured.counts is not None:
            runs.count_prompt(measured.counts)
        if measured.first_at_s is None:
            return
        runs.first_token.observe(measured.first_at_s - call.arrived_at_s)
        if (seconds := measured.seconds_between_tokens(call.call.bounds.choices)) is not None:
            runs.between_tokens.observe(seconds)


class EngineRuns:
    """The counts of one model on one engine."""

    __slots__ = (
        *("_prompt_tokens", "_retries", "_runs"),
        *("between_tokens", "first_token", "forecast_cached_tokens", "forecast_work"),
        *("latency", "output_tokens", "waiting", "work"),
    )

    def __init__(self, counts: RunCounts, model: str, engine: str) -> None:
        self.waiting = counts.waiting.of(model, engine)
        self.first_token = counts.first_token.of(model, engine)
        self.between_tokens = counts.between_tokens.of(model, engine)
        self.latency = counts.latency.of(model, engine)
        self.output_tokens = counts.output_tokens.of(model, engine)
        self.forecast_cached_tokens = counts.forecast_cached_tokens.of(model, engine)
        self.forecast_work, self.work = counts.forecast_work.of(model, engine), counts.work.of(model, engine)
        self._prompt_tokens = {cached: counts.prompt_tokens.of(model, engine, cached) for cached in CACHED}
        self._runs = {outcome: counts.runs.of(model, engine, outcome) for outcome in RUN_OUTCOMES}
        self._retries = {outcome: counts.retries.of(model, engine, outcome) for outcome in RUN_OUTCOMES}

    def count_prompt(self, counts: Usage) -> None:
        """Count the tokens of a prompt that was answered."""
        prompt, cached = counts.prompt_tokens, counts.cached_tokens
        if prompt and cached is None:
            self._prompt_tokens["unknown"].inc(prompt)
        elif prompt and cached is not None:
            self._prompt_tokens["yes"].inc(cached)
            self._prompt_tokens["no"].inc(prompt - cached)

    def end(self, outcome: RunOutcome, *, retry: bool) -> None:
        """Count the end of a run. retry : the request had failed before"""
        self._runs[outcome].inc()
        if retry:
            self._retries[outcome].inc()
