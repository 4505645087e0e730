"""The predictors of answer lengths, and the folder that keeps what a server has learned."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import predictor
from llmserve.errors import ConfigError
from llmserve.forecasts import state_file
from llmserve.part import Part, Server
from llmserve.runtime.at_once import at_once
from llmserve.runtime.extras import need_predictor
from llmserve.settings.by_model import by_model
from llmserve.settings.tree import Config
from predictor.errors import PredictorError
from predictor.forecaster import Forecaster, ForecasterByModel
from predictor.online import OnlineLearner
from predictor.process import PredictorProcess


class State(Part):
    """The folder of --state, locked while the server runs. live/part.py reads it, and writes it from time to time."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        folder = server.config.server.state
        if folder:
            with state_file.opened(Path(folder)) as kept:
                server.add(kept)
                yield
        else:
            yield


class RunningPredictors(dict[str, PredictorProcess]):
    """Processes of predictors by model; "": of every other model."""


class Predictors(Part):
    """Trained predictors, each in a process of its own."""

    def check(self, config: Config) -> Config:
        try:
            by_model("predictor", config.prediction.predictor)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if _folders(config):
            need_predictor("a trained predictor")
        return config

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        config = server.config
        processes = RunningPredictors(
            {
                model: PredictorProcess(folder, threads=config.prediction.predictor_threads)
                for model, folder in _folders(config).items()
            }
        )
        async with AsyncExitStack() as stack:
            async with at_once() as group:
                for process in processes.values():
                    stack.push_async_callback(process.close)
                    group.create_task(_start(process))
            server.add(processes)
            yield


async def _start(process: PredictorProcess) -> None:
    try:
        await process.start()
    except PredictorError as error:
        raise ConfigError(f"predictor: {error}") from error


def _folders(config: Config) -> dict[str, Path]:
    """Return the predictors' folders by model; "": for every other model. Models with `none` are left out."""
    chosen = by_model("predictor", config.prediction.predictor)
    folders = {model: Path(folder) for model, folder in chosen.items() if folder != "none"}
    if "" not in chosen and config.engines.engine in ((), ("embedded",)) and not config.engines.model:
        folders[""] = predictor.DEMO  # the demo predictor fits the demo model only
    return folders


def forecaster(
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
