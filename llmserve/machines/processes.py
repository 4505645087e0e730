"""What runs in a cluster: the command, files and resources of each engine, group and gateway.

A process is described once, by data that any node can carry out: {host}, {port} and {folder} are filled in there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from llmserve import demo as embedded
from llmserve.engines import vllm as vllm_process
from llmserve.machines.cluster_file import ClusterFile, EngineTable

Kind = Literal["engine", "group", "gateway"]
SERVE = (sys.executable, "-m", "llmserve", "serve", "--config", "{folder}/serve.toml", "--port", "{port}")
GROUP_SETTINGS: dict[str, dict[str, Any]] = {
    "live": {"keep_alive_s": 0.0, "probe_every_s": 1.0},  # the gateways keep their clients' connections alive
}
DOOR_SETTINGS: dict[str, dict[str, Any]] = {
    # A group tells when it is down; a request may wait in its queue for as long as an answer may take.
    "engines": {"engine_idle_s": 3600.0},
    "scheduling": {"order": "fffs", "circuit_faults_max": 0, "retries_max": 5, "engine_wait_s": 120.0},
    "live": {"probe_every_s": 1.0},
    "prediction": {"memory_keys": 0, "predictor": ["none"]},  # the groups predict
}


class Secrets(msgspec.Struct, frozen=True):
    """Keys made when the cluster was: of gateways to groups, of groups to engines, of the controller to both."""

    gateway: str
    engine: str
    admin: str


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process.

    words        of the command, with {host}, {port} and {folder}
    files        texts by name, in a folder of the process, which only its owner can read
    environment  further variables
    host         address to listen on; None: all addresses of the node, on loopback where the node's is
    port         0: any free one
    worker, gpus, cpus  the worker whose resources the process uses, and how much of them; "": none
    hung_s       a process that does not answer GET /health for so long is killed and started again; 0: never
    near         workers on whose node the process should run
    """

    name: str
    kind: Kind
    words: tuple[str, ...]
    files: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    host: str | None = None
    port: int = 0
    start_s: float = 600.0
    hung_s: float = 15.0
    worker: str = ""
    gpus: float = 0.0
    cpus: float = 0.0
    near: tuple[str, ...] = ()


class Worker(msgspec.Struct, frozen=True):
    """Resources on one node. gpus, cpus : of all engines of the worker together"""

    name: str
    gpus: float
    cpus: float


def workers_of(file: ClusterFile) -> list[Worker]:
    return [
        Worker(name, max(engine.gpus for engine, _ in engines), sum(_cpus(engine) for engine, _ in engines))
        for name, engines in file.workers.items()
    ]


def _cpus(engine: EngineTable) -> float:
    return engine.cpus if engine.cpus is not None else 0.25 if engine.kind == "timed" else 1.0


# ---- engines -------------------------------------------------------------------------------------------------------


def engines_of(file: ClusterFile, secrets: Secrets) -> dict[str, Process]:
    """The engines' processes by name. Raises ConfigError for bad arguments."""
    processes = {}
    for worker, engines in file.workers.items():
        for engine, number in engines:
            words, environment = _command(engine, secrets)
            name = f"{engine.name}-{number}"
            processes[name] = Process(
                name=name,
                kind="engine",
                words=words,
                environment=environment,
                host=file.host,
                start_s=engine.start_s,
                hung_s=engine.hung_s,
                worker=worker,
                gpus=engine.gpus / len(engines),
                cpus=_cpus(engine),
            )
    return processes


