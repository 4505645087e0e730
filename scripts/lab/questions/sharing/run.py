"""Models that share an engine of one model at a time: grouped by the loaded model, first come first served, and direct.

    python scripts/lab sharing --output docs/results/shared-models.json

The script simulates one engine with the real scheduler. The engine holds one model, and loads another when a request
needs it, after the last run of the one before (simulation/engine_model.py). Each request asks for one of 2 or 4 models;
of 4, the most popular one is asked for four times as often as the least. Arrivals are Poisson at a load (the share of
the slots' time that answers take, loads of models aside), or come in three bursts. Answers are lognormal, 200 tokens in
the mean; forecasts have a log error of 0.5.

    direct    all requests go into the engine at once, which takes them one after another
    fcfs      first come, first served, as many as the engine has slots
    mixed     the default order, as if the engine had all models at once
    grouped   the default order, with what the engine says: one model at a time. The time of a load is learnt

Prints Markdown tables: mean, 95th percentile and longest latency, requests a second and loads, over those of fcfs; the
mean over the seeds of the ratio in one seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from kit.arguments import add_seeds, parser_of, whole
from kit.rows import Case, Row, group, measured, read_rows, save_rows
from kit.tables import markdown

from llmserve.request import EngineInfo, Request
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import Costs, Loading, StepEngine
from llmserve.simulation.report import Recorder

STEP_S, PREFILL_S = 0.02, 0.1
TOKENS_MEAN, TOKENS_SIGMA, FORECAST_SIGMA = 200.0, 0.8, 0.5
BURSTS = 3
BURST_GAP = 1.5  # time between two bursts, over the time that the slots take for one, loads aside
POPULARITY = {1: (1.0,), 2: (0.5, 0.5), 4: (0.4, 0.3, 0.2, 0.1)}
LOOK_AHEAD = 2
POLICIES = ("direct", "fcfs", "mixed", "grouped")
CASE = ("arrivals", "models", "slots", "load_s", "policy", "seed")
QUANTITIES = {
    "mean": "latency_s_mean",
    "p95": "latency_s_p95",
    "longest": "latency_s_max",
    "requests/s": "requests_per_s",
    "loads": "loads",
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=whole(1), default=600)
    add_seeds(parser, 5)
    args = parser.parse_args()
    rows = read_rows(args.results, CASE) if args.results else measure(args)
    print("\n\n".join(tables(rows)))
    save_rows(args.output, rows)


def measure(args: Any) -> list[Row]:
    cases = list(cases_of(range(args.first_seed, args.first_seed + args.seeds)))
    return measured(partial(serve, args.requests), cases, args.jobs)


def cases_of(seeds: Sequence[int]) -> Iterator[Case]:
    for arrivals in (0.3, 0.6, 0.8, "bursts"):
        for models in (1, 2, 4):
            for slots in (1, 4):
                for load_s in (2.0, 5.0, 20.0) if models > 1 else (5.0,):
                    for policy in POLICIES:
                        for seed in seeds:
                            values = (arrivals, models, slots, load_s, policy, seed)
                            yield dict(zip(CASE, values, strict=True))


# ---- a run ------------------------------------------------------------------------------------------------------


def serve(count: int, case: Case) -> Row:
    rng = np.random.default_rng([case["seed"], case["models"], case["slots"]])
    lengths = rng.lognormal(math.log(TOKENS_MEAN) - TOKENS_SIGMA**2 / 2, TOKENS_SIGMA, count).round().clip(1)
    forecasts = lengths * rng.lognormal(0.0, FORECAST_SIGMA, count)
    models = rng.choice(case["models"], count, p=POPULARITY[case["models"]])
    arrivals_s = arrivals(case["arrivals"], case["slots"], count, rng)
    requests = [
        Request(index, float(forecasts[index]), model=f"model-{models[index]}", prompt_tokens=100.0)
        for index in range(count)
    ]
    slots, policy = case["slots"], case["policy"]
    info = EngineInfo(
        "gpu0",
        slots,
        False,
        look_ahead=count if policy == "direct" else LOOK_AHEAD,
        models=tuple([f"model-{index}" for index in range(case["models"])]),
        models_at_once=1 if policy == "grouped" else 0,
    )
    costs = Costs.constant(STEP_S, PREFILL_S, slots)
    engine = StepEngine(info, lengths.tolist(), costs, range(count), loading=Loading(1, case["load_s"]))
    order = "fffs" if policy in ("direct", "fcfs") else None
    scheduler = SchedulingConfig(order=order).resolved(barrier=False).scheduler()
    recorder = Recorder(count)
    cluster = SimulatedCluster(scheduler, [engine], on_step=recorder)
    cluster.run(zip(arrivals_s.tolist(), requests, strict=True))
    ended_s = np.array(recorder.ended_s)
    latency_s = ended_s - arrivals_s
    numbers = {
        "latency_s_mean": float(latency_s.mean()),
        "latency_s_p95": float(np.quantile(latency_s, 0.95)),
        "latency_s_max": float(latency_s.max()),
        "requests_per_s": count / float(ended_s.max() - arrivals_s[0]),
        "loads": float(engine.loads),
    }
    return Row(case, {name: float(f"{value:.6g}") for name, value in numbers.items()})


def arrivals(kind: float | str, slots: int, count: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Times of the arrivals, seconds."""
    service_s = (TOKENS_MEAN * STEP_S + PREFILL_S) / slots
    if isinstance(kind, float):
        return np.cumsum(rng.exponential(service_s / kind, count))
    size = math.ceil(count / BURSTS)
    return np.repeat(np.arange(BURSTS) * BURST_GAP * size * service_s, size)[:count] + np.arange(count) * 1e-4


# ---- tables -----------------------------------------------------------------------------------------------------

COLUMNS = {
    "direct": ("mean", "p95"),
    "mixed": ("mean", "p95", "requests/s"),
    "grouped": ("mean", "p95", "longest", "requests/s", "loads"),
}


def tables(rows: Sequence[Row]) -> Iterator[str]:
    head = [f"{policy}: {name}" for policy, names in COLUMNS.items() for name in names]
    for (kind,), own in group(rows, "arrivals").items():
        title = f"Poisson, load {kind}" if isinstance(kind, float) else "Bursts"
        yield markdown(["models, slots, load", "fcfs: mean, p95, loads", *head], lines(own), title=title, right=True)


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for (models, slots, load_s), own in group(rows, "models", "slots", "load_s").items():
        of = {policy: same for (policy,), same in group(own, "policy").items()}
        mean, p95, loads = (fmean(row[QUANTITIES[name]] for row in of["fcfs"]) for name in ("mean", "p95", "loads"))
        ratios = [over(of[policy], of["fcfs"], QUANTITIES[name]) for policy, names in COLUMNS.items() for name in names]
        absolute = f"{mean:.3g} s, {p95:.3g} s, {loads:.0f}"
        yield [f"{models}, {slots}, {load_s:g} s", absolute, *[f"{ratio:.2f}" for ratio in ratios]]


def over(rows: Sequence[Row], references: Sequence[Row], name: str) -> float:
    """Mean over the seeds of the ratio in one seed."""
    by_seed = {row["seed"]: row[name] for row in references}
    return fmean(row[name] / by_seed[row["seed"]] for row in rows)


if __name__ == "__main__":
    main()
