"""Starts the parts of a server: engines, predictors, and the cluster that uses both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

import predictor
from llmserve.engines.kinds import kinds_of
from llmserve.engines.openai import OpenAIEngine
from llmserve.engines.process import EngineProcess
from llmserve.errors import ConfigError
from llmserve.forecasts.learned_state import learnt_before
from llmserve.forecasts.record import LengthRecord
from llmserve.forecasts.saving import Saver
from llmserve.forecasts.state_file import StateFile
from llmserve.live.driver import LiveCluster
from llmserve.live.journal import Header, Journal
from llmserve.planning import group_plan
from llmserve.planning.assignment import assign
from llmserve.planning.regroup import Regrouper
from llmserve.runtime.extras import need
from llmserve.server.reload import Reloader, plan_part
from llmserve.settings.by_model import PREFIX, by_model
from llmserve.settings.tree import Config
from llmserve.spelling import nearest
from predictor.errors import PredictorError
from predictor.forecaster import Forecaster, ForecasterByModel
from predictor.online import OnlineLearner
from predictor.process import PredictorProcess

log = logging.getLogger("llmserve")


def checked(config: Config) -> Config:
    """Fill in the defaults that depend on the engines, and check the settings before any slow start.

    Raises ConfigError.
    """
    engines = config.engines
    engines.check()
    scheduling = config.scheduling.resolved(barrier=config.barrier)
    if engines.barrier and engines.slots is not None and engines.slots < scheduling.full_batch:
        raise ConfigError(f"slots: {engines.slots} slots cannot run a batch of {scheduling.full_batch} at once")
    try:
        scheduling.scheduler()
        config.dispatch.solvers(scheduling, barrier=config.barrier)
        for profile in config.dispatch.profiles().values():
            if profile.misfit:
                log.warning("profile %s: %s", profile.name, profile.misfit)
        by_model("predictor", config.prediction.predictor)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if scheduling.goes_by_times and not config.dispatch.profile:
        log.warning(
            "order %s without --profile: the duration of batches is not known, so requests are given up only after "
            "their deadlines",
            scheduling.order,
        )
    config = msgspec.structs.replace(config, scheduling=scheduling)
    if config.server.traces_sample:
        need("traces", "opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter", why="traces_sample")
    if engines.replan_every_s is not None:
        need("plan", "scipy", why="replan_every_s")
    if engines.plan is not None:
        config = group_plan.with_plan(config)
    for kind in kinds_of(config):
        kind.check()
    return config


async def start_cluster(
    config: Config, stack: AsyncExitStack, reloader: Reloader, kept: StateFile | None = None
) -> tuple[LiveCluster, str | None, Saver | None]:
    """Start engines and predictors concurrently (each loads for seconds), then create the cluster.

    reloader : takes the plan as a part.  kept : where what was learnt is kept; None: nowhere.
    Returns the cluster, the GPUs of the engines that llmserve started, see EngineKind.gpus, and what saves the state.
    """
    async with _concurrently() as group:
        engines_task = group.create_task(_start_engines(config, stack))
        predictors_task = group.create_task(_start_predictors(config, stack))
    (engines, gpus), predictors = engines_task.result(), predictors_task.result()
    learnt = learnt_before(config, kept, predictors, engines)
    forecasts = predictors[""].forecasts if "" in predictors else ()
    planned = group_plan.planned_groups(config)
    groups = assign(planned, {}, {})
    header = Header(
        config.scheduling,
        config.scheduling.scores(forecasts),
        config.scheduling.likely_lengths(forecasts),
        groups=groups,
        replan=group_plan.replan_when(config),
        learnt=learnt.models,
    )
    path = Path(config.server.journal) if config.server.journal else None
    journal = Journal(header, path=path)
    cluster = LiveCluster(
        header.scheduler(),
        engines,
        journal,
        forecaster=_forecaster(config, predictors, learnt.learners),
        record=LengthRecord(Path(config.prediction.record)) if config.prediction.record else None,
        config=config.live,
        is_served=group_plan.served_models(config),
        solvers=config.dispatch.solvers(config.scheduling, barrier=config.barrier),
        profiles=config.dispatch.profiles(),
        prompt_tokens=learnt.prompt_tokens,
    )
    cluster.routes.engines_are_groups = config.engines.engines_are_groups
    cluster.routes.restore(learnt.origins)
    cluster.fleet.planned = group_plan.planned_models(config)
    saver = Saver(kept, lambda: learnt.saving(cluster.scheduler, cluster.routes)) if kept is not None else None
    if saver is not None:
        stack.push_async_callback(saver.close)  # after the cluster's end, when the last answers are learnt
        saver.start()
    stack.push_async_callback(cluster.close)
    if groups:
        regrouper = Regrouper(cluster, planned, groups, group_plan.replanner(config))
        stack.push_async_callback(regrouper.close)
        regrouper.start()
        reloader.add(plan_part(regrouper))
    return cluster, gpus, saver


@contextlib.asynccontextmanager
async def _concurrently() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group. The first task that fails cancels the other tasks, and its exception is raised unwrapped."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


# ---- engines --------------------------------------------------------------------------------------------------------


async def _start_engines(config: Config, stack: AsyncExitStack) -> tuple[list[OpenAIEngine], str | None]:
    """Start the local engines, wait until all are up, and connect to all engines. Engines by URL may be down.

    Returns the engines, and the GPUs of the local engines, see EngineKind.gpus.
    """
    kinds = kinds_of(config)
    await _start_processes([process for kind in kinds for process in kind.processes()], stack)
    engines = [engine for kind in kinds for engine in kind.connect()]
    for engine in engines:
        stack.push_async_callback(engine.close)
    return engines, next((kind.gpus for kind in kinds if kind.gpus is not None), None)


async def _start_processes(processes: list[EngineProcess], stack: AsyncExitStack) -> None:
    """Start, and later stop, all processes concurrently. The first failure ends all. Raises EngineStartError."""

    async def stop() -> None:
        await asyncio.gather(*(process.stop() for process in processes))

    stack.push_async_callback(stop)
    async with _concurrently() as group:
        for process in processes:
            group.create_task(process.start())


async def warn_of_unserved(config: Config, cluster: LiveCluster) -> None:
    """Wait until all engines are up, then warn of settings for models that no engine serves."""
    if config.engines.group is not None:  # servers of other groups may serve the other models
        return
    while not all(cluster.engines_ready.values()):  # noqa: ASYNC110 (no event to wait for)
        await asyncio.sleep(0.2)
    slos_ms = [text for text in config.limits.slo_ms if text.startswith(PREFIX)]
    for setting, texts in (
        ("profile", config.dispatch.profile),
        ("predictor", config.prediction.predictor),
        ("slo_ms", slos_ms),
    ):
        for model in sorted(set(by_model(setting, texts)) - {""} - set(cluster.models)):
            log.warning("%s: no engine serves a model %s%s", setting, model, nearest(model, cluster.models))


# ---- predictions ----------------------------------------------------------------------------------------------------


def _forecaster(
    config: Config, predictors: Mapping[str, PredictorProcess], learners: Mapping[str, OnlineLearner]
) -> Forecaster | ForecasterByModel:
    """Return the forecaster. predictors, learners : by model.

    A model with its own predictor, or with `none`, learns from its own answers only.
    """

    forecasters = {
        model: Forecaster(predictors.get(model), learner, budget_s=config.prediction.predictor_budget_s)
        for model, learner in learners.items()
    }
    others = forecasters.pop("")
    return ForecasterByModel(forecasters, others=others) if forecasters else others


async def _start_predictors(config: Config, stack: AsyncExitStack) -> dict[str, PredictorProcess]:
    """Start all predictors. Returns them by model; "": for every other model."""
    async with _concurrently() as group:
        tasks = {
            model: group.create_task(_start_predictor(folder, config, stack))
            for model, folder in _predictor_folders(config).items()
        }
    return {model: task.result() for model, task in tasks.items()}


async def _start_predictor(folder: Path, config: Config, stack: AsyncExitStack) -> PredictorProcess:
    process = PredictorProcess(folder, threads=config.prediction.predictor_threads)
    stack.push_async_callback(process.close)
    try:
        await process.start()
    except PredictorError as error:
        raise ConfigError(f"predictor: {error}") from error
    return process


def _predictor_folders(config: Config) -> dict[str, Path]:
    """Return the predictors' folders by model; "": for every other model. Models with `none` are left out."""
    chosen = by_model("predictor", config.prediction.predictor)
    folders = {model: Path(folder) for model, folder in chosen.items() if folder != "none"}
    if "" not in chosen and config.engines.engine in ((), ("embedded",)) and not config.engines.model:
        folders[""] = predictor.DEMO  # the demo predictor fits the demo model only
    return folders
