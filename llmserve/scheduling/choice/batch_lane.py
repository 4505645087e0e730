"""Items of batch jobs, which take the slots that online requests leave.

An item waits apart from the queues of the model until it

    starts      A slot is free, no waiting request could take the slot, and the reserve stays free (spare_choice.py).
                The item's share pays nothing for a slot that nobody else wanted.
    is due      The latest start has come by the forecasts. From now on the item is an online request of the share.
    is late     The window has closed.

The latest start of an item is the end of the window less the time for the item alone, at the longest length that the
forecast allows. An item is also due when the item and everything before it, or the rest of the job, would miss the end
of the window at the share's current slot allotment: the slots of the share if all waiting shares went on waiting.

An online request that finds no slot stops the youngest running item, which has least to lose (--line-stops). The
stopped item waits again, as the first of its window.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, takewhile

import msgspec

from llmserve.request import Request
from llmserve.scheduling.admission import Admission
from llmserve.scheduling.choice.dispatch import Dispatch
from llmserve.scheduling.choice.spare_choice import SpareChoice
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.group import Group
from llmserve.scheduling.messages import FailReason, PreemptBatch, ReportDue
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.preemptible_queue import (
    ITEM_S_LEAST,
    PreemptibleQueue,
    Row,
    forecast_tokens,
    most_tokens,
)
from llmserve.scheduling.queues.waiting import QueuedRequest, Run
from llmserve.scheduling.request_book import RequestBook

LOOK_S, LOOKS_LEAST = 1.0, 16.0  # items that have arrived are looked at within so long, or this part of their windows
NO_ENGINE_S = 1.0  # how often to look whether an engine works again
KNOWN_SHARE = 0.25  # of what is left of a window: the rate of items must be known for so long


class BatchLane:
    """The items of batch jobs, from their arrival until each starts, waits as an online request, or fails.

    waiting     the waiting items, by id
    item_stops  as in Limits
    """

    def __init__(
        self, group: Group, book: RequestBook, dispatch: Dispatch, admission: Admission, item_stops: float
    ) -> None:
        self._group, self._book, self._dispatch, self._admission = group, book, dispatch, admission
        self._items = PreemptibleQueue()
        self.waiting: Mapping[int, object] = self._items.waiting
        group.tally.item_models = self._items.rows.keys()
        self._stops = ItemStops(book) if item_stops else None
        self._look_at_s = math.inf  # when items may be due
        self._room_at_s: float | None = None  # when an engine may have room for items, without an event

    # ---- items that come and go ----

    def arrive(self, item: Request) -> None:
        """Let an item wait that was not refused."""
        self._wait(item)

    def wait_again(self, queued: QueuedRequest) -> None:
        """Let an item wait that was stopped."""
        self._book.forget([queued])
        if self._dispatch.forming.draining:
            self._book.report_failed(queued.request.id, "draining")
            return
        self._wait(queued.request, first=True)

    def _wait(self, item: Request, *, first: bool = False) -> None:
        now_s, ends_s = self._book.now_s, self._items.add(item, first=first)
        self._look_at_s = min(self._look_at_s, now_s + min(LOOK_S, (ends_s - now_s) / LOOKS_LEAST))
        self._touch()

    def _touch(self) -> None:
        if self._group.pool.free:
            self._book.touch()

    def remove(self, request_id: int) -> Request | None:
        """Take an item out; None: it does not wait here."""
        item = self._items.remove(request_id)
        if item is not None and item.model not in self._items.rows:
            queues = self._group.queues.get(item.model)
            if queues is not None:
                queues.items.rate.note(self._book.now_s, 0.0, busy=False)
        return item

    def revise(self, changes: Mapping[int, Callable[[Request], Request]]) -> None:
        """Give items new forecasts."""
        self._items.revise(changes)

    def fail(self, reason: FailReason) -> None:
        """Fail all items."""
        for request_id in list(self._items.waiting):
            self._fail(request_id, reason)

    def _fail(self, request_id: int, reason: FailReason) -> None:
        item = self.remove(request_id)
        assert item is not None, f"item {request_id} does not wait"
        self._book.report_failed(request_id, reason)

    # ---- items whose time has come ----

    def promote_due(self) -> None:
        """Fail items whose window has closed, and let items wait as online requests whose latest start has come."""
        now_s = self._book.now_s
        for item in self._items.ended(now_s):
            self._fail(item.id, "deadline_exceeded")
        if now_s >= self._look_at_s:
            looks_s = [self._promote_due_of(model) for model in list(self._items.rows)]
            self._look_at_s = min(looks_s, default=math.inf)

    def _promote_due_of(self, model: str) -> float:
        """Let the items of a model that are due wait as online requests. Returns when to look again."""
        row, now_s = self._items.rows[model], self._book.now_s
        queues = self._group.queues.get(model)
        if queues is None or queues.no_engine_since_s is not None:
            return now_s + NO_ENGINE_S  # an item does not give up, as an online request would
        per_token_s = queues.service.seconds_per_token
        tokens = [forecast_tokens(queues, item) for *_, item in row]
        self._note_starved(queues, row, tokens)
        starts_s = _latest_starts_together_s(queues, row, tokens)
        together = len(list(takewhile(lambda at_s: at_s <= now_s, starts_s)))
        for place in range(together):
            if not self._promote(row[0][2]):
                return now_s + ITEM_S_LEAST + per_token_s * tokens[place]  # the queue is full: ask again
        alone_s = [ends_s - _alone_s(queues, item) for ends_s, _, item in row]
        for item in [entry[2] for entry, at_s in zip(list(row), alone_s, strict=True) if at_s <= now_s]:
            self._promote(item)
        later_s = [at_s for at_s in (*alone_s, *starts_s[together : together + 1]) if at_s > now_s]
        left_s = min(later_s, default=math.inf) - now_s
        look_s = max(LOOK_S, (row[0][0] - now_s) / LOOKS_LEAST) if row else math.inf  # how fast items end
        return now_s + min(max(0.5 * left_s, min(left_s, per_token_s), ITEM_S_LEAST), look_s)

    def _note_starved(self, queues: ModelQueues, row: Row, tokens: Sequence[float]) -> None:
        """Note whether the items of a model need more than they get. tokens : of each item"""
        now_s = self._book.now_s
        queues.items.rate.note(now_s, 0.0, busy=True)
        rate = queues.items.rate.tokens_per_s
        lefts_s = [
            (count + item.after_tokens, ends_s - now_s)  # tokens up to the end of the item's job, and its window
            for count, (ends_s, _, item) in zip(accumulate(tokens), row, strict=True)
        ]
        known_s = queues.items.rate.seconds / KNOWN_SHARE
        if rate is not None and any(count > rate * left_s and left_s <= known_s for count, left_s in lefts_s):
            self._items.starved.add(queues.model)
            self._touch()
        else:
            self._items.starved.discard(queues.model)

    def _promote(self, item: Request) -> bool:
        """Let an item wait as an online request. False: its queue has no room."""
        if self._admission.refusal(item, self._group.tally.waiting) is not None:
            return False
        request = msgspec.structs.replace(item, background=False)
        self.remove(item.id)
        self._book.actions.append(ReportDue(item.id))
        self._admission.enter(request)
        self._book.touch()
        return True

    # ---- items that start ----

    def dispatch(self) -> None:
        """Stop items for online requests that wait, and start items in the slots that others leave."""
        if self._group.tally.items and self._stops is not None:
            self._stops.make_room(self._group)
        if self._items.waiting:
            self._fill(self._group)

    def _fill(self, group: Group) -> None:
        """Start items in the slots that others leave."""
        choice = SpareChoice(
            group, self._dispatch.forming, self._book.now_s, items=self._items, admission=self._admission
        )
        for start in choice.starts():
            _, queues, batch, count = start
            for queued in batch.requests.values():
                self.remove(queued.request.id)
                self._book.by_id[queued.request.id] = queued
                group.enter(queues)
            queues.count_items(count)
            self._dispatch.start_direct(group, start, self._book.now_s)
        self._room_at_s = choice.recheck_at_s

    # ---- time ----

    def tokens_per_s(self, item: Request) -> float:
        """Tokens a second that the share of this item would get if each share that waits now went on waiting: for the
        forecast of a job's end (llmserve/jobs/feeding.py). 0 without an engine.
        """
        queues = self._group.queues.get(item.model)
        if queues is None or not queues.all_slots:
            return 0.0
        return _slots_of(queues, item) / queues.service.seconds_per_token

    def next_wake_s(self, other_s: float | None) -> float | None:
        """The earliest of the caller's time and the times at which items may start, be due, or be late."""
        times_s, pool = [self._look_at_s, *[row[0][0] for row in self._items.rows.values()]], self._group.pool
        times_s += [until_s for e in pool.paused.values() if (until_s := e.circuit.open_until_s) is not None]
        times_s += pool.rests_end_s(self._book.now_s)
        for model in self._items.rows:
            queues = self._group.queues.get(model)
            if queues is not None and (reserve := self._admission.reserves.get(queues.fair)) is not None:
                times_s.append(reserve.silent_from_s(self._items.item_s(queues)))
        if self._room_at_s is not None:
            times_s.append(self._room_at_s)
        times_s = [at_s for at_s in times_s if self._book.now_s < at_s < math.inf]
        if other_s is not None:
            times_s.append(other_s)
        return min(times_s, default=None)


