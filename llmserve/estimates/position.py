"""Places in the queue: how many requests would start before one, and how long it probably waits.

A place costs nothing until somebody asks. The first question sorts the waiting requests of its model; the answers hold
for KEPT_S, so that many streams that ask at once, and many refusals, cost one sort.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Protocol

import msgspec

from llmserve.calls.in_flight import InFlightCall
from llmserve.request import Request
from llmserve.scheduling.fair import Share, dealt
from llmserve.scheduling.group import Group
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.scheduling.scheduler import Scheduler

KEPT_S = 1.0


class Running(Protocol):
    """The engines' calls. remaining_s_of : predicted seconds until each running call of a model ends"""

    def now_s(self) -> float: ...

    def remaining_s_of(self, model: str) -> list[float]: ...


class Place(msgspec.Struct, frozen=True):
    """A waiting request's place.

    position  in the queue of its model, from 1
    wait_s    predicted seconds until its start; None: unknown
    helpless  no working engine serves its model now
    """

    position: int
    wait_s: float | None
    helpless: bool


class WaitingRow(msgspec.Struct, frozen=True):
    """Waiting requests of one model, share and bin. share : "": of nobody in particular.  group : of the model's queue

    oldest_s       seconds for which the oldest has waited
    next_starts_s  predicted seconds until the next of them starts; None: unknown, or no engine works
    """

    group: str
    model: str
    share: str
    bin: int
    waiting: int
    oldest_s: float
    next_starts_s: float | None


class Deal(msgspec.Struct, frozen=True):
    """A model's waiting requests in the order in which they would start.

    made_s     when
    positions  by request id, from 1
    counters   of the request's share before each start; they never fall
    after      counter of each share once all of its requests have started
    """

    made_s: float
    positions: dict[int, int]
    counters: list[float]
    after: dict[str, float]


class Places:
    """Tells places by the order of the scheduler."""

    def __init__(self, scheduler: Scheduler, running: Running) -> None:
        self._scheduler = scheduler
        self._running = running
        self._kept: dict[tuple[str, str], Deal] = {}

    def of(self, in_flight: InFlightCall) -> Place | None:
        """The place of a call; None while it runs, or its length is being predicted."""
        queued = self._scheduler.requests.get(in_flight.request.id)
        if queued is None or queued.run is not None:
            return None
        group = self._scheduler.groups.by_name[queued.group]
        queues = group.queues[queued.request.model]
        position = self._deal(queues).positions.get(queued.request.id, queues.waiting)
        return self.at(position, group, queues)

    def next_s(self, request: Request) -> float | None:
        """Predicted seconds until one more request like this, of its share and model, would start; None: unknown."""
        group = self._scheduler.groups.group_for(request)
        queues = group.queues.get(request.model)
        if queues is None:
            return None
        if not queues.waiting and any(engine.room > 0 for engine in group.pool.free_for(request.model)):
            return 0.0
        deal = self._deal(queues)
        counter = deal.after.get(request.share)
        if counter is None:
            counter = queues.fair.counter_of(request.share)
        return self.at(bisect_right(deal.counters, counter) + 1, group, queues).wait_s

    def _deal(self, queues: ModelQueues) -> Deal:
        now_s, key = self._running.now_s(), (queues.group, queues.model)
        deal = self._kept.get(key)
        if deal is None or now_s - deal.made_s >= KEPT_S:
            self._kept = {name: kept for name, kept in self._kept.items() if now_s - kept.made_s < KEPT_S}
            in_turn = self.in_turn(queues)
            deal = self._kept[key] = Deal(now_s, {q.request.id: place for place, q in enumerate(in_turn, 1)}, [], {})
            for queued in in_turn:
                share = queued.share
                deal.counters.append(counter := deal.after.get(share.name, share.served))
                deal.after[share.name] = counter + queued.cost / share.weight
        return deal

    def in_turn(self, queues: ModelQueues) -> list[QueuedRequest]:
        """A model's waiting requests in the order in which they would start now: the least served share is next, and
        within a share formed batches, then the bins.
        """
        formed = [queued for batch in queues.formed.batches() for queued in batch.requests.values()]
        turn = self._scheduler.order.turn
        in_bins = [queued for queue in queues.bins for queued in queue]
        of_shares: dict[Share, list[QueuedRequest]] = {}
        for queued in (*formed, *sorted(in_bins, key=lambda queued: (turn(queued), queued.request.id))):
            of_shares.setdefault(queued.share, []).append(queued)
        return list(dealt(((share, iter(requests)) for share, requests in of_shares.items()), queues.waiting))

    def rows(self) -> list[WaitingRow]:
        """Who waits, by group, model, share and bin. O(requests log requests)."""
        return [
            row
            for group in self._scheduler.groups
            for queues in group.tally.queues.values()
            for row in self._rows(group, queues)
        ]

    def _rows(self, group: Group, queues: ModelQueues) -> Iterator[WaitingRow]:
        members: dict[tuple[str, int], list[tuple[int, QueuedRequest]]] = {}
        for position, queued in enumerate(self.in_turn(queues), 1):
            members.setdefault((queued.request.share, queued.bin), []).append((position, queued))
        for (share, bin_index), waiting in sorted(members.items()):
            wait_s = self.at(waiting[0][0], group, queues).wait_s
            oldest_s = self._running.now_s() - min([queued.arrived_at_s for _, queued in waiting])
            starts_s = None if wait_s is None else round(wait_s, 1)
            yield WaitingRow(group.name, queues.model, share, bin_index, len(waiting), round(oldest_s, 1), starts_s)

    def at(self, position: int, group: Group, queues: ModelQueues) -> Place:
        """The place at a position of a model's queues.

        The group's engines end requests of all its models: the others that wait count by their share. Before the rate
        of ends is known, each of the running calls is followed by one that waits, and that by another.
        """
        helpless = queues.no_engine_since_s is not None
        share = group.tally.waiting / queues.waiting if queues.waiting else 1.0
        wait_s = None if helpless else group.rate.drain_time_s(round(position * share))
        if wait_s is None and not helpless:
            wait_s = self._after_running_s(position, queues)
        return Place(position, wait_s, helpless)

    def _after_running_s(self, position: int, queues: ModelQueues) -> float | None:
        ends_s = sorted(self._running.remaining_s_of(queues.model))
        if not ends_s:
            return None
        rounds, place = divmod(position - 1, len(ends_s))
        if rounds and not queues.service.answers:  # how long an answer takes is not known
            return None
        return ends_s[place] + rounds * queues.service.tokens_mean * queues.service.seconds_per_token
