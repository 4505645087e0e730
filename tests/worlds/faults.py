"""Simulated engines with faults: they die and come back, hang, slow down, close, change, or fail requests.

A fault is injected into an engine at a time that is fixed beforehand. A fault that lasts consists of two:

    dies and comes back     Lost, Ready
    hangs until given up    Pace(0), Lost (a watchdog declares it lost), Ready
    slow for a while        Pace(1/8), Pace(1)
    drained and resumed     Closed, Ready

A request fault is injected into one request, some time after it starts: it fails, or its answer ends early.

An engine that slows down has its own clock, which is slower than the world's:

    own time = own_from_s + pace * (time - from_s)          pace is constant from from_s on
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec

from llmserve.request import Batch, EngineInfo
from llmserve.scheduling.messages import BatchEnded, EngineClosed, EngineLost, EngineReady, Event, RequestEnded
from llmserve.simulation.engine_model import StepEngine

Chance = Callable[[], float]
"""Draws from [0, 1)."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The engine and all that it runs are lost. answered : share of its requests whose clients have seen bytes."""

    answered: float = 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests (again) or declares new limits. slots, tokens_max : None: unchanged."""

    slots: int | None = None
    tokens_max: int | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """The engine takes no new requests; running requests go on."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The engine's speed from now on, as a share of full speed; 0: it hangs. It returns from a loss with full speed."""

    pace: float


Fault = Lost | Ready | Closed | Pace


@dataclass(frozen=True, slots=True)
class RequestFault:
    """How a request ends early, `after_s` (>= 0) after its start. Other fields: see RequestEnded."""

    after_s: float
    outcome: Literal["completed", "failed", "cancelled"]
    output_tokens: float = 0.0
    fault: bool = False
    retryable: bool = False
    refused: bool = False
    rest_s: float | None = None


