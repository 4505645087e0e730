"""What the scheduler costs: time of a step in several cases, and simulated requests per second, in processor time.

    python scripts/lab performance.scheduler --output docs/results/scheduler.json

Cases and scenarios take turns, and medians over rounds are reported, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import itertools
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from kit.arguments import add_results, parser_of
from kit.results import write_json
from kit.rows import Row, in_rounds, medians
from kit.tables import cells, show

from bins.profile import StepTimes
from llmserve.commands.simulate import Scenario, simulate
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import Action, EngineReady, PreemptBatch, RequestArrived, RequestEnded, StartBatch
from llmserve.settings.policies import SchedulingConfig

SLOTS = 8
TOKENS_MAX = 100_000  # of an engine's KV cache
SCENARIOS = {
    "barrier, 8 bins of 8, full, Poisson": (Scenario(barrier=True, engines=2), {"bins": 8, "release": "full"}),
    "barrier, 8 bins of 8, timeout, Poisson": (
        Scenario(barrier=True, engines=2),
        {"bins": 8, "release": "timeout", "batch_wait_s": 5.0},
    ),
    "barrier, windows of 8, Poisson": (Scenario(barrier=True, engines=2), {"release": "window"}),
    "barrier, 32 bins of 128, all at once": (
        Scenario(barrier=True, arrival_rate=np.inf),
        {"bins": 32, "batch_size": 128, "release": "full"},
    ),
    "refill, 64 slots, greedy, all at once": (
        Scenario(slots=64, arrival_rate=np.inf),
        {"bins": 8, "release": "greedy"},
    ),
    "refill, 2 engines of 8 slots, greedy, Poisson": (
        Scenario(engines=2, arrival_rate=6.0),
        {"bins": 8, "release": "greedy"},
    ),
}

SPEED = StepTimes(0.0, tuple([0.01 + 0.0005 * size for size in range(SLOTS)]))
SPREAD = np.geomspace(0.5, 2.0, 15).tolist()  # a request's quantiles over its median


@dataclass(frozen=True, slots=True)
class Case:
    """The load during the timed steps.

    shares : from which requests are drawn.  slo_s : deadlines are 0.5 to 1.5 times that after arrival; None: none
    """

    name: str
    settings: dict[str, Any]
    engines: int
    queued: int
    models: int = 1
    slo_s: float | None = None
    shares: int = 1

    @property
    def barrier(self) -> bool:
        return self.slo_s is not None

    def engine(self, index: int) -> EngineInfo:
        name = f"engine{index:03}"
        if not self.barrier:
            return EngineInfo(name, SLOTS, False, 1, TOKENS_MAX)
        return EngineInfo(name, SLOTS, True, speeds={"": SPEED})


def cases(engines: int) -> list[Case]:
    binned = {"bins": 8, "release": "greedy"}
    flex = {"order": "flex", "batch_size": SLOTS}
    sizes = (1_000, 10_000, 100_000)
    return [
        *[Case(f"{size:,} queued", binned, engines, size) for size in sizes],
        Case("windows, 2,000 queued", {"order": "fffs"}, 20, 2_000, slo_s=math.inf),
        *[Case(f"12 engines, {models} models", binned, 12, 3_000, models) for models in (1, 100)],
        *[Case(f"flex in a group of 12, {models} models", flex, 12, 1_000, models, slo_s=30.0) for models in (1, 100)],
        Case(f"flex, {engines} engines", flex, engines, 500, slo_s=30.0),
        *[Case(f"boost, {shares:,} shares", {"order": "boost"}, 12, 10_000, shares=shares) for shares in (1, 1_000)],
    ]


class Load:
    """A scheduler with full engines and with the case's number of queued requests."""

    def __init__(self, case: Case, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._case = case
        self._ids = itertools.count()
        self._stopping: list[tuple[str, int]] = []
        self.running: list[tuple[str, Request]] = []
        config = SchedulingConfig(**case.settings, queue_requests_max=10**9).resolved(barrier=case.barrier)
        self.scheduler = config.scheduler(self._lengths(1_000))
        for index in range(case.engines):
            self.scheduler.handle(EngineReady(case.engine(index)), 0.0)
        slots = case.engines * (SLOTS if case.barrier else SLOTS + 1)
        for tokens in self._lengths(case.queued + slots):
            self.apply(self.scheduler.handle(RequestArrived(self.request(tokens, 0.0)), 0.0))

    def _lengths(self, count: int) -> list[float]:
        lengths: list[float] = self.rng.lognormal(5.2, 0.8, count).tolist()
        return lengths

    def request(self, tokens: float, now_s: float) -> Request:
        id_, case = next(self._ids), self._case
        deadline_s = None if case.slo_s in (None, math.inf) else now_s + case.slo_s * (0.5 + self.rng.random())
        return msgspec.structs.replace(
            predicted(id_, tokens), deadline_s=deadline_s, model=f"m{id_ % case.models}", **self._share
        )

    @property
    def _share(self) -> dict[str, str]:
        return {} if self._case.shares == 1 else {"share": f"share {self.rng.integers(self._case.shares)}"}

    def events(self, steps: int, gap_s: float) -> Iterator[tuple[float, Any]]:
        """Arrivals and ends in turn, so that the queue keeps its size; and the ends of preempted requests."""
        for index, tokens in enumerate(self._lengths(steps)):
            now_s = index * gap_s
            while self._stopping:
                engine, id_ = self._stopping.pop()
                self.running = [pair for pair in self.running if pair[1].id != id_]
                yield now_s, RequestEnded(engine, id_, "cancelled")
            if index % 2 and self.running:
                engine, request = self.running.pop(int(self.rng.integers(len(self.running))))
                yield now_s, RequestEnded(engine, request.id, "completed", request.predicted_tokens or 0.0)
            else:
                yield now_s, RequestArrived(self.request(tokens, now_s))

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartBatch):
                self.running += [(action.engine, request) for request in action.batch.requests]
            elif isinstance(action, PreemptBatch):
                self._stopping += [(action.engine, id_) for id_ in action.request_ids]


