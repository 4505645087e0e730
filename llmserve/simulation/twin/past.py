"""What a server has just served, from the steps of its journal: requests with forecasts and real lengths, engines with
the times of their answers.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec

from llmserve.live.journal import Header, Step
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    BatchEnded,
    EngineLost,
    EngineReady,
    FailRequest,
    PreemptBatch,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
    Tuned,
)
from llmserve.settings.policies import SchedulingConfig, Settings


class PastRequest(msgspec.Struct, array_like=True):
    """A request of the past. All times are seconds on the scheduler's clock.

    tokens      real output tokens of a choice; None: not known, because the request still waits or runs, or was
                refused before it ran
    ended_s     None while the request waits or runs
    engine      engine that answered; "" before the answer
    batch_id, begun_s  of its last run: when the engine had a slot for it
    running     mean number of requests on the engine during that run, `self` included
    """

    request: Request
    arrived_s: float
    tokens: float | None = None
    ended_s: float | None = None
    engine: str = ""
    batch_id: int = 0
    begun_s: float = 0.0
    running: float = 0.0


class Recording(msgspec.Struct, frozen=True):
    """A stretch of the past, all that a replay needs.

    scheduling  resolved, as the server began; settings : of the order now in force; {} while it is as configured
    engines     ready engines
    requests    in the order of their arrival
    left_out    number of requests whose lengths are not known, by reason; they are not among `requests`
    until_s     time of the last step
    """

    scheduling: SchedulingConfig
    settings: Settings
    engines: tuple[EngineInfo, ...]
    requests: tuple[PastRequest, ...]
    left_out: dict[str, int] = {}
    until_s: float = 0.0

    @property
    def ended(self) -> int:
        """Number of answered requests."""
        return sum([past.tokens is not None for past in self.requests])


class _Engine:
    """The requests of an engine. A refill engine serves the first ones; the others wait there for a slot."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.running: dict[int, tuple[float, PastRequest]] = {}  # request-seconds at its begin, request
        self.waiting: deque[PastRequest] = deque()
        self._request_s = 0.0  # integral of the number of running requests
        self._now_s = 0.0

    def start(self, requests: Iterable[PastRequest], now_s: float) -> None:
        for past in requests:
            if self.info.barrier or len(self.running) < self.info.slots:
                self._begin(past, now_s)
            else:
                self.waiting.append(past)

    def end(self, request_id: int, now_s: float) -> None:
        """Note the mean number of requests during the run, and give the slot to the request that waits longest."""
        self._advance(now_s)
        if request_id not in self.running:
            self.waiting = deque([past for past in self.waiting if past.request.id != request_id])
            return
        before, past = self.running.pop(request_id)
        took_s = now_s - past.begun_s
        past.running = (self._request_s - before) / took_s if took_s > 0 else float(len(self.running) + 1)
        if self.waiting:
            self._begin(self.waiting.popleft(), now_s)

    def _begin(self, past: PastRequest, now_s: float) -> None:
        self._advance(now_s)
        past.begun_s, past.engine = now_s, self.info.name
        self.running[past.request.id] = self._request_s, past

    def _advance(self, now_s: float) -> None:
        self._request_s += len(self.running) * (now_s - self._now_s)
        self._now_s = now_s


