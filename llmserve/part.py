"""The plug of a feature: a part of the server, which is checked, opened, and changed while the server runs.

A feature is a folder with a class of `Part`, and a line in the list of all parts (server/parts.py). The list is the
order: parts are checked and opened from its beginning to its end, and closed from its end to its beginning.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llmserve.errors import ConfigError
from llmserve.settings.tree import Config

Commit = Callable[[], None]
T = TypeVar("T")


async def no_reload() -> None:
    raise ConfigError("this server has nothing to read again")


@dataclass(frozen=True)
class BehindRelays:
    """Where a server listens whose port is its relays' (workers/): they alone connect to it.

    clients  for requests that relays pass on.  messages : path of the socket for what relays tell
    url      of the server, for clients
    name     of this server among others, which stays when this process dies
    relays   their number.  predecessors : processes of the server that have died in this one's place
    """

    clients: socket.socket
    messages: Path
    url: str
    name: str
    relays: int
    predecessors: int


class Server:
    """A server in the making, as the parts of the server see it.

    config  the settings at the start, complete and checked
    reload  reads the settings again. Raises ConfigError

    What a part makes for the parts that follow in the list is kept here under its type.
    """

    def __init__(self, config: Config, reload: Callable[[], Awaitable[None]] = no_reload) -> None:
        self.config = config
        self.reload = reload
        self._made: dict[type, object] = {}

    def add(self, thing: T) -> T:
        """Give a thing to the parts that follow, and return the thing."""
        assert type(thing) not in self._made, f"two parts make a {type(thing).__name__}"
        self._made[type(thing)] = thing
        return thing

    def get(self, kind: type[T]) -> T:
        """The thing of this type, which a part before has made."""
        thing = self.find(kind)
        assert thing is not None, f"no part before makes a {kind.__name__}"
        return thing

    def find(self, kind: type[T]) -> T | None:
        """The thing of this type; None: the settings do not ask for the part that makes it."""
        thing = self._made.get(kind)
        assert thing is None or isinstance(thing, kind)
        return thing


class Part:
    """A feature of the server. Each method does nothing until a feature says otherwise.

    A part has no state: what `open` makes lives in its block, or in the Server. A feature whose setting is off imports
    nothing that only the feature needs.

    changeable  the settings that may change while the server runs
    in_relays   whether `open` is called in each relay, too (workers/), where there is no cluster: of a part with stages
                of heads and bodies, or that follows requests to their ends
    """

    changeable: frozenset[str] = frozenset()
    in_relays = False

    def check(self, config: Config) -> Config:
        """Check the settings before any slow start. Returns them, completed if need be. Raises ConfigError."""
        return config

    def open(self, server: Server) -> AbstractAsyncContextManager[None]:
        """What the feature needs, inside the block: the server does not listen before all parts are open."""
        return nullcontext()

    def run(self, server: Server) -> AbstractAsyncContextManager[None]:
        """What the feature does while the server listens."""
        return nullcontext()

    def change(self, server: Server, before: Config, after: Config) -> Commit:
        """Check other settings, in a thread. Returns what puts them into effect, when all parts have agreed.

        Raises ConfigError; then nothing changes in any part.
        """
        return do_nothing


def do_nothing() -> None:
    """The commit of a part that has nothing to change."""
