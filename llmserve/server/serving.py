"""Opens the parts of a server, and closes them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

from llmserve.gateway.part import Listening
from llmserve.live.cluster import LiveCluster
from llmserve.part import BehindRelays, Part, Server
from llmserve.runtime.at_once import at_once
from llmserve.server.parts import PARTS, Parts
from llmserve.server.reload import Reloader
from llmserve.settings.tree import Config


def checked(config: Config, parts: Parts = PARTS) -> Config:
    """Fill in the defaults that depend on other settings, and check everything before any slow start.

    Raises ConfigError.
    """
    config = config.resolved()
    for part in each(parts):
        config = part.check(config)
    return config


def each(parts: Parts) -> Iterator[Part]:
    """All parts, one after the other."""
    for entry in parts:
        yield from entry if isinstance(entry, tuple) else (entry,)


@contextlib.asynccontextmanager
async def serving(
    config: Config, reloader: Reloader | None = None, relays: BehindRelays | None = None
) -> AsyncIterator[tuple[LiveCluster, str]]:
    """Run the whole server inside the block. Yields the cluster and the base URL.

    reloader : reads the settings again; None: files are read again, by the same settings
    relays : None: this process holds the connections of clients itself
    Raises LLMServeError when the server cannot start.
    """
    reloader = reloader or Reloader(config)
    server = Server(checked(config), reloader.reload)
    if relays is not None:
        server.add(relays)
    async with opened(PARTS, server):
        reloader.follow(server, list(each(PARTS)))
        async with running(PARTS, server):
            yield server.get(LiveCluster), server.get(Listening).url


@contextlib.asynccontextmanager
async def opened(parts: Parts, server: Server) -> AsyncIterator[None]:
    """The parts, open inside the block. Where several open at the same time, the first failure stops the others."""
    async with AsyncExitStack() as stack:
        for entry in parts:
            async with at_once() as group:
                for part in entry if isinstance(entry, tuple) else (entry,):
                    group.create_task(stack.enter_async_context(part.open(server)))
        yield


@contextlib.asynccontextmanager
async def running(parts: Parts, server: Server) -> AsyncIterator[None]:
    """What the parts do while the server listens, inside the block. The parts are open."""
    async with AsyncExitStack() as stack:
        for part in each(parts):
            await stack.enter_async_context(part.run(server))
        yield
