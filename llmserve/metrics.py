"""From the journal to Prometheus: what `/metrics` shows.

Counters and histograms are made of the steps that pass through the journal; gauges read the scheduler at the moment of
a scrape. What there is of each model, bins and predictions and plans, is labelled with it where there are several.
Counters of a model end when no engine lists the model any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bins.dispatch import DispatchPlan, Observed
from llmserve.cluster.journal import Step
from llmserve.cluster.live import LiveCluster
from llmserve.energy import EnergyMeter
from llmserve.request import Request
from llmserve.scheduling.messages import (
    BatchEnded,
    DispatchSolved,
    EngineLost,
    EngineReady,
    FailRequest,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SolveDispatch,
    StartBatch,
)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
RATIO = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
BATCHES_KNOWN = 100_000  # none waits in parts while so many others begin
BINS_LEAST = 8  # that accuracy is told of, however few serve
Outcome = Literal["completed", "failed", "cancelled", "rejected"]
OUTCOMES: tuple[Outcome, ...] = ("completed", "failed", "cancelled", "rejected")
STREAMS_MAX = 100  # told of by name; a client may call its stream as it likes
OTHER_STREAMS = "(others)"
EXPECTATIONS = {
    "queues": "Queues that the bins are merged into",
    "response_seconds_expected": "Mean response time that the plan expects",
    "power_watts_expected": "Mean power of all engines that the plan expects",
    "target_met": "1 when the plan expects to meet the latency target",
}
FILL = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


class Metrics:
    """Listens to a live cluster's journal; `render()` is the text of /metrics.

    meters        of the engines' energy, each with a source of its own
    energy_known  whether the watts that dispatch plans expect are watts; else they are not told
    """

    def __init__(
        self,
        cluster: LiveCluster,
        batch_size: int,
        meters: Sequence[EnergyMeter] = (),
        *,
        energy_known: bool = True,
    ) -> None:
        registry = self.registry = CollectorRegistry()
        self._cluster = cluster
        self._batch_size = batch_size
        self._open: dict[int, _Open] = {}  # by request id
        self._ended = Counter("llmserve_requests", "Requests that ended", ["outcome"], registry=registry)
        self._rejected = Counter(
            "llmserve_rejections", "Requests refused or failed by the front-end", ["reason"], registry=registry
        )
        self._tokens = Counter("llmserve_output_tokens", "Output tokens generated", registry=registry)
        self._lost = Counter("llmserve_engine_losses", "Times an engine was lost", ["engine"], registry=registry)
        self._batches = Counter("llmserve_batches", "Formed batches that began to run", registry=registry)
        self._begun: OrderedDict[int, None] = OrderedDict()  # batches, the last that have begun to run
        self._fill = Histogram(
            "llmserve_batch_fill", "Requests of a formed batch, over the batch size", buckets=FILL, registry=registry
        )
        self._waiting = Histogram(
            "llmserve_waiting_seconds", "From arrival to start on an engine", buckets=SECONDS, registry=registry
        )
        self._latency = Histogram(
            "llmserve_latency_seconds", "From arrival to the end of the answer", buckets=SECONDS, registry=registry
        )
        self._predicted = Histogram(
            "llmserve_predicted_tokens", "Predicted output tokens", buckets=TOKENS, registry=registry
        )
        self._actual = Histogram("llmserve_actual_tokens", "Actual output tokens", buckets=TOKENS, registry=registry)
        self._ratio = Histogram(
            "llmserve_predicted_over_actual_tokens",
            "Predicted over actual output tokens of completed requests",
            buckets=RATIO,
            registry=registry,
        )
        self._streams = _Streams(registry)
        self._energy = _Energy(cluster, meters)
        self._dispatch = _Dispatch(cluster, energy_known)
        for collector in (_Gauges(cluster), self._energy, self._dispatch):
            registry.register(collector)
        cluster.journal.listen(self.observe)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def refused(self, reason: str) -> None:
        """A request that the door turned away before the scheduler heard of it."""
        self._rejected.labels(reason).inc()

    def observe(self, step: Step) -> None:
        event = step.event
        if type(event) is RequestArrived:
            self._open[event.request.id] = _Open(event.request, step.now_s)
            if event.request.predicted_tokens is not None:
                self._predicted.observe(event.request.predicted_tokens)
        elif type(event) is RequestEnded:
            if not self._may_run_again(event):
                self._end(event.request_id, event.outcome, event.output_tokens, step.now_s)
        elif type(event) is BatchEnded:
            for request_id, tokens in event.output_tokens.items():
                self._end(request_id, "completed", tokens, step.now_s)
        elif type(event) is RequestCancelled:
            self._end(event.request_id, "cancelled", 0, step.now_s)
        elif type(event) is EngineLost and not event.planned:
            self._lost.labels(event.engine).inc()
        elif type(event) is DispatchSolved:
            self._dispatch.follow(event)
        elif type(event) is EngineReady:  # which may list other models than before
            self._streams.keep(self._cluster.models)
            self._dispatch.keep(self._cluster.models)
        for action in step.actions:
            if type(action) is StartBatch:
                self._start(action, step.now_s)
            elif type(action) is SolveDispatch:
                self._dispatch.asked[action.model] = action.observed
            elif type(action) is PreemptBatch:
                self._preempt(action, step.now_s)
            elif type(action) is FailRequest:
                self._rejected.labels(action.reason).inc()
                refused = type(event) is RequestArrived and event.request.id == action.request_id
                self._end(action.request_id, "rejected" if refused else "failed", 0, step.now_s)

    def _start(self, action: StartBatch, now_s: float) -> None:
        if self._begins(action.batch.id):
            self._batches.inc()
            self._fill.observe(action.batch.size / self._batch_size)
        for request in action.batch.requests:
            if (known := self._open.get(request.id)) is not None:
                self._waiting.observe(now_s - known.arrived_at_s)
                known.started_at_s, known.is_stopping = now_s, False

    def _preempt(self, action: PreemptBatch, now_s: float) -> None:
        known = [self._open[id_] for id_ in action.request_ids if id_ in self._open]
        for each in known:
            each.is_stopping = True
            self._streams.of(each.request).preempted.inc()
        if known:
            started_at_s = min([each.started_at_s for each in known])
            self._streams.preempt_batch(known[0].request.model, now_s - started_at_s)

    def _may_run_again(self, event: RequestEnded) -> bool:
        """Its end is still to come: failed before its first byte, or stopped for others. Else a FailRequest says so."""
        if event.outcome == "failed":
            return event.retryable
        known = self._open.get(event.request_id)
        return event.outcome == "cancelled" and known is not None and known.is_stopping

    def _begins(self, batch_id: int) -> bool:
        """Whether it is seen for the first time: a refill engine takes a batch in parts, a retry brings one back."""
        if batch_id in self._begun:
            return False
        self._begun[batch_id] = None
        if len(self._begun) > BATCHES_KNOWN:
            self._begun.popitem(last=False)
        return True

    def _end(self, request_id: int, outcome: Outcome, tokens: float, now_s: float) -> None:
        known = self._open.pop(request_id, None)
        if known is None:
            return
        request, latency_s = known.request, now_s - known.arrived_at_s
        self._ended.labels(outcome).inc()
        stream = self._streams.of(request)
        stream.end(request, outcome, now_s)
        if outcome != "completed":
            return
        self._latency.observe(latency_s)
        stream.latency.observe(latency_s)
        self._energy.completed(tokens * request.choices)
        if tokens:
            self._tokens.inc(tokens * request.choices)
            stream.tokens.inc(tokens * request.choices)
            self._actual.observe(tokens)
            if request.predicted_tokens is not None:
                self._ratio.observe(request.predicted_tokens / tokens)


class _Open:
    """A request that has not ended. is_stopping: its batch was preempted, and it has not run again since."""

    __slots__ = ("arrived_at_s", "is_stopping", "request", "started_at_s")

    def __init__(self, request: Request, arrived_at_s: float) -> None:
        self.request = request
        self.arrived_at_s = arrived_at_s
        self.started_at_s = 0.0
        self.is_stopping = False


# ---- by model and stream ------------------------------------------------------------------------------------------


class _Streams:
    """Counters by model and stream: requests, tokens, latencies, deadlines, preemptions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by = ["model", "stream"]
        self.requests = Counter("llmserve_stream_requests", "Requests that ended", [*by, "outcome"], registry=registry)
        self.tokens = Counter("llmserve_stream_output_tokens", "Output tokens generated", by, registry=registry)
        self.latency = Histogram(
            "llmserve_stream_latency_seconds",
            "From arrival to the end of the answer",
            by,
            buckets=SECONDS,
            registry=registry,
        )
        self.deadlines = Counter(
            "llmserve_deadlines",
            "Requests with a deadline whose whole answer was there by then (met), later or never (missed)",
            [*by, "outcome"],
            registry=registry,
        )
        self.preempted = Counter(
            "llmserve_preempted_requests", "Times a running request was stopped for others", by, registry=registry
        )
        self._batches = Counter(
            "llmserve_preempted_batches", "Batches stopped for others", ["model"], registry=registry
        )
        self._seconds = Counter(
            "llmserve_preempted_seconds", "Seconds that such batches had run, for nothing", ["model"], registry=registry
        )
        self._known: dict[tuple[str, str], _Stream] = {}
        self._names: set[str] = set()
        self._models_preempted: set[str] = set()

    def of(self, request: Request) -> _Stream:
        """Beyond so many streams all new ones are one."""
        name = request.stream
        if name not in self._names:
            if len(self._names) < STREAMS_MAX:
                self._names.add(name)
            else:
                name = OTHER_STREAMS
        stream = self._known.get((request.model, name))
        if stream is None:
            stream = self._known[request.model, name] = _Stream(self, request.model, name)
        return stream

    def keep(self, models: Collection[str]) -> None:
        """Those of other models are told no more: names of adapters come and go for ever."""
        for model, name in [key for key in self._known if key[0] not in models]:
            del self._known[model, name]
            for family in (self.tokens, self.latency, self.preempted):
                family.remove(model, name)
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
        self._batches.labels(model).inc()
        self._seconds.labels(model).inc(ran_s)


