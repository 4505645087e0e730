"""Fair shares: which share is served next, by the tokens that each has been served.

A share pays for requests: an API key, a stream, an address. Each share has a virtual counter (VTC: Sheng et al.,
Fairness in Serving Large Language Models, OSDI 2024, Section 4): the weighted tokens of its requests over the share's
weight. Of the waiting shares, the share with the smallest counter is served next.

    cost        PROMPT_WEIGHT * tokens of the prompt that the engine computes + ANSWER_WEIGHT * tokens of the answers
    at a start  the request's forecast is charged, so that many starts at once count with their likely cost
    at the end  the charge is trued up by the real length; a request that runs again is charged again
    from idle   a share begins to wait with the smallest counter of the waiting shares at least, or while no share waits
                with the counter of the last that did: nobody saves up service
    beginnings  the share served last is served again if the next prompt begins as the last did, until the share is
                ahead by two such prompts: an engine computes the common beginning once (locality in the manner
                of DLPM: Cao et al., Locality-aware Fair Scheduling in LLM Serving, 2025). That is within VTC's bound.
    elsewhere   service by other schedulers is charged here, if the share waits here at the time: a share that does not
                compete here cannot be ahead here
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

PROMPT_WEIGHT, ANSWER_WEIGHT = 1.0, 2.0  # as in the paper's experiments, after the prices of hosted models
PREFIX_QUANTUM = 2.0  # prompts by which a share may be ahead that is served again for its prefix
IDLE_SPARE = 256  # shares kept before the shares without effect are dropped


class Costly(Protocol):
    @property
    def cost(self) -> float:
        """Weighted tokens."""
        ...


T = TypeVar("T", bound=Costly)
P = TypeVar("P")


def cost(prompt_tokens: float, answer_tokens: float) -> float:
    """Weighted tokens. prompt_tokens : without those in the engine's cache.  answer_tokens : of all choices"""
    return PROMPT_WEIGHT * prompt_tokens + ANSWER_WEIGHT * answer_tokens


class Share:
    """A payer for requests, with its counter.

    served    the counter: weighted tokens over the weight
    waiting   number of waiting requests
    number    breaks ties
    among     the shares that compete
    beginning  hash of the first block of the prompt that was started last; 0: none
    given     weighted tokens charged here that have not been reported to other schedulers
    """

    __slots__ = ("among", "beginning", "given", "name", "number", "served", "waiting", "weight")

    def __init__(self, name: str, number: int, among: FairShares) -> None:
        self.name, self.number, self.among = name, number, among
        self.weight, self.served, self.given, self.waiting = 1.0, 0.0, 0.0, 0
        self.beginning = 0

    def wait(self) -> None:
        """Count a request that begins to wait."""
        if self.waiting:
            self.waiting += 1
        else:
            self.among.enter(self)

    def leave(self) -> None:
        """Count a request that no longer waits."""
        if self.waiting > 1:
            self.waiting -= 1
        else:
            self.among.leave(self)

    def charge(self, tokens: float) -> None:
        """Charge service. tokens : weighted; negative after a charge that was too high"""
        self.given += tokens
        self.count_elsewhere(tokens)

    def count_elsewhere(self, tokens: float) -> None:
        """Count service that another scheduler gave."""
        if self.waiting and self.among.contended:
            self.among.charge(self, tokens)
        else:
            self.served += tokens / self.weight

    def start(self, tokens: float, blocks: tuple[int, ...]) -> None:
        """Charge the forecast cost of a request that starts. blocks : of its prompt"""
        among = self.among
        self.beginning, among.last = blocks[0] if blocks else 0, self
        self.given += tokens
        if among.contended:
            among.charge(self, tokens)
        else:
            self.served += tokens / self.weight
        if self.waiting > 1:
            self.waiting -= 1
        else:
            among.leave(self)

    def goes_on(self, prompt_tokens: float, blocks: tuple[int, ...]) -> bool:
        """Whether the share, served last, is served again with such a prompt although another share was served less."""
        if not blocks or blocks[0] != self.beginning:
            return False
        return (self.served - self.among.floor) * self.weight < PREFIX_QUANTUM * PROMPT_WEIGHT * prompt_tokens

    @property
    def place(self) -> tuple[float, int]:
        return self.served, self.number


