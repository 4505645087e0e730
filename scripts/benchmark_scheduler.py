"""What the scheduler costs: a step against the number of queued requests, and simulated requests per second.

    python scripts/benchmark_scheduler.py --output docs/results/scheduler.json

Queue sizes and scenarios take turns within one run, and medians are reported, so that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from llmserve.policies import SchedulingConfig
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import EngineReady, RequestArrived, RequestEnded, StartBatch
from llmserve.scheduling.scheduler import Scheduler
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

SPREAD = np.geomspace(0.5, 2.0, 15).tolist()  # of a request's quantiles around its median


def busy_scheduler(queued: int, engines: int, rng: np.random.Generator) -> tuple[Scheduler, list[tuple[str, Request]]]:
    """A scheduler whose engines are full and whose bins and formed batches hold `queued` requests."""
    config = SchedulingConfig(bins=8, release="greedy", queue_requests_max=10**9).resolved(barrier=False)
    scheduler = config.scheduler(rng.lognormal(5.2, 0.8, 1_000).tolist())
    for index in range(engines):
        scheduler.handle(EngineReady(EngineInfo(f"engine{index:03}", SLOTS, False, 1, TOKENS_MAX)), 0.0)
    running: list[tuple[str, Request]] = []
    for request_id, tokens in enumerate(rng.lognormal(5.2, 0.8, queued + engines * (SLOTS + 1)).tolist()):
        for action in scheduler.handle(RequestArrived(predicted(request_id, tokens)), 0.0):
            assert isinstance(action, StartBatch)
            running += [(action.engine, request) for request in action.batch.requests]
    assert scheduler.waiting == queued, "the queue has its size"
    return scheduler, running


def step_times_us(queued: int, engines: int, steps: int, seed: int) -> list[float]:
    """Microseconds of each of `steps` calls of handle, arrivals and ends in turn, so that the queue keeps its size."""
    rng = np.random.default_rng(seed)
    scheduler, running = busy_scheduler(queued, engines, rng)
    request_ids = itertools.count(10**9)
    lengths = rng.lognormal(5.2, 0.8, steps).tolist()
    times_us = []
    for index in range(steps):
        if index % 2:
            engine, request = running.pop(int(rng.integers(len(running))))
            event: Any = RequestEnded(engine, request.id, "completed", request.predicted_tokens)
        else:
            event = RequestArrived(predicted(next(request_ids), lengths[index]))
        began_ns = time.perf_counter_ns()
        actions = scheduler.handle(event, float(index))
        scheduler.wake_at_s  # noqa: B018  a body asks after every step
        times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        for action in actions:
            running += [(action.engine, request) for request in action.batch.requests]
    return times_us


def predicted(request_id: int, tokens: float) -> Request:
    """A request as a predictor's quantiles make it, of one of a thousand conversations."""
    quantiles = tuple(tokens * factor for factor in SPREAD)
    prefixes = (request_id % 10, 100 + request_id % 100, 1_000 + request_id % 1_000)
    return Request(request_id, tokens, quantiles=quantiles, prompt_tokens=200.0, prefixes=prefixes)


def measure_steps(engines: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    sizes = (1_000, 10_000, 100_000)
    medians: dict[int, list[float]] = {size: [] for size in sizes}
    tails: dict[int, list[float]] = {size: [] for size in sizes}
    for number, size in itertools.product(range(rounds), sizes):
        times_us = step_times_us(size, engines, steps, seed=number)
        medians[size].append(statistics.median(times_us))
        tails[size].append(float(np.percentile(times_us, 99)))
        print(f"round {number + 1}/{rounds}: {size:,} queued: {medians[size][-1]:.1f} us", file=sys.stderr)
    return [
        {
            "queued": size,
            "engines": engines,
            "step_us_p50": round(statistics.median(medians[size]), 2),
            "step_us_p99": round(statistics.median(tails[size]), 2),
        }
        for size in sizes
    ]


def measure_simulator(requests: int, rounds: int) -> list[dict[str, Any]]:
    rates: dict[str, list[float]] = {name: [] for name in SCENARIOS}
    for number, (name, (scenario, values)) in itertools.product(range(rounds), SCENARIOS.items()):
        config = SchedulingConfig(**{"queue_requests_max": requests, **values})  # type: ignore[arg-type]
        began_s = time.perf_counter()
        simulate(msgspec.structs.replace(scenario, requests=requests, seed=number), config)
        rates[name].append(requests / (time.perf_counter() - began_s))
        print(f"round {number + 1}/{rounds}: {name}: {rates[name][-1]:,.0f} requests/s", file=sys.stderr)
    return [{"scenario": name, "requests_per_s": round(statistics.median(values))} for name, values in rates.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--requests", type=int, default=100_000, help="of each simulated run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    steps = measure_steps(args.engines, args.steps, args.rounds)
    simulator = measure_simulator(args.requests, args.rounds)
    results = {"python": platform.python_version(), "steps": steps, "simulator": simulator}
    table = Table(title=f"Scheduler.handle, {args.engines} engines", title_justify="left")
    for column in ("queued", "p50 (us)", "p99 (us)"):
        table.add_column(column, justify="right")
    for row in steps:
        table.add_row(f"{row['queued']:,}", f"{row['step_us_p50']:.1f}", f"{row['step_us_p99']:.1f}")
    rates = Table(title="Simulator, one core", title_justify="left")
    rates.add_column("scenario")
    rates.add_column("requests/s", justify="right")
    for row in simulator:
        rates.add_row(row["scenario"], f"{row['requests_per_s']:,}")
    console = Console()
    console.print(table)
    console.print(rates)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
