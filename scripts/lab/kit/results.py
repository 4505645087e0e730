"""The order of rounds, and results as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def in_turn(items: Sequence[T], number: int) -> list[T]:
    """All items; each round begins with another item. number : of the round, from 0"""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def straight_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Slope, intercept and R² of the line that fits best, by least squares."""
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept), float(np.corrcoef(x, y)[0, 1] ** 2)


def day_and_machine() -> dict[str, Any]:
    return {"date": str(date.today()), **machine()}


def machine() -> dict[str, Any]:
    return {"python": platform.python_version(), "cores": os.cpu_count()}


def rounded(value: Any) -> Any:
    """Round all floats to six significant digits, at any depth of lists and dictionaries."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def read_parts(path: Path | None) -> dict[str, Any]:
    """The parts that an earlier run has written; {} without a path or a file."""
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def write_json(path: Path | None, result: Any, *, indent: int = 1) -> None:
    """Does nothing without a path."""
    write_text(path, json.dumps(result, indent=indent))


def write_rows(path: Path | None, records: Iterable[Any]) -> None:
    """A JSON list with one record a line. Does nothing without a path."""
    write_text(path, "[\n" + ",\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n]")


def with_rows(result: Mapping[str, Any], name: str) -> str:
    """JSON whose last field is the list `name`, with one element a line."""
    head = json.dumps({key: value for key, value in result.items() if key != name}, indent=1)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in result[name])
    return f'{head[:-2]},\n "{name}": [\n{lines}\n]}}'


def write_text(path: Path | None, text: str) -> None:
    """Write the text and a line break; make the folder if there is none. Does nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
