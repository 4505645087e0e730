"""From the journal to Prometheus: what `/metrics` shows.

Counters and histograms are made of the steps that pass through the journal; gauges read the scheduler at the moment of
a scrape.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

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
    FailRequest,
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
        self._batch_size = batch_size
        self._open: dict[int, tuple[Request, float]] = {}  # id -> request, arrival
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
        self._energy = _Energy(cluster, meters)
        self._dispatch = _Dispatch(energy_known)
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
            self._open[event.request.id] = (event.request, step.now_s)
            if event.request.predicted_tokens is not None:
                self._predicted.observe(event.request.predicted_tokens)
        elif type(event) is RequestEnded:
            if not (event.outcome == "failed" and event.retryable):  # it may run again: its end is still to come
                self._end(event.request_id, event.outcome, event.output_tokens, step.now_s)
        elif type(event) is BatchEnded:
            for request_id, tokens in event.output_tokens.items():
                self._end(request_id, "completed", tokens, step.now_s)
        elif type(event) is RequestCancelled:
            self._end(event.request_id, "cancelled", 0, step.now_s)
        elif type(event) is EngineLost and not event.planned:
            self._lost.labels(event.engine).inc()
        elif type(event) is DispatchSolved:
            self._dispatch.follow(event.plan)
        for action in step.actions:
            if type(action) is StartBatch:
                self._start(action, step.now_s)
            elif type(action) is SolveDispatch:
                self._dispatch.observed = action.observed
            elif type(action) is FailRequest:
                self._rejected.labels(action.reason).inc()
                refused = type(event) is RequestArrived and event.request.id == action.request_id
                self._end(action.request_id, "rejected" if refused else "failed", 0, step.now_s)

    def _start(self, action: StartBatch, now_s: float) -> None:
        if self._begins(action.batch.id):
            self._batches.inc()
            self._fill.observe(action.batch.size / self._batch_size)
        for request in action.batch.requests:
            if request.id in self._open:
                self._waiting.observe(now_s - self._open[request.id][1])

    def _begins(self, batch_id: int) -> bool:
        """Whether it is seen for the first time: a refill engine takes a batch in parts, a retry brings one back."""
        if batch_id in self._begun:
            return False
        self._begun[batch_id] = None
        if len(self._begun) > BATCHES_KNOWN:
            self._begun.popitem(last=False)
        return True

    def _end(self, request_id: int, outcome: str, tokens: float, now_s: float) -> None:
        request, arrived_at_s = self._open.pop(request_id, (None, 0.0))
        if request is None:
            return
        self._ended.labels(outcome).inc()
        if outcome != "completed":
            return
        self._latency.observe(now_s - arrived_at_s)
        self._energy.completed(tokens * request.choices)
        if tokens:
            self._tokens.inc(tokens * request.choices)
            self._actual.observe(tokens)
            if request.predicted_tokens is not None:
                self._ratio.observe(request.predicted_tokens / tokens)


class _Gauges:
    """State at the moment of the scrape."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        scheduler = self._cluster.scheduler
        bins = GaugeMetricFamily("llmserve_bin_requests", "Requests that wait in a bin", labels=["bin"])
        edges = GaugeMetricFamily(
            "llmserve_bin_edge_tokens", "Lower edge of a bin, tokens (of risk or median)", labels=["bin"]
        )
        lower = (0.0, *scheduler.edges.edges)
        for queue in scheduler.bins:
            bins.add_metric([str(queue.index)], len(queue))
            if queue.index < len(lower):
                edges.add_metric([str(queue.index)], lower[queue.index])
        yield bins
        yield edges
        yield GaugeMetricFamily("llmserve_formed_requests", "Requests in formed batches", value=len(scheduler.formed))
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
        trust = self._cluster.scheduler.trust
        bins = max(len(self._cluster.scheduler.bins), BINS_LEAST)
        accuracy = trust.accuracy(bins)

        def gauge(name: str, help_: str, value: float) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"llmserve_prediction_{name}", help_, value=value)

        yield gauge("trusted", "0 while predictions do not rank answers and one bin serves", float(trust.trusted))
        yield gauge("window_answers", "Answers that the next values look back on", accuracy.answers)
        yield gauge("rank_correlation", "Spearman's, predicted with real lengths", accuracy.rank_correlation)
        yield gauge("bin_accuracy", f"Share predicted into their own of {bins} bins", accuracy.bin_accuracy)
        yield gauge("near_bin_accuracy", "Share predicted into their bin or the next", accuracy.near_accuracy)
        yield gauge("calibration_error", "Mean miss of the predicted quantiles' levels", accuracy.calibration_error)
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
    """The plan that the release follows, and what is expected of it; nothing where it follows none.

    observed  what the last plan was asked for
    """

    def __init__(self, energy_known: bool) -> None:
        self.observed: Observed | None = None
        self._energy_known = energy_known
        self._plan: DispatchPlan | None = None
        self._plans = 0

    def follow(self, plan: DispatchPlan) -> None:
        self._plan = plan
        self._plans += 1

    def collect(self) -> Iterator[Metric]:
        if self.observed is not None:
            yield from self._load(self.observed)
        if self._plan is not None:
            yield from self._expectations(self._plan)

    def _load(self, observed: Observed) -> Iterator[Metric]:
        yield CounterMetricFamily("llmserve_dispatch_plans", "Dispatch plans that came into force", value=self._plans)
        if any(observed.rates_per_s):  # else nothing is known of them yet
            yield GaugeMetricFamily(
                "llmserve_arrival_rate_per_second",
                "Arrivals a second for which the last dispatch plan was asked",
                value=sum(observed.rates_per_s),
            )

    def _expectations(self, plan: DispatchPlan) -> Iterator[Metric]:
        expects = plan.response_s_mean is not None
        values = {
            "queues": ("Queues that the bins are merged into", len(plan.tables)),
            "response_seconds_expected": ("Mean response time that the plan expects", plan.response_s_mean),
            "power_watts_expected": (
                "Mean power of all engines that the plan expects",
                plan.power_w_mean if self._energy_known else None,
            ),
            "target_met": (
                "1 when the plan expects to meet the latency target",
                float(plan.target_met) if expects and plan.latency_target_s is not None else None,
            ),
        }
        for name, (help_, value) in values.items():
            if value is not None:
                yield GaugeMetricFamily(f"llmserve_dispatch_{name}", help_, value=value)
