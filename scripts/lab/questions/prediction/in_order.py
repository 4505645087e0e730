"""Forecasts of rows in the order in which they come, with many answers in flight, beside a plain regression's.

    D=/data; C=:response_tokens_llama3
    python scripts/lab prediction.in_order --set "two=$D/alpaca.jsonl.gz$C,$D/gpteacher.jsonl.gz$C" \\
        --set "many models=$D/alpaca_eval.jsonl.gz$C" --output docs/results/in-order.json

Each set is served in three orders: as its rows come; interleaved the other way (where rows come model by model, one row
of each model in turn, else all rows of a model in a row; a set of one model has no such order); and shuffled. Each
order is served with 1, 8, 64 and 256 answers in flight: a row is forecast before the answers of the last 0, 7, 63 or
255 rows are known.

The ridge is what anybody would try first: scikit-learn's, on the hashed words and pairs of words of the prompt and the
name of the model, fitted anew every 100 answers to the logarithm of all lengths that are known by then.

--results FILE prints an earlier --output, and measures nothing.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby, product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from kit.arguments import add_results, exit_on, numbers, parser_of, whole
from kit.progress import counted
from kit.results import day_and_machine, rounded, write_json
from kit.tables import markdown

from predictor.dataset import Row, load_rows
from predictor.errors import PredictorError
from predictor.online import OnlineLearner
from predictor.prequential import Forecasts, forecast_stream, scores, scores_by_range
from predictor.quantiles import LEVELS
from questions.prediction.learner import named, shuffled

ORDERS = "as they come", "interleaved", "shuffled"
LEARNER, RIDGE = "learner", "ridge"
REFIT_EVERY, FIRST_FIT = 100, 20
FROM = 300
"""Answers seen before the first that counts."""
CHARACTERS_MAX = 2_000

Job = tuple[str, tuple[str, ...], str, int, int]
"""Name and files of a set, order, answers in flight, rows at most."""


def main() -> None:
    args = parse_args()
    with exit_on(PredictorError, OSError, ValueError):
        result = json.loads(args.results.read_text()) if args.results else measure(args)
    print_tables(result)
    write_json(args.output, result)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--set", dest="sets", action="append", default=[], metavar="NAME=FILE[:COLUMN],...", help="rows; repeatable")
    add("--in-flight", type=numbers, default=(1, 8, 64, 256), metavar="N,N,...", help="answers in flight")
    add("--answers", type=whole(FROM + 1), default=8_000, metavar="N", help="at most so many of a set (%(default)s)")
    add("--jobs", type=whole(1), default=1)
    add("--results", type=Path, metavar="FILE", help="print an earlier --output")
    add_results(parser)
    args = parser.parse_args()
    if not args.sets and not args.results:
        parser.error("either --set or --results is needed")
    args.sets = named(parser, args.sets)
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    sets = [(name, tuple(files.split(","))) for name, files in args.sets.items()]
    jobs: list[Job] = [
        (*of, order, in_flight, args.answers)
        for of, order, in_flight in product(sets, ORDERS, args.in_flight)
        if order != "interleaved" or len({row.prompt.model for row in load_rows(of[1]).rows}) > 1
    ]
    cells = []
    with counted(len(jobs)) as done, ProcessPoolExecutor(args.jobs) as pool:
        for cell in pool.map(cell_of, jobs):
            cells.append(cell)
            done(f"{cell['set']}, {cell['order']}, {cell['in_flight']} in flight")
    return rounded({**day_and_machine(), "cells": cells})  # type: ignore[no-any-return]


def cell_of(job: Job) -> dict[str, Any]:
    name, files, order, in_flight, answers = job
    rows = in_order(load_rows(files).rows, order)[:answers]
    learner = forecast_stream(OnlineLearner(), rows, in_flight=in_flight)
    ridge = ridge_stream(rows, in_flight)
    return {
        **{"set": name, "order": order, "in_flight": in_flight, "rows": len(rows)},
        "prompts": len({row.prompt.text for row in rows}),
        "coverage80": scores(learner[FROM:], rows[FROM:])["coverage80"],
        **{way: tau_by_range(made, rows) for way, made in ((LEARNER, learner), (RIDGE, ridge))},
    }


def tau_by_range(forecasts: Forecasts, rows: Sequence[Row]) -> list[dict[str, Any]]:
    ranges = scores_by_range(forecasts, rows)
    return [{name: part[name] for name in ("from", "to", "tau")} for part in ranges if part["from"] >= FROM]


def in_order(rows: Sequence[Row], order: str) -> list[Row]:
    if order == "shuffled":
        return shuffled(rows, 0)
    if order == "as they come":
        return list(rows)
    of_model = {model: list(own) for model, own in groupby(sorted(rows, key=lambda row: row.prompt.model), key=_model)}
    runs = sum(1 for _ in groupby(rows, key=_model))
    if runs > len(of_model):  # models take turns already
        return [row for own in of_model.values() for row in own]
    return [row for turn in zip_longest(*of_model.values()) for row in turn if row is not None]


def _model(row: Row) -> str:
    return row.prompt.model


def ridge_stream(rows: Sequence[Row], in_flight: int) -> Forecasts:
    """(rows, LEVELS), all levels alike: see the module's docstring."""
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.linear_model import Ridge

    reader = HashingVectorizer(n_features=2**18, ngram_range=(1, 2), alternate_sign=False)
    names = ["".join(filter(str.isalnum, row.prompt.model)) for row in rows]
    features = reader.transform(
        [f"{name} {row.prompt.text[:CHARACTERS_MAX]}" for name, row in zip(names, rows, strict=True)]
    )
    logs, made = np.log([row.output_tokens for row in rows]), np.full(len(rows), np.nan)
    for start in range(0, len(rows), REFIT_EVERY):
        if (known := start - in_flight + 1) >= FIRST_FIT:
            ridge = Ridge(alpha=1.0, solver="sparse_cg", tol=1e-3).fit(features[:known], logs[:known])
            made[start : start + REFIT_EVERY] = ridge.predict(features[start : start + REFIT_EVERY])
    return np.exp(made)[:, None].repeat(LEVELS, axis=1)


# ---- showing -----------------------------------------------------------------------------------------------------


def print_tables(result: dict[str, Any]) -> None:
    cells = result["cells"]
    heads = [f"{part['from']:,}-{part['to']:,}" for part in max((cell[LEARNER] for cell in cells), key=len)]
    lines = []
    for cell in cells:
        taus = [f"{mine['tau']:.2f} / {own['tau']:.2f}" for mine, own in zip(cell[LEARNER], cell[RIDGE], strict=True)]
        facts = cell["set"], cell["order"], str(cell["in_flight"]), f"{cell['coverage80']:.1%}"
        lines.append([*facts, *taus, *["-"] * (len(heads) - len(taus))])
    print(markdown(["set", "rows", "in flight", "in the 80 % interval", *heads], lines))
    behind = [mine["tau"] - own["tau"] for cell in cells for mine, own in zip(cell[LEARNER], cell[RIDGE], strict=True)]
    covered = [cell["coverage80"] for cell in cells]
    print(f"\nOf {len(behind)} ranges, the learner's tau is at least the ridge's, less .01, in ", end="")
    print(f"{sum(difference >= -0.01 for difference in behind)}; the least difference is {min(behind):.3f}, ", end="")
    print(f"the median {np.median(behind):.3f}. The 80 % intervals hold {min(covered):.1%} to {max(covered):.1%}.")


if __name__ == "__main__":
    main()
