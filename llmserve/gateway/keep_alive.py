"""What a stream says before the engine does: comments that tell its position, and errors after status 200."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.estimates.estimator import QueuePosition

EVENT_STREAM = "text/event-stream"


def comment_of(queued: QueuePosition | None, *, running: bool) -> bytes:
    """The text of a comment. queued : None while the request runs, or its length is being predicted"""
    if queued is None:
        return b"running" if running else b"waiting"
    if queued.no_engine:
        return b"position %d, waiting for an engine" % queued.position
    if queued.wait_s is None:
        return b"position %d" % queued.position
    return b"position %d, about %.0f s" % (queued.position, queued.wait_s)


def counts_events(headers: Mapping[str, str]) -> bool:
    """Whether the client is one that ends a stream in which only comments come, and takes unknown events at any place.

    headers : of the request.  Codex skips comments before its timer sees them, and ignores events that it does not know
    """
    return "codex" in headers.get("user-agent", "").lower()
