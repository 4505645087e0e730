"""A program, its turn, and a request as a step of the turn."""

from __future__ import annotations

import math

PATIENCE = 4.0  # of the mean wait: so long a wait counts as a factor e of work
MEMORY = 256  # turns after which the weight of an earlier one has fallen to a third
LEAST_SHARE = 1e-9  # of the mean work; keeps keys finite


class Pace:
    """What the keys of one model's turns are measured in.

    patience : see programs.py

    wait_s  mean wait of the turns that had to wait
    work_s  mean work of a turn, as expected when its requests arrive
    """

    __slots__ = ("_arrivals", "_waits", "patience", "wait_s", "work_s")

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.wait_s = self.work_s = 0.0
        self._waits = self._arrivals = 0

    def waited(self, seconds: float) -> None:
        self._waits = min(self._waits + 1, MEMORY)
        self.wait_s += (seconds - self.wait_s) / self._waits

    def arrived(self, seconds: float) -> None:
        self._arrivals = min(self._arrivals + 1, MEMORY)
        self.work_s += (seconds - self.work_s) / self._arrivals


class Program:
    """A program that is known: a session of an agent, or of one of its sub-agents.

    present  its requests that wait or run
    kind     of its last request
    from_s   arrival of its turn.  step : that the turn has come to, from 1 on; 0: no turn has begun
    tools    that its last answer has called; (): none, so its turn has ended
    ended_s  when that answer ended.  tokens : of its context then
    engine   where its last request started; "": nowhere yet
    """

    __slots__ = ("ended_s", "engine", "from_s", "kind", "present", "step", "tokens", "tools")

    def __init__(self) -> None:
        self.present = self.kind = self.step = 0
        self.from_s = self.ended_s = self.tokens = 0.0
        self.tools: tuple[str, ...] = ()
        self.engine = ""


class Turn:
    """A request as a step of a turn. A request without a program is a turn of one step.

    program    None for a request without one
    from_s     arrival of the turn
    is_first   whether the request began the turn
    further_s  expected seconds of a slot for the steps after this one
    holder     of its tokens in the ledger of its engine; 0: none, as the request does not run
    """

    __slots__ = ("_pace", "from_s", "further_s", "holder", "is_first", "program")

    def __init__(self, pace: Pace, from_s: float, program: Program | None, *, is_first: bool) -> None:
        self._pace, self.from_s, self.program, self.is_first = pace, from_s, program, is_first
        self.further_s = 0.0
        self.holder = 0

    def waited(self, seconds: float) -> None:
        """The request starts, after so many seconds."""
        if self.is_first and seconds > 0.0:
            self._pace.waited(seconds)

    def key_s(self, service_s: float) -> float:
        """Where the request stands: the smallest is first; see programs.py. service_s : of the request itself"""
        pace = self._pace
        if pace.work_s <= 0.0 or pace.wait_s <= 0.0:
            return self.from_s
        share = max(LEAST_SHARE, (service_s + self.further_s) / pace.work_s)
        return self.from_s + pace.patience * pace.wait_s * math.log(share)
