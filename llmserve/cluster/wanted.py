"""How many engines a model's requests need: a signal for whatever starts and stops engines.

A request that runs needs a slot. One that waits needs as much of a slot as its forecast fills of the time that it has:
until its deadline, or DRAIN_S. Slots are filled to FULL at most. The signal does not follow every change:

    up      when more engines were needed for RISE_S
    down    when fewer engines were needed for FALL_S
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from llmserve.scheduling.model_queues import ModelQueues

DRAIN_S = 30.0
FULL = 0.9
RISE_S, FALL_S = 5.0, 300.0


class EnginesWanted:
    """The signal of each model. Call `update` once in a while: a second, or Prometheus' interval."""

    def __init__(self) -> None:
        self._steady: dict[str, Steady] = {}

    def update(self, models: Mapping[str, ModelQueues], now_s: float) -> dict[str, int]:
        """Engines by model. A model without answers so far wants the engines that it has."""
        for model in self._steady.keys() - models.keys():
            del self._steady[model]
        return {
            model: self._steady.setdefault(model, Steady()).update(engines_needed(queues, now_s), now_s)
            for model, queues in models.items()
        }


def engines_needed(queues: ModelQueues, now_s: float) -> int:
    """Engines that would serve what runs and waits now."""
    engines, service = queues.engines, queues.service
    if not engines:
        return min(1, queues.waiting)
    if not service.answers:
        return len(engines)
    slots = sum(engine.info.slots for engine in engines) / len(engines)
    running = [run.queued.request for engine in engines for run in engine.running.values()]
    needed = float(sum(request.choices for request in running if request.model == queues.model))
    for queued in queues.all_waiting():
        request = queued.request
        tokens = request.expected_tokens
        takes_s = (service.tokens_mean if tokens is None else tokens) * service.seconds_per_token
        has_s = DRAIN_S if request.deadline_s is None else min(DRAIN_S, request.deadline_s - now_s)
        needed += request.choices * min(1.0, takes_s / has_s if has_s > 0 else 1.0)
    return math.ceil(needed / (FULL * slots))


class Steady:
    """A number that rises when it was larger for RISE_S, and falls when it was smaller for FALL_S."""

    def __init__(self) -> None:
        self._now: deque[tuple[float, int]] = deque()  # of the last RISE_S, and the one before
        self._risen: deque[tuple[float, int]] = deque()  # the least of each RISE_S, of the last FALL_S; falling

    def update(self, number: int, now_s: float) -> int:
        self._now.append((now_s, number))
        while len(self._now) > 1 and self._now[1][0] <= now_s - RISE_S:
            self._now.popleft()
        least = min(number for _, number in self._now)
        while self._risen and self._risen[-1][1] <= least:
            self._risen.pop()
        self._risen.append((now_s, least))
        while self._risen[0][0] < now_s - FALL_S:
            self._risen.popleft()
        return self._risen[0][1]
