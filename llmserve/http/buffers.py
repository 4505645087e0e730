"""Bytes that clients keep in the server's memory: bodies of requests, and answers that are not read."""

from __future__ import annotations

from llmserve.http.errors import Refusal

LARGE_BYTES = 128 << 10  # glibc gives smaller bodies to the next request


class Buffers:
    """Bytes in memory, by holder.

    A holder has no more than what is still free: one alone gets half of the buffers, two a third each. So no client
    takes all, whatever the others do.
    body_bytes    of all requests
    unread_bytes  of all answers, at the last sweep
    freed_bytes   of large bodies and of connections, since memory was given back to the system
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.body_bytes = self.unread_bytes = self.freed_bytes = 0
        self.kept: dict[str, int] = {}  # bytes of requests, by holder

    @property
    def used_bytes(self) -> int:
        return self.body_bytes + self.unread_bytes

    @property
    def free_bytes(self) -> int:
        return self.bytes_max - self.body_bytes - self.unread_bytes

    def keep(self, holder: str, size: int) -> Refusal | None:
        """Count bytes of a body. Returns the refusal of a holder that would have too many, which are counted, too."""
        self.body_bytes += size
        self.kept[holder] = held = self.kept.get(holder, 0) + size
        if held <= self.bytes_max - self.body_bytes - self.unread_bytes:
            return None
        return Refusal(503, "buffers_full", "too many bytes of your requests are in flight", retry_after_s=1.0)

    def release(self, holder: str, size: int) -> None:
        """Count the bytes of a body that has left the memory."""
        self.body_bytes -= size
        if held := self.kept.pop(holder) - size:
            self.kept[holder] = held
        if size > LARGE_BYTES:
            self.freed_bytes += size
