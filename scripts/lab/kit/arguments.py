"""Command lines of the laboratory."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmserve.commands.profile import whole

__all__ = ["add_results", "add_seeds", "exit_on", "numbers", "parser_of", "positive", "whole"]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring, unchanged."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_results(parser: argparse.ArgumentParser, figure: str | None = None) -> None:
    """Add --output, and the flag `figure` for the file of the figure."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    if figure is not None:
        parser.add_argument(figure, type=Path, metavar="FILE", help="draw the results as PNG")


def add_seeds(parser: argparse.ArgumentParser, seeds: int) -> None:
    """Add the flags of a study whose cases are run with several seeds: of the runs, and of the rows (kit.rows)."""
    parser.add_argument("--results", type=Path, metavar="FILE", help="show an earlier --output and run nothing")
    parser.add_argument("--seeds", type=whole(1), default=seeds)
    parser.add_argument("--first-seed", type=whole(0), default=0)
    parser.add_argument("--jobs", type=whole(1), default=1)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON of every run")


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, separated by commas."""
    return tuple(whole(1)(part) for part in text.split(","))


@contextmanager
def exit_on(*errors: type[Exception]) -> Iterator[None]:
    """Exit with the error's message when one of these errors is raised."""
    try:
        yield
    except errors as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: error: {error}")


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, not {text!r}")
    return value
