"""Rows: the numbers that a benchmark measured for a case. Results are grouped, compared, shown and stored as rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from kit.progress import log
from kit.results import write_rows
from llmserve.simulation.many import in_processes
from llmserve.simulation.progress import RunsProgress

Case = Mapping[str, Any]
Numbers = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """case     what the numbers were measured for, by name: an arrangement, a load, a seed, ...
    numbers  value of each quantity, whose name ends in its unit; None: there is no value
    ratios   of quantities to those of a reference case, by the label of the reference
    """

    case: Case
    numbers: Numbers
    ratios: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.case[name] if name in self.case else self.numbers[name]

    @property
    def record(self) -> dict[str, Any]:
        """One flat JSON object."""
        return {**self.case, **self.numbers, **({"ratios": self.ratios} if self.ratios else {})}

    @classmethod
    def of_record(cls, record: Mapping[str, Any], case_names: Collection[str]) -> Row:
        """The row of such an object. Raises KeyError where a name of the case is missing."""
        numbers = {name: value for name, value in record.items() if name not in case_names and name != "ratios"}
        return cls({name: record[name] for name in case_names}, numbers, record.get("ratios", {}))


def read_rows(path: Path, case_names: Collection[str]) -> list[Row]:
    """The rows that save_rows wrote. Raises OSError, ValueError or KeyError when the file has no such rows."""
    return [Row.of_record(record, case_names) for record in json.loads(path.read_text(encoding="utf-8"))]


def save_rows(path: Path | None, rows: Iterable[Row]) -> None:
    """A JSON list with one row a line. Does nothing without a path."""
    write_rows(path, [row.record for row in rows])


def measured(work: Callable[[Case], Row], cases: Sequence[Case], jobs: int) -> list[Row]:
    """The row of each case, in their order, with a bar of progress. work : pickled.  jobs : number of processes"""
    rows: dict[int, Row] = {}
    with RunsProgress(len(cases)) as progress:
        for index, row in in_processes(work, cases, jobs):
            rows[index] = row
            progress.ended()
    return [rows[index] for index in range(len(cases))]


def select(rows: Iterable[Row], **case: Any) -> list[Row]:
    """The rows whose case has these values."""
    return [row for row in rows if all(row.case[name] == value for name, value in case.items())]


def group(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of these names, in the order of the first row of each group."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def values(rows: Iterable[Row], name: str) -> list[Any]:
    return [row[name] for row in rows]


def median(rows: Iterable[Row], name: str) -> float:
    return float(statistics.median(values(rows, name)))


def medians(rows: Sequence[Row], over: str) -> list[Row]:
    """One row for each case without the name `over` (the round or the seed), with medians of all numbers."""
    names = [name for name in rows[0].case if name != over]
    return [
        Row(dict(zip(names, key, strict=True)), {name: median(same, name) for name in same[0].numbers})
        for key, same in group(rows, *names).items()
    ]


def ratio(rows: Iterable[Row], references: Iterable[Row], name: str, over: str) -> float:
    """Median of a number over the reference's with the same round or seed: a slow machine slows both sides."""
    reference = {row[over]: row[name] for row in references}
    return float(statistics.median(row[name] / reference[row[over]] for row in rows))


def in_rounds(
    rounds: int, case_name: str, measures: Mapping[str, Callable[[int], Numbers]], text: Callable[[Row], str]
) -> Iterator[Row]:
    """Measure every case once a round, the cases in turn; yield the rows, and log the text of each.

    measures : called with the number of the round, from 0
    """
    for number, (name, measure) in product(range(rounds), measures.items()):
        row = Row({case_name: name, "round": number}, measure(number))
        log(f"round {number + 1}/{rounds}: {name}: {text(row)}")
        yield row
