"""What the scheduler costs: a step in several situations, and simulated requests per second, in processor time.

    python scripts/lab/benchmark_scheduler.py --output docs/results/scheduler.json

Situations and scenarios take turns within one run, and medians are reported, so that a busy machine slows all alike.
"""

from __future__ import annotations

import itertools
import math
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from bench.arguments import add_results, parser_of
from bench.progress import log
from bench.results import write_json
from bench.tables import show

from bins.profile import StepTimes
from llmserve.policies import SchedulingConfig
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import Action, EngineReady, PreemptBatch, RequestArrived, RequestEnded, StartBatch
from llmserve.simulate import Scenario, simulate

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
SPREAD = np.geomspace(0.5, 2.0, 15).tolist()  # of a request's quantiles around its median


@dataclass(frozen=True, slots=True)
class Case:
    """What a step is timed in. slo_s : answers are wanted within half to one and a half times that; None: whenever."""

    name: str
    settings: dict[str, Any]
    engines: int
    queued: int
    models: int = 1
    slo_s: float | None = None

    @property
    def barrier(self) -> bool:
        return self.slo_s is not None

    def engine(self, index: int) -> EngineInfo:
        name = f"engine{index:03}"
        if not self.barrier:
            return EngineInfo(name, SLOTS, False, 1, TOKENS_MAX)
        return EngineInfo(name, SLOTS, True, speeds={"": SPEED})


def cases(engines: int) -> list[Case]:
    formed = {"bins": 8, "release": "greedy"}
    flex = {"order": "flex", "batch_size": SLOTS}
    sizes = (1_000, 10_000, 100_000)
    return [
        *[Case(f"{size:,} queued", formed, engines, size) for size in sizes],
        Case("windows, 2,000 queued", {"order": "fffs"}, 20, 2_000, slo_s=math.inf),
        *[Case(f"12 engines, {models} models", formed, 12, 3_000, models) for models in (1, 100)],
        *[Case(f"flex in a group of 12, {models} models", flex, 12, 1_000, models, slo_s=30.0) for models in (1, 100)],
        Case(f"flex, {engines} engines", flex, engines, 500, slo_s=30.0),
    ]


