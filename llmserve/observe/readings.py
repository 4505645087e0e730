"""What the metrics of table.py are read from at a scrape: scheduler, energy, plans, order, connections, jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from functools import cached_property
from typing import Protocol

from bins.dispatch import DispatchPlan, Observed
from llmserve.live.cluster import LiveCluster
from llmserve.live.handle import EngineHandle
from llmserve.live.membership import Looked
from llmserve.observe.counters import Rows
from llmserve.observe.energy import EnergyMeter
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.load import Waits
from llmserve.scheduling.messages import DispatchSolved
from llmserve.scheduling.programs.programs import Programs
from llmserve.scheduling.trust import Accuracy

BINS_MIN = 8  # least number of bins for which accuracy is computed, even if fewer bins are in use


def one(number: float, *labels: str) -> Rows:
    """A single row."""
    return [(labels, number)]


def counts(by_name: Mapping[str, float]) -> Rows:
    """A row for each name, in alphabetic order."""
    return [((name,), count) for name, count in sorted(by_name.items())]


class SchedulerReading:
    """The scheduler, its engines and the forecasts at one scrape. Rows by model begin with the model.

    bin_count : of the bins for which accuracy is computed
    """

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster
        self._models = sorted(cluster.scheduler.models.items())
        self._engines = sorted(cluster.scheduler.engines.items())
        self.lengths = cluster.forecasts
        self.bin_count = max([BINS_MIN, *[len(queues.bins) for _, queues in self._models]])

    @property
    def several_models(self) -> bool:
        return len(self._models) > 1

    # ---- by model ----

    def bins(self) -> Rows:
        return [((model, str(queue.index)), len(queue)) for model, queues in self._models for queue in queues.bins]

    def bin_edges(self) -> Rows:
        lower = {model: (0.0, *queues.binning.edges.edges) for model, queues in self._models}
        return [
            ((model, str(queue.index)), lower[model][queue.index])
            for model, queues in self._models
            for queue in queues.bins
            if queue.index < len(lower[model])
        ]

    def formed(self) -> Rows:
        return [((model,), len(queues.formed)) for model, queues in self._models] or [(("",), 0)]

    def waits(self, value: Callable[[Waits], float]) -> Rows | None:
        """A figure of the waits by which `boost` goes; None under other orders."""
        rows = [((model,), value(queues.load.waits)) for model, queues in self._models if queues.load is not None]
        return rows or None

    def trusted(self) -> Rows:
        return [((model,), queues.binning.trust.trusted) for model, queues in self._models]

    def accuracy(self, value: Callable[[Accuracy], float]) -> Rows:
        """A figure of the accuracy of predictions over the scheduler's window."""
        return [((model,), value(accuracy)) for model, accuracy in self._accuracies]

    @cached_property
    def _accuracies(self) -> list[tuple[str, Accuracy]]:
        return [(model, queues.binning.trust.accuracy(self.bin_count)) for model, queues in self._models]

    def wanted(self) -> Rows:
        return counts(self._cluster.estimator.engines_wanted())

    # ---- by engine ----

    def of_engines(self, value: Callable[[EngineState], float]) -> Rows:
        return [((name,), value(engine)) for name, engine in self._engines]

    def kept(self, place: int) -> Rows:
        """What engines keep for programs, while programs come. place : in Programs.kept"""
        programs = self.of_programs
        return [((name,), programs.kept(name)[place]) for name, _ in self._engines] if programs.seen else []

    def memories(self) -> Rows:
        """Tokens of the caches of engines that tell them."""
        sizes = [(name, engine.info.tokens_max) for name, engine in self._engines]
        return [((name,), tokens) for name, tokens in sizes if tokens is not None]

    @property
    def of_programs(self) -> Programs:
        return self._cluster.scheduler.group.programs

    def of_probed(self, value: Callable[[EngineHandle], float]) -> Rows:
        """Of engines that have answered a probe."""
        handles = sorted(self._cluster.fleet.handles.items())
        return [((name,), value(handle)) for name, handle in handles if handle.state.seen]

    def programs(self) -> Rows:
        """Which program each of these engines is."""
        handles = sorted(self._cluster.fleet.handles.items())
        programs = [(name, handle.probed.program) for name, handle in handles if handle.state.seen]
        return [((name, program.dialect.name, program.version), 1) for name, program in programs]

    def of_sources(self, value: Callable[[Looked], float]) -> Rows:
        return counts({text: value(looked) for text, looked in self._cluster.membership.looked.items()})

    def paces(self) -> Rows:
        return [
            ((name, model), pace.value)
            for name, engine in self._engines
            for model, pace in sorted(engine.paces.items())
        ]

    def model_loads(self) -> Rows:
        return [
            ((name, model), seconds)
            for name, engine in self._engines
            for model, seconds in (sorted(engine.loaded.loads_s.items()) if engine.loaded is not None else ())
        ]


