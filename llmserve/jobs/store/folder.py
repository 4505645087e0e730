"""The folder of the store: uploads and results, in files of their owner's eyes only.

Each name begins with the generation of the server that made the file. A file that no row of the database names belongs
to an upload, or to results that do not count yet. After its server's death such a file is rubbish.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from llmserve.errors import ConfigError, RequestError

INDEX = ".index"


class NoRoom(OSError):
    """An upload has no room here. refusal : what its client is told"""

    def __init__(self, refusal: RequestError) -> None:
        super().__init__(errno.ENOSPC, refusal.message)
        self.refusal = refusal


class Folder:
    """The files of the store. The constructor raises ConfigError when the folder cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()
        self.generation = 0
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"store: cannot use the folder {self.path}: {error}") from error

    def create(self) -> Appended:
        """Make an empty file. Raises OSError."""
        name = f"{self.generation}-{secrets.token_hex(8)}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        return Appended(self, name, os.open(self.path / name, flags, 0o600))

    def sync(self) -> None:
        """Write the list of names to the disk. Raises OSError."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def index(self, name: str, endpoint: str) -> Path:
        """Where the index of the lines of a file is. name : of the file in this folder"""
        return self.path / f"{name}{endpoint.replace('/', '-')}{INDEX}"

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, as far as that is possible: a sweep removes the rest."""
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def sweep(self, alive: Collection[int], needed: Collection[str]) -> int:
        """Remove what dead servers have left, and indexes of files that are gone. Returns the number of files.

        alive : generations.  needed : names that rows have, read after `alive`
        """
        rubbish = [name for name in os.listdir(self.path) if _is_rubbish(name, alive, needed)]
        self.remove(rubbish)
        return len(rubbish)


def _is_rubbish(name: str, alive: Collection[int], needed: Collection[str]) -> bool:
    if INDEX in name:
        return name.partition(".jsonl")[0] + ".jsonl" not in needed
    generation, separator, _ = name.partition("-")
    return bool(separator) and generation.isdecimal() and int(generation) not in alive and name not in needed


class Appended:
    """A file that grows. Methods may be called in a thread, one at a time. Raises OSError.

    size, crc : of the bytes written.  counted, counted_crc : of those of which the database knows
    before_write : called with the bytes that are about to be written; may raise OSError
    """

    def __init__(self, folder: Folder, name: str, descriptor: int) -> None:
        self.name = name
        self.size = self.counted = 0
        self.crc = self.counted_crc = 0
        self.before_write: Callable[[int], None] = lambda size: None
        self._folder = folder
        self._descriptor: int | None = descriptor
        self._named = False  # the folder's list of names has been written, too

    def write(self, data: bytes) -> None:
        assert self._descriptor is not None, "the file is closed"
        self.before_write(len(data))
        view = memoryview(data)
        while view:
            written = os.write(self._descriptor, view)
            self.crc = zlib.crc32(view[:written], self.crc)
            self.size += written
            view = view[written:]

    def sync(self) -> None:
        """Write everything to the disk."""
        assert self._descriptor is not None, "the file is closed"
        os.fsync(self._descriptor)
        if not self._named:
            self._folder.sync()
            self._named = True

    def cut(self) -> None:
        """Drop what does not count: a write failed half-way."""
        assert self._descriptor is not None, "the file is closed"
        if self.size != self.counted:
            os.ftruncate(self._descriptor, self.counted)
            os.lseek(self._descriptor, self.counted, os.SEEK_SET)
            self.size, self.crc = self.counted, self.counted_crc

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def discard(self) -> None:
        self.close()
        self._folder.remove([self.name])
