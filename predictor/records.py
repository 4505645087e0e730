"""Files of records as people publish them: JSON lines, JSON arrays, CSV, TSV and Parquet, plain or compressed.

The content decides how a file is read, not its name: JSON lines are often called .json, and browsers unpack .gz.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from predictor.errors import DatasetError

COMPRESSIONS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
"""How to unpack a file that begins with these bytes."""
PARQUET = b"PAR1"
REFUSED = {
    b"\x28\xb5\x2f\xfd": "the file is compressed by Zstandard: unpack it (zstd -d)",
    b"PK\x03\x04": "the file is a ZIP archive or a spreadsheet: unpack it, or save it as CSV",
    b"7z\xbc\xaf": "the file is a 7z archive: unpack it",
    b"Rar!": "the file is a RAR archive: unpack it",
    b"ARROW1": "the file is in Arrow's format: save it as Parquet",
    b"SQLite format 3": "the file is an SQLite database: export the table as CSV",
    b"version https://git-lfs": "the file is a pointer of Git LFS, not the data: run `git lfs pull`",
    b"<": "the file is HTML or XML, perhaps a web page about the data: download the raw file",
}
"""Why a file that begins with these bytes cannot be read, and what helps."""
CONTAINERS = ("data", "train", "rows", "records", "examples", "instances", "samples")
"""Names of the array of records in files that are one object."""
PEEK_BYTES = 32
DELIMITERS = ",\t;|"
CELL_CHARACTERS_MAX = 2**31 - 1
BLANKS = " \t\r\n"
UNREADABLE = (OSError, EOFError, ValueError, RecursionError, zlib.error, lzma.LZMAError, csv.Error)
"""Errors of reading a file; the bases of pyarrow's errors, too."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Takes the place of a record that cannot be parsed. reason : without any of the data"""

    reason: str