class _Stream:
    """One stream's: to find them by their labels each time would cost a request more than all the rest here."""

    def __init__(self, streams: _Streams, model: str, name: str) -> None:
        self.tokens = streams.tokens.labels(model, name)
        self.latency = streams.latency.labels(model, name)
        self.preempted = streams.preempted.labels(model, name)
        self._requests = {outcome: streams.requests.labels(model, name, outcome) for outcome in OUTCOMES}
        self._met = streams.deadlines.labels(model, name, "met")
        self._missed = streams.deadlines.labels(model, name, "missed")

    def end(self, request: Request, outcome: Outcome, now_s: float) -> None:
        """One whose client left had no deadline any more."""
        self._requests[outcome].inc()
        if request.deadline_s is not None and outcome != "cancelled":
            in_time = outcome == "completed" and now_s <= request.deadline_s
            (self._met if in_time else self._missed).inc()


# ---- at the moment of the scrape ----------------------------------------------------------------------------------


class _Gauges:
    """State at the moment of the scrape."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        scheduler = self._cluster.scheduler
        lanes = scheduler.lanes
        of = ["model"] if len(lanes) > 1 else []
        bins = GaugeMetricFamily("llmserve_bin_requests", "Requests that wait in a bin", labels=[*of, "bin"])
        edges = GaugeMetricFamily(
            "llmserve_bin_edge_tokens", "Lower edge of a bin, tokens (of risk or median)", labels=[*of, "bin"]
        )
        for model, lane in sorted(lanes.items()):
            lower = (0.0, *lane.edges.edges)
            for queue in lane.bins:
                labels = [*([model] if of else []), str(queue.index)]
                bins.add_metric(labels, len(queue))
                if queue.index < len(lower):
                    edges.add_metric(labels, lower[queue.index])
        yield bins
        yield edges
        formed = {model: len(lane.formed) for model, lane in lanes.items()} or {"": 0}
        yield _by_model("llmserve_formed_requests", "Requests in formed batches", formed)
        ready = GaugeMetricFamily("llmserve_engine_ready", "1 when the engine is up", labels=["engine"])
        running = GaugeMetricFamily("llmserve_engine_running", "Requests on the engine", labels=["engine"])
        slots = GaugeMetricFamily("llmserve_engine_slots", "Requests that it runs at once", labels=["engine"])
        tokens = GaugeMetricFamily(
            "llmserve_engine_predicted_tokens", "What its requests will hold at their ends", labels=["engine"]
        )
        open_ = GaugeMetricFamily(
            "llmserve_engine_circuit_open", "1 while it fails and is left alone or on trial", labels=["engine"]
        )
        for name, state in sorted(scheduler.engines.items()):
            ready.add_metric([name], float(state.ready))
            running.add_metric([name], len(state.running))
            slots.add_metric([name], state.info.slots)
            tokens.add_metric([name], state.total_tokens)
            open_.add_metric([name], float(not state.circuit.closed))
        yield from (ready, running, slots, tokens, open_)
        yield from self._prediction()

    def _prediction(self) -> Iterator[Metric]:
        """How predictions came true, over the scheduler's window."""
        lanes = self._cluster.scheduler.lanes
        bins = max([BINS_LEAST, *[len(lane.bins) for lane in lanes.values()]])
        accuracy = {model: lane.trust.accuracy(bins) for model, lane in lanes.items()}

        def gauge(name: str, help_: str, values: Mapping[str, float]) -> Metric:
            return _by_model(f"llmserve_prediction_{name}", help_, values)

        def of(field: str) -> dict[str, float]:
            return {model: getattr(one, field) for model, one in accuracy.items()}

        trusted = {model: float(lane.trust.trusted) for model, lane in lanes.items()}
        yield gauge("trusted", "0 while predictions do not rank answers and one bin serves", trusted)
        yield gauge("window_answers", "Answers that the next values look back on", of("answers"))
        yield gauge("rank_correlation", "Spearman's, predicted with real lengths", of("rank_correlation"))
        yield gauge("bin_accuracy", f"Share predicted into their own of {bins} bins", of("bin_accuracy"))
        yield gauge("near_bin_accuracy", "Share predicted into their bin or the next", of("near_accuracy"))
        yield gauge("calibration_error", "Mean miss of the predicted quantiles' levels", of("calibration_error"))
        fallbacks = CounterMetricFamily(
            "llmserve_prediction_fallbacks", "Forecasts made without the predictor", labels=["reason"]
        )
        for reason, count in sorted(self._cluster.prediction_fallbacks.items()):
            fallbacks.add_metric([reason], count)
        yield fallbacks


