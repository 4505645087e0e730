#!/usr/bin/env python
"""Train a length predictor: prompts with the lengths of their answers in, a folder that the server can load out.

scripts/train_predictor.py --data answers.jsonl --output runs/predictor                       # fine-tunes BERT
scripts/train_predictor.py --data answers.jsonl --output runs/predictor --from-scratch tiny   # no download
"""

import argparse
import dataclasses
import json
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from predictor.dataset import Columns, Rows, Splits, load_rows, split_rows
from predictor.errors import PredictorError

METRICS_FILE = "metrics.json"
OPTIONS = (
    *("base_model", "from_scratch", "epochs", "batch_size", "learning_rate", "seed"),
    *("max_length_tokens", "pooling", "patience_epochs"),
)  # of TrainingOptions, by the same names


def main() -> int:
    args = parse_args()
    columns = Columns(args.prompt_column, args.length_column, args.model_column, args.finish_reason_column)
    try:
        found = load_rows(args.data, columns)
        splits = split_rows(found.rows, args.seed)
        print(describe(found, splits), file=sys.stderr, flush=True)
        report = train_and_evaluate(args, found, splits)
    except PredictorError as error:
        print(f"train_predictor: {error}", file=sys.stderr)
        return 1
    (args.output / METRICS_FILE).write_text(json.dumps(report, indent=2) + "\n")
    print(table(report["held_out"]))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    columns = Columns()
    add = parser.add_argument
    add("--data", action="append", required=True, help=".jsonl, .jsonl.gz, .parquet or hub:NAME[:SPLIT]; repeatable")
    add("--prompt-column", default=columns.prompt)
    add("--length-column", default=columns.output_tokens, help="output tokens of the answer (%(default)s)")
    add("--model-column", default=columns.model)
    add("--finish-reason-column", default=columns.finish_reason)
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--base-model", metavar="ID_OR_FOLDER", help="encoder to fine-tune (bert-base-uncased)")
    start.add_argument("--from-scratch", metavar="SIZE", choices=["tiny"], help="a new small BERT: tiny")
    add("--output", type=Path, required=True, help="folder for the predictor and its metrics.json")
    add("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    add("--epochs", type=int, help="at most; this and the next two have defaults for either kind of training")
    add("--batch-size", type=int)
    add("--learning-rate", type=float)
    add("--seed", type=int, default=0, help="of the split and of the training (%(default)s)")
    add("--max-length-tokens", type=int, help="longer prompts keep their head and tail")
    add("--pooling", choices=["mean", "cls"])
    add("--patience-epochs", type=int, help="stop when the validation error has not fallen for so many epochs")
    add("--threads", type=int, help="of torch (its own choice: all cores); 1 is fastest on a machine that is busy")
    return parser.parse_args()


def train_and_evaluate(args: argparse.Namespace, found: Rows, splits: Splits) -> dict[str, Any]:
    """Train into args.output; the report of how it was done and how good it is."""
    import torch  # seconds of imports: not for --help, nor for bad data

    from predictor.evaluate import baselines, evaluate
    from predictor.train import FINE_TUNING, FROM_SCRATCH, train

    if args.threads:
        torch.set_num_threads(args.threads)
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    options = dataclasses.replace(FROM_SCRATCH if args.from_scratch else FINE_TUNING, **given)
    started_s = time.monotonic()
    predictor = train(splits, options, args.output, resume=args.resume)
    training_s = round(time.monotonic() - started_s)
    answers = [row.output_tokens for row in splits.held_out]
    predictions: dict[str, list[float]] = {
        "predictor": predictor.predict([row.prompt for row in splits.held_out]),
        **baselines(splits.train, splits.held_out),
    }
    return {
        "held_out": {
            name: evaluate(predicted, answers, predictor.training_lengths).as_json()
            for name, predicted in predictions.items()
        },
        "training_s": training_s,
        "parameters": predictor.model.num_parameters(),
        "options": {name: shareable(value) for name, value in dataclasses.asdict(options).items()},
        **provenance(found, splits),
    }


def provenance(found: Rows, splits: Splits) -> dict[str, Any]:
    """What the predictor was made from, and with."""
    return {
        "arguments": [shareable(argument) for argument in sys.argv[1:]],
        "rows": {
            "train": len(splits.train),
            "validation": len(splits.validation),
            "held_out": len(splits.held_out),
            "capped": sum(row.capped for row in found.rows),
            "bad": dict(found.bad),
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
    }


def describe(found: Rows, splits: Splits) -> str:
    sides = f"{len(splits.train)} to train, {len(splits.validation)} to validate, {len(splits.held_out)} held out"
    bad = "".join(f"\n  {count} unusable: {reason}" for reason, count in found.bad.most_common())
    return f"{len(found.rows)} rows: {sides}{bad}"


def table(held_out: dict[str, dict[str, Any]]) -> str:
    """The held-out metrics as a Markdown table. Within one of two bins is everything, and so left out."""
    counts = list(held_out["predictor"]["bin_accuracy"])
    near = counts[1:]
    head = ["held-out", "MAE, tokens", "Kendall's tau", *[f"{k} bins" for k in counts], *[f"±1 of {k}" for k in near]]
    lines = [head, ["---"] * len(head)]
    for name, metrics in held_out.items():
        tau = metrics["kendall_tau"]
        shares = [metrics["bin_accuracy"][k] for k in counts] + [metrics["near_accuracy"][k] for k in near]
        numbers = [f"{metrics['mae_tokens']:.1f}", "-" if tau is None else f"{tau:.3f}"]
        lines.append([name, *numbers, *[f"{share:.1%}" for share in shares]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shareable(value: Any) -> Any:
    """The value, but absolute paths without their folder: where files lie on a machine is nobody else's business."""
    return re.sub(r"(^|[=:])/.*/", r"\1", value) if isinstance(value, str) else value


if __name__ == "__main__":
    sys.exit(main())
