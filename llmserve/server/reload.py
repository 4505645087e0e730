"""Reads the settings again while the server runs: all parts of the server take them, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from llmserve.errors import ConfigError
from llmserve.part import Commit, Part, Server
from llmserve.settings.tree import Config


class Reloader:
    """Reads the settings again, and has all parts of the server check them before any part changes.

    config  the settings at the start
    read    reads the settings again. Raises ConfigError. None: they stay, and only the files that they name are read
    """

    def __init__(self, config: Config, read: Callable[[], Config] | None = None) -> None:
        self._config = config
        self._read = read or (lambda: config)
        self._server: Server | None = None
        self._parts: Sequence[Part] = ()
        self._one_at_a_time = asyncio.Lock()

    def follow(self, server: Server, parts: Sequence[Part]) -> None:
        """Change these parts from now on."""
        self._server, self._parts = server, parts

    @property
    def is_ready(self) -> bool:
        """Whether a server has started, so that there is something to change."""
        return self._server is not None

    async def reload(self) -> None:
        """Raises ConfigError, which says what is wrong; then nothing has changed."""
        async with self._one_at_a_time:
            if self._server is None:
                raise ConfigError("the server is starting")
            after, commits = await asyncio.to_thread(self._checked, self._server)
            for commit in commits:
                commit()
            self._config = after

    def _checked(self, server: Server) -> tuple[Config, list[Commit]]:
        before, after = self._config, self._read()
        changeable = frozenset().union(*[part.changeable for part in self._parts])
        for section in before.__struct_fields__:
            old, new = getattr(before, section), getattr(after, section)
            changed = {name for name in old.__struct_fields__ if getattr(old, name) != getattr(new, name)}
            if fixed := sorted(changed - changeable):
                raise ConfigError(f"{', '.join(fixed)}: cannot change while the server runs: restart it")
        return after, [part.change(server, before, after) for part in self._parts]