class FaultyEngine:
    """An engine model with faults and request faults.

    make         returns a fresh engine model; called at the beginning and after each loss
    faults       (time_s, fault), in any order; between a loss and `Ready` no other fault is injected
    request_fault  returns the fault of a starting request, or None; called once for each start, in order
    chance       draws the clients that have seen bytes when the engine is lost
    tick_s       clock tick: every end is reported at the next multiple of tick_s; 0: exact times
    one_by_one   for a barrier engine: report the end of each request, not of the batch
    stale_s      after a loss, report the ends of lost requests this much later; None: never
    late_s       when the engine first comes up; None: it is up from the beginning
    expected     whether it is expected back when it is closed or lost
    """

    def __init__(
        self,
        make: Callable[[], StepEngine],
        faults: Iterable[tuple[float, Fault]] = (),
        *,
        request_fault: Callable[[int], RequestFault | None] = lambda request_id: None,
        chance: Chance = lambda: 1.0,
        tick_s: float = 0.0,
        one_by_one: bool = False,
        stale_s: float | None = None,
        late_s: float | None = None,
        expected: bool = False,
    ) -> None:
        self._make = make
        self._engine = make()
        self.info: EngineInfo = self._engine.info
        self._state: Literal["up", "closed", "lost"] = "up" if late_s is None else "lost"
        self._expected = expected
        self._request_fault = request_fault
        self._chance = chance
        self._tick_s = tick_s
        self._one_by_one = one_by_one
        self._stale_s = stale_s
        self._now_s = 0.0
        self._from_s = self._own_from_s = 0.0
        self._pace = 1.0
        self._starts = 0
        self._runs: dict[int, int] = {}  # request id -> number of its start; as the scheduler knows them
        self._serial = 0
        self._due: list[tuple[float, int, Callable[[], Event | None]]] = []  # heap
        if late_s is not None:
            self._schedule(late_s, partial(self._inject, Ready()))
        for at_s, fault in faults:
            self._schedule(at_s, partial(self._inject, fault))

    # ---- methods for the cluster ----

    @property
    def next_end_s(self) -> float | None:
        times = [at_s for at_s in (self._due[0][0] if self._due else None, self._model_end_s()) if at_s is not None]
        return max(self._now_s, self._on_clock(min(times))) if times else None

    def start(self, batch: Batch, now_s: float) -> None:
        self._now_s = now_s
        self._engine.start(batch, self._own_s(now_s))
        for request in batch.requests:
            self._starts += 1
            self._runs[request.id] = self._starts
            request_fault = self._request_fault(request.id)
            if request_fault is not None:
                self._schedule(
                    now_s + request_fault.after_s, partial(self._happen, request_fault, request.id, self._starts)
                )

    def abort(self, request_id: int, now_s: float) -> None:
        self._now_s = now_s
        self._drop(request_id)

    def end(self, now_s: float) -> Event | None:
        self._now_s = now_s
        model_end_s = self._model_end_s()
        if self._due and (model_end_s is None or self._due[0][0] <= model_end_s):
            return heapq.heappop(self._due)[2]()
        own_end_s = self._engine.next_end_s
        assert own_end_s is not None, "nothing ends"
        return self._report(self._engine.end(own_end_s))

    # ---- faults and request faults ----

    def _inject(self, fault: Fault) -> Event | None:
        if isinstance(fault, Ready):
            return self._come_up(fault)
        if self._state == "lost":
            return None
        if isinstance(fault, Pace):
            self._set_pace(fault.pace)
            return None
        if isinstance(fault, Lost):
            return self._lose(fault.answered)
        if self._state == "closed":
            return None
        self._state = "closed"
        return EngineClosed(self.info.name, self._expected)

    def _come_up(self, ready: Ready) -> Event:
        self._state = "up"
        slots, tokens_max = ready.slots or self.info.slots, ready.tokens_max or self.info.tokens_max
        self.info = msgspec.structs.replace(self.info, slots=slots, tokens_max=tokens_max)
        return EngineReady(self.info)

    def _lose(self, share: float) -> Event:
        lost = list(self._runs)
        answered = tuple(sorted([request_id for request_id in lost if self._chance() < share]))
        self._runs.clear()
        self._engine = self._make()
        self._state = "lost"
        self._from_s = self._own_from_s = 0.0
        self._pace = 1.0
        if self._stale_s is not None:
            for request_id in lost:
                self._schedule(self._now_s + self._stale_s, partial(self._stale, request_id))
        return EngineLost(self.info.name, answered, expected=self._expected)

    def _stale(self, request_id: int) -> Event | None:
        """The end of a request of a lost engine; None if the request runs on this engine again."""
        return None if request_id in self._runs else RequestEnded(self.info.name, request_id, "completed", 1.0)

    def _happen(self, request_fault: RequestFault, request_id: int, start: int) -> Event | None:
        if self._runs.get(request_id) != start:
            return None  # the request has ended
        self._drop(request_id)
        name = self.info.name
        return RequestEnded(
            name,
            request_id,
            request_fault.outcome,
            request_fault.output_tokens,
            request_fault.fault,
            request_fault.retryable,
            refused=request_fault.refused,
            rest_s=request_fault.rest_s,
        )

    # ---- ends ----

    def _report(self, event: Event) -> Event | None:
        """The engine model's event, as this engine reports it."""
        if isinstance(event, RequestEnded):
            del self._runs[event.request_id]
            return event
        assert isinstance(event, BatchEnded), "engine models report only ends"
        if not self._one_by_one:
            for request_id in event.output_tokens:
                del self._runs[request_id]
            return event
        for request_id, tokens in event.output_tokens.items():
            request_fault = RequestFault(0.0, "completed", tokens)
            self._schedule(self._now_s, partial(self._happen, request_fault, request_id, self._runs[request_id]))
        return None

    def _drop(self, request_id: int) -> None:
        if self._runs.pop(request_id, None) is not None:
            self._engine.abort(request_id, self._own_s(self._now_s))

    def _schedule(self, at_s: float, happen: Callable[[], Event | None]) -> None:
        self._serial += 1
        heapq.heappush(self._due, (at_s, self._serial, happen))

    # ---- clocks ----

    def _on_clock(self, at_s: float) -> float:
        return math.ceil(at_s / self._tick_s) * self._tick_s if self._tick_s else at_s

    def _set_pace(self, pace: float) -> None:
        self._own_from_s = self._own_s(self._now_s)
        self._from_s = self._now_s
        self._pace = pace

    def _own_s(self, now_s: float) -> float:
        """The engine's own time, which does not pass an end that waits for the next tick."""
        own_s = self._own_from_s + self._pace * (now_s - self._from_s)
        end_s = self._engine.next_end_s
        return own_s if end_s is None else min(own_s, end_s)

    def _model_end_s(self) -> float | None:
        """When the engine model's next end is, on the world's clock; None: never at the current pace."""
        own_end_s = self._engine.next_end_s
        if own_end_s is None or not self._pace:
            return None
        return self._from_s + (own_end_s - self._own_from_s) / self._pace
