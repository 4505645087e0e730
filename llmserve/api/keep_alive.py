"""What a stream says before the engine does: comments that tell a place, and errors when status 200 has been sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from llmserve.cluster.places import Place
from llmserve.engines.error_objects import error_in

EVENT_STREAM = "text/event-stream"


def comment_of(place: Place | None, *, running: bool) -> bytes:
    """The text of a comment. place : None while the request runs, or its length is being predicted"""
    if place is None:
        return b"running" if running else b"waiting"
    if place.helpless:
        return b"position %d, waiting for an engine" % place.position
    if place.wait_s is None:
        return b"position %d" % place.position
    return b"position %d, about %.0f s" % (place.position, place.wait_s)


def counts_events(headers: Mapping[str, str]) -> bool:
    """Whether the client is one that ends a stream in which only comments come, and takes unknown events at any place.

    headers : of the request.  Codex skips comments before its timer sees them, and ignores events that it does not know
    """
    return "codex" in headers.get("user-agent", "").lower()


def error_of_body(status: int, body: bytes) -> dict[str, Any]:
    """An engine's error answer as the object of an error event. OpenAI's form is kept, other bodies become messages."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        told = None
    if isinstance(told, dict) and isinstance(told.get("error"), dict):
        return told
    error = error_in(body)
    text = (error.message if error is not None else "") or body.decode(errors="replace")
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "param": None, "code": status}}
