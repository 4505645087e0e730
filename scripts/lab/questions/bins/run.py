"""Which batches serve best: bins of equal mass, bins by answers, or windows; on files of answer lengths.

    python scripts/lab bins --lengths chat=trace.csv.gz:output_tokens \\
        --lengths maths=answers.jsonl.gz:tokens --jobs 2 --output docs/results/bins.json --plot docs/results/bins.png

The script simulates one engine that runs batches to their end, one step a token, with the real scheduler. One random
half of each file's rows (--seeds random halves) gives the first edges, the other half is served. All requests at once
give the throughput. Poisson arrivals give latencies, at loads that one bin can bear (below 1) and cannot bear (above).
Lengths are known ("oracle"), or predicted as roughly as a trained predictor does from people's prompts
(docs/results/prediction.md): quantiles whose medians have a rank correlation (Kendall's tau) of --tau with the lengths.

Prints Markdown tables: gains in throughput over one bin; mean latency and its 99th percentile over those of 8 bins of
equal mass.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from kit.arguments import numbers, parser_of, whole
from kit.figures import new_figure, save
from kit.results import rounded
from kit.rows import Case, Row, group, measured, ratio, read_rows, save_rows, select
from kit.tables import markdown
from numpy.typing import NDArray
from scipy.stats import kendalltau

from llmserve.commands.simulate import run
from llmserve.errors import ConfigError
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation import workload
from llmserve.simulation.files import records
from llmserve.simulation.predictions import predict
from llmserve.simulation.scenario import STEP_S, Scenario, Workload

Lengths = NDArray[np.float64]

BATCHES = 200  # served in a run
REQUESTS_MIN = 4_000
SAMPLE = 4_000  # lengths for the first edges
LOADS = (0.5, 0.9, 1.2)  # shares of what one bin can bear
AT_ONCE = None  # instead of a load
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
# The policies that are also measured with Poisson arrivals:
WITH_ARRIVALS = ("1 bin", "8 bins, mass", "8 bins, answers", "window of 8 batches", "window of 32 batches")

CASE = ("name", "batch_size", "predictions", "policy", "load", "seed")
QUANTITIES = ("throughput_per_s", "latency_s_mean", "latency_s_p99")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--lengths", action="append", default=[], metavar="NAME=FILE:COLUMN", help="CSV or JSON lines; repeatable"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="show an earlier --output and run nothing")
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
        rows = load(args.results) if args.results else measure(args)
    except ConfigError as error:
        parser.error(str(error))
    print("\n\n".join(tables(rows)))
    save_rows(args.output, rows)
    if args.plot:
        draw(rows, args.plot)


def measure(args: argparse.Namespace) -> list[Row]:
    lengths = {name: read(place) for name, _, place in (text.partition("=") for text in args.lengths)}
    cases = list(cases_of(args, lengths))
    return measured(partial(serve, lengths), cases, args.jobs)


def load(path: Path) -> list[Row]:
    """Raises ConfigError when the file is not an --output of this script."""
    try:
        return [Row(row.case, {name: row[name] for name in QUANTITIES}) for row in read_rows(path, CASE)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"cannot read the results {str(path)!r}: {error}") from error


def cases_of(args: argparse.Namespace, lengths: Mapping[str, Lengths]) -> Iterator[Case]:
    for name, values in lengths.items():
        sigma = error_of(values, args.tau)
        for size in args.batch_sizes:
            for predictions in ("oracle", f"quantiles:{sigma:.3g}"):
                for policy in POLICIES:
                    for load in (AT_ONCE, *LOADS) if policy in WITH_ARRIVALS else (AT_ONCE,):
                        for seed in range(args.seeds):
                            yield dict(zip(CASE, (name, size, predictions, policy, load, seed), strict=True))


# ---- a run ------------------------------------------------------------------------------------------------------


def read(place: str) -> Lengths:
    """The lengths in FILE:COLUMN. Raises ConfigError unless there are two or more, all above 0."""
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
    """The sigma of a lognormal error with which predictions have this rank correlation with the lengths."""
    rng = np.random.default_rng(0)
    sample = rng.choice(lengths, TAU_SAMPLE)
    error = rng.standard_normal(TAU_SAMPLE)
    low, high = 0.0, 5.0
    for _ in range(20):
        middle = (low + high) / 2
        reached = kendalltau(sample, sample * np.exp(middle * error)).statistic
        low, high = (middle, high) if reached > tau else (low, middle)
    return low


def serve(lengths: Mapping[str, Lengths], case: Case, batches: int = BATCHES) -> Row:
    """Serve requests of `batches` full batches, at least REQUESTS_MIN. lengths : by the case's name"""
    lengths_rng, sample_rng, arrivals_rng, error_rng = [
        np.random.default_rng(child) for child in np.random.SeedSequence(case["seed"]).spawn(4)
    ]
    half_for_edges, half_served = np.array_split(lengths_rng.permutation(lengths[case["name"]]), 2)
    config, batch_size = scheduling(case), case["batch_size"]
    served = lengths_rng.choice(half_served, max(REQUESTS_MIN, batches * batch_size))
    sample = sample_rng.choice(half_for_edges, SAMPLE)
    batch_s = STEP_S * float(np.mean(np.max(sample_rng.choice(half_for_edges, (SAMPLE, batch_size)), axis=1)))
    rate_per_s = (math.inf if case["load"] is AT_ONCE else case["load"]) * batch_size / batch_s
    arrivals_s = workload.poisson_arrivals(rate_per_s, served.size, arrivals_rng)
    forecasts = predict(case["predictions"], sample, error_rng)
    assert forecasts is not None
    scores = sample if forecasts.quantiles is None else np.array(config.scores(forecasts.quantiles.tolist()))
    work = Workload(
        workload.Trace(arrivals_s, served, np.zeros(served.size)),
        predict(case["predictions"], served, error_rng),
        tuple(scores.tolist()),
        tuple(sample.tolist()),
        rate_per_s,
    )
    summary = run(Scenario(barrier=True), config, work)
    return Row(case, rounded({name: getattr(summary, name) for name in QUANTITIES}))


