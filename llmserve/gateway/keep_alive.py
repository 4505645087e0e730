"""What a stream says before the engine does: comments that tell a place, and errors when status 200 has been sent."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.estimates.estimator import Place

EVENT_STREAM = "text/event-stream"


def comment_of(place: Place | None, *, running: bool) -> bytes:
    """The text of a comment. place : None while the request runs, or its length is being predicted"""
    if place is None:
        return b"running" if running else b"waiting"
    if place.no_engine:
        return b"position %d, waiting for an engine" % place.position
    if place.wait_s is None:
        return b"position %d" % place.position
    return b"position %d, about %.0f s" % (place.position, place.wait_s)


def counts_events(headers: Mapping[str, str]) -> bool:
    """Whether the client is one that ends a stream in which only comments come, and takes unknown events at any place.

    headers : of the request.  Codex skips comments before its timer sees them, and ignores events that it does not know
    """
    return "codex" in headers.get("user-agent", "").lower()
