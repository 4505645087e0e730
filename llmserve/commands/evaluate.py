"""Evaluate a trained length predictor, or what a server learns from answers: prints tables, or JSON with --json.

llmserve evaluate runs/predictor --data answers.jsonl                  # on the held-out part of its data
llmserve evaluate runs/predictor --data others.jsonl --part all        # on data without any training data
llmserve evaluate runs/predictor --data answers.jsonl --part validation --compare runs/other  # to choose
llmserve evaluate runs/predictor --data answers.jsonl --compare runs/older --output runs/figures
llmserve evaluate --online --data answers.jsonl                        # a server without a trained predictor
llmserve evaluate --online --data answers.jsonl --shuffle 0 --predictor runs/predictor --json

For the held-out and the validation part, give the same files as in training: the split, by prompt, is repeated.
With --online each row is a request to a server: its answer's length is forecast, then learnt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from llmserve.commands.tables import print_report
from llmserve.errors import ConfigError
from llmserve.runtime.extras import need, need_predictor
from llmserve.simulation.prompt_rows import need_readers, predictions_by, with_bar
from predictor.dataset import Row, Splits, load_rows, split_rows
from predictor.errors import BadPredictor, PredictorError
from predictor.online import OnlineLearner
from predictor.options import (
    METRICS_FILE,
    Split,
    add_data_options,
    columns,
    counter,
    natural,
    of_models,
    positive,
    share,
    split_of_models,
    unusable,
)
from predictor.prequential import ANSWERS_MAX, forecast_stream, scores_by_range
from predictor.text import Grid, markdown
from predictor.trained import other_training, trained_split

if TYPE_CHECKING:
    from predictor.report import Report

MODULES = ("datasets", "datasketch", "matplotlib", "onnxruntime", "pyarrow", "scipy", "sklearn", "tokenizers")
"""Modules of the extra; a trained predictor runs without torch."""


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status. Raises ConfigError on flags that contradict, and without the extra."""
    check_flags(args)
    args.part = args.part or ("all" if args.online else "held-out")
    args.predictor = args.predictor or args.predictor_flag
    if args.online and args.part == "all":
        need_readers(*args.data)
        if args.predictor is not None:
            need_predictor("a trained predictor")
    else:
        need("train", *MODULES, why="evaluating a predictor")
    try:
        result, parts = evaluate_online(args) if args.online else evaluate(args)
        if args.output:
            (args.output / METRICS_FILE).write_text(json.dumps(result, indent=1) + "\n")
    except (PredictorError, OSError) as error:
        print(f"{args.program}: {error}", file=sys.stderr)
        return 1
    if args.json or args.markdown:
        print(json.dumps(result) if args.json else markdown(parts))
    else:
        print_report(parts, Console())
    return 0


def check_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError on flags that contradict each other."""
    if args.predictor is not None and args.predictor_flag is not None:
        raise ConfigError("evaluate: the predictor's folder is given twice")
    if args.online:
        for name in ("compare", "output"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name} cannot be given with --online; --json prints all figures")
        if args.part in (None, "all"):
            given = [name for name in ("seed", "held_out_share", "validation_share") if getattr(args, name) is not None]
            if given:
                flag = f"--{given[0].replace('_', '-')}"
                raise ConfigError(
                    f"{flag} is of a split: with --online give --part too; --shuffle SEED orders the rows"
                )
        elif args.predictor is None and args.predictor_flag is None:
            raise ConfigError(f"--part {args.part} with --online needs a predictor, whose training was split")
    elif args.shuffle is not None:
        raise ConfigError("--shuffle orders the requests of --online: give --online too")
    elif args.predictor is None and args.predictor_flag is None:
        raise ConfigError("evaluate: give a predictor's folder, or --online for a server without one")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("predictor", type=Path, nargs="?", help="a predictor's folder; with --online optional")
    add("--predictor", type=Path, dest="predictor_flag", metavar="FOLDER", help="the same, as a flag")
    add_data_options(parser)
    add(
        "--online",
        action="store_true",
        help=f"forecast each row, then learn it, as a server does; scores by the number of answers seen, at most "
        f"{ANSWERS_MAX:,}",
    )
    add("--shuffle", type=natural, metavar="SEED", help="with --online: rows in a random order (default: as they are)")
    add(
        "--part",
        choices=["held-out", "validation", "all"],
        help="validation: to choose between predictors; all: all rows, for data without training data (default: "
        "held-out; with --online all)",
    )
    for name, kind in (("seed", natural), ("held-out-share", share), ("validation-share", share)):
        add(f"--{name}", type=kind, help="of the split (default: the split of the predictor's training)")
    add("--model", action="append", metavar="NAME", help="use only answers of this model; repeatable")
    add(
        "--limit",
        type=positive,
        metavar="N",
        help="evaluate at most N answers, drawn with the split's seed; with --online the first N",
    )
    add("--compare", type=Path, metavar="FOLDER", help="another predictor, evaluated on the same answers")
    add("--output", type=Path, metavar="FOLDER", help="for metrics.json, confusion.png, calibration.png, gains.png")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of tables")
    form.add_argument("--markdown", action="store_true", help="print tables for a page, with all their columns")
    add("--threads", type=positive, default=1, help="threads of the model (%(default)s)")


def evaluate(args: argparse.Namespace) -> tuple[dict[str, Any], list[str | Grid]]:
    """Return the content of metrics.json, and the printed texts and tables."""
    folders = [args.predictor, *([args.compare] if args.compare else [])]
    if args.output and args.output.resolve() in [folder.resolve() for folder in folders]:
        raise PredictorError(f"{args.output / METRICS_FILE} describes the predictor's training: give another --output")
    split = chosen_split(args)
    predictors = [load_predictor(folder, args.threads) for folder in folders]
    data = load_rows(args.data, columns(args), counter(args.answer_tokenizer))

    from predictor.report import shareable  # the import takes a second: avoid it for --help and bad data

    options = {"other": (*predictors, None)[1], "answers_max": args.limit, "seed": split.seed}
    if args.part == "all":
        report = report_on_all(predictors[0], data.rows, args.model, options)
    else:
        report = report_on_part(args, predictors[0], data.rows, split, options)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        report.figures(args.output)
    result = {
        **report.as_json(),
        "seed": split.seed,
        "split": None if args.part == "all" else dataclasses.asdict(split),
        "arguments": [shareable(argument) for argument in args.words],
        "bad": dict(data.bad),
    }
    names = [f"{name}: {folder.name}" for name, folder in zip(("predictor", "other"), folders, strict=False)]
    return result, [", ".join(names), *unusable(data), *report.parts()]


def evaluate_online(args: argparse.Namespace) -> tuple[dict[str, Any], list[str | Grid]]:
    """Return the scores of a server's learner by the number of answers seen, and the printed texts and table."""
    predictor = None if args.predictor is None else load_predictor(args.predictor, args.threads)
    split = None if args.part == "all" else chosen_split(args)
    data = load_rows(args.data, columns(args), counter(args.answer_tokenizer))
    rows = data.rows
    if split is not None:
        splits = split_rows(rows, split.seed, split.validation_share, split.held_out_share)
        rows = splits.held_out if args.part == "held-out" else splits.validation
    rows = of_models(rows, args.model)
    if args.shuffle is not None:
        rows = [rows[place] for place in np.random.default_rng(args.shuffle).permutation(len(rows))]
    rows = rows[: min(args.limit or ANSWERS_MAX, ANSWERS_MAX)]
    predictions = None if predictor is None else predictions_by(predictor, [row.prompt for row in rows])
    forecasts = forecast_stream(OnlineLearner(), with_bar(rows, "learning"), predictions)
    result = {
        "ranges": scores_by_range(forecasts, rows),
        "answers": len(rows),
        "capped": sum(row.capped for row in rows),
        "without_forecast": int(np.isnan(forecasts[:, 0]).sum()),
        "models": len({row.prompt.model for row in rows}),
        "predictor": None if args.predictor is None else args.predictor.name,
        "part": args.part,
        "shuffle": args.shuffle,
        "bad": dict(data.bad),
    }
    return result, [*unusable(data), *online_parts(result)]


