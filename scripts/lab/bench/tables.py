"""Tables: Markdown for pages, others for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", right: bool = False) -> str:
    """right : all columns but the first are numbers."""
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
    """The first column to the left, and those of `left`; all others are numbers. A row of none: a line between."""
    table = Table(title=title, title_justify="left", caption=caption)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if not place or column in left else "right")
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    (console or Console()).print(table)
