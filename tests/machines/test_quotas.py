"""Parts of the keys' limits, dealt between gateways."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.errors import RateLimited
from llmserve.machines.quotas import SPARE, Quotas
from llmserve.tenants.key_file import KeyFile, KeyPolicy, Limits
from llmserve.tenants.limits import KeyLimits

LIMIT = 600  # requests a minute


class Gateway:
    """The limits of a gateway with one key."""

    def __init__(self, clock: list[float], part: float) -> None:
        policy = KeyPolicy(limits=Limits(requests_per_minute=LIMIT))
        file = KeyFile(keys={"ann": "sk-ann"}, policies={"ann": policy})
        self.limits = KeyLimits(file, part=part, clock=lambda: clock[0])
        self.admitted = 0

    def ask(self, times: int) -> None:
        for _ in range(times):
            try:
                self.limits.acquire("ann").release()
            except RateLimited:
                continue
            self.admitted += 1

    @property
    def part(self) -> float:
        return self.limits.quota_of["ann"]


class Gateways:
    """Gateways that exchange once a second."""

    def __init__(self, count: int) -> None:
        self.clock = [0.0]
        self.quotas = Quotas()
        self.gateways = [Gateway(self.clock, 1.0 / count) for _ in range(count)]

    def second(self, asks: Mapping[int, int]) -> None:
        """asks : requests by gateway"""
        for number, times in asks.items():
            self.gateways[number].ask(times)
        self.clock[0] += 1.0
        parts = self.quotas.allocate([str(number) for number in range(len(self.gateways))])
        for number, gateway in enumerate(self.gateways):
            gateway.limits.use_quotas(parts[str(number)])
            asked = gateway.limits.asked()
            self.quotas.received(str(number), asked, dict(gateway.limits.quota_of))
            assert sum(gateway.part for gateway in self.gateways) <= 1.0 + 1e-9
        self.quotas.decay()

    @property
    def admitted(self) -> int:
        return sum(gateway.admitted for gateway in self.gateways)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400)), max_size=15), st.integers(1, 4))
def test_no_key_gets_more_than_its_limit_wherever_it_asks(asks: list[tuple[int, int]], count: int) -> None:
    gateways = Gateways(count)
    for number, times in asks:
        gateways.second({number % count: times})
    most = LIMIT + LIMIT * len(asks) / 60
    assert gateways.admitted <= most + count


@pytest.mark.parametrize("asking", [(0,), (0, 1, 2), (1, 2)])
def test_a_key_gets_its_limit_within_five_per_cent_over_all_gateways(asking: tuple[int, ...]) -> None:
    gateways = Gateways(3)
    for _ in range(60):  # the first minute's bucket
        gateways.second(dict.fromkeys(asking, 60))
    before = gateways.admitted
    for _ in range(120):
        gateways.second(dict.fromkeys(asking, 60))
    assert 0.95 * 2 * LIMIT <= gateways.admitted - before <= 1.05 * 2 * LIMIT


def test_parts_follow_a_key_that_moves_to_another_gateway() -> None:
    gateways = Gateways(2)
    for _ in range(10):
        gateways.second({0: 10})
    assert gateways.gateways[0].part == pytest.approx(1.0 - SPARE / 2)
    for _ in range(12):
        gateways.second({1: 10})
    assert gateways.gateways[1].part > 0.9


def test_the_parts_of_a_gateway_that_is_gone_are_free() -> None:
    quotas = Quotas()
    quotas.received("a", {"ann": 10}, {"ann": 0.9})
    quotas.received("b", {"ann": 10}, {"ann": 0.1})
    assert quotas.allocate(["a", "b"])["b"]["ann"] == pytest.approx(0.1)
    quotas.forget("a")
    assert quotas.allocate(["b"])["b"]["ann"] == pytest.approx(1.0)


def test_a_request_larger_than_a_gateways_part_goes_when_the_bucket_is_full_and_leaves_a_debt() -> None:
    from llmserve.tenants.buckets import Bucket

    bucket = Bucket(100, 0.0, size=25.0)
    assert bucket.wait_s(80.0, 0.0) == 0.0
    bucket.take(80.0, 0.0)
    assert bucket.level(0.0) == -55.0
