"""The Prometheus metrics of `/metrics`.

Counters and histograms follow the steps of the journal; gauges (gauges.py) read the scheduler at the time of a scrape.
Metrics of bins, predictions and plans have the label `model` if there are several models. The counters of a model are
removed when no engine lists the model any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from llmserve.forecasts.saving import Saver
from llmserve.live.driver import LiveCluster
from llmserve.live.journal import Step
from llmserve.observe.counters import Families
from llmserve.observe.energy import EnergyMeter, meter_of_all
from llmserve.observe.gauges import (
    BuildInfo,
    Connections,
    DispatchGauges,
    EnergyGauges,
    Gauges,
    JobGauges,
    Jobs,
    OrderGauges,
    ServerGauges,
    StateGauges,
)
from llmserve.observe.run_metrics import SECONDS, EngineRuns, RunMetrics, RunOutcome
from llmserve.request import Batch, Request
from llmserve.scheduling.messages import (
    BatchEnded,
    DispatchSolved,
    EngineLost,
    EngineReady,
    FailRequest,
    ForecastsRevised,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SolveDispatch,
    StartBatch,
)

TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
RATIO = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
BATCHES_STORED = 1_000  # that start in parts; all parts of a batch start before so many others have begun to
Outcome = Literal["completed", "failed", "cancelled", "rejected"]
OUTCOMES: tuple[Outcome, ...] = ("completed", "failed", "cancelled", "rejected")
STREAMS_MAX = 1_000  # streams with their own labels; clients choose stream names freely
OTHER_STREAMS = "other"
FILL = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


class Metrics:
    """Listens to a live cluster's journal; `render()` returns the text of /metrics.

    meters        meters of the engines' energy, each with a different source
    energy_known  whether dispatch plans know real watts; if False, the expected power is not exported
    saver         saves what was learnt; None: nothing is kept
    families      further counters; None: none
    """

    def __init__(
        self,
        cluster: LiveCluster,
        batch_size: int,
        meters: Sequence[EnergyMeter] = (),
        *,
        energy_known: bool = True,
        saver: Saver | None = None,
        families: Families | None = None,
    ) -> None:
        registry = self.registry = CollectorRegistry()
        self.meter_of_all = meter_of_all(meters)
        self._cluster = cluster
        self._batch_size = batch_size
        self._open: dict[int, _Open] = {}  # by request id
        families = self.families = families or Families()
        self._ended = families.counters("llmserve_requests", "Requests that ended", ["outcome"])
        self._rejected = families.counters(
            "llmserve_rejections", "Requests refused or failed by the front-end", ["reason"]
        )
        self._lost = families.counters("llmserve_engine_losses", "Times an engine was lost", ["engine"])
        self._batches = families.counters("llmserve_batches", "Formed batches that began to run").of()
        self._in_parts: dict[int, None] = {}  # ids of the last batches that start in parts
        self._fill = families.histograms(
            "llmserve_batch_fill", "Requests of a formed batch over the batch size", FILL
        ).of()
        self._predicted = families.histograms("llmserve_predicted_tokens", "Predicted output tokens", TOKENS).of()
        self._revised = families.counters("llmserve_revised_forecasts", "Later forecasts for waiting requests").of()
        self._actual = families.histograms("llmserve_actual_tokens", "Actual output tokens", TOKENS).of()
        self._ratio = families.histograms(
            "llmserve_predicted_over_actual_tokens",
            "Predicted over actual output tokens of completed requests",
            RATIO,
        ).of()
        self._streams = _Streams(families)
        self._runs = RunMetrics(families)
        self._energy = EnergyGauges(cluster, meters)
        self._dispatch = DispatchGauges(cluster, energy_known)
        self._order = OrderGauges(cluster)
        gauges = (Gauges(cluster), StateGauges(saver), self._energy, self._dispatch, self._order, BuildInfo())
        for collector in gauges:
            registry.register(collector)
        ProcessCollector(registry=registry)
        cluster.journal.listen(self.observe)
        cluster.listen(self._runs.answered)  # what the journal does not know: times of tokens, the engine's counts

    def follow_server(self, server: Connections) -> None:
        self.registry.register(ServerGauges(server))

    def follow_jobs(self, jobs: Jobs) -> None:
        self.registry.register(JobGauges(jobs))

    @property
    def order(self) -> str:
        """The order in force, in words."""
        return self._order.order

    def render(self) -> bytes:
        return self.families.text().encode() + generate_latest(self.registry)

    def refused(self, reason: str) -> None:
        """Count a request that the HTTP layer refused before the scheduler got it."""
        self._rejected.of(reason).inc()

    def observe(self, step: Step) -> None:
        event = step.event
        if type(event) is RequestArrived:
            self._open[event.request.id] = _Open(event.request, step.now_s)
            if event.request.predicted_tokens is not None and event.request.choices:
                self._predicted.observe(event.request.predicted_tokens)
        elif type(event) is RequestEnded:
            self._request_ended(event, step.now_s)
        elif type(event) is BatchEnded:
            for request_id, tokens in event.output_tokens.items():
                open_request = self._open.get(request_id)
                _run_ended(open_request, event.engine, "completed")
                self._end(request_id, open_request, "completed", tokens, step.now_s)
        elif type(event) is RequestCancelled:
            open_request = self._open.get(event.request_id)
            if open_request is not None and open_request.engine is not None:
                _run_ended(open_request, open_request.engine, "cancelled")
            self._end(event.request_id, open_request, "cancelled", 0, step.now_s)
        elif type(event) is ForecastsRevised:
            self._revised.inc(len(event.revisions))
        elif type(event) is EngineLost:
            self._engine_lost(event)
        elif type(event) is DispatchSolved:
            self._dispatch.follow(event)
        elif type(event) is EngineReady:  # the engine may list other models than before
            queues = set(self._cluster.fleet.queues)
            self._streams.keep(queues)
            self._runs.keep(queues, self._cluster.fleet.handles)
            self._dispatch.keep(queues)
        for action in step.actions:
            if type(action) is StartBatch:
                self._start(action, step.now_s)
            elif type(action) is SolveDispatch:
                self._dispatch.observed[action.model] = action.observed
            elif type(action) is PreemptBatch:
                self._preempt(action, step.now_s)
            elif type(action) is FailRequest:
                self._rejected.of(action.reason).inc()
                refused = type(event) is RequestArrived and event.request.id == action.request_id
                outcome: Outcome = "rejected" if refused else "failed"
                self._end(action.request_id, self._open.get(action.request_id), outcome, 0, step.now_s)

    def _start(self, action: StartBatch, now_s: float) -> None:
        batch = action.batch
        if self._is_first_start(batch):
            self._batches.inc()
            self._fill.observe(batch.size / self._batch_size)
        for request in batch.requests:
            if (open_request := self._open.get(request.id)) is not None:
                runs = open_request.runs = self._runs.of(request.model, action.engine)
                runs.waiting.observe(now_s - open_request.arrived_at_s)
                open_request.engine = action.engine
                open_request.started_at_s, open_request.is_stopping = now_s, False
                open_request.batch_id = batch.id
                open_request.predicted_tokens = request.predicted_tokens

    def _preempt(self, action: PreemptBatch, now_s: float) -> None:
        stopped = [self._open[id_] for id_ in action.request_ids if id_ in self._open]
        for open_request in stopped:
            open_request.is_stopping = True
            self._streams.of(open_request.request).preempted.inc()
        if stopped:
            started_at_s = min([open_request.started_at_s for open_request in stopped])
            self._streams.preempt_batch(stopped[0].request.model, now_s - started_at_s)

    def _request_ended(self, event: RequestEnded, now_s: float) -> None:
        open_request = self._open.get(event.request_id)
        outcome: RunOutcome = "fault" if event.fault else event.outcome
        if outcome == "cancelled" and open_request is not None and open_request.is_stopping:
            outcome = "preempted"
        _run_ended(open_request, event.engine, outcome, again=event.refused)
        if event.no_socket:
            self._rejected.of("no_socket").inc()
            self._end(event.request_id, open_request, "failed", 0, now_s)
        elif event.outcome == "completed" or not _may_run_again(event, open_request):
            self._end(event.request_id, open_request, event.outcome, event.output_tokens, now_s)

    def _engine_lost(self, event: EngineLost) -> None:
        if not event.planned:
            self._lost.of(event.engine).inc()
        for open_request in self._open.values():
            _run_ended(open_request, event.engine, "lost")

    def _is_first_start(self, batch: Batch) -> bool:
        """Whether no request of the batch has started in it: a refill engine starts a batch in parts, a retry again."""
        for request in batch.requests:
            open_request = self._open.get(request.id)
            if open_request is not None and open_request.batch_id == batch.id:
                return False
        if len(batch.requests) == batch.size:
            return True
        if batch.id in self._in_parts:
            return False
        self._in_parts[batch.id] = None
        if len(self._in_parts) > BATCHES_STORED:
            del self._in_parts[next(iter(self._in_parts))]
        return True

    def _end(self, request_id: int, open_request: _Open | None, outcome: Outcome, tokens: float, now_s: float) -> None:
        """Count the end of a request. open_request : None: it was counted before"""
        if open_request is None:
            return
        del self._open[request_id]
        request, latency_s = open_request.request, now_s - open_request.arrived_at_s
        self._ended.of(outcome).inc()
        stream = self._streams.of(request)
        stream.end(request, outcome, now_s)
        if outcome != "completed":
            return
        if (runs := open_request.runs) is not None:
            runs.latency.observe(latency_s)
            runs.output_tokens.inc(tokens * request.choices)
        stream.latency.observe(latency_s)
        self._energy.completed(tokens * request.choices)
        if tokens:
            stream.tokens.inc(tokens * request.choices)
            self._actual.observe(tokens)
            if open_request.predicted_tokens is not None:
                self._ratio.observe(open_request.predicted_tokens / tokens)


class _Open:
    """A request that has not ended.

    predicted_tokens, batch_id  of its last start
    engine       that runs it; None: it waits.  runs : metrics of its last engine
    is_stopping  its batch was preempted, and the request has not restarted yet
    is_retry     an engine has failed or refused it, or was lost with it
    """

    __slots__ = (
        *("arrived_at_s", "batch_id", "engine", "is_retry", "is_stopping"),
        *("predicted_tokens", "request", "runs", "started_at_s"),
    )

    def __init__(self, request: Request, arrived_at_s: float) -> None:
        self.request = request
        self.arrived_at_s = arrived_at_s
        self.predicted_tokens = request.predicted_tokens
        self.started_at_s = 0.0
        self.batch_id: int | None = None
        self.engine: str | None = None
        self.runs: EngineRuns | None = None
        self.is_stopping = self.is_retry = False


def _run_ended(open_request: _Open | None, engine: str, outcome: RunOutcome, *, again: bool = False) -> None:
    """Count the end of a run, unless it was counted when its client left or its engine was lost.

    again : a run that follows is a retry, whatever the outcome
    """
    if open_request is None or open_request.engine != engine or open_request.runs is None:
        return
    open_request.runs.end(outcome, retry=open_request.is_retry)
    open_request.engine = None
    open_request.is_retry = open_request.is_retry or again or outcome in ("fault", "lost")


def _may_run_again(event: RequestEnded, open_request: _Open | None) -> bool:
    """Whether the scheduler may retry the request: it failed before its first byte, or its batch was preempted.

    If the scheduler does not retry, a FailRequest follows.
    """
    if event.outcome == "failed":
        return event.retryable
    return event.outcome == "cancelled" and open_request is not None and open_request.is_stopping


# ---- by model and stream ------------------------------------------------------------------------------------------


class _Streams:
    """Counters by model and stream: requests, tokens, latencies, deadlines, preemptions."""

    def __init__(self, families: Families) -> None:
        by = ["model", "stream"]
        self.requests = families.counters("llmserve_stream_requests", "Requests that ended", [*by, "outcome"])
        self.tokens = families.counters("llmserve_stream_output_tokens", "Output tokens generated", by)
        self.latency = families.histograms(
            "llmserve_stream_latency_seconds", "From arrival to the end of the answer", SECONDS, by
        )
        self.deadlines = families.counters(
            "llmserve_deadlines",
            "Requests with a deadline: answer complete by the deadline (met), later or never (missed)",
            [*by, "outcome"],
        )
        self.preempted = families.counters("llmserve_preempted_requests", "Times a running request was preempted", by)
        self._batches = families.counters("llmserve_preempted_batches", "Preempted batches", ["model"])
        self._seconds = families.counters(
            "llmserve_preempted_seconds", "Lost run time of preempted batches, seconds", ["model"]
        )
        self._by_labels: dict[tuple[str, str], _Stream] = {}
        self._names: set[str] = set()
        self._models_preempted: set[str] = set()

    def of(self, request: Request) -> _Stream:
        """Return the counters of the request's stream. After STREAMS_MAX names, new names share OTHER_STREAMS."""
        name = request.stream
        if name not in self._names:
            if len(self._names) < STREAMS_MAX:
                self._names.add(name)
            else:
                name = OTHER_STREAMS
        stream = self._by_labels.get((request.model, name))
        if stream is None:
            stream = self._by_labels[request.model, name] = _Stream(self, request.model, name)
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


class _Stream:
    """The counters of one stream. A lookup by label per request would cost more than the rest of this module."""

    def __init__(self, streams: _Streams, model: str, name: str) -> None:
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
