"""Requests that make every engine fail, beside a client whose requests are in order, in simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import median

import pytest

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    EngineReady,
    FailRequest,
    ReportCircuit,
    RequestArrived,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.settings.policies import SchedulingConfig

SERVICE_S, FAULT_S = 0.1, 0.01
HONEST_EVERY_S = 1.0
POISONERS = 6
HONEST = 1  # sender


@dataclass
class Result:
    """waits_s : of the honest requests, from arrival to answer.  openings : reports that a circuit has opened"""

    waits_s: list[float] = field(default_factory=list)
    openings: int = 0
    honest_failed: int = 0


@dataclass
class Rehearsal:
    """Poisoners that send again as soon as they are refused, and a client that asks once a second.

    sender_of : the sender of the n-th poisoned request, of poisoner p
    """

    engines: int
    sender_of: Callable[[int, int], int]
    honest_sender: Callable[[int], int] = lambda number: HONEST
    sick_from_s: float = 1e9  # from then on the first engine fails all requests
    result: Result = field(default_factory=Result)

    def run(self, until_s: float) -> Result:
        config = SchedulingConfig(order="fffs", release="greedy", batch_size=1, bins=1).resolved(barrier=False)
        self.scheduler = config.scheduler()
        self.serial, self.ids = count(), count()
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.poison: dict[int, int] = {}  # request id -> poisoner
        self.arrived_s: dict[int, float] = {}
        self.sent = count()
        for number in range(self.engines):
            self.step(EngineReady(EngineInfo(f"e{number}", 8, False)), 0.0)
        for number in range(int(until_s / HONEST_EVERY_S)):
            self.at(number * HONEST_EVERY_S + 0.5, partial(self.ask, number))
        for poisoner in range(POISONERS):
            self.at(0.01 * poisoner, partial(self.send_poison, poisoner))
        while self.events and self.events[0][0] < until_s:
            wake_at_s = self.scheduler.wake_at_s
            if wake_at_s is not None and wake_at_s <= self.events[0][0]:
                self.step(TimerFired(), wake_at_s)
            else:
                now_s, _, happen = heapq.heappop(self.events)
                happen(now_s)
        return self.result

    def at(self, at_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (at_s, next(self.serial), happen))

    def ask(self, number: int, now_s: float) -> None:
        request_id = next(self.ids)
        self.arrived_s[request_id] = now_s
        self.step(RequestArrived(Request(request_id, sender=self.honest_sender(number))), now_s)

    def send_poison(self, poisoner: int, now_s: float) -> None:
        request_id = next(self.ids)
        self.poison[request_id] = poisoner
        sender = self.sender_of(poisoner, next(self.sent))
        self.step(RequestArrived(Request(request_id, sender=sender)), now_s)

    def step(self, event: object, now_s: float) -> None:
        for action in self.scheduler.handle(event, now_s):  # type: ignore[arg-type]
            self.carry_out(action, now_s)

    def carry_out(self, action: Action, now_s: float) -> None:
        if isinstance(action, ReportCircuit):
            self.result.openings += action.open_s is not None
        elif isinstance(action, FailRequest):
            poisoner = self.poison.pop(action.request_id, None)
            self.result.honest_failed += poisoner is None
            if poisoner is not None:
                self.at(now_s + 0.005, partial(self.send_poison, poisoner))
        elif isinstance(action, StartBatch):
            for request in action.batch.requests:
                sick = action.engine == "e0" and now_s >= self.sick_from_s
                fails = request.id in self.poison or sick
                at_s = now_s + (FAULT_S if fails else SERVICE_S)
                self.at(at_s, self.ending(action.engine, request.id, fails=fails))

    def ending(self, engine: str, request_id: int, *, fails: bool) -> Callable[[float], None]:
        def end(now_s: float) -> None:
            if not fails:
                self.result.waits_s.append(now_s - self.arrived_s.pop(request_id))
            outcome = "failed" if fails else "completed"
            self.step(RequestEnded(engine, request_id, outcome, 5.0, fault=fails, retryable=fails), now_s)  # type: ignore[arg-type]

        return end


def one_key(poisoner: int, number: int) -> int:
    return 2


def one_prompt_each(poisoner: int, number: int) -> int:
    return 2 + poisoner


def ever_new_prompts(poisoner: int, number: int) -> int:
    return 2 + number


def nameless(poisoner: int, number: int) -> int:
    return 0


@pytest.mark.parametrize("sender_of", [one_key, one_prompt_each, ever_new_prompts, nameless])
def test_with_two_engines_poisoned_prompts_delay_nobody(sender_of: Callable[[int, int], int]) -> None:
    result = Rehearsal(2, sender_of).run(30.0)
    assert len(result.waits_s) == 30
    assert not result.honest_failed
    assert max(result.waits_s) < 2 * median(result.waits_s)


@pytest.mark.parametrize("sender_of", [one_key, one_prompt_each])
def test_with_one_engine_the_same_senders_delay_others_only_before_they_are_known(
    sender_of: Callable[[int, int], int],
) -> None:
    result = Rehearsal(1, sender_of).run(60.0)
    assert result.openings <= 2
    assert len(result.waits_s) == 60
    assert max(result.waits_s) < 4.0
    assert max(result.waits_s[5:]) < 2 * median(result.waits_s)


@pytest.mark.parametrize("honest_sender", [lambda number: HONEST, lambda number: -1 - number])
def test_an_engine_that_fails_everything_is_still_shut_within_a_few_faults(
    honest_sender: Callable[[int], int],
) -> None:
    rehearsal = Rehearsal(2, one_key, honest_sender, sick_from_s=10.0)
    result = rehearsal.run(40.0)
    assert len(result.waits_s) == 40, "what the sick engine fails runs on the other"
    assert not rehearsal.scheduler.engines["e0"].circuit.closed
