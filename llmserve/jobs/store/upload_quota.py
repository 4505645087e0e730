"""Uploads that arrive: their bytes count from the first on, and they leave room on the disk for results.

An upload has no time limit, so an unfinished upload must not take the room that batches need for results.
"""

from __future__ import annotations

import shutil
from weakref import WeakSet

from llmserve.errors import BadRequest, RateLimited, Unavailable
from llmserve.jobs.store.files import FileLimits
from llmserve.jobs.store.folder import Appended, Folder, NoRoom

AT_ONCE_MAX = 16  # of one key
RESERVE_SHARE, RESERVE_BYTES_MAX = 0.1, 1 << 30  # of the disk, which uploads leave to results
RETRY_AFTER_S = 10.0


class UploadQuota:
    """The room of uploads on the disk and below the limits. stored_bytes : of all complete files, as known here"""

    def __init__(self, folder: Folder, limits: FileLimits) -> None:
        self._folder, self._limits = folder, limits
        self._arriving: dict[str, WeakSet[Appended]] = {}  # by key
        self.stored_bytes = 0

    def new_file(self, key: str) -> Appended:
        """An empty file for an upload. Its writes raise OSError when there is no room. Raises OSError, RateLimited."""
        of_key = self._arriving.setdefault(key, WeakSet())
        if sum([file.is_open for file in of_key]) >= AT_ONCE_MAX:
            text = f"this key has {AT_ONCE_MAX} uploads in progress, the most allowed"
            raise RateLimited(text, code="uploads_max", retry_after_s=RETRY_AFTER_S)
        file = self._folder.create()
        file.before_write = self._check_room
        of_key.add(file)
        return file

    def _check_room(self, size: int) -> None:
        """Runs in a thread. Raises OSError, whose text the client sees."""
        disk = shutil.disk_usage(self._folder.path)
        reserve = min(RESERVE_BYTES_MAX, int(RESERVE_SHARE * disk.total))
        if disk.free < reserve + size:
            text = f"the disk has {disk.free:,} bytes left, of which {reserve:,} are for results of batches"
            raise NoRoom(Unavailable(text, code="disk", retry_after_s=RETRY_AFTER_S))
        most = self._limits.bytes_max
        arriving = sum([file.size for files in list(self._arriving.values()) for file in list(files) if file.is_open])
        if most and self.stored_bytes + arriving + size > most:
            text = (
                f"all files together, with those that arrive, have {self.stored_bytes + arriving:,} of {most:,} bytes "
                "(--batch-bytes-max): delete some"
            )
            raise NoRoom(BadRequest(text, code="files_bytes_max"))
