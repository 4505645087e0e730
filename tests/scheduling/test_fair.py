"""Fair shares: whoever floods the queue waits for itself."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import groupby
from statistics import median

import pytest
from questions.fair.worlds import Ask, Clients, gaps

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.choice.fixed_choice import FixedChoice
from llmserve.scheduling.fair import FairShares, Share, cost
from llmserve.scheduling.messages import (
    EngineLost,
    EngineReady,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
)
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.policy_names import ORDERS

SLOTS, SERVICE_S, SECONDS = 8, 0.4, 20


def clients(order: str, *, barrier: bool = False, **settings: object) -> Clients:
    config = SchedulingConfig(order=order, batch_size=SLOTS if barrier else None, **settings)  # type: ignore[arg-type]
    infos = [EngineInfo("e", SLOTS, barrier)]
    return Clients(config.resolved(barrier=barrier).scheduler(), infos, lambda tokens: SERVICE_S * tokens / 20.0)


def keep_asking(world: Clients, share: str, **more: float) -> None:
    world.ask(Ask(share, then=partial(keep_asking, world, share, **more), **more))


def flooded(world: Clients, modest: str = "modest") -> Clients:
    """One share keeps 200 requests in flight, another asks once a second."""
    for _ in range(200):
        keep_asking(world, "flood")
    for second in range(SECONDS):
        world.run(second + 0.13)
        world.ask(Ask(modest))
    world.run(SECONDS + 30.0)
    return world


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("barrier", [False, True], ids=["refill", "barrier"])
def test_a_modest_share_beside_a_flood_waits_for_the_next_free_slot_only(order: str, barrier: bool) -> None:
    world, unfair = flooded(clients(order, barrier=barrier)), flooded(clients(order, barrier=barrier), "flood")
    assert len(world.latencies["modest"]) == SECONDS
    assert median(world.latencies["modest"]) <= (1.3 if barrier else 0.9)
    assert len(world.latencies["flood"]) + SECONDS >= 0.98 * len(unfair.latencies["flood"])


@pytest.mark.parametrize("order", ORDERS)
def test_a_flood_that_claims_short_answers_gains_nothing(order: str) -> None:
    world = clients(order)
    for _ in range(200):
        keep_asking(world, "flood", predicted=1.0)
    for second in range(SECONDS):
        world.run(second + 0.13)
        world.ask(Ask("modest"))
    assert median(world.latencies["modest"]) <= 0.9


@pytest.mark.parametrize("order", ORDERS)
def test_a_full_queue_refuses_the_flood_and_not_who_comes_next(order: str) -> None:
    world = flooded(clients(order, queue_requests_max=100))
    assert world.refused["flood"] > 0
    assert world.refused["modest"] == 0
    assert len(world.latencies["modest"]) == SECONDS


def test_a_full_queue_makes_room_by_refusing_the_last_of_whoever_holds_most_by_weight() -> None:
    world = clients("fffs", queue_requests_max=6)
    for _ in range(SLOTS):
        world.ask(Ask("busy"))
    for share, weight in [("heavy", 4.0)] * 4 + [("light", 1.0)] * 2:
        world.ask(Ask(share, weight=weight))
    world.ask(Ask("new"))
    assert world.refused == {"light": 1}
    world.ask(Ask("light"))
    assert world.refused == {"light": 2}, "light holds most again, with its new request"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("barrier", [False, True], ids=["refill", "barrier"])
def test_shares_that_always_wait_are_served_by_their_weights(order: str, barrier: bool) -> None:
    world = clients(order, barrier=barrier)
    for share, weight, tokens in (("a", 1.0, 20.0), ("b", 3.0, 20.0), ("c", 1.0, 60.0)):
        for _ in range(60):
            keep_asking(world, share, weight=weight, tokens=tokens, predicted=tokens)
    world.run(200.0)
    served = {share: len(latencies) for share, latencies in world.latencies.items()}
    assert served["b"] == pytest.approx(3 * served["a"], rel=0.1)
    assert served["c"] == pytest.approx(served["a"] / 3, rel=0.1)


def test_within_a_share_the_order_decides() -> None:
    world = clients("shortest")
    for _ in range(SLOTS):
        world.ask(Ask("busy"))
    for tokens in (60.0, 40.0, 20.0):
        world.ask(Ask("a", tokens=tokens, predicted=tokens))
    world.ask(Ask("b", tokens=100.0, predicted=100.0))
    starts: list[float] = []
    world._on_start = lambda ask, computed: starts.append(ask.tokens)
    world.run(10.0)
    assert starts == [20.0, 100.0, 40.0, 60.0]


def test_a_share_that_comes_back_has_saved_up_nothing() -> None:
    world = clients("fffs")
    world.ask(Ask("sleeper"))
    for _ in range(100):
        keep_asking(world, "busy")
    world.run(100.0)
    for _ in range(100):
        keep_asking(world, "sleeper")
    before = Counter({share: len(latencies) for share, latencies in world.latencies.items()})
    world.run(120.0)
    gained = {share: len(latencies) - before[share] for share, latencies in world.latencies.items()}
    assert gained["sleeper"] == pytest.approx(gained["busy"], rel=0.1)


def test_a_request_that_runs_again_is_charged_once() -> None:
    scheduler = SchedulingConfig(order="fffs").resolved(barrier=False).scheduler()
    scheduler.handle(EngineReady(EngineInfo("e", 1, False)), 0.0)
    for number, name in enumerate("ab"):
        scheduler.handle(RequestArrived(Request(number, 20.0, share=name)), 0.0)
    a, b = scheduler.requests[0].share, scheduler.requests[1].share
    assert a.served == b.served == cost(0.0, 20.0), "b was lifted to what a had been charged"
    scheduler.handle(EngineLost("e", ()), 1.0)
    assert a.served == 0.0
    actions = scheduler.handle(EngineReady(EngineInfo("e", 1, False)), 2.0)
    assert [action.batch.requests[0].share for action in actions if isinstance(action, StartBatch)] == ["a"]
    assert a.served == b.served


def test_tokens_that_the_engine_had_in_its_cache_are_not_charged() -> None:
    scheduler = SchedulingConfig(order="fffs").resolved(barrier=False).scheduler()
    scheduler.handle(EngineReady(EngineInfo("e", 1, False)), 0.0)
    scheduler.handle(RequestArrived(Request(0, 20.0, prompt_tokens=1_000.0, share="a")), 0.0)
    share = scheduler.requests[0].share
    assert share.served == cost(1_000.0, 20.0)
    scheduler.handle(RequestEnded("e", 0, "completed", 30.0, cached_tokens=900.0), 1.0)
    assert share.served == cost(100.0, 30.0)


def test_an_answer_that_is_broken_off_is_charged_by_its_time() -> None:
    scheduler = SchedulingConfig(order="fffs").resolved(barrier=False).scheduler()
    scheduler.handle(EngineReady(EngineInfo("e", 1, False)), 0.0)
    scheduler.handle(RequestArrived(Request(0, 1_000.0, share="a")), 0.0)
    share, seconds_per_token = scheduler.requests[0].share, scheduler.models[""].service.seconds_per_token
    scheduler.handle(RequestCancelled(0), 10.0 * seconds_per_token)
    scheduler.handle(RequestEnded("e", 0, "cancelled", 0.0), 10.0 * seconds_per_token)
    assert share.served == pytest.approx(cost(0.0, 10.0))


def test_a_share_goes_on_with_prompts_of_one_prefix_until_it_is_two_prompts_ahead() -> None:
    starts: list[str] = []
    for prefix in (0, 7):
        scheduler = SchedulingConfig(order="fffs").resolved(barrier=False).scheduler()
        one_slot = [EngineInfo("e", 1, False)]
        world = Clients(scheduler, one_slot, lambda tokens: 1.0, lambda ask, computed: starts.append(ask.share))
        for share in "ab" * 6:
            world.ask(Ask(share, 500.0, 500.0, prompt_tokens=1_000.0, prefix=prefix and prefix + ord(share)))
        world.run(20.0)
    assert "".join(starts[1:11]) == "ab" * 5, "the first found nobody waiting"
    runs = [len(list(run)) for _, run in groupby(starts[12:])]
    assert all(3 <= run <= 4 for run in runs[:-1]), "from one behind to two ahead"


# ---- the law, from outside: VTC's bound ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_the_gap_between_shares_that_wait_never_exceeds_vtcs_bound(first: int) -> None:
    for seed in range(first, first + 25):
        for gap, bound in gaps(seed):
            assert gap <= bound, f"world {seed}"


def test_the_law_finds_planted_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these makes some share be served too much: the law must see it."""
    faults: list[tuple[object, str, object]] = [
        (Share, "start", lambda self, tokens, prefixes: self.leave()),
        (FixedChoice, "_next_shares", lambda self, startable: {}),
        (FairShares, "__iter__", lambda self: iter([share for *_, share in reversed(self._row)])),
    ]
    for owner, name, fault in faults:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            assert any(gap > bound for seed in range(60) for gap, bound in gaps(seed)), name