class _Energy:
    """Joules since the start, and what each completed request and each of its tokens took of them.

    What failed or was aborted took energy too, and so did waiting: those that completed bear it all. Of a meter that
    leaves engines out only the joules are told: nobody knows whose requests took them.
    """

    def __init__(self, cluster: LiveCluster, meters: Sequence[EnergyMeter]) -> None:
        self._cluster = cluster
        self._meters = meters
        self._output_tokens = 0.0
        self._requests = 0

    def completed(self, output_tokens: float) -> None:
        self._output_tokens += output_tokens
        self._requests += 1

    def collect(self) -> Iterator[Metric]:
        if not self._meters:
            return
        total = CounterMetricFamily(
            "llmserve_energy_joules", "Energy of the engines, of this machine's GPUs by nvml", labels=["source"]
        )
        by_token = GaugeMetricFamily(
            "llmserve_energy_joules_per_output_token", "Of completed requests, since the start", labels=["source"]
        )
        by_request = GaugeMetricFamily(
            "llmserve_energy_joules_per_request", "Of completed requests, since the start", labels=["source"]
        )
        for meter in self._meters:
            joules = meter.joules(self._cluster.now_s())
            total.add_metric([meter.source], joules)
            if not meter.of_all_work:
                continue
            if self._output_tokens:
                by_token.add_metric([meter.source], joules / self._output_tokens)
            if self._requests:
                by_request.add_metric([meter.source], joules / self._requests)
        yield from (total, by_token, by_request)


