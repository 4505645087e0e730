"""The dealing of requests between many shares."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from llmserve.scheduling.fair import FairShares, Share, by_turn, dealt


class Waiting:
    def __init__(self, cost: float) -> None:
        self.cost = cost


def waiting(served: list[int]) -> dict[Share, list[Waiting]]:
    """Three requests of each share, which have been served so much, in the order of their arrival."""
    among = FairShares()
    parts = {}
    for number, tokens in enumerate(served):
        share = among.of(f"share {number}", 1.0 + number % 2)
        share.wait()
        share.charge(float(tokens))
        parts[share] = [Waiting(1.0 + number % 3) for _ in range(3)]
    return parts


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 24))
def test_each_request_is_of_the_share_that_would_then_be_least_served(served: list[int], count: int) -> None:
    parts = waiting(served)
    counters = {share: share.place for share in parts}
    left = {share: list(requests) for share, requests in parts.items()}
    for request in dealt(((share, iter(requests)) for share, requests in by_turn(parts)), count):
        least = min((share for share in left if left[share]), key=lambda share: counters[share])
        assert request is left[least].pop(0)
        tokens, number = counters[least]
        counters[least] = tokens + request.cost / least.weight, number
    assert sum(map(len, left.values())) == max(0, 3 * len(parts) - count)


def test_of_a_thousand_shares_no_more_are_asked_than_are_dealt_from() -> None:
    asked = []

    def requests(share: Share) -> Iterator[Waiting]:
        asked.append(share)
        yield Waiting(1.0)

    parts = waiting([0] * 1000)
    assert len(list(dealt(((share, requests(share)) for share in dict(by_turn(parts))), 8))) == 8
    assert len(asked) <= 9
