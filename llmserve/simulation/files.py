"""Files that a simulation reads. What is unreadable is an error of the settings that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import predictor.records as published
from llmserve.errors import ConfigError
from predictor.errors import DatasetError
from predictor.records import UNREADABLE as UNREADABLE


def open_text(name: str, label: str) -> TextIO:
    """Open a text file, plain or compressed. label : the kind of file, for messages. Raises ConfigError."""
    _check_file(name, label)
    try:
        return published.open_text(name)
    except UNREADABLE as error:
        raise ConfigError(f"cannot read the {label} {name!r}: {error}") from error


def records(name: str, label: str) -> Iterator[tuple[int, Any]]:
    """(line, record) of each record: predictor.records.records. label : the kind of file. Raises ConfigError."""
    _check_file(name, label)
    try:
        yield from published.records(name)
    except DatasetError as error:
        raise ConfigError(f"the {label}: {error}") from error


def _check_file(name: str, label: str) -> None:
    if not Path(name).is_file():
        raise ConfigError(f"there is no {label} {name!r}")


def is_number(cell: str) -> bool:
    """Whether the text is a number; infinity and NaN are numbers."""
    try:
        float(cell)
    except ValueError:
        return False
    return True
