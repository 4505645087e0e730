"""Several runs of one case: means and 95 % confidence intervals of all quantities of a summary.

n       number of runs, independent: each has its own seed
s       standard deviation of a quantity over the runs (n - 1)
t       Student's quantile of level 0.975 with n - 1 degrees of freedom
mean +- t s / sqrt(n)    the interval
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from llmserve.simulation.report import Summary, table_of

if TYPE_CHECKING:
    from rich.console import Console

COMPARED = (  # columns of a comparison: heading, quantity, format
    ("requests/s", "throughput_per_s", ".4g"),
    ("latency (s)", "latency_s_mean", ".4g"),
    ("p95 (s)", "latency_s_p95", ".4g"),
    ("in time", "in_time_share", ".1%"),
    ("utilised", "utilisation", ".1%"),
    ("J/token", "energy_j_per_token", ".4g"),
)
LEVEL = 0.975  # level of the quantile q: 95 % of the distribution lie between -q and q


class Estimate(msgspec.Struct, frozen=True):
    """A mean over runs and its 95 % confidence interval; one run gives no interval."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float:
        return 0.0 if self.high is None else self.high - self.mean


class Repeated(msgspec.Struct, frozen=True):
    """One case under several seeds.

    settings   settings of the case, when several cases are compared: field -> text
    estimates  by the quantity's name in the summary; quantities that some run does not know are left out
    runs       the summaries, in the order of the seeds
    """

    seeds: tuple[int, ...]
    estimates: dict[str, Estimate]
    runs: tuple[Summary, ...]
    settings: dict[str, str] = {}

    @classmethod
    def of(cls, seeds: Sequence[int], runs: Sequence[Summary], settings: dict[str, str]) -> Repeated:
        """seeds, runs : of equal length, at least 1."""
        estimates = {}
        for name in Summary.__struct_fields__:
            values = [getattr(run, name) for run in runs]
            if None not in values:
                estimates[name] = estimate(values)
        return cls(tuple(seeds), estimates, tuple(runs), settings)

    def cell(self, name: str, form: str) -> str | None:
        """A quantity with its interval, as text; None when the quantity is not known."""
        if name not in self.estimates:
            return None
        value = self.estimates[name]
        if value.high is None:
            return format(value.mean, form)
        if not form.endswith("%"):  # only as many digits as the interval makes meaningful
            form = ".4g" if abs(value.mean) < 1e4 else ",.0f"
            half_form = ".2g" if value.half_width < 99.5 else ",.0f"
            return f"{format(value.mean, form)} ± {format(value.half_width, half_form)}"
        return f"{format(value.mean, form)} ± {format(value.half_width, form)}"


def estimate(values: Sequence[float]) -> Estimate:
    """values : (n,) of independent runs, n >= 1."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean)
    half_width = student_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half_width, mean + half_width)


def student_quantile(degrees: int, level: float = LEVEL) -> float:
    """Student's t, by bisection on its distribution. degrees : whole, >= 1.  level : in (1/2, 1)."""
    low, high = 0.0, math.pi / 2  # limits of the angle atan(t / sqrt(degrees))
    for _ in range(60):  # enough for the last bit of the angle
        middle = (low + high) / 2
        low, high = (middle, high) if (1 + _within(middle, degrees)) / 2 < level else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _within(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) tan(angle)). Source: Abramowitz and Stegun (1964), 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(1 + odd, degrees, 2):  # cos^(power - 1), with the coefficients of both parities
        total += term
        term *= cosine * cosine * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def print_intervals(repeated: Repeated, title: str, console: Console) -> None:
    """Print the table of one case."""
    console.print(table_of(repeated.cell, title))


def print_comparison(cases: Sequence[Repeated], title: str, console: Console) -> None:
    """Print a table with a row for each case."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    columns = [column for column in COMPARED if any(column[1] in case.estimates for case in cases)]
    for heading in (*cases[0].settings, *(heading for heading, _, _ in columns)):
        table.add_column(heading.replace("_", "-"), justify="right")
    for case in cases:
        table.add_row(*case.settings.values(), *(case.cell(name, form) for _, name, form in columns))
    console.print(table)