def _command(engine: EngineTable, secrets: Secrets) -> tuple[tuple[str, ...], dict[str, str]]:
    where = ("--host", "{host}", "--port", "{port}")
    python = engine.python or sys.executable
    if engine.kind == "command":
        return engine.command, {"ENGINE_API_KEY": secrets.engine}
    if engine.kind == "timed":
        own = (python, "-m", "llmserve.engines.timed", "--model", engine.model, "--api-key", secrets.engine)
        return (*own, *where, *engine.args), {}
    if engine.kind == "embedded":
        model = ("--model", engine.model) if engine.model else ()
        own = (python, "-m", "llmserve.demo", *model)
        return (*own, *where, *engine.args), {embedded.KEY_VARIABLE: secrets.engine}
    vllm_process.check_args(engine.args)
    words = vllm_process.command(python, engine.model, None, engine.args, "{host}", "{port}")
    return tuple(words), {"VLLM_API_KEY": secrets.engine}


# ---- groups and gateways
# ----------------------------------------------------------------------------------------------


def group_process(file: ClusterFile, name: str, engines: Mapping[str, tuple[str, str]], secrets: Secrets) -> Process:
    """The server of a group. engines : (worker, URL) by name of the engine"""
    own = {f"{engine.name}-{number}": engine for row in file.workers.values() for engine, number in row}
    barrier = any(own[engine].kind == "embedded" for engine in engines if engine in own)
    settings = merged(
        GROUP_SETTINGS,
        {"engines": {"barrier": True}} if barrier else {},
        file.serve,
        {
            "server": {"gateway_key_file": "{folder}/gateway-key", "admin_key_file": "{folder}/admin-key"},
            "engines": {"engine": [f"{worker}={url}" for worker, url in engines.values()]},
        },
    )
    return Process(
        name=f"group-{name}",
        kind="group",
        words=SERVE,
        files={
            "serve.toml": as_toml(settings),
            "gateway-key": f"gateway: {secrets.gateway}\n",
            "admin-key": f"admin: {secrets.admin}\n",
        },
        environment={"LLMSERVE_ENGINE_API_KEY": secrets.engine},
        host=file.host,
        near=tuple(dict.fromkeys(worker for worker, _ in engines.values())),
        cpus=file.group_cpus,
    )


def gateway_process(
    file: ClusterFile,
    number: int,
    gateways: int,
    groups: Mapping[str, str],
    plan: str,
    keys: str | None,
    secrets: Secrets,
) -> Process:
    """A gateway, one of `gateways`.

    groups : URL by name.  plan : as JSON, its workers are groups.  keys : text of the key file
    """
    key_file = "keys.toml" if (file.gateway.api_key_file or "").endswith(".toml") else "keys"
    server = {"admin_key_file": "{folder}/admin-key"}
    if keys is not None:
        server["api_key_file"] = f"{{folder}}/{key_file}"
    settings = merged(
        DOOR_SETTINGS,
        {"limits": {"limits_part": 1.0 / max(1, gateways)}},
        file.gateway.settings,
        {
            "server": server,
            "engines": {
                "engine": [f"{name}={url}" for name, url in groups.items()],
                "engines_are_groups": True,
                "plan": "{folder}/plan.json",
            },
        },
    )
    files = {"serve.toml": as_toml(settings), "admin-key": f"admin: {secrets.admin}\n", "plan.json": plan}
    if keys is not None:
        files[key_file] = keys
    port = file.gateway.port
    return Process(
        name=f"gateway-{number}",
        kind="gateway",
        words=SERVE,
        files=files,
        environment={"LLMSERVE_ENGINE_API_KEY": secrets.gateway},
        host=file.host,
        port=port + number if port and file.gateway.count else port,
        cpus=file.gateway.cpus,
    )


def merged(*layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Settings by section; later layers win."""
    whole: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, table in layer.items():
            whole[section] = {**whole.get(section, {}), **table}
    return whole


def as_toml(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Settings as the file of `llmserve serve --config`. Their values are as JSON has them."""
    lines = []
    for section, table in settings.items():
        lines += [
            f"[{section}]",
            *(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in table.items()),
        ]
    return "\n".join(lines) + "\n"


def filled(texts: Sequence[str], **values: object) -> list[str]:
    """The texts with {host}, {port} and {folder} replaced; other braces stay."""
    result = []
    for text in texts:
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", str(value))
        result.append(text)
    return result