def step_times(case: Case, steps: int, seed: int) -> dict[str, float]:
    """Percentiles of the processor time of a call of `handle`."""
    load = Load(case, seed)
    times_us = []
    for now_s, event in load.events(steps, 0.002):
        began_ns = time.thread_time_ns()
        actions = load.scheduler.handle(event, now_s)
        load.scheduler.wake_at_s  # noqa: B018  the live server also reads it after every step
        times_us.append((time.thread_time_ns() - began_ns) / 1e3)
        load.apply(actions)
    p50, p99 = np.percentile(times_us, (50, 99)).tolist()
    return {"step_us_p50": p50, "step_us_p99": p99}


def predicted(request_id: int, tokens: float) -> Request:
    """A request with a predictor's quantiles, of one of 1,000 conversations."""
    quantiles = tuple(tokens * factor for factor in SPREAD)
    blocks = (1 + request_id % 10, 100 + request_id % 100, 1_000 + request_id % 1_000)
    return Request(request_id, tokens, quantiles=quantiles, prompt_tokens=200.0, blocks=blocks, block_tokens=60.0)


def measure_steps(engines: int, steps: int, rounds: int) -> list[Row]:
    by_name = {case.name: case for case in cases(engines)}
    measures = {name: partial(step_times, case, steps) for name, case in by_name.items()}
    rows = medians(list(in_rounds(rounds, "case", measures, lambda row: f"{row['step_us_p50']:.1f} us")), "round")
    sizes = ("queued", "engines", "models")
    return [
        Row(
            {**row.case, **{name: getattr(by_name[row["case"]], name) for name in sizes}},
            {name: round(value, 2) for name, value in row.numbers.items()},
        )
        for row in rows
    ]


def simulated_rate(requests: int, scenario: Scenario, values: dict[str, Any], seed: int) -> dict[str, float]:
    config = SchedulingConfig(**{"queue_requests_max": requests, **values})
    began_s = time.process_time()
    simulate(msgspec.structs.replace(scenario, requests=requests, seed=seed), config)
    return {"requests_per_s": requests / (time.process_time() - began_s)}


def measure_simulator(requests: int, rounds: int) -> list[Row]:
    measures = {name: partial(simulated_rate, requests, *values) for name, values in SCENARIOS.items()}
    rows = in_rounds(rounds, "scenario", measures, lambda row: f"{row['requests_per_s']:,.0f} requests/s")
    return [Row(row.case, {"requests_per_s": round(row["requests_per_s"])}) for row in medians(list(rows), "round")]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--requests", type=int, default=100_000, help="requests of each simulated run")
    parser.add_argument("--rounds", type=int, default=5)
    add_results(parser)
    args = parser.parse_args()
    steps = measure_steps(args.engines, args.steps, args.rounds)
    simulator = measure_simulator(args.requests, args.rounds)
    title = f"Scheduler.handle, {args.engines} engines where the case names no number"
    columns = {"case": ("case", ""), "p50 (us)": ("step_us_p50", ".1f"), "p99 (us)": ("step_us_p99", ".1f")}
    show(title, list(columns), cells(steps, columns))
    columns = {"scenario": ("scenario", ""), "requests/s": ("requests_per_s", ",")}
    show("Simulator, one core", list(columns), cells(simulator, columns))
    records = {name: [row.record for row in rows] for name, rows in (("steps", steps), ("simulator", simulator))}
    write_json(args.output, {"python": platform.python_version(), **records}, indent=2)
