"""Steps of the controller with keepers that only note what they are told: no process runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from llmserve.machines.cluster_file import read_cluster
from llmserve.machines.controller import Controller, Described, Desired, process_key
from llmserve.machines.keeper import Status
from llmserve.machines.processes import Process, Secrets, Worker

NOBODY_LISTENS = 1  # port
TEXT = """
host = "127.0.0.1"

[[engine]]
name = "m"
kind = "timed"
model = "m"
"""


class Noted:
    """deaf : whether keepers do not hear what they are told. keepers : what each follows, and at which URL"""

    def __init__(self) -> None:
        self.deaf = False
        self.keepers: dict[str, tuple[Described, str]] = {}
        self.store: dict[str, bytes] = {}
        self.told: list[str] = []

    async def nodes(self) -> Sequence[str]:
        return ["here"]

    async def names(self) -> Collection[str]:
        return set(self.keepers)

    async def provide(self, workers: Sequence[Worker]) -> None: ...

    async def place(self, process: Process, node: str | None) -> None:
        self.begin(process.name, NOBODY_LISTENS)

    def begin(self, name: str, port: int) -> None:
        """A keeper starts, or starts again, and reads the store."""
        described = msgspec.json.decode(self.store[process_key(name)], type=Described)
        self.keepers[name] = described, f"http://127.0.0.1:{port}"

    async def apply(self, described: Described) -> None:
        name = described.process.name
        self.told.append(name)
        if not self.deaf:
            self.keepers[name] = described, self.keepers[name][1]

    async def status(self, name: str) -> Status | None:
        described, url = self.keepers[name]
        return Status(name=name, state="running", url=url, node="here", revision=described.revision)

    async def remove(self, name: str) -> None:
        del self.keepers[name]

    async def load(self, key: str) -> bytes | None:
        return self.store.get(key)

    async def save(self, key: str, value: bytes | None) -> None:
        if value is not None:
            self.store[key] = value


def controller_of(machines: Noted, tmp_path: Path) -> Controller:
    (tmp_path / "cluster.toml").write_text(TEXT)
    file = read_cluster(tmp_path / "cluster.toml")
    return Controller(machines, Desired(file=file, plan=file.first_plan(), secrets=Secrets("sk-d", "sk-e", "sk-a")))


async def test_a_keeper_that_did_not_hear_of_a_change_is_told_again(tmp_path: Path) -> None:
    machines = Noted()
    controller = controller_of(machines, tmp_path)
    for _ in range(4):
        await controller.step()
    assert set(machines.keepers) == {"m-0", "group-all", "door-0"}

    machines.begin("m-0", 2)  # on another node
    machines.deaf = True
    await controller.step()
    assert machines.told == ["group-all"]
    machines.deaf = False
    await controller.step()
    described, _ = machines.keepers["group-all"]
    assert "http://127.0.0.1:2" in described.process.files["serve.toml"]

    await controller.step()
    assert machines.told == ["group-all"] * 2, "whoever has heard is told no more"
