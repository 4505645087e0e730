"""The formed batches of one model: those that wait for an engine."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterator
from itertools import chain

from llmserve.scheduling.fair import Share
from llmserve.scheduling.queues.waiting import ENTRIES_SPARE, Entry, FormedBatch, QueuedRequest


class FormedQueue:
    """A model's formed batches by the key that the order gives them as they form; without such a key, by number.

    Each share has a lane, where the batches wait of which it is the least served share (scheduling/fair.py).
    Push and pop cost O(log batches), removal of a request O(1).  returned : batches that an engine failed or lost; they
    are few, and kept apart, for each may have to wait for another engine.
    Large batches, whose first request needs more than its fair share of a memory, have lanes of their own once others
    may pass them: only the first of each lane is looked at, however many wait.

    only : the lane, while one share's batches wait, and none is returned or large; else []
    """

    def __init__(self, key: Callable[[FormedBatch], float]) -> None:
        self._key = key
        self._lanes: dict[Share, list[Entry]] = {}  # heaps whose first entries are valid; none is empty
        self._large: dict[Share, list[Entry]] = {}  # of large batches
        self._returned: list[FormedBatch] = []
        self._requests = 0
        self._serial = 0
        self.only: list[Entry] = []

    def _note_only(self) -> None:
        """Set `only`. Call when lanes have come or gone, or `returned` has changed."""
        lanes = self._lanes
        plain = len(lanes) == 1 and not (self._returned or self._large)
        self.only = next(iter(lanes.values())) if plain else []

    def push(self, batch: FormedBatch) -> None:
        self.hold(batch)
        batch.key = self._key(batch)
        self._enter(batch)

    def _enter(self, batch: FormedBatch, *, large: bool = False) -> None:
        """Give a batch an entry; its former one is void from now on. `_drop_void` must follow where it has been one."""
        self._serial += 1  # makes entries distinct, so that the heap never compares batches
        entry = batch.entry(self._serial, large=large)
        lanes = self._large if large else self._lanes
        lane = lanes.get(batch.share)
        if lane is None:
            lane = lanes[batch.share] = []
            self._note_only()
        heapq.heappush(lane, entry)
        if len(lane) > 2 * self._requests + ENTRIES_SPARE:  # a valid entry has a request at least
            lane[:] = [entry for entry in lane if _is_valid(entry)]
            heapq.heapify(lane)

    def sort_again(self, batch: FormedBatch) -> None:
        """Give a batch the key, and the place, that follow from the present forecasts of its requests."""
        key = self._key(batch)
        if key == batch.key and not batch.large:
            return
        batch.key = key
        if batch.serial:
            self._enter(batch)
            self._drop_void(batch.share)

    def sort_all(self, key: Callable[[FormedBatch], float] | None = None) -> None:
        """Sort all batches again, for what their keys go by has changed. key : another one"""
        self._key = key or self._key
        fresh = [entry[3] for entry in self._entries()]
        for batch in (*fresh, *self._returned):
            batch.key = self._key(batch) if batch.requests else batch.key
        lanes = self._lanes = {}
        self._large = {}
        for batch in fresh:
            share = batch.join_least_served()
            lanes.setdefault(share, []).append((batch.key, batch.id, batch.serial, batch))
        for lane in lanes.values():
            heapq.heapify(lane)
        self._note_only()

    def _entries(self) -> Iterator[Entry]:
        """The valid entries, in no order."""
        entries = chain(*self._lanes.values(), *self._large.values())
        return (entry for entry in entries if entry[3].requests and entry[2] == entry[3].serial)

    def push_returned(self, batch: FormedBatch) -> None:
        self.hold(batch)
        batch.key = self._key(batch)
        self._returned.append(batch)
        self._note_only()

    def set_apart(self, batch: FormedBatch) -> FormedBatch:
        """Keep a batch apart from those that were never started, so that others can start before it. Returns it."""
        if batch.serial:
            batch.leave_entry()
            self._returned.append(batch)
            self._drop_void(batch.share)
            self._note_only()
        return batch

    def set_apart_large(self, batch: FormedBatch) -> bool:
        """Keep a batch in a lane of large ones, so that others can start before it. False: it waits behind another."""
        if batch.serial and not batch.large:
            self._enter(batch, large=True)
            self._drop_void(batch.share)
        return not batch.large or self._large[batch.share][0][3] is batch

    def hold(self, batch: FormedBatch) -> None:
        """Count a batch that is in no order, for its engine is already chosen; `take` its requests when it starts."""
        batch.hold()
        self._requests += len(batch.requests)

    def __len__(self) -> int:
        """Number of requests in formed batches."""
        return self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Their requests, in no order."""
        batches = [*[entry[3] for entry in self._entries()], *self._returned]
        return (queued for batch in batches for queued in batch.requests.values())

    @property
    def returned(self) -> list[FormedBatch]:
        """Returned batches that still hold a request, in order; parts of one batch in the order of their return."""
        if self._returned:
            self._returned = [batch for batch in self._returned if batch.requests]
            self._note_only()
        return sorted(self._returned, key=self.turn_of) if len(self._returned) > 1 else self._returned

    def fresh(self, share: Share | None = None) -> FormedBatch | None:
        """The first batch that was not set apart; None when there is none. share : of this one; None: of any"""
        lanes = self._lanes
        if share is not None:
            return lanes[share][0][3] if share in lanes else None
        return min([lane[0] for lane in lanes.values()])[3] if lanes else None

    @property
    def has_fresh(self) -> bool:
        """Whether a batch waits that was not set apart."""
        return bool(self._lanes)

    @property
    def large(self) -> list[FormedBatch]:
        """The first large batch of each share."""
        return [lane[0][3] for lane in self._large.values()]

    def first(self, without: Container[FormedBatch] = (), share: Share | None = None) -> FormedBatch | None:
        """The first batch, without these returned and large ones; None when there is none. share : of this one; None:
        of any
        """
        fresh = self.fresh(share)
        if self.only or not (self._returned or self._large):
            return fresh
        firsts = [] if fresh is None else [fresh]
        for batches in (self.returned, self.large):
            willing = (batch for batch in batches if batch not in without)
            firsts += [batch for batch in willing if share is None or batch.has(share)]
        return min(firsts, key=self.turn_of, default=None)

    def split(self, batch: FormedBatch, count: int) -> FormedBatch:
        """Hold the first `count` requests of a batch as a batch of their own, with the same number."""
        part = FormedBatch(batch.id, batch.bin, batch.formed_at_s, self.take(batch, count), batch.model)
        part.size = batch.size
        self.hold(part)
        return part

    def turn_of(self, batch: FormedBatch) -> tuple[float, int]:
        """The batch's place in the order: its key, and its number among equals."""
        return batch.key, batch.id

    def batches(self) -> list[FormedBatch]:
        """Every batch that still holds a request, in order."""
        fresh = [(*self.turn_of(entry[3]), entry[3]) for entry in self._entries()]
        returned = [(*self.turn_of(batch), batch) for batch in self.returned]
        return [batch for *_, batch in sorted([*fresh, *returned], key=lambda entry: entry[:2])]

    def remove(self, queued: QueuedRequest) -> None:
        assert queued.formed is not None, f"request {queued.request.id} is in no formed batch"
        batch = queued.formed
        batch.drop(queued)
        self._requests -= 1
        self._follow_shares(batch)

    def take(self, batch: FormedBatch, count: int) -> list[QueuedRequest]:
        """Take the first `count` requests out of a batch."""
        leaving = batch.take(count)
        self._requests -= len(leaving)
        self._follow_shares(batch)
        return leaving

    def _follow_shares(self, batch: FormedBatch) -> None:
        """Move a batch that requests have left to the lane of a share that is still in it."""
        before = batch.share
        if batch.requests and batch.serial:
            moves = not batch.has(before)
            if moves:
                batch.join_least_served()
            if moves or batch.large:  # the new first request may be modest
                self._enter(batch)
        self._drop_void(before)

    def _drop_void(self, share: Share) -> None:
        """Pop void entries, so that the first batch of each of the share's lanes holds a request."""
        for lanes in (self._lanes, self._large) if self._large else (self._lanes,):
            lane = lanes.get(share)
            while lane and not _is_valid(lane[0]):
                heapq.heappop(lane)
                if not lane:
                    del lanes[share]
                    self._note_only()


def _is_valid(entry: Entry) -> bool:
    """Whether the entry's batch still holds a request, and has no later entry."""
    return bool(entry[3].requests) and entry[2] == entry[3].serial
