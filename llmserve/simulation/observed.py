"""The batches that ran on an engine, from a journal, for the engine's profile (bins/profile.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bins.fitting import Observation
from llmserve.live.journal import Step
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

    steps : a journal's steps from the first one on, which name the barrier engines. A batch does not show the time of
    its size, and is left out, when
    - the batch ran on a refill engine, which other batches shared,
    - the batch was split, or a request left the batch before the start,
    - a request of the batch was cancelled, failed, lost with its engine or run again,
    - a length is unknown: the engine did not count the tokens, or the length is the mean of several choices.
    """
    reader = _StepReader()
    for step in steps:
        reader.read(step.event, step.now_s)
        for action in step.actions:
            if isinstance(action, StartBatch):
                reader.start(action.engine, action.batch, step.now_s)
    return reader.observations


@dataclass(slots=True)
class _Run:
    """A batch on its engine. open : requests that have not ended.  sound : no reason to leave the batch out so far."""

    size: int
    started_s: float
    open: set[int]
    sound: bool
    tokens_max: float = 0.0


class _StepReader:
    def __init__(self) -> None:
        self.observations: list[Observation] = []
        self._barriers: set[str] = set()
        self._running: dict[str, _Run] = {}  # by engine: a barrier engine runs one batch at a time
        self._started: set[int] = set()  # all requests that have been on an engine

    def start(self, engine: str, batch: Batch, now_s: float) -> None:
        ids = {request.id for request in batch.requests}
        first = self._started.isdisjoint(ids)
        self._started |= ids
        if engine in self._barriers:
            single = all(request.choices == 1 for request in batch.requests)
            self._running[engine] = _Run(len(ids), now_s, ids, first and single and len(ids) == batch.size)

    def read(self, event: Event, now_s: float) -> None:
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
        """tokens : length of the answer; 0 when there is no complete answer."""
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
        if run.sound and seconds > 0:  # 0 in a simulation whose steps take no time
            self.observations.append(Observation(run.size, run.tokens_max, seconds))