class _Dispatch:
    """The plans that the releases follow, and what is expected of them; nothing where they follow none.

    asked  what the last plan of each model was asked for
    """

    def __init__(self, cluster: LiveCluster, energy_known: bool) -> None:
        self.asked: dict[str, Observed] = {}
        self._cluster = cluster
        self._energy_known = energy_known
        self._plans: dict[str, DispatchPlan] = {}
        self._count = 0

    def keep(self, models: Collection[str]) -> None:
        """What there is of other models is told no more."""
        for by_model in (self.asked, self._plans):
            for model in [model for model in by_model if model not in models]:
                del by_model[model]

    def follow(self, event: DispatchSolved) -> None:
        self._plans[event.model] = event.plan
        self._count += 1

    def collect(self) -> Iterator[Metric]:
        if self.asked:
            yield CounterMetricFamily(
                "llmserve_dispatch_plans", "Dispatch plans that came into force", value=self._count
            )
            yield from self._rates()
        if self._plans:
            yield from self._expectations()

    def _rates(self) -> Iterator[Metric]:
        """Of all zeros nothing is known yet."""
        rates = {model: sum(asked.rates_per_s) for model, asked in self.asked.items() if any(asked.rates_per_s)}
        if rates:
            yield self._gauge(
                "llmserve_arrival_rate_per_second",
                "Arrivals a second for which the last dispatch plan was asked",
                rates,
            )

    def _expectations(self) -> Iterator[Metric]:
        told: dict[str, dict[str, float]] = {}
        for model, plan in self._plans.items():
            for name, value in self._told(plan).items():
                if value is not None:
                    told.setdefault(name, {})[model] = value
        for name, values in told.items():
            yield self._gauge(f"llmserve_dispatch_{name}", EXPECTATIONS[name], values)

    def _told(self, plan: DispatchPlan) -> dict[str, float | None]:
        expects = plan.response_s_mean is not None and plan.latency_target_s is not None
        return {
            "queues": len(plan.tables),
            "response_seconds_expected": plan.response_s_mean,
            "power_watts_expected": plan.power_w_mean if self._energy_known else None,
            "target_met": float(plan.target_met) if expects else None,
        }

    def _gauge(self, name: str, help_: str, values: Mapping[str, float]) -> Metric:
        return _by_model(name, help_, values, several=len(self._cluster.scheduler.lanes) > 1)


def _by_model(name: str, help_: str, values: Mapping[str, float], *, several: bool = False) -> Metric:
    """A value of each model; where there is only one, its name is left out."""
    if len(values) == 1 and not several:
        return GaugeMetricFamily(name, help_, value=next(iter(values.values())))
    family = GaugeMetricFamily(name, help_, labels=["model"])
    for model, value in sorted(values.items()):
        family.add_metric([model], value)
    return family
