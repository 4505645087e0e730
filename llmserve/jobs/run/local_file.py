"""The lines of a file of requests, and which of them have a result. OpenAI's formats of a batch's files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from llmserve.errors import ConfigError
from llmserve.gateway.endpoints import BATCH_PATHS
from llmserve.jobs.run.jsonl import other_encoding, read_line
from llmserve.wire.json_text import fault_of, is_too_deep, without_bom
from llmserve.wire.lenient_json import read

SHOWN_MOST = 20  # bad lines that a message names


class _Body(msgspec.Struct, frozen=True):
    """The fields of a body that the run needs: the model, and the limits of the answer."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None

    @property
    def tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_output_tokens or self.max_tokens


class Numbered(msgspec.Struct, frozen=True):
    """A line of the file.

    offset : where it begins.  size : its bytes.  tokens_max : limit of the answer's tokens, if given
    model : "": not named
    """

    custom_id: str
    offset: int
    size: int
    tokens_max: int | None
    model: str = ""


class _Result(msgspec.Struct):
    custom_id: str


def read_input(path: Path) -> list[Numbered]:
    """All lines of the file. Raises ConfigError that names the bad lines by number."""
    lines: list[Numbered] = []
    bad: list[str] = []
    seen: dict[str, int] = {}
    for number, offset, data in _lines(path):
        if number == 1 and (encoding := other_encoding(data)):
            raise ConfigError(f"{path} is {encoding}: write it as UTF-8")
        try:
            line = read_line(data)
        except msgspec.ValidationError as error:
            bad.append(f"line {number}: {error}")
            continue
        except msgspec.DecodeError as error:
            bad.append(f"line {number}: {error if is_too_deep(data) else fault_of(without_bom(data), error).message}")
            continue
        body = read(_Body, bytes(line.body)) or _Body()
        if line.method != "POST" or line.url not in BATCH_PATHS:
            bad.append(f"line {number}: {line.method} {line.url}: only POST to {', '.join(BATCH_PATHS)} is possible")
        elif line.custom_id in seen:
            bad.append(f"line {number}: its custom_id {line.custom_id!r} is that of line {seen[line.custom_id]}")
        else:
            seen[line.custom_id] = number
            lines.append(Numbered(line.custom_id, offset, len(data), body.tokens, body.model or ""))
    if bad:
        more = [f"and {len(bad) - SHOWN_MOST} more"] if len(bad) > SHOWN_MOST else []
        raise ConfigError("\n  ".join([f"{path} has bad lines; nothing was run:", *bad[:SHOWN_MOST], *more]))
    return lines


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset, bytes) of each line that is not empty."""
    try:
        with open(path, "rb") as file:
            offset = 0
            for number, data in enumerate(file, 1):
                if data.strip():
                    yield number, offset, data
                offset += len(data)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def results_of(path: Path) -> list[str]:
    """The custom_ids that have a result in the file; [] without one. A torn last line is cut off.

    Raises ConfigError when the file is none of results.
    """
    if not path.exists():
        return []
    done, end = [], 0
    for number, offset, data in _lines(path):
        if not data.endswith(b"\n"):
            break
        result = read(_Result, data)
        if result is None:
            raise ConfigError(f"{path} is no file of results: line {number} has no custom_id")
        done.append(result.custom_id)
        end = offset + len(data)
    if end < path.stat().st_size:
        os.truncate(path, end)
    return done
