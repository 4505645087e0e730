"""Fair shares: whoever floods the queue waits for itself."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import pytest

from llmserve.policies import SchedulingConfig
from llmserve.policy_names import ORDERS
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

SLOTS, SERVICE_S = 8, 0.4


@dataclass
class Clients:
    """Clients of a scheduler in simulated time, on one engine whose answers all take SERVICE_S.

    latencies : seconds, by share.  refused : requests, by share
    """

    scheduler: Scheduler
    barrier: bool = False
    seconds: float = SERVICE_S
    now_s: float = 0.0
    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self._ids, self._serial = count(), count()
        self._ends: list[tuple[float, int, Event]] = []
        self._asked: dict[int, tuple[str, float, bool]] = {}
        self._step(EngineReady(EngineInfo("e", SLOTS, self.barrier)))

    def ask(self, share: str, *, again: bool = False, weight: float = 1.0, tokens: float = 20.0) -> int:
        """again : the client asks anew as soon as it is answered."""
        request = Request(next(self._ids), predicted_tokens=tokens, share=share, weight=weight)
        self._asked[request.id] = share, self.now_s, again
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
            if self._ends and self._ends[0][0] <= self.now_s:
                self._step(heapq.heappop(self._ends)[2])
            else:
                self._step(TimerFired())

    def _step(self, event: Event) -> None:
        for action in self.scheduler.handle(event, self.now_s):
            if isinstance(action, FailRequest):
                self.refused[self._asked.pop(action.request_id)[0]] += 1
            elif isinstance(action, StartBatch):
                ids = [request.id for request in action.batch.requests]
                ends: list[Event] = [RequestEnded(action.engine, id_, "completed", 20.0) for id_ in ids]
                if self.barrier:
                    ends = [BatchEnded(action.engine, action.batch.id, dict.fromkeys(ids, 20.0))]
                for end in ends:
                    heapq.heappush(self._ends, (self.now_s + self.seconds, next(self._serial), end))
        ended = event.output_tokens if isinstance(event, BatchEnded) else ()
        for id_ in (event.request_id,) if isinstance(event, RequestEnded) else ended:
            share, asked_s, again = self._asked.pop(id_)
            self.latencies[share].append(self.now_s - asked_s)
            if again:
                self.ask(share, again=True)


def clients(order: str, *, barrier: bool = False, **settings: object) -> Clients:
    config = SchedulingConfig(order=order, batch_size=SLOTS if barrier else None, **settings)  # type: ignore[arg-type]
    return Clients(config.resolved(barrier=barrier).scheduler(), barrier)


def flooded(world: Clients, seconds: float = 20.0, share: str = "modest") -> Clients:
    """One share keeps 200 requests in flight, another asks once a second."""
    for _ in range(200):
        world.ask("flood", again=True)
    for second in range(int(seconds)):
        world.run(second + 0.13)
        world.ask(share)
    world.run(seconds + 30.0)
    return world


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("barrier", [False, True], ids=["refill", "barrier"])
def test_a_modest_share_beside_a_flood_waits_for_a_free_slot_only(order: str, barrier: bool) -> None:
    world = flooded(clients(order, barrier=barrier))
    assert len(world.latencies["modest"]) == 20
    assert median(world.latencies["modest"]) <= (0.9 if not barrier else 1.3)
    unfair = flooded(clients(order, barrier=barrier), share="flood")
    assert len(world.latencies["flood"]) + 20 >= 0.98 * len(unfair.latencies["flood"])
