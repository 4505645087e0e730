"""Queues beside a model's own, for calls that only some of the model's engines can serve, or that generate no text.

The scheduler knows models, and which engines serve each. A route queue is a further name of a model, which the engines
list that can serve the route queue's calls. So such calls wait, take slots and share engines as all others do, and
teach the model's own queue nothing.

    `MODEL`            answers, from every engine of the model
    `MODEL /v1/score`  an endpoint without generated text, or one that only some engines have
    `MODEL @ENGINE`    calls that go on from what only this engine knows
    `MODEL in GROUP`   calls of streams that a gateway's plan gives to another group than the model (homes.py)

A route queue is made at its first call, and goes when no engine lists its model any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from llmserve.engines.engine import Endpoints


class RouteQueue(NamedTuple):
    """A queue beside the model's own.

    path : "": of every endpoint.  engine : name; "": every engine.  group : of a gateway's plan; "": the model's own
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
        """Whether the engine can serve the route queue's calls. models, endpoints : of the engine"""
        return self.model in models and self.engine in ("", engine) and (not self.path or self.path in endpoints)


class RouteQueues:
    """The route queues so far."""

    def __init__(self) -> None:
        self._by_name: dict[str, RouteQueue] = {}

    @property
    def names(self) -> Collection[str]:
        return self._by_name.keys()

    def add(self, route_queue: RouteQueue) -> bool:
        """True when the route queue is new."""
        if route_queue.name in self._by_name:
            return False
        self._by_name[route_queue.name] = route_queue
        return True

    def named(self, name: str) -> RouteQueue | None:
        """None: no route queue has this name."""
        return self._by_name.get(name)

    def on(self, engine: str, models: Collection[str], endpoints: Endpoints) -> list[RouteQueue]:
        """The route queues that an engine can serve."""
        return [route_queue for route_queue in self._by_name.values() if route_queue.is_on(engine, models, endpoints)]

    def keep(self, models: Collection[str], engines: Iterable[str]) -> None:
        """Forget the route queues of all other models and engines."""
        names = {"", *engines}
        if any(
            route_queue.model not in models or route_queue.engine not in names for route_queue in self._by_name.values()
        ):
            self._by_name = {
                name: route_queue
                for name, route_queue in self._by_name.items()
                if route_queue.model in models and route_queue.engine in names
            }
