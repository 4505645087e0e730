"""What `/metrics` shows of the scheduler, the engines' energy and the dispatch plans at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bins.dispatch import DispatchPlan, Observed
from llmserve.cluster.live import LiveCluster
from llmserve.energy import EnergyMeter
from llmserve.scheduling.messages import DispatchSolved

BINS_LEAST = 8  # that accuracy is told of, however few serve
EXPECTATIONS = {
    "queues": "Queues that the bins are merged into",
    "response_seconds_expected": "Mean response time that the plan expects",
    "power_watts_expected": "Mean power of all engines that the plan expects",
    "target_met": "1 when the plan expects to meet the latency target",
}


class Gauges:
    """State at the moment of the scrape."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        scheduler = self._cluster.scheduler
        models = scheduler.models
        of = ["model"] if len(models) > 1 else []
        bins = GaugeMetricFamily("llmserve_bin_requests", "Requests that wait in a bin", labels=[*of, "bin"])
        edges = GaugeMetricFamily(
            "llmserve_bin_edge_tokens", "Lower edge of a bin, tokens (of risk or median)", labels=[*of, "bin"]
        )
        for model, queues in sorted(models.items()):
            lower = (0.0, *queues.edges.edges)
            for queue in queues.bins:
                labels = [*([model] if of else []), str(queue.index)]
                bins.add_metric(labels, len(queue))
                if queue.index < len(lower):
                    edges.add_metric(labels, lower[queue.index])
        yield bins
        yield edges
        formed = {model: len(queues.formed) for model, queues in models.items()} or {"": 0}
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
        models = self._cluster.scheduler.models
        bins = max([BINS_LEAST, *[len(queues.bins) for queues in models.values()]])
        accuracy = {model: queues.trust.accuracy(bins) for model, queues in models.items()}

        def gauge(name: str, help_: str, values: Mapping[str, float]) -> Metric:
            return _by_model(f"llmserve_prediction_{name}", help_, values)

        def of(field: str) -> dict[str, float]:
            return {model: getattr(one, field) for model, one in accuracy.items()}

        trusted = {model: float(queues.trust.trusted) for model, queues in models.items()}
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


class EnergyGauges:
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


class DispatchGauges:
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
        return _by_model(name, help_, values, several=len(self._cluster.scheduler.models) > 1)


def _by_model(name: str, help_: str, values: Mapping[str, float], *, several: bool = False) -> Metric:
    """A value of each model; where there is only one, its name is left out."""
    if len(values) == 1 and not several:
        return GaugeMetricFamily(name, help_, value=next(iter(values.values())))
    family = GaugeMetricFamily(name, help_, labels=["model"])
    for model, value in sorted(values.items()):
        family.add_metric([model], value)
    return family
