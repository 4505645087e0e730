"""Text files that a simulation reads: plain or compressed, CSV or JSON lines."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from llmserve.errors import ConfigError

UNREADABLE = (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error)
"""Errors of reading a file."""


def open_text(name: str, label: str) -> TextIO:
    """Open a text file, plain or compressed (.gz). label : the kind of file, for messages. Raises ConfigError."""
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"there is no {label} {name!r}")
    try:
        return _open(path)
    except OSError as error:
        raise ConfigError(f"cannot read the {label} {name!r}: {error.strerror}") from error


def _open(path: Path) -> TextIO:
    encoding = "utf-8-sig"  # drops the byte order mark that spreadsheets write
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding=encoding, newline="")
    return path.open(encoding=encoding, newline="")


def records(name: str, label: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, fields) of each record of a CSV file with a header, or of JSON lines (.jsonl), plain or compressed (.gz).

    label : the kind of file, for messages.  Raises ConfigError naming the file, and the line that is not a record.
    """
    line = 0
    with open_text(name, label) as file:
        try:
            if not name.removesuffix(".gz").endswith(".jsonl"):
                reader = csv.DictReader(file)
                for row in reader:
                    yield reader.line_num, row
                return
            for line, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                record = json.loads(text)
                if not isinstance(record, dict):
                    raise ConfigError(f"the {label} {name!r}, line {line}: not a JSON object")
                yield line, record
        except json.JSONDecodeError as error:
            raise ConfigError(f"the {label} {name!r}, line {line}: {error}") from error
        except UNREADABLE as error:
            raise ConfigError(f"cannot read the {label} {name!r}: {error}") from error


def is_number(cell: str) -> bool:
    """Whether the text is a number; infinity and NaN are numbers."""
    try:
        float(cell)
    except ValueError:
        return False
    return True
