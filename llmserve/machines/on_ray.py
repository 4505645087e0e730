"""Ray: one actor keeps each process, another is the controller; placement groups hold workers' resources.

The only module of llmserve that imports Ray. All actors are detached and have names, so that they outlive the command
that made them, and restart on any node. The descriptions of processes are in Ray's store, which survives Ray's head
where that keeps its tables (in RocksDB or Redis).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from llmserve.errors import LLMServeError, NoAnswer
from llmserve.machines.controller import DESIRED, Controller, Described, Desired, process_key, seen_key
from llmserve.machines.keeper import DRAIN_S, Keeper, Status
from llmserve.machines.processes import Process, Worker
from llmserve.machines.store import Store

CONTROLLER, STORE = "controller", "store"  # actors that keep no process
STATUS_S = 1.5  # longest answer of a keeper
EMPTY_S = 5.0  # for a group or an engine to stop, when it has no request
KILLED_S = 5.0  # after the time that a process has to stop
HEAD_RESOURCE, HEAD_SHARE = "node:__internal_head__", 0.001  # Ray gives each node 1.0 of its own resource
KEEPER_OPTIONS: dict[str, Any] = {
    "max_restarts": -1,
    "max_task_retries": 0,  # the next step of the controller asks again
    "lifetime": "detached",
    "max_concurrency": 16,  # calls at once: of a keeper threads
}


def namespace_of(cluster: str) -> str:
    return f"llmserve-{cluster}"


def load(cluster: str, key: str) -> bytes | None:
    """None: nothing is stored under the key, or the cluster does not run."""
    store = _store_of(cluster)
    value: bytes | None = ray.get(store.load.remote(key)) if store is not None else None
    return value


def save(cluster: str, key: str, value: bytes | None) -> None:
    """value : None: forget it. The cluster must run."""
    store = _store_of(cluster)
    assert store is not None, f"cluster {cluster} has no store"
    ray.get(store.save.remote(key, value))


def _store_of(cluster: str) -> Any:
    """The store's actor; None: there is none."""
    try:
        return ray.get_actor(STORE, namespace_of(cluster))
    except ValueError:
        return None


