"""The servers that share a store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sqlalchemy import delete, insert, select

from llmserve.jobs.store.database import Database
from llmserve.jobs.store.rows import is_alive
from llmserve.jobs.store.tables import servers


class Servers:
    """Which generations count as alive. All methods raise SQLAlchemyError.

    generation : of this server, from `begin` on
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.generation = 0

    async def begin(self, name: str, now_s: float, hold: Callable[[int], Awaitable[None]]) -> int:
        """Take the next generation. hold : called with it before other servers can see it"""
        new = insert(servers).values(name=name, started_at=now_s).returning(servers.c.generation)
        async with self._database.write() as connection:
            generation = (await connection.execute(new)).scalar_one()
            await hold(generation)
        self.generation = generation
        return self.generation

    async def others(self) -> list[int]:
        """Generations of other servers that count as alive."""
        async with self._database.read() as connection:
            rows = await connection.execute(select(servers.c.generation))
            return [generation for (generation,) in rows if generation != self.generation]

    async def bury(self, generation: int) -> None:
        """Let a server count as dead. Its batches may be claimed, and its uploads fail."""
        async with self._database.write() as connection:
            await connection.execute(delete(servers).where(servers.c.generation == generation))

    async def is_alive(self) -> bool:
        """Whether this server still counts as alive."""
        async with self._database.read() as connection:
            return await is_alive(connection, self.generation)
