"""Arrivals by stream and model, and when they have become others than the present groups were planned for."""

from __future__ import annotations

import math

import msgspec

FACTOR = 1.5
CHANCE = 4.0  # standard deviations of a Poisson count within which it may miss its rate by chance
STREAMS_MAX = 10_000  # (stream, model) pairs counted apart; those of any other stream are counted by model

Rates = tuple[tuple[str, str, float], ...]


class Replan(msgspec.Struct, frozen=True):
    """When other groups are asked for.

    every_s    seconds between two looks at the arrivals, and so between two plans, > 0
    planned    (stream, model, arrivals a second) that the first groups are made for; all others: 0
    factor     by which a rate may differ from the planned one, > 1
    """

    every_s: float
    planned: Rates = ()
    factor: float = FACTOR


class GroupRates:
    """Counts arrivals in windows that begin at multiples of `replan.every_s`, and looks at the end of each."""

    def __init__(self, replan: Replan) -> None:
        self._every_s = replan.every_s
        self._factor = replan.factor
        self._planned = {(stream, model): rate for stream, model, rate in replan.planned}
        self._window = 0
        self._counts: dict[tuple[str, str], int] = {}

    def observe(self, stream: str, model: str) -> None:
        """Count an arrival, after `look` at its time."""
        pair = stream, model
        if pair not in self._counts and len(self._counts) >= STREAMS_MAX:
            pair = "", model
        self._counts[pair] = self._counts.get(pair, 0) + 1

    @property
    def look_at_s(self) -> float | None:
        """When the window in progress ends; None while nothing has come in it."""
        return (self._window + 1) * self._every_s if self._counts else None

    def look(self, now_s: float) -> Rates | None:
        """To be called at every step. The rates of the window that has just ended, where they call for a plan."""
        window = math.floor(now_s / self._every_s)
        if window <= self._window:
            return None
        counts, self._counts = self._counts, {}
        self._window = window
        if not counts or not self._differ(counts):
            return None
        self._planned = {pair: count / self._every_s for pair, count in counts.items()}
        return tuple([(stream, model, self._planned[stream, model]) for stream, model in sorted(self._planned)])

    def _differ(self, counts: dict[tuple[str, str], int]) -> bool:
        for pair in counts.keys() | self._planned.keys():
            count, expected = counts.get(pair, 0), self._planned.get(pair, 0.0) * self._every_s
            larger, smaller = max(count, expected), min(count, expected)
            if larger > self._factor * smaller and larger - smaller > CHANCE * math.sqrt(larger):
                return True
        return False
