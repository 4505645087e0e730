"""The formed batches of one model, which wait for an engine."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from itertools import chain

from llmserve.scheduling.fair import Share
from llmserve.scheduling.queues.waiting import ENTRIES_SPARE, Entry, FormedBatch, QueuedRequest

SORTED_AT_ONCE = 512  # requests, and entries of a sub-queue, that are sorted again in one go
PART = 64  # entries that leave a stale sub-queue together
SORTED_BY_A_PUSH = 4  # stale entries: a push makes one entry more, so stale ones go faster than others come


class FormedQueue:
    """A model's formed batches, by the order's key; without such a key, by number.

    A batch waits in the sub-queue of its least served share (scheduling/fair.py). Push and pop cost O(log batches),
    removal of a request O(1). Returned batches, which an engine has failed, refused or lost, are few. They wait apart,
    because each may have to wait for another engine. Large batches, whose first request needs more than a fair share of
    a memory, have sub-queues of their own once others may pass. So have those that let others pass because they wait
    for something else: that a long prompt is computed (prefills.py), or for a busy engine that has their prompt
    (placement.py), by its name. Only the first batch of each sub-queue is looked at, however many wait.

    Once the inputs of the keys have changed, all batches are stale: some at a time are sorted again, by `sort_some` and
    by each push. Until then a batch keeps its former key in a stale sub-queue of its share.

    tell : gives requests the inputs of their keys, before a stale batch gets its new one

    stale : the stale sub-queues; {}: all keys are by the present inputs
    only : the sub-queue, while one share's batches wait, and none is stale, returned or large; else []
    """

    def __init__(
        self,
        key: Callable[[FormedBatch], float],
        tell: Callable[[Collection[QueuedRequest]], None] = lambda requests: None,
    ) -> None:
        self._key, self._tell = key, tell
        self._by_share: dict[Share, list[Entry]] = {}  # sub-queues: heaps whose first entries are valid; none is empty
        self.stale: dict[Share, list[Entry]] = {}  # likewise
        self._large: dict[Share, list[Entry]] = {}  # of large batches
        self._behind: dict[tuple[Share, str], list[Entry]] = {}  # of batches that wait for something else: for what
        self._returned: list[FormedBatch] = []
        self._requests = 0
        self._serial = 0
        self.only: list[Entry] = []

    def _note_only(self) -> None:
        """Set `only`. Call when sub-queues have come or gone, or `returned` has changed."""
        heaps = self._by_share
        plain = len(heaps) == 1 and not (self.stale or self._returned or self._large or self._behind)
        self.only = next(iter(heaps.values())) if plain else []

    def push(self, batch: FormedBatch) -> None:
        batch.hold()
        self._requests += len(batch.requests)
        batch.key = self._key(batch)
        self._enter(batch)
        if self.stale:
            self.sort_some(SORTED_BY_A_PUSH)

    def _enter(self, batch: FormedBatch, *, large: bool = False, behind: str | None = None) -> None:
        """Give a batch an entry, which voids an earlier one. `_drop_void` must follow if there was an earlier one."""
        self._serial += 1  # makes entries distinct, so that the heap never compares batches
        entry = batch.entry(self._serial, large=large, behind=behind)
        if behind is None:
            heaps = self._large if large else self._by_share
            heap = heaps.get(batch.share)
            if heap is None:
                heap = heaps[batch.share] = []
                self._note_only()
        else:
            heap = self._behind.setdefault((batch.share, behind), [])
            self._note_only()
        heapq.heappush(heap, entry)
        if len(heap) > 2 * batch.share.waiting + ENTRIES_SPARE:  # a valid entry has a request of the share at least
            self._clean(batch, heap)

    def _clean(self, batch: FormedBatch, heap: list[Entry]) -> None:
        """Remove the void entries of a sub-queue. heap : the sub-queue, in which the batch is"""
        share = batch.share
        if len(heap) <= SORTED_AT_ONCE or batch.passable:
            heap[:] = _valid(heap)
            heapq.heapify(heap)
        elif share not in self.stale:
            self.stale[share] = self._by_share.pop(share)
            self._note_only()

    # ---- sorting again ----

    def sort_again(self, batches: Iterable[FormedBatch]) -> None:
        """Sort batches, none empty, after the inputs of their keys have changed."""
        key_of, shares = self._key, {}
        for batch in batches:
            key = key_of(batch)
            if key != batch.key or batch.passable:
                batch.key = key
                if batch.serial:
                    self._enter(batch)
                    shares[batch.share] = True
        for share in shares:
            self._drop_void(share)

    def sort_all(self, key: Callable[[FormedBatch], float] | None = None) -> None:
        """Re-sort at once after the ordering inputs changed. key : a new key function; None: the present one"""
        self.mark_stale(key)
        self.sort_some(self._requests)

    def mark_stale(self, key: Callable[[FormedBatch], float] | None = None) -> None:
        """Have all batches sorted again by `sort_some`, and those that others may pass with the others. key : a new key
        function; None: the present one

        Returned batches are sorted at once.
        """
        self._key = key or self._key
        returned = [batch for batch in self._returned if batch.requests]
        self._tell([queued for batch in returned for queued in batch.requests.values()])
        for batch in returned:
            batch.key = self._key(batch)
        passable = [*self._large.items(), *[(share, heap) for (share, _), heap in self._behind.items()]]
        for _, heap in passable:
            for entry in heap:
                entry[3].large, entry[3].behind = False, None
        heaps = [*self._by_share.items(), *passable]
        self._by_share, self._large, self._behind = {}, {}, {}
        for share, heap in heaps:
            if share in self.stale:
                self.stale[share] += heap
                heapq.heapify(self.stale[share])
            else:
                self.stale[share] = heap
        self._note_only()

    def sort_some(self, count: int) -> None:
        """Sort stale batches of about so many requests; all, where no more requests wait."""
        left: float = count if self._requests > count else math.inf
        while left > 0 and self.stale:
            share = next(reversed(self.stale))
            heap, part = self.stale[share], min(count, PART)
            entries = heap[-part:]
            if len(entries) < len(heap):
                del heap[-part:]  # the others remain a heap
            else:
                del self.stale[share]
            batches = [entry[3] for entry in _valid(entries)]
            self._sort_in(batches)
            left -= len(entries) + sum([len(batch.requests) - 1 for batch in batches])
        if not self.stale:
            self._note_only()

    def _sort_in(self, batches: list[FormedBatch]) -> None:
        """Give stale batches, which have left their sub-queues, new keys and places."""
        self._tell([queued for batch in batches for queued in batch.requests.values()])
        key_of, by_share = self._key, self._by_share
        fresh: dict[Share, list[Entry]] = {}
        for batch in batches:
            batch.key = key = key_of(batch)
            entry = key, batch.id, batch.serial, batch
            if (share := batch.join_least_served()) in fresh:
                fresh[share].append(entry)
            else:
                fresh[share] = [entry]
        for share, entries in fresh.items():
            heap = by_share.setdefault(share, [])
            if len(heap) < 4 * len(entries):
                heap += entries
                heapq.heapify(heap)
            else:
                for entry in entries:
                    heapq.heappush(heap, entry)

    def _entered(self) -> list[FormedBatch]:
        """The batches with a valid entry, in no order."""
        heaps = (self._by_share, self.stale, self._large, self._behind)
        return [entry[3] for heap_of in heaps for heap in heap_of.values() for entry in _valid(heap)]

    def push_returned(self, batch: FormedBatch) -> None:
        self.hold(batch)
        batch.key = self._key(batch)
        self._returned.append(batch)
        self._note_only()

    def set_apart(self, batch: FormedBatch) -> FormedBatch:
        """Move a batch to the returned batches, so that fresh ones can overtake. Returns the batch."""
        if batch.serial:
            batch.leave_entry()
            self._returned.append(batch)
            self._drop_void(batch.share)
            self._note_only()
        return batch

    def set_apart_large(self, batch: FormedBatch) -> bool:
        """Move a batch to the large batches, so that others can overtake. False: another large batch is first."""
        if batch.serial and not batch.large:
            self._enter(batch, large=True)
            self._drop_void(batch.share)
        return not batch.large or self._large[batch.share][0][3] is batch

    def set_apart_behind(self, batch: FormedBatch, what: str) -> None:
        """Move a batch to those that wait for something else, so that others can overtake. what : a long prompt, "", or
        the name of a busy engine
        """
        if batch.serial and batch.behind != what:
            self._enter(batch, behind=what)
            self._drop_void(batch.share)

    def hold(self, batch: FormedBatch) -> None:
        """Count a batch without an entry, because its engine is already chosen; `take` its requests at the start."""
        batch.hold()
        self._requests += len(batch.requests)

    def __len__(self) -> int:
        """Number of requests in formed batches."""
        return self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """The requests of all formed batches, in no order."""
        return chain.from_iterable([batch.requests.values() for batch in self.in_no_order()])

    def in_no_order(self) -> list[FormedBatch]:
        """Every batch that holds a request, and perhaps returned ones that hold none, in no order."""
        return [*self._entered(), *self._returned]

    @property
    def returned(self) -> list[FormedBatch]:
        """Returned batches that still hold a request, in order; parts of one batch in the order of their return."""
        if self._returned:
            self._returned = [batch for batch in self._returned if batch.requests]
            self._note_only()
        return sorted(self._returned, key=self.turn_of) if len(self._returned) > 1 else self._returned

    def fresh(self, share: Share | None = None) -> FormedBatch | None:
        """The first batch that was not moved apart; None: there is none. share : None: of any share"""
        if share is not None:
            firsts = [heaps[share][0] for heaps in (self._by_share, self.stale) if share in heaps]
        else:
            firsts = [heap[0] for heap in chain(self._by_share.values(), self.stale.values())]
        return min(firsts)[3] if firsts else None

    @property
    def has_fresh(self) -> bool:
        """Whether a batch waits that was not moved apart."""
        return bool(self._by_share or self.stale)

    @property
    def passable(self) -> list[FormedBatch]:
        """The first large batch of each share, and the first of those that wait for the same."""
        return [heap[0][3] for heap in chain(self._large.values(), self._behind.values())]

    def first(self, without: Container[FormedBatch] = (), share: Share | None = None) -> FormedBatch | None:
        """The first batch; None: there is none.

        without : returned and passable batches to leave out.  share : of which the batch must hold a request; None: any
        """
        fresh = self.fresh(share)
        if self.only or not (self._returned or self._large or self._behind):
            return fresh
        firsts = [] if fresh is None else [fresh]
        firsts += [batch for batch in self.returned if batch not in without and (share is None or batch.has(share))]
        for batch in self.passable:
            held = share is None or batch.share is share or (len(batch.requests) > 1 and batch.has(share))
            if held and batch not in without:
                firsts.append(batch)
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
        return sorted([*self._entered(), *self.returned], key=self.turn_of)

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
        if batch.requests:
            self._follow_shares(batch)
        else:
            self._drop_void(batch.share)
        return leaving

    def _follow_shares(self, batch: FormedBatch) -> None:
        """Move a batch, which requests have left, to the sub-queue of a remaining share."""
        before = batch.share
        if batch.requests and batch.serial:
            moves = not batch.has(before)
            if moves:
                batch.join_least_served()
            if moves or batch.passable:  # the new first request may be modest
                self._enter(batch)
        self._drop_void(before)

    def _drop_void(self, share: Share) -> None:
        """Pop void entries, so that the first batch of each of the share's sub-queues holds a request."""
        heap = self._by_share.get(share)
        if heap is not None and not _tidied(heap):
            del self._by_share[share]
            self._note_only()
        if not (self.stale or self._large or self._behind):
            return
        for heaps in (self.stale, self._large):
            if (heap := heaps.get(share)) is not None and not _tidied(heap):
                del heaps[share]
                self._note_only()
        for key in [key for key in self._behind if key[0] is share]:
            if not _tidied(self._behind[key]):
                del self._behind[key]
                self._note_only()


def _tidied(heap: list[Entry]) -> bool:
    """Pop void entries from the front. Returns whether any entry is left."""
    while heap:
        _, _, serial, batch = heap[0]
        if serial == batch.serial and batch.requests:
            return True
        heapq.heappop(heap)
    return False


def _valid(entries: Iterable[Entry]) -> list[Entry]:
    """The entries whose batches hold a request, and have no later entry."""
    return [entry for entry in entries if entry[2] == entry[3].serial and entry[3].requests]
