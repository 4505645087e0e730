"""Rows of GET /admin/queue: the server makes them, and `llmserve queue` reads them without loading a server."""

from __future__ import annotations

from typing import Literal

import msgspec


class WaitingRow(msgspec.Struct, frozen=True):
    """Waiting requests of one model, share and bin. share : "": of nobody in particular

    oldest_s       seconds for which the oldest has waited
    next_starts_s  predicted seconds until the next of them starts; None: unknown, or no engine works
    """

    model: str
    share: str
    bin: int
    waiting: int
    oldest_s: float
    next_starts_s: float | None


ProgramState = Literal["running", "held", "waiting"]


class ProgramSeen(msgspec.Struct, frozen=True):
    """A program that has a request in the queue or on an engine, or whose tokens an engine keeps.

    program  as in the header x-llmserve-program.  parent : likewise; "" for none
    step     of its turn; 0: unknown
    since_s  seconds since the state began
    engine   "" while the program waits
    tokens   of its context
    tools    that its last answer has called; () unless it is held
    over_s   seconds until others may take its room, negative if they may; None: it is not held
    starts_s predicted seconds until its request starts; None: it does not wait, or nobody knows
    """

    program: str
    parent: str
    step: int
    state: ProgramState
    since_s: float
    engine: str
    tokens: int
    tools: tuple[str, ...] = ()
    over_s: float | None = None
    starts_s: float | None = None
