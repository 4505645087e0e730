"""Queues beside a model's own, for calls that only some of the model's engines can serve, or that generate no text.

The scheduler knows models, and which engines serve each. A lane is a further name of a model, which the engines list
that can serve the lane's calls. So such calls wait, take slots and share engines as all others do, and teach the
model's own queue nothing.

    `MODEL`            answers, from every engine of the model
    `MODEL /v1/score`  an endpoint without generated text, or one that only some engines have
    `MODEL @ENGINE`    calls that go on from what only this engine knows
    `MODEL in GROUP`   calls of streams that a door's plan gives to another group than the model (homes.py)

A lane is made at its first call, and goes when no engine lists its model any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from llmserve.engines.engine import Endpoints


class Lane(NamedTuple):
    """A queue beside the model's own.

    path : "": of every endpoint.  engine : name; "": every engine.  group : of a door's plan; "": the model's own
    """

    model: str
    path: str = ""
    engine: str = ""
    group: str = ""

    @property
    def name(self) -> str:
        if self.group:
            return f"{self.model} in {self.group}"
        return f"{self.model} @{self.engine}" if self.engine else f"{self.model} {self.path}"

    def is_on(self, engine: str, models: Collection[str], endpoints: Endpoints) -> bool:
        """Whether the engine can serve the lane's calls. models, endpoints : of the engine"""
        return self.model in models and self.engine in ("", engine) and (not self.path or self.path in endpoints)


class Lanes:
    """The lanes so far."""

    def __init__(self) -> None:
        self._by_name: dict[str, Lane] = {}

    @property
    def names(self) -> Collection[str]:
        return self._by_name.keys()

    def add(self, lane: Lane) -> bool:
        """True when the lane is new."""
        if lane.name in self._by_name:
            return False
        self._by_name[lane.name] = lane
        return True

    def named(self, name: str) -> Lane | None:
        """None: no lane has this name."""
        return self._by_name.get(name)

    def on(self, engine: str, models: Collection[str], endpoints: Endpoints) -> list[Lane]:
        """The lanes that an engine can serve."""
        return [lane for lane in self._by_name.values() if lane.is_on(engine, models, endpoints)]

    def keep(self, models: Collection[str], engines: Iterable[str]) -> None:
        """Forget the lanes of all other models and engines."""
        names = {"", *engines}
        if any(lane.model not in models or lane.engine not in names for lane in self._by_name.values()):
            self._by_name = {
                name: lane for name, lane in self._by_name.items() if lane.model in models and lane.engine in names
            }
