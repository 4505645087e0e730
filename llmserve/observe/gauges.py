"""Metrics of the scheduler, the engines' energy and the dispatch plans, read at the time of a scrape."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bins.dispatch import DispatchPlan, Observed
from llmserve import __version__
from llmserve.forecasts.saving import Saver
from llmserve.live.driver import LiveCluster
from llmserve.observe.energy import EnergyMeter
from llmserve.scheduling.messages import DispatchSolved
from llmserve.settings.policies import named, order_settings

BINS_MIN = 8  # least number of bins for which accuracy is computed, even if fewer bins are in use
EXPECTATIONS = {
    "queues": "Queues that the bins are merged into",
    "response_seconds_expected": "Mean response time that the plan expects",
    "power_watts_expected": "Mean power of all engines that the plan expects",
    "target_met": "1 when the plan expects to meet the latency target",
}


class Gauges:
    """Gauges of the scheduler's state."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        scheduler = self._cluster.scheduler
        models = scheduler.models
        by = ["model"] if len(models) > 1 else []
        bins = GaugeMetricFamily("llmserve_bin_requests", "Requests waiting in a bin", labels=[*by, "bin"])
        edges = GaugeMetricFamily(
            "llmserve_bin_edge_tokens", "Lower edge of a bin, tokens (of risk or median)", labels=[*by, "bin"]
        )
        for model, queues in sorted(models.items()):
            lower = (0.0, *queues.edges.edges)
            for queue in queues.bins:
                labels = [*([model] if by else []), str(queue.index)]
                bins.add_metric(labels, len(queue))
                if queue.index < len(lower):
                    edges.add_metric(labels, lower[queue.index])
        yield bins
        yield edges
        formed = {model: len(queues.formed) for model, queues in models.items()} or {"": 0}
        yield _by_model("llmserve_formed_requests", "Requests in formed batches", formed)
        yield from self._engines()
        yield from self._prediction()

    def _engines(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("llmserve_engine_ready", "1 when the engine is up", labels=["engine"])
        running = GaugeMetricFamily("llmserve_engine_running", "Requests on the engine", labels=["engine"])
        slots = GaugeMetricFamily("llmserve_engine_slots", "Requests that the engine runs at once", labels=["engine"])
        tokens = GaugeMetricFamily(
            "llmserve_engine_predicted_tokens", "Predicted final KV tokens of the engine's requests", labels=["engine"]
        )
        open_ = GaugeMetricFamily(
            "llmserve_engine_circuit_open", "1 while a failing engine gets no requests, or one trial", labels=["engine"]
        )
        slots_known = GaugeMetricFamily(
            "llmserve_engine_slots_known", "0 while the engine's number of slots is a guess", labels=["engine"]
        )
        load_known = GaugeMetricFamily(
            "llmserve_engine_load_known",
            "1 when the engine's own metrics (vLLM's) say how many requests run and wait in it",
            labels=["engine"],
        )
        pace = GaugeMetricFamily(
            "llmserve_engine_pace_ratio",
            "Measured over profiled durations of the engine's batches, with --profile",
            labels=["engine", "model"],
        )
        for name, state in sorted(self._cluster.scheduler.engines.items()):
            ready.add_metric([name], float(state.ready))
            running.add_metric([name], len(state.running))
            slots.add_metric([name], state.info.slots)
            tokens.add_metric([name], state.total_tokens)
            open_.add_metric([name], float(not state.circuit.closed))
            for model, measured in sorted(state.paces.items()):
                pace.add_metric([name, model], measured.value)
        for name, handle in sorted(self._cluster.fleet.handles.items()):
            if handle.seen:
                slots_known.add_metric([name], float(handle.slots_found))
                load_known.add_metric([name], float(handle.load_known))
        yield from (ready, running, slots, tokens, open_, slots_known, load_known, pace)
        wanted = GaugeMetricFamily(
            "llmserve_engines_wanted", "Engines that the model's requests need, by forecasts", labels=["model"]
        )
        for model, count in sorted(self._cluster.engines_wanted().items()):
            wanted.add_metric([model], count)
        yield wanted

    def _prediction(self) -> Iterator[Metric]:
        """Yield the accuracy of predictions over the scheduler's window."""
        models = self._cluster.scheduler.models
        bins = max([BINS_MIN, *[len(queues.bins) for queues in models.values()]])
        accuracy = {model: queues.trust.accuracy(bins) for model, queues in models.items()}

        def gauge(name: str, help_: str, values: Mapping[str, float]) -> Metric:
            return _by_model(f"llmserve_prediction_{name}", help_, values)

        def of(field: str) -> dict[str, float]:
            return {model: getattr(values, field) for model, values in accuracy.items()}

        trusted = {model: float(queues.trust.trusted) for model, queues in models.items()}
        yield gauge("trusted", "0 while predictions do not rank answers, so that one bin is used", trusted)
        yield gauge("window_answers", "Answers in the window of the prediction metrics", of("answers"))
        yield gauge("rank_correlation", "Spearman's, predicted with real lengths", of("rank_correlation"))
        yield gauge("bin_accuracy", f"Share predicted into the right one of {bins} bins", of("bin_accuracy"))
        yield gauge("near_bin_accuracy", "Share predicted into the right or an adjacent bin", of("near_accuracy"))
        yield gauge("calibration_error", "Mean error of the predicted quantiles' levels", of("calibration_error"))
        fallbacks = CounterMetricFamily(
            "llmserve_prediction_fallbacks", "Forecasts made without the predictor", labels=["reason"]
        )
        for reason, count in sorted(self._cluster.lengths.fallbacks.items()):
            fallbacks.add_metric([reason], count)
        yield fallbacks
        sources = CounterMetricFamily(
            "llmserve_prediction_forecasts",
            "Requests by what gave their first forecast: predictor, learner (of the prompt's words), memory (of its "
            "template), recent (the model's last answers), client, none",
            labels=["source"],
        )
        for source, count in sorted(self._cluster.lengths.sources.items()):
            sources.add_metric([source], count)
        yield sources
        yield CounterMetricFamily(
            "llmserve_prediction_learnt_answers", "Answers learnt since the start", value=self._cluster.lengths.learnt
        )


class BuildInfo:
    """The versions of llmserve and of Python."""

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("llmserve_build_info", "1, with the versions", labels=["python", "version"])
        info.add_metric([platform.python_version(), __version__], 1.0)
        yield info


class StateGauges:
    """How the state of --state was saved. saver : None: nothing is kept, and nothing exported."""

    def __init__(self, saver: Saver | None) -> None:
        self._saver = saver

    def collect(self) -> Iterator[Metric]:
        if self._saver is None:
            return
        last = self._saver.last
        saved = GaugeMetricFamily(
            "llmserve_state_saved_timestamp_seconds", "When what was learnt was last saved, unix time"
        )
        seconds = GaugeMetricFamily("llmserve_state_save_seconds", "Seconds that the last save took")
        size = GaugeMetricFamily("llmserve_state_bytes", "Size of what was last saved")
        if last is not None:
            saved.add_metric([], last.at_s)
            seconds.add_metric([], last.seconds)
            size.add_metric([], last.size)
        yield from (saved, seconds, size)
        yield CounterMetricFamily(
            "llmserve_state_failures", "Times that what was learnt could not be saved", value=self._saver.failures
        )


class Connections(Protocol):
    """What a server tells of its connections, see http/server.py."""

    connections: set[Any]
    cut: Counter[str]

    @property
    def buffered_bytes(self) -> int: ...


class ServerGauges:
    """The connections of clients, and what the server holds for them."""

    def __init__(self, server: Connections) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        server = self._server
        yield GaugeMetricFamily("llmserve_connections", "Connections of clients", len(server.connections))
        yield GaugeMetricFamily(
            "llmserve_buffered_bytes", "Bytes of requests and of unread answers in memory", server.buffered_bytes
        )
        cut = CounterMetricFamily(
            "llmserve_connections_cut", "Connections that the server closed, by reason", labels=["reason"]
        )
        for reason, count in sorted(server.cut.items()):
            cut.add_metric([reason], count)
        yield cut


class Jobs(Protocol):
    """The batch jobs of a server.

    lines_waiting, lines_in_flight  of the jobs that it works on; those in flight wait in the scheduler or run
    lines_ended                     since the start, by outcome
    """

    @property
    def lines_waiting(self) -> int: ...

    @property
    def lines_in_flight(self) -> int: ...

    @property
    def lines_ended(self) -> Mapping[str, int]: ...


class JobGauges:
    """The lines of batch jobs."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        lines = GaugeMetricFamily(
            "llmserve_job_lines", "Lines of batch jobs: waiting in a file, or in flight", labels=["state"]
        )
        lines.add_metric(["waiting"], self._jobs.lines_waiting)
        lines.add_metric(["in_flight"], self._jobs.lines_in_flight)
        yield lines
        ended = CounterMetricFamily(
            "llmserve_job_lines_ended",
            "Lines of batch jobs with a result, by outcome: completed, failed, expired",
            labels=["outcome"],
        )
        for outcome, count in sorted(self._jobs.lines_ended.items()):
            ended.add_metric([outcome], count)
        yield ended


class OrderGauges:
    """order : the order in force, in words"""

    def __init__(self, cluster: LiveCluster) -> None:
        self.order = named(order_settings(cluster.journal.header.scheduling))

    def collect(self) -> Iterator[Metric]:
        order = GaugeMetricFamily("llmserve_order", "1 for the order in force", labels=["settings"])
        order.add_metric([self.order], 1.0)
        yield order


class EnergyGauges:
    """Joules since the start, and joules per completed request and per output token.

    The energy of failed and aborted requests, and of idle engines, is shared among the completed requests. A meter
    that does not cover all engines exports only the total: its joules cannot be assigned to requests.
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
            "llmserve_energy_joules", "Energy of the engines; nvml: of this machine's GPUs", labels=["source"]
        )
        by_token = GaugeMetricFamily(
            "llmserve_energy_joules_per_output_token", "Of completed requests, since the start", labels=["source"]
        )
        by_request = GaugeMetricFamily(
            "llmserve_energy_joules_per_request", "Per completed request, since the start", labels=["source"]
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


class DispatchGauges:
    """The dispatch plans that the releases follow, and the plans' expectations; empty for releases without plans.

    observed  the arrival rates for which the last plan of each model was requested
    """

    def __init__(self, cluster: LiveCluster, energy_known: bool) -> None:
        self.observed: dict[str, Observed] = {}
        self._cluster = cluster
        self._energy_known = energy_known
        self._plans: dict[str, DispatchPlan] = {}
        self._count = 0
        self._fallbacks: Counter[str] = Counter()

    def keep(self, models: Collection[str]) -> None:
        """Remove the metrics of all other models."""
        for by_model in (self.observed, self._plans):
            for model in [model for model in by_model if model not in models]:
                del by_model[model]

    def follow(self, event: DispatchSolved) -> None:
        self._plans[event.model] = event.plan
        self._count += 1
        if event.plan.fallback:
            self._fallbacks[event.plan.fallback] += 1

    def collect(self) -> Iterator[Metric]:
        if self.observed:
            yield CounterMetricFamily("llmserve_dispatch_plans", "Dispatch plans that took effect", value=self._count)
            fallbacks = CounterMetricFamily(
                "llmserve_dispatch_fallbacks",
                "Dispatch plans that are not the best: no plan carries the load, so that no request waits for others "
                "(overload), or a decision process could not be solved (unsolved)",
                labels=["reason"],
            )
            for reason, count in sorted(self._fallbacks.items()):
                fallbacks.add_metric([reason], count)
            yield fallbacks
            yield from self._rates()
        if self._plans:
            yield from self._expectations()

    def _rates(self) -> Iterator[Metric]:
        """Yield the arrival rates. All rates of a model are 0 until they have been measured."""
        rates = {
            model: sum(arrivals.rates_per_s) for model, arrivals in self.observed.items() if any(arrivals.rates_per_s)
        }
        if rates:
            yield self._gauge(
                "llmserve_arrival_rate_per_second",
                "Arrivals per second for which the last dispatch plan was requested",
                rates,
            )

    def _expectations(self) -> Iterator[Metric]:
        by_name: dict[str, dict[str, float]] = {}
        for model, plan in self._plans.items():
            for name, value in self._expected(plan).items():
                if value is not None:
                    by_name.setdefault(name, {})[model] = value
        for name, values in by_name.items():
            yield self._gauge(f"llmserve_dispatch_{name}", EXPECTATIONS[name], values)

    def _expected(self, plan: DispatchPlan) -> dict[str, float | None]:
        expects = plan.response_s_mean is not None and plan.latency_target_s is not None
        return {
            "queues": len(plan.tables),
            "response_seconds_expected": plan.response_s_mean,
            "power_watts_expected": plan.power_w_mean if self._energy_known else None,
            "target_met": float(plan.target_met) if expects else None,
        }

    def _gauge(self, name: str, help_: str, values: Mapping[str, float]) -> Metric:
        return _by_model(name, help_, values, several=len(self._cluster.scheduler.models) > 1)


def _by_model(name: str, help_: str, values: Mapping[str, float], *, several: bool = False) -> Metric:
    """Return a gauge with one value per model, without the label `model` for a single value."""
    if len(values) == 1 and not several:
        return GaugeMetricFamily(name, help_, value=next(iter(values.values())))
    family = GaugeMetricFamily(name, help_, labels=["model"])
    for model, value in sorted(values.items()):
        family.add_metric([model], value)
    return family