class ItemStops:
    """The stops of running items for online requests that wait for a slot, in the queues or on an engine, or for room
    beside programs.
    """

    def __init__(self, book: RequestBook) -> None:
        self._book = book

    def make_room(self, group: Group) -> None:
        """Stop as many items as requests wait, the youngest first."""
        full = [
            engine
            for engine in group.pool.engines.values()
            if engine.room <= 0 and not engine.info.barrier and engine.ready and engine.circuit.closed
        ]
        soon = {e.info.name: e.room + sum([run.stopping for run in e.running.values()]) for e in full}
        for engine in full:
            self._stop([engine], -soon[engine.info.name])
        for queues in group.tally.queues.values():
            serving = [engine for engine in full if engine.serves(queues.model)]
            wanted = queues.waiting
            for engine in serving:
                taken = min(wanted, max(0, soon[engine.info.name]))
                soon[engine.info.name] -= taken
                wanted -= taken
            self._stop(serving, wanted)
        if lacks := group.programs.take_lacks():
            self._free_memory(lacks)

    def _free_memory(self, lacks: Mapping[EngineState, float]) -> None:
        """Stop the items whose tokens are what a request lacks. lacks : tokens, by engine"""
        for engine, tokens in sorted(lacks.items(), key=lambda lack: (lack[1], lack[0].info.name)):
            tokens -= sum([run.queued.total_tokens for run in engine.running.values() if run.stopping])
            if tokens <= 0.0:
                return
            items = self._stoppable([engine])
            freed = list(accumulate([run.queued.total_tokens for run in items]))
            if freed and freed[-1] >= tokens:
                self._stop([engine], bisect_left(freed, tokens) + 1)
                return

    def _stop(self, engines: Sequence[EngineState], count: int) -> None:
        """Stop so many items on these engines."""
        for run in self._stoppable(engines)[:count] if count > 0 else ():
            run.stopping = True
            self._book.actions.append(PreemptBatch(run.engine, run.batch_id, (run.queued.request.id,)))

    def _stoppable(self, engines: Sequence[EngineState]) -> list[Run]:
        """Items on these engines that may be stopped, those that have begun last first."""
        runs = [run for engine in engines for run in engine.running.values()]
        items = [run for run in runs if run.queued.request.background and self._may_stop(run)]
        return sorted(items, key=lambda run: (-run.started_at_s, run.queued.request.id))

    def _may_stop(self, run: Run) -> bool:
        """Whether a running item may be stopped: it could still end in its window after a new start."""
        item, queues = run.queued.request, self._book.queues_of(run.queued)
        if run.stopping or run.began or run.queued.cancelled:
            return False
        return item.deadline_s is None or self._book.now_s + _alone_s(queues, item) < item.deadline_s