class Load:
    """A scheduler whose engines are full and whose bins and formed batches hold so many requests, and what it says."""

    def __init__(self, case: Case, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._case = case
        self._ids = itertools.count()
        self._stopping: list[tuple[str, int]] = []
        self._running: list[tuple[str, Request]] = []
        config = SchedulingConfig(**case.settings, queue_requests_max=10**9).resolved(barrier=case.barrier)
        self.scheduler = config.scheduler(self._lengths(1_000))
        for index in range(case.engines):
            self.scheduler.handle(EngineReady(case.engine(index)), 0.0)
        slots = case.engines * (SLOTS if case.barrier else SLOTS + 1)
        for tokens in self._lengths(case.queued + slots):
            self.obey(self.scheduler.handle(RequestArrived(self.request(tokens, 0.0)), 0.0))

    def _lengths(self, count: int) -> list[float]:
        found: list[float] = self.rng.lognormal(5.2, 0.8, count).tolist()
        return found

    def request(self, tokens: float, now_s: float) -> Request:
        id_, case = next(self._ids), self._case
        deadline_s = None if case.slo_s in (None, math.inf) else now_s + case.slo_s * (0.5 + self.rng.random())
        return msgspec.structs.replace(predicted(id_, tokens), deadline_s=deadline_s, model=f"m{id_ % case.models}")

    def events(self, steps: int, gap_s: float) -> Iterator[tuple[float, Any]]:
        """Arrivals and ends in turn, so that the queue keeps its size; and the ends of what is to make room."""
        for index, tokens in enumerate(self._lengths(steps)):
            now_s = index * gap_s
            while self._stopping:
                engine, id_ = self._stopping.pop()
                self._running = [each for each in self._running if each[1].id != id_]
                yield now_s, RequestEnded(engine, id_, "cancelled")
            if index % 2 and self._running:
                engine, request = self._running.pop(int(self.rng.integers(len(self._running))))
                yield now_s, RequestEnded(engine, request.id, "completed", request.predicted_tokens or 0.0)
            else:
                yield now_s, RequestArrived(self.request(tokens, now_s))

    def obey(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartBatch):
                self._running += [(action.engine, request) for request in action.batch.requests]
            elif isinstance(action, PreemptBatch):
                self._stopping += [(action.engine, id_) for id_ in action.request_ids]


def step_times_us(case: Case, steps: int, seed: int) -> list[float]:
    """Microseconds of processor time of each call of handle."""
    load = Load(case, seed)
    times_us = []
    for now_s, event in load.events(steps, 0.002):
        began_ns = time.thread_time_ns()
        actions = load.scheduler.handle(event, now_s)
        load.scheduler.wake_at_s  # noqa: B018  a body asks after every step
        times_us.append((time.thread_time_ns() - began_ns) / 1e3)
        load.obey(actions)
    return times_us


def predicted(request_id: int, tokens: float) -> Request:
    """A request as a predictor's quantiles make it, of one of a thousand conversations."""
    quantiles = tuple(tokens * factor for factor in SPREAD)
    prefixes = (request_id % 10, 100 + request_id % 100, 1_000 + request_id % 1_000)
    return Request(request_id, tokens, quantiles=quantiles, prompt_tokens=200.0, prefixes=prefixes)


def measure_steps(engines: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    known = cases(engines)
    medians: dict[str, list[float]] = {case.name: [] for case in known}
    tails: dict[str, list[float]] = {case.name: [] for case in known}
    for number, case in itertools.product(range(rounds), known):
        times_us = step_times_us(case, steps, seed=number)
        medians[case.name].append(statistics.median(times_us))
        tails[case.name].append(float(np.percentile(times_us, 99)))
        log(f"round {number + 1}/{rounds}: {case.name}: {medians[case.name][-1]:.1f} us")
    return [
        {
            "case": case.name,
            "queued": case.queued,
            "engines": case.engines,
            "models": case.models,
            "step_us_p50": round(statistics.median(medians[case.name]), 2),
            "step_us_p99": round(statistics.median(tails[case.name]), 2),
        }
        for case in known
    ]


def measure_simulator(requests: int, rounds: int) -> list[dict[str, Any]]:
    rates: dict[str, list[float]] = {name: [] for name in SCENARIOS}
    for number, (name, (scenario, values)) in itertools.product(range(rounds), SCENARIOS.items()):
        config = SchedulingConfig(**{"queue_requests_max": requests, **values})  # type: ignore[arg-type]
        began_s = time.process_time()
        simulate(msgspec.structs.replace(scenario, requests=requests, seed=number), config)
        rates[name].append(requests / (time.process_time() - began_s))
        log(f"round {number + 1}/{rounds}: {name}: {rates[name][-1]:,.0f} requests/s")
    return [{"scenario": name, "requests_per_s": round(statistics.median(values))} for name, values in rates.items()]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--requests", type=int, default=100_000, help="of each simulated run")
    parser.add_argument("--rounds", type=int, default=5)
    add_results(parser)
    args = parser.parse_args()
    steps = measure_steps(args.engines, args.steps, args.rounds)
    simulator = measure_simulator(args.requests, args.rounds)
    title = f"Scheduler.handle, {args.engines} engines where none are named"
    timed = [(row["case"], f"{row['step_us_p50']:.1f}", f"{row['step_us_p99']:.1f}") for row in steps]
    show(title, ("case", "p50 (us)", "p99 (us)"), timed)
    rates = [(row["scenario"], f"{row['requests_per_s']:,}") for row in simulator]
    show("Simulator, one core", ("scenario", "requests/s"), rates)
    write_json(args.output, {"python": platform.python_version(), "steps": steps, "simulator": simulator}, indent=2)


if __name__ == "__main__":
    main()