def online_parts(result: dict[str, Any]) -> list[str | Grid]:
    """Return the scores as a table, and what to know of them."""
    head = ["answers seen", "Kendall's tau", "MAE, tokens", "within the 80 % interval"]
    lines = [
        [
            f"{scores['from']:,} to {scores['to']:,}",
            "–" if scores["tau"] is None else f"{scores['tau']:.3f}",
            "–" if scores["mae_tokens"] is None else f"{scores['mae_tokens']:.1f}",
            "–" if scores["coverage80"] is None else f"{scores['coverage80']:.1%}",
        ]
        for scores in result["ranges"]
    ]
    learner = "Without a trained predictor" if result["predictor"] is None else f"With {result['predictor']}"
    notes = [f"{learner}: {result['answers']:,} answers of {result['models']:,} models, {result['capped']:,} capped."]
    if result["without_forecast"]:
        notes.append(f"{result['without_forecast']:,} answers had no forecast, and no part in the scores.")
    if result["predictor"] is not None and result["part"] == "all":
        notes.append("The predictor may have been trained on some of these rows; --part held-out leaves them out.")
    return [[head, *lines], *notes]


def report_on_all(predictor: Any, rows: list[Row], models: list[str] | None, options: dict[str, Any]) -> Report:
    """Evaluate on all rows, which may be too few for a split. options : of the report."""
    from predictor.report import transfer_report

    return transfer_report(predictor, of_models(rows, models), **options)


def report_on_part(
    args: argparse.Namespace, predictor: Any, rows: list[Row], split: Split, options: dict[str, Any]
) -> Report:
    from predictor.report import held_out_report, validation_report

    splits = split_rows(rows, split.seed, split.validation_share, split.held_out_share)
    warnings = split_warnings([folder for folder in (args.predictor, args.compare) if folder], split, splits)
    splits = split_of_models(splits, args.model)
    make = held_out_report if args.part == "held-out" else validation_report
    report = make(predictor, splits, **options)
    return dataclasses.replace(report, notes=(*report.notes, *warnings))


def load_predictor(folder: Path, threads: int) -> Any:
    from predictor.predict import LengthPredictor

    return LengthPredictor.load(folder, threads)


# --- the split --------------------------------------------------------------------------------------------------


def chosen_split(args: argparse.Namespace) -> Split:
    """Return the split of the options, with the training's split as default. Raises PredictorError without both."""
    names = [field.name for field in dataclasses.fields(Split)]
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    trained = trained_split(args.predictor)
    if trained is None and "seed" not in changes and args.part != "all":
        raise BadPredictor(f"{args.predictor / METRICS_FILE} does not say how the rows were split: give --seed")
    split = dataclasses.replace(trained or Split(), **changes)
    if args.part != "all":
        split.check()
    return split


def split_warnings(folders: Sequence[Path], split: Split, splits: Splits) -> list[str]:
    """Return warnings that a predictor may have been trained on some of the answers."""
    return [
        f"**{folder.name} was trained with {reason}: it may have seen some of these answers.**"
        for folder in folders
        if (reason := other_training(folder, split, splits))
    ]
