"""A page of Markdown from rows: tables of measured beside expected numbers, and figures with a text for each."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.tables import markdown

from reproduction.rows import KINDS, Row, Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110
WIDTH = 120  # of lines of prose


@dataclass(frozen=True, slots=True)
class About:
    """The command, the machine and the time of the run that made a page."""

    command: str
    machine: str
    seed: int
    seconds: float
    quick: bool
    date: datetime.date

    def text(self) -> str:
        quick = " A quick run, with fewer samples and cases than a full page." if self.quick else ""
        return (
            f"    {self.command}\n\n"
            f"Measured on {self.date.isoformat()} on {self.machine}, seed {self.seed}, in {self.seconds:.0f} s.{quick}"
        )


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page.

    text    rows -> the text
    tables  rows -> the rows that the table lists
    figure  stem of the file's name, and rows -> the figure
    """

    title: str
    text: Callable[[Rows], str]
    tables: Callable[[Rows], Sequence[Row]] = lambda rows: ()
    figure: tuple[str, Callable[[Rows], Figure]] | None = None


def rows_of(*figures: str) -> Callable[[Rows], Sequence[Row]]:
    """Select the rows of these figures that are no curves."""
    return lambda rows: [row for figure in figures for row in rows.of(figure) if row.curve is None]


def compared_of(*figures: str) -> Callable[[Rows], Sequence[Row]]:
    """Select the rows of these figures that have an expected number."""
    return lambda rows: [row for figure in figures for row in rows.of(figure) if row.ok is not None]


def write_page(
    name: str, title: str, opening: str, sections: Iterable[Section], rows: Rows, about: About, folder: Path
) -> None:
    """Write folder/NAME.md and the figures folder/NAME-*.png."""
    parts = [f"# {title}", opening, about.text(), _summary(rows)]
    for section in sections:
        parts += [f"## {section.title}", textwrap.fill(section.text(rows), WIDTH, break_long_words=False)]
        if table_rows := section.tables(rows):
            parts.append(table(table_rows))
        if section.figure is not None:
            parts.append(f"![{section.title}]({_draw(name, section.figure, rows, folder)})")
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def redraw(name: str, sections: Iterable[Section], rows: Rows, folder: Path) -> list[str]:
    """Draw the figures from stored rows. Returns the names of the files."""
    return [_draw(name, section.figure, rows, folder) for section in sections if section.figure is not None]


def _draw(name: str, figure: tuple[str, Callable[[Rows], Figure]], rows: Rows, folder: Path) -> str:
    stem, draw = figure
    draw(rows).savefig(folder / f"{name}-{stem}.png", dpi=DPI)
    return f"{name}-{stem}.png"


def table(rows: Sequence[Row], *, figures: bool = False) -> str:
    """Return a table of measured beside expected numbers, with the deviation in per cent.

    The column "ok" tells whether the deviation is within tolerance.
    figures : add a first column that names the figure or table of the paper
    """
    columns: dict[str, Callable[[Row], str]] = {
        "figure": lambda row: row.figure,
        "case": lambda row: row.case_text,
        "quantity": _quantity,
        "expected": _expected,
        "kind": lambda row: row.kind if row.ok is not None else "",
        "measured": _measured,
        "deviation": _deviation,
        "ok": _ok,
        "note": lambda row: row.note,
    }
    if not figures:
        del columns["figure"]
    if not any(row.note for row in rows):
        del columns["note"]
    if all(row.ok is None for row in rows):
        for name in ("expected", "kind", "deviation", "ok"):
            del columns[name]
    return markdown(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def _summary(rows: Rows) -> str:
    """Return the counts of each kind of comparison, and a table of all rows that do not agree."""
    counts = [[kind, KINDS[kind], str(total), str(agree)] for kind, (agree, total) in rows.counts().items()]
    text = "Rows by the kind of number that they are compared with, and how many agree within tolerance:\n\n"
    text += markdown(["kind", "compared with", "rows", "agree"], counts)
    if off := [row for row in rows if row.ok is False]:
        text += "\n\nThese rows do not agree:\n\n" + table(off, figures=True)
    return text


def _quantity(row: Row) -> str:
    return row.quantity if row.unit in ("", "1", "holds: 1") else f"{row.quantity} ({row.unit})"


def _expected(row: Row) -> str:
    return "said" if row.unit == "holds: 1" and row.expected is not None else _number(row.expected)


def _measured(row: Row) -> str:
    if row.unit == "holds: 1":
        return "holds" if row.measured else "does not hold"
    text = _number(row.measured)
    return text if row.low is None else f"{text} [{_number(row.low)}, {_number(row.high)}]"


def _deviation(row: Row) -> str:
    if row.deviation is None or row.unit == "holds: 1":
        return ""
    percent = 100 * row.deviation
    if percent == 0:
        return "0"
    return f"{percent:+.2g} %" if abs(percent) < 100 else f"{percent:+.0f} %"


def _ok(row: Row) -> str:
    return {None: "", True: "yes", False: "**no**"}[row.ok]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.6g}"
