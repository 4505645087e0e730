"""Files and hub datasets -> rows (prompt, model, output_tokens, capped), and their split by prompt."""

import gzip
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predictor.errors import DatasetError
from predictor.text import normalised


@dataclass(frozen=True, slots=True)
class Row:
    """One observed answer.

    output_tokens : at least 1. capped : the answer was cut at its max_tokens, so its own length is unknown; such
    rows are used as they are, because the cap that held when they were measured holds when they are served.
    """

    prompt: str
    model: str
    output_tokens: int
    capped: bool


@dataclass(frozen=True, slots=True)
class Columns:
    """What the columns are called. Rows without a model or a finish reason are fine; the others are needed."""

    prompt: str = "prompt"
    output_tokens: str = "output_tokens"
    model: str = "model"
    finish_reason: str = "finish_reason"


@dataclass(slots=True)
class Rows:
    """The usable rows, and how many were not usable for which reason."""

    rows: list[Row] = field(default_factory=list)
    bad: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Splits:
    """Three sets of rows that share no prompt. Training choices may look at validation, never at held_out."""

    train: list[Row]
    validation: list[Row]
    held_out: list[Row]


def load_rows(sources: Sequence[str | Path], columns: Columns | None = None) -> Rows:
    """Read every source, in order; unusable rows are counted by reason.

    A source is a .jsonl, .jsonl.gz or .parquet file, or `hub:NAME[:SPLIT]` (split "train" when it is not given).
    Raises DatasetError when a source cannot be read or when not one row of all of them is usable.
    """
    found = Rows()
    for source in sources:
        for record in _records(str(source)):
            row = _parse(record, columns or Columns())
            if isinstance(row, Row):
                found.rows.append(row)
            else:
                found.bad[row] += 1
    if not found.rows:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in found.bad.most_common())
        raise DatasetError(f"no usable row in {', '.join(map(str, sources))} ({reasons or 'no rows at all'})")
    return found


def split_rows(rows: Iterable[Row], seed: int, validation_share: float = 0.1, held_out_share: float = 0.1) -> Splits:
    """Split by prompt: all rows of a prompt fall on one side, the same one in every run and in every file.

    The shares are expected, not exact: the side follows from a hash of the seed and the normalised prompt alone,
    so adding rows moves none. Raises DatasetError when a side stays empty.
    """
    splits = Splits([], [], [])
    for row in rows:
        place = _uniform(row.prompt, seed)
        if place < held_out_share:
            splits.held_out.append(row)
        elif place < held_out_share + validation_share:
            splits.validation.append(row)
        else:
            splits.train.append(row)
    if not (splits.train and splits.validation and splits.held_out):
        raise DatasetError("too few different prompts to split them into training, validation and held-out")
    return splits


def length_sample(rows: Sequence[Row], size_max: int = 1000) -> list[int]:
    """A sorted sample of the rows' output tokens: all of them, or `size_max` evenly spaced quantiles."""
    lengths = sorted(row.output_tokens for row in rows)
    if len(lengths) <= size_max:
        return lengths
    return [lengths[int((i + 0.5) / size_max * len(lengths))] for i in range(size_max)]


def _records(source: str) -> Iterator[Any]:
    """The records of one source: mappings when all is well, or whatever stands in their place."""
    try:
        if source.startswith("hub:"):
            yield from _hub_records(source.removeprefix("hub:"))
        elif source.endswith(".parquet"):
            yield from _parquet_records(source)
        elif source.endswith((".jsonl", ".jsonl.gz")):
            yield from _json_records(source)
        else:
            raise DatasetError(f"{source}: expected .jsonl, .jsonl.gz, .parquet or hub:NAME[:SPLIT]")
    except (OSError, EOFError, ValueError) as error:  # pyarrow's own errors are among them
        raise DatasetError(f"cannot read {source}: {error}") from error


def _json_records(path: str) -> Iterator[Any]:
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as lines:
        for line in lines:
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError:  # not JSON, or not UTF-8
                    yield None


def _parquet_records(path: str) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _hub_records(name_and_split: str) -> Iterator[Any]:
    import datasets

    name, _, split = name_and_split.partition(":")
    try:
        yield from datasets.load_dataset(name, split=split or "train")
    except datasets.exceptions.DatasetsError as error:  # such as a file in it that cannot be parsed
        raise DatasetError(f"cannot read {name}: {error}") from error


def _parse(record: Any, columns: Columns) -> Row | str:
    """The row, or the reason why it cannot be used."""
    if not isinstance(record, Mapping):
        return "not a JSON object"
    prompt, output_tokens = record.get(columns.prompt), record.get(columns.output_tokens)
    if not isinstance(prompt, str):
        return f"no text in {columns.prompt!r}"
    if not prompt.strip():
        return f"empty text in {columns.prompt!r}"
    if isinstance(output_tokens, bool) or not isinstance(output_tokens, int | float):
        return f"no number in {columns.output_tokens!r}"
    if not math.isfinite(output_tokens) or output_tokens != int(output_tokens) or output_tokens < 1:
        return f"not a whole number above 0 in {columns.output_tokens!r}"
    return Row(
        prompt=prompt,
        model=str(record.get(columns.model) or ""),
        output_tokens=int(output_tokens),
        capped=record.get(columns.finish_reason) == "length",
    )


def _uniform(prompt: str, seed: int) -> float:
    """A number in [0, 1) that depends on the seed and on the normalised prompt only."""
    text = normalised(prompt).encode("utf-8", "replace")
    digest = hashlib.blake2b(text, digest_size=8, salt=str(seed).encode()[:16]).digest()
    return int.from_bytes(digest) / 2**64
