"""Instances and plans as JSON files. What is wrong in one is named by its place in the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from llmserve.errors import ConfigError
from llmserve.spelling import nearest

S = TypeVar("S", bound=msgspec.Struct)
Parts = Mapping[str, type[msgspec.Struct]]
"""Of a file's object: how the places of its parts begin, such as "streams[", and what stands there."""


def read(path: str | Path, kind: type[S], parts: Parts, what: str) -> S:
    """The object of this kind in a file. what : the file is, in messages. Raises ConfigError."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from error
    return _decoded(text, kind, parts, f"the {what} {path}")


def _decoded(text: bytes, kind: type[S], parts: Parts, where: str) -> S:
    """Raises ConfigError, its message beginning with `where`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        place = place.rstrip("`").removeprefix(".")
        if (unknown := re.fullmatch(r"Object contains unknown field `(.+)`", what)) is not None:
            owner = next((part for begin, part in parts.items() if place.startswith(begin)), kind)
            what = f"unknown key {unknown[1]!r}{nearest(unknown[1], owner.__struct_fields__)}"
        raise ConfigError(f"{where}: {place + ': ' if place else ''}{what[0].lower()}{what[1:]}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error


def write(path: str | Path, value: msgspec.Struct, what: str) -> None:
    """The value, as indented JSON. what : the file is, in messages. Raises ConfigError."""
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(value, enc_hook=_listed)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the {what} {path}: {error.strerror}") from error


def _listed(value: Any) -> Any:
    """What JSON does not know: columns that are arrays."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError(f"there is no JSON for {type(value)}")  # msgspec wants this of its hooks
