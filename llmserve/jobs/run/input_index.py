"""The index of an input file: what a check has found, and where each line is.

The index lies beside the file, for all batches of the file and endpoint: a file is checked once. An index can be made
again at any time, so a damaged one counts as missing.

    MAGIC, bytes of the head (4), head (JSON), records, digest of all before (16)
"""

from __future__ import annotations

import contextlib
import os
import secrets
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from llmserve.jobs.objects import LineError

MAGIC = b"llmserve lines 1\n"
DIGEST_BYTES = 16

RECORD = np.dtype(
    [
        ("offset", np.uint32),
        ("bytes", np.uint32),
        ("crc", np.uint32),
        ("output_tokens_max", np.uint32),
        ("prefix", np.uint64),
        ("model", np.uint16),
    ]
)
"""One line: where it is, its checksum, the client's limit of the answer (0: none), hash of its opening, its model."""

Index = npt.NDArray[np.void]
EMPTY: Index = np.zeros(0, RECORD)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a check beside the bytes of the file.

    size : bytes of the file.  crc : of them; None: unknown
    """

    endpoint: str
    size: int
    crc: int | None
    line_bytes_max: int
    prompt_chars_max: int
    lines_max: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check.

    lines : requests in the file.  tokens : of all prompts and answers, estimated.  errors : the first ERRORS_MAX
    models : named in lines; a record has the place of its model in this list
    """

    lines: int
    tokens: int
    errors: list[LineError]
    models: list[str] = []


class _Head(msgspec.Struct, frozen=True):
    rules: Rules
    report: Report


def write(path: Path, rules: Rules, report: Report, records: Index) -> None:
    """Replace the index, and write it to the disk. Raises OSError."""
    head = msgspec.json.encode(_Head(rules, report))
    data = b"".join([MAGIC, len(head).to_bytes(4), head, records.tobytes()])
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data + _digest(data))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def read(path: Path, rules: Rules) -> tuple[Report, Index] | None:
    """The index of a check by these rules; None: there is none, or it is damaged. Raises OSError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    text, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if not data.startswith(MAGIC) or digest != _digest(text):
        return None
    begin = len(MAGIC) + 4
    end = begin + int.from_bytes(text[len(MAGIC) : begin])
    try:
        head = msgspec.json.decode(text[begin:end], type=_Head)
    except msgspec.DecodeError:
        return None
    return (head.report, np.frombuffer(text, RECORD, offset=end)) if head.rules == rules else None


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
