#!/usr/bin/env python3
"""Which batches serve best: bins of equal mass, bins by answers, or windows; on files of answer lengths.

    python scripts/lab/benchmark_bins.py --lengths chat=trace.csv.gz:output_tokens \\
        --lengths maths=answers.jsonl.gz:tokens --jobs 2 --output docs/results/bins.json --plot docs/results/bins.png

Simulates one engine that runs batches to their end, a step a token, with the scheduler that serves. One half of each
file's rows (by --seeds random halves) gives the first edges, the other half is served: all at once, which tells the
throughput, and as they come at random, at loads that one bin could bear (below 1) and could not (above). Lengths are
known ("oracle"), or predicted as roughly as people's prompts let a trained predictor do (docs/results/prediction.md):
quantiles whose medians have a rank correlation (Kendall's tau) of --tau with the lengths.

Prints Markdown tables: gains in throughput over one bin; mean latency and its 99th percentile over that of as many
bins of equal mass.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench.arguments import numbers, parser_of, whole
from bench.figures import new_figure, save
from bench.results import write_rows
from bench.tables import markdown
from numpy.typing import NDArray
from scipy.stats import kendalltau

from llmserve.errors import ConfigError
from llmserve.policies import SchedulingConfig
from llmserve.simulate import run
from llmserve.simulation import workload
from llmserve.simulation.files import records
from llmserve.simulation.many import in_processes
from llmserve.simulation.predictions import predict
from llmserve.simulation.progress import RunsProgress
from llmserve.simulation.scenario import STEP_S, Scenario, Workload

Lengths = NDArray[np.float64]

BATCHES = 200  # that are served in a run
REQUESTS_MIN = 4_000
SAMPLE = 4_000  # for the first edges
LOADS = (0.5, 0.9, 1.2)  # of what one bin can bear
AT_ONCE = math.inf
TAU_SAMPLE = 2_000
FIGURE_BATCH = 8

POLICIES: dict[str, dict[str, Any]] = {
    "1 bin": {"bins": 1, "release": "greedy"},
    "2 bins, mass": {"bins": 2, "release": "greedy", "edges_by": "mass"},
    "2 bins, answers": {"bins": 2, "release": "greedy", "edges_by": "answers"},
    "8 bins, mass": {"bins": 8, "release": "greedy", "edges_by": "mass"},
    "8 bins, answers": {"bins": 8, "release": "greedy", "edges_by": "answers"},
    "window of 8 batches": {"release": "window", "window": 8},  # times the batch size
    "window of 32 batches": {"release": "window", "window": 32},
}
REFERENCE = "8 bins, mass"
# As they come at random:
LATER = ("1 bin", "8 bins, mass", "8 bins, answers", "window of 8 batches", "window of 32 batches")


@dataclass(frozen=True, slots=True)
class Case:
    """A run. place : of the lengths.  load : of what one bin can bear; AT_ONCE: all come at once."""

    name: str
    place: str
    batch_size: int
    predictions: str
    policy: str
    load: float
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What it came to."""

    throughput_per_s: float
    latency_s_mean: float
    latency_s_p99: float


Rows = Sequence[tuple[Case, Outcome]]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--lengths", action="append", default=[], metavar="NAME=FILE:COLUMN", help="CSV or JSON lines; repeatable"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="show these, of an earlier --output, and run nothing"
    )
    parser.add_argument("--batch-sizes", type=numbers, default=(8, 32, 128), metavar="B,B,...")
    parser.add_argument("--tau", type=float, default=0.63, help="rank correlation of predictions (default 0.63)")
    parser.add_argument("--seeds", type=whole(1), default=3)
    parser.add_argument("--jobs", type=whole(1), default=1)
    parser.add_argument("--output", type=Path, help="JSON of every run")
    parser.add_argument("--plot", type=Path, help="PNG: gains and latencies of batches of 8")
    args = parser.parse_args()
    if not args.lengths and not args.results:
        parser.error("either --lengths or --results is needed")
    if not 0 < args.tau < 1:
        parser.error(f"--tau must be between 0 and 1, not {args.tau}")
    try:
        rows = load(args.results) if args.results else measure(list(_cases(args)), args.jobs)
    except ConfigError as error:
        parser.error(str(error))
    print("\n\n".join(tables(rows)))
    if args.output:
        write(rows, args.output)
    if args.plot:
        draw(rows, args.plot)