def _alone_s(queues: ModelQueues, item: Request) -> float:
    """Seconds that an item takes at most, as far as its forecast tells."""
    return queues.work(most_tokens(queues, item), item.prompt_tokens).seconds


def _latest_starts_together_s(queues: ModelQueues, row: Row, tokens: Sequence[float]) -> list[float]:
    """When each item of a row is due together with everything before it: from this time on the item, or the rest of the
    job, would miss the end of the window at the share's current slot allotment. tokens : of each item
    """
    per_token_s = queues.service.seconds_per_token
    shared_s = [per_token_s / _slots_of(queues, item) for *_, item in row]  # seconds a token, of each item
    up_to = [0.0, *accumulate(tokens)]  # tokens before each item, and of all
    starts_s = [  # of the first item, if this one shall be in time
        ends_s - shared * (up_to[place + 1] + item.after_tokens)
        for place, ((ends_s, _, item), shared) in enumerate(zip(row, shared_s, strict=True))
    ]
    first_s = list(accumulate(reversed(starts_s), min))[::-1]  # the least from each place on
    return [first + shared * before for first, shared, before in zip(first_s, shared_s, up_to[:-1], strict=True)]


def _slots_of(queues: ModelQueues, item: Request) -> float:
    """The item's share's slot allotment: its slots if all waiting shares went on waiting."""
    others = sum([share.weight for share in queues.fair if share.name != item.share])
    return queues.all_slots * item.weight / (item.weight + others)
