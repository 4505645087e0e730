"""A page of Markdown from rows: tables of measured beside expected numbers, and figures with a text for each."""

from __future__ import annotations

import datetime
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kit.tables import markdown

from papers.rows import HOLDS, KINDS, Row, Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110
WIDTH = 120  # of lines of prose
NOT_EXPLAINED = "**not explained**"

Reasons = Mapping[str, Mapping[str, str]]
"""Figure -> quantity -> why rows of it do not agree: a sentence or two."""


@dataclass(frozen=True, slots=True)
class About:
    """The command, the machine and the time of the run that made a page."""

    command: str
    machine: str
    seed: int
    seconds: float
    quick: bool
    date: datetime.date

    @classmethod
    def read(cls, page: str) -> About:
        """Return what a page says about its run. Raises ValueError if the page does not say it."""
        said = re.search(
            r"^    (.+)\n\nMeasured on (\S+) on (.+), seed (\d+), in (\d+) s\.( A quick run,)?", page, re.MULTILINE
        )
        if said is None:
            raise ValueError("the page does not say how it was measured")
        command, date, machine, seed, seconds, quick = said.groups()
        return cls(command, machine, int(seed), float(seconds), quick is not None, datetime.date.fromisoformat(date))

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


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows of rows. opening : rows -> the text on how to read the numbers"""

    title: str
    opening: Callable[[Rows], str]
    sections: Sequence[Section]
    reasons: Reasons


def rows_of(*figures: str) -> Callable[[Rows], Sequence[Row]]:
    """Select the rows of these figures that are no curves."""
    return lambda rows: [row for figure in figures for row in rows.of(figure) if row.curve is None]


def compared_of(*figures: str) -> Callable[[Rows], Sequence[Row]]:
    """Select the rows of these figures that have an expected number."""
    return lambda rows: [row for figure in figures for row in rows.of(figure) if row.ok is not None]


def write_page(name: str, page: Page, rows: Rows, about: About, folder: Path) -> None:
    """Write folder/NAME.md and the figures folder/NAME-*.png."""
    parts = [f"# {page.title}", verdict(rows, page.reasons), page.opening(rows), about.text(), _kinds(rows)]
    for section in page.sections:
        parts += [f"## {section.title}", textwrap.fill(section.text(rows), WIDTH, break_long_words=False)]
        if table_rows := section.tables(rows):
            parts.append(table(table_rows))
        if section.figure is not None:
            parts.append(f"![{section.title}]({_draw(name, section.figure, rows, folder)})")
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


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


def verdict(rows: Rows, reasons: Reasons) -> str:
    """Return the table on top of a page: what agrees, what does not agree, and why."""
    compared: dict[str, list[Row]] = {row.figure: [] for row in sorted(rows, key=_by_number)}
    for row in rows:
        if row.ok is not None:
            compared[row.figure].append(row)
    agreeing = [figure for figure, with_figure in compared.items() if with_figure and all(r.ok for r in with_figure)]
    lines = []
    if agreeing:
        lines.append(["; ".join(agreeing), _agreement([row for name in agreeing for row in compared[name]]), "", ""])
    for figure, with_figure in compared.items():
        if with_figure and figure not in agreeing:
            lines += _disagreement(figure, with_figure, reasons.get(figure, {}))
    if uncompared := [figure for figure, with_figure in compared.items() if not with_figure]:
        lines.append(["; ".join(uncompared), "nothing to compare with", "", ""])
    text = (
        "How many numbers and statements agree within tolerance, by what they are compared with. Only those called "
        '"published" tell whether the paper is reproduced; the other words are explained below.'
    )
    table = markdown(["figures and tables", "agree", "what does not agree", "why"], lines)
    return f"{textwrap.fill(text, WIDTH)}\n\n{table}"


def _by_number(row: Row) -> list[str | int]:
    """Sort "Fig. 9" before "Fig. 11"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", row.figure)]


def _agreement(rows: Sequence[Row]) -> str:
    return ", ".join(f"{agree} of {total} {kind}" for kind, (agree, total) in Rows(list(rows)).counts().items())


def _disagreement(figure: str, rows: Sequence[Row], reasons: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield a line for each quantity of a figure of which rows do not agree."""
    first = [figure, _agreement(rows)]
    off = [row for row in rows if row.ok is False]
    for quantity in dict.fromkeys(row.quantity for row in off):
        cases = "; ".join(_difference(row) for row in off if row.quantity == quantity)
        yield [*first, f"{quantity}: {cases}", reasons.get(quantity, NOT_EXPLAINED)]
        first = ["", ""]


def _difference(row: Row) -> str:
    case = f" ({row.case_text})" if row.case else ""
    if row.unit == HOLDS:
        return f"does not hold{case}"
    measured, expected = (_number(float(f"{value:.3g}")) for value in (row.measured or 0.0, row.expected or 0.0))
    return f"{measured} instead of {expected}{case}"


def disagreements(rows: Rows) -> list[str]:
    """Return a line for each row that does not agree: figure, case, quantity, expected and measured."""
    return [
        f"{', '.join(part for part in (row.figure, row.case_text) if part)}: {_quantity(row)}: "
        f"expected: {_expected(row)}, measured: {_measured(row)}"
        for row in rows
        if row.ok is False
    ]


def _kinds(rows: Rows) -> str:
    """Return the counts of each kind of comparison, and a table of all rows that do not agree."""
    counts = [[kind, KINDS[kind], str(total), str(agree)] for kind, (agree, total) in rows.counts().items()]
    text = "Rows by the kind of number that they are compared with, and how many agree within tolerance:\n\n"
    text += markdown(["kind", "compared with", "rows", "agree"], counts)
    if off := [row for row in rows if row.ok is False]:
        text += "\n\nThese rows do not agree:\n\n" + table(off, figures=True)
    return text


def _quantity(row: Row) -> str:
    return row.quantity if row.unit in ("", "1", HOLDS) else f"{row.quantity} ({row.unit})"


def _expected(row: Row) -> str:
    return "said" if row.unit == HOLDS and row.expected is not None else _number(row.expected)


def _measured(row: Row) -> str:
    if row.unit == HOLDS:
        return "holds" if row.measured else "does not hold"
    text = _number(row.measured)
    return text if row.low is None else f"{text} [{_number(row.low)}, {_number(row.high)}]"


def _deviation(row: Row) -> str:
    if row.deviation is None or row.unit == HOLDS:
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