class FairShares:
    """The shares that compete for the same engines.

    last       the share of the request that was started last
    contended  whether several shares wait
    """

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}
        self._numbers = 0
        self._row: list[
            tuple[float, int, Share]
        ] = []  # (served, number, share) of the waiting shares, ascending; while
        # one share waits alone, `served` may be out of date
        self._drop_at = IDLE_SPARE  # number of shares at which the shares without effect are dropped
        self.last: Share | None = None
        self.contended = False
        self._left_at = 0.0  # counter of the last share that ceased to wait

    def __iter__(self) -> Iterator[Share]:
        """The waiting shares, the least served first. No share may be served before the iteration has ended."""
        return (share for *_, share in self._row)

    def of(self, name: str, weight: float) -> Share:
        """The share of this name. weight : of its later service, > 0"""
        share = self._shares.get(name)
        if share is None:
            if len(self._shares) > self._drop_at:
                self._drop_idle()
            self._numbers += 1
            share = self._shares[name] = Share(name, self._numbers, self)
        share.weight = weight
        return share

    def counter_of(self, name: str) -> float:
        """The counter of the share of this name as if the share waited."""
        share = self._shares.get(name)
        return self.floor if share is None else share.served if share.waiting else max(share.served, self.floor)

    def _drop_idle(self) -> None:
        """Drop shares whose counters would be lifted at their return: nothing is lost."""
        floor = self.floor
        self._shares = {name: share for name, share in self._shares.items() if share.waiting or share.served > floor}
        self._drop_at = IDLE_SPARE + 2 * len(self._shares)

    @property
    def floor(self) -> float:
        """The smallest counter of the waiting shares; while no share waits, the counter of the last that did."""
        return self._row[0][2].served if self._row else self._left_at

    def enter(self, share: Share) -> None:
        """Count the first request of a share that waits."""
        share.served, share.waiting = max(share.served, self.floor), 1
        self._shares.setdefault(share.name, share)
        if len(self._row) == 1:
            self._row[0] = (*self._row[0][2].place, self._row[0][2])
        insort(self._row, (*share.place, share))
        self.contended = len(self._row) > 1

    def leave(self, share: Share) -> None:
        """Count the last request of a share that no longer waits."""
        share.waiting, self._left_at = 0, share.served
        del self._row[bisect_left(self._row, share.place) if self.contended else 0]
        self.contended = len(self._row) > 1

    def charge(self, share: Share, tokens: float) -> None:
        """Charge a share that waits beside others."""
        del self._row[bisect_left(self._row, share.place)]
        share.served += tokens / share.weight
        insort(self._row, (*share.place, share))

    def take_given(self) -> dict[str, float]:
        """Weighted tokens that shares were served here since the last call. An overcharge is deducted from later
        service.
        """
        given = {share.name: share.given for share in self._shares.values() if share.given > 0.0}
        for name in given:
            self._shares[name].given = 0.0
        return given

    def serve_elsewhere(self, tokens: Mapping[str, float]) -> None:
        """Add service received from other schedulers to the counters of shares waiting here.

        tokens : weighted, by share
        """
        for name, served in tokens.items():
            share = self._shares.get(name)
            if share is not None and share.waiting:
                share.count_elsewhere(served)


NOBODY = FairShares().of("", 1.0)  # the share of a request that no queue has taken yet


def by_turn(parts: Mapping[Share, P]) -> Iterator[tuple[Share, P]]:
    """What waits of each share, the least served share first. All shares compete with one another, and wait."""
    if len(parts) < 2:
        return iter(parts.items())
    return ((share, parts[share]) for share in next(iter(parts)).among if share in parts)


def dealt(parts: Iterable[tuple[Share, Iterator[T]]], count: int, least: int | None = None) -> Iterator[T]:
    """Deal at most `count` requests: each time the next request of the share that would then be least served.

    parts : the requests of each share, in the share's order; the least served share first (by_turn). No more of them is
    asked for than is dealt from.  least : after so many requests, deal others only while their share would be ahead of
    the first by no more than these requests have cost
    """
    shares = iter(parts)
    coming = next(shares, None)
    heap: list[tuple[float, int, Share, Iterator[T]]] = []
    first, spent, number_dealt = coming[0].served if coming is not None else 0.0, 0.0, 0
    while number_dealt < count:
        while coming is not None and (not heap or coming[0].place < heap[0][:2]):
            heapq.heappush(heap, (*coming[0].place, *coming))
            coming = next(shares, None)
        if not heap:
            return
        served, number, share, requests = heap[0]
        if least is not None and number_dealt >= least and served > first + spent:
            return
        request = next(requests, None)
        if request is None:
            heapq.heappop(heap)
            continue
        cost_here = request.cost / share.weight
        heapq.heapreplace(heap, (served + cost_here, number, share, requests))
        number_dealt += 1
        if least is not None and number_dealt <= least:
            spent += cost_here
        yield request
