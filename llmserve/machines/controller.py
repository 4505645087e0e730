"""Keeps the processes of a cluster in line with its file and its plan.

A step looks at what runs, says what should run, and changes the difference. What the controller must not forget is in
the store: another controller, on any node, goes on with it. Serving needs no controller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from llmserve.http.client import HttpClient
from llmserve.http.connecting import HttpError
from llmserve.machines.cluster_file import ClusterFile
from llmserve.machines.keeper import Status
from llmserve.machines.layout import Moves, gateways_plan, owners
from llmserve.machines.peer_sync import PeerSync
from llmserve.machines.peers import FromServer, ToServer
from llmserve.machines.processes import Process, Secrets, Worker, engines_of, gateway_process, group_process, workers_of
from llmserve.machines.replanning import Replanning
from llmserve.machines.scaling import Scaling
from llmserve.planning import Instance, Plan

log = logging.getLogger("llmserve")

STEP_S = 1.0
EXCHANGE_S = 1.0
ASK_S = 1.0  # longest answer of a server to the controller
DESIRED = "desired"


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """What the store keeps. keys : text of the gateways' key file; None: no key is required.  owners : group by worker

    instance  for planning again; None: never
    replicas  of engines with `replicas_max`, by engine, as they were wanted last
    """

    file: ClusterFile
    plan: Plan
    secrets: Secrets
    instance: Instance | None = None
    keys: str | None = None
    owners: Mapping[str, str] = {}
    replicas: Mapping[str, int] = {}


class Described(msgspec.Struct, frozen=True):
    """A process in the store. revision : grows with each change"""

    process: Process
    revision: int


class Machines(Protocol):
    """Where processes run: Ray (on_ray.py), or this process in tests."""

    async def nodes(self) -> Sequence[str]:
        """Ids of the nodes that are up."""
        ...

    async def names(self) -> Collection[str]:
        """Names of the processes that have a keeper."""
        ...

    async def provide(self, workers: Sequence[Worker], in_use: Collection[str]) -> None:
        """Reserve the workers' resources, and free those of other workers. in_use : workers whose engines still run"""
        ...

    async def place(self, process: Process, node: str | None) -> None:
        """Make a keeper for a process that is in the store. node : where it must be; None: anywhere"""
        ...

    async def apply(self, described: Described) -> None:
        """Tell a keeper, which may not hear it: its status has the revision that it follows."""
        ...

    async def status(self, name: str) -> Status | None:
        """None: the keeper does not answer."""
        ...

    async def remove(self, name: str) -> None:
        """Stop the process, which ends its requests first, and its keeper."""
        ...

    async def load(self, key: str) -> bytes | None: ...

    async def save(self, key: str, value: bytes | None) -> None:
        """value : None: forget it"""
        ...


def process_key(name: str) -> str:
    """The key of a process in the store."""
    return f"process/{name}"


def seen_key(name: str) -> str:
    """The key of a process' last status with another address than before."""
    return f"seen/{name}"


def _replanning_of(desired: Desired) -> Replanning | None:
    return None if desired.instance is None else Replanning(desired.instance, desired.file.planning.every_s)


