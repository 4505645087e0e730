"""On which engine a request starts: where it delays others and itself least.

    cost      left + DISPLACED prefill (1 + n) + SLOWER answer u + wait

    left      seconds until the engine has computed the long prompts that it was sent (prefills.py)
    prefill   seconds for what the engine does not have in its cache; the n answers that run there wait as long, each.
              What is computed displaces as much of the cache, which will be computed again: DISPLACED
    answer    seconds of the answer.  u : n over the engine's slots
    wait      seconds until a slot is free, if there is none: n over the slots, of mean answers

So a request goes where its prompt is, unless that engine is so busy that it costs less to compute the prompt elsewhere;
then the other engine has it, too. A prompt that all share is soon on all engines.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmserve.request import Request
from llmserve.scheduling.engines import EnginePool, EngineState
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import QueuedRequest

# With all slots in use a token takes about twice as long as alone, so a mean one 1.5 times; and each answer more
# delays the others together as much as they delay it.
SLOWER = 2.0 / 1.5
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


def missing_s(queues: ModelQueues, request: Request, cached_tokens: float) -> float:
    """Seconds for what an engine does not have of a prompt; a guess until the answers prove what prompts take."""
    if queues.prompts.mean_s:
        return queues.prompts.prefill_s(request.prompt_tokens, cached_tokens)
    return GUESSED * queues.service.seconds_per_token * max(0.0, request.prompt_tokens - cached_tokens)