def measure(cases: Sequence[Case], jobs: int) -> Rows:
    outcomes: dict[int, Outcome] = {}
    with RunsProgress(len(cases)) as told:
        for index, outcome in in_processes(serve, cases, jobs):
            outcomes[index] = outcome
            told.ended()
    return [(case, outcomes[index]) for index, case in enumerate(cases)]


def write(rows: Rows, path: Path) -> None:
    """A JSON list, a run a line; a load of null: all at once. Where a file of lengths lay is not told."""
    entries = []
    for case, outcome in rows:
        entry = {**asdict(case), "load": None if math.isinf(case.load) else case.load, **asdict(outcome)}
        del entry["place"]
        entries.append(entry)
    write_rows(path, entries)


def load(path: Path) -> Rows:
    """Raises ConfigError when the file is none that `write` wrote."""
    try:
        return _rows(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"cannot read the results {str(path)!r}: {error}") from error


def _rows(entries: Sequence[dict[str, Any]]) -> Rows:
    rows = []
    for entry in entries:
        at = AT_ONCE if entry["load"] is None else entry["load"]
        case = Case(**{**{name: entry[name] for name in Case.__slots__ if name in entry}, "place": "", "load": at})
        rows.append((case, Outcome(**{name: entry[name] for name in Outcome.__slots__})))
    return rows


def _cases(args: argparse.Namespace) -> Iterable[Case]:
    for text in args.lengths:
        name, _, place = text.partition("=")
        sigma = error_of(read(place), args.tau)
        for size in args.batch_sizes:
            for predictions in ("oracle", f"quantiles:{sigma:.3g}"):
                for policy in POLICIES:
                    loads = (AT_ONCE, *LOADS) if policy in LATER else (AT_ONCE,)
                    for load in loads:
                        for seed in range(args.seeds):
                            yield Case(name, place, size, predictions, policy, load, seed)


# ---- a run ------------------------------------------------------------------------------------------------------


def read(place: str) -> Lengths:
    """FILE:COLUMN, of positive numbers, two at least. Raises ConfigError."""
    path, _, column = place.rpartition(":")
    lengths = []
    for line, fields in records(path, "lengths file"):
        try:
            lengths.append(float(fields[column]))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"the lengths file {path!r}, line {line}: no number in a column {column!r}") from None
        if not 0 < lengths[-1] < math.inf:
            raise ConfigError(f"the lengths file {path!r}, line {line}: {column} must be above 0, not {lengths[-1]:g}")
    if len(lengths) < 2:
        raise ConfigError(f"the lengths file {path!r} has too few rows to be cut in halves")
    return np.array(lengths)


def error_of(lengths: Lengths, tau: float) -> float:
    """SIGMA of a lognormal error with which predictions rank these lengths so well."""
    rng = np.random.default_rng(0)
    sample = rng.choice(lengths, TAU_SAMPLE)
    error = rng.standard_normal(TAU_SAMPLE)
    low, high = 0.0, 5.0
    for _ in range(20):
        middle = (low + high) / 2
        reached = kendalltau(sample, sample * np.exp(middle * error)).statistic
        low, high = (middle, high) if reached > tau else (low, middle)
    return low


def serve(case: Case) -> Outcome:
    lengths_rng, sample_rng, arrivals_rng, error_rng = [
        np.random.default_rng(child) for child in np.random.SeedSequence(case.seed).spawn(4)
    ]
    half_for_edges, half_served = np.array_split(lengths_rng.permutation(read(case.place)), 2)
    config = scheduling(case)
    served = lengths_rng.choice(half_served, max(REQUESTS_MIN, BATCHES * case.batch_size))
    sample = sample_rng.choice(half_for_edges, SAMPLE)
    batch_s = STEP_S * float(np.mean(np.max(sample_rng.choice(half_for_edges, (SAMPLE, case.batch_size)), axis=1)))
    rate_per_s = case.load * case.batch_size / batch_s
    arrivals_s = workload.poisson_arrivals(rate_per_s, served.size, arrivals_rng)
    forecasts = predict(case.predictions, sample, error_rng)
    assert forecasts is not None
    scores = sample if forecasts.quantiles is None else np.array(config.scores(forecasts.quantiles.tolist()))
    work = Workload(
        workload.Trace(arrivals_s, served, np.zeros(served.size)),
        predict(case.predictions, served, error_rng),
        tuple(scores.tolist()),
        tuple(sample.tolist()),
        rate_per_s,
    )
    summary = run(Scenario(barrier=True), config, work)
    return Outcome(summary.throughput_per_s, summary.latency_s_mean, summary.latency_s_p99)


