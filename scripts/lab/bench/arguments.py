"""Command lines of the laboratory."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmserve.profile import whole

__all__ = ["add_results", "ending_on", "numbers", "parser_of", "positive", "whole"]


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


@contextmanager
def ending_on(*errors: type[Exception]) -> Iterator[None]:
    """Such an error ends the script with what it says."""
    try:
        yield
    except errors as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: error: {error}")


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, not {text!r}")
    return value
