"""What shares are served in one group counts in the other groups of the model."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from front import Front, StartFront, until
from questions.fair.worlds import Ask, Clients

from llmserve.engines.timed.server import FakeEngine
from llmserve.live import journal
from llmserve.machines.peers import Served, ToServer
from llmserve.machines.served_shares import ServedShares
from llmserve.request import EngineInfo
from llmserve.scheduling.fair import ANSWER_WEIGHT
from llmserve.scheduling.messages import SHARES_MAX, ServedElsewhere
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.policy_names import ORDERS
from llmserve.settings.tree import ServerConfig

SLOTS, SERVICE_S, TOKENS, SECONDS = 8, 0.4, 20.0, 30
EXCHANGE_S = 1.0
PER_S = SLOTS / SERVICE_S * ANSWER_WEIGHT * TOKENS  # weighted tokens of a group
BOUND = 2 * ANSWER_WEIGHT * SLOTS * TOKENS + EXCHANGE_S * PER_S


class Groups:
    """Two groups of one model, each with an engine, whose clients keep asking."""

    def __init__(self, order: str) -> None:
        self.served: Counter[str] = Counter()  # weighted tokens over weight, by share, as seen from outside
        self.groups = {name: self._group(order) for name in ("left", "right")}
        self._shares = ServedShares()

    def _group(self, order: str) -> Clients:
        scheduler = SchedulingConfig(order=order).resolved(barrier=False).scheduler()
        engine = EngineInfo("e", SLOTS, barrier=False, models=("",))
        return Clients(scheduler, [engine], lambda tokens: SERVICE_S * tokens / TOKENS, self._started)

    def _started(self, ask: Ask, computed: float) -> None:
        self.served[ask.share] += ANSWER_WEIGHT * ask.tokens / ask.weight

    def keep_asking(self, group: str, share: str, weight: float = 1.0) -> None:
        then = partial(self.keep_asking, group, share, weight)
        self.groups[group].ask(Ask(share, TOKENS, TOKENS, weight=weight, then=then))

    def run(self, until_s: float) -> None:
        for group in self.groups.values():
            group.run(until_s)

    def exchange(self) -> None:
        for name, group in self.groups.items():
            served = [Served(models, tokens) for models, tokens in group.scheduler.group.served()]
            self._shares.received(name, served)
        for name, told in self._shares.take_elsewhere().items():
            for row in told:
                group = self.groups[name]
                group.scheduler.handle(ServedElsewhere(row.models[0], dict(row.tokens)), group.now_s)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_a_key_that_floods_two_groups_gets_no_more_than_one_that_asks_in_one(order: str, weight: float) -> None:
    world = Groups(order)
    for group, share in (("left", "flood"), ("right", "flood"), ("left", "modest")):
        for _ in range(5 * SLOTS):
            world.keep_asking(group, share, weight if share == "modest" else 1.0)
    gaps = []
    for second in range(SECONDS):
        world.run(second + 1.0)
        world.exchange()
        gaps.append(abs(world.served["flood"] - world.served["modest"]))
    assert max(gaps) <= BOUND / weight
    modest = weight * world.served["modest"]
    assert modest == pytest.approx(2 * PER_S * SECONDS * weight / (1.0 + weight), abs=BOUND), "its part of both groups"


def test_a_share_that_does_not_wait_owes_nothing_for_what_others_served_it() -> None:
    world = Groups("fffs")
    for _ in range(5 * SLOTS):
        world.keep_asking("right", "flood")
        world.keep_asking("left", "modest")
    for second in range(SECONDS):
        world.run(second + 1.0)
        world.exchange()
    before = Counter(world.served)
    for _ in range(SLOTS):
        world.groups["left"].ask(Ask("flood", TOKENS, TOKENS))
    world.run(SECONDS + 2 * SERVICE_S + 0.1)
    assert world.served["flood"] - before["flood"] > PER_S * 2 * SERVICE_S, "as a new key there, beside its flood"


def test_only_groups_with_a_model_in_common_are_told() -> None:
    shares = ServedShares()
    shares.received("a", [Served(("m", "n"), {"ann": 5.0}), Served(("o",), {"ann": 1.0})])
    shares.received("b", [Served(("n", "m"), {"ann": 2.0, "ben": 3.0})])
    shares.received("c", [Served(("p",), {"ann": 9.0})])
    assert shares.take_elsewhere() == {
        "a": (Served(("m", "n"), {"ann": 2.0, "ben": 3.0}),),
        "b": (Served(("n", "m"), {"ann": 5.0}),),
        "c": (),
    }
    assert shares.take_elsewhere() == {}, "each service is told once"


def test_what_was_charged_too_much_is_not_told() -> None:
    scheduler = Groups("fffs").groups["left"].scheduler
    share = scheduler.queues("").fair.of("ann", 1.0)
    share.charge(100.0)
    assert scheduler.group.served() == [(("",), {"ann": 100.0})]
    share.charge(-60.0)
    assert scheduler.group.served() == [(("",), {})]
    share.charge(100.0)
    assert scheduler.group.served() == [(("",), {"ann": 40.0})]
    with pytest.raises(ValueError, match="too many for one step"):
        ServedElsewhere("", {str(number): 1.0 for number in range(SHARES_MAX + 1)})


async def test_a_server_tells_and_is_told_over_http_and_a_replay_charges_alike(
    start_front: StartFront, tmp_path: Path
) -> None:
    (tmp_path / "admin").write_text("admin: sk-admin\n")
    (tmp_path / "admin").chmod(0o600)
    server = ServerConfig(port=0, admin_key_file=str(tmp_path / "admin"))
    async with FakeEngine(step_s=0.001, slots=1) as fake:
        front = await start_front(fake, server=server, slots=1)
        async with front.post(max_tokens=4) as response:
            assert response.status == 200
        (told,) = (await _peers(front, ToServer()))["served"]
        assert told["models"] == ["fake"]
        assert list(told["tokens"].values()) == [pytest.approx(ANSWER_WEIGHT * 4.0, abs=20.0)]
        many = {f"share {number}": 1.0 for number in range(SHARES_MAX + 1)}
        answer = await _peers(front, ToServer(elsewhere=(Served(("fake",), many),)))
        assert answer["served"] == []
        steps = [*front.cluster.journal.steps]
        events = [step.event for step in steps if isinstance(step.event, ServedElsewhere)]
        assert [len(event.tokens) for event in events] == [SHARES_MAX, 1]
        await until(lambda: not front.cluster.scheduler.requests)
        assert journal.replay(front.cluster.journal.header, steps) == steps


async def _peers(front: Front, told: ToServer) -> Any:
    import msgspec

    headers = {"authorization": "Bearer sk-admin"}
    body = msgspec.json.encode(told)
    async with front.session.post(f"{front.url}/admin/peers", data=body, headers=headers) as response:
        assert response.status == 200
        return await response.json()
