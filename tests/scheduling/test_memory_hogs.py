"""Clients that claim most of an engine's memory beside modest ones, in simulated time."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from itertools import count

import pytest

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.memory import REST, MemoryToken, is_large, is_oversize
from llmserve.scheduling.messages import EngineReady, Event, RequestArrived, RequestEnded, StartBatch, TimerFired
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.policy_names import ORDERS

CACHE, SLOTS, SERVICE_S, RUN_S = 20_000, 8, 0.2, 60.0
MODEST = 8
FORECAST = Request(0, predicted_tokens=20, prompt_tokens=10)


def rates(order: str, *hogs: Request, service_s: float = SERVICE_S, engines: int = 1) -> tuple[float, float]:
    """Answers a second of MODEST clients, and of the hogs, each of whom asks again as soon as it is answered."""
    scheduler = SchedulingConfig(order=order).resolved(barrier=False).scheduler()  # type: ignore[arg-type]
    ids, serial = count(), count()
    ends: list[tuple[float, int, str, int]] = []
    owner: dict[int, int] = {}
    answers: Counter[str] = Counter()

    def step(event: Event, now_s: float) -> None:
        for action in scheduler.handle(event, now_s):
            if isinstance(action, StartBatch):
                for request in action.batch.requests:
                    seconds = SERVICE_S if owner[request.id] < MODEST else service_s
                    heapq.heappush(ends, (now_s + seconds, next(serial), action.engine, request.id))

    def ask(client: int, now_s: float) -> None:
        request = FORECAST if client < MODEST else hogs[client - MODEST]
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        request_id = next(ids)
        owner[request_id] = client
        step(RequestArrived(Request(**{**fields, "id": request_id})), now_s)

    for number in range(engines):
        step(EngineReady(EngineInfo(f"e{number}", SLOTS, False, tokens_max=CACHE)), 0.0)
    for client in range(MODEST + len(hogs)):
        ask(client, 0.001 * client)
    while ends and ends[0][0] < RUN_S:
        wake_at_s = scheduler.wake_at_s
        if wake_at_s is not None and wake_at_s < ends[0][0]:
            step(TimerFired(), wake_at_s)
            continue
        now_s, _, engine, request_id = heapq.heappop(ends)
        client = owner.pop(request_id)
        answers["modest" if client < MODEST else "hogs"] += 1
        step(RequestEnded(engine, request_id, "completed", 20.0), now_s)
        ask(client, now_s)
    return answers["modest"] / RUN_S, answers["hogs"] / RUN_S


CLAIMS_ALL = Request(0, predicted_tokens=CACHE, prompt_tokens=10)
HOGS = {
    "n = 128": Request(0, predicted_tokens=20, prompt_tokens=10, choices=128),
    "n = 400": Request(0, predicted_tokens=20, prompt_tokens=10, choices=400),
    "a claim of the cache": CLAIMS_ALL,
    "a claim of 1e9": Request(0, predicted_tokens=1e9, prompt_tokens=10),
    "a prompt of nearly the cache": Request(0, predicted_tokens=10, prompt_tokens=CACHE - 100),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hog", HOGS.values(), ids=HOGS)
@pytest.mark.parametrize("service_s", [SERVICE_S, 2.0])
def test_modest_clients_keep_half_of_their_rate_beside_two_that_need_the_memory(
    order: str, hog: Request, service_s: float
) -> None:
    alone, _ = rates(order)
    beside, _ = rates(order, hog, hog, service_s=service_s)
    assert beside >= alone / 2


@pytest.mark.parametrize("order", ORDERS)
def test_eight_that_need_the_memory_take_no_more_than_two(order: str) -> None:
    hog = HOGS["a prompt of nearly the cache"]
    alone, _ = rates(order)
    beside, served = rates(order, *8 * [hog], service_s=2.0)
    assert beside >= alone / 2
    assert served > 0


def test_a_request_that_needs_all_the_memory_is_served_although_others_never_leave_room() -> None:
    for hog in HOGS.values():
        _, served = rates("fffs", hog, service_s=2.0)
        assert served > 1 / 10, (
            "the token is held for 2 s and the time in which the engine empties, and the rest little more"
        )


def test_without_others_those_that_need_all_the_memory_run_one_after_the_other_without_a_rest() -> None:
    scheduler = SchedulingConfig(order="fffs").resolved(barrier=False).scheduler()
    scheduler.handle(EngineReady(EngineInfo("e", SLOTS, False, tokens_max=CACHE)), 0.0)
    for number in range(3):
        scheduler.handle(RequestArrived(Request(number, predicted_tokens=CACHE)), 0.0)
    for number in range(3):
        assert list(scheduler.engines["e"].running) == [number]
        scheduler.handle(RequestEnded("e", number, "completed", 20.0), 5.0 * (number + 1))


def test_each_of_several_engines_has_its_own_token() -> None:
    hog = HOGS["a prompt of nearly the cache"]
    alone, _ = rates("fffs", engines=2)
    beside, served = rates("fffs", *4 * [hog], service_s=2.0, engines=2)
    assert beside >= alone / 2
    assert served > 2 / 10


def test_of_many_that_wait_for_the_token_a_step_asks_the_first_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    fits = EngineState.fits

    def counted(self: EngineState, queued: QueuedRequest, now_s: float, seconds_per_token: float) -> bool:
        asked.append(queued.request.id)
        return fits(self, queued, now_s, seconds_per_token)

    scheduler = SchedulingConfig(order="fffs").resolved(barrier=False).scheduler()
    scheduler.handle(EngineReady(EngineInfo("e", SLOTS, False, tokens_max=CACHE)), 0.0)
    for number in range(200):
        scheduler.handle(RequestArrived(Request(number, predicted_tokens=CACHE)), 0.0)
    monkeypatch.setattr(EngineState, "fits", counted)
    scheduler.handle(RequestArrived(Request(200, predicted_tokens=20)), 0.1)
    assert len(asked) < 10


@dataclass
class Held:
    """A request that waits in a formed batch."""

    total_tokens: int
    formed: object | None = True


def test_the_token_is_released_by_the_end_of_its_holder_and_rests_for_longer() -> None:
    token = MemoryToken()
    first, second = Held(80), Held(80)
    token.wait(first, 1.0)
    token.start(first, 2.0)
    assert not token.is_open_to(second, 3.0)
    token.end(5.0)
    assert token.rests_until_s == 5.0 + REST * 4.0
    assert not token.is_open_to(second, token.rests_until_s - 0.1)
    assert token.is_open_to(second, token.rests_until_s)


def test_the_token_of_a_holder_that_leaves_was_released_when_others_last_waited_for_it() -> None:
    token, first, second = MemoryToken(), Held(80), Held(80)
    token.wait(first, 1.0)
    assert token.is_open_to(second, 1.0), "what comes before the holder in the order takes the token"
    token.wait(first, 3.0)
    first.formed = None
    assert token.is_open_to(second, 100.0)
    assert token.rests_until_s == 3.0 + REST * 2.0


def test_only_what_needs_most_of_the_memory_needs_the_token_to_start() -> None:
    info = EngineInfo("e", 4, False, tokens_max=100)
    assert is_oversize(Held(51), info)
    assert not is_oversize(Held(50), info)
    assert is_large(Held(26), info)
    assert not is_large(Held(25), info)
    assert not is_large(Held(80), EngineInfo("static", 4, True, tokens_max=100))
