"""What the scheduler and the engines' clients have learnt, as states; and the way back.

The scheduler takes its part back from the journal's header and from the engines' descriptions, so that a replay begins
as the server did.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from heapq import nlargest
from typing import Any

import msgspec
import numpy as np

from llmserve.engines.engine import Engine
from llmserve.scheduling.lengths import Learned
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig

MODELS_MAX = 64  # models whose answers are kept; those with the most answers
DECIMALS = 2  # of scores and lengths, tokens


def scheduler_saving(
    scheduler: Scheduler, config: SchedulingConfig, learnt: Mapping[str, Learned]
) -> Generator[None, None, dict[str, Any]]:
    """Make the state of a scheduler in slices (predictor/state.py).

    learnt : from before the start; it holds for models that have not come back yet.
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
    return {"scored_by": _scored_by(config), "models": models}


def _of_model(queues: ModelQueues) -> dict[str, Any]:
    seen, edges = queues.binning.seen, queues.binning.edges
    scores, lengths = seen.predicted if seen is not None else (edges.values, np.zeros(0))
    service = queues.service
    return {
        "scores": scores,
        "lengths": lengths,
        "service": [service.seconds_per_token, service.tokens_mean, service.answers],
    }


def _of_learnt(learnt: Learned) -> dict[str, Any]:
    scores, lengths = np.array(learnt.scores), np.array(learnt.lengths)
    return {"scores": scores, "lengths": lengths, "service": learnt.service}


def _scored_by(config: SchedulingConfig) -> list[Any]:
    """What a score depends on besides the forecast."""
    return [config.bins_by, config.full_batch]


def header_part(state: dict[str, Any], config: SchedulingConfig) -> dict[str, Learned]:
    """`learnt` of the header, from the state of a scheduler. Raises ValueError for anything else.

    Scores of other settings are left out.
    """
    try:
        same = state["scored_by"] == _scored_by(config)
        return {model: _learnt(own, scored_alike=same) for model, own in state["models"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the scheduler's part is not readable: {error!r}") from error


def _learnt(own: dict[str, Any], *, scored_alike: bool) -> Learned:
    seconds_per_token, tokens_mean, answers = map(float, own["service"])
    service = seconds_per_token, tokens_mean, answers
    if not scored_alike:
        return Learned(service=service)
    scores, lengths = (tuple(own[name].round(DECIMALS).tolist()) for name in ("scores", "lengths"))
    return Learned(scores, lengths, service)


def engines_state(engines: Iterable[Engine], scheduler: Scheduler) -> dict[str, Any]:
    """The slots found, the paces and the times of loads, by engine."""
    return {engine.info.name: _of_engine(engine, scheduler) for engine in engines}


def _of_engine(engine: Engine, scheduler: Scheduler) -> dict[str, Any]:
    known = scheduler.engines.get(engine.info.name)
    paces = engine.info.paces if known is None else {model: pace.value for model, pace in known.paces.items()}
    loads_s = engine.info.loads_s if known is None or known.loaded is None else known.loaded.loads_s
    return {"paces": paces, "loads_s": loads_s, "slots": engine.slots.state() if engine.slots is not None else None}


def restore_engine(engine: Engine, own: dict[str, Any] | None) -> None:
    """Continue from the state of an engine of the same name. own : None: nothing was learnt of it"""
    if own is None:
        return
    paces = {model: float(pace) for model, pace in own["paces"].items()}
    loads_s = {model: float(seconds) for model, seconds in own.get("loads_s", {}).items()}
    engine.info = msgspec.structs.replace(engine.info, paces=paces, loads_s=loads_s)
    if engine.slots is not None and own["slots"] is not None:
        engine.slots.restore(own["slots"])
