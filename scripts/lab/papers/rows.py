"""Rows: one measured number each, beside the number of the paper. Tables and figures are made of rows only."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from kit.results import write_rows
from numpy.typing import ArrayLike

from llmserve.simulation.estimates import estimate

DIGITS = 7  # significant digits in files
HOLDS = "holds: 1"  # the unit of a statement: 1 if it holds, else 0

Case = Mapping[str, float | str]
Kind = Literal["published", "computed", "derived", "fitted"]
KINDS: Mapping[Kind, str] = {
    "published": "a number or statement of the paper",
    "computed": "the value of a formula of the paper, evaluated here",
    "derived": "arithmetic on the paper's inputs or on other rows, or a published number that another row has met",
    "fitted": "published numbers that assumptions were chosen to agree with",
}
"""Kinds of expected numbers. Only "published" tells whether a paper is reproduced."""
Report = Callable[[str, float], None]
"""Called with the name of the part that is measured next, and the share of the work that is done."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity against another: values[i] is the value where `along` is at[i]."""

    along: str
    at: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, along: str, at: ArrayLike, values: ArrayLike) -> Curve:
        curve = cls(along, tuple(np.asarray(at, float).tolist()), tuple(np.asarray(values, float).tolist()))
        if len(curve.at) != len(curve.values):
            raise ValueError(f"{len(curve.values)} values for {len(curve.at)} points along {along}")
        return curve

    def value(self, at: float) -> float:
        """Return the value at a point of the curve. Raises ValueError at any other point."""
        return self.values[self.at.index(at)]


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a figure or table.

    case       names and values of the setting that was measured
    measured   None: the row is a curve
    expected   number of this kind that `measured` is compared with; None: there is none
    tolerance  relative, of measured to expected; 0: both must be equal
    low, high  95 % confidence interval of a simulated number, else None
    """

    figure: str
    case: Case
    quantity: str
    unit: str
    measured: float | None
    expected: float | None = None
    tolerance: float = 1e-4
    low: float | None = None
    high: float | None = None
    note: str = ""
    kind: Kind = "published"
    curve: Curve | None = field(default=None)

    @classmethod
    def mean(cls, figure: str, case: Case, quantity: str, unit: str, values: Sequence[float], **fields: Any) -> Row:
        """Return the mean over runs with different seeds, with Student's 95 % confidence interval.

        fields : other fields of the row
        """
        mean = estimate(values)
        return cls(figure, case, quantity, unit, mean.mean, low=mean.low, high=mean.high, **fields)

    @classmethod
    def of_curve(
        cls, figure: str, case: Case, quantity: str, unit: str, along: str, at: ArrayLike, values: ArrayLike
    ) -> Row:
        return cls(figure, case, quantity, unit, None, curve=Curve.of(along, at, values))

    @property
    def deviation(self) -> float | None:
        """Relative deviation of measured from expected; None if one of them is missing, or expected is 0."""
        if self.measured is None or not self.expected:
            return None
        return self.measured / self.expected - 1.0

    @property
    def ok(self) -> bool | None:
        """Whether measured is within tolerance of expected; None if there is no expected number.

        A simulated number may differ from a published one by root 2 times half its interval in addition: the published
        number is assumed to come from a simulation with as many samples.
        """
        if self.expected is None or self.measured is None:
            return None
        allowed = self.tolerance * abs(self.expected)
        if self.kind == "published" and self.low is not None and self.high is not None:
            allowed += math.sqrt(2.0) * (self.high - self.low) / 2
        return abs(self.measured - self.expected) <= allowed

    @property
    def case_text(self) -> str:
        return ", ".join(
            f"{name}={value if isinstance(value, str) else f'{value:g}'}" for name, value in self.case.items()
        )

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Row:
        """Return the row that `record` wrote, with rounded numbers."""
        pairs = [part.partition("=") for part in re.split(r", (?=[\w ]+=)", record["case"]) if part]
        names = ("figure", "quantity", "unit", "measured", "expected", "tolerance", "low", "high", "note")
        curve = record.get("curve")
        return cls(
            case={name: _number_or_text(value) for name, _, value in pairs},
            kind=record["kind"] or "published",
            curve=None if curve is None else Curve.of(curve["along"], curve["at"], curve["values"]),
            **{name: record[name] for name in names},
        )

    def record(self) -> dict[str, Any]:
        names = ("measured", "low", "high", "note", "expected", "tolerance", "ok")
        whole = {
            "figure": self.figure,
            "case": self.case_text,
            "quantity": self.quantity,
            "unit": self.unit,
            "published": _rounded(self.expected) if self.kind == "published" else None,
            **{name: _rounded(getattr(self, name)) for name in names},
            "kind": None if self.expected is None else self.kind,
        }
        if self.curve is not None:
            curve = self.curve
            whole["curve"] = {
                "along": curve.along,
                "at": [_rounded(x) for x in curve.at],
                "values": [_rounded(x) for x in curve.values],
            }
        return whole


def claim(figure: str, case: Case, text: str, holds: bool, note: str = "") -> Row:
    """Return the row of a statement without a number: expected is 1; measured is 1 if the statement holds, else 0."""
    return Row(figure, case, text, HOLDS, float(holds), 1.0, tolerance=0.0, note=note)


def in_parts(parts: Sequence[tuple[str, float, Callable[[], Iterable[Row]]]], report: Report) -> Iterator[Row]:
    """Measure parts in turn, and report each of them as it begins.

    parts : (name, work, function that measures); work in any unit, for the share that is done
    """
    total, done = sum(work for _, work, _ in parts), 0.0
    for name, work, measure in parts:
        report(name, done / total)
        yield from measure()
        done += work


@dataclass
class Rows:
    """Rows in the order of measurement."""

    rows: list[Row] = field(default_factory=list)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def extend(self, rows: Iterable[Row]) -> None:
        self.rows.extend(rows)

    def of(self, figure: str, quantity: str | None = None, **case: float | str) -> list[Row]:
        """Return the rows of a figure with this quantity, if given, and with these values in their case."""
        return [
            row
            for row in self.rows
            if row.figure == figure
            and quantity in (None, row.quantity)
            and all(row.case.get(name) == value for name, value in case.items())
        ]

    def only(self, figure: str, quantity: str, **case: float | str) -> Row:
        """Return the only row that matches. Raises LookupError if another number of rows matches."""
        matches = self.of(figure, quantity, **case)
        if len(matches) != 1:
            raise LookupError(f"{len(matches)} rows of {quantity!r} in {figure!r} for {case}, not one")
        return matches[0]

    def compared(self, kind: Kind) -> list[Row]:
        """Return the rows that have an expected number of this kind."""
        return [row for row in self.rows if row.ok is not None and row.kind == kind]

    def counts(self) -> dict[Kind, tuple[int, int]]:
        """Return (rows that agree, all rows) of each kind that has rows."""
        by_kind = {kind: self.compared(kind) for kind in KINDS}
        return {kind: (sum(bool(row.ok) for row in rows), len(rows)) for kind, rows in by_kind.items() if rows}

    def number(self, figure: str, quantity: str, **case: float | str) -> float:
        measured = self.only(figure, quantity, **case).measured
        if measured is None:
            raise LookupError(f"{quantity!r} in {figure!r} for {case} is a curve")
        return measured

    def curve(self, figure: str, quantity: str, **case: float | str) -> Curve:
        curve = self.only(figure, quantity, **case).curve
        if curve is None:
            raise LookupError(f"{quantity!r} in {figure!r} for {case} is a number, not a curve")
        return curve

    @classmethod
    def read(cls, path: Path) -> Rows:
        """Read a file that `write` wrote. Raises OSError, or ValueError if the file is not JSON."""
        return cls([Row.of_record(record) for record in json.loads(path.read_text())])

    def write(self, path: Path) -> None:
        """Write a JSON list, one row a line."""
        write_rows(path, [row.record() for row in self.rows])


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _rounded(value: Any) -> Any:
    """Round a float to DIGITS digits: a whole number becomes an integer, inf and nan None. Return others unchanged."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{DIGITS}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value