def scheduling(case: Case) -> SchedulingConfig:
    options = dict(POLICIES[case.policy])
    if "window" in options:
        options["window"] *= case.batch_size
    asked = SchedulingConfig(batch_size=case.batch_size, queue_requests_max=10**9, **options)
    return asked.resolved(barrier=True)


# ---- what they came to ------------------------------------------------------------------------------------------


def ratio(rows: Rows, quantity: str, policy: str, reference: str, **of: Any) -> float:
    """Median over seeds of a quantity over the reference's with the same seed."""

    def by_seed(name: str) -> dict[int, float]:
        wanted = {**of, "policy": name}
        chosen = [pair for pair in rows if all(getattr(pair[0], key) == value for key, value in wanted.items())]
        return {case.seed: getattr(outcome, quantity) for case, outcome in chosen}

    ours, theirs = by_seed(policy), by_seed(reference)
    return statistics.median(ours[seed] / theirs[seed] for seed in ours)


def tables(rows: Rows) -> list[str]:
    loads = [load for load in LOADS if any(case.load == load for case, _ in rows)]
    gains = _table(
        "Gain in throughput over one bin, all at once",
        rows,
        [policy for policy in POLICIES if policy != "1 bin"],
        lambda policy, **of: f"{ratio(rows, 'throughput_per_s', policy, '1 bin', load=AT_ONCE, **of):.2f}",
    )

    def latency(load: float) -> Callable[..., str]:
        def cell(policy: str, **of: Any) -> str:
            mean = ratio(rows, "latency_s_mean", policy, REFERENCE, load=load, **of)
            tail = ratio(rows, "latency_s_p99", policy, REFERENCE, load=load, **of)
            return f"{mean:.2f}, {tail:.2f}"

        return cell

    others = [policy for policy in LATER if policy != REFERENCE]
    title = "Mean latency, and its 99th percentile, over that of 8 bins of equal mass: load"
    return [gains, *(_table(f"{title} {load:g}", rows, others, latency(load)) for load in loads)]


def _table(title: str, rows: Rows, policies: Sequence[str], cell: Callable[..., str]) -> str:
    head = ["lengths", "batch", "predictions", *policies]
    lines = []
    for name, size, predictions in dict.fromkeys((case.name, case.batch_size, case.predictions) for case, _ in rows):
        cells = [cell(policy, name=name, batch_size=size, predictions=predictions) for policy in policies]
        lines.append([name, str(size), predictions.partition(":")[0].replace("quantiles", "predicted"), *cells])
    return markdown(head, lines, title=title)


def draw(rows: Rows, path: Path) -> None:
    """Batches of FIGURE_BATCH: gains on the left, mean latencies at each load on the right."""
    names = list(dict.fromkeys(case.name for case, _ in rows))
    kinds = list(dict.fromkeys((case.name, case.predictions) for case, _ in rows if case.batch_size == FIGURE_BATCH))
    figure, axes = new_figure(2, 2, width=11, height=6.4, sharey="col")
    shown = ("8 bins, mass", "8 bins, answers", "window of 32 batches")
    colours = dict(zip(shown, ("#9a9a9a", "#0072b2", "#d55e00"), strict=True))
    for row, oracle in enumerate((True, False)):
        chosen = {name: found for name, found in kinds if (found == "oracle") == oracle}
        left, right = axes[row]
        for number, policy in enumerate(shown):
            at = np.arange(len(names)) + 0.27 * (number - 1)
            of = [{"name": name, "batch_size": FIGURE_BATCH, "predictions": chosen[name]} for name in names]
            gains = [ratio(rows, "throughput_per_s", policy, "1 bin", load=AT_ONCE, **each) for each in of]
            left.bar(at, gains, 0.25, color=colours[policy], label=policy)
            slower = [ratio(rows, "latency_s_mean", policy, REFERENCE, load=0.9, **each) for each in of]
            right.bar(at, slower, 0.25, color=colours[policy])
        what = "lengths known" if oracle else "lengths predicted"
        left.set_title(f"throughput over one bin, all at once ({what})", fontsize=10)
        right.set_title(f"mean latency over 8 bins of equal mass, load 0.9 ({what})", fontsize=10)
        for axis in (left, right):
            axis.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
            axis.axhline(1.0, color="#333333", linewidth=0.8)
            axis.grid(visible=False, axis="x")
    axes[0, 0].legend()
    save(figure, path, dpi=110)


if __name__ == "__main__":
    main()
