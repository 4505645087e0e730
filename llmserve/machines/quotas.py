"""Each gateway's part of the keys' limits, allocated anew once a second by where the requests come.

The parts of a key add up to at most 1 at every moment, for a gateway's part grows only when the others have said that
theirs are smaller. So no key gets more than its limit, but for these:

* a gateway that has just started begins with 1 / gateways, until its first exchange
* a gateway's part of a limit is at least one request

A key whose requests all come to one entrance gets at least 1 - SPARE of its limit there, a second or two later. Until
then the gateway refuses what is beyond its part, and tells the client to come back. A part that moves is empty at
first, so a key that moves between gateways may lose what it had saved for a burst, never its rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SPARE = 0.04  # of each limit, in equal parts for gateways at which a key does not ask
MEMORY = 0.7  # of what was asked before, at each exchange
FORGET = 1e-3  # requests: a key that asks no more has equal parts again


class Quotas:
    """The parts by gateway and key."""

    def __init__(self) -> None:
        self._asked: dict[str, dict[str, float]] = {}  # key -> gateway -> requests, with decay
        self._held: dict[str, dict[str, float]] = {}  # key -> gateway -> part that the gateway uses

    def received(self, gateway: str, asked: Mapping[str, int], parts: Mapping[str, float]) -> None:
        """Note what a gateway told."""
        for key, count in asked.items():
            self._asked.setdefault(key, {})[gateway] = self._asked.get(key, {}).get(gateway, 0.0) + count
        for key, part in parts.items():
            self._held.setdefault(key, {})[gateway] = part

    def forget(self, gateway: str) -> None:
        """A gateway is gone, and its parts are free."""
        for by_gateway in (*self._asked.values(), *self._held.values()):
            by_gateway.pop(gateway, None)

    def decay(self) -> None:
        """Call once for each round of exchanges, after `received`."""
        for key, by_gateway in list(self._asked.items()):
            self._asked[key] = {gateway: MEMORY * asked for gateway, asked in by_gateway.items() if asked > FORGET}
            if not self._asked[key]:
                del self._asked[key]

    def allocate(self, gateways: Sequence[str]) -> dict[str, dict[str, float]]:
        """The parts that each of the gateways may use from now on, by gateway and key."""
        parts: dict[str, dict[str, float]] = {gateway: {} for gateway in gateways}
        for key in self._asked.keys() | self._held.keys():
            asked = self._asked.get(key, {})
            total = sum(asked.get(gateway, 0.0) for gateway in gateways)
            # A gateway that has told nothing of this key uses its first part.
            used = {gateway: 1.0 / len(gateways) for gateway in gateways} | self._held.get(key, {})
            for gateway in gateways:
                demand = asked.get(gateway, 0.0) / total if total else 1.0 / len(gateways)
                target = SPARE / len(gateways) + (1.0 - SPARE) * demand
                part = max(0.0, min(target, 1.0 - sum(used.values()) + used[gateway]))
                parts[gateway][key] = part
                used[gateway] = max(used[gateway], part)  # a smaller part is free when the gateway has said so
        return parts
