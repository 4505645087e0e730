"""Counters and histograms that cost little to count, and to write in Prometheus' text format.

prometheus_client takes a lock for each count, and some 10 us for each line of a scrape. Here all counts are on one
event loop. So a count is an addition, and a line of text is its name and labels, made once, and its number.

Values of labels appear in the alphabetic order of their names, as prometheus_client writes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.utils import floatToGoString


class Counter:
    """A number that only grows. labels : as in the text, without braces"""

    __slots__ = ("_start", "value")

    def __init__(self, name: str, labels: str) -> None:
        self._start = f"{name}_total{{{labels}}} " if labels else f"{name}_total "
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def lines(self) -> Iterator[str]:
        yield f"{self._start}{_number(self.value)}\n"


class Histogram:
    """How many values are at most as large as each bound, and their sum. bounds : ascending; infinity is added"""

    __slots__ = ("_bounds", "_counts", "_starts", "_sum")

    def __init__(self, name: str, labels: str, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0
        limits = [_number(bound) for bound in (*bounds, float("inf"))]
        more = f",{labels}" if labels else ""
        buckets = [f'{name}_bucket{{le="{limit}"{more}}} ' for limit in limits]
        braced = f"{{{labels}}}" if labels else ""
        self._starts = [*buckets, f"{name}_count{braced} ", f"{name}_sum{braced} "]

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        at_most = list(accumulate(self._counts))
        for start, count in zip(self._starts, (*at_most, at_most[-1]), strict=False):
            yield f"{start}{count}.0\n"
        yield f"{self._starts[-1]}{_number(self._sum)}\n"


C = TypeVar("C", bound=Counter | Histogram)


class Family(Generic[C]):
    """Metrics of one name, one for each combination of values of its labels.

    name    without the suffix of counters
    kind    "counter" or "histogram"
    make    makes a metric, by its name and its labels as text
    labels  names of the labels
    """

    def __init__(
        self, name: str, help_: str, kind: str, make: Callable[[str, str], C], labels: Sequence[str] = ()
    ) -> None:
        self.name, self.help, self.kind, self.labels = name, help_, kind, tuple(labels)
        self._make = make
        self._members: dict[tuple[str, ...], C] = {}

    @property
    def full_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def of(self, *values: str) -> C:
        """The metric of these values of the labels, made on first use."""
        member = self._members.get(values)
        if member is None:
            pairs = sorted(zip(self.labels, values, strict=True))
            text = ",".join([f'{label}="{_escaped(value)}"' for label, value in pairs])
            member = self._members[values] = self._make(self.name, text)
        return member

    def remove(self, *values: str) -> None:
        """Forget the metric of these values, if there is one."""
        self._members.pop(values, None)

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self.full_name} {self.help}\n"
        yield f"# TYPE {self.full_name} {self.kind}\n"
        for member in self._members.values():
            yield from member.lines()


class Families:
    """All counters and histograms of a server."""

    def __init__(self) -> None:
        self._families: list[Family[Counter] | Family[Histogram]] = []

    def __iter__(self) -> Iterator[Family[Counter] | Family[Histogram]]:
        return iter(self._families)

    def counters(self, name: str, help_: str, labels: Sequence[str] = ()) -> Family[Counter]:
        family = Family(name, help_, "counter", Counter, labels)
        self._families.append(family)
        return family

    def histograms(
        self, name: str, help_: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> Family[Histogram]:
        family = Family(name, help_, "histogram", lambda own, text: Histogram(own, text, bounds), labels)
        self._families.append(family)
        return family

    def text(self) -> str:
        return "".join([line for family in self._families for line in family.lines()])


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
