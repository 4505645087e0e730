"""Train a length predictor on prompts with the lengths of their answers, and write a folder for `llmserve serve`.

llmserve train --data answers.jsonl --output runs/predictor                       # fine-tunes BERT
llmserve train --data answers.jsonl --output runs/predictor --from-scratch tiny   # no download
llmserve train --data answers.jsonl --output runs/both --average runs/small --average runs/large

Data: flat rows (prompt, output_tokens and optionally model, system, ...), the server's record (llmserve serve
--record), or conversations in the format of LMSYS-Chat-1M, ShareGPT or OpenAI's messages. --answer-tokenizer counts the
tokens of answers in conversations.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from llmserve.commands.tables import print_report
from llmserve.errors import ConfigError
from llmserve.runtime.extras import need
from predictor.dataset import Rows, Splits, load_rows, split_rows
from predictor.errors import PredictorError
from predictor.options import (
    METRICS_FILE,
    Split,
    add_data_options,
    columns,
    counter,
    natural,
    positive,
    share,
    split_of_models,
    unusable,
)
from predictor.text import Grid
from predictor.trained import check_training

OPTIONS = (
    *("base_model", "from_scratch", "loss", "quantiles", "epochs", "batch_size", "learning_rate", "dropout"),
    *("precision", "seed", "soup", "max_length_tokens", "pooling", "patience_epochs"),
)  # fields of TrainingOptions
MODULES = (
    *("torch", "transformers", "safetensors", "accelerate", "onnx"),
    *("datasets", "datasketch", "matplotlib", "pyarrow", "scipy", "sklearn"),
)  # modules of the extra


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status. Raises ConfigError on flags that contradict, and without the extra."""
    check_flags(args)
    need("train", *MODULES, why="training")
    split = Split(args.seed, args.held_out_share, args.validation_share)
    try:
        split.check()
        data = load_rows(args.data, columns(args), counter(args.answer_tokenizer))
        splits = split_rows(data.rows, split.seed, split.validation_share, split.held_out_share)
        for folder in args.average or ():
            check_training(folder, split, splits)
        splits = split_of_models(splits, args.model)
        print(describe(data, splits), file=sys.stderr, flush=True)
        result = train_and_evaluate(args, data, splits, split)
    except (PredictorError, OSError) as error:
        print(f"{args.program}: {error}", file=sys.stderr)
        return 1
    if result is None:
        return 0
    report, parts = result
    (args.output / METRICS_FILE).write_text(json.dumps(report, indent=1) + "\n")
    print_report([*parts, f"To use it: llmserve serve --predictor {args.output} --engine URL"], Console())
    return 0


def check_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for a mean of one predictor, and for options of a training where nothing is trained."""
    if args.average is None:
        return
    if len(args.average) < 2:
        raise ConfigError("--average needs at least two predictors: repeat it")
    training = [name for name in OPTIONS if name != "seed" and getattr(args, name) is not None]
    if args.resume or training:
        flag = f"--{(training or ['resume'])[0].replace('_', '-')}"
        raise ConfigError(f"{flag} is of a training: --average trains nothing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_data_options(parser)
    add("--model", action="append", metavar="NAME", help="use only answers of this model; repeatable")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--base-model", metavar="ID_OR_FOLDER", help="encoder to fine-tune (default: bert-base-uncased)")
    start.add_argument("--from-scratch", metavar="SIZE", choices=["tiny"], help="a new small BERT: tiny")
    start.add_argument(
        "--average",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="a trained predictor; repeatable: no training, but the mean of their forecasts",
    )
    add("--output", type=Path, required=True, metavar="FOLDER", help="for the predictor, its metrics.json and figures")
    add("--resume", action="store_true", help="resume from the last checkpoint in the output folder")
    add("--loss", choices=["quantile", "l1"], help="several quantiles at once (the default), or Multi-Bin's L1")
    add("--quantiles", type=odd, metavar="N", help="number of quantiles of the quantile loss, odd (default: 15)")
    add("--epochs", type=positive, help="most epochs; the defaults of this and the next three depend on the start")
    add("--batch-size", type=positive, help="rows of a step")
    add("--learning-rate", type=above_zero, help="the largest of the training")
    add("--dropout", type=from_zero_to_one, help="dropout of the encoder")
    add(
        "--precision",
        choices=["fp32", "bf16", "fp16"],
        help="precision of the matrix products in training (default: fp32)",
    )
    add("--seed", type=natural, default=0, help="seed of the split and of the training")
    add(
        "--soup",
        type=positive,
        metavar="N",
        help="number of trainings whose weights are averaged (default: 1): better, but N times as long",
    )
    add("--held-out-share", type=share, default=Split().held_out_share, help="share of the prompts")
    add("--validation-share", type=share, default=Split().validation_share, help="share of the prompts")
    add("--max-length-tokens", type=positive, help="limit of a prompt; longer prompts keep their head and tail")
    add("--pooling", choices=["mean", "cls"], help="how tokens become one vector (default: mean)")
    add("--patience-epochs", type=positive, help="stop after this many epochs without a lower validation loss")
    add("--threads", type=positive, help="threads of torch (default: all cores); 1 is fastest on a busy machine")


def above_zero(text: str) -> float:
    if not 0 < (value := number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"not a number above 0: {text!r}")
    return value


def from_zero_to_one(text: str) -> float:
    if not 0 <= (value := number(text)) < 1:
        raise argparse.ArgumentTypeError(f"not in [0, 1): {text!r}")
    return value


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def odd(text: str) -> int:
    if positive(text) % 2 == 0:
        raise argparse.ArgumentTypeError(f"not odd, so without a median: {text}")
    return int(text)


def train_and_evaluate(
    args: argparse.Namespace, data: Rows, splits: Splits, split: Split
) -> tuple[dict[str, Any], list[str | Grid]] | None:
    """Train or average into args.output. Returns the options and the evaluation, as JSON and as texts and tables.

    Returns None in all processes of a distributed training but the first.
    """
    import torch  # the import takes seconds: avoid it for --help and bad data

    from predictor.average import average
    from predictor.report import held_out_report, shareable
    from predictor.train import FINE_TUNING, FROM_SCRATCH, Trained, train

    if args.threads:
        torch.set_num_threads(args.threads)
    started_s = time.monotonic()
    options: dict[str, Any]
    trained: Trained | None
    if args.average:
        options = {"average": [folder.name for folder in args.average]}
        trained = average(args.average, splits, args.output)
    else:
        changes = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
        chosen = dataclasses.replace(FROM_SCRATCH if args.from_scratch else FINE_TUNING, **changes)
        options = dataclasses.asdict(chosen)
        trained = train(splits, chosen, args.output, resume=args.resume)
    if trained is None:
        return None
    training_s = round(time.monotonic() - started_s)
    report = held_out_report(trained.predictor, splits)
    report.figures(args.output)
    return {
        **report.as_json(),
        "split": dataclasses.asdict(split),
        "models": args.model,
        "export": trained.export,
        "training_s": training_s,
        "parameters": trained.parameters,
        "options": {name: shareable(value) for name, value in options.items()},
        "arguments": [shareable(argument) for argument in args.words],
        "rows": {"train": len(splits.train), "validation": len(splits.validation), "held_out": len(splits.held_out)},
        "bad": dict(data.bad),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "onnxruntime", "numpy")},
    }, report.parts()


def describe(data: Rows, splits: Splits) -> str:
    parts = f"{len(splits.train)} to train, {len(splits.validation)} to validate, {len(splits.held_out)} held out"
    return "\n".join([f"{len(data.rows)} rows: {parts}", *unusable(data)])
