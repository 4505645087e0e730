"""Why a server of this library does not serve a request."""

from __future__ import annotations


class Refusal(Exception):
    """A request that is not served. The handler makes the answer (Handler.refusal in exchange.py).

    status         of HTTP
    reason         one word for programs, see the raisers
    message        one sentence for people
    retry_after_s  when the client may try again; None: not known, or never
    """

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