def folder_of(cluster: str) -> Path:
    """The folder of a cluster's files and logs on this node, for this user only."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(f"{state}/llmserve/clusters/{cluster}").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"llmserve-{os.geteuid()}" / cluster
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


class StoreActor(Store):
    """The store of a cluster, for the controller and the keepers on all nodes. It runs on the node of Ray's head: when
    that is back, so is the store, with its files.
    """

    def __init__(self, cluster: str) -> None:
        super().__init__(folder_of(cluster) / "store")


class KeeperActor:
    """Keeps one process on the node where Ray has put the actor, from the actor's start on.

    The keeper has an event loop of its own, in a thread: the process starts although nobody calls the actor.
    """

    def __init__(self, cluster: str, name: str) -> None:
        _log_to_stderr()
        stored, desired = load(cluster, process_key(name)), load(cluster, DESIRED)
        if stored is None or desired is None:
            raise LLMServeError(f"{name} is not in the store of cluster {cluster}")
        described = msgspec.json.decode(stored, type=Described)
        context = ray.get_runtime_context()
        self._keeper = Keeper(
            described.process,
            described.revision,
            address=get_node_ip_address(),
            node=context.get_node_id(),
            folder=folder_of(cluster) / context.get_node_id()[:8],
            admin_key=msgspec.json.decode(desired, type=Desired).secrets.admin,
        )
        self._loop = _loop_in_a_thread()
        self._loop.call_soon_threadsafe(self._keeper.start)

    def status(self) -> Status:
        return self._keeper.status()

    def apply(self, described: Described) -> None:
        """Returns at once: the status says when the process follows."""
        self._loop.call_soon_threadsafe(self._keeper.follow, described.process, described.revision)

    def stop(self, within_s: float) -> None:
        asyncio.run_coroutine_threadsafe(self._keeper.stop(within_s), self._loop).result()


class ControllerActor:
    """Runs the controller of a cluster, from the actor's start on: after a restart by Ray nobody may call it.

    The controller has an event loop of its own, in a thread.
    """

    def __init__(self, cluster: str) -> None:
        _log_to_stderr()
        stored = load(cluster, DESIRED)
        if stored is None:
            raise LLMServeError(f"there is no cluster {cluster} in the store")
        self._controller = Controller(RayMachines(cluster), msgspec.json.decode(stored, type=Desired))
        self._loop = _loop_in_a_thread()
        self._running = asyncio.run_coroutine_threadsafe(self._controller.run(), self._loop)

    def change(self, desired: Desired) -> None:
        asyncio.run_coroutine_threadsafe(self._controller.change(desired), self._loop).result()

    def report(self) -> dict[str, Any]:
        report = asyncio.run_coroutine_threadsafe(self._controller.report(), self._loop).result()
        return {**report, "ready": self._controller.is_ready}


def _loop_in_a_thread() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop


class RayMachines:
    """The machines of a Ray cluster. Calls to Ray's head may block for as long as it is away: they run in threads."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._namespace = namespace_of(cluster)
        self._actors: dict[str, Any] = {}
        self._groups: dict[str, PlacementGroup] = {}

    async def nodes(self) -> Sequence[str]:
        rows = await asyncio.to_thread(ray.nodes)
        return [row["NodeID"] for row in rows if row["Alive"]]

    async def names(self) -> Collection[str]:
        rows = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        own = [row["name"] for row in rows if row["namespace"] == self._namespace]
        return {name for name in own if name not in (CONTROLLER, STORE)}

    # ---- workers ----

    async def provide(self, workers: Sequence[Worker], in_use: Collection[str]) -> None:
        wanted = {worker.name: worker for worker in workers}
        for name in self._groups.keys() - wanted.keys() - set(in_use):
            await asyncio.to_thread(remove_placement_group, self._groups.pop(name))
        for worker in workers:
            if worker.name not in self._groups:
                self._groups[worker.name] = await asyncio.to_thread(self._reserve, worker)

    def _reserve(self, worker: Worker) -> PlacementGroup:
        """One bundle: the engines of a worker, and the parts of a tensor-parallel engine, are on one node."""
        name = f"{self._namespace}/{worker.name}"
        with contextlib.suppress(ValueError):
            return get_placement_group(name)
        bundle = {"CPU": worker.cpus, "GPU": worker.gpus}
        resources = {kind: amount for kind, amount in bundle.items() if amount} or {"CPU": 0.001}
        return placement_group([resources], strategy="STRICT_PACK", name=name, lifetime="detached")

    # ---- processes ----

    async def place(self, process: Process, node: str | None) -> None:
        self._actors[process.name] = await asyncio.to_thread(self._place, process, node)

    def _place(self, process: Process, node: str | None) -> Any:
        strategy: Any = "DEFAULT"
        if process.worker:
            strategy = PlacementGroupSchedulingStrategy(self._groups[process.worker], placement_group_bundle_index=0)
        elif node is not None:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        elif process.kind == "gateway":
            strategy = "SPREAD"
        elif near := self._node_near(process):
            strategy = NodeAffinitySchedulingStrategy(near, soft=True)
        cpus = process.cpus if node is None else 0.0  # there is a place for it, however full the node is
        options = {"name": process.name, "namespace": self._namespace, "get_if_exists": True}
        actor = ray.remote(KeeperActor).options(
            **KEEPER_OPTIONS, **options, num_cpus=cpus, num_gpus=process.gpus, scheduling_strategy=strategy
        )
        return actor.remote(self._cluster, process.name)

    def _node_near(self, process: Process) -> str | None:
        """The node of the process's engines, if it has room: Ray would wait for room there, and add no other node."""
        node = self._node_of(process.near)
        free = available_resources_per_node().get(node, {}) if node is not None else {}
        return node if free.get("CPU", 0.0) >= process.cpus else None

    def _node_of(self, workers: Sequence[str]) -> str | None:
        """The node of the first of these workers that is placed."""
        for name in workers:
            group = self._groups.get(name)
            table = placement_group_table(group) if group is not None else {}
            if node := table.get("bundles_to_node_id", {}).get(0):
                return str(node)
        return None

    async def _actor(self, name: str) -> Any:
        if name not in self._actors:
            self._actors[name] = await asyncio.to_thread(ray.get_actor, name, self._namespace)
        return self._actors[name]

    async def apply(self, described: Described) -> None:
        with contextlib.suppress(RayError, TimeoutError, ValueError):  # a keeper that restarts reads the store
            (await self._actor(described.process.name)).apply.remote(described)

    async def status(self, name: str) -> Status | None:
        try:
            actor = await self._actor(name)
            status: Status = await asyncio.wait_for(_awaited(actor.status.remote()), STATUS_S)
            return status
        except (RayError, TimeoutError, ValueError):
            return None

    async def remove(self, name: str, within_s: float = DRAIN_S) -> None:
        """within_s : after which the process is killed"""
        with contextlib.suppress(RayError, TimeoutError, ValueError):
            actor = await self._actor(name)
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(_awaited(actor.stop.remote(within_s)), within_s + KILLED_S)
            await asyncio.to_thread(ray.kill, actor)
        self._actors.pop(name, None)

    # ---- the store ----

    async def load(self, key: str) -> bytes | None:
        return await asyncio.to_thread(load, self._cluster, key)

    async def save(self, key: str, value: bytes | None) -> None:
        await asyncio.to_thread(save, self._cluster, key, value)