def records(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(line, record) of each record in a file, in order; of Parquet (row, record). Lines count from 1.

    A record of JSON is what the line or the element of the array holds. A record of a table is a dict of its texts by
    column, "" where a cell is missing; the first line names the columns. Malformed takes the place of a record that
    cannot be parsed.
    Raises DatasetError, which names the file, when it cannot be read at all.
    """
    try:
        with open(path, "rb") as plain:
            file = _unpacked(plain)
            head = file.peek(PEEK_BYTES)
            for start, reason in REFUSED.items():
                if head.removeprefix(codecs.BOM_UTF8).startswith(start):
                    raise DatasetError(f"cannot read {path}: {reason}")
            yield from _parquet(file) if head.startswith(PARQUET) else _text_records(as_text(file))
    except UNREADABLE as error:
        raise DatasetError(f"cannot read {path}: {error}") from error


def open_text(path: str | Path) -> io.TextIOWrapper:
    """Open a text file, plain or compressed, in UTF-8 or UTF-16. Bytes that are no text become lone surrogates, and
    line ends stay as they are. Raises the errors of UNREADABLE, as does each read."""
    return as_text(_unpacked(open(path, "rb")))


def as_text(file: io.BufferedReader) -> io.TextIOWrapper:
    is_utf_16 = file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = "utf-16" if is_utf_16 else "utf-8-sig"  # both drop the byte order mark
    return io.TextIOWrapper(file, encoding=encoding, errors="surrogateescape", newline="")


def _unpacked(file: io.BufferedReader) -> io.BufferedReader:
    head = file.peek(PEEK_BYTES)
    for start, unpack in COMPRESSIONS.items():
        if head.startswith(start):
            return io.BufferedReader(unpack(file))
    return file


def _text_records(text: io.TextIOWrapper) -> Iterator[tuple[int, Any]]:
    lines = ((number, line) for number, line in enumerate(text, start=1) if line.strip())
    number, first = next(lines, (0, ""))
    if not first:
        return
    if "\0" in first:
        raise ValueError("not a text file")
    if first.lstrip()[0] not in "{[":
        yield from _table(number, first, text)
        return
    value = _json(first)
    if isinstance(value, Malformed):
        yield from _document(number, first + text.read())
        return
    following = next(lines, None)
    if following is None:
        yield from ((number, element) for element in _elements(value))
        return
    yield number, value
    if following is not None:
        yield from _json_lines(chain((following,), lines))


def _elements(value: Any) -> list[Any]:
    """The records of a file that is this one value: of an array, or of the one array in an object around it."""
    if isinstance(value, dict):
        arrays = [value[name] for name in CONTAINERS if isinstance(value.get(name), list)]
        return arrays[0] if len(arrays) == 1 and arrays[0] else [value]
    return value if isinstance(value, list) else [value]


def _json_lines(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Any]]:
    return ((number, _json(line)) for number, line in lines)


def _json(line: str) -> Any:
    """The value of a line, or Malformed."""
    if not _is_text(line):
        return Malformed("not UTF-8")
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # nested without end
        return Malformed("not JSON")


def _document(number: int, text: str) -> Iterator[tuple[int, Any]]:
    """The records of JSON that has line breaks inside its values. number : line in which the text begins

    What is no such JSON may still be JSON lines, of which the first is damaged.
    """
    try:
        found = list(_values(number, text))
        if len(found) == 1 and text.lstrip()[0] == "{":
            found = [(number, element) for element in _elements(found[0][1])]
        yield from found
        return
    except (ValueError, RecursionError) as error:
        if text.lstrip()[0] == "{":
            lines = enumerate(io.StringIO(text, newline=""), start=number)
            yield from _json_lines((at, line) for at, line in lines if line.strip())
            return
        if isinstance(error, json.JSONDecodeError):
            at = number + error.lineno - 1
            raise ValueError(f"line {at}: the JSON array is damaged or cut off there ({error.msg})") from error
        raise


def _values(number: int, text: str) -> Iterator[tuple[int, Any]]:
    """(line, value) of the elements of one array, or of values one after the other. Raises ValueError."""
    decoder = json.JSONDecoder()
    place = _after_blanks(text, 0)
    is_array = text[place] == "["
    end = len(text)
    counted = 0
    place = _after_blanks(text, place + is_array)
    while place < end and not (is_array and text[place] == "]"):
        number += text.count("\n", counted, place)
        counted = place
        value, place = decoder.raw_decode(text, place)
        yield number, value
        place = _after_blanks(text, place)
        if place < end and text[place] == ",":
            place = _after_blanks(text, place + 1)
        elif is_array and (place == end or text[place] != "]"):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
    if is_array and (place == end or _after_blanks(text, place + 1) < end):
        raise json.JSONDecodeError("Extra data" if place < end else "Expecting ']'", text, place)


def _after_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place] in BLANKS:
        place += 1
    return place


def _table(number: int, first: str, text: Iterable[str]) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(CELL_CHARACTERS_MAX)  # prompts are long
    reader = csv.reader(chain((first,), text), delimiter=delimiter_of(first), strict=True)
    try:
        header = [name.strip() for name in next(reader)]
        if twice := {name for name in header if name and header.count(name) > 1 and not name[0].isdigit()}:
            raise ValueError(f"two columns have the same name: {', '.join(sorted(twice))}")
        while True:
            line = number + reader.line_num
            row = next(reader, None)
            if row is None:
                return
            if not row or not any(row):
                continue
            if not all(map(_is_text, row)):
                yield line, Malformed("not UTF-8")
            elif any(row[len(header) :]):
                yield line, Malformed("more cells than there are columns")
            else:
                yield line, dict(zip_longest(header, row[: len(header)], fillvalue=""))
    except csv.Error as error:
        raise ValueError(f"line {number + reader.line_num - 1}: {error}") from error


def delimiter_of(header: str) -> str:
    """The delimiter that gives a table's first line the most columns."""
    return max(DELIMITERS, key=lambda delimiter: len(next(csv.reader([header], delimiter=delimiter))))


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet(file: io.BufferedReader) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DatasetError("reading Parquet needs pyarrow, of the extra llmserve[train]") from error
    with pyarrow.parquet.ParquetFile(file) as table:
        yield from enumerate((record for batch in table.iter_batches() for record in batch.to_pylist()), start=1)
