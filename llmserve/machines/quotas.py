"""Each door's part of the keys' limits, dealt anew once a second by where the requests come.

The parts of a key add up to at most 1 at every moment, for a door's part grows only when the others have said that
theirs are smaller. So no key gets more than its limit, but for these:

* a door that has just started begins with 1 / doors, until its first exchange
* a door's part of a limit is at least one request

A key whose requests all come to one door gets at least 1 - SPARE of its limit there, a second or two later. Until then
the door refuses what is beyond its part, and tells the client to come back. A part that moves is empty at first, so a
key that moves between doors may lose what it had saved for a burst, never its rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SPARE = 0.04  # of each limit, in equal parts for doors at which a key does not ask
MEMORY = 0.7  # of what was asked before, at each exchange
FORGET = 1e-3  # requests: a key that asks no more has equal parts again


class Quotas:
    """The parts by door and key."""

    def __init__(self) -> None:
        self._asked: dict[str, dict[str, float]] = {}  # key -> door -> requests, with decay
        self._held: dict[str, dict[str, float]] = {}  # key -> door -> part that the door uses

    def heard(self, door: str, asked: Mapping[str, int], parts: Mapping[str, float]) -> None:
        """Note what a door told."""
        for key, count in asked.items():
            self._asked.setdefault(key, {})[door] = self._asked.get(key, {}).get(door, 0.0) + count
        for key, part in parts.items():
            self._held.setdefault(key, {})[door] = part

    def forget(self, door: str) -> None:
        """A door is gone, and its parts are free."""
        for by_door in (*self._asked.values(), *self._held.values()):
            by_door.pop(door, None)

    def decay(self) -> None:
        """Call once for each round of exchanges, after `heard`."""
        for key, by_door in list(self._asked.items()):
            self._asked[key] = {door: MEMORY * asked for door, asked in by_door.items() if asked > FORGET}
            if not self._asked[key]:
                del self._asked[key]

    def deal(self, doors: Sequence[str]) -> dict[str, dict[str, float]]:
        """The parts that each of the doors may use from now on, by door and key."""
        parts: dict[str, dict[str, float]] = {door: {} for door in doors}
        for key in self._asked.keys() | self._held.keys():
            asked = self._asked.get(key, {})
            total = sum(asked.get(door, 0.0) for door in doors)
            # A door that has told nothing of this key uses its first part.
            used = {door: 1.0 / len(doors) for door in doors} | self._held.get(key, {})
            for door in doors:
                demand = asked.get(door, 0.0) / total if total else 1.0 / len(doors)
                target = SPARE / len(doors) + (1.0 - SPARE) * demand
                part = max(0.0, min(target, 1.0 - sum(used.values()) + used[door]))
                parts[door][key] = part
                used[door] = max(used[door], part)  # a smaller part is free when the door has said so
        return parts
