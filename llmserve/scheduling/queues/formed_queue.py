"""The formed batches of one model, which wait for an engine."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain

from llmserve.scheduling.fair import Share
from llmserve.scheduling.queues.waiting import ENTRIES_SPARE, Entry, FormedBatch, QueuedRequest


class FormedQueue:
    """A model's formed batches, by the order's key; without such a key, by number.

    A batch waits in the sub-queue of its least served share (scheduling/fair.py). Push and pop cost O(log batches),
    removal of a request O(1). Returned batches, which an engine has failed, refused or lost, are few. They wait apart,
    because each may have to wait for another engine. Large batches, whose first request needs more than a fair share of
    a memory, have sub-queues of their own once others may pass. So have those that let others pass because they wait
    for something else: that a long prompt is computed (prefills.py), or for a busy engine that has their prompt
    (placement.py), by its name. Only the first batch of each sub-queue is looked at, however many wait.

    only : the sub-queue, while one share's batches wait, and none is returned or large; else []
    """

    def __init__(self, key: Callable[[FormedBatch], float]) -> None:
        self._key = key
        self._by_share: dict[Share, list[Entry]] = {}  # sub-queues: heaps whose first entries are valid; none is empty
        self._large: dict[Share, list[Entry]] = {}  # of large batches
        self._behind: dict[tuple[Share, str], list[Entry]] = {}  # of batches that wait for something else: for what
        self._returned: list[FormedBatch] = []
        self._requests = 0
        self._serial = 0
        self.only: list[Entry] = []

    def _note_only(self) -> None:
        """Set `only`. Call when sub-queues have come or gone, or `returned` has changed."""
        heaps = self._by_share
        plain = len(heaps) == 1 and not (self._returned or self._large or self._behind)
        self.only = next(iter(heaps.values())) if plain else []

    def push(self, batch: FormedBatch) -> None:
        self.hold(batch)
        batch.key = self._key(batch)
        self._enter(batch)

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
        if len(heap) > 2 * self._requests + ENTRIES_SPARE:  # a valid entry has a request at least
            heap[:] = _valid(heap)
            heapq.heapify(heap)

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
        """Re-sort after the ordering inputs changed. key : a new key function; None: the present one"""
        key_of = self._key = key or self._key
        fresh = self._entered()
        for batch in self._returned:
            batch.key = key_of(batch) if batch.requests else batch.key
        heaps = self._by_share = {}
        self._large, self._behind = {}, {}
        for batch in fresh:
            batch.key = key_of(batch)
            share = batch.join_least_served()
            entry = batch.key, batch.id, batch.serial, batch
            if share in heaps:
                heaps[share].append(entry)
            else:
                heaps[share] = [entry]
        for heap in heaps.values():
            heapq.heapify(heap)
        self._note_only()

    def _entered(self) -> list[FormedBatch]:
        """The batches with a valid entry, in no order."""
        return [entry[3] for entry in _valid(self._entries())]

    def _entries(self) -> Iterator[Entry]:
        """All entries, also void ones."""
        return chain(*self._by_share.values(), *self._large.values(), *self._behind.values())

    def snapshot(self) -> list[Entry]:
        """All entries, also void ones, for `sort_slice`; of a sub-queue nearly the last first."""
        entries = list(self._entries())
        entries.reverse()
        return entries

    def sort_slice(self, snapshot: list[Entry], count: int, tell: Callable[[Iterable[QueuedRequest]], None]) -> None:
        """Sort the batches of the last `count` entries of a snapshot, which are removed from it, and of all returned
        batches at its end. tell : gives requests the inputs of their keys
        """
        batches = [entry[3] for entry in snapshot[-count:] if entry[3].requests]
        del snapshot[-count:]
        if not snapshot:
            batches += [batch for batch in self._returned if batch.requests]
        tell(chain.from_iterable([batch.requests.values() for batch in batches]))
        self.sort_again(batches)

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
        heaps = self._by_share
        if share is not None:
            return heaps[share][0][3] if share in heaps else None
        return min([heap[0] for heap in heaps.values()])[3] if heaps else None

    @property
    def has_fresh(self) -> bool:
        """Whether a batch waits that was not moved apart."""
        return bool(self._by_share)

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
        for batches in (self.returned, self.passable):
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
        self._follow_shares(batch)
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
        for heaps in (self._by_share, self._large) if self._large else (self._by_share,):
            if (heap := heaps.get(share)) is not None and not _tidied(heap):
                del heaps[share]
                self._note_only()
        for key in [key for key in self._behind if key[0] is share] if self._behind else ():
            if not _tidied(self._behind[key]):
                del self._behind[key]
                self._note_only()


def _tidied(heap: list[Entry]) -> bool:
    """Pop void entries from the front. Returns whether any entry is left."""
    while heap and not _is_valid(heap[0]):
        heapq.heappop(heap)
    return bool(heap)


def _valid(entries: Iterable[Entry]) -> list[Entry]:
    """The entries whose batches hold a request, and have no later entry."""
    return [entry for entry in entries if entry[2] == entry[3].serial and entry[3].requests]


def _is_valid(entry: Entry) -> bool:
    """Whether the entry's batch holds a request, and has no later entry."""
    return bool(entry[3].requests) and entry[2] == entry[3].serial
