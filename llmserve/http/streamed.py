"""Bodies that are taken as they arrive. A client that sends faster than the disk writes is held back.

Such a body is large, and its client may be slow: it has BODY_S, and a second more for each BYTES_PER_S_MIN that came.
Between two parts no more than BODY_S may pass. Time for which the disk holds the client back does not count.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from llmserve.errors import RequestError

if TYPE_CHECKING:
    from llmserve.http.connection import Connection
    from llmserve.http.exchange import Exchange
    from llmserve.jobs.uploads import Upload

BODY_S = 60.0  # for a whole body in memory, or between two parts of a streamed one
BYTES_PER_S_MIN = 10_000
DISK = 4  # Connection.hold


def pass_on(connection: Connection, reading: Exchange, part: bytes) -> None:
    """Give a part of a body to what takes it."""
    upload = reading.upload
    assert upload is not None, "the body is kept in memory"
    now_s = connection.server.now_s()
    if upload.on_full is None:
        upload.on_full, upload.due_s = _Brake(connection, upload).set, now_s + BODY_S
    upload.due_s += len(part) / BYTES_PER_S_MIN
    try:
        upload.feed(part)
    except RequestError as error:
        reading.error = error
    if connection.due_s != math.inf:
        connection.due_s = min(now_s + BODY_S, upload.due_s)


class _Brake:
    """Holds a client back while the disk is slower."""

    def __init__(self, connection: Connection, upload: Upload) -> None:
        self._connection, self._upload = connection, upload
        self._since_s = 0.0

    def set(self, full: bool) -> None:
        connection, upload = self._connection, self._upload
        now_s = connection.server.now_s()
        if full:
            self._since_s, connection.due_s = now_s, math.inf
            connection.hold(DISK)
        else:
            upload.due_s += now_s - self._since_s
            connection.due_s = min(now_s + BODY_S, upload.due_s)
            connection.release(DISK)
