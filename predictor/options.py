"""Command-line options shared by the commands around a predictor: the data and their split."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from predictor.dataset import Columns, Row, Rows, Splits
from predictor.errors import DatasetError

METRICS_FILE = "metrics.json"
"""In a predictor's folder: its training and its accuracy. In the folder of an evaluation: the results."""
SEED_MAX = 2**32 - 1
"""Limit of NumPy's legacy generator, which transformers seeds too."""


@dataclass(frozen=True, slots=True)
class Split:
    """How rows are split; stored in metrics.json of a predictor's folder."""

    seed: int = 0
    held_out_share: float = 0.1
    validation_share: float = 0.1

    def check(self) -> None:
        """Raises DatasetError when no share is left for training. To be called before the data are read."""
        if self.held_out_share + self.validation_share >= 1:
            raise DatasetError("the held-out and the validation share leave nothing to train on")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    columns, add = Columns(), parser.add_argument
    add(
        "--data",
        action="append",
        required=True,
        metavar="FILE[:COLUMN]",
        help="JSON lines, a JSON array, CSV or Parquet, plain or compressed, or hub:NAME[:SPLIT]; repeatable. COLUMN: "
        "the output tokens of this file",
    )
    for option, name in COLUMN_OPTIONS.items():
        what = f"column of the {name.replace('_', ' ')}"
        add(option, default=getattr(columns, name), dest=f"column_{name}", metavar="NAME", help=what)
    add("--answer-tokenizer", metavar="ID_OR_FILE", help="counts the tokens of answers that are known as text only")


COLUMN_OPTIONS = {
    "--prompt-column": "prompt",
    "--length-column": "output_tokens",
    "--model-column": "model",
    "--finish-reason-column": "finish_reason",
    "--system-column": "system",
    "--history-characters-column": "history_characters",
    "--max-tokens-column": "max_tokens",
    "--stop-column": "stop",
    "--response-column": "response",
}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a whole number above 0: {text!r}")
    return int(text)


def natural(text: str) -> int:
    """A whole number from 0 to SEED_MAX."""
    if not text.isdecimal() or len(text) > len(str(SEED_MAX)) or int(text) > SEED_MAX:
        raise argparse.ArgumentTypeError(f"not a whole number from 0 to {SEED_MAX}: {text!r}")
    return int(text)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"not a share between 0 and 1: {text!r}")
    return value


def columns(args: argparse.Namespace) -> Columns:
    return Columns(**{name: getattr(args, f"column_{name}") for name in COLUMN_OPTIONS.values()})


def counter(tokenizer: str | None) -> Callable[[str], int] | None:
    """A function that counts the tokens of a text. tokenizer : a hub id or a tokenizer.json."""
    if tokenizer is None:
        return None
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(tokenizer) if Path(tokenizer).is_file() else Tokenizer.from_pretrained(tokenizer)
    except Exception as error:  # the library raises bare exceptions
        raise DatasetError(f"cannot load the tokenizer {tokenizer}: {error}") from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def of_models(rows: list[Row], models: Sequence[str] | None) -> list[Row]:
    """The rows of these models; None: all rows. Raises DatasetError when a model has no row."""
    present = {row.prompt.model for row in rows}
    for model in models or ():
        if model not in present:
            raise DatasetError(f"no row is of the model {model!r}")
    return rows if models is None else [row for row in rows if row.prompt.model in models]


def split_of_models(splits: Splits, models: Sequence[str] | None) -> Splits:
    """The rows of these models; None: all rows. To be called after the split, because the sides depend on all rows.

    Raises DatasetError when a model has no row, and when a part of the split has no row of the models.
    """
    if models is None:
        return splits
    of_models([*splits.train, *splits.validation, *splits.held_out], models)
    parts = {
        part.name: [row for row in getattr(splits, part.name) if row.prompt.model in models] for part in fields(Splits)
    }
    for name, rows in parts.items():
        if not rows:
            raise DatasetError(f"no {name.replace('_', '-')} row is of {' or '.join(map(repr, models))}")
    return Splits(**parts)


def unusable(loaded: Rows) -> list[str]:
    return [f"Not usable: {loaded.unusable()}."] if loaded.bad else []
