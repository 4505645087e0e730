"""Reads what a job needs before its lines can run: where each line is, and whether it has a safe result."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmserve.jobs.run.input_index import Index, Report
from llmserve.jobs.run.item_queue import Shapes
from llmserve.jobs.run.jsonl import is_expired, is_row, number_of
from llmserve.jobs.run.validation import ANSWER_TOKENS
from llmserve.jobs.store.folder import Appended
from llmserve.jobs.store.rows import Part, Segment

READ_BYTES = 1 << 20


class InputDamaged(Exception):
    """The bytes of a line are not those that were uploaded."""


@dataclass(slots=True)
class Loaded:
    """The lines of a job in memory: some 20 bytes for each.

    path : of the input.  models : that its lines name
    offsets, sizes, checksums : of the lines, (lines,)
    waiting : (lines,) whether the line has no safe result
    completed, failed : lines with one.  expired : of these, lines that were not executed in time
    damaged : segments whose bytes are not those that were written
    """

    path: Path
    models: Sequence[str]
    offsets: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint32]
    checksums: npt.NDArray[np.uint32]
    waiting: npt.NDArray[np.bool_]
    shapes: Shapes | None  # of the lines that wait; None once they are arranged
    mean_tokens: float  # of all lines, by their limits
    completed: int
    failed: int
    expired: int
    damaged: Sequence[Salvaged] = field(default=())


@dataclass(frozen=True, slots=True)
class Salvaged:
    """A damaged segment, and the places of its readable rows."""

    segment: Segment
    rows: Sequence[slice]


def _tokens(records: Index) -> npt.NDArray[np.float64]:
    """By the limits of answers. A line without a limit counts as ANSWER_TOKENS long."""
    tokens = records["output_tokens_max"].astype(np.float64)
    tokens[tokens == 0] = ANSWER_TOKENS
    return tokens


def load(folder: Path, part: Part, report: Report, index: Index, batch_id: str, segments: Iterable[Segment]) -> Loaded:
    """Find out which lines have a safe result. Runs in a thread. Raises OSError.

    A result that follows the safe bytes of its segment does not count.
    """
    done = np.zeros(len(index), bool)
    counts, expired, damaged = {"output": 0, "error": 0}, 0, list[Salvaged]()
    for segment in segments:
        path = folder / segment.name
        if _is_whole(path, segment, batch_id):
            for _, row in _rows(path, segment):
                number = number_of(row, batch_id)
                assert not done[number], f"line {number} has two results"
                done[number] = True
                counts[segment.kind] += 1
                expired += is_expired(row)
        else:
            damaged.append(Salvaged(segment, _salvaged(path, segment, done, batch_id)))
    waiting = np.flatnonzero(~done)
    records, tokens = index[waiting], _tokens(index)
    return Loaded(
        folder / part.name,
        report.models,
        index["offset"].copy(),
        index["bytes"].copy(),
        index["crc"].copy(),
        ~done,
        Shapes(waiting, tokens[waiting], records["prefix"].copy(), records["model"].copy()),
        float(tokens.mean()) if len(tokens) else 0.0,
        counts["output"],
        counts["error"],
        expired,
        damaged,
    )


def _is_whole(path: Path, segment: Segment, batch_id: str) -> bool:
    """Whether the bytes of a segment are those that were written."""
    crc, left = 0, segment.safe_bytes
    try:
        with open(path, "rb") as file:
            while left and (data := file.read(min(left, READ_BYTES))):
                crc, left = zlib.crc32(data, crc), left - len(data)
    except FileNotFoundError:
        return not segment.safe_bytes
    if left or segment.crc not in (None, crc):
        return False
    return segment.crc is not None or all(_is_of(row, batch_id) for _, row in _rows(path, segment))


def _is_of(row: bytes, batch_id: str) -> bool:
    with contextlib.suppress(ValueError):
        return number_of(row, batch_id) >= 0 and row.endswith(b"\n")
    return False


def _rows(path: Path, segment: Segment) -> Iterator[tuple[int, bytes]]:
    """The rows of a segment, each with the place where it begins."""
    place = 0
    with open(path, "rb", buffering=READ_BYTES) as file:
        while place < segment.safe_bytes and (row := file.readline(segment.safe_bytes - place)):
            yield place, row
            place += len(row)


def _salvaged(path: Path, segment: Segment, done: npt.NDArray[np.bool_], batch_id: str) -> list[slice]:
    """Where the rows of a damaged segment are that can be read, of lines that have no other."""
    kept: list[slice] = []
    with contextlib.suppress(FileNotFoundError):
        for place, row in _rows(path, segment):
            with contextlib.suppress(ValueError):
                number = number_of(row, batch_id)
                if row.endswith(b"\n") and is_row(row) and 0 <= number < len(done) and not done[number]:
                    done[number] = True
                    kept.append(slice(place, place + len(row)))
    return kept


def copy_salvaged(folder: Path, salvaged: Salvaged, file: Appended) -> None:
    """Write what is left of a damaged segment to a new file. Runs in a thread. Raises OSError."""
    if salvaged.rows:
        with open(folder / salvaged.segment.name, "rb") as damaged:
            for place in salvaged.rows:
                damaged.seek(place.start)
                file.write(damaged.read(place.stop - place.start))
    file.sync()
    file.close()


def read_lines(loaded: Loaded, numbers: Iterable[int]) -> list[bytes]:
    """The bytes of these lines. Runs in a thread. Raises OSError, and InputDamaged."""
    try:
        with open(loaded.path, "rb") as file:
            lines = []
            for number in numbers:
                file.seek(int(loaded.offsets[number]))
                line = file.read(int(loaded.sizes[number]))
                if zlib.crc32(line) != loaded.checksums[number]:
                    raise InputDamaged(f"the line at byte {loaded.offsets[number]:,} of the input has changed")
                lines.append(line)
            return lines
    except FileNotFoundError:
        raise InputDamaged("the input file is gone") from None
