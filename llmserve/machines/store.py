"""What a cluster must not forget, in a folder of the head's node: a file for each key, for its owner's eyes only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from urllib.parse import quote


class Store:
    """folder : made at the first write. A value is whole on the disk, or not there, whenever the machine stops."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: str) -> bytes | None:
        """None: nothing is stored under the key."""
        try:
            return self._file(key).read_bytes()
        except FileNotFoundError:
            return None

    def save(self, key: str, value: bytes | None) -> None:
        """value : None: forget it"""
        file = self._file(key)
        if value is None:
            file.unlink(missing_ok=True)
            return
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        written = file.with_name(f"{file.name}.new")
        with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            stream.write(value)
            stream.flush()
            os.fsync(stream.fileno())
        written.replace(file)

    def clear(self) -> None:
        """Forget everything."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, key: str) -> Path:
        return self._folder / quote(key, safe="")
