"""One run: arrivals and a policy on simulated GPUs, with llmserve's own scheduler, and the outcome.

goodput      requests a second that were answered in time
utilisation  share of the GPUs' time at work
wasted       share of the time at work that went to stopped or late requests
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bins.profile import StepTimes
from llmserve.request import EngineInfo
from llmserve.scheduling.choice.orders import Order
from llmserve.scheduling.messages import Action, BatchEnded, DrainRequested, Event, PreemptBatch, StartBatch
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from papers.shepherd.clockwork import LargestBatch, Released
from papers.shepherd.models import BATCH_MAX, TABLE_4
from papers.shepherd.nexus import PERIOD_S, Plan
from papers.shepherd.nexus_order import Nexus, Schedule
from papers.shepherd.printed_flex import PrintedFlex
from papers.shepherd.streams import Arrivals
from papers.shepherd.worker import SimulatedWorker

SHARES = tuple((np.arange(101) / 100).tolist())  # shares of the requests of which outcomes have quantiles of latency
ROUNDING_S = 1e-9  # a request is in time up to so long after its deadline
SPEEDS = {
    name: StepTimes(model.beta_ms / 1e3, tuple([model.alpha_ms / 1e3 * size for size in range(1, BATCH_MAX + 1)]))
    for name, model in TABLE_4.items()
}
"""Each answer is one token long."""

FLEX, WITHOUT_PREEMPTION, PRINTED = "FLEX", "FLEX without preemption", "FLEX as printed"
CLOCKWORK, NEXUS, PLANNED_SHARE, FFFS, EDF = "Clockwork", "Nexus", "Nexus, planned share", "fffs", "edf"
LARGEST, RELEASED, RELEASED_128 = "Clockwork, largest batch", "Clockwork, as released", "Clockwork, as released, to 128"

POLICIES: dict[str, dict[str, object]] = {  # settings of llmserve's own policies
    FLEX: {"order": "flex"},
    WITHOUT_PREEMPTION: {"order": "flex", "preemption": "off"},
    CLOCKWORK: {"order": "clockwork"},
    FFFS: {"order": "fffs", "release": "greedy"},
    EDF: {"order": "edf", "release": "greedy"},
}
ORDERS: dict[str, Callable[[Sequence[Plan]], Order]] = {
    PRINTED: lambda _: PrintedFlex(),
    LARGEST: lambda _: LargestBatch(),
    RELEASED: lambda _: Released(),
    RELEASED_128: lambda _: Released((1, 2, 4, 8, 16, 32, 64, BATCH_MAX)),
    NEXUS: lambda plans: _nexus(plans),
    PLANNED_SHARE: lambda plans: _nexus(plans),
}
"""Orders of the paper, in place of llmserve's `clockwork`: all of them choose when an engine becomes free."""

BY_PLAN = (NEXUS, PLANNED_SHARE)
"""PLANNED_SHARE admits, at random, only the share of every model's requests that the plan is made for."""


def gpu_names(count: int) -> list[str]:
    return [f"gpu{index:03d}" for index in range(count)]


def scheduler(policy: str, plans: Sequence[Plan] = ()) -> Scheduler:
    """plans : Nexus's plan for each period."""
    config = SchedulingConfig(
        bins=1,
        batch_size=BATCH_MAX,
        queue_requests_max=10**9,
        edges_refit_every=0,
        trust_window=10**6,  # larger than any run: all answers have the same length, so predictions are exact
        **POLICIES.get(policy, POLICIES[CLOCKWORK]),  # type: ignore[arg-type]
    )
    order = ORDERS[policy](plans) if policy in ORDERS else None
    return config.resolved(True).scheduler(scores=(1.0,) * 10, order=order)


