"""What the bounds of boost cost: its mean latency if more requests went last, or if these waited longer.

    python scripts/lab orders.limits --output docs/results/orders-limits.json

Poisson arrivals at 0.97, 8 slots, calibrated forecasts of tau 0.65; lengths and forecasts are those of `lab
orders.arrivals`. Two constants of scheduling/load.py are varied: SPENT, the part of the requests that goes last, and
LONGEST, what these wait at most, over the longest wait of first come, first served. Prints a Markdown table: the mean,
the 99th percentile and the longest wait over those of first come, first served.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from statistics import fmean
from unittest import mock

from kit.arguments import add_seeds, parser_of, whole
from kit.rows import Case, Row, group, measured, read_rows, save_rows, values
from kit.tables import markdown

from llmserve.scheduling import load
from questions.bins.run import error_of
from questions.orders import arrivals
from questions.orders.run import Lengths

CELL = {"arrivals": "Poisson 0.97", "slots": 8, "tau": 0.65, "forecasts": "calibrated"}
LIMITS = ((0.0, load.LONGEST), *product((load.SPENT, 2 * load.SPENT), (load.LONGEST, 4.0, 10.0)), (0.04, load.LONGEST))
CASE = (*arrivals.CASE, "last", "wait")
QUANTITIES = ("mean", "p99", "longest")


def main() -> None:
    parser = parser_of(__doc__)
    add_seeds(parser, 2)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these lengths only")
    parser.add_argument("--requests", type=whole(1), default=10_000)
    args = parser.parse_args()
    rows = read_rows(args.results, CASE) if args.results else []
    if not rows:
        lengths = {name: some for name, some in arrivals.drawn().items() if name in (args.only or arrivals.drawn())}
        errors = {(name, CELL["tau"]): error_of(some, CELL["tau"]) for name, some in lengths.items()}
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        cases = [
            {"name": name, **CELL, "seed": seed, "last": last, "wait": wait}
            for name, (last, wait), seed in product(lengths, LIMITS, seeds)
        ]
        rows = measured(partial(serve, lengths, errors, args.requests), cases, args.jobs)
    print(table(rows))
    save_rows(args.output, rows)


def serve(lengths: Mapping[str, Lengths], errors: Mapping[tuple[str, float], float], requests: int, case: Case) -> Row:
    with mock.patch.multiple(load, SPENT=case["last"], LONGEST=case["wait"]):
        return Row(case, arrivals.serve(lengths, errors, arrivals.kinds(), requests, case).numbers)


def table(rows: list[Row]) -> str:
    lines = []
    for (name, last, wait), some in group(rows, "name", "last", "wait").items():
        lines.append([name, f"{last:.1%}", f"{wait:g}", *(f"{fmean(values(some, of)):.2f}" for of in QUANTITIES)])
    return markdown(["lengths", "last", "wait at most", *QUANTITIES], lines)


if __name__ == "__main__":
    main()
