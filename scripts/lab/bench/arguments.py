"""Command lines of the laboratory."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Its help is the script's own documentation, as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_results(parser: argparse.ArgumentParser, figure: str | None = None) -> None:
    """--output, and a flag of this name for the figure."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    if figure is not None:
        parser.add_argument(figure, type=Path, metavar="FILE", help="draw them as PNG")


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, between commas."""
    return tuple(whole(1)(part) for part in text.split(","))


def whole(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"a whole number of at least {least} is needed, not {text!r}")
        return int(text)

    return number


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, not {text!r}")
    return value
