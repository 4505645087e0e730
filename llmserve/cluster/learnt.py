"""What the scheduler, the engines' clients and the prompt sizes have learnt, as one state; and the way back.

The scheduler takes its part back from the journal's header, so that a replay begins as the server did.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from heapq import nlargest
from typing import Any

import numpy as np

from llmserve.engines.openai_engine import OpenAIEngine
from llmserve.policies import SchedulingConfig
from llmserve.scheduling.lengths import Learnt
from llmserve.scheduling.model_queues import ModelQueues
from llmserve.scheduling.scheduler import Scheduler

MODELS_MAX = 64  # models whose answers are kept; those with the most answers
DECIMALS = 2  # of scores and lengths, tokens

Header = tuple[dict[str, Learnt], dict[str, dict[str, float]]]
"""The journal's `learnt` and `paces`."""


def scheduler_saving(
    scheduler: Scheduler, config: SchedulingConfig, learnt: Mapping[str, Learnt], paces: Mapping[str, dict[str, float]]
) -> Generator[None, None, dict[str, Any]]:
    """Make the state of a scheduler in slices (predictor/state.py).

    learnt, paces : from before the start; they hold for models and engines that have not come back yet.
    """
    queues = {model: own for model, own in scheduler.models.items() if own.service.answers > 0}
    yield
    models = {}
    for model in nlargest(MODELS_MAX, queues, key=lambda model: queues[model].service.answers):
        models[model] = _of_model(queues[model])
        yield
    for model in [model for model in learnt if model not in queues][: MODELS_MAX - len(models)]:
        models[model] = _of_learnt(learnt[model])
        yield
    present = {
        name: {model: pace.value for model, pace in engine.paces.items()}
        for name, engine in scheduler.engines.items()
        if engine.paces
    }
    return {"scored_by": _scored_by(config), "models": models, "paces": {**paces, **present}}


def _of_model(queues: ModelQueues) -> dict[str, Any]:
    scores, lengths = queues.seen.predicted if queues.seen is not None else (queues.edges.values, np.zeros(0))
    service = queues.service
    return {
        "scores": scores,
        "lengths": lengths,
        "service": [service.seconds_per_token, service.tokens_mean, service.answers],
        "trusted": queues.trust.trusted,
    }


def _of_learnt(learnt: Learnt) -> dict[str, Any]:
    scores, lengths = np.array(learnt.scores), np.array(learnt.lengths)
    return {"scores": scores, "lengths": lengths, "service": learnt.service, "trusted": learnt.trusted}


def _scored_by(config: SchedulingConfig) -> list[Any]:
    """What a score depends on besides the forecast."""
    return [config.bins_by, config.full_batch]


def header_parts(state: dict[str, Any], config: SchedulingConfig) -> Header:
    """What the header gets from the state of a scheduler. Raises ValueError for anything else.

    Scores of other settings are left out, and so is the trust in them.
    """
    try:
        same = state["scored_by"] == _scored_by(config)
        learnt = {model: _learnt(own, scored_alike=same) for model, own in state["models"].items()}
        paces = {name: {model: float(pace) for model, pace in own.items()} for name, own in state["paces"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the scheduler's part is not readable: {error!r}") from error
    return learnt, paces


def _learnt(own: dict[str, Any], *, scored_alike: bool) -> Learnt:
    seconds_per_token, tokens_mean, answers = map(float, own["service"])
    service = seconds_per_token, tokens_mean, answers
    if not scored_alike:
        return Learnt(service=service)
    scores, lengths = (tuple(own[name].round(DECIMALS).tolist()) for name in ("scores", "lengths"))
    return Learnt(scores, lengths, service, bool(own["trusted"]))


def slots_state(engines: Iterable[OpenAIEngine]) -> dict[str, Any]:
    """The slots found, by engine."""
    return {engine.info.name: engine.slots.state() for engine in engines if engine.slots is not None}


def restore_slots(engines: Iterable[OpenAIEngine], state: dict[str, Any]) -> None:
    """Continue from the slots found by an engine of the same name. Raises ValueError for anything else."""
    for engine in engines:
        if engine.slots is not None and engine.info.name in state:
            engine.slots.restore(state[engine.info.name])
