"""Counters and histograms that cost little to count, and all metrics in Prometheus' text format.

prometheus_client takes a lock for each count, and some 10 us for each line of a scrape. Here all counts are on one
event loop. So a count is an addition, and the name and labels of a line are made once.

Values of labels appear in the alphabetic order of their names, as prometheus_client writes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, Literal, NamedTuple, TypeVar

from prometheus_client.utils import floatToGoString

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """The definition of a metric.

    name      without the suffix `_total` of counters
    labels    their names
    buckets   upper bounds of a histogram, ascending; infinity is added
    by_model  whether the label `model` comes first where there are several models
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    by_model: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


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
    """Counts of values up to each bound, and the sum of all values. bounds : ascending; infinity is added"""

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
    """The counts of a metric, one for each combination of values of its labels.

    make : makes a count from the metric's name and its labels as text
    """

    def __init__(self, metric: Metric, make: Callable[[str, str], C]) -> None:
        self.metric = metric
        self._make = make
        self._members: dict[tuple[str, ...], C] = {}

    def of(self, *values: str) -> C:
        """The count of these values of the labels, made on first use."""
        member = self._members.get(values)
        if member is None:
            text = _labels(self.metric.labels, values)
            member = self._members[values] = self._make(self.metric.name, text)
        return member

    def remove(self, *values: str) -> None:
        """Forget the count of these values, if there is one."""
        self._members.pop(values, None)

    def lines(self) -> Iterator[str]:
        yield from head_of(self.metric, self.metric.help)
        for member in self._members.values():
            yield from member.lines()


class Families:
    """The counters and histograms of a server that are counted there. metrics : the table, in the order of the text"""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._families: dict[str, Family[Counter] | Family[Histogram]] = {}

    def counter(self, name: str) -> Family[Counter]:
        """Begin to count a metric of the table. Raises KeyError for a name that is not in the table."""
        metric = self._metrics[name]
        assert metric.kind == "counter", f"{name} is a {metric.kind}"
        family = self._families[name] = Family(metric, Counter)
        return family

    def histogram(self, name: str) -> Family[Histogram]:
        """As `counter`."""
        metric = self._metrics[name]
        assert metric.kind == "histogram", f"{name} is a {metric.kind}"
        family = self._families[name] = Family(metric, lambda own, text: Histogram(own, text, metric.buckets))
        return family

    def text(self) -> str:
        families = [family for name in self._metrics if (family := self._families.get(name)) is not None]
        return "".join([line for family in families for line in family.lines()])


Rows = Iterable[tuple[tuple[str, ...], float]]
"""Values of labels, and the number that belongs to them."""


def lines_of(metric: Metric, rows: Rows, help_: str, *, several_models: bool = False) -> Iterator[str]:
    """The text of a metric whose numbers were read just now.

    Rows of a metric `by_model` begin with the model, which is left out of the text for a single model.
    """
    yield from head_of(metric, help_)
    rows, names = list(rows), metric.labels
    if metric.by_model:
        if several_models or len({values[0] for values, _ in rows}) > 1:
            names = ("model", *names)
        else:
            rows = [(values[1:], number) for values, number in rows]
    for values, number in rows:
        labels = f"{{{_labels(names, values)}}}" if names else ""
        yield f"{metric.full_name}{labels} {_number(number)}\n"


def head_of(metric: Metric, help_: str) -> Iterator[str]:
    yield f"# HELP {metric.full_name} {help_}\n"
    yield f"# TYPE {metric.full_name} {metric.kind}\n"


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    pairs = sorted(zip(names, values, strict=True))
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in pairs])


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
