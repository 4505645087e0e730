"""Tasks that run at once and fail as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def at_once() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group. The first task that fails cancels the other tasks, and its exception is raised unwrapped."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