class Past:
    """Reads the steps of a journal, from the first step on."""

    def __init__(self, header: Header) -> None:
        self._scheduling = header.scheduling
        self._settings: Settings = {}
        self._engines: dict[str, _Engine] = {}
        self._present: dict[int, PastRequest] = {}
        self._over: list[PastRequest] = []
        self._left_out: list[tuple[float, str]] = []
        self._stopped: set[int] = set()  # preempted requests that are still on their engines
        self._now_s = 0.0
        self._listeners: dict[type, Callable[..., None]] = {
            RequestArrived: self._arrived,
            RequestAdopted: self._adopted,
            RequestEnded: self._ended,
            BatchEnded: self._batch_ended,
            RequestCancelled: self._cancelled,
            EngineReady: self._ready,
            EngineLost: self._lost,
            Tuned: self._tuned,
            StartBatch: self._started,
            PreemptBatch: self._preempted,
            FailRequest: self._failed,
        }

    def read(self, steps: Iterable[Step]) -> Past:
        """Read further steps. Returns the past itself."""
        for step in steps:
            self._now_s = step.now_s
            for message in (step.event, *step.actions):
                listener = self._listeners.get(type(message))
                if listener is not None:
                    listener(message)
        return self

    def recording(self, minutes: float | None = None) -> Recording:
        """The requests that arrived during the last minutes; None: all."""
        since_s = 0.0 if minutes is None else self._now_s - 60.0 * minutes
        requests = [past for past in (*self._over, *self._present.values()) if past.arrived_s >= since_s]
        requests.sort(key=lambda past: (past.arrived_s, past.request.id))
        left_out = Counter(reason for at_s, reason in self._left_out if at_s >= since_s)
        return Recording(
            self._scheduling,
            self._settings,
            tuple([engine.info for engine in self._engines.values()]),
            tuple(requests),
            dict(left_out),
            self._now_s,
        )

    # ---- requests ----

    def _arrived(self, event: RequestArrived) -> None:
        self._present[event.request.id] = PastRequest(event.request, self._now_s)

    def _adopted(self, event: RequestAdopted) -> None:
        past = self._present[event.request.id] = PastRequest(event.request, -math.inf)  # before the first step
        self._engine_of(event.engine.name).start([past], self._now_s)

    def _started(self, action: StartBatch) -> None:
        self._engine_of(action.engine).start(self._of(action.batch), self._now_s)

    def _of(self, batch: Batch) -> list[PastRequest]:
        requests = []
        for request in batch.requests:
            past = self._present.get(request.id)
            if past is None:  # it arrived before the first step
                past = self._present[request.id] = PastRequest(request, -math.inf)
            past.batch_id = batch.id
            requests.append(past)
        return requests

    def _engine_of(self, name: str) -> _Engine:
        return self._engines.setdefault(name, _Engine(EngineInfo(name, 1, False)))

    def _preempted(self, action: PreemptBatch) -> None:
        self._stopped.update(action.request_ids)

    def _ended(self, event: RequestEnded) -> None:
        if event.engine in self._engines:
            self._engines[event.engine].end(event.request_id, self._now_s)
        stopped = event.request_id in self._stopped
        self._stopped.discard(event.request_id)
        if event.outcome == "completed" and event.output_tokens > 0:
            self._answered(event.request_id, event.output_tokens)
        elif event.retryable or (stopped and event.outcome == "cancelled"):
            self._wait_again(event.request_id)
        else:
            self._leave_out(event.request_id, "length not reported" if event.outcome == "completed" else event.outcome)

    def _batch_ended(self, event: BatchEnded) -> None:
        for request_id, tokens in event.output_tokens.items():
            self._engine_of(event.engine).end(request_id, self._now_s)
            self._answered(request_id, tokens)

    def _wait_again(self, request_id: int) -> None:
        if (past := self._present.get(request_id)) is not None:
            past.engine = ""

    def _answered(self, request_id: int, tokens: float) -> None:
        if (past := self._present.pop(request_id, None)) is not None:
            past.tokens, past.ended_s = tokens, self._now_s
            self._over.append(past)

    def _cancelled(self, event: RequestCancelled) -> None:
        past = self._present.get(event.request_id)
        if past is not None and not past.engine:  # otherwise its RequestEnded follows
            self._leave_out(event.request_id, "cancelled")

    def _failed(self, action: FailRequest) -> None:
        """A request that was refused, or was too late, asks for service all the same; its forecast tells how much."""
        past = self._present.get(action.request_id)
        if past is not None and action.reason in ("queue_full", "deadline_exceeded"):
            del self._present[action.request_id]
            past.ended_s = self._now_s
            self._over.append(past)
        else:
            self._leave_out(action.request_id, "failed")

    def _leave_out(self, request_id: int, reason: str) -> None:
        if self._present.pop(request_id, None) is not None:
            self._left_out.append((self._now_s, reason))

    # ---- engines ----

    def _ready(self, event: EngineReady) -> None:
        engine = self._engines.setdefault(event.engine.name, _Engine(event.engine))
        engine.info = event.engine

    def _lost(self, event: EngineLost) -> None:
        if (engine := self._engines.pop(event.engine, None)) is not None:
            for request_id in engine.running:
                self._wait_again(request_id)

    def _tuned(self, event: Tuned) -> None:
        self._settings = event.settings
