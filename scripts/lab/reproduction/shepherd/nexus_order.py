"""A fixed schedule for each engine, made ahead and followed whatever comes, as Nexus does (Shen et al., SOSP 2019).

An engine's cycle repeats: at each of its slots it runs one batch of the slot's model, the largest of at most the slot's
size that is in time; where there is none it idles until its next slot. From time to time another schedule replaces it,
known ahead. Shepherd compares with that (Section 7); nexus.py makes the plans that schedules follow.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmserve.scheduling.deadline_queue import ROUNDING_S, largest_feasible
from llmserve.scheduling.orders import Candidate, Key, MomentOrder


@dataclass(frozen=True, slots=True)
class Turn:
    """A slot of a cycle: at most so many requests of a model, begun at offset_s seconds, 0 <= offset_s < duty_s."""

    offset_s: float
    model: str
    batch_size: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What engines do from `from_s` on, until the next schedule.

    duty_s  seconds of each engine's cycle, which begins at from_s; > 0
    turns   of each engine, ascending by offset; an engine that is not named idles
    """

    from_s: float
    duty_s: Mapping[str, float]
    turns: Mapping[str, tuple[Turn, ...]]


class Nexus(MomentOrder):
    """schedules : ascending by from_s, at least one; before the first every engine idles."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self._schedules = tuple(schedules)
        self._asked: tuple[str, float] | None = None  # engine and time: every model that waits asks for the same slot
        self._answer: Turn | None = None

    def compose(self, candidate: Candidate, now_s: float) -> bool:
        turn = self._turn(candidate.engine.info.name, now_s)
        if turn is None or turn.model != candidate.model:
            return False
        most = min(candidate.most, turn.batch_size)
        candidate.count = largest_feasible((candidate.queue,), now_s, candidate.batch_s, most)
        return candidate.count > 0

    def key(self, candidate: Candidate, now_s: float) -> Key:
        return (-candidate.count,)

    def wake_at_s(self, engine: str, now_s: float) -> float | None:
        """When the engine's next slot begins, after the one that begins now, if any does."""
        for place in self._schedules_around(now_s, after=True):
            schedule = self._schedules[place]
            turns = schedule.turns.get(engine, ())
            if not turns:
                continue
            duty_s = schedule.duty_s[engine]
            passed_s = now_s + ROUNDING_S - schedule.from_s  # a slot is to begin after it
            at_s = min(
                [
                    schedule.from_s
                    + max(0, math.floor((passed_s - turn.offset_s) / duty_s) + 1) * duty_s
                    + turn.offset_s
                    for turn in turns
                ]
            )
            if at_s < self._until_s(place) - ROUNDING_S:
                return at_s
        return None

    def _turn(self, engine: str, now_s: float) -> Turn | None:
        """The slot that begins now."""
        if self._asked != (engine, now_s):
            self._asked, self._answer = (engine, now_s), self._find_turn(engine, now_s)
        return self._answer

    def _find_turn(self, engine: str, now_s: float) -> Turn | None:
        for place in self._schedules_around(now_s):
            schedule = self._schedules[place]
            turns = schedule.turns.get(engine, ())
            if not turns or now_s > self._until_s(place) - ROUNDING_S:
                continue
            duty_s = schedule.duty_s[engine]
            for turn in turns:
                cycles = round((now_s - schedule.from_s - turn.offset_s) / duty_s)
                if cycles >= 0 and abs(schedule.from_s + cycles * duty_s + turn.offset_s - now_s) <= ROUNDING_S:
                    return turn
        return None

    def _schedules_around(self, now_s: float, *, after: bool = False) -> range:
        """Places of the schedule that is in force, and of the next one or of all that come after."""
        place = bisect_right(self._schedules, now_s + ROUNDING_S, key=lambda schedule: schedule.from_s) - 1
        return range(max(0, place), len(self._schedules) if after else max(0, place + 1))

    def _until_s(self, place: int) -> float:
        """When the next schedule replaces this one."""
        return self._schedules[place + 1].from_s if place + 1 < len(self._schedules) else math.inf