async def _awaited(reference: Any) -> Any:
    return await reference


# ---- for commands ----------------------------------------------------------------------------------------------------


def connect(address: str, cluster: str) -> None:
    """Connect this process to the Ray of a cluster. Raises NoAnswer."""
    try:
        ray.init(address=address, namespace=namespace_of(cluster), log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NoAnswer(f"there is no Ray at {address}: {error}") from error


@contextlib.contextmanager
def connected(address: str, cluster: str) -> Iterator[None]:
    """Connect this process to the Ray of a cluster for a block. Raises NoAnswer.

    Ray prints messages of its own on standard output, where a command's result belongs: they go to standard error.
    """
    with contextlib.redirect_stdout(sys.stderr):
        connect(address, cluster)
        try:
            yield
        finally:
            ray.shutdown()


def known(cluster: str) -> Desired | None:
    """What the store says of the cluster; None: it does not run."""
    stored = load(cluster, DESIRED)
    return msgspec.json.decode(stored, type=Desired) if stored is not None else None


def bring_up(desired: Desired) -> Any:
    """Start the cluster's controller, or have the running one follow `desired`. Returns the controller's actor."""
    cluster = desired.file.name
    if _store_of(cluster) is None:
        store = ray.remote(StoreActor).options(
            name=STORE,
            namespace=namespace_of(cluster),
            num_cpus=0,
            resources={HEAD_RESOURCE: HEAD_SHARE},
            **{**KEEPER_OPTIONS, "max_task_retries": -1, "max_concurrency": 1},
        )
        ray.get(store.remote(cluster).clear.remote())  # files of a cluster whose Ray has ended
    save(cluster, DESIRED, msgspec.json.encode(desired))
    actor = ray.remote(ControllerActor).options(
        name=CONTROLLER,
        namespace=namespace_of(cluster),
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy=_on_head(),
        **{**KEEPER_OPTIONS, "max_task_retries": -1},
    )
    controller = actor.remote(cluster)
    ray.get(controller.change.remote(desired))
    return controller


def _on_head() -> Any:
    """On the node of Ray's head, if it has room: without the head nothing can be placed anyway."""
    heads = [row["NodeID"] for row in ray.nodes() if row["Alive"] and HEAD_RESOURCE in row["Resources"]]
    return NodeAffinitySchedulingStrategy(heads[0], soft=True) if heads else "DEFAULT"


def report_of(cluster: str, within_s: float = 30.0) -> dict[str, Any]:
    """The controller's report. Raises NoAnswer."""
    try:
        controller = ray.get_actor(CONTROLLER, namespace_of(cluster))
        report: dict[str, Any] = ray.get(controller.report.remote(), timeout=within_s)
        return report
    except ValueError as error:
        raise NoAnswer(f"there is no cluster {cluster} in this Ray: start it with `llmserve up`") from error
    except (GetTimeoutError, RayError) as error:
        raise NoAnswer(f"the controller of cluster {cluster} does not answer: {error}") from error


def take_down(cluster: str, drain_s: float = DRAIN_S) -> None:
    """Stop the controller, then every process: gateways first, which end their requests, then groups and engines.

    drain_s : of the gateways' requests. Whatever has not stopped by then is killed: so the end comes within drain_s and
    some twenty seconds.
    """
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(CONTROLLER, namespace_of(cluster)))
    asyncio.run(_remove_all(RayMachines(cluster), drain_s))
    for row in placement_group_table().values():
        if row["name"].startswith(f"{namespace_of(cluster)}/") and row["state"] != "REMOVED":
            remove_placement_group(get_placement_group(row["name"]))
    if (store := _store_of(cluster)) is not None:
        ray.get(store.clear.remote())
        ray.kill(store)


async def _remove_all(machines: RayMachines, drain_s: float) -> None:
    names = await machines.names()
    gateways = {name for name in names if name.startswith("gateway-")}
    # Without gateways nothing is in flight behind them.
    for part, within_s in ((gateways, drain_s), (set(names) - gateways, EMPTY_S)):
        await asyncio.gather(*(_removed(machines, name, within_s) for name in part))
        for name in part:
            for key in (process_key(name), seen_key(name)):
                await machines.save(key, None)


async def _removed(machines: RayMachines, name: str, within_s: float) -> None:
    """A keeper that does not answer has not been placed, or has lost its node: nobody waits for it."""
    await machines.remove(name, within_s if await machines.status(name) is not None else 0.0)
