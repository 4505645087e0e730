"""Clients of a scheduler in simulated time: shares that ask once, or again as soon as they are answered."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    BatchEnded,
    EngineReady,
    Event,
    FailRequest,
    RequestArrived,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class Ask:
    """A question. tokens : real length of the answer.  then : what its client does once it is answered"""

    share: str
    tokens: float = 20.0
    predicted: float | None = 20.0
    prompt_tokens: float = 0.0
    weight: float = 1.0
    then: Callable[[], None] = lambda: None


class Clients:
    """seconds : of a batch on an engine, by the tokens of its longest answer; a slot that refills runs a batch of one

    latencies : seconds, by share.  refused : requests, by share
    on_start, on_step : told of each start, by its question, and of each step
    """

    def __init__(
        self,
        scheduler: Scheduler,
        infos: list[EngineInfo],
        seconds: Callable[[float], float],
        on_start: Callable[[Ask], None] = lambda ask: None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler, self.now_s = scheduler, 0.0
        self.latencies: dict[str, list[float]] = defaultdict(list)
        self.refused: Counter[str] = Counter()
        self._seconds, self._on_start, self._on_step = seconds, on_start, on_step
        self._ids, self._serial = count(), count()
        self._ends: list[tuple[float, int, Event]] = []
        self._asked: dict[int, tuple[Ask, float]] = {}
        self._barrier = {info.name: info.barrier for info in infos}
        for info in infos:
            self._step(EngineReady(info))

    def ask(self, ask: Ask) -> int:
        request = Request(
            next(self._ids), ask.predicted, prompt_tokens=ask.prompt_tokens, share=ask.share, weight=ask.weight
        )
        self._asked[request.id] = ask, self.now_s
        self._step(RequestArrived(request))
        return request.id

    def run(self, until_s: float) -> None:
        while True:
            times_s = [self._ends[0][0]] if self._ends else []
            times_s += [self.scheduler.wake_at_s] if self.scheduler.wake_at_s is not None else []
            if not times_s or min(times_s) > until_s:
                self.now_s = until_s
                return
            self.now_s = max(self.now_s, min(times_s))
            self._step(heapq.heappop(self._ends)[2] if self._is_end_due() else TimerFired())

    def _is_end_due(self) -> bool:
        return bool(self._ends) and self._ends[0][0] <= self.now_s

    def _step(self, event: Event) -> None:
        answered: list[Ask] = []
        if isinstance(event, RequestEnded | BatchEnded):
            for id_ in [event.request_id] if isinstance(event, RequestEnded) else list(event.output_tokens):
                ask, asked_s = self._asked.pop(id_)
                self.latencies[ask.share].append(self.now_s - asked_s)
                answered.append(ask)
        for action in self.scheduler.handle(event, self.now_s):
            if isinstance(action, FailRequest):
                self.refused[self._asked.pop(action.request_id)[0].share] += 1
            elif isinstance(action, StartBatch):
                self._start(action)
        self._on_step()
        for ask in answered:
            ask.then()

    def _start(self, action: StartBatch) -> None:
        tokens = {request.id: self._asked[request.id][0].tokens for request in action.batch.requests}
        for id_ in tokens:
            self._on_start(self._asked[id_][0])
        ends: list[tuple[float, Event]] = [
            (length, RequestEnded(action.engine, id_, "completed", length)) for id_, length in tokens.items()
        ]
        if self._barrier[action.engine]:
            ends = [(max(tokens.values()), BatchEnded(action.engine, action.batch.id, tokens))]
        for length, end in ends:
            heapq.heappush(self._ends, (self.now_s + self._seconds(length), next(self._serial), end))
