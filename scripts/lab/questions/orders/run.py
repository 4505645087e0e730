"""Which order serves best at which load: boost against shortest with a fixed patience, by mean and tail of the latency.

    python scripts/lab orders --lengths chat=trace.csv.gz:output_tokens \\
        --output docs/results/orders.json --plot docs/results/orders.png

The script simulates one engine of 8 slots with the real scheduler. Lengths are drawn from files (--lengths; answers of
no tokens are left out) and from two lognormal distributions, arrivals are Poisson. Every order gets the same requests
with the same forecasts: the 15 quantiles of a predictor whose medians have a rank correlation (Kendall's tau) of --taus
with the lengths. A calibrated predictor knows its errors. An extreme one (only at --extreme-load) adds independent
errors to the length, so that its long forecasts are too long and its short ones too short. "perfect" is shortest first
with known lengths, without ageing.

Prints Markdown tables: mean, 99th and 99.9th percentile of the latency over those of first come, first served; the mean
over the seeds with its 95 % interval.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
from kit.arguments import parser_of, whole
from kit.figures import BLUE, GREY, ORANGE, new_figure, save
from kit.rows import Case, Row, group, measured, read_rows, save_rows, select
from kit.tables import markdown
from numpy.typing import NDArray

from llmserve.commands.simulate import run
from llmserve.errors import ConfigError
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation import workload
from llmserve.simulation.files import records
from llmserve.simulation.predictions import LEVELS, Predictions
from llmserve.simulation.report import Recorder
from llmserve.simulation.scenario import STEP_S, Scenario, Workload
from questions.bins.run import error_of

Lengths = NDArray[np.float64]

SLOTS = 8
DRAWN = {"lognormal 0.8": "lognormal:5.2,0.8", "lognormal 1.5": "lognormal:5.2,1.5,16384"}
POOL = 40_000  # lengths of a drawn distribution, from which requests are drawn
PATIENCES = (3.0, 12.0, 40.0, 120.0)
FIRST, BOOST, PERFECT = "fffs", "boost", "perfect"
PATIENT = {f"patience {patience:g}": patience for patience in PATIENCES}
USUAL = "patience 12"  # the default of --patience
HIGH_LOAD = 0.9  # below, all orders are nearly the same, and few are measured
TAIL_MOST = 1.10  # bound on the 99th percentile, over that of first come, first served
STUDENT_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # by the number of seeds

CASE = ("name", "load", "order", "tau", "forecasts", "seed")
QUANTITIES = ("mean", "p99", "p99.9")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--lengths", action="append", default=[], metavar="NAME=FILE:COLUMN", help="CSV or JSON lines; repeatable"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="show an earlier --output and run nothing")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.7, 0.9, 0.95, 0.97])
    parser.add_argument("--taus", type=float, nargs="+", default=[0.63, 0.45])
    parser.add_argument("--extreme-load", type=float, default=0.95)
    parser.add_argument("--requests", type=whole(1), default=20_000)
    parser.add_argument("--seeds", type=whole(2), default=3)
    parser.add_argument("--first-seed", type=whole(0), default=0)
    parser.add_argument("--jobs", type=whole(1), default=1)
    parser.add_argument("--output", type=Path, help="JSON of every run: latencies in seconds")
    parser.add_argument("--plot", type=Path, help="PNG: the mean against the 99th percentile at the highest load")
    args = parser.parse_args()
    try:
        rows = read_rows(args.results, CASE) if args.results else measure(args)
    except (ConfigError, OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    print("\n\n".join(tables(rows)))
    save_rows(args.output, rows)
    if args.plot:
        draw(rows, args.plot)


def measure(args: argparse.Namespace) -> list[Row]:
    lengths = {name: read(place) for name, _, place in (text.partition("=") for text in args.lengths)}
    rng = np.random.default_rng(0)
    lengths |= {name: workload.draw_lengths(text, POOL, rng) for name, text in DRAWN.items()}
    errors = {(name, tau): error_of(values, tau) for name, values in lengths.items() for tau in args.taus}
    cases = list(cases_of(args, lengths))
    return measured(partial(serve, lengths, errors, args.requests), cases, args.jobs)


def cases_of(args: argparse.Namespace, lengths: Mapping[str, Lengths]) -> Iterator[Case]:
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for name in lengths:
        for load in args.loads:
            good, *rough = args.taus
            high = load >= HIGH_LOAD
            kinds = [(order, None, "none") for order in ((FIRST, PERFECT) if high else (FIRST,))]
            kinds += [(order, good, "calibrated") for order in (BOOST, *(PATIENT if high else [USUAL]))]
            kinds += [(order, tau, "calibrated") for tau in rough for order in ((BOOST, USUAL) if high else (BOOST,))]
            if load == args.extreme_load:
                kinds += [(order, args.taus[-1], "extreme") for order in (BOOST, USUAL)]
            for order, tau, forecasts in kinds:
                for seed in seeds:
                    yield dict(zip(CASE, (name, load, order, tau, forecasts, seed), strict=True))


def read(place: str) -> Lengths:
    """The lengths in FILE:COLUMN that are above 0. Raises ConfigError, or KeyError where a row lacks the column."""
    path, _, column = place.rpartition(":")
    lengths = np.array([float(fields[column] or 0.0) for _, fields in records(path, "lengths file")])
    return lengths[lengths > 0.0]


# ---- a run ------------------------------------------------------------------------------------------------------


def serve(lengths: Mapping[str, Lengths], errors: Mapping[tuple[str, float], float], requests: int, case: Case) -> Row:
    lengths_rng, arrivals_rng, error_rng = [
        np.random.default_rng(child) for child in np.random.SeedSequence(case["seed"]).spawn(3)
    ]
    values = lengths[case["name"]]
    served = lengths_rng.choice(values, requests)
    rate_per_s = case["load"] * SLOTS / (STEP_S * values.mean())
    arrivals_s = workload.poisson_arrivals(rate_per_s, requests, arrivals_rng)
    if case["order"] == PERFECT:
        predictions: Predictions | None = Predictions(served)
    elif case["tau"] is None:
        predictions = None
    else:
        error = errors[case["name"], case["tau"]]
        predictions = forecast(served, values, error, error_rng, calibrated=case["forecasts"] == "calibrated")
    trace = workload.Trace(arrivals_s, served, np.zeros(requests))
    recorder = Recorder(requests)
    work = Workload(trace, predictions, (), (), rate_per_s)
    run(Scenario(slots=SLOTS), scheduling(case["order"]), work, recorder=recorder)
    latency_s = np.array(recorder.ended_s) - arrivals_s
    numbers = (latency_s.mean(), np.quantile(latency_s, 0.99), np.quantile(latency_s, 0.999))
    return Row(case, {name: round(float(number), 3) for name, number in zip(QUANTITIES, numbers, strict=True)})


def forecast(
    served: Lengths, similar: Lengths, error: float, rng: np.random.Generator, *, calibrated: bool
) -> Predictions:
    """Quantiles of a predictor that sees the log length with a normal error. similar : lengths of such requests

    A calibrated predictor forecasts the length given what it sees, as if log lengths were normal.
    """
    seen = np.log(served) + rng.normal(0.0, error, served.size)
    centre, variance = np.log(similar).mean(), np.log(similar).var()
    share = variance / (variance + error**2) if calibrated else 1.0
    middle = centre + share * (seen - centre)
    spread = math.sqrt(share) * error
    probits = np.array([NormalDist().inv_cdf(level) for level in LEVELS])
    return Predictions.of(np.exp(middle[:, None] + spread * probits))


def scheduling(order: str) -> SchedulingConfig:
    options: dict[str, Any] = {"order": order}
    if order not in (FIRST, BOOST):
        options = {"order": "shortest", "patience": PATIENT.get(order, 1e9)}
    return SchedulingConfig(queue_requests_max=10**9, **options).resolved(barrier=False)


# ---- tables and the figure --------------------------------------------------------------------------------------


def relative(rows: Sequence[Row], quantity: str, **case: Any) -> list[float]:
    """A quantity over that of first come, first served, of every seed. case : of the rows besides the seed"""
    first = {row["seed"]: row[quantity] for row in select(rows, name=case["name"], load=case["load"], order=FIRST)}
    return [row[quantity] / first[row["seed"]] for row in select(rows, **case)]


def mean_of(ratios: Sequence[float]) -> str:
    return f"{fmean(ratios):.2f}" if ratios else "-"


def interval(ratios: Sequence[float]) -> str:
    half = STUDENT_95.get(len(ratios), 2.0) * stdev(ratios) / math.sqrt(len(ratios))
    return f"{fmean(ratios):.2f} ± {half:.2f}"


def least_patient(rows: Sequence[Row], **case: Any) -> tuple[str, float, float] | None:
    """The patience of the least mean whose 99th percentile keeps TAIL_MOST: its name, mean and p99.

    None: no patience keeps it, or not all were measured.
    """
    found = []
    for order in PATIENT if all(select(rows, order=order, **case) for order in PATIENT) else ():
        mean, tail = (fmean(relative(rows, quantity, order=order, **case)) for quantity in ("mean", "p99"))
        if tail <= TAIL_MOST:
            found.append((mean, order, tail))
    if not found:
        return None
    mean, order, tail = min(found)
    return order, mean, tail


def tables(rows: Sequence[Row]) -> list[str]:
    texts = []
    forecasted = [row for row in rows if row["tau"] is not None]
    for (forecasts, tau), some in group(forecasted, "forecasts", "tau").items():
        lines = []
        for (name, load), _ in group(some, "name", "load").items():
            case = {"name": name, "load": load, "tau": tau, "forecasts": forecasts}
            boost = [interval(relative(rows, quantity, order=BOOST, **case)) for quantity in QUANTITIES]
            usual = [mean_of(relative(rows, quantity, order=USUAL, **case)) for quantity in QUANTITIES[:2]]
            best = least_patient(rows, **case)
            least = "" if best is None else f"{best[0].removeprefix('patience ')}: {best[1]:.2f} / {best[2]:.2f}"
            lines.append([name, f"{load:g}", *boost, " / ".join(usual), least])
        head = ["lengths", "load", "boost: mean", "p99", "p99.9", "patience 12: mean / p99", "best patience"]
        texts.append(markdown(head, lines, title=f"{forecasts} forecasts, tau {tau:g}"))
    lines = []
    for (name, load), _ in group(select(rows, order=PERFECT), "name", "load").items():
        case = {"name": name, "load": load, "order": PERFECT}
        lines.append([name, f"{load:g}", *(interval(relative(rows, quantity, **case)) for quantity in QUANTITIES)])
    texts.append(markdown(["lengths", "load", "mean", "p99", "p99.9"], lines, title="shortest first, known lengths"))
    return texts


def draw(rows: Sequence[Row], path: Path) -> None:
    """The mean against the 99th percentile, calibrated forecasts of the first tau, a panel for each set of lengths."""
    load, tau = max(row["load"] for row in rows), max(row["tau"] or 0.0 for row in rows)
    names = list(group(rows, "name"))
    figure, axes = new_figure(1, len(names), width=2.9 * len(names), height=3.4)

    def point(name: str, order: str) -> tuple[float, float]:
        kind = {"name": name, "load": load, "order": order}
        if order not in (FIRST, PERFECT):
            kind |= {"tau": tau, "forecasts": "calibrated"}
        return fmean(relative(rows, "p99", **kind)), fmean(relative(rows, "mean", **kind))

    for (name,), axis in zip(names, axes[0], strict=True):
        tails, means = zip(*[point(name, order) for order in PATIENT], strict=True)
        axis.plot(tails, means, "o-", color=GREY, ms=4, label="shortest, patience 3, 12, 40, 120")
        axis.plot(*point(name, PERFECT), "x", color=ORANGE, label="shortest first, known lengths")
        axis.plot(*point(name, BOOST), "D", color=BLUE, ms=7, label="boost")
        axis.plot(1.0, 1.0, "s", color="black", ms=5, label="first come, first served")
        axis.axvline(TAIL_MOST, color="black", linewidth=0.8, linestyle=":")
        axis.set_title(f"{name}, load {load:g}", fontsize=9)
        axis.set_xlabel("99th percentile", fontsize=8)
    axes[0, 0].set_ylabel("mean latency, over first come, first served", fontsize=8)
    axes[0, 0].legend(loc="best")
    save(figure, path)
