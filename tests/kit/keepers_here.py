"""Machines without Ray: keepers in this process, for tests of the controller."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from llmserve.machines.controller import Described, process_key
from llmserve.machines.keeper import Keeper, Status
from llmserve.machines.processes import Process, Worker


class Here:
    """One node: this machine."""

    def __init__(self, folder: Path, admin_key: str) -> None:
        self.keepers: dict[str, Keeper] = {}
        self.store: dict[str, bytes] = {}
        self._folder, self._admin_key = folder, admin_key

    async def nodes(self) -> Sequence[str]:
        return ["here"]

    async def names(self) -> Collection[str]:
        return set(self.keepers)

    async def provide(self, workers: Sequence[Worker], in_use: Collection[str]) -> None:
        """This machine has room for all."""

    async def place(self, process: Process, node: str | None) -> None:
        stored = msgspec.json.decode(self.store[process_key(process.name)], type=Described)
        keeper = Keeper(
            stored.process,
            stored.revision,
            address="127.0.0.1",
            node="here",
            folder=self._folder,
            admin_key=self._admin_key,
        )
        keeper.start()
        self.keepers[process.name] = keeper

    async def apply(self, described: Described) -> None:
        self.keepers[described.process.name].follow(described.process, described.revision)

    async def status(self, name: str) -> Status | None:
        keeper = self.keepers.get(name)
        return keeper.status() if keeper is not None else None

    async def remove(self, name: str) -> None:
        await self.keepers.pop(name).stop()

    async def load(self, key: str) -> bytes | None:
        return self.store.get(key)

    async def save(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.store.pop(key, None)
        else:
            self.store[key] = value

    async def close(self) -> None:
        for keeper in self.keepers.values():
            await keeper.stop()
