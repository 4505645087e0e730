"""cluster.toml: the engines, groups and gateways of a cluster."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from llmserve import planning as herd
from llmserve.errors import ConfigError
from llmserve.planning import HerdGroup, Plan
from llmserve.settings import load as configuration
from llmserve.settings.tree import Config
from llmserve.spelling import nearest

NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", re.ASCII)
GROUP_OF_ALL = "all"  # without groups
Table = dict[str, Any]
Count = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]


class EngineTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas NAME-0, NAME-1, ... of one engine.

    kind     vllm, embedded, timed (no model: for trials), or command
    model    vllm: folder or hub id; timed: name of the model; embedded: folder, "" for the demo model
    worker   engines of the same worker share its GPUs: replica i of each is on worker WORKER-i; "": the engine's own
    replicas_max  replicas are added up to so many while the requests want more engines; None: never (scaling.py)
    start_s  longest start.  hung_s : a replica that does not answer GET /health for so long is started again; 0: never
    gpus, cpus  of each replica.  args : further arguments.  command : words, with {host}, {port}
    """

    name: str
    kind: Literal["vllm", "embedded", "timed", "command"]
    model: str = ""
    replicas: Annotated[int, Meta(ge=0)] = 1
    replicas_max: Annotated[int, Meta(ge=1)] | None = None
    worker: str = ""
    gpus: NotNegative = 0.0
    cpus: NotNegative | None = None
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    python: str | None = None
    start_s: float = 600.0
    hung_s: NotNegative = 30.0

    def worker_of(self, number: int) -> str:
        return f"{self.worker or self.name}-{number}"


class GatewayTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateways. settings : as in the file of `llmserve serve`, by section

    count  0: one on each node, all on `port`; else gateway N listens on `port` + N
    """

    count: Annotated[int, Meta(ge=0)] = 1
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    api_key_file: str | None = None
    cpus: NotNegative = 0.25
    settings: dict[str, Table] = {}


class PlanningTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Planning again. instance : file of `llmserve plan`; None: never.  every_s : least time between two plans"""

    instance: str | None = None
    every_s: Annotated[float, Meta(gt=0)] = 60.0


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster.

    host     address on which all processes listen and are reached; None: the node's
    engine   the engines; group : as in a plan, () for one group of all engines; plan : a file, instead of groups
    serve    settings of all groups, as in the file of `llmserve serve`, by section
    """

    name: str = "llmserve"
    host: str | None = None
    engine: Annotated[tuple[EngineTable, ...], Meta(min_length=1)]
    group: tuple[HerdGroup, ...] = ()
    group_cpus: NotNegative = 0.25
    plan: str | None = None
    serve: dict[str, Table] = {}
    gateway: GatewayTable = GatewayTable()
    planning: PlanningTable = PlanningTable()

    @property
    def workers(self) -> dict[str, list[tuple[EngineTable, int]]]:
        """Engines (with the number of the replica) by worker."""
        workers: dict[str, list[tuple[EngineTable, int]]] = {}
        for engine in self.engine:
            for number in range(engine.replicas):
                workers.setdefault(engine.worker_of(number), []).append((engine, number))
        return workers

    def first_plan(self) -> Plan:
        """The groups. Raises ConfigError for a bad plan."""
        if self.plan is not None:
            return herd.Plan.load(self.plan)
        if self.group:
            return Plan(self.group)
        models = sorted({engine.model for engine in self.engine if engine.model})
        return Plan((HerdGroup(GROUP_OF_ALL, len(self.workers), tuple(models), workers=tuple(self.workers)),))


def read_cluster(path: Path, plan: str | None = None) -> ClusterFile:
    """plan : a plan's file, instead of the groups in the file. Raises ConfigError, which names the file and the key."""
    try:
        tables = tomllib.loads(path.read_text())
        if "door" in tables:
            raise ConfigError(f"{path}: the table [door] is [gateway] now")
        file = msgspec.convert(tables, ClusterFile)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if plan is not None:
        file = msgspec.structs.replace(file, plan=plan, group=())
    folder = path.parent
    file = msgspec.structs.replace(
        file,
        plan=_beside(folder, file.plan) if plan is None else plan,
        gateway=msgspec.structs.replace(file.gateway, api_key_file=_beside(folder, file.gateway.api_key_file)),
        planning=msgspec.structs.replace(file.planning, instance=_beside(folder, file.planning.instance)),
    )
    try:
        _check(file)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return file


def _beside(folder: Path, name: str | None) -> str | None:
    """A file that is named relative to the cluster's file."""
    return None if name is None else str(folder / Path(name).expanduser())


def _check(file: ClusterFile) -> None:
    names = [engine.name for engine in file.engine]
    for name in (file.name, *names, *(engine.worker for engine in file.engine if engine.worker)):
        if not NAME.fullmatch(name):
            raise ConfigError(f"the name {name!r} may have only lower-case letters, digits and hyphens between them")
    if len(set(names)) < len(names):
        raise ConfigError("two engines have the same name")
    if file.plan is not None and file.group:
        raise ConfigError("plan and [[group]] cannot both be given")
    for engine in file.engine:
        if (engine.kind == "command") != bool(engine.command):
            raise ConfigError(f"engine {engine.name}: `command` is for engines of kind command, and needed there")
        if engine.replicas_max is not None:
            _check_scaling(file, engine)
        if engine.kind in ("vllm", "timed", "command") and not engine.model:
            raise ConfigError(f"engine {engine.name}: needs a model")
    groups = file.first_plan().groups
    for group in groups:
        if not NAME.fullmatch(group.name):
            raise ConfigError(f"the group's name {group.name!r} may have only lower-case letters, digits and hyphens")
        for worker in group.workers:
            if worker not in file.workers:
                raise ConfigError(f"group {group.name}: no engine is on a worker {worker}")
    for section, table in (*file.serve.items(), *file.gateway.settings.items()):
        _check_settings(section, table)


def _check_scaling(file: ClusterFile, engine: EngineTable) -> None:
    if engine.replicas_max is not None and engine.replicas_max < max(1, engine.replicas):
        raise ConfigError(f"engine {engine.name}: replicas_max is less than replicas")
    if engine.worker:
        raise ConfigError(f"engine {engine.name}: replicas_max is not for engines that share a worker")
    if file.planning.instance is not None:
        raise ConfigError(f"engine {engine.name}: replicas_max and planning again cannot both be given")


def _check_settings(section: str, table: Table) -> None:
    structs = configuration.sections(Config)
    if section not in structs:
        raise ConfigError(f"there is no section [{section}] of settings{nearest(section, structs)}")
    fields = structs[section].__struct_fields__
    for name in table:
        if name not in fields:
            raise ConfigError(f"unknown setting {name!r} in [{section}]{nearest(name, fields)}")
    if section == "engines" and "engine" in table:
        raise ConfigError("[engines] engine: the engines of a group follow from the plan")
    configuration.convert(structs[section], table)
