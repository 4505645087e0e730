"""Each serving group as a process of its own behind one door (`--group-processes`).

The parent parses calls, predicts lengths, knows streams and deadlines, and sends each request to its group's process,
an `llmserve serve --group NAME` with the engines of the group's workers, which schedules. So schedulers scale out over
cores, and what kills one group's process leaves the others alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from llmserve import config as configuration
from llmserve.api.limits import ApiConfig
from llmserve.config import Config, PredictorConfig, ServerConfig
from llmserve.engines.engine import Engine, EngineError
from llmserve.engines.engine_process import EngineProcess
from llmserve.errors import ConfigError
from llmserve.scheduling.layout import FALLBACK, PlannedGroup, assign, shortfalls
from llmserve.scheduling.messages import ServingGroup
from llmserve.scheduling.policies import DispatchConfig, SchedulingConfig

log = logging.getLogger("llmserve")

SLOTS = 1_000_000  # of a group's process, as the door sees it: it queues for itself
LOOK_S = 10.0  # for engines to say what they serve, before the groups are made without them
LOOK_EVERY_S = 0.2


async def models_by_worker(engines: Sequence[Engine]) -> dict[str, set[str]]:
    """What each worker's engines serve, of those that answer within LOOK_S; the others are told of and left out."""
    until_s = asyncio.get_running_loop().time() + LOOK_S
    found: dict[str, set[str]] = {}
    silent = list(engines)
    while silent and asyncio.get_running_loop().time() < until_s:
        answers = await asyncio.gather(*(engine.probe() for engine in silent), return_exceptions=True)
        for engine, answer in zip(silent, answers, strict=True):
            if isinstance(answer, EngineError):
                continue
            if isinstance(answer, BaseException):
                raise answer
            worker = engine.info.worker or engine.info.name
            found.setdefault(worker, set()).update(model.id for model in answer.models)
        silent = [engine for engine, answer in zip(silent, answers, strict=True) if isinstance(answer, EngineError)]
        if silent:
            await asyncio.sleep(LOOK_EVERY_S)
    for engine in silent:
        log.warning("engine %s does not answer: it is in no group but %s", engine.info.name, FALLBACK)
    return found


def assigned(
    planned: Sequence[PlannedGroup], models: Mapping[str, set[str]], workers: Sequence[str]
) -> tuple[ServingGroup, ...]:
    """The plan's groups that have workers, and the fallback group of the others.

    workers : all.  Raises ConfigError when no group has any.
    """
    groups = assign(planned, models, {})
    for what in shortfalls(planned, groups, workers):
        log.warning("%s", what)
    there = [
        msgspec.structs.replace(group, workers=tuple([worker for worker in group.workers if worker in workers]))
        for group in groups
    ]
    if not any(group.workers for group in there):
        raise ConfigError("plan: none of the engines serves any of its groups")
    taken = {worker for group in there for worker in group.workers}
    rest = tuple([worker for worker in workers if worker not in taken])
    by_name = {group.name: group for group in there}
    fallback = by_name.get(
        FALLBACK, ServingGroup(FALLBACK, (), ())
    )  # a plan may have one, and name some of its workers
    by_name[FALLBACK] = msgspec.structs.replace(fallback, workers=(*fallback.workers, *rest))
    return tuple([group for group in by_name.values() if group.workers])


def process(config: Config, group: ServingGroup, entries: Sequence[str], folder: Path) -> EngineProcess:
    """That serves a group. entries : its engines, as --engine has them.  folder : for its configuration."""
    file = folder / f"{_file_name(group)}.toml"
    file.write_text(_toml(_of_group(config, group, entries)), encoding="utf-8")

    def command(port: int) -> list[str]:
        words = [sys.executable, "-m", "llmserve", "serve", "--config", str(file)]
        return [*words, "--port", str(port), "--group", group.name]

    # Its file says everything, and the environment, which goes before files, was heeded when that was written.
    ours = dict.fromkeys(name for name in os.environ if name.startswith(configuration.ENVIRONMENT_PREFIX))
    return EngineProcess(
        f"the process of group {group.name}", command, start_s=config.engines.engine_start_s, environment=ours
    )


def _file_name(group: ServingGroup) -> str:
    return quote(group.name, safe=" ")


def _of_group(config: Config, group: ServingGroup, entries: Sequence[str]) -> Config:
    """What its process is to do: schedule. All that needs a client's key is the door's."""
    journal = config.server.journal
    return msgspec.structs.replace(
        config,
        server=ServerConfig(
            drain_s=config.server.drain_s,
            journal=f"{journal}.{_file_name(group)}" if journal is not None else None,
            log_level=config.server.log_level,
        ),
        engines=msgspec.structs.replace(config.engines, engine=tuple(entries), group_processes=False),
        prediction=PredictorConfig(predictor=("none",)),
        limits=ApiConfig(body_bytes_max=config.limits.body_bytes_max, prompt_chars_max=config.limits.prompt_chars_max),
    )


def of_door(config: Config) -> Config:
    """What the parent does: hand each request on at once, in the order in which they come."""
    scheduling = config.scheduling
    return msgspec.structs.replace(
        config,
        engines=msgspec.structs.replace(config.engines, barrier=False),
        scheduling=SchedulingConfig(
            bins=1,
            batch_size=1,
            release="greedy",
            order="fffs",
            queue_requests_max=scheduling.queue_requests_max,
            retries_max=scheduling.retries_max,
            engine_wait_s=scheduling.engine_wait_s,
            circuit_faults_max=0,  # each group has circuits of its own
        ),
        dispatch=DispatchConfig(),
    )


def _toml(config: Config) -> str:
    """What is JSON of texts, numbers and lists of them is TOML, too."""
    lines = []
    for section, fields in msgspec.to_builtins(config).items():
        lines.append(f"[{section}]")
        lines += [
            f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items() if value is not None
        ]
    return "\n".join(lines) + "\n"
