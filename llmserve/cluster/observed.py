"""What a journal tells of an engine: the batches that ran on it, for its profile (bins/profile.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bins.fitting import Observation
from llmserve.cluster.journal import Step
from llmserve.request import Batch
from llmserve.scheduling.messages import (
    BatchEnded,
    EngineLost,
    EngineReady,
    Event,
    RequestCancelled,
    RequestEnded,
    StartBatch,
)


def observations(steps: Iterable[Step]) -> list[Observation]:
    """The batches that barrier engines ran from beginning to end, in the order of their ends. Joules are not known.

    steps : a journal's, from its beginning on, for it names the engines that are barriers. A batch says nothing of its
    size, and is left out, when
    - it ran on a refill engine, which others shared meanwhile,
    - it was split, or a request left it before it started,
    - one of its requests was cancelled, failed, lost with its engine or run again,
    - one of its lengths is unknown: the engine did not count its tokens, or it is the mean of several choices.
    """
    watch = _Watch()
    for step in steps:
        watch.see(step.event, step.now_s)
        for action in step.actions:
            if isinstance(action, StartBatch):
                watch.start(action.engine, action.batch, step.now_s)
    return watch.found


@dataclass(slots=True)
class _Run:
    """A batch on its engine. open : its requests that have not ended.  sound : as far as is known, it counts."""

    size: int
    started_s: float
    open: set[int]
    sound: bool
    tokens_max: float = 0.0


class _Watch:
    def __init__(self) -> None:
        self.found: list[Observation] = []
        self._barriers: set[str] = set()
        self._running: dict[str, _Run] = {}  # by engine: a barrier engine runs one batch at a time
        self._started: set[int] = set()  # every request that has been on an engine

    def start(self, engine: str, batch: Batch, now_s: float) -> None:
        ids = {request.id for request in batch.requests}
        first = self._started.isdisjoint(ids)
        self._started |= ids
        if engine in self._barriers:
            single = all(request.choices == 1 for request in batch.requests)
            self._running[engine] = _Run(len(ids), now_s, ids, first and single and len(ids) == batch.size)

    def see(self, event: Event, now_s: float) -> None:
        if isinstance(event, EngineReady):
            (self._barriers.add if event.engine.barrier else self._barriers.discard)(event.engine.name)
        elif isinstance(event, BatchEnded):
            for request_id, tokens in event.output_tokens.items():
                self._end(event.engine, request_id, tokens, now_s)
        elif isinstance(event, RequestEnded):
            completed = event.outcome == "completed"
            self._end(event.engine, event.request_id, event.output_tokens if completed else 0.0, now_s)
        elif isinstance(event, RequestCancelled):
            for run in self._running.values():
                run.sound = run.sound and event.request_id not in run.open
        elif isinstance(event, EngineLost):
            self._running.pop(event.engine, None)

    def _end(self, engine: str, request_id: int, tokens: float, now_s: float) -> None:
        """tokens : of its answer; 0 when it has none that counts."""
        run = self._running.get(engine)
        if run is None or request_id not in run.open:
            return
        run.open.remove(request_id)
        run.sound = run.sound and tokens > 0
        run.tokens_max = max(run.tokens_max, tokens)
        if run.open:
            return
        del self._running[engine]
        seconds = now_s - run.started_s
        if run.sound and seconds > 0:  # in a simulation of no step time it is 0
            self.found.append(Observation(run.size, run.tokens_max, seconds))
