"""Where windows lose: to one bin, to eight bins, or to windows that take whole batches in turn; on files of answer
lengths and on skewed lengths.

    python scripts/lab bins.windows --lengths chat=trace.csv.gz:output_tokens --laws 6 --jobs 2 \\
        --output docs/results/windows.json

The script simulates one engine that runs batches to their end, with the real scheduler, as run.py does: one
half of the lengths gives the first edges, the other half is served. Lengths are known ("oracle"), or predicted roughly
(quantiles:0.7). Arrivals are Poisson; load 1 is the capacity of one bin. A law of lengths is drawn by its number: two
or three kinds of answers, of which the longest are rare and up to 300 times as long as the shortest, or a lognormal
with sigma 1 to 2. The first laws (--first-law) serve to try rules, others to judge them.

Each case compares windows with the best of the others: the one of the least mean over the seeds. Prints Markdown
tables: how often, and by how much, the mean and the 99th percentile of the latency exceed the best, and the worst
cases, each with the 95 % interval of its mean ratio over the seeds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import numpy as np
from kit.arguments import numbers, parser_of, whole
from kit.rows import Case, Row, group, measured, save_rows, values
from kit.tables import markdown

from bins import cutting
from llmserve.errors import ConfigError
from llmserve.simulation.workload import draw_lengths
from questions.bins.run import CASE, Lengths, load, serve
from questions.orders.run import interval, read

WINDOW, WHOLE = "window of 32 batches", "window, whole batches in turn"
OTHERS = ("1 bin", "8 bins, mass", WHOLE)
PREDICTIONS = ("oracle", "quantiles:0.7")
LOADS = (0.3, 0.5, 0.7, 0.9, 1.2)
MOST = 1.05  # ratio to the best above which a case counts as lost
POOL = 40_000  # lengths of a law, from which requests are drawn
WORST = 12  # cases in a table
TITLES = {"latency_s_mean": "Mean latency", "latency_s_p99": "99th percentile"}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--lengths", action="append", default=[], metavar="NAME=FILE:COLUMN", help="CSV or JSON lines; repeatable"
    )
    parser.add_argument("--laws", type=whole(0), default=0, help="number of drawn laws of lengths")
    parser.add_argument("--first-law", type=whole(0), default=0)
    parser.add_argument("--results", type=Path, metavar="FILE", help="show an earlier --output and run nothing")
    parser.add_argument("--batch-sizes", type=numbers, default=(8, 32, 128), metavar="B,B,...")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--policies", nargs="+", default=[*OTHERS, WINDOW], choices=[*OTHERS, WINDOW])
    parser.add_argument("--batches", type=whole(1), default=200, help="full batches that a run serves")
    parser.add_argument("--seeds", type=whole(2), default=3)
    parser.add_argument("--first-seed", type=whole(0), default=0)
    parser.add_argument("--jobs", type=whole(1), default=1)
    parser.add_argument("--output", type=Path, help="JSON of every run")
    args = parser.parse_args()
    if not (args.lengths or args.laws or args.results):
        parser.error("--lengths, --laws or --results is needed")
    try:
        rows = load(args.results) if args.results else measure(args)
    except ConfigError as error:
        parser.error(str(error))
    save_rows(args.output, rows)
    print("\n\n".join(tables(rows)))


def measure(args: argparse.Namespace) -> list[Row]:
    lengths = {name: read(place) for name, _, place in (text.partition("=") for text in args.lengths)}
    for number in range(args.first_law, args.first_law + args.laws):
        law = law_of(number)
        lengths[law] = draw_lengths(law, POOL, np.random.default_rng(number))
    cases = list(cases_of(args, list(lengths)))
    return measured(partial(served, lengths, args.batches), cases, args.jobs)


def served(lengths: Mapping[str, Lengths], batches: int, case: Case) -> Row:
    if case["policy"] != WHOLE:
        return serve(lengths, case, batches)
    with patch.object(cutting, "ANSWERS_LEAST", math.inf):  # so that windows never learn what forecasts mean
        return Row(case, serve(lengths, {**case, "policy": WINDOW}, batches).numbers)


def law_of(number: int) -> str:
    """A skewed law of lengths, in the words of `llmserve simulate --lengths`."""
    rng = np.random.default_rng(number)
    kinds = int(rng.integers(1, 4))
    if kinds == 1:
        return f"lognormal:4.5,{rng.uniform(1.0, 2.0):.2f},20000"
    times = np.exp(rng.uniform(np.log(5.0), np.log(300.0), kinds - 1))
    shares = 100.0 * np.exp(rng.uniform(np.log(0.003), np.log(0.2), kinds - 1))
    parts = [f"{100.0 - shares.sum():.2f}*uniform:5,15"]
    parts += [
        f"{share:.2f}*uniform:{7.5 * longer:.0f},{12.5 * longer:.0f}"
        for share, longer in zip(shares, times, strict=True)
    ]
    return "+".join(parts)


def cases_of(args: argparse.Namespace, names: Sequence[str]) -> Iterator[Case]:
    for name in names:
        for size in args.batch_sizes:
            for predictions in PREDICTIONS:
                for policy in args.policies:
                    for load_of_bin in args.loads:
                        for seed in range(args.first_seed, args.first_seed + args.seeds):
                            yield dict(zip(CASE, (name, size, predictions, policy, load_of_bin, seed), strict=True))


# ---- tables -----------------------------------------------------------------------------------------------------


def compare(rows: Sequence[Row], quantity: str) -> tuple[str, list[float]]:
    """The best of the other policies, and the window's quantity over its, of every seed. rows : of one case"""
    by_policy = {
        policy: {row["seed"]: row[quantity] for row in same} for (policy,), same in group(rows, "policy").items()
    }
    window = by_policy.pop(WINDOW)
    best = min(by_policy, key=lambda policy: fmean(by_policy[policy].values()))
    return best, [window[seed] / other for seed, other in by_policy[best].items()]


def tables(rows: Sequence[Row]) -> list[str]:
    by_case = group(rows, "name", "batch_size", "predictions", "load")
    comparable = {case: same for case, same in by_case.items() if {WINDOW} < set(values(same, "policy"))}
    texts = []
    for quantity, title in TITLES.items() if comparable else ():
        compared = {case: compare(same, quantity) for case, same in comparable.items()}
        lines = []
        for (predictions, load_of_bin), _ in group(rows, "predictions", "load").items():
            ratios = [fmean(own) for case, (_, own) in compared.items() if case[2:] == (predictions, load_of_bin)]
            lost = sum(ratio > MOST for ratio in ratios)
            mean = f"{np.exp(np.mean(np.log(ratios))):.2f}"
            lines.append([predictions, f"{load_of_bin:g}", str(len(ratios)), str(lost), mean, f"{max(ratios):.2f}"])
        head = ["predictions", "load", "cases", f"above {MOST:g}", "geometric mean", "worst"]
        texts.append(markdown(head, lines, title=f"{title} over the best of the others"))
        worst = sorted(compared.items(), key=lambda entry: -fmean(entry[1][1]))[:WORST]
        cases = [
            [name, str(size), predictions, f"{load_of_bin:g}", best, interval(ratios)]
            for (name, size, predictions, load_of_bin), (best, ratios) in worst
        ]
        head = ["lengths", "batch", "predictions", "load", "best of the others", "ratio"]
        texts.append(markdown(head, cases, title=f"{title}: the worst cases"))
    return texts
