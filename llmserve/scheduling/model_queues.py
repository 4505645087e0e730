"""What waits: a model's queues, and what is known of how long its answers are; and a group's, of all models."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import count

from bins.dispatch import DispatchPlan, Observed
from bins.edges import OnlineEdges
from bins.risk import risk
from llmserve.request import Batch, Request
from llmserve.scheduling.engines import EnginePool, EngineState, Worker
from llmserve.scheduling.lengths import SeenLengths, Tokens, tokens_of
from llmserve.scheduling.planner import Planner
from llmserve.scheduling.queues import BLOCK_TOKENS, BinQueue, FormedBatch, FormedQueue, QueuedRequest, turn_of_arrival
from llmserve.scheduling.rates import CompletionRate, ServiceTime
from llmserve.scheduling.release import Planned, Release
from llmserve.scheduling.trust import Trust

SERVES, AWAITS, CANNOT = 2, 1, 0  # how well a group can serve a model
ANSWERS_BETWEEN = 64  # after which lengths are looked at again; sooner while few have been seen


class Tally:
    """What waits in a group, kept by its models' queues. waiting : requests.  queues : of which models, by model."""

    __slots__ = ("queues", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.queues: dict[str, ModelQueues] = {}


class ModelQueues:
    """All times are seconds on the scheduler's clock.

    model       whose requests these are
    release     when a bin lets a batch go (scheduling/release.py)
    formed      batches that were formed before an engine was free, and that came back
    edges       bins over the predictions' risk or median, fitted again as requests come in
    batch_size  largest batch that a bin forms
    trust       whether predictions rank answers; while they do not, one bin serves
    by_risk     bins by what a request does to its batch (bins/risk.py), not by its median
    planner     asks for plans, where the release follows one
    seen        is told how long answers became, for edges, plans and batch times that go by it
    bins        a queue for each bin
    group       whose requests these are
    tally       counts what waits in all queues of the group

    Of the group's engines that serve the model, after every change of them:
    engines  those that are ready; slots : of the one with least, 0 while there is none
    no_engine_since_s  None while one is ready and its circuit closed
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
        group: str = "",
        tally: Tally | None = None,
    ) -> None:
        self.model = model
        self.group = group
        self.release = release
        self.formed = formed
        self.edges = edges
        self.trust = trust
        self.planner = planner
        self.seen = seen
        self.service = ServiceTime()
        self.bins = [queue(index) for index in range(edges.bins)]
        self.waiting = 0  # requests in bins and in formed batches
        self.present = 0  # these, and those that run; kept by the group
        self.engines: Sequence[EngineState] = ()
        self.slots = 0
        self.no_engine_since_s: float | None = 0.0
        self._tally = tally or Tally()
        self._batch_size = batch_size
        self._by_risk = by_risk
        self._tokens: list[Tokens] = []  # by bin, until answers have become others; []: to be looked at
        self._answers = 0  # since these were looked at
        self._look_after = 1  # answers

    def see_engines(self, ready: Sequence[EngineState], now_s: float) -> None:
        """Those that serve the model, and are ready, from now on."""
        self.engines = ready
        self.slots = min([engine.info.slots for engine in ready if engine.worker.next is None], default=0)
        if any(engine.circuit.closed for engine in ready):
            self.no_engine_since_s = None
        elif self.no_engine_since_s is None:
            self.no_engine_since_s = now_s

    def wait_anew_for_engines(self, now_s: float) -> None:
        """Those who come from now on wait as long as those before did."""
        self.no_engine_since_s = now_s

    def _count(self, requests: int) -> None:
        """So many more wait, or fewer."""
        if not self.waiting:
            self._tally.queues[self.model] = self
        self.waiting += requests
        self._tally.waiting += requests
        if not self.waiting:
            del self._tally.queues[self.model]

    # ---- arrivals ----

    def admit(self, request: Request, now_s: float) -> tuple[QueuedRequest, BinQueue]:
        """A request that has come now waits in its bin from now on."""
        by_risk, trusted = self._by_risk and request.quantiles, self.trust.trusted
        score = risk(request.quantiles, self._batch_size) if by_risk else request.predicted_tokens
        bin_index = 0
        if score is not None:
            self.edges.observe(score)
            bin_index = self.edges.bin_of(score)
        if self.planner is not None:
            self.planner.arrived(bin_index, now_s)
            bin_index = self._merged(bin_index)
        queue = self.bins[bin_index if trusted else 0]  # while predictions are not trusted, all wait together
        service = self.service
        seconds, mean = service.seconds_per_token, service.tokens_mean
        expected = request.expected_tokens if trusted else None
        if expected is None:
            expected = mean
        total = math.ceil(request.prompt_tokens + request.choices * (expected + BLOCK_TOKENS))
        queued = QueuedRequest(
            request, queue.index, now_s, score, expected, expected * seconds, mean * seconds, total, self.group
        )
        queued.sort_length = self._sort_length(queued)
        queue.append(queued)
        self._count(1)
        return queued, queue

    def take_back(self, requests: Collection[QueuedRequest]) -> list[BinQueue]:
        """Requests that ran, or waited elsewhere, wait in these bins again, as long as they have waited already."""
        by_bin: dict[int, list[QueuedRequest]] = {}
        for queued in requests:
            queued.group = self.group
            queued.bin = self._index_of(queued)
            queued.sort_length = self._sort_length(queued)
            by_bin.setdefault(queued.bin, []).append(queued)
        for index, members in by_bin.items():
            self.bins[index].put_back(members)
        self._count(len(requests))
        return [self.bins[index] for index in by_bin]

    def take_back_batch(self, batch: FormedBatch, avoid: str) -> None:
        """What an engine let go of unserved waits as a formed batch again. avoid : the engine."""
        batch.avoid = avoid
        self.formed.push_returned(batch)
        self._count(len(batch.requests))

    def _sort_length(self, queued: QueuedRequest) -> float:
        """What its neighbours in a window go by, tokens; of all the same while predictions are not trusted."""
        if not self.trust.trusted:
            return 0.0
        return queued.expected_tokens if queued.score is None else queued.score

    def _merged(self, bin_index: int) -> int:
        """The queue in which a bin's requests wait. A plan made while predictions were not trusted has one."""
        release = self.release
        if self.planner is None or not isinstance(release, Planned) or release.plan is None:
            return bin_index
        queue_of = release.plan.queue_of
        return queue_of[bin_index] if bin_index < len(queue_of) else 0

    def follow(self, plan: DispatchPlan) -> bool:
        """The plan that was asked for is in force from now on; True when bins wait in other queues than before."""
        assert isinstance(self.release, Planned), "a plan that nobody asked for"
        assert self.planner is not None, "a release that follows plans has a planner"
        self.planner.solved()
        return self.release.follow(plan)

    def wants_plan(self, now_s: float) -> Observed | None:
        """What a new plan is to be made for; None while the present one will do, or one is being made."""
        assert isinstance(self.release, Planned), "its release follows plans"
        assert self.planner is not None, "a release that follows plans has a planner"
        engines, trusted = len(self.engines), self.trust.trusted
        return self.planner.wants(
            now_s, self.release.plan, self.edges, engines, self.slots, trusted=trusted, pace=self._pace
        )

    def _pace(self) -> float:
        """Of its engines, on average."""
        return sum([engine.pace(self.model) for engine in self.engines]) / len(self.engines) if self.engines else 1.0

    def _index_of(self, queued: QueuedRequest) -> int:
        """The queue that it would wait in had it come now."""
        index = self.edges.bin_of(queued.score) if queued.score is not None and self.trust.trusted else 0
        return self._merged(index)

    def sort_into_queues(self) -> None:
        """Who waits in a bin goes to where it would wait had it come now, first come first served."""
        waiting = sorted(
            [queued for queue in self.bins for queued in queue.take_all()],
            key=turn_of_arrival,
        )
        for queued in waiting:
            queued.bin = self._index_of(queued)
            queued.sort_length = self._sort_length(queued)
            self.bins[queued.bin].append(queued)

    # ---- leaving ----

    def leave(self, queued: QueuedRequest) -> None:
        """A request that waits waits no more."""
        if queued.formed is None:
            self.bins[queued.bin].remove(queued)
        else:
            self.formed.remove(queued)
        self._count(-1)

    def start(self, batch: FormedBatch, count: int) -> tuple[Batch, list[QueuedRequest]]:
        """The first `count` requests of a formed batch go to an engine."""
        taken = self.formed.take(batch, count)
        self._count(-len(taken))
        requests = tuple([queued.request for queued in taken])
        return Batch(batch.id, batch.bin, requests, batch.formed_at_s, batch.size, self.model), taken

    def all_waiting(self) -> list[QueuedRequest]:
        """In order of arrival; without those for whom an engine is being emptied."""
        found = [queued for queue in self.bins for queued in queue]
        found += [queued for batch in self.formed.batches() for queued in batch.requests.values()]
        return sorted(found, key=turn_of_arrival)

    def see_answer(self, queued: QueuedRequest, output_tokens: float, ran_s: float) -> bool:
        """How long an answer became, and how long that took; True when it changed whether predictions are trusted."""
        self.service.observe(ran_s, output_tokens)
        if self.seen is not None:
            self.seen.observe(queued.score, output_tokens)
        if self.planner is not None:
            self.planner.answered()
        self._answers += 1
        changed = queued.score is not None and self.trust.observe(queued.request, queued.score, output_tokens)
        if changed:
            self._tokens = []  # bins hold other answers now
        return changed

    # ---- how long they are ----

    def tokens(self, bin_index: int) -> Tokens:
        """Of the answers to a bin's requests, as far as they have been seen; zeros before the first."""
        if not self._tokens or self._answers >= self._look_after:
            if self._answers >= self._look_after:
                self._look_after = min(2 * self._look_after, ANSWERS_BETWEEN)
            self._answers = 0
            self._tokens = self._look_at_tokens()
        return self._tokens[min(bin_index, len(self._tokens) - 1)]

    def _look_at_tokens(self) -> list[Tokens]:
        seen = self.seen
        if not seen:
            return [Tokens((0.0,) * self._batch_size, 0.0)]
        trusted = self.trust.trusted
        bins = seen.by_bin(self.edges.edges if trusted else (), len(self.bins) if trusted else 1)
        return [tokens_of(lengths, self._batch_size) for lengths in bins]


class Group:
    """A serving group: what waits, by model, and the engines that serve it. Without a plan there is one.

    new_queues  makes those of a model

    queues      by model
    tally       counts what waits
    present     requests that wait or run
    pool        the engines
    rate        at which requests end
    arrived_in  queues to which requests have come since the last dispatch
    without_engine  queues of the models for which no engine works
    wake_at_s   when it is to be looked at at the latest; None: not before something happens
    """

    def __init__(self, name: str, new_queues: Callable[[str, str, Tally], ModelQueues]) -> None:
        self.name = name
        self.queues: dict[str, ModelQueues] = {}
        self.tally = Tally()
        self.present = 0
        self.pool = EnginePool()
        self.rate = CompletionRate()
        self.arrived_in: dict[str, ModelQueues] = {}
        self.without_engine: list[ModelQueues] = []
        self.planned: list[ModelQueues] = []  # those whose release follows plans
        self.timed: list[ModelQueues] = []  # those whose release may let more go by time alone
        self.wake_at_s: float | None = None
        self._new_queues = new_queues

    def queues_of(self, model: str, now_s: float) -> ModelQueues:
        """Made when they are first asked for."""
        queues = self.queues.get(model)
        if queues is None:
            queues = self.queues[model] = self._new_queues(model, self.name, self.tally)
            queues.wait_anew_for_engines(now_s)
            queues.see_engines(self.pool.serving(model), now_s)
            if queues.no_engine_since_s is not None:
                self.without_engine.append(queues)
            if queues.release.plans:
                self.planned.append(queues)
            if queues.release.timed:
                self.timed.append(queues)
        return queues

    def make_queues(self, worker: Worker, now_s: float) -> None:
        """For all that a worker serves which runs this group's requests now: plans may be asked for."""
        for engine in worker.engines:
            for model in engine.info.models if engine.ready else ():
                self.queues_of(model, now_s)

    def see_engines(self, now_s: float) -> None:
        """After every change of who is ready, whose circuit is closed, and who serves what."""
        for queues in self.queues.values():
            queues.see_engines(self.pool.serving(queues.model), now_s)
        self.without_engine = [queues for queues in self.queues.values() if queues.no_engine_since_s is not None]

    def can(self, model: str) -> int:
        """How well it can serve a model: SERVES, AWAITS (an engine that will) or CANNOT."""
        serving = self.pool.serving(model)
        if any(engine.worker.next is None for engine in serving):
            return SERVES
        return AWAITS if serving else CANNOT

    def enter(self, queues: ModelQueues) -> None:
        """A request of this model is here from now on, to wait or to run."""
        queues.present += 1
        self.present += 1

    def leave(self, queues: ModelQueues, requests: int = 1) -> None:
        queues.present -= requests
        self.present -= requests

    def forget(self, models: Iterable[str]) -> None:
        """Models that no engine lists any more, and of which no request is here."""
        engines = self.pool.engines.values()
        for model in models:
            queues = self.queues.get(model)
            if queues is not None and not queues.present and not any(engine.serves(model) for engine in engines):
                del self.queues[model]
        kept = self.queues
        self.planned = [queues for queues in self.planned if queues.model in kept]
        self.timed = [queues for queues in self.timed if queues.model in kept]

    @property
    def heeds_arrivals(self) -> bool:
        """Whether one more request that waits may change more than its queue; else all engines are busy."""
        return bool(self.pool.free or self.pool.paused or self.timed or self.arrived_in or self.without_engine)

    def hopeless(self, now_s: float, wait_s: float) -> Iterator[ModelQueues]:
        """Those that have waited so long for an engine that works."""
        for queues in self.without_engine:
            since_s = queues.no_engine_since_s
            assert since_s is not None, "it has an engine that works"
            if now_s >= since_s + wait_s:
                if queues.engines:  # one is on trial
                    queues.wait_anew_for_engines(now_s)
                if queues.waiting:
                    yield queues

    def note_wake(self, dues_s: list[float], engine_wait_s: float) -> None:
        """When something of what waits may change by time alone. dues_s : times at which more could start."""
        if not self.tally.waiting:
            self.wake_at_s = None
            return
        if self.pool.paused:
            pauses_s = [engine.circuit.open_until_s for engine in self.pool.paused.values()]
            dues_s += [until_s for until_s in pauses_s if until_s is not None]
        for queues in self.without_engine:
            if queues.waiting and queues.no_engine_since_s is not None:
                dues_s.append(queues.no_engine_since_s + engine_wait_s)
        self.wake_at_s = min(dues_s) if dues_s else None

    @property
    def load(self) -> float:
        """Requests for each slot."""
        slots = sum([engine.info.slots for engine in self.pool.engines.values() if engine.takes_for_group])
        return self.present / slots if slots else float(self.present)

    @property
    def empty(self) -> bool:
        """Nothing waits or runs for it, and no engine is its own."""
        return not self.present and not any(engine.ready for engine in self.pool.engines.values())


class Forming:
    """Bins let batches go.

    batch_size  largest batch
    draining    no more requests come: nothing waits for company
    """

    def __init__(self, batch_size: int, *, early_drain: bool) -> None:
        self.batch_size = batch_size
        self.draining = False
        self._early_drain = early_drain  # when draining, bins let go of what they hold although no engine is free
        self._batch_ids = count(1)

    def size(self, queues: ModelQueues, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        """Requests that a bin lets go now; see Release.size."""
        if not queue.requests:
            return 0
        if self.draining and (self._early_drain or idle is not None):
            return min(len(queue), self.batch_size)
        return queues.release.size(queue, now_s, idle)

    def form_early(self, queues: ModelQueues, queue: BinQueue, now_s: float) -> None:
        """Let everything go that the release lets go whether or not an engine is free."""
        while (size := self.size(queues, queue, now_s, None)) > 0:
            self.push(queues, queue, size, now_s)

    def form_all_early(self, queues: ModelQueues, now_s: float) -> None:
        for queue in queues.bins:
            self.form_early(queues, queue, now_s)

    def push(self, queues: ModelQueues, queue: BinQueue, size: int, now_s: float) -> None:
        """So many requests of a bin wait as a formed batch from now on."""
        queues.formed.push(self.form(queues, queue.index, queue.take(size), now_s))

    def form(self, queues: ModelQueues, bin_index: int, requests: list[QueuedRequest], now_s: float) -> FormedBatch:
        """A batch of these, which have left their bins."""
        return FormedBatch(next(self._batch_ids), bin_index, now_s, requests, queues.model)