class EnergyReading:
    """Joules at one scrape.

    The energy of failed and aborted requests, and of idle engines, is shared among the completed requests. A meter
    that does not cover all engines has only a total: its joules cannot be assigned to requests.

    output_tokens, requests : of completed requests, since the start
    """

    def __init__(self, meters: Sequence[EnergyMeter], now_s: float, output_tokens: float, requests: int) -> None:
        self._joules = [(meter, meter.joules(now_s)) for meter in meters]
        self.output_tokens, self.requests = output_tokens, requests

    def total(self) -> Rows:
        return [((meter.source,), joules) for meter, joules in self._joules]

    def per(self, count: float) -> Rows:
        """Joules of each meter of all work, over so many requests or tokens."""
        return [((meter.source,), joules / count) for meter, joules in self._joules if meter.of_all_work and count]


class Plans:
    """The dispatch plans that the releases follow, by model; None: a release without plans has no such rows.

    observed      the arrival rates for which the last plan of each model was requested
    energy_known  whether plans know real watts
    """

    def __init__(self, energy_known: bool) -> None:
        self.energy_known = energy_known
        self.observed: dict[str, Observed] = {}
        self._plans: dict[str, DispatchPlan] = {}
        self._count = 0
        self._fallbacks: Counter[str] = Counter()

    def keep(self, models: Collection[str]) -> None:
        """Forget all other models."""
        for by_model in (self.observed, self._plans):
            for model in [model for model in by_model if model not in models]:
                del by_model[model]

    def follow(self, event: DispatchSolved) -> None:
        self._plans[event.model] = event.plan
        self._count += 1
        if event.plan.fallback:
            self._fallbacks[event.plan.fallback] += 1

    def followed(self) -> Rows | None:
        return one(self._count) if self.observed else None

    def fallbacks(self) -> Rows | None:
        return counts(self._fallbacks) if self.observed else None

    def rates(self) -> Rows | None:
        """Arrivals per second. All rates of a model are 0 until they have been measured."""
        return self._rows(
            {model: sum(seen.rates_per_s) for model, seen in self.observed.items() if any(seen.rates_per_s)}
        )

    def expected(self, value: Callable[[DispatchPlan], float | None]) -> Rows | None:
        """A value that plans expect, by model; models without such a value are left out."""
        return self._rows({m: number for m, plan in self._plans.items() if (number := value(plan)) is not None})

    @staticmethod
    def meets_target(plan: DispatchPlan) -> float | None:
        return None if plan.response_s_mean is None or plan.latency_target_s is None else float(plan.target_met)

    def _rows(self, by_model: Mapping[str, float]) -> Rows | None:
        return counts(by_model) if by_model else None


class Connections(Protocol):
    """The connections of a server; see http/server.py."""

    @property
    def connections(self) -> Sized: ...

    @property
    def cut(self) -> Mapping[str, int]: ...

    @property
    def buffered_bytes(self) -> int: ...


class Relays(Protocol):
    """The relays of a server (workers/desk.py). cpu_s : processor time of all that have been there"""

    @property
    def count(self) -> int: ...

    @property
    def cpu_s(self) -> float: ...


class Jobs(Protocol):
    """The batch jobs of a server.

    lines_waiting, lines_in_flight  of the jobs that the server works on; those in flight wait in the scheduler or run
    lines_ended                     since the start, by outcome
    """

    @property
    def lines_waiting(self) -> int: ...

    @property
    def lines_in_flight(self) -> int: ...

    @property
    def lines_ended(self) -> Mapping[str, int]: ...
