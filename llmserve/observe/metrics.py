"""The text of `/metrics`: counts that follow the journal's steps, and numbers that are read at a scrape.

table.py defines each metric. Metrics of bins, predictions and plans have the label `model` if there are several models.
The counts of a model are removed when no engine lists the model any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from llmserve.forecasts.saver import Saver
from llmserve.live.cluster import LiveCluster
from llmserve.live.journal import Step
from llmserve.observe import table
from llmserve.observe.counters import Families, lines_of
from llmserve.observe.energy import EnergyMeter, meter_of_all
from llmserve.observe.readings import Connections, EnergyReading, Jobs, Plans, Relays, SchedulerReading
from llmserve.observe.request_counts import RequestCounts
from llmserve.observe.table import Read
from llmserve.scheduling.messages import (
    BatchEnded,
    DispatchSolved,
    EngineLost,
    EngineReady,
    FailRequest,
    ForecastsRevised,
    PreemptBatch,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SolveDispatch,
    StartBatch,
)
from llmserve.settings.policies import named, order_settings

S = TypeVar("S")


class Metrics:
    """The metrics of a live cluster. `render()` returns the text of /metrics.

    meters        meters of the engines' energy, each with a different source
    energy_known  whether dispatch plans know real watts; if False, the expected power is not exported
    saver         saves what was learnt; None: nothing is kept
    families      what else is counted with these metrics; None: nothing is
    order         the order in force, in words
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
        self.meter_of_all = meter_of_all(meters)
        self._cluster, self._meters = cluster, meters
        self._families = families or Families(table.TABLE)
        self._requests = RequestCounts(self._families, batch_size, cluster.scheduler.requests)
        self._plans = Plans(energy_known)
        self.order = named(order_settings(cluster.journal.header.scheduling))
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._read: list[Callable[[], str]] = [
            self._scheduler,
            *([partial(self._section, table.STATE, saver)] if saver is not None else []),
            *([self._energy] if meters else []),
            partial(self._section, table.PLANS, self._plans),
            partial(self._section, table.ORDER, self.order),
            partial(self._section, table.BUILD, None),
            lambda: generate_latest(self._process).decode(),
        ]
        self._on_event, self._on_action = self._handlers()
        cluster.journal.listen(self.observe)
        cluster.calls.on_ended.append(
            self._requests.runs.answered
        )  # what the journal does not know: times of tokens, engines' counts

    def follow_server(self, server: Connections) -> None:
        self._read.append(partial(self._section, table.CONNECTIONS, server))

    def follow_relays(self, relays: Relays) -> None:
        self._read.append(partial(self._section, table.RELAYS, relays))

    def follow_jobs(self, jobs: Jobs) -> None:
        self._read.append(partial(self._section, table.JOBS, jobs))

    def refused(self, reason: str, requests: int = 1) -> None:
        """Count requests that the HTTP layer refused before the scheduler got them."""
        self._requests.refuse(reason, requests)

    # ---- the journal ----

    def observe(self, step: Step) -> None:
        event = step.event
        if (count := self._on_event.get(type(event))) is not None:
            count(event, step)
        for action in step.actions:
            if (count := self._on_action.get(type(action))) is not None:
                count(action, step)

    def _handlers(self) -> tuple[dict[type, Callable[[Any, Step], None]], dict[type, Callable[[Any, Step], None]]]:
        """What counts each kind of event, and each kind of action."""
        requests, plans = self._requests, self._plans

        def requested(action: SolveDispatch, step: Step) -> None:
            plans.observed[action.model] = action.observed

        return {
            RequestArrived: requests.arrive,
            RequestAdopted: requests.adopt,
            RequestEnded: requests.end_run,
            BatchEnded: requests.end_batch,
            RequestCancelled: requests.cancel,
            ForecastsRevised: requests.revise,
            EngineLost: requests.lose_engine,
            EngineReady: self._engine_ready,
            DispatchSolved: lambda event, step: plans.follow(event),
        }, {
            StartBatch: requests.start,
            PreemptBatch: requests.preempt,
            FailRequest: requests.fail,
            SolveDispatch: requested,
        }

    def _engine_ready(self, event: EngineReady, step: Step) -> None:
        """Forget models and engines that are gone: the engine may list other models than before."""
        fleet = self._cluster.fleet
        models = set(fleet.queues)
        self._requests.keep(models, fleet.handles)
        self._plans.keep(models)

    # ---- the text ----

    def render(self) -> bytes:
        return "".join([self._families.text(), *[read() for read in self._read]]).encode()

    def _section(self, reads: Sequence[Read[S]], source: S, **words: object) -> str:
        """The text of what is read from a source. words : that stand for themselves in help texts"""
        return "".join(self._lines(reads, source, words))

    def _lines(self, reads: Sequence[Read[S]], source: S, words: dict[str, object]) -> Iterator[str]:
        several = len(self._cluster.scheduler.models) > 1
        for metric, rows_of in reads:
            if (rows := rows_of(source)) is not None:
                help_ = metric.help.format_map(words) if words else metric.help
                yield from lines_of(metric, rows, help_, several_models=several)

    def _scheduler(self) -> str:
        now = SchedulerReading(self._cluster)
        return self._section(table.SCHEDULER, now, bins=now.bin_count)

    def _energy(self) -> str:
        requests = self._requests
        now_s = self._cluster.now_s()
        now = EnergyReading(self._meters, now_s, requests.completed_tokens, requests.completed)
        return self._section(table.ENERGY, now)
