"""Rounds, medians, and results as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def in_turn(these: Sequence[T], number: int) -> list[T]:
    """All of them, another first in each round. number : of the round, from 0"""
    first = number % len(these)
    return [*these[first:], *these[:first]]


def median_of(these: Iterable[T], value: Callable[[T], float]) -> float:
    return statistics.median(map(value, these))


def made_on() -> dict[str, Any]:
    """Day and machine of a result."""
    return {"date": str(date.today()), **machine()}


def machine() -> dict[str, Any]:
    return {"python": platform.python_version(), "cores": os.cpu_count()}


def rounded(value: Any) -> Any:
    """Numbers to six digits, at any depth."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def write_json(path: Path | None, result: Any, *, indent: int = 1) -> None:
    """Nothing where there is no path."""
    write_text(path, json.dumps(result, indent=indent))


def write_rows(path: Path | None, rows: Iterable[Any]) -> None:
    """A JSON list, a row a line."""
    write_text(path, "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]")


def with_rows(result: Mapping[str, Any], name: str) -> str:
    """JSON, one of its lists, the last, with an element a line."""
    head = json.dumps({key: value for key, value in result.items() if key != name}, indent=1)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in result[name])
    return f'{head[:-2]},\n "{name}": [\n{lines}\n]}}'


def write_text(path: Path | None, text: str) -> None:
    """With a line's end, in a folder that is made where there is none."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
