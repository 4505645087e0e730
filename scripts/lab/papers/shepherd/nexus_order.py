"""An order that follows a fixed schedule for each engine, as Nexus does (Shen et al., SOSP 2019).

Each engine repeats a cycle. In each slot the engine runs one batch of the slot's model: the largest batch that is in
time, up to the slot's size. Without such a batch the engine idles until its next slot. Schedules replace each other at
times that are known ahead. Shepherd compares with Nexus (Section 7); nexus.py makes the plans.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmserve.scheduling.choice.orders import Candidate, Key, MomentOrder
from llmserve.scheduling.queues.deadline_queue import ROUNDING_S, largest_feasible
from papers.shepherd.nexus import Cycle, Slot

IDLE = Cycle(0.0, ())


@dataclass(frozen=True, slots=True)
class Schedule:
    """The cycles of the engines, which begin at from_s and repeat until the next schedule. Other engines idle."""

    from_s: float
    cycles: Mapping[str, Cycle]


class Nexus(MomentOrder):
    """schedules : ascending by from_s, at least one; before the first schedule every engine idles."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self._schedules = tuple(schedules)
        self._cached_for: tuple[str, float] | None = None  # engine and time: the slot is the same for every model
        self._cached: Slot | None = None

    def compose(self, candidate: Candidate, now_s: float) -> bool:
        slot = self._slot(candidate.engine.info.name, now_s)
        if slot is None or slot.model != candidate.model:
            return False
        most = min(candidate.most, slot.batch_size)
        candidate.count = largest_feasible((candidate.queue,), now_s, candidate.batch_s, most)
        return candidate.count > 0

    def key(self, candidate: Candidate, now_s: float) -> Key:
        return (-candidate.count,)

    def wake_at_s(self, engine: str, now_s: float) -> float | None:
        """Return the start of the engine's next slot that begins after now_s."""
        for place in self._schedules_around(now_s, after=True):
            from_s = self._schedules[place].from_s
            cycle = self._schedules[place].cycles.get(engine, IDLE)
            passed_s = now_s + ROUNDING_S - from_s  # the slot begins later
            starts_s = [
                from_s
                + max(0, math.floor((passed_s - slot.offset_s) / cycle.duty_s) + 1) * cycle.duty_s
                + slot.offset_s
                for slot in cycle.slots
            ]
            if starts_s and min(starts_s) < self._until_s(place) - ROUNDING_S:
                return min(starts_s)
        return None

    def _slot(self, engine: str, now_s: float) -> Slot | None:
        """Return the slot that begins now."""
        if self._cached_for != (engine, now_s):
            self._cached_for, self._cached = (engine, now_s), self._find_slot(engine, now_s)
        return self._cached

    def _find_slot(self, engine: str, now_s: float) -> Slot | None:
        for place in self._schedules_around(now_s):
            from_s = self._schedules[place].from_s
            cycle = self._schedules[place].cycles.get(engine, IDLE)
            if now_s > self._until_s(place) - ROUNDING_S:
                continue
            for slot in cycle.slots:
                cycles = round((now_s - from_s - slot.offset_s) / cycle.duty_s)
                if cycles >= 0 and abs(from_s + cycles * cycle.duty_s + slot.offset_s - now_s) <= ROUNDING_S:
                    return slot
        return None

    def _schedules_around(self, now_s: float, *, after: bool = False) -> range:
        """Return the places of the current and the next schedule; after: of all later schedules, too."""
        place = bisect_right(self._schedules, now_s + ROUNDING_S, key=lambda schedule: schedule.from_s) - 1
        return range(max(0, place), len(self._schedules) if after else max(0, place + 1))

    def _until_s(self, place: int) -> float:
        """Return the time when the next schedule replaces this one."""
        return self._schedules[place + 1].from_s if place + 1 < len(self._schedules) else math.inf
