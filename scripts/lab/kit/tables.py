"""Tables: Markdown for pages, others for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from kit.rows import Row

Columns = Mapping[str, tuple[str, str]]
"""Head of a column -> the name in a row's case or numbers, and the format of its value; "" : the plain text."""


def cells(rows: Iterable[Row], columns: Columns) -> list[list[str]]:
    return [[format(row[name], shape) for name, shape in columns.values()] for row in rows]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", right: bool = False) -> str:
    """right : align all columns but the first to the right, for numbers"""
    rule = ["---", *["---:" if right else "---"] * (len(head) - 1)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))
    return f"**{title}**\n\n{table}" if title else table


def show(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[str] = (),
    caption: str | None = None,
    console: Console | None = None,
) -> None:
    """Print a table. The first column and those of `left` are aligned to the left, all others, numbers, to the right.

    An empty row prints a line.
    """
    table = Table(title=title, title_justify="left", caption=caption)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if not place or column in left else "right")
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    (console or Console()).print(table)
