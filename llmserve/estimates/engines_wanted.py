"""How many engines each model of a live cluster wants, for whoever starts and stops engines; see wanted.py."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.estimates.wanted import Load, Wanted
from llmserve.scheduling.queues.model_queues import ModelQueues


class EnginesWanted:
    """The signal of each model. Call `update` once in a while: each second, or at each scrape."""

    def __init__(self) -> None:
        self._wanted: dict[str, Wanted] = {}

    def update(self, models: Mapping[str, ModelQueues], now_s: float) -> dict[str, int]:
        """Engines by model. A model without answers so far wants the engines that it has; without these, one."""
        self._wanted = {model: wanted for model, wanted in self._wanted.items() if model in models}
        return {model: self._of(model, queues, now_s) for model, queues in models.items()}

    def _of(self, model: str, queues: ModelQueues, now_s: float) -> int:
        if not queues.engines or not queues.service.answers:
            return len(queues.engines) or min(1, queues.waiting)
        return self._wanted.setdefault(model, Wanted()).at(now_s, load_of(queues, now_s))


def load_of(queues: ModelQueues, now_s: float) -> Load:
    """The load of a model with engines and answers. What runs is what arrivals keep busy (Little's law)."""
    slots = sum([engine.info.slots for engine in queues.engines]) / len(queues.engines)
    running = [run.queued.request for engine in queues.engines for run in engine.running.values()]
    busy = sum([request.sequences for request in running if request.model == queues.model]) / slots
    waiting = []
    for queued in queues.all_waiting():
        request = queued.request
        answer_s = queued.expected_tokens * queues.service.seconds_per_token
        left_s = None if request.deadline_s is None else max(0.0, request.deadline_s - now_s)
        waiting.append((left_s, request.sequences * answer_s / slots))
    return Load(busy, tuple(waiting))
