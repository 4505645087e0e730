"""The servers that share a store: a server has a generation number, and a row while it counts as alive."""

from __future__ import annotations

import os
import socket
import time

from sqlalchemy import delete, insert, select
from sqlalchemy.exc import SQLAlchemyError

from llmserve.jobs.store.database import Database
from llmserve.jobs.store.tables import servers

GENERATIONS = select(servers.c.generation)


class Servers:
    """This server among those of the store. All methods raise SQLAlchemyError.

    generation : of this server, from `begin` on
    """

    def __init__(self, database: Database) -> None:
        self._database, self._presence = database, database.presence
        self.generation = 0

    async def begin(self) -> int:
        """Begin a life under the next generation, and bury the servers that have died. Returns the generation."""
        await self._presence.end()
        await self._presence.begin()
        name = f"{socket.gethostname()}:{os.getpid()}"
        new = insert(servers).values(name=name, started_at=time.time()).returning(servers.c.generation)
        async with self._database.write() as connection:
            generation = (await connection.execute(new)).scalar_one()
            await self._presence.hold(generation)  # before other servers can see the row
        self.generation = generation
        await self.bury_dead()
        return self.generation

    async def still_alive(self) -> bool:
        """Whether the generation of this server still stands. Buries the servers that have died."""
        try:
            await self._presence.check()
            return self.generation in await self.bury_dead()
        except SQLAlchemyError:
            if self._presence.is_lost:
                return False
            raise

    async def alive(self) -> set[int]:
        """The generations that count as alive."""
        async with self._database.read() as connection:
            return set((await connection.execute(GENERATIONS)).scalars())

    async def bury_dead(self) -> set[int]:
        """Let servers that have died count as dead: their batches may be claimed, and their uploads fail.

        Returns the generations that count as alive.
        """
        alive = await self.alive()
        for generation in sorted(alive - {self.generation}):
            if await self._presence.is_dead(generation):
                async with self._database.write() as connection:
                    await connection.execute(delete(servers).where(servers.c.generation == generation))
                alive.remove(generation)
        return alive

    async def end(self) -> None:
        """End the life of this server."""
        await self._presence.end()
