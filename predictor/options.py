"""What the scripts around a predictor share: options that name the data, and how its rows are told apart."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from predictor.dataset import Columns, Rows
from predictor.errors import DatasetError


@dataclass(frozen=True, slots=True)
class Split:
    """How rows are told apart; of a predictor's folder, in metrics.json."""

    seed: int = 0
    held_out_share: float = 0.1
    validation_share: float = 0.1


def add_data_options(parser: argparse.ArgumentParser) -> None:
    columns, add = Columns(), parser.add_argument
    add("--data", action="append", required=True, metavar="FILE", help=".jsonl, .parquet, hub:NAME...; repeatable")
    for option, name in COLUMN_OPTIONS.items():
        add(option, default=getattr(columns, name), dest=f"column_{name}", metavar="NAME")
    add("--answer-tokenizer", metavar="ID_OR_FILE", help="counts the tokens of answers of which only the text is known")


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
    """Counts the tokens of a text as the tokenizer, a hub id or a tokenizer.json, does."""
    if tokenizer is None:
        return None
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(tokenizer) if Path(tokenizer).is_file() else Tokenizer.from_pretrained(tokenizer)
    except Exception as error:  # the library's own are bare
        raise DatasetError(f"cannot load the tokenizer {tokenizer}: {error}") from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def unusable(found: Rows) -> list[str]:
    reasons = ", ".join(f"{count} x {reason}" for reason, count in found.bad.most_common())
    return [f"Not usable: {reasons}."] if reasons else []
