"""Files of prompts and the lengths of their answers, for the simulator and for evaluations."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from llmserve.calls.prompt_size import CHARACTERS_PER_TOKEN
from llmserve.errors import ConfigError
from llmserve.runtime.extras import need, need_predictor
from llmserve.simulation.online import OnlineRows
from llmserve.simulation.scenario import Answers
from predictor.dataset import Row, load_rows
from predictor.errors import PredictorError
from predictor.online import Forecast, OnlineLearner, bounded
from predictor.prediction import Prediction

if TYPE_CHECKING:
    from predictor.predict import LengthPredictor
    from predictor.prompt import Prompt

FORECASTS_MAX = 10_000  # prompts of a simulation with a predictor; a larger file is sampled at random
FORECASTS_AT_ONCE = 256

T = TypeVar("T")


def read_answers(source: str, folder: str | None, *, learning: bool = False) -> Answers:
    """Read a file of prompts for the simulator, with forecasts by the trained predictor in `folder`, if given.

    source : FILE[:COLUMN], for predictor.dataset.load_rows.  learning : with the rows, and a learner of their answers,
    for forecasts during the run.  Raises ConfigError on a bad file or folder.
    """
    need_readers(source)
    if folder is not None:
        need_predictor("a trained predictor")
    try:
        rows = load_rows([source]).rows
        if folder is not None and len(rows) > FORECASTS_MAX:
            rows = random.Random(0).sample(rows, FORECASTS_MAX)
        forecasts = None if folder is None else _forecasts(folder, [row.prompt for row in rows])
    except PredictorError as error:
        raise ConfigError(f"prompts: {error}") from error
    prompts = [row.prompt for row in rows]
    characters = [len(prompt.text) + len(prompt.system) + prompt.history_characters for prompt in prompts]
    output_tokens = np.array([row.output_tokens for row in rows], dtype=float)
    online = OnlineRows(np.array(rows, dtype=object), RowLearner) if learning else None
    return Answers(output_tokens, np.array(characters) / CHARACTERS_PER_TOKEN, forecasts, online)


def need_readers(*sources: str) -> None:
    """Raise ConfigError if a package that reads one of these sources of rows is not installed."""
    for source in sources:
        if source.startswith("hub:"):
            need("train", "datasets", why=f"reading {source}")
        elif ".parquet" in source:
            need("train", "pyarrow", why=f"reading {source}")


class RowLearner:
    """A server's learner that gets the rows of a file."""

    def __init__(self) -> None:
        self._learner = OnlineLearner()

    def forecast(self, row: Row) -> Forecast:
        """The forecast for the row's prompt, at most the row's max_tokens."""
        return self._bounded(row, self._learner.forecast(row.prompt, None))

    def revise(self, row: Row, forecast: Forecast) -> Forecast:
        """The same forecast by what was learnt since."""
        return self._bounded(row, self._learner.revise(forecast))

    def _bounded(self, row: Row, forecast: Forecast) -> Forecast:
        return replace(forecast, lengths=bounded(forecast.lengths, most=row.output_tokens_max))

    def observe(self, row: Row, forecast: Forecast) -> None:
        """Learn the length of the row's answer."""
        self._learner.observe(forecast, row.output_tokens, row.capped)


def _forecasts(folder: str, prompts: Sequence[Prompt]) -> NDArray[np.float64]:
    from predictor.predict import LengthPredictor

    return np.array([prediction.lengths for prediction in predictions_by(LengthPredictor.load(folder), prompts)])


def predictions_by(predictor: LengthPredictor, prompts: Sequence[Prompt]) -> list[Prediction]:
    """Return the predictions. Shows progress in a terminal."""
    print(f"predicting the answers to {len(prompts):,} prompts", file=sys.stderr)
    parts = [prompts[start : start + FORECASTS_AT_ONCE] for start in range(0, len(prompts), FORECASTS_AT_ONCE)]
    return [prediction for part in with_bar(parts, "predicting") for prediction in predictor.predictions(part)]


def with_bar(items: Sequence[T], label: str) -> Iterable[T]:
    """The items, with a progress bar on stderr if that is a terminal."""
    console = Console(stderr=True)
    return track(items, label, console=console, transient=True, disable=not console.is_terminal)