class Controller:
    """`run()` until cancelled."""

    def __init__(self, machines: Machines, desired: Desired) -> None:
        self._machines = machines
        self.desired = desired
        self.statuses: dict[str, Status] = {}  # last known, by process
        self.silent: set[str] = set()  # processes whose keepers did not answer in the last step
        self._sent: dict[str, Described] = {}
        self._moves = Moves(desired.owners)
        self._engines_of: dict[str, set[str]] = {}  # workers that a group's server has, by group, of the last step
        self._removing: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._steps = 0
        self._settled = False  # everything has been described that should run
        self._peers = PeerSync(self._tell)
        self._replanning = _replanning_of(desired)
        self._began_s = time.monotonic()
        self._scaling = Scaling(desired.replicas, self._began_s)
        self._file, self._plan = desired.file, desired.plan  # with the replicas of this step

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_exchanges())
            tasks.create_task(self._run_steps())

    async def _run_exchanges(self) -> None:
        """Apart from the steps, which a process that does not answer delays."""
        loop = asyncio.get_running_loop()
        while True:
            next_s = loop.time() + EXCHANGE_S
            try:
                await self.exchange()
            except Exception:  # the next exchange tries again
                log.exception("an exchange of the controller failed")
            await asyncio.sleep(next_s - loop.time())

    async def _run_steps(self) -> None:
        while True:
            try:
                await self.step()
            except Exception:  # the next step tries again
                log.exception("a step of the controller failed")
            try:
                async with asyncio.timeout(STEP_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()

    async def change(self, desired: Desired) -> None:
        """Follow another file, plan or keys from now on."""
        if desired.instance != self.desired.instance or desired.file.planning != self.desired.file.planning:
            self._replanning = _replanning_of(desired)
        self.desired, self._settled = desired, False
        await self._machines.save(DESIRED, msgspec.json.encode(desired))
        self._changed.set()

    # ---- a step ----

    async def step(self) -> None:
        machines, desired = self._machines, self.desired
        if not self._steps:
            await self._remember()
        self._steps += 1
        await self._scale()
        present = set(await machines.names())
        in_use = {self._sent[name].process.worker for name in present & self._sent.keys()}
        await machines.provide(workers_of(self._file), in_use)
        await self._look(present)
        wanted = await self._wanted()
        for name, (process, node) in wanted.items():
            if name in self._removing:
                continue
            if name not in present:
                await self._describe(process)
                await machines.place(process, node)
            elif name not in self._sent or self._sent[name].process != process:
                await machines.apply(await self._describe(process))
            elif self._is_behind(name):
                await machines.apply(self._sent[name])
        for name in sorted(present - wanted.keys() - self._removing.keys()):
            if not self._is_needed(name):
                self._removing[name] = asyncio.create_task(self._remove(name))
        self._settled = desired is self.desired and not self._removing

    async def _scale(self) -> None:
        desired = self.desired
        self._file, self._plan = self._scaling.scaled(desired.file, desired.plan, time.monotonic())
        replicas = {engine.name: engine.replicas for engine in self._file.engine if engine.replicas_max is not None}
        if replicas != desired.replicas:
            log.info("replicas: %s", ", ".join(f"{name} {count}" for name, count in replicas.items()))
            self.desired = msgspec.structs.replace(desired, replicas=replicas)
            await self._machines.save(DESIRED, msgspec.json.encode(self.desired))

    async def _remember(self) -> None:
        """What an earlier controller has sent and seen: unchanged processes are left alone, also silent ones."""
        for name in await self._machines.names():
            sent, seen = [await self._machines.load(key) for key in (process_key(name), seen_key(name))]
            if sent is not None:
                self._sent[name] = msgspec.json.decode(sent, type=Described)
            if seen is not None:
                self.statuses[name] = msgspec.json.decode(seen, type=Status)

    async def _describe(self, process: Process) -> Described:
        before = self._sent.get(process.name)
        described = Described(process, before.revision + 1 if before is not None else 1)
        await self._machines.save(process_key(process.name), msgspec.json.encode(described))
        self._sent[process.name] = described
        return described

    def _is_behind(self, name: str) -> bool:
        """Whether a keeper answers that does not follow yet what was sent, which a restart may have lost."""
        status = self.statuses.get(name)
        return name not in self.silent and status is not None and status.revision < self._sent[name].revision

    async def _remove(self, name: str) -> None:
        try:
            await self._machines.remove(name)
            for key in (process_key(name), seen_key(name)):
                await self._machines.save(key, None)
        finally:
            for known in (self._sent, self.statuses, self._removing):
                known.pop(name, None)

    def _is_needed(self, name: str) -> bool:
        """Whether a group's server may still have the engine of this process."""
        sent = self._sent.get(name)
        return sent is not None and any(sent.process.worker in workers for workers in self._engines_of.values())

    # ---- what runs ----

    async def _look(self, present: Collection[str]) -> None:
        found = await asyncio.gather(*(self._machines.status(name) for name in present))
        self.silent = {name for name, status in zip(present, found, strict=True) if status is None}
        for status in found:
            if status is not None:
                before, self.statuses[status.name] = self.statuses.get(status.name), status
                if before is None or before.url != status.url:
                    await self._machines.save(seen_key(status.name), msgspec.json.encode(status))

    # ---- what servers tell, and are told ----

    async def exchange(self) -> None:
        """Tell gateways and groups what they need of each other, add up their rates, and plan again for new ones."""
        gateways, groups = await self._peers.round(self._servers("gateway"), self._servers("group"))
        now_s = time.monotonic()
        for name, server in groups.items():
            self._scaling.received(name.removeprefix("group-"), server.wanted, now_s)
        if self._replanning is not None:
            for server in gateways.values():
                self._replanning.observe(server.arrivals)
            plan = self._replanning.plan(self.desired.plan, now_s - self._began_s)
            if plan is not None:
                await self.change(msgspec.structs.replace(self.desired, plan=plan))

    def _servers(self, kind: str) -> list[str]:
        return sorted(name for name, sent in self._sent.items() if sent.process.kind == kind)

    async def _tell(self, name: str, told: ToServer) -> FromServer | None:
        if name in self.silent:
            return None
        answer = await self.ask(name, "/admin/peers", msgspec.json.encode(told))
        return None if answer is None else msgspec.convert(answer, FromServer)

    # ---- what should run ----

    async def _wanted(self) -> dict[str, tuple[Process, str | None]]:
        """Processes by name, each with the node on which it must be; None: any."""
        desired = self.desired
        wanted: dict[str, tuple[Process, str | None]] = {}
        engines = engines_of(self._file, desired.secrets)
        for name, process in engines.items():
            wanted[name] = process, None
        groups = await self._wanted_groups(engines)
        for process in groups.values():
            wanted[process.name] = process, None
        urls = {name: self.statuses[g.name].url for name, g in groups.items() if g.name in self.statuses}
        if urls:
            places, plan = await self._places_of_gateways(), gateways_plan(self._plan, urls)
            text = msgspec.json.encode(plan).decode()
            for number, node in enumerate(places):
                gateway = gateway_process(self._file, number, len(places), urls, text, desired.keys, desired.secrets)
                wanted[gateway.name] = gateway, node
        return wanted

    async def _wanted_groups(self, engines: Mapping[str, Process]) -> dict[str, Process]:
        """The groups' processes by name of the group: those that have workers whose engines have an address."""
        desired = self.desired
        target = owners(self._file, self._plan, self._moves.holders)
        self._engines_of = await self._workers_in_use()
        drained = {group: target.keys() - workers for group, workers in self._engines_of.items()}
        holders = self._moves.follow(target, drained)
        if holders != desired.owners:
            self.desired = msgspec.structs.replace(self.desired, owners=holders)  # it may have changed meanwhile
            await self._machines.save(DESIRED, msgspec.json.encode(self.desired))
        groups = {}
        for group in self._plan.groups:
            own = {
                name: (process.worker, self.statuses[name].url)
                for name, process in engines.items()
                if holders.get(process.worker) == group.name and name in self.statuses
            }
            if own:
                groups[group.name] = group_process(self._file, group.name, own, desired.secrets)
        return groups

    async def _workers_in_use(self) -> dict[str, set[str]]:
        """Workers whose engines a group's server has, also while it drains them, by group. A dead server has none."""
        names = [name for name in self._servers("group") if name not in self.silent]
        answers = await asyncio.gather(*(self.ask(name, "/admin/engines") for name in names))
        return {
            name.removeprefix("group-"): {engine["worker"] for engine in answer["engines"]}
            for name, answer in zip(names, answers, strict=True)
            if answer is not None
        }

    async def _places_of_gateways(self) -> list[str | None]:
        count = self.desired.file.gateway.count
        return [None] * count if count else [*sorted(await self._machines.nodes())]

    async def ask(self, name: str, path: str, body: bytes | None = None) -> Any:
        """The JSON answer of a group or a gateway to the controller; None: it gives none."""
        status = self.statuses.get(name)
        if status is None:
            return None
        method, headers = "GET" if body is None else "POST", {"authorization": f"Bearer {self.desired.secrets.admin}"}
        try:
            async with HttpClient(status.url, connect_s=ASK_S, idle_s=ASK_S, answer_s=ASK_S) as client:
                answer = await client.answer(method, path, headers, body)
            return msgspec.json.decode(answer.body) if answer.status == 200 else None
        except (HttpError, msgspec.MsgspecError):
            return None

    # ---- for operators ----

    async def report(self) -> dict[str, Any]:
        """What runs, where, and how much waits."""
        groups = [group.name for group in self.desired.plan.groups]
        queues = await asyncio.gather(*(self.ask(f"group-{name}", "/admin/queue") for name in groups))
        engines = await asyncio.gather(*(self.ask(f"group-{name}", "/admin/engines") for name in groups))
        return {
            "name": self.desired.file.name,
            "engines_wanted": self._peers.wanted,
            "processes": [self._row(name) for name in sorted(self._sent)],
            "groups": [
                {
                    "name": group.name,
                    "models": list(group.models),
                    "workers": sorted(worker for worker, owner in self._moves.holders.items() if owner == group.name),
                    "engines": {} if told is None else _kinds(told["engines"]),
                    "waiting": None if queue is None else queue["waiting"],
                }
                for group, queue, told in zip(self.desired.plan.groups, queues, engines, strict=True)
            ],
        }

    def _row(self, name: str) -> dict[str, Any]:
        status, kind = self.statuses.get(name), self._sent[name].process.kind
        if status is None:
            return {"name": name, "kind": kind, "state": "placing"}
        row = msgspec.to_builtins(status)
        return {**row, "kind": kind, **({"state": "unreachable"} if name in self.silent else {})}

    @property
    def is_ready(self) -> bool:
        """Whether everything that should run does, as it is described."""
        wanted = {name for name in self._sent if name not in self._removing}
        kinds = {self._sent[name].process.kind for name in wanted}
        running = all(
            (status := self.statuses.get(name)) is not None
            and name not in self.silent
            and (status.state, status.revision) == ("running", self._sent[name].revision)
            for name in wanted
        )
        return self._settled and kinds >= {"engine", "group", "gateway"} and running


def _kinds(engines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many engines of each kind a group has."""
    return dict(Counter(engine.get("kind") or "not up yet" for engine in engines))
