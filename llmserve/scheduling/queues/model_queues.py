"""Waiting requests of one model in one group, and its answer lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from bins.dispatch import DispatchPlan, Observed
from bins.edges import OnlineEdges
from bins.risk import risk
from llmserve.request import Batch, Request
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.fair import FairShares, Share, cost
from llmserve.scheduling.lengths import BinTokens, SeenLengths, Tokens
from llmserve.scheduling.load import Load
from llmserve.scheduling.planner import Planner
from llmserve.scheduling.queues.formed_queue import FormedQueue
from llmserve.scheduling.queues.waiting import BinQueue, FormedBatch, QueuedRequest, turn_of_arrival
from llmserve.scheduling.rates import LineRate, ServiceTime
from llmserve.scheduling.release import Planned, Release
from llmserve.scheduling.trust import Trust


class Tally:
    """Waiting requests of a group, counted by ModelQueues. waiting : number.  queues : not empty ones, by model.

    held_back : queues, by model, of which batches could not form early, for several shares waited (Forming)
    lines : of jobs, that run on what others left
    """

    __slots__ = ("held_back", "lines", "queues", "waiting")

    def __init__(self) -> None:
        self.waiting = self.lines = 0
        self.queues: dict[str, ModelQueues] = {}
        self.held_back: dict[str, ModelQueues] = {}


class ModelQueues:
    """The queues of one model in one group. All times are seconds on the scheduler's clock.

    model, group  names of its model and its group
    release     decides when a bin releases a batch (scheduling/release.py)
    edges       bin edges over the predictions' risk or median, refitted as requests arrive
    batch_size  largest batch that a bin forms
    trust       whether predictions rank answers; while they do not, all requests wait in one bin
    by_risk     whether bins go by risk (bins/risk.py) instead of the median
    formed      batches that wait for an engine; follows_load : whether the order does (FixedOrder)
    planner     asks for plans; None unless the release follows plans
    service     times of answers.  line_service, line_rate : of lines that took what others left (background.py)
    seen        records answer lengths, for edges, plans and batch times
    unsorted    whether what turns go by has changed since the last sort: who asks which is next must sort again
    bins        a queue for each bin
    fair        the shares that compete for the model's engines; models that share an engine have the same
    tally       counts waiting requests of the whole group

    Updated after every change of the group's engines for the model:
    engines  ready engines; slots : of the engine with the fewest, 0 without an engine; all_slots : of all
    no_engine_since_s  None while some ready engine has a closed circuit
    """

    def __init__(
        self,
        model: str,
        *,
        release: Release,
        formed: FormedQueue,
        edges: OnlineEdges,
        batch_size: int,
        trust: Trust,
        planner: Planner | None = None,
        seen: SeenLengths | None = None,
        queue: Callable[[int], BinQueue] = BinQueue,
        by_risk: bool = True,
        follows_load: bool = False,
        group: str = "",
        tally: Tally | None = None,
    ) -> None:
        self.model, self.group, self.release = model, group, release
        self.edges, self.trust, self.planner = edges, trust, planner
        self.seen, self.service, self.line_service, self.line_rate = seen, ServiceTime(), ServiceTime(), LineRate()
        self.formed, self.load, self.unsorted = formed, Load() if follows_load else None, False
        self.bins = [queue(index) for index in range(edges.bins)]
        self.fair = FairShares()
        self.waiting = 0  # requests in bins and in formed batches
        self.present = self.lines = 0  # requests that wait or run; those that took what others left (background.py)
        self.engines: Sequence[EngineState] = ()
        self.slots = self.all_slots = 0
        self.no_engine_since_s: float | None = 0.0
        self.tally = tally or Tally()
        self.batch_size, self.by_risk = batch_size, by_risk
        self._tokens = BinTokens(seen, batch_size)

    def set_engines(self, ready: Sequence[EngineState], now_s: float) -> None:
        """Set the ready engines that serve the model."""
        self.engines, self.all_slots = ready, sum([engine.info.slots for engine in ready])
        self.slots = min([engine.info.slots for engine in ready if engine.worker.next is None], default=0)
        for queue in self.bins:
            queue.engines = max(1, len(ready))
        if any(engine.circuit.closed for engine in ready):
            self.no_engine_since_s = None
        elif self.no_engine_since_s is None:
            self.no_engine_since_s = now_s

    def _count(self, requests: int, work_us: int) -> None:
        """Count requests that wait from now on, or with a minus no longer; their shares count them, too.

        work_us : theirs, see Load
        """
        if not self.waiting:
            self.tally.queues[self.model] = self
        self.waiting += requests
        self.tally.waiting += requests
        if self.load is not None:
            self.load.work_us += work_us
        if not self.waiting:
            del self.tally.queues[self.model]

    def _work_us(self, requests: Iterable[QueuedRequest]) -> int:  # counted for orders that follow the load only
        return sum([queued.work_us for queued in requests]) if self.load is not None else 0

    # ---- arrivals ----

    def admit(self, request: Request, now_s: float) -> tuple[QueuedRequest, BinQueue]:
        """Put a new request into its bin. Returns the queued request and the bin."""
        trusted, score, bin_index = self.trust.trusted, _score(self, request), 0
        if score is not None:
            self.edges.observe(score)
            bin_index = self.edges.bin_of(score)
        if self.planner is not None:
            self.planner.arrived(bin_index, now_s)
            bin_index = self._merged(bin_index)
        queue = self.bins[bin_index if trusted else 0]  # one bin for all while predictions are not trusted
        forecast = self.forecast(request)
        queued = _queued(self, request, queue.index, score, forecast, now_s)
        if (load := self.load) is not None:
            ahead = max(0, self.present - self.waiting - self.all_slots)  # requests that run, beyond the slots
            seconds, mean = self.service.seconds_per_token, self.service.tokens_mean
            if load.arrive(queued, forecast, seconds, mean, ahead, self.all_slots):
                self.unsorted = True
        queued.sort_length = _sort_length(queued, self.trust)
        queued.share = self.fair.of(request.share, request.weight)
        queued.share.wait()
        queue.append(queued)
        self._count(1, queued.work_us if load is not None else 0)
        return queued, queue

    def forecast(self, request: Request) -> float | None:
        """Expected output tokens of a choice; None while predictions are not trusted."""
        return request.expected_tokens if self.trust.trusted else None

    def queued_apart(self, request: Request, share: Share, now_s: float) -> QueuedRequest:
        """A request that starts at once, without a place in the queues, and teaches nothing about arrivals."""
        queued = _queued(self, request, 0, _score(self, request), self.forecast(request), now_s)
        queued.bin, queued.share = self._index_of(queued), share
        return queued

    def hold(self, batch: FormedBatch) -> None:
        """Count a batch of such requests as waiting, until it starts."""
        self.formed.hold(batch)
        requests = batch.requests.values()
        for queued in requests:
            queued.share.wait()
        self._count(len(requests), self._work_us(requests))

    def follow_load(self, follows: bool) -> None:
        """Learn the load from now on, or no longer."""
        self.load = (self.load or Load(self._anyhow())) if follows else None

    def sort_again(
        self, key: Callable[[FormedBatch], float] | None = None, turn: Callable[[QueuedRequest], float] | None = None
    ) -> None:
        """Sort all waiting requests, each within its bin and batch. key, turn : of another order (FixedOrder)"""
        self.unsorted = False
        if self.load is not None:
            self.load.tell(self._anyhow())
        self.formed.sort_all(key)
        for queue in self.bins:
            queue.sort_all(turn)

    def revise(self, requests: Iterable[tuple[QueuedRequest, Request]]) -> list[BinQueue]:
        """Give waiting requests new forecasts. Returns the bins that got requests of other bins.

        A request stays in its formed batch, which its release allowed as it is; the order places the batch again.
        Predictions are still judged as made at the arrival: an order by later ones picks those that are too short.
        """
        moving = []
        for queued, changed in requests:
            queue, batch = self.bins[queued.bin], queued.formed
            if batch is None:
                queue.lift(queued)
            queued.judged = queued.judged or (queued.request, queued.score)
            queued.request, queued.score = changed, _score(self, changed)
            if queued.score is not None:
                self.edges.observe(queued.score)
            if self.trust.trusted and (tokens := changed.expected_tokens):
                if self.load is not None:
                    self.load.expect(queued, tokens)
                else:
                    queued.expect(tokens, tokens)
            if batch is not None:
                self.formed.sort_again(batch)
            elif self._index_of(queued) == queue.index:
                queued.sort_length = _sort_length(queued, self.trust)
                queue.put_down(queued)
            else:
                self.leave(queued)
                moving.append(queued)
        return self.take_back(moving)

    def take_back(self, requests: Collection[QueuedRequest]) -> list[BinQueue]:
        """Put requests that ran, or waited elsewhere, into their bins by arrival time. Returns these bins."""
        by_bin: dict[int, list[QueuedRequest]] = {}
        for queued in requests:
            queued.group = self.group
            self._join_share(queued)
            queued.bin = self._index_of(queued)
            queued.sort_length = _sort_length(queued, self.trust)
            by_bin.setdefault(queued.bin, []).append(queued)
        for index, members in by_bin.items():
            self.bins[index].put_back(members)
        self._count(len(requests), self._work_us(requests))
        return [self.bins[index] for index in by_bin]

    def take_back_batch(self, batch: FormedBatch, engine: str) -> None:
        """Queue a batch that an engine failed, refused or lost as a formed batch again. engine : its name"""
        batch.avoid = frozenset((engine,)).union(*[queued.refused_by for queued in batch.requests.values()])
        for queued in batch.requests.values():
            self._join_share(queued)
        batch.share = batch.least_served()
        self.formed.push_returned(batch)
        self._count(len(batch.requests), self._work_us(batch.requests.values()))

    def _join_share(self, queued: QueuedRequest) -> None:
        """Let a request wait in its share."""
        queued.share = self.fair.of(queued.request.share, queued.request.weight)
        queued.share.wait()

    def _merged(self, bin_index: int) -> int:
        """The queue in which a bin's requests wait. A plan made while predictions were not trusted has one queue."""
        return self.release.queue_of(bin_index) if isinstance(self.release, Planned) else bin_index

    def follow(self, plan: DispatchPlan) -> bool:
        """Follow a new plan. True when the plan assigns bins to other queues than before."""
        assert isinstance(self.release, Planned), "a plan came for a release that follows no plan"
        assert self.planner is not None, "a release that follows plans has a planner"
        self.planner.solved()
        return self.release.follow(plan)

    def wants_plan(self, now_s: float) -> Observed | None:
        """The load for which a new plan is wanted; None while the present plan will do, or a plan is being made."""
        assert isinstance(self.release, Planned), "only a release that follows plans wants one"
        assert self.planner is not None, "a release that follows plans has a planner"
        plan, engines, trusted = self.release.plan, len(self.engines), self.trust.trusted
        return self.planner.wants(now_s, plan, self.edges, engines, self.slots, trusted=trusted, pace=self._pace)

    def _pace(self) -> float:
        """Mean pace of the engines; 1 without engines."""
        return sum([engine.pace(self.model) for engine in self.engines]) / len(self.engines) if self.engines else 1.0

    def _index_of(self, queued: QueuedRequest) -> int:
        """The queue in which the request would wait if it arrived now."""
        index = self.edges.bin_of(queued.score) if queued.score is not None and self.trust.trusted else 0
        return self._merged(index)

    def sort_into_queues(self) -> None:
        """Put each request of the bins into the queue where it would wait if it arrived now, in order of arrival."""
        waiting = sorted([queued for queue in self.bins for queued in queue.take_all()], key=turn_of_arrival)
        for queued in waiting:
            queued.bin = self._index_of(queued)
            queued.sort_length = _sort_length(queued, self.trust)
            self.bins[queued.bin].append(queued)

    # ---- leaving ----

    def leave(self, queued: QueuedRequest) -> None:
        """Remove a waiting request."""
        if queued.formed is None:
            self.bins[queued.bin].remove(queued)
        else:
            self.formed.remove(queued)
        queued.share.leave()
        self._count(-1, -self._work_us((queued,)))

    def start(self, batch: FormedBatch, count: int, turn: float | None = None) -> tuple[Batch, list[QueuedRequest]]:
        """Take the first `count` requests of a formed batch, for an engine to run. turn : for the engine's own order"""
        started = self.formed.take(batch, count)
        for queued in started:
            queued.charged = queued.cost
            queued.share.start(queued.charged, queued.request.prefixes)
        self._count(-len(started), -self._work_us(started))
        requests = tuple([queued.request for queued in started])
        return Batch(batch.id, batch.bin, requests, batch.formed_at_s, batch.size, self.model, turn), started

    def settle(self, queued: QueuedRequest, answer_tokens: float, ran_s: float = math.inf) -> None:
        """Charge a request that has ended with what it took.

        answer_tokens : 0: unknown; then as forecast, or as many as `ran_s` allows, if these are fewer
        """
        request, per_token_s = queued.request, self.service.seconds_per_token
        tokens = answer_tokens or request.choices * min(queued.likely_tokens, ran_s / per_token_s)
        queued.share.charge(cost(request.prompt_tokens, tokens) - queued.charged)
        queued.charged = 0.0

    def compete(self, fair: FairShares) -> None:
        """Let the shares of this model compete with those of others, whose engines the model shares from now on."""
        self.fair = fair
        for queued in list(self._anyhow()):
            queued.share.leave()
            self._join_share(queued)
        self.formed.sort_all()
        for queue in self.bins:
            queue.divide()

    def all_waiting(self) -> list[QueuedRequest]:
        """All waiting requests in order of arrival, without those of reserved batches."""
        return sorted(self._anyhow(), key=turn_of_arrival)

    def _anyhow(self) -> Iterator[QueuedRequest]:
        """The requests of `all_waiting`, in no order."""
        return chain(*self.bins, self.formed)

    def record_answer(self, queued: QueuedRequest, output_tokens: float, ran_s: float) -> bool:
        """Record an answer's length and time. True when the answer changed whether predictions are trusted."""
        self.service.observe(ran_s, output_tokens)
        if self.load is not None:
            self.load.answered(queued, output_tokens, ran_s)
        if self.seen is not None:
            self.seen.observe(queued.score, output_tokens)
        if self.planner is not None:
            self.planner.answered()
        self._tokens.answered()
        self.bins[queued.bin].answered(queued, output_tokens)
        request, score = queued.judged or (queued.request, queued.score)
        changed = score is not None and self.trust.observe(request, score, output_tokens)
        if changed:
            self._tokens.forget()
        return changed

    def tokens(self, bin_index: int) -> Tokens:
        """Output tokens of a bin's answers, from the answers recorded so far; zeros before the first answer."""
        edges, bins = (self.edges.edges, len(self.bins)) if self.trust.trusted else ((), 1)
        return self._tokens.of(bin_index, edges, bins)


def _score(queues: ModelQueues, request: Request) -> float | None:
    lengths = request.quantiles if queues.by_risk else ()
    return risk(lengths, queues.batch_size) if lengths else request.predicted_tokens


def _sort_length(queued: QueuedRequest, trust: Trust) -> float:
    """Length by which a window sorts the request, tokens; 0 for all while predictions are not trusted."""
    length = queued.expected_tokens if queued.score is None else queued.score
    return length if trust.trusted else 0.0


def _queued(
    queues: ModelQueues, request: Request, bin_index: int, score: float | None, forecast: float | None, now_s: float
) -> QueuedRequest:
    seconds, mean = queues.service.seconds_per_token, queues.service.tokens_mean
    expected = forecast or mean
    total, service_s = request.total_tokens(expected), expected * seconds
    return QueuedRequest(
        request, bin_index, now_s, score, expected, expected, service_s, mean * seconds, total, queues.group
    )


def count_lines(queues: ModelQueues, more: int) -> None:
    """Count lines of a model that have started, or run as lines no more."""
    queues.lines += more
    queues.tally.lines += more
