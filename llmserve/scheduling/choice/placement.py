"""On which engine a request starts: where it delays others and itself least.

    cost      left + DISPLACED prefill (1 + n) + SLOWER answer u + wait

    left      seconds until the engine has computed the long prompts that it was sent (prefills.py)
    prefill   seconds for what the engine does not have in its cache; the n answers that run there wait as long, each.
              What is computed displaces as much of the cache, which will be computed again: DISPLACED
    answer    seconds of the answer.  u : n over the engine's slots
    wait      seconds until a slot is free, if there is none: n over the slots, of mean answers

A free slot is left to others while an engine without one has more of the prompt and costs less, with the wait:
computing the prompt again delays all who run here, and those who come back for what it displaces. But no request waits
for longer than it would cost to start where a slot is free.

So a request goes where its prompt is, unless that engine is so busy that it costs less to compute the prompt elsewhere;
then the other engine has it, too. A prompt that all share is soon on all engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from llmserve.request import Request
from llmserve.scheduling.engines import EnginePool, EngineState
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import FormedBatch, QueuedRequest

# With all slots in use a step takes 1.4 times as long as alone (8 slots of vLLM on a CPU, 64 of a large GPU). So the
# others cost an answer about a quarter of its steps, and it costs them together as much. But steps are only half of an
# answer's seconds on a slot where prompts are computed meanwhile, which are counted with the prompts.
SLOWER = 0.25
DISPLACED = 2.0
GUESSED = 0.005  # of a token of an answer: a token of a prompt, before the answers prove what it takes


def preferred(
    pool: EnginePool, queues: ModelQueues, queued: QueuedRequest, engines: Iterable[EngineState], now_s: float
) -> EngineState:
    """The engine, of these, where the request costs least; of equals the one with the most room."""
    if not queued.request.blocks and not pool.computing:
        return min(engines, key=_by_room)
    residency, request = pool.residency, queued.request
    costs = {}
    for engine in engines:
        cached = residency.hit_tokens(engine.info.name, request) if request.blocks else 0.0
        costs[engine] = cost_s(queues, queued, engine, cached, now_s)
    return min(costs, key=lambda engine: (costs[engine], *_by_room(engine)))


def _by_room(engine: EngineState) -> tuple[int, str]:
    return -engine.room, engine.info.name


def cost_s(
    queues: ModelQueues, queued: QueuedRequest, engine: EngineState, cached_tokens: float, now_s: float
) -> float:
    """Seconds by which a request, started on an engine, is delayed there and delays others."""
    slots, running = max(1, engine.info.slots), len(engine.running)
    prefill_s = DISPLACED * missing_s(queues, queued.request, cached_tokens)
    answer_s, beside = queued.service_s - queued.prompt_s, min(running, slots)
    cost = engine.prefills.left_s(now_s) + prefill_s * (1 + beside) + SLOWER * answer_s * beside / slots
    return cost + queued.service_mean_s * max(0, running + 1 - slots) / slots


def later(
    pool: EnginePool, queues: ModelQueues, batch: FormedBatch, free: EngineState, now_s: float
) -> EngineState | None:
    """The busy engine for which the first request of a batch waits instead of starting now on `free`, the best with a
    free slot; None: it starts.
    """
    queued, residency = batch.first, pool.residency
    if not queues.prompts.mean_s or now_s >= batch.later_until_s or queued.turn is not None:
        return None
    here = residency.hit_tokens(free.info.name, queued.request)
    cost = cost_s(queues, queued, free, here, now_s)
    best = None
    for engine in queues.engines:
        if engine.room > 0 or not engine.circuit.closed or not engine.open_to(queues.model):
            continue
        there = residency.hit_tokens(engine.info.name, queued.request)
        if there > here and (other := cost_s(queues, queued, engine, there, now_s)) < cost:
            best, cost = engine, other
    if best is not None and batch.later_until_s == math.inf:
        batch.later_until_s = now_s + cost_s(queues, queued, free, here, now_s)
    return best


def missing_s(queues: ModelQueues, request: Request, cached_tokens: float) -> float:
    """Seconds for what an engine does not have of a prompt; a guess until the answers prove what prompts take."""
    if queues.prompts.mean_s:
        return queues.prompts.prefill_s(request.prompt_tokens, cached_tokens)
    return GUESSED * queues.service.seconds_per_token * max(0.0, request.prompt_tokens - cached_tokens)
