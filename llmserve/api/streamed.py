"""Bodies that are taken as they arrive. A client that sends faster than the disk writes is held back."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from llmserve.errors import RequestError

if TYPE_CHECKING:
    from llmserve.api.connection import Connection
    from llmserve.api.exchange import Exchange

BODY_S = 60.0  # for a whole body in memory, or between two parts of a streamed one


def pass_on(connection: Connection, reading: Exchange, part: bytes) -> None:
    """Give a part of a body to what takes it. The body may take long; its parts may not."""
    upload = reading.upload
    assert upload is not None, "the body is kept in memory"
    upload.on_full = partial(_hold_back, connection)
    try:
        upload.feed(part)
    except RequestError as error:
        reading.error = error
    if connection.due_s != math.inf:
        connection.due_s = connection.server.now_s() + BODY_S


def _hold_back(connection: Connection, full: bool) -> None:
    if connection.transport.is_closing():
        return
    if full:
        connection.due_s = math.inf
        connection.transport.pause_reading()
    else:
        connection.due_s = connection.server.now_s() + BODY_S
        connection.transport.resume_reading()
