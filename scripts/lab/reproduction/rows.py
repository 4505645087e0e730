"""Rows: one measured number each, beside what a paper prints. Tables and figures are made of nothing else."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from bench.results import write_rows
from numpy.typing import ArrayLike

from llmserve.simulation.estimates import estimate

DIGITS = 7  # significant ones that are kept in files

Case = Mapping[str, float | str]
Kind = Literal["published", "computed", "derived", "fitted"]
KINDS: Mapping[Kind, str] = {
    "published": "a number or statement of the paper",
    "computed": "what a formula of the paper gives, evaluated here",
    "derived": "arithmetic on the paper's inputs or on other rows, or a published number that another row has met",
    "fitted": "published numbers that assumptions were chosen to agree with",
}
"""What a row is compared with. Only the first kind tells whether a paper is reproduced."""
Report = Callable[[str, float], None]
"""Told what is measured next, and the share of all that is done."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity along another: values[i] where `along` is at[i]."""

    along: str
    at: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, along: str, at: ArrayLike, values: ArrayLike) -> Curve:
        curve = cls(along, tuple(np.asarray(at, float).tolist()), tuple(np.asarray(values, float).tolist()))
        if len(curve.at) != len(curve.values):
            raise ValueError(f"{len(curve.values)} values along {along} at {len(curve.at)} places")
        return curve

    def value(self, at: float) -> float:
        """The value at one of its places; raises ValueError elsewhere."""
        return self.values[self.at.index(at)]


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a figure or table.

    case       what it was measured for
    measured   None when the row is a curve
    expected   what it is compared with, of this kind; None: with nothing
    tolerance  relative, of measured to expected; 0: they must be equal
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
        """The mean over runs under different seeds, with Student's 95 % confidence interval.

        fields : the row's others
        """
        found = estimate(values)
        return cls(figure, case, quantity, unit, found.mean, low=found.low, high=found.high, **fields)

    @property
    def deviation(self) -> float | None:
        """Relative, of measured from expected; None without either, or from 0."""
        if self.measured is None or not self.expected:
            return None
        return self.measured / self.expected - 1.0

    @property
    def ok(self) -> bool | None:
        """Whether measured is within tolerance of expected; None when it is compared with nothing.

        A simulated number may differ from a published one by its interval's half width, times root 2, in addition: that
        is taken to be a simulation's too, of as many samples.
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
        """As `record` wrote it, but for digits that it rounded."""
        pairs = [part.partition("=") for part in re.split(r", (?=\w+=)", record["case"]) if part]
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
    """Something that a paper says without a number: expected is 1, measured as 1 when it holds here, else 0."""
    return Row(figure, case, text, "holds: 1", float(holds), 1.0, tolerance=0.0, note=note)


@dataclass
class Rows:
    """Rows in the order in which they were measured."""

    rows: list[Row] = field(default_factory=list)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def extend(self, rows: Iterable[Row]) -> None:
        self.rows.extend(rows)

    def of(self, figure: str, quantity: str | None = None, **case: float | str) -> list[Row]:
        """Rows of a figure; of one quantity, and of cases that agree with `case`, where these are given."""
        return [
            row
            for row in self.rows
            if row.figure == figure
            and quantity in (None, row.quantity)
            and all(row.case.get(name) == value for name, value in case.items())
        ]

    def one(self, figure: str, quantity: str, **case: float | str) -> Row:
        """The only such row; raises LookupError."""
        found = self.of(figure, quantity, **case)
        if len(found) != 1:
            raise LookupError(f"{len(found)} rows of {quantity!r} in {figure!r} for {case}, not one")
        return found[0]

    def compared(self, kind: Kind) -> list[Row]:
        """Rows of a kind that are compared with what they should be."""
        return [row for row in self.rows if row.ok is not None and row.kind == kind]

    def counts(self) -> dict[Kind, tuple[int, int]]:
        """Of each kind that there is: rows that agree, and rows."""
        found = {kind: self.compared(kind) for kind in KINDS}
        return {kind: (sum(bool(row.ok) for row in rows), len(rows)) for kind, rows in found.items() if rows}

    def number(self, figure: str, quantity: str, **case: float | str) -> float:
        measured = self.one(figure, quantity, **case).measured
        if measured is None:
            raise LookupError(f"{quantity!r} in {figure!r} for {case} is a curve")
        return measured

    def curve(self, figure: str, quantity: str, **case: float | str) -> Curve:
        curve = self.one(figure, quantity, **case).curve
        if curve is None:
            raise LookupError(f"{quantity!r} in {figure!r} for {case} is a number, not a curve")
        return curve

    @classmethod
    def read(cls, path: Path) -> Rows:
        """What `write` wrote. Raises OSError, or ValueError when the file is none of it."""
        return cls([Row.of_record(record) for record in json.loads(path.read_text())])

    def write(self, path: Path) -> None:
        """A JSON list, a row a line."""
        write_rows(path, [row.record() for row in self.rows])


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _rounded(value: Any) -> Any:
    """Floats to so many significant digits; whole ones as integers, infinite ones as none. Others as they are."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{DIGITS}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value
