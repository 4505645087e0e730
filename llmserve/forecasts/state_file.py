"""The file in which a server keeps what it has learnt, `DIR/learnt` of `--state DIR`.

    llmserve-learnt 1          the format's version
    9f86d081884c7d65...        BLAKE2 checksum of everything below
    {"learners": ...}          one line of JSON; {"array": [type, shape]} stands for an array
    ...                        the bytes of the arrays, in order

The file is written beside the old one and then takes its place, so a crash leaves the old or the new file. A lock
keeps a second server away from the folder, and ends with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.errors import ConfigError

VERSION = 1
MAGIC = "llmserve-learnt"
ARRAYS_AT_ONCE, PAUSE_S = 16, 0.0001  # after some arrays, another thread, which waits to run, gets its turn
NUMBERS = "biuf"  # numpy's kinds of types that the file may hold

log = logging.getLogger("llmserve")


class StateFile:
    """See `opened`. The folder is this object's alone while it is open."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "learnt"
        self._folder = folder
        self._written = b""  # checksum of the last state written
        self._size = 0  # bytes of the last state written

    def read(self) -> dict[str, Any] | None:
        """The state; None when there is none yet. Raises ValueError, or OSError, for a file that cannot be used."""
        try:
            return decoded(self.path.read_bytes())
        except FileNotFoundError:
            return None

    def set_aside(self, why: str) -> None:
        """Warn that the server starts with nothing learnt, and keep the file under another name."""
        aside = self.path.with_suffix(".bad")
        kept = f"; the file is now {aside}"
        try:
            self.path.replace(aside)
        except OSError as error:
            kept = f"; it could not be set aside: {error.strerror}"
        log.warning("state: %s cannot be used, so the server starts with nothing learnt: %s%s", self.path, why, kept)

    def write(self, state: dict[str, Any]) -> int:
        """Replace the file, unless the same state was written last. Returns its bytes. Raises OSError. May be called in
        a thread.
        """
        parts, checksum = encoded(state)
        if checksum == self._written:
            return self._size
        new = self.path.with_suffix(".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)
        _sync(self._folder)
        self._written, self._size = checksum, sum([len(part) for part in parts])
        return self._size


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[StateFile]:
    """Make the folder if there is none, and lock it. Raises ConfigError when it cannot be used."""
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        raise ConfigError(f"state: cannot write to {folder}: {error}") from error
    try:
        _try(folder, lock)
        yield StateFile(folder)
    finally:
        os.close(lock)  # ends the lock


def _try(folder: Path, lock: int) -> None:
    """Take the lock, and write a file. Raises ConfigError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        other = f"another server (process {pid})" if pid.isdecimal() else "another server"
        raise ConfigError(f"state: {other} uses {folder}; each server needs a folder of its own") from error
    except OSError as error:
        raise ConfigError(f"state: cannot lock {folder}: {error.strerror}") from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        trial = folder / "learnt.new"
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as error:
        raise ConfigError(f"state: cannot write to {folder}: {error.strerror}") from error


def _sync(folder: Path) -> None:
    """Write the folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- the format -----------------------------------------------------------------------------------------------------


def encoded(state: dict[str, Any]) -> tuple[list[bytes | memoryview], bytes]:
    """The parts of the file in order, and the checksum. Arrays are not copied: other threads can run meanwhile."""
    arrays: list[memoryview] = []

    def placed(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray) or value.dtype.kind not in NUMBERS:
            raise TypeError(f"a state cannot hold {value!r}")
        whole = np.ascontiguousarray(value)
        if len(arrays) % ARRAYS_AT_ONCE == 0:
            time.sleep(PAUSE_S)
        arrays.append(whole.reshape(-1).view(np.uint8).data)
        return {"array": [whole.dtype.str, list(value.shape)]}

    head = json.dumps(state, default=placed).encode() + b"\n"
    checksum = blake2b(head, digest_size=32)
    for array in arrays:
        checksum.update(array)
    first = f"{MAGIC} {VERSION}\n{checksum.hexdigest()}\n".encode()
    return [first, head, *arrays], checksum.digest()


def decoded(data: bytes) -> dict[str, Any]:
    """The state in the bytes of a file. Raises ValueError, which says what is wrong."""
    first, _, rest = data.partition(b"\n")
    magic, _, version = first.decode("ascii", "replace").partition(" ")
    if magic != MAGIC:
        raise ValueError("it is no file of --state")
    if version != str(VERSION):
        raise ValueError(f"it has version {version} of the format; this server reads version {VERSION}")
    checksum, _, content = rest.partition(b"\n")
    if blake2b(content, digest_size=32).hexdigest().encode() != checksum:
        raise ValueError("it is damaged: its checksum is wrong")
    head, _, body = content.partition(b"\n")
    at = 0

    def with_array(part: dict[str, Any]) -> Any:
        nonlocal at
        if list(part) != ["array"]:
            return part
        kind, shape = part["array"]
        value = np.frombuffer(body, np.dtype(kind), math.prod(shape), offset=at).reshape(shape).copy()
        at += value.nbytes
        return value

    state: dict[str, Any] = json.loads(head, object_hook=with_array)  # called in the order of the arrays
    return state
