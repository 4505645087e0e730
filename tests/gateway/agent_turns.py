"""Turns of agents' conversations, and streams of events as both APIs have them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

Fields = dict[str, Any]


class Turn(NamedTuple):
    """path : with the query.  answered : of the engine, a stream if it asks for one.  tokens : of the answer"""

    path: str
    asked: bytes
    answered: bytes
    tokens: int


def stream_of(events: list[Fields], *, numbered: bool = False) -> bytes:
    lines = []
    for number, event in enumerate(events):
        event = {**event, "sequence_number": number} if numbered else event
        lines.append(f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n")
    return "".join(lines).encode()
