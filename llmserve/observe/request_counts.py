"""Counts of requests by the journal: arrivals, starts, ends, and how long they took."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from llmserve.live.journal import Step
from llmserve.observe.counters import Families
from llmserve.observe.run_counts import EngineRuns, RunCounts, RunOutcome
from llmserve.observe.stream_counts import Outcome, StreamCounts
from llmserve.request import Batch, Request
from llmserve.scheduling.messages import (
    BatchEnded,
    EngineLost,
    FailRequest,
    ForecastsRevised,
    PreemptBatch,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
)
from llmserve.scheduling.queues.waiting import QueuedRequest

BATCHES_STORED = 1_000  # that start in parts; all parts of a batch start before so many others have begun to


class RequestCounts:
    """Counts of requests. Each method but `keep` and `refuse` takes an event or action, and its step of the journal.

    scheduled                    the scheduler's requests, by id
    runs                         counts by model and engine
    completed, completed_tokens  requests that completed, and their output tokens
    """

    def __init__(self, families: Families, batch_size: int, scheduled: Mapping[int, QueuedRequest]) -> None:
        self.runs = RunCounts(families)
        self._scheduled = scheduled
        self.completed, self.completed_tokens = 0, 0.0
        self._open: dict[int, _Open] = {}  # by request id
        self._ended = families.counter("llmserve_requests")
        self._rejected = families.counter("llmserve_rejections")
        self._lost = families.counter("llmserve_engine_losses")
        self._batches = BatchCounts(families, batch_size)
        self._lengths = LengthCounts(families)
        self._streams = StreamCounts(families)

    def keep(self, models: Collection[str], engines: Collection[str]) -> None:
        """Remove the counts of all other models and engines."""
        self._streams.keep(models)
        self.runs.keep(models, engines)

    def refuse(self, reason: str, requests: int = 1) -> None:
        """Count requests that never arrived at the scheduler."""
        self._rejected.of(reason).inc(requests)

    # ---- events ----

    def arrive(self, event: RequestArrived, step: Step) -> None:
        request = event.request
        self._open[request.id] = _Open(request, step.now_s)
        if request.predicted_tokens is not None and request.choices:
            self._lengths.predicted.observe(request.predicted_tokens)

    def adopt(self, event: RequestAdopted, step: Step) -> None:
        """A request runs that has neither arrived nor started here."""
        request, since_s = event.request, step.now_s - event.ran_s
        known = self._open[request.id] = _Open(request, since_s)
        known.engine, known.started_at_s = event.engine.name, since_s
        known.runs = self.runs.of(request.model, event.engine.name)
        if (queued := self._scheduled.get(request.id)) is not None:
            known.forecast_work_s, known.forecast_cached_tokens = queued.service_s, queued.cached_tokens

    def revise(self, event: ForecastsRevised, step: Step) -> None:
        self._lengths.revised.inc(len(event.revisions))

    def end_run(self, event: RequestEnded, step: Step) -> None:
        """Count the end of a run, and the end of its request unless the request may run again."""
        request = self._open.get(event.request_id)
        outcome: RunOutcome = "lost" if event.lost else "fault" if event.fault else event.outcome
        if outcome == "cancelled" and request is not None and request.is_stopping:
            outcome = "preempted"
        _run_ended(request, event.engine, outcome, again=event.refused)
        if event.no_socket:
            self._rejected.of("no_socket").inc()
            self._end(event.request_id, request, "failed", 0, step.now_s)
        elif event.outcome == "completed" or not _may_run_again(event, request):
            if request is not None and request.runs is not None and event.cached_tokens is not None:
                request.runs.forecast_cached_tokens.inc(request.forecast_cached_tokens)
            self._end(event.request_id, request, event.outcome, event.output_tokens, step.now_s)

    def end_batch(self, event: BatchEnded, step: Step) -> None:
        for request_id, tokens in event.output_tokens.items():
            request = self._open.get(request_id)
            _run_ended(request, event.engine, "completed")
            self._end(request_id, request, "completed", tokens, step.now_s)

    def cancel(self, event: RequestCancelled, step: Step) -> None:
        request = self._open.get(event.request_id)
        if request is not None and request.engine is not None:
            _run_ended(request, request.engine, "cancelled")
        self._end(event.request_id, request, "cancelled", 0, step.now_s)

    def lose_engine(self, event: EngineLost, step: Step) -> None:
        if not event.planned:
            self._lost.of(event.engine).inc()
        for request in self._open.values():
            _run_ended(request, event.engine, "lost")

    # ---- actions ----

    def start(self, action: StartBatch, step: Step) -> None:
        batch, engine, now_s = action.batch, action.engine, step.now_s
        has_begun = False
        for request in batch.requests:
            known = self._open.get(request.id)
            if known is None:
                continue
            has_begun = has_begun or known.batch_id == batch.id
            known.engine, known.batch_id = engine, batch.id
            known.started_at_s, known.is_stopping = now_s, False
            known.predicted_tokens = request.predicted_tokens
            if (queued := self._scheduled.get(request.id)) is not None:
                known.forecast_work_s, known.forecast_cached_tokens = queued.service_s, queued.cached_tokens
            runs = known.runs = self.runs.of(request.model, engine)
            runs.waiting.observe(now_s - known.arrived_at_s)
        if not has_begun:
            self._batches.start(batch)

    def preempt(self, action: PreemptBatch, step: Step) -> None:
        stopped = [self._open[id_] for id_ in action.request_ids if id_ in self._open]
        for one in stopped:
            one.is_stopping = True
            self._streams.of(one.request).preempted.inc()
        if stopped:
            started_at_s = min([one.started_at_s for one in stopped])
            self._streams.preempt_batch(stopped[0].request.model, step.now_s - started_at_s)

    def fail(self, action: FailRequest, step: Step) -> None:
        self._rejected.of(action.reason).inc()
        event = step.event
        refused = type(event) is RequestArrived and event.request.id == action.request_id
        outcome: Outcome = "rejected" if refused else "failed"
        self._end(action.request_id, self._open.get(action.request_id), outcome, 0, step.now_s)

    def _end(self, request_id: int, known: _Open | None, outcome: Outcome, tokens: float, now_s: float) -> None:
        """Count the end of a request. known : None: its end was counted before"""
        if known is None:
            return
        del self._open[request_id]
        request, latency_s = known.request, now_s - known.arrived_at_s
        self._ended.of(outcome).inc()
        stream = self._streams.of(request)
        stream.end(request, outcome, now_s)
        if outcome != "completed":
            return
        if (runs := known.runs) is not None:
            runs.latency.observe(latency_s)
            runs.output_tokens.inc(tokens * request.choices)
            runs.forecast_work.inc(known.forecast_work_s)
            runs.work.inc(now_s - known.started_at_s)
        stream.latency.observe(latency_s)
        self.completed += 1
        self.completed_tokens += tokens * request.choices
        if tokens:
            stream.tokens.inc(tokens * request.choices)
            self._lengths.actual.observe(tokens)
            if known.predicted_tokens is not None:
                self._lengths.ratio.observe(known.predicted_tokens / tokens)


class _Open:
    """A request that has not ended.

    predicted_tokens, batch_id, forecast_work_s, forecast_cached_tokens  of its last start
    engine       that runs it; None: it waits.  runs : counts of its last engine
    is_stopping  whether its batch was preempted, and it has not restarted yet
    is_retry     whether an engine has failed or refused it, or was lost with it
    """

    __slots__ = (
        *("arrived_at_s", "batch_id", "engine", "forecast_cached_tokens", "forecast_work_s", "is_retry", "is_stopping"),
        *("predicted_tokens", "request", "runs", "started_at_s"),
    )

    def __init__(self, request: Request, arrived_at_s: float) -> None:
        self.request = request
        self.arrived_at_s = arrived_at_s
        self.predicted_tokens = request.predicted_tokens
        self.started_at_s = self.forecast_work_s = self.forecast_cached_tokens = 0.0
        self.batch_id: int | None = None
        self.engine: str | None = None
        self.runs: EngineRuns | None = None
        self.is_stopping = self.is_retry = False


def _run_ended(known: _Open | None, engine: str, outcome: RunOutcome, *, again: bool = False) -> None:
    """Count the end of a run, unless it was counted when its client left or its engine was lost.

    again : a run that follows is a retry, whatever the outcome
    """
    if known is None or known.engine != engine or known.runs is None:
        return
    known.runs.end(outcome, retry=known.is_retry)
    known.engine = None
    known.is_retry = known.is_retry or again or outcome in ("fault", "lost")


def _may_run_again(event: RequestEnded, known: _Open | None) -> bool:
    """Whether the scheduler may retry the request: it failed before its first byte, or its batch was preempted.

    If the scheduler does not retry, a FailRequest follows.
    """
    if event.outcome == "failed":
        return event.retryable
    return event.outcome == "cancelled" and known is not None and known.is_stopping


class BatchCounts:
    """Formed batches, each counted once: a refill engine starts a batch in parts, and a retry starts one again."""

    def __init__(self, families: Families, batch_size: int) -> None:
        self._batch_size = batch_size
        self._started = families.counter("llmserve_batches").of()
        self._fill = families.histogram("llmserve_batch_fill").of()
        self._in_parts: dict[int, None] = {}  # ids of the last batches that start in parts

    def start(self, batch: Batch) -> None:
        """Count a batch of which no known request has started, unless another part of it has."""
        if len(batch.requests) != batch.size:
            if batch.id in self._in_parts:
                return
            self._in_parts[batch.id] = None
            if len(self._in_parts) > BATCHES_STORED:
                del self._in_parts[next(iter(self._in_parts))]
        self._started.inc()
        self._fill.observe(batch.size / self._batch_size)


class LengthCounts:
    """Predicted and actual lengths of answers.

    revised : later forecasts of waiting requests.  ratio : of predicted over actual lengths of completed requests
    """

    def __init__(self, families: Families) -> None:
        self.predicted = families.histogram("llmserve_predicted_tokens").of()
        self.revised = families.counter("llmserve_revised_forecasts").of()
        self.actual = families.histogram("llmserve_actual_tokens").of()
        self.ratio = families.histogram("llmserve_predicted_over_actual_tokens").of()
