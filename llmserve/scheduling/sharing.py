"""Models that share an engine which has only few of them in its memory at once: of which models it takes requests now.

A request of another model than those in the memory costs a load, during which nothing runs, and often a second one to
come back. First come, first served pays for a load at each change of the model from one request to the next. So the
requests of a loaded model may pass those of other models, within what ages allow:

    loaded     requests start while no other model's oldest request is older than the loaded model's by the patience
    too old    then the loaded model whose oldest request is the youngest takes no more, and when its runs have ended,
               the other model's requests start
    empty      a loaded model without waiting requests gives way at once when its runs have ended

    patience = PATIENCE * load_s of the other model

So no request is passed by one that has arrived later than it by more than the patience, but for those that the order
lets pass anyway; nor does a model without end of requests hold the others up. Before a load has been seen, its time
counts as none: then the oldest request decides. Both sides of the comparison are times of arrival, so the decision
changes with events only. A deadline that comes close counts as age (queues/oldest.py). Items of batch jobs, which have
hours, count as younger than all requests; when they are due they are requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from llmserve.scheduling.engines import EnginePool, EngineState
from llmserve.scheduling.queues.model_queues import ModelQueues, Tally

PATIENCE = 8.0  # loads
ITEMS = 1e15  # the arrival of batch items; patience added to it is lost, so items of a loaded model go first


def look(pool: EnginePool, tally: Tally) -> None:
    """Decide for all engines that hold few models. Call before a dispatch."""
    for engine in pool.sharing.values():
        look_at(engine, tally)


def look_at(engine: EngineState, tally: Tally) -> None:
    """Decide for one engine that holds few models. Call after each start on it."""
    shut = _shut(engine, _oldest_s(engine, tally)) if engine.circuit.closed else ()
    waiting = (*tally.queues, *tally.item_models)
    engine.closed_to = frozenset([model for model in waiting if engine.weights(model) in shut])


def open_idle(pool: EnginePool) -> bool:
    """Let engines that run nothing take requests of any model: those whose turn it is cannot start. True if any engine
    takes more now.
    """
    idle = [engine for engine in pool.sharing.values() if engine.closed_to and not engine.running]
    for engine in idle:
        engine.closed_to = frozenset()
    return bool(idle)


def _oldest_s(engine: EngineState, tally: Tally) -> Mapping[str, float]:
    """When the oldest request that the engine could take has arrived, of each model with such requests."""
    oldest_s: dict[str, float] = {}
    for name, queues in tally.queues.items():
        if not engine.serves(name) or name in engine.left_out or queues.oldest is None:
            continue
        model = engine.weights(name)
        queues.oldest.slack_s = _slack_s(engine, model, queues)
        first = queues.first_by_age()
        if first is None or (first.formed is not None and engine.info.name in first.formed.avoid):
            continue
        oldest_s[model] = min(oldest_s.get(model, math.inf), queues.oldest.turn_s(first))
    for name in tally.item_models:
        if engine.serves(name):
            oldest_s.setdefault(engine.weights(name), ITEMS)
    return oldest_s


def _slack_s(engine: EngineState, model: str, queues: ModelQueues) -> float:
    """How long before its deadline a request must count as old: the patience, the load, and runs that end first."""
    load_s = engine.loaded.load_s(model) if engine.loaded is not None else 0.0
    return (PATIENCE + 1.0) * load_s + 2.0 * queues.service.tokens_mean * queues.service.seconds_per_token


def _shut(engine: EngineState, oldest_s: Mapping[str, float]) -> Collection[str]:
    """The models of which an engine takes no requests now. oldest_s : by model, of those that wait"""
    loaded = engine.loaded
    assert loaded is not None, "only an engine that holds few models is shared"
    others = {model for model in oldest_s if model not in loaded}
    if not others:
        return ()
    at_s, other = min((oldest_s[model], model) for model in others)
    others.discard(other)
    if len(loaded) < loaded.at_once:
        return others
    running = engine.weights_running
    leaving = max(loaded, key=lambda model: (oldest_s.get(model, math.inf), model not in running))
    if at_s + PATIENCE * loaded.load_s(other) >= oldest_s.get(leaving, math.inf):
        return {other, *others}
    return {leaving, *others} if leaving not in running else {leaving, other, *others}
