"""Prints reports of texts and wide tables on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from predictor.text import Grid

BOLD = re.compile(r"\*\*(.*?)\*\*")
NOTHING = ("", "–")
EDGES = 3  # characters around a cell


def print_report(parts: Sequence[str | Grid], console: Console) -> None:
    """Print texts, and tables without columns that have nothing. Too wide a table is printed as several."""
    for number, part in enumerate(parts):
        if number:
            console.print()
        if isinstance(part, str):
            console.print(BOLD.sub(r"\1", part), highlight=False, markup=False, soft_wrap=True)
        else:
            for table in _tables(part, console.width):
                console.print(table)


def _tables(grid: Grid, width: int) -> Iterator[Table]:
    first, *columns = [[cell.strip("_") for cell in column] for column in zip(*grid, strict=True)]
    columns = [column for column in columns if any(cell not in NOTHING for cell in column[1:])]
    while columns:
        room = width - 1 - _width(first)
        beside = 1
        while beside < len(columns) and sum(map(_width, columns[: beside + 1])) <= room:
            beside += 1
        yield _table([first, *columns[:beside]])
        columns = columns[beside:]


def _width(column: Sequence[str]) -> int:
    return max(map(len, column)) + EDGES


def _table(columns: Sequence[Sequence[str]]) -> Table:
    table = Table()
    for number, (head, *_) in enumerate(columns):
        table.add_column(head, justify="right" if number else "left", no_wrap=not number)
    for line in zip(*[column[1:] for column in columns], strict=True):
        if any(cell not in NOTHING for cell in line[1:]):
            table.add_row(*line)
    return table