def _nexus(plans: Sequence[Plan]) -> Nexus:
    cycles = [dict(zip(gpu_names(len(plan.gpus)), plan.gpus, strict=True)) for plan in plans]
    return Nexus([Schedule(index * PERIOD_S, by_gpu) for index, by_gpu in enumerate(cycles)])


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run. The counted interval is from from_s to until_s.

    offered        requests that came and were due in the interval; offered_in_time: of these, in time
    in_time        requests that were answered in the interval, in time
    by_model       in_time by model
    late           requests that were answered in the interval, too late
    utilisation    share of the GPUs' time until until_s
    busy_s         all GPUs' seconds at work in the whole run; wasted_s: of these, for stopped or late requests
    latencies_s    quantiles of the latencies in time, at SHARES
    batches        started batches; preemptions: of these, stopped
    started        requests in started batches
    arrived        requests in the whole run
    steps          scheduler steps in the whole run; step_s_median, step_s_mean: seconds, 0 if not timed
    """

    offered: int
    offered_in_time: int
    in_time: int
    by_model: dict[str, int]
    late: int
    duration_s: float
    utilisation: float
    busy_s: float
    wasted_s: float
    latencies_s: tuple[float, ...]
    batches: int
    preemptions: int
    started: int
    arrived: int
    gpus: int
    steps: int = 0
    step_s_median: float = 0.0
    step_s_mean: float = 0.0

    @property
    def goodput_per_s(self) -> float:
        return self.in_time / self.duration_s

    @property
    def share_in_time(self) -> float:
        return self.offered_in_time / self.offered if self.offered else 0.0

    @property
    def request_s(self) -> float:
        """Scheduler seconds for each request; 0 if not timed."""
        return self.steps * self.step_s_mean / self.arrived

    @property
    def wasted_share(self) -> float:
        return self.wasted_s / self.busy_s if self.busy_s else 0.0

    @property
    def batch_size(self) -> float:
        return self.started / self.batches if self.batches else 0.0


class _Timed:
    """A scheduler that measures the processor time of each of its steps in this thread."""

    def __init__(self, inner: Scheduler) -> None:
        self._inner = inner
        self.step_s: list[float] = []

    def handle(self, event: Event, now_s: float) -> list[Action]:
        begun_s = time.thread_time()
        actions = self._inner.handle(event, now_s)
        self.step_s.append(time.thread_time() - begun_s)
        return actions

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class _Watch:
    """Listener of a run. ended_s : by request, time of the answer; nan: no answer"""

    def __init__(self, arrivals: Arrivals, workers: Sequence[SimulatedWorker], gpus: int) -> None:
        self.ended_s = np.full(len(arrivals), math.nan)
        self.late_work_s = 0.0
        self.batches = self.preemptions = self.started = 0
        self.utilisation = 0.0
        self._deadlines_s = arrivals.deadlines_s
        self._workers = workers
        self._gpus = gpus
        self._began_s: dict[str, float] = {}

    def __call__(self, now_s: float, event: Event, actions: list[Action]) -> None:
        if type(event) is BatchEnded:
            self._ended(event, now_s)
        elif type(event) is DrainRequested:
            working_s = sum([self._working_s(worker, now_s) for worker in self._workers])
            self.utilisation = working_s / (now_s * self._gpus) if now_s > 0 else 0.0
        for action in actions:
            if type(action) is StartBatch:
                self._began_s[action.engine] = now_s
                self.batches += 1
                self.started += len(action.batch.requests)
            elif type(action) is PreemptBatch:
                self.preemptions += 1

    def _ended(self, event: BatchEnded, now_s: float) -> None:
        ids = list(event.output_tokens)
        self.ended_s[ids] = now_s
        late = int((self._deadlines_s[ids] < now_s - ROUNDING_S).sum())
        self.late_work_s += (now_s - self._began_s[event.engine]) * late / len(ids)

    def _working_s(self, worker: SimulatedWorker, now_s: float) -> float:
        running_s = now_s - self._began_s[worker.info.name] if worker.next_end_s is not None else 0.0
        return worker.busy_s + running_s


def run(
    arrivals: Arrivals,
    policy: str,
    gpus: int,
    *,
    plans: Sequence[Plan] = (),
    from_s: float = 0.0,
    until_s: float = math.inf,
    timed: bool = False,
    check: Callable[[Scheduler], None] | None = None,
) -> Outcome:
    """Run at least one arrival on GPUs that serve all models.

    plans            for Nexus
    from_s, until_s  the interval in which answers are counted; inf: until the end of the run
    timed            measure the scheduler's steps
    check            called after every step
    """
    workers = _workers(arrivals, gpus, plans if policy in BY_PLAN else ())
    tested = scheduler(policy, plans)
    watch, timer = _Watch(arrivals, workers, gpus), _Timed(tested)

    def on_step(now_s: float, event: Event, actions: list[Action]) -> None:
        watch(now_s, event, actions)
        if check is not None:
            check(tested)

    driven: Scheduler = timer if timed else tested  # type: ignore[assignment]
    cluster = SimulatedCluster(driven, list(workers), on_step=on_step)
    cluster.run(arrivals.requests())
    return _outcome(arrivals, watch, workers, gpus, from_s, min(until_s, cluster.now_s), timer.step_s)


def _workers(arrivals: Arrivals, gpus: int, plans: Sequence[Plan]) -> list[SimulatedWorker]:
    """Return workers that serve all models. With plans, each GPU serves its planned models; idle GPUs are left out."""
    lengths = [1.0] * len(arrivals)
    workers = []
    for index, name in enumerate(gpu_names(gpus)):
        models = dict.fromkeys(arrivals.streams.models)
        if plans:
            models = dict.fromkeys([slot.model for plan in plans for slot in plan.gpus[index].slots])
        speeds = {model: SPEEDS[model] for model in models}
        if models:
            info = EngineInfo(name, BATCH_MAX, barrier=True, models=tuple(models), speeds=speeds)
            workers.append(SimulatedWorker(info, lengths))
    return workers


def _outcome(
    arrivals: Arrivals,
    watch: _Watch,
    workers: Sequence[SimulatedWorker],
    gpus: int,
    from_s: float,
    until_s: float,
    step_s: Sequence[float],
) -> Outcome:
    counted = (watch.ended_s >= from_s) & (watch.ended_s <= until_s)
    answered_in_time = watch.ended_s <= arrivals.deadlines_s + ROUNDING_S
    in_time = counted & answered_in_time
    due = (arrivals.times_s >= from_s) & (arrivals.deadlines_s <= until_s)
    latencies_s = (watch.ended_s - arrivals.times_s)[in_time]
    counts = np.bincount(arrivals.model[in_time], minlength=len(arrivals.streams.models)).tolist()
    return Outcome(
        offered=int(due.sum()),
        offered_in_time=int((due & answered_in_time).sum()),
        in_time=int(in_time.sum()),
        by_model=dict(zip(arrivals.streams.models, counts, strict=True)),
        late=int((counted & ~in_time).sum()),
        duration_s=until_s - from_s,
        utilisation=watch.utilisation,
        busy_s=sum([worker.busy_s for worker in workers]),
        wasted_s=watch.late_work_s + sum([worker.wasted_s for worker in workers]),
        latencies_s=tuple(np.quantile(latencies_s, SHARES).tolist()) if latencies_s.size else (),
        batches=watch.batches,
        preemptions=watch.preemptions,
        started=watch.started,
        arrived=len(arrivals),
        gpus=gpus,
        steps=len(step_s),
        step_s_median=float(np.median(step_s)) if step_s else 0.0,
        step_s_mean=float(np.mean(step_s)) if step_s else 0.0,
    )
