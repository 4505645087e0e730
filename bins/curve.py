"""A quantity against the batch size: seconds or joules of a step, affine or by measured points."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
CurveKind = Literal["affine", "table"]


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity against the number of sequences that run together: positive and non-decreasing from 1 on.

    affine  slope * n + intercept; `error` is the mean absolute relative error of the fit, `sizes` and `values` the
            fitted points (for figures; () when unknown)
    table   `values` at `sizes`, with straight lines in between; constant before the first size, and with the last slope
            after the last size

    Made by `affine`, `table` or `fit`. Raises ValueError on numbers that give no positive, non-decreasing curve.
    """

    kind: CurveKind
    slope: float = 0.0
    intercept: float = 0.0
    error: float = 0.0
    sizes: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("slope", "intercept", "error"):
            check_number(getattr(self, name), f"a curve's {name}")
        for name in ("sizes", "values"):
            for value in getattr(self, name):
                check_number(value, f"a curve's {name}")
        if len(self.sizes) != len(self.values):
            raise ValueError(f"a curve needs as many values as sizes, not {len(self.values)} and {len(self.sizes)}")
        if self.kind == "affine":
            self._check_affine()
        elif self.kind == "table":
            self._check_table()
        else:
            raise ValueError(f"a curve's kind is one of {', '.join(get_args(CurveKind))}, not {self.kind!r}")

    def _check_affine(self) -> None:
        if self.slope < 0:
            raise ValueError(f"a curve must not fall with the size, but its slope is {self.slope:g}")
        if self.slope + self.intercept <= 0:
            raise ValueError(f"a curve must be positive, but is {self.slope + self.intercept:g} at size 1")
        if self.error < 0:
            raise ValueError(f"a curve's error must be at least 0, not {self.error:g}")

    def _check_table(self) -> None:
        if not self.sizes:
            raise ValueError("a table needs at least one size")
        if self.sizes[0] <= 0 or any(np.diff(self.sizes) <= 0):
            raise ValueError(f"a table's sizes must be positive and strictly increasing, not {list(self.sizes)}")
        if self.values[0] <= 0 or any(np.diff(self.values) < 0):
            raise ValueError(f"a table's values must be positive and non-decreasing, not {list(self.values)}")

    @classmethod
    def affine(cls, slope: float, intercept: float, error: float = 0.0) -> Curve:
        """slope * n + intercept: slope >= 0, and positive at n = 1."""
        return cls("affine", float(slope), float(intercept), float(error))

    @classmethod
    def table(cls, sizes: ArrayLike, values: ArrayLike) -> Curve:
        """sizes : (n,) positive, strictly increasing, n >= 1.  values : (n,) positive, non-decreasing."""
        return cls("table", sizes=numbers(sizes), values=numbers(values))

    @classmethod
    def fit(cls, sizes: ArrayLike, values: ArrayLike) -> Curve:
        """The affine curve of least squared relative residuals, slope and intercept at least 0, with the fitted points.

        sizes, values : (n,) positive, in any order, repetitions allowed; at least two different sizes.
        Residuals are relative, so that small sizes count as much as large sizes over decades.
        """
        n, y = np.asarray(sizes, dtype=float), np.asarray(values, dtype=float)
        if n.ndim != 1 or n.shape != y.shape:
            raise ValueError(f"a fit needs one value for each size, not shapes {n.shape} and {y.shape}")
        if not (np.isfinite(n).all() and np.isfinite(y).all() and (n > 0).all() and (y > 0).all()):
            raise ValueError("a fit needs positive finite sizes and values")
        check_two_sizes(n)
        columns = np.column_stack([np.ones_like(n), n])
        intercept, slope = non_negative_fit(columns, y)
        error = relative_error(columns @ [intercept, slope], y)
        return cls("affine", slope, intercept, error, numbers(n), numbers(y))

    def times(self, factor: float) -> Curve:
        """This curve times a factor > 0, for instance joules from seconds at a constant power."""
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"a curve's factor must be positive and finite, not {factor}")
        values = tuple([factor * value for value in self.values])
        return Curve(self.kind, factor * self.slope, factor * self.intercept, self.error, self.sizes, values)

    def at(self, sizes: ArrayLike) -> Floats:
        """Values of the curve, in the shape of `sizes`. Raises ValueError on a size below 1."""
        n = np.asarray(sizes, dtype=float)
        if not (n >= 1).all():
            raise ValueError(f"sizes must be at least 1, not {float(np.min(n)):g}")
        if self.kind == "affine":
            return np.asarray(self.slope * n + self.intercept)
        inside = np.interp(n, self.sizes, self.values)
        return np.asarray(inside + self._last_slope * np.maximum(n - self.sizes[-1], 0.0))

    @property
    def _last_slope(self) -> float:
        if len(self.sizes) == 1:
            return 0.0
        return (self.values[-1] - self.values[-2]) / (self.sizes[-1] - self.sizes[-2])


def non_negative_fit(columns: Floats, y: Floats) -> tuple[float, ...]:
    """Coefficients >= 0 of the columns with least squared relative residuals from y > 0.

    columns : (n, terms), non-negative, no column all zero.  Returns one coefficient for each term.
    The optimum is the unconstrained fit on some subset of the terms, so all subsets are tried; among equally good
    subsets the first terms win.
    """
    relative = columns / y[:, None]
    terms = columns.shape[1]
    best, best_loss = np.zeros(terms), math.inf
    for count in range(terms, 0, -1):
        for chosen in combinations(range(terms), count):
            part = relative[:, chosen]
            coefficients, _, rank, _ = np.linalg.lstsq(part, np.ones_like(y))
            if rank < count or (coefficients < 0).any():
                continue
            loss = float(np.mean((part @ coefficients - 1) ** 2))
            if loss < best_loss - 1e-12:  # better by more than rounding
                best, best_loss = np.zeros(terms), loss
                best[list(chosen)] = coefficients
    return numbers(best)


def relative_error(fitted: Floats, y: Floats) -> float:
    return float(np.mean(np.abs(fitted / y - 1)))


def check_two_sizes(sizes: Floats) -> None:
    distinct = np.unique(sizes)
    if distinct.size < 2:
        sizes_text = "none" if distinct.size == 0 else f"only {distinct[0]:g}"
        raise ValueError(f"a fit needs at least two different sizes; there is {sizes_text}")


def check_number(value: object, name: str, least: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least:g}, not {value!r}")


def numbers(values: ArrayLike) -> tuple[float, ...]:
    return tuple(np.asarray(values, dtype=float).ravel().tolist())
