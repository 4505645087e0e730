"""Files for their owner's eyes only: the journal, the record, and keys."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger("llmserve")


def appending(path: Path) -> BinaryIO:
    """Open a file to append whole lines to. Only its owner can read a new file. Raises OSError.

    A last line without an end, left by a killed process, is ended first, so that new lines stand alone.
    """
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
    status = os.fstat(file.fileno())
    warn_if_shared(path, status)
    if stat.S_ISREG(status.st_mode) and status.st_size and _last_byte(path) != b"\n":
        file.write(b"\n")
    return file


def warn_if_shared(path: Path, status: os.stat_result) -> None:
    """Warn when others on this machine can read or change a regular file.

    A file of another user may give access to a group, to which this process belongs.
    """
    mode, others = ("600", 0o077) if status.st_uid == os.geteuid() else ("640", 0o007)
    if stat.S_ISREG(status.st_mode) and status.st_mode & others:
        log.warning("other users of this machine can read or change %s: run `chmod %s %s`", path, mode, path)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()