def scheduling(case: Case) -> SchedulingConfig:
    options = dict(POLICIES[case["policy"]])
    if "window" in options:
        options["window"] *= case["batch_size"]
    config = SchedulingConfig(batch_size=case["batch_size"], queue_requests_max=10**9, **options)
    return config.resolved(barrier=True)


# ---- tables and the figure --------------------------------------------------------------------------------------


def over(rows: Sequence[Row], quantity: str, policy: str, reference: str, load: float | None) -> float:
    """Median over seeds of a policy's quantity over the reference's."""
    chosen, reference_rows = [select(rows, policy=name, load=load) for name in (policy, reference)]
    return ratio(chosen, reference_rows, quantity, "seed")


def tables(rows: Sequence[Row]) -> list[str]:
    def gain(same: Sequence[Row], policy: str) -> str:
        return f"{over(same, 'throughput_per_s', policy, '1 bin', AT_ONCE):.2f}"

    def latency(load: float, same: Sequence[Row], policy: str) -> str:
        return ", ".join(f"{over(same, name, policy, REFERENCE, load):.2f}" for name in QUANTITIES[1:])

    gains = [policy for policy in POLICIES if policy != "1 bin"]
    slower = [policy for policy in WITH_ARRIVALS if policy != REFERENCE]
    title = "Mean latency, and its 99th percentile, over that of 8 bins of equal mass: load"
    return [
        _table("Gain in throughput over one bin, all at once", rows, gains, gain),
        *(
            _table(f"{title} {load:g}", rows, slower, partial(latency, load))
            for load in LOADS
            if select(rows, load=load)
        ),
    ]


def _table(title: str, rows: Sequence[Row], policies: Sequence[str], cell: Callable[[Sequence[Row], str], str]) -> str:
    lines = [
        [name, str(size), _kind(predictions), *(cell(same, policy) for policy in policies)]
        for (name, size, predictions), same in group(rows, "name", "batch_size", "predictions").items()
    ]
    return markdown(["lengths", "batch", "predictions", *policies], lines, title=title)


def _kind(predictions: str) -> str:
    return "predicted" if predictions.startswith("quantiles") else predictions


def draw(rows: Sequence[Row], path: Path) -> None:
    """Batches of FIGURE_BATCH: gains on the left, mean latencies at load 0.9 on the right."""
    rows = select(rows, batch_size=FIGURE_BATCH)
    figure, axes = new_figure(2, 2, width=11, height=6.4, sharey="col")
    colours = {"8 bins, mass": "#9a9a9a", "8 bins, answers": "#0072b2", "window of 32 batches": "#d55e00"}
    for kind, (left, right) in zip(("oracle", "predicted"), axes, strict=True):
        by_name = group([row for row in rows if _kind(row["predictions"]) == kind], "name")
        for number, (policy, colour) in enumerate(colours.items()):
            at = np.arange(len(by_name)) + 0.27 * (number - 1)
            gains = [over(same, "throughput_per_s", policy, "1 bin", AT_ONCE) for same in by_name.values()]
            left.bar(at, gains, 0.25, color=colour, label=policy)
            slower = [over(same, "latency_s_mean", policy, REFERENCE, 0.9) for same in by_name.values()]
            right.bar(at, slower, 0.25, color=colour)
        lengths = "lengths known" if kind == "oracle" else "lengths predicted"
        left.set_title(f"throughput over one bin, all at once ({lengths})", fontsize=10)
        right.set_title(f"mean latency over 8 bins of equal mass, load 0.9 ({lengths})", fontsize=10)
        for axis in (left, right):
            axis.set_xticks(range(len(by_name)), [name.replace(", ", "\n") for (name,) in by_name], fontsize=8)
            axis.axhline(1.0, color="#333333", linewidth=0.8)
            axis.grid(visible=False, axis="x")
    axes[0, 0].legend()
    save(figure, path, dpi=110)
