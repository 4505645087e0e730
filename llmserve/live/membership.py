"""Which engines the server has by URL: those that the settings name, and those that are found while the server runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from llmserve.engines.engine import Engine
from llmserve.live.fleet import Fleet

SETTINGS = "settings"
"""The source of the engines that the settings name."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What a source of engines tells.

    engines  names of the engines that count as found
    seen     whether the source has told of engines at all
    trouble  why the last look failed, or found none; "": it found these engines
    """

    engines: tuple[str, ...] = ()
    seen: bool = False
    trouble: str = ""


class Membership:
    """Engines by URL, which come and go while the server runs. An engine stays while any source names it.

    An engine that goes gets no new requests, and is forgotten when it is empty.
    looked  of each source but the settings, by its text
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._sources: dict[str, set[str]] = {name: {SETTINGS} for name in fleet.handles}
        self.looked: dict[str, Looked] = {}

    def source_of(self, engine: str) -> str:
        """The sources that name an engine, for people; "": none does any more."""
        return ", ".join(sorted(self._sources.get(engine, ())))

    def change(self, source: str, added: Mapping[str, Callable[[], Engine]], removed: Collection[str] = ()) -> None:
        """Take what a source names from now on, and names no more. added : by name, what makes the engine's client"""
        for name, make in added.items():
            sources = self._sources.setdefault(name, set())
            if not sources:
                self._fleet.add(make())
            sources.add(source)
        for name in removed:
            sources = self._sources[name]
            sources.discard(source)
            if not sources:
                del self._sources[name]
                self._fleet.remove(self._fleet.handles[name])
