#!/usr/bin/env python
"""How good a trained length predictor is: tables on the terminal; with --output also JSON and figures.

scripts/evaluate_predictor.py runs/predictor --data answers.jsonl                  # on what its training held out
scripts/evaluate_predictor.py runs/predictor --data others.jsonl --part all        # on data it has seen nothing of
scripts/evaluate_predictor.py runs/predictor --data answers.jsonl --compare runs/older --output docs/predictor

For the held-out part, give the same files as in training: the split is by prompt, and it is made again.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from predictor.dataset import Splits, load_rows, split_rows
from predictor.errors import BadPredictor, DatasetError, PredictorError
from predictor.options import Split, add_data_options, columns, counter, positive, share, unusable

METRICS_FILE = "metrics.json"


def main() -> int:
    args = parse_args()
    try:
        result, text = evaluate(args)
        if args.output:
            (args.output / METRICS_FILE).write_text(json.dumps(result, indent=1) + "\n")
    except (PredictorError, OSError) as error:
        print(f"evaluate_predictor: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("predictor", type=Path, help="a predictor's folder")
    add_data_options(parser)
    add("--part", choices=["held-out", "all"], default="held-out", help="all: of data that it was not trained on")
    for name, kind in (("seed", int), ("held-out-share", share), ("validation-share", share)):
        add(f"--{name}", type=kind, help="of the split (the one that the predictor was trained with)")
    add("--model", metavar="NAME", help="only answers of this model")
    add("--limit", type=positive, metavar="N", help="evaluate at most so many answers, drawn with the split's seed")
    add("--compare", type=Path, metavar="FOLDER", help="another predictor, on the same answers")
    add("--output", type=Path, metavar="FOLDER", help="for metrics.json, confusion.png, calibration.png, gains.png")
    add("--threads", type=positive, default=1, help="of the model (%(default)s)")
    return parser.parse_args()


def evaluate(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """What goes into metrics.json, and what is printed."""
    folders = [args.predictor, *([args.compare] if args.compare else [])]
    if args.output and args.output.resolve() in [folder.resolve() for folder in folders]:
        raise PredictorError(f"{args.output / METRICS_FILE} says how the predictor was trained: give another --output")
    split = chosen_split(args)
    predictors = [load_predictor(folder, args.threads) for folder in folders]
    found = load_rows(args.data, columns(args), counter(args.answer_tokenizer))
    splits = split_rows(found.rows, split.seed, split.validation_share, split.held_out_share)
    warnings = split_warnings(folders, split, splits) if args.part == "held-out" else []
    splits = splits if args.model is None else of_model(splits, args.model)

    from predictor.report import held_out_report, shareable, transfer_report  # a second: not for --help, nor bad data

    make = held_out_report if args.part == "held-out" else transfer_report
    report = make(predictors[0], splits, other=(*predictors, None)[1], answers_max=args.limit, seed=split.seed)
    report = dataclasses.replace(report, notes=(*report.notes, *warnings))
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        report.figures(args.output)
    result = {
        **report.as_json(),
        "split": dataclasses.asdict(split),
        "arguments": [shareable(argument) for argument in sys.argv[1:]],
        "bad": dict(found.bad),
    }
    names = [f"{name}: {folder.name}" for name, folder in zip(("predictor", "other"), folders, strict=False)]
    return result, "\n\n".join([", ".join(names), *unusable(found), report.tables()])


def load_predictor(folder: Path, threads: int) -> Any:
    from predictor.predict import LengthPredictor

    return LengthPredictor.load(folder, threads)


# --- the split --------------------------------------------------------------------------------------------------


def chosen_split(args: argparse.Namespace) -> Split:
    """What the options say, else what the predictor was trained with. Raises PredictorError when neither tells."""
    names = [field.name for field in dataclasses.fields(Split)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    trained = trained_split(args.predictor)
    if trained is None and "seed" not in given and args.part == "held-out":
        raise BadPredictor(f"{args.predictor / METRICS_FILE} does not say how the rows were split: give --seed")
    split = dataclasses.replace(trained or Split(), **given)
    if split.held_out_share + split.validation_share >= 1:
        raise DatasetError("the held-out and the validation share leave nothing to train on")
    return split


def trained_split(folder: Path) -> Split | None:
    said = trained_metrics(folder).get("split")
    if said is None:
        return None
    try:
        return Split(int(said["seed"]), float(said["held_out_share"]), float(said["validation_share"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadPredictor(f"{folder / METRICS_FILE} has no good split: {said!r}") from error


def trained_metrics(folder: Path) -> dict[str, Any]:
    """metrics.json; {} when there is none."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return {}
    try:
        metrics = json.loads(path.read_text())
    except ValueError as error:
        raise BadPredictor(f"cannot read {path}: {error}") from error
    if not isinstance(metrics, dict):
        raise BadPredictor(f"cannot read {path}: not a JSON object")
    return metrics


def split_warnings(folders: list[Path], split: Split, splits: Splits) -> list[str]:
    """Why held-out answers may not be new to a predictor."""
    sizes = {name: len(getattr(splits, name)) for name in ("train", "validation", "held_out")}
    warnings = []
    for folder in folders:
        rows = trained_metrics(folder).get("rows")
        other_data = isinstance(rows, dict) and any(rows.get(name, size) != size for name, size in sizes.items())
        if trained_split(folder) != split or other_data:
            reason = "other data" if other_data else "another split, or it does not say which"
            warnings.append(f"**{folder.name} was trained with {reason}: it may have seen some of these answers.**")
    return warnings


def of_model(splits: Splits, model: str) -> Splits:
    """The rows of one model. After the split, for its sides depend on all rows."""
    parts = {
        part.name: [row for row in getattr(splits, part.name) if row.prompt.model == model]
        for part in dataclasses.fields(Splits)
    }
    for name, rows in parts.items():
        if not rows:
            raise DatasetError(f"no {name.replace('_', '-')} row is of the model {model!r}")
    return Splits(**parts)


if __name__ == "__main__":
    sys.exit(main())
