"""What boost costs and gains where arrivals are not Poisson, or lengths are not those of a chat.

    python scripts/lab orders.arrivals --lengths "chat=azure_llm_2023_conv.csv.gz:output_tokens" \\
        --trace "chat trace, 0.9=azure_llm_2023_conv.csv.gz" --every 25 --output docs/results/orders-arrivals.json

The script simulates one engine with the real scheduler under boost. First come, first served needs no scheduler: each
request starts when the next slot is free.
A cell is a kind of lengths, of arrivals, a number of slots, and a kind of forecasts. All cells take days of processor
time; --every N takes each Nth. Where N has no divisor in common with the number of values of a flag, these are about
equally frequent. --quick runs a few cells for seconds.
Lengths are drawn from files (--lengths) and from six distributions. Arrivals, by their mean load:

    Poisson L       stationary, at load L
    day, D          Poisson at 0.9 times 1 + 0.3 sin, with a period of D requests
    batches         of 20 at once, at 0.9
    MMPP            Poisson at 1.25 or 0.45, each for 600 mean gaps on average
    stretch         Poisson at 0.8, and for 15 % of the time, in one piece, at 1.2
    steps           all requests of ten mean gaps at once, at 0.85 times 1 + 0.2 sin, with a period of 5,000 requests
    a trace (--trace "NAME, L=FILE")  its gaps in their order, from a random place on, stretched to load L

Forecasts are those of `lab orders`; "blind" ones are calibrated, but the longest 3 % of the answers are forecast as the
shortest. Prints Markdown tables of the mean, of the 99th and the 99.9th percentile and of the longest wait, over those
of first come, first served, as means over the seeds: for groups of cells the mean of the cells and the highest, then
all cells. --before shows the results of another commit beside them.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from kit.arguments import add_seeds, parser_of, whole
from kit.rows import Case, Row, group, measured, read_rows, save_rows, values
from kit.tables import markdown
from numpy.typing import NDArray

from llmserve.commands.simulate import run
from llmserve.errors import ConfigError
from llmserve.simulation import workload
from llmserve.simulation.predictions import Predictions
from llmserve.simulation.report import Recorder
from llmserve.simulation.scenario import STEP_S, Scenario, Workload
from questions.bins.run import error_of
from questions.orders.run import BOOST, POOL, TAIL_MOST, Lengths, forecast, read, scheduling

Times = NDArray[np.float64]
Arrivals = Callable[[int, float, np.random.Generator], Times]
"""(count, mean gap at load 1 in seconds, rng) -> arrival times"""

MEAN_MOST, WAIT_MOST = 1.05, 2.5  # bounds: on the mean over --before's in Poisson cells, on the longest wait
BATCH, STEP = 20, 10.0
SOJOURN, HIGH, LOW = 600.0, 1.25, 0.45  # of the MMPP
BLIND = 0.03  # part of the answers whose length is not seen
QUICK = {"every": 1009, "seeds": 1, "requests": 500}
CASE = ("name", "arrivals", "slots", "tau", "forecasts", "seed")
QUANTITIES = ("mean", "p99", "p99.9", "longest")
MOST = {"mean": 1.0, "p99": TAIL_MOST, "longest": WAIT_MOST}  # over first come, first served's
FORECASTS = ("calibrated", "extreme", "blind")


def main() -> None:
    parser = parser_of(__doc__)
    add_seeds(parser, 10)
    parser.add_argument("--lengths", action="append", default=[], metavar="NAME=FILE:COLUMN", help="repeatable")
    parser.add_argument("--trace", action="append", default=[], metavar="NAME, LOAD=FILE", help="repeatable")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these lengths or arrivals only")
    parser.add_argument("--slots", type=whole(1), nargs="+", default=[4, 8, 32, 128])
    parser.add_argument("--taus", type=float, nargs="+", default=[0.2, 0.5, 0.65])
    parser.add_argument("--forecasts", choices=FORECASTS, nargs="+", default=["calibrated", "extreme"])
    parser.add_argument("--requests", type=whole(1), default=10_000)
    parser.add_argument("--every", type=whole(1), default=1, metavar="N", help="one of N cells")
    parser.add_argument("--quick", action="store_true", help="a few cells, one seed, few requests: a trial")
    parser.add_argument("--before", type=Path, metavar="FILE", help="--output of the same command at another commit")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    try:
        rows = read_rows(args.results, CASE) if args.results else measure(args)
        before = read_rows(args.before, CASE) if args.before else []
    except (ConfigError, OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    print("\n\n".join(tables(cells(rows), cells(before))))
    save_rows(args.output, rows)


def measure(args: argparse.Namespace) -> list[Row]:
    lengths = {name: read(place) for name, _, place in (text.partition("=") for text in args.lengths)} | drawn()
    arrivals = kinds() | dict(traced(*text.rsplit("=", 1)) for text in args.trace)
    if args.only:
        lengths = {name: some for name, some in lengths.items() if name in args.only} or lengths
        arrivals = {name: kind for name, kind in arrivals.items() if name in args.only} or arrivals
    cases = list(cases_of(args, lengths, arrivals))
    errors = {
        (name, tau): error_of(lengths[name], tau) for name, tau in {(case["name"], case["tau"]) for case in cases}
    }
    return measured(partial(serve, lengths, errors, arrivals, args.requests), cases, args.jobs)


def cases_of(args: argparse.Namespace, *names: Iterable[str]) -> Iterator[Case]:
    """names : of lengths, of arrivals"""
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    some = islice(product(*names, args.slots, args.taus, args.forecasts), 0, None, args.every)
    for cell, seed in product(some, seeds):
        yield dict(zip(CASE, (*cell, seed), strict=True))


# ---- lengths and arrivals -----------------------------------------------------------------------------------------


def drawn() -> dict[str, Lengths]:
    """POOL lengths of each distribution."""
    rng = np.random.default_rng(0)
    short, long = rng.lognormal(math.log(50.0), 0.3, POOL), rng.lognormal(math.log(1_000.0), 0.3, POOL)
    return {
        "lognormal 1.0": workload.draw_lengths("lognormal:5.2,1.0,16384", POOL, rng),
        "lognormal 1.5": workload.draw_lengths("lognormal:5.2,1.5,16384", POOL, rng),
        "bimodal": np.where(rng.random(POOL) < 0.8, short, long),
        "Pareto 1.1": np.minimum(20.0 * rng.random(POOL) ** (-1.0 / 1.1), 16_384.0),
        "trimodal": rng.choice([5.0, 300.0, 8_000.0], POOL, p=[0.6, 0.37, 0.03]),
        "lognormal 0.8": workload.draw_lengths("lognormal:5.2,0.8", POOL, rng),
    }


def kinds() -> dict[str, Arrivals]:
    poisson = {f"Poisson {load:g}": partial(stationary, load) for load in (0.5, 0.7, 0.9, 0.95, 0.97, 0.99)}
    days = {f"day, {period:,}": partial(day, 0.9, 0.3, float(period)) for period in (2_000, 10_000)}
    return {**poisson, **days, "batches": batches, "MMPP": switched, "stretch": stretch, "steps": steps}


def stationary(load: float, count: int, gap_s: float, rng: np.random.Generator) -> Times:
    return workload.poisson_arrivals(load / gap_s, count, rng)


def day(load: float, swing: float, period: float, count: int, gap_s: float, rng: np.random.Generator) -> Times:
    """Poisson arrivals whose rate is a sine. period : requests of one"""
    start, length = rng.random() * 2.0 * math.pi, period / load
    gaps = np.linspace(0.0, 1.5 * count / load, 200_001)  # time in mean gaps at load 1
    waves = np.cos(2.0 * math.pi * gaps / length + start) - math.cos(start)
    expected = load * (gaps - swing * length / (2.0 * math.pi) * waves)
    return gap_s * np.interp(np.cumsum(rng.exponential(1.0, count)), expected, gaps)


def batches(count: int, gap_s: float, rng: np.random.Generator) -> Times:
    times_s = workload.poisson_arrivals(0.9 / (BATCH * gap_s), math.ceil(count / BATCH), rng)
    return np.repeat(times_s, BATCH)[:count]


def switched(count: int, gap_s: float, rng: np.random.Generator) -> Times:
    rate_per_s, sojourn_s = (HIGH + LOW) / 2.0 / gap_s, SOJOURN * gap_s
    return workload.draw_arrivals(f"mmpp:{HIGH / LOW},{sojourn_s}", rate_per_s, count, rng)


def stretch(count: int, gap_s: float, rng: np.random.Generator) -> Times:
    whole_gaps = count / (0.15 * 1.2 + 0.85 * 0.8)
    begins = (0.35 + 0.3 * rng.random()) * whole_gaps
    gaps = np.cumsum([0.0, begins, 0.15 * whole_gaps, whole_gaps])
    expected = np.cumsum([0.0, 0.8 * begins, 1.2 * 0.15 * whole_gaps, 0.8 * whole_gaps])
    return gap_s * np.interp(np.cumsum(rng.exponential(1.0, count)), expected, gaps)


def steps(count: int, gap_s: float, rng: np.random.Generator) -> Times:
    return np.ceil(day(0.85, 0.2, 5_000.0, count, gap_s, rng) / (STEP * gap_s)) * STEP * gap_s


def traced(name: str, path: str) -> tuple[str, Arrivals]:
    """The arrivals of a trace. name : ends in the load.  Raises ConfigError, or ValueError without a load."""
    gaps = np.diff(workload.read_trace(path).arrivals_s)
    return name, partial(replayed, gaps / gaps.mean(), float(name.rpartition(" ")[2]))


def replayed(gaps: Times, load: float, count: int, gap_s: float, rng: np.random.Generator) -> Times:
    shifted = np.resize(np.roll(gaps, -int(rng.integers(gaps.size))), count)
    return np.cumsum(shifted / shifted.mean()) * gap_s / load


# ---- a run ------------------------------------------------------------------------------------------------------


def serve(
    lengths: Mapping[str, Lengths],
    errors: Mapping[tuple[str, float], float],
    arrivals: Mapping[str, Arrivals],
    requests: int,
    case: Case,
) -> Row:
    lengths_rng, arrivals_rng, error_rng = [
        np.random.default_rng(child) for child in np.random.SeedSequence(case["seed"]).spawn(3)
    ]
    similar = lengths[case["name"]]
    served = lengths_rng.choice(similar, requests)
    gap_s = STEP_S * float(similar.mean()) / case["slots"]
    arrivals_s = arrivals[case["arrivals"]](requests, gap_s, arrivals_rng)
    calibrated = case["forecasts"] != "extreme"
    predictions = forecast(served, similar, errors[case["name"], case["tau"]], error_rng, calibrated=calibrated)
    if case["forecasts"] == "blind":
        predictions = blinded(predictions, served)
    trace = workload.Trace(arrivals_s, served, np.zeros(requests))
    recorder = Recorder(requests)
    work = Workload(trace, predictions, (), (), 1.0 / gap_s)
    run(Scenario(slots=case["slots"]), scheduling(BOOST), work, recorder=recorder)
    waits_s = np.array(recorder.ended_s) - STEP_S * served - arrivals_s
    first = quantities(first_come_waits(arrivals_s, STEP_S * served, case["slots"]), STEP_S * served)
    boost = quantities(waits_s, STEP_S * served)
    return Row(case, {name: round(number / max(first[name], STEP_S), 4) for name, number in boost.items()})


def quantities(waits_s: Times, service_s: Times) -> dict[str, float]:
    latency_s = waits_s + service_s
    numbers = (latency_s.mean(), np.quantile(latency_s, 0.99), np.quantile(latency_s, 0.999), waits_s.max())
    return dict(zip(QUANTITIES, map(float, numbers), strict=True))


def first_come_waits(arrivals_s: Times, service_s: Times, slots: int) -> Times:
    """Waits of requests that start in order of arrival, each in the slot that is free first."""
    free_s, waits_s = [0.0] * slots, []
    for arrived_s, seconds in zip(arrivals_s.tolist(), service_s.tolist(), strict=True):
        start_s = max(arrived_s, free_s[0])
        heapq.heapreplace(free_s, start_s + seconds)
        waits_s.append(start_s - arrived_s)
    return np.array(waits_s)


def blinded(predictions: Predictions, served: Lengths) -> Predictions:
    """The longest part of the answers is forecast as requests of the shortest forecasts are."""
    assert predictions.quantiles is not None, "these forecasts have quantiles"
    unseen = np.flatnonzero(served >= np.quantile(served, 1.0 - BLIND))
    quantiles = predictions.quantiles.copy()
    quantiles[unseen] = predictions.quantiles[np.argsort(predictions.medians)[: unseen.size]]
    return Predictions.of(quantiles)


# ---- tables -----------------------------------------------------------------------------------------------------

Cell = tuple[Any, ...]
"""(lengths, arrivals, slots, tau, forecasts)"""
Cells = Mapping[Cell, Mapping[str, float]]
GROUPS: dict[str, Callable[[Cell], object]] = {
    "": lambda cell: "all cells",
    "arrivals": lambda cell: cell[1],
    "lengths": lambda cell: cell[0],
    "slots": lambda cell: cell[2],
    "forecasts": lambda cell: f"{cell[4]}, tau {cell[3]:g}",
}


def cells(rows: Sequence[Row]) -> dict[Cell, dict[str, float]]:
    """The mean of each quantity over the seeds."""
    groups = group(rows, *CASE[:-1]).items()
    return {cell: {name: fmean(values(some, name)) for name in QUANTITIES} for cell, some in groups}


def tables(found: Cells, before: Cells) -> list[str]:
    """before : of another commit; only cells that both have are compared"""
    both = {cell: numbers["mean"] / before[cell]["mean"] for cell, numbers in found.items() if cell in before}
    texts = [grouped(found, both, title, key) for title, key in GROUPS.items()]
    if both:
        there = {cell: before[cell] for cell in both}
        texts.append(grouped(there, {}, "before", GROUPS[""]))
        texts.append(compared(there, both))
    head = ["lengths", "arrivals", "slots", "forecasts", "mean over before's", *QUANTITIES]
    lines = [
        [cell[0], cell[1], str(cell[2]), GROUPS["forecasts"](cell), ratio_of(both, [cell])]
        + [f"{numbers[name]:.2f}" for name in QUANTITIES]
        for cell, numbers in found.items()
    ]
    return [*texts, markdown(head, lines, title="cells")]


def grouped(found: Cells, both: Mapping[Cell, float], title: str, key: Callable[[Cell], object]) -> str:
    """A line for each group of cells: the mean and the highest of each quantity, and how many pass its bound."""
    groups: dict[object, list[Cell]] = {}
    for cell in found:
        groups.setdefault(key(cell), []).append(cell)
    lines = []
    for name, some in groups.items():
        line = [str(name), str(len(some)), ratio_of(both, some)]
        for quantity in QUANTITIES:
            numbers = [found[cell][quantity] for cell in some]
            line.append(f"{fmean(numbers):.2f}, {max(numbers):.2f}")
            if (most := MOST.get(quantity)) is not None:
                line.append(str(sum(number > most + 5e-4 for number in numbers)))
        lines.append(line)
    head = [title, "cells", "mean over before's"]
    for quantity in QUANTITIES:
        head += [quantity] + ([f"above {MOST[quantity]:.2f}"] if quantity in MOST else [])
    return markdown(head, lines, title=title)


def ratio_of(both: Mapping[Cell, float], some: Iterable[Cell]) -> str:
    """The mean over another commit's: its mean over these cells, and the highest."""
    ratios = [both[cell] for cell in some if cell in both]
    if not ratios:
        return ""
    return f"{fmean(ratios):.2f}" + (f", {max(ratios):.2f}" if len(ratios) > 1 else "")


def compared(before: Cells, both: Mapping[Cell, float]) -> str:
    """In how many Poisson cells the mean is above MEAN_MOST of another commit's, and where that one kept the bounds."""
    ratios = {cell: ratio for cell, ratio in both.items() if cell[1].startswith("Poisson")}
    over = [cell for cell, ratio in ratios.items() if ratio > MEAN_MOST]
    kept = [cell for cell in over if all(before[cell][name] <= most for name, most in MOST.items())]
    return (
        f"The mean is above {MEAN_MOST} of before's in {len(over)} of {len(ratios)} Poisson cells; before kept the "
        f"other bounds in {len(kept)} of these."
    )


if __name__ == "__main__":
    main()
