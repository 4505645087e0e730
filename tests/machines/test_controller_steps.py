"""Steps of the controller with keepers that only note what they are told: no process runs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

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
        self.reserved: set[str] = set()

    async def nodes(self) -> Sequence[str]:
        return ["here"]

    async def names(self) -> Collection[str]:
        return set(self.keepers)

    async def provide(self, workers: Sequence[Worker], in_use: Collection[str]) -> None:
        self.reserved = {worker.name for worker in workers} | set(in_use)

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


class Told(Controller):
    """answers : of servers, by path"""

    answers: dict[str, Any]

    async def ask(self, name: str, path: str, body: bytes | None = None) -> Any:
        return self.answers.get(path)


def desired_of(tmp_path: Path, text: str = TEXT) -> Desired:
    (tmp_path / "cluster.toml").write_text(text)
    file = read_cluster(tmp_path / "cluster.toml")
    return Desired(file=file, plan=file.first_plan(), secrets=Secrets("sk-d", "sk-e", "sk-a"))


def controller_of(machines: Noted, desired: Desired) -> Told:
    controller = Told(machines, desired)
    controller.answers = {}
    return controller


async def test_a_keeper_that_did_not_hear_of_a_change_is_told_again(tmp_path: Path) -> None:
    machines = Noted()
    controller = controller_of(machines, desired_of(tmp_path))
    for _ in range(4):
        await controller.step()
    assert set(machines.keepers) == {"m-0", "group-all", "gateway-0"}

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


async def test_engines_are_started_while_groups_want_them_and_drained_before_they_stop(tmp_path: Path) -> None:
    machines = Noted()
    desired = desired_of(tmp_path, TEXT + "replicas_max = 2\n")
    controller = controller_of(machines, desired)
    for _ in range(4):
        await controller.step()
    controller.answers = {"/admin/peers": {"wanted": {"m": 7}}, "/admin/engines": {"engines": [{"worker": "m-0"}]}}
    await controller.exchange()
    for _ in range(3):
        await controller.step()
    assert set(machines.keepers) == {"m-0", "m-1", "group-all", "gateway-0"}
    assert '"m-1=http' in machines.keepers["group-all"][0].process.files["serve.toml"]
    assert controller.desired.replicas == {"m": 2}, "for a controller that goes on with it"

    controller.answers = {"/admin/engines": {"engines": [{"worker": "m-0"}, {"worker": "m-1"}]}}
    await controller.change(desired_of(tmp_path))
    for _ in range(3):
        await controller.step()
    assert '"m-1=http' not in machines.keepers["group-all"][0].process.files["serve.toml"]
    assert "m-1" in machines.keepers, "the group has requests on it"
    assert "m-1" in machines.reserved
    controller.answers = {"/admin/engines": {"engines": [{"worker": "m-0"}]}}
    for _ in range(3):
        await controller.step()
        await asyncio.sleep(0)
    assert "m-1" not in machines.keepers
    assert "m-1" not in machines.reserved
