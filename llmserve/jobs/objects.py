"""OpenAI's file and batch objects, and the statuses of a batch.

    validating --> in_progress --> finalizing --> completed
        |               |
        |               +--> expired                     the window has passed; unfinished lines are in the error file
        +---------------+--> failed                      the input file has errors, named by line; or the disk has
        |                                                damaged input or results. Undamaged results are in the files
        +--> cancelling --> cancelled                    from validating and in_progress

A finalizing batch has the results of all lines: it can neither be cancelled nor expire.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from llmserve.errors import BadRequest

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
CHANGES: dict[Status, tuple[Status, ...]] = {
    "validating": ("in_progress", "failed", "cancelling", "expired"),
    "in_progress": ("finalizing", "failed", "expired", "cancelling"),
    "finalizing": ("completed",),
    "cancelling": ("cancelled",),
}
"""Statuses that may follow each status; after every other status none does."""
ACTIVE = tuple(CHANGES)
CANCELLABLE = tuple(status for status, following in CHANGES.items() if "cancelling" in following)

WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
WINDOW_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
WINDOW_S_MAX = 30 * 86400


def window_s(text: str) -> int:
    """Seconds of a completion window such as 24h or 30m. Raises BadRequest."""
    match = WINDOW.fullmatch(text)
    seconds = int(match[1]) * WINDOW_S[match[2]] if match else 0
    if not 0 < seconds <= WINDOW_S_MAX:
        raise BadRequest(
            f"`completion_window`: {text!r} is no time such as `24h`, `30m` or `90s`, of 30 days at most",
            param="completion_window",
            code="invalid_value",
        )
    return seconds


class ExpiresAfter(msgspec.Struct, frozen=True):
    """The field `expires_after`: seconds from a file's creation to its expiry."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=WINDOW_S_MAX)]


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class FileRow(msgspec.Struct, frozen=True):
    """A row of the table of files."""

    seq: int
    id: str
    key: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class LineError(msgspec.Struct, frozen=True):
    """An error in a line of an input file. line : counted from 1; None: an error of the whole file"""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRow(msgspec.Struct, frozen=True):
    """A row of the table of batches. Times are unix seconds."""

    seq: int
    id: str
    key: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: str | None
    output_expires_s: int | None
    idempotency_key: str | None
    asked: str
    status: Status
    epoch: int
    owner: int | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    total: int
    completed: int
    failed: int
    tokens: int
    errors: str | None
    output_file_id: str | None
    error_file_id: str | None

    def shown(self) -> dict[str, Any]:
        errors = msgspec.json.decode(self.errors) if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": msgspec.json.decode(self.metadata) if self.metadata else None,
        }
