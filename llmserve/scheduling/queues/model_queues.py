"""Waiting requests of one model, and its answer lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Protocol

from bins.dispatch import DispatchPlan, Observed
from llmserve.request import Batch, Request
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.fair import FairShares, Share
from llmserve.scheduling.load import Load
from llmserve.scheduling.prefills import is_long
from llmserve.scheduling.queues.binning import Binning
from llmserve.scheduling.queues.formed_queue import SORTED_AT_ONCE, FormedQueue
from llmserve.scheduling.queues.oldest import Oldest
from llmserve.scheduling.queues.waiting import Amount, BinQueue, FormedBatch, QueuedRequest, turn_of_arrival
from llmserve.scheduling.rates import ItemService, ServiceTime
from llmserve.scheduling.release import Plans, Release
from llmserve.scheduling.work import PromptTime, Work

BINNED_AT_ONCE = 32  # requests in bins that are sorted again in one go, where more than SORTED_AT_ONCE wait there
CHANGE_COSTS = 4  # sorts: what a change of a request costs as it is sorted


Change = Callable[[Iterable[QueuedRequest]], None]


class Tally:
    """Waiting requests of all models, as ModelQueues count them. waiting : number.  queues : those not empty, by model

    deferred : queues, by model, whose batches could not form early, because several shares waited (Forming)
    items : items of batch jobs that run in slots left by online requests.  item_models : models of those that wait
    """

    __slots__ = ("deferred", "item_models", "items", "queues", "waiting")

    def __init__(self) -> None:
        self.waiting = self.items = 0
        self.queues: dict[str, ModelQueues] = {}
        self.deferred: dict[str, ModelQueues] = {}
        self.item_models: Collection[str] = ()


class Ordering(Protocol):
    """What the queues need of an order: FixedOrder and MomentOrder (choice/orders.py)."""

    @property
    def follows_load(self) -> bool: ...

    @property
    def batch_key(self) -> Callable[[FormedBatch], float]: ...

    @property
    def turn(self) -> Callable[[QueuedRequest], float]: ...


class ModelQueues:
    """The queues of one model. All times are seconds on the scheduler's clock.

    model       its name
    release     decides when a bin releases a batch (scheduling/release.py).  at_once : as the release has it
    binning     which bin a request waits in
    formed      batches that wait for an engine
    load        for orders that follow the load; None for others
    plans       asks for plans, and follows them; None unless the release does
    service     times of answers, with their prompts.  prompts : of the prompts alone
    items       times of batch items, which run in slots left by online requests
    dirty       whether waiting requests are to be sorted again: a dispatch calls sort_some before it looks for the
                next request
    bins        a queue for each bin; queue : makes one, by its index
    fair        the shares that compete for the model's engines; models that share an engine have the same
    tally       counts waiting requests of all models
    oldest      the waiting requests by age, while an engine of the model holds few models at once; else None

    Updated after every change of the engines for the model:
    engines  ready engines; slots : of the engine with the fewest, 0 without an engine; all_slots : of all
    no_engine_since_s  None while some ready engine has a closed circuit
    """

    def __init__(
        self,
        model: str,
        *,
        binning: Binning,
        release: Release,
        order: Ordering,
        plans: Plans | None = None,
        queue: Callable[[int], BinQueue] = BinQueue,
        tally: Tally | None = None,
    ) -> None:
        self.model, self.tally = model, tally or Tally()
        self.binning, self.release, self.plans = binning, release, plans
        self.at_once = release.at_once
        self.service, self.prompts, self.items = ServiceTime(), PromptTime(), ItemService()
        self.formed, self.load = FormedQueue(order.batch_key, self.tell), Load() if order.follows_load else None
        self.bins = [queue(index) for index in range(binning.edges.bins)]
        self.dirty = self._changed = False  # the second: whether a further sort has to begin
        self._unsorted: list[QueuedRequest] = []  # requests of the bins that are still to be sorted; some may have left
        self._changes: list[Change] = []  # that requests go through as they are sorted
        self.fair = FairShares()
        self.waiting, self.amount = 0, Amount()  # requests in bins and in formed batches, and what they have to do
        self.present = 0  # requests that wait or run
        self.engines: Sequence[EngineState] = ()
        self.slots = self.all_slots = 0
        self.no_engine_since_s: float | None = 0.0
        self.oldest: Oldest | None = None

    def set_engines(self, ready: Sequence[EngineState], now_s: float) -> None:
        """Set the ready engines that serve the model."""
        self.engines, self.all_slots = ready, sum([engine.info.slots for engine in ready])
        self.slots = min([engine.info.slots for engine in ready], default=0)
        for queue in self.bins:
            queue.engines = max(1, len(ready))
        if not any(engine.loaded is not None for engine in ready):
            self.oldest = None
        elif self.oldest is None:
            self.oldest = Oldest(self.in_no_order())
        if any(engine.circuit.closed for engine in ready):
            self.no_engine_since_s = None
        elif self.no_engine_since_s is None:
            self.no_engine_since_s = now_s

    def _count(self, requests: Collection[QueuedRequest], sign: int = 1) -> None:
        """Count requests that begin to wait, or with -1 requests that cease to."""
        if not self.waiting:
            self.tally.queues[self.model] = self
        number = sign * len(requests)
        self.waiting += number
        self.tally.waiting += number
        for queued in requests:
            self.amount.add(queued, sign)
        if not self.waiting:
            del self.tally.queues[self.model]

    @property
    def waiting_s(self) -> float:
        """Seconds of a slot that the waiting requests take, at the present speeds."""
        return self.seconds(self.amount.guessed, self.amount.tokens, 1e-6 * self.amount.prompt_us)

    def seconds(self, guessed: int, tokens: float, prompt_s: float) -> float:
        """Seconds of a slot of requests, at the present speeds. guessed, tokens : of their answers, see Amount"""
        return self.work(guessed * self.service.tokens_mean + tokens, 0.0).answer_s + prompt_s

    # ---- arrivals ----

    def admit(self, request: Request, now_s: float, cached_tokens: float = 0.0) -> tuple[QueuedRequest, BinQueue]:
        """Count a new request as waiting, which the caller puts into its bin, or into a batch. Returns the queued
        request and the bin. cached_tokens : see QueuedRequest
        """
        binning, plans = self.binning, self.plans
        score = binning.score(request)
        bin_index = binning.observe(score)
        if plans is not None:
            bin_index = plans.arrived(bin_index, now_s)
        queue = self.bins[bin_index if binning.trust.trusted else 0]
        queued = self._queued(request, queue.index, score, now_s, cached_tokens)
        if (load := self.load) is not None:
            ahead = max(0, self.present - self.waiting - self.all_slots)  # requests that run, beyond the slots
            if load.arrive(queued, self.amount, ahead, self.all_slots):
                self.dirty = self._changed = True
        queued.sort_length = binning.sort_length(queued)
        queued.join(self.fair.of(request.share, request.weight))
        self._count((queued,))
        if self.oldest is not None:
            self.oldest.add(queued)
        return queued, queue

    def queued_apart(self, request: Request, share: Share, now_s: float) -> QueuedRequest:
        """A request that starts at once, without a place in the queues, and teaches nothing about arrivals."""
        score = self.binning.score(request)
        queued = self._queued(request, self._merged(self.binning.bin_of(score)), score, now_s)
        queued.share = share
        return queued

    def _queued(
        self, request: Request, bin_index: int, score: float | None, now_s: float, cached_tokens: float = 0.0
    ) -> QueuedRequest:
        mean, forecast = self.service.tokens_mean, self.binning.forecast(request)
        expected = forecast or mean
        likely = self.load.likely_tokens(forecast, mean) if self.load is not None else expected
        answer_s, prompt_s = self.work(likely, request.prompt_tokens, cached_tokens)
        service_s = answer_s + prompt_s
        return QueuedRequest(
            request,
            bin_index,
            now_s,
            score,
            expected,
            likely,
            service_s,
            mean * self.service.seconds_per_token,
            request.total_tokens(expected),
            work_us=round(1e6 * service_s),
            prompt_s=prompt_s,
            cached_tokens=cached_tokens,
            guessed=not forecast,
        )

    def is_long(self, prompt_s: float) -> bool:
        """Whether a prompt is long of which an engine must compute so many seconds (scheduling/prefills.py)."""
        service = self.service
        return is_long(prompt_s, self.prompts.mean_s, service.tokens_mean * service.seconds_per_token)

    def work(self, tokens: float, prompt_tokens: float, cached_tokens: float = 0.0) -> Work:
        """The work of a request with an answer of `tokens` (scheduling/work.py)."""
        service = self.service
        return self.prompts.work(tokens, prompt_tokens, cached_tokens, service.seconds_per_token, service.tokens_mean)

    def hold(self, batch: FormedBatch) -> None:
        """Count a batch of requests that were queued apart as waiting, until the batch starts."""
        self.formed.hold(batch)
        requests = batch.requests.values()
        for queued in requests:
            queued.share.wait()
        self._count(requests)

    def reorder(self, order: Ordering) -> None:
        """Sort all waiting requests by another order: at once, or many as sort_some does."""
        self.load = (self.load or Load()) if order.follows_load else None
        self._begin_sort(order)
        self.dirty = True
        if self.waiting <= SORTED_AT_ONCE:
            self.sort_some()

    def keys_changed(self) -> None:
        """Have all waiting requests sorted again, because the inputs of their keys have changed."""
        self.dirty = self._changed = True

    def sort_some(self) -> list[BinQueue]:
        """Sort waiting requests again that have changed: all of them, or some of many, and the others in later calls.
        Returns the bins that got requests of other bins.

        A sort of ten thousand would hold up the event loop. Until the last call some have keys of an earlier load,
        which are comparable (orders.boosted), or of the order before.
        """
        if self._changed and not (self.formed.stale or self._unsorted):
            self._begin_sort()
        self.formed.sort_some(SORTED_AT_ONCE // CHANGE_COSTS if self._changes else SORTED_AT_ONCE)
        grown = {}
        for queued in self._unsorted[-BINNED_AT_ONCE:]:
            if queued.request.id in self.bins[queued.bin].requests and (queue := self._sort_again(queued)) is not None:
                grown[queue.index] = queue
        del self._unsorted[-BINNED_AT_ONCE:]
        self.dirty = self._changed or bool(self.formed.stale or self._unsorted)
        if not self.dirty:
            self._changes.clear()
        return list(grown.values())

    def _sort_again(self, queued: QueuedRequest) -> BinQueue | None:
        """Sort a request of a bin again. Returns the bin to which it moves; None: it stays."""
        queue = self.bins[queued.bin]
        if self._bin_of(queued) == queue.index and queued.share.among is self.fair:
            queue.lift(queued)
            self.tell((queued,))
            queued.sort_length = self.binning.sort_length(queued)
            queue.put_down(queued)
            return None
        queue.remove(queued)
        self.tell((queued,))
        self._sort_in(queued)
        self.bins[queued.bin].put_back((queued,))
        return self.bins[queued.bin]

    def _begin_sort(self, order: Ordering | None = None) -> None:
        """Begin to sort all waiting requests, each within its bin and batch. order : a new one"""
        self._changed = False
        self.formed.mark_stale(order.batch_key if order is not None else None)
        self._unsorted = list(chain(*self.bins))
        if order is not None:
            for queue in self.bins:
                queue.order_by(order.turn)
        if len(self._unsorted) <= SORTED_AT_ONCE and not self._changes:
            self.tell(self._unsorted)
            self._unsorted.clear()
            for queue in self.bins:
                queue.sort_all()

    def tell(self, requests: Collection[QueuedRequest]) -> None:
        """Give waiting requests that are in no queue the inputs of their keys, with all that has changed for them."""
        for change in self._changes:
            change(requests)
        if self.load is not None:
            self.load.tell(requests)

    def revise(self, requests: Iterable[tuple[QueuedRequest, Request]]) -> list[BinQueue]:
        """Give waiting requests new forecasts. Returns the bins that got requests of other bins.

        A request stays in its formed batch, whose composition the release has allowed; the order places the batch
        again.
        """
        moving = []
        for queued, changed in requests:
            queue, batch = self.bins[queued.bin], queued.formed
            if batch is None:
                queue.lift(queued)
            queued.revise(changed, self.binning.score(changed), self.binning.judges_by(queued))
            self.binning.observe(queued.score)
            if tokens := self.binning.forecast(changed):
                self._expect(queued, tokens)
            if batch is not None:
                self.formed.sort_again((batch,))
            elif self._bin_of(queued) == queue.index:
                queued.sort_length = self.binning.sort_length(queued)
                queue.put_down(queued)
            else:
                self.leave(queued)
                moving.append(queued)
        return self.take_back(moving)

    def take_back(self, requests: Collection[QueuedRequest]) -> list[BinQueue]:
        """Put requests that have run, or waited elsewhere, into their bins by arrival time. Returns the bins."""
        by_bin: dict[int, list[QueuedRequest]] = {}
        for queued in requests:
            self._join_share(queued)
            self._sort_in(queued)
            by_bin.setdefault(queued.bin, []).append(queued)
        for index, members in by_bin.items():
            self.bins[index].put_back(members)
        self._note_ages(requests)
        self._count(requests)
        return [self.bins[index] for index in by_bin]

    def take_back_batch(self, batch: FormedBatch, engine: str) -> None:
        """Queue a batch that an engine failed, refused or lost as a formed batch again. engine : its name"""
        for queued in batch.requests.values():
            self._join_share(queued)
        batch.come_back(engine)
        self.formed.push_returned(batch)
        self._note_ages(batch.requests.values())
        self._count(batch.requests.values())

    def _join_share(self, queued: QueuedRequest) -> None:
        """Let a request wait in its share."""
        queued.join(self.fair.of(queued.request.share, queued.request.weight))

    def _note_ages(self, requests: Iterable[QueuedRequest]) -> None:
        if self.oldest is not None:
            for queued in requests:
                self.oldest.add(queued)

    def first_by_age(self) -> QueuedRequest | None:
        """The waiting request that has waited longest, or whose deadline presses most; None: none, or not known."""
        return self.oldest.first(self._waits) if self.oldest is not None else None

    def _waits(self, queued: QueuedRequest) -> bool:
        return queued.formed is not None or queued.request.id in self.bins[queued.bin].requests

    def _merged(self, bin_index: int) -> int:
        """The queue in which a bin's requests wait."""
        return self.plans.queue_of(bin_index) if self.plans is not None else bin_index

    def follow(self, plan: DispatchPlan) -> bool:
        """Follow a new plan. True when the plan assigns bins to other queues than before."""
        assert self.plans is not None, "a plan came for a release that follows no plan"
        return self.plans.follow(plan)

    def wants_plan(self, now_s: float) -> Observed | None:
        """The load for which a new plan is wanted; None while the present plan will do, or a plan is being made."""
        assert self.plans is not None, "only a release that follows plans wants one"
        edges = self.binning.edges.edges if self.binning.trust.trusted else None
        return self.plans.wants(now_s, edges, len(self.engines), self.slots, self._pace)

    def _expect(self, queued: QueuedRequest, tokens: float) -> None:
        """Give a waiting request another forecast."""
        self.amount.add(queued, -1)
        queued.expect(tokens, self.load.likely_tokens(tokens, tokens) if self.load is not None else tokens)
        self.amount.add(queued)

    def _calibrate(self, requests: Iterable[QueuedRequest]) -> None:
        """Give waiting requests the calibrated meaning of their forecasts."""
        for queued in requests:
            if tokens := self.binning.forecast(queued.request):
                self._expect(queued, tokens)

    def _pace(self) -> float:
        """Mean pace of the engines; 1 without engines."""
        return sum([engine.pace(self.model) for engine in self.engines]) / len(self.engines) if self.engines else 1.0

    def _bin_of(self, queued: QueuedRequest) -> int:
        """The bin in which an equal new request would wait."""
        return self._merged(self.binning.bin_of(queued.score))

    def _sort_in(self, queued: QueuedRequest) -> None:
        """Set the request's bin to the bin of an equal new request, and its length there."""
        queued.bin, queued.sort_length = self._bin_of(queued), self.binning.sort_length(queued)

    def sort_into_queues(self) -> None:
        """Move each request of the bins to the bin where an equal new request would wait, in order of arrival; of many,
        in later calls of `sort_some`.
        """
        if self.waiting - len(self.formed) > SORTED_AT_ONCE:
            self._unsorted, self.dirty = list(chain(*self.bins)), True
            return
        waiting = sorted([queued for queue in self.bins for queued in queue.take_all()], key=turn_of_arrival)
        for queued in waiting:
            self._sort_in(queued)
            self.bins[queued.bin].append(queued)

    # ---- leaving ----

    def leave(self, queued: QueuedRequest) -> None:
        """Remove a waiting request."""
        if queued.formed is None:
            self.bins[queued.bin].remove(queued)
        else:
            self.formed.remove(queued)
        queued.share.leave()
        self._count((queued,), -1)

    def start(self, batch: FormedBatch, count: int, turn: float | None = None) -> tuple[Batch, list[QueuedRequest]]:
        """Take the first `count` requests of a formed batch, for an engine to run; then charge each.

        turn : for the engine's own order
        """
        started = self.formed.take(batch, count)
        self._count(started, -1)
        requests = tuple([queued.request for queued in started])
        return Batch(batch.id, batch.bin, requests, batch.formed_at_s, batch.size, self.model, turn), started

    def true_up(self, queued: QueuedRequest, answer_tokens: float, ran_s: float = math.inf) -> None:
        """Charge an ended request for its real cost instead of its forecast.

        answer_tokens : 0: unknown; then the forecast counts, or the tokens that `ran_s` allows, if these are fewer
        """
        request, per_token_s = queued.request, self.service.seconds_per_token
        tokens = answer_tokens or request.choices * min(queued.likely_tokens, ran_s / per_token_s)
        queued.true_up(tokens)

    def compete(self, fair: FairShares) -> None:
        """Let the shares of this model compete with the shares of other models on the same engines."""
        self.fair = fair
        if self.waiting > SORTED_AT_ONCE:
            self._changes.append(self._join_again)
            self.keys_changed()
            return
        self._join_again(self.in_no_order())
        self.formed.sort_all()
        for queue in self.bins:
            queue.divide()

    def _join_again(self, requests: Iterable[QueuedRequest]) -> None:
        """Let waiting requests leave shares that compete here no more."""
        for queued in requests:
            if queued.share.among is not self.fair:
                queued.share.leave()
                self._join_share(queued)

    def all_waiting(self) -> list[QueuedRequest]:
        """All waiting requests in order of arrival, without those of reserved batches."""
        return sorted(self.in_no_order(), key=turn_of_arrival)

    def in_no_order(self) -> list[QueuedRequest]:
        """The requests of `all_waiting`, in no order."""
        return [*chain(*self.bins), *self.formed]

    def record_answer(
        self, queued: QueuedRequest, output_tokens: float, ran_s: float, decode_s: float | None = None
    ) -> bool:
        """Record an answer's length and time. True when the answer changed whether predictions are trusted.

        decode_s : of a stream: from its first token to its end
        """
        self.service.observe(ran_s, output_tokens)
        request, cached_tokens = queued.request, queued.cached_tokens
        if decode_s is None:
            self.prompts.observe(ran_s, output_tokens, request.prompt_tokens, cached_tokens)
        else:
            self.prompts.observe(max(0.0, ran_s - decode_s), 1.0, request.prompt_tokens, cached_tokens)
        if self.load is not None and self.load.answered(queued, output_tokens):
            if self.waiting <= SORTED_AT_ONCE:
                self._calibrate(self.in_no_order())
            else:
                self._changes.append(self._calibrate)
            self.keys_changed()
        if self.plans is not None:
            self.plans.answered()
        self.bins[queued.bin].answered(queued, output_tokens)
        return self.binning.answered(queued, output_tokens)

    def count_items(self, more: int) -> None:
        """Count items of batch jobs that have started, or run as items no more."""
        self.items.running += more
        self.tally.items += more
