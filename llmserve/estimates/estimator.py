"""When requests start and end: positions in the queue, expected waits, and the rest of what runs.

One `Estimator` answers all users of such times: streams that wait, Retry-After, drains, the list of waiting requests,
limits of keys, and the forecast of a job's end. An estimate costs nothing until a user asks. The first question about a
model sorts the model's waiting requests; the order holds for KEPT_S, so many streams and many refusals cost one sort.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Protocol

import msgspec

from llmserve.calls.in_flight import InFlightCall
from llmserve.engines.engine import ServedModel
from llmserve.estimates.engines_wanted import EnginesWanted
from llmserve.estimates.waiting_rows import WaitingRow
from llmserve.request import Request
from llmserve.scheduling.choice.orders import Order
from llmserve.scheduling.engines import remaining_tokens
from llmserve.scheduling.fair import Share, by_turn, dealt
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.scheduling.rates import ServiceTime
from llmserve.scheduling.scheduler import Scheduler
from llmserve.scheduling.work import Work

KEPT_S = 1.0


class Engines(Protocol):
    """The engines of a cluster (live/fleet.py). models : that they serve, by id"""

    @property
    def models(self) -> Mapping[str, ServedModel]: ...

    def running_on(self, queue: str) -> Iterable[InFlightCall]:
        """The calls on the engines that serve a queue."""
        ...

    def slots_of(self, model: str) -> int:
        """Slots of the engines that serve the model, or did when they were last up."""
        ...


class QueuePosition(msgspec.Struct, frozen=True):
    """The position of a waiting request, and its expected wait.

    position  in the queue of its model, from 1
    wait_s    predicted seconds until its start; None: unknown
    no_engine no working engine serves its model now
    """

    position: int
    wait_s: float | None
    no_engine: bool


class Snapshot(msgspec.Struct, frozen=True):
    """A model's waiting requests in the order in which they would start.

    made_s     when
    positions  by request id, from 1
    works_s    seconds of a slot of the requests before each start, and at last of all
    counters   of the request's share before each start; they never fall
    after      counter of each share once all of its requests have started
    """

    made_s: float
    positions: dict[int, int]
    works_s: list[float]
    counters: list[float]
    after: dict[str, float]

    def before_s(self, position: int) -> float:
        """Seconds of a slot of the requests before a position, from 1."""
        return self.works_s[min(position, len(self.works_s)) - 1]


class Estimator:
    """Predictions by the order of the scheduler, by the forecasts of calls, and by the rate at which requests end."""

    def __init__(self, scheduler: Scheduler, engines: Engines, now_s: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._engines = engines
        self._now_s = now_s
        self._snapshots: dict[str, Snapshot] = {}  # by model
        self._wanted = EnginesWanted()

    # ---- what waits ----

    def position_of(self, call: InFlightCall) -> QueuePosition | None:
        """The position of a call; None while it runs, or its length is being predicted."""
        queued = self._scheduler.requests.get(call.request.id)
        if queued is None or queued.run is not None:
            return None
        queues = self._scheduler.models[queued.request.model]
        snapshot = self._snapshot(queues)
        position = snapshot.positions.get(queued.request.id, queues.waiting)
        return self._position_at(position, snapshot.before_s(position), queues)

    def start_s(self, call: InFlightCall) -> float | None:
        """Predicted seconds until a call starts, 0 when it runs; None: no engine of its model works.

        By the position of the call, which regards the shares. Before the rate of ends is known, by the mean answer.
        """
        queued = self.position_of(call)
        if queued is None:
            return 0.0
        if queued.wait_s is not None or queued.no_engine:
            return queued.wait_s
        queues = self._scheduler.models.get(call.call.model)
        mean_s = queues.service.tokens_mean * queues.service.seconds_per_token if queues is not None else 0.0
        return queued.position * mean_s / max(1, self._engines.slots_of(call.call.model))

    def next_start_s(self, request: Request) -> float | None:
        """Predicted seconds until one more request like this, of its share and model, would start; None: unknown."""
        queues, pool = self._scheduler.models.get(request.model), self._scheduler.group.pool
        if queues is None:
            return None
        if not queues.waiting and any(engine.room > 0 for engine in pool.free_for(request.model)):
            return 0.0
        snapshot = self._snapshot(queues)
        counter = snapshot.after.get(request.share)
        if counter is None:
            counter = queues.fair.counter_of(request.share)
        position = bisect_right(snapshot.counters, counter) + 1
        return self._position_at(position, snapshot.before_s(position), queues).wait_s

    def room_s(self, request: Request) -> float | None:
        """Predicted seconds until a full queue takes a request like this; None: unknown.

        That is the estimated start of one more request of the share, or while the rate of ends is unknown, the first
        end of a call of the model.
        """
        start_s = self.next_start_s(request)
        if start_s is None:
            start_s = min(self.remaining_s(self._engines.running_on(request.model)), default=None)
        return start_s

    def rows(self) -> list[WaitingRow]:
        """Who waits, by model, share and bin. O(requests log requests)."""
        return [row for queues in self._scheduler.group.tally.queues.values() for row in self._rows(queues)]

    # ---- what runs ----

    def remaining_s(self, running: Iterable[InFlightCall]) -> list[float]:
        """Predicted seconds until each of these calls ends."""
        now_s, models = self._now_s(), self._scheduler.models
        return [remaining_s(call, models[call.request.model].service, now_s) for call in running]

    def drained_s(self, running: Iterable[InFlightCall]) -> float:
        """Predicted seconds until the last of these calls ends; 0: there is none."""
        return max(self.remaining_s(running), default=0.0)

    def end_s(self, call: InFlightCall) -> float | None:
        """Predicted seconds until a call ends, which may wait; None: no engine of its model works."""
        if call.answering is not None:
            (left_s,) = self.remaining_s([call])
            return left_s
        start_s = self.start_s(call)
        return None if start_s is None else start_s + self._work_s(call)

    def work(self, request: Request, cached_tokens: float) -> Work | None:
        """Seconds of a slot that a request takes which does not come; None: its model has not answered yet."""
        queues = self._scheduler.models.get(request.model)
        if queues is None or not queues.service.answers:
            return None
        expected = request.expected_tokens if request.choices else 0.0
        tokens = queues.service.tokens_mean if expected is None else expected
        return queues.work(tokens, request.prompt_tokens, cached_tokens)

    def tokens_per_s(self, line: Request) -> float:
        """Tokens a second that the share of a batch job's line would get if each share that waits now went on waiting;
        0 without an engine.
        """
        return self._scheduler.batch_lane.tokens_per_s(line)

    def engines_wanted(self) -> dict[str, int]:
        """How many engines each model could use now; see engines_wanted.py."""
        models = {model: queues for model, queues in self._scheduler.models.items() if model in self._engines.models}
        return self._wanted.update(models, self._now_s())

    # ---- how ----

    def _work_s(self, call: InFlightCall) -> float:
        """Seconds that a call which waits will take."""
        queues, request = self._scheduler.models.get(call.call.model), call.request
        if queues is None:
            return 0.0
        queued = self._scheduler.requests.get(request.id)
        cached = queued.cached_tokens if queued is not None else 0.0
        return queues.work(request.expected_tokens or queues.service.tokens_mean, request.prompt_tokens, cached).seconds

    def _snapshot(self, queues: ModelQueues) -> Snapshot:
        now_s, key = self._now_s(), queues.model
        snapshot = self._snapshots.get(key)
        if snapshot is None or now_s - snapshot.made_s >= KEPT_S:
            self._snapshots = {name: kept for name, kept in self._snapshots.items() if now_s - kept.made_s < KEPT_S}
            waiting = in_turn(queues, self._scheduler.order)
            positions = {queued.request.id: position for position, queued in enumerate(waiting, 1)}
            works_s = [0.0, *accumulate([_seconds(queues, queued) for queued in waiting])]
            snapshot = self._snapshots[key] = Snapshot(now_s, positions, works_s, [], {})
            for queued in waiting:
                share = queued.share
                snapshot.counters.append(counter := snapshot.after.get(share.name, share.served))
                snapshot.after[share.name] = counter + queued.cost / share.weight
        return snapshot

    def _rows(self, queues: ModelQueues) -> Iterator[WaitingRow]:
        members: dict[tuple[str, int], list[tuple[int, float, QueuedRequest]]] = {}
        before_s = 0.0
        for position, queued in enumerate(in_turn(queues, self._scheduler.order), 1):
            members.setdefault((queued.request.share, queued.bin), []).append((position, before_s, queued))
            before_s += _seconds(queues, queued)
        for (share, bin_index), waiting in sorted(members.items()):
            position, before_s, _ = waiting[0]
            wait_s = self._position_at(position, before_s, queues).wait_s
            oldest_s = self._now_s() - min([queued.arrived_at_s for *_, queued in waiting])
            starts_s = None if wait_s is None else round(wait_s, 1)
            yield WaitingRow(queues.model, share, bin_index, len(waiting), round(oldest_s, 1), starts_s)

    def _position_at(self, position: int, before_s: float, queues: ModelQueues) -> QueuePosition:
        """The expected wait at a position of a model's queues. before_s : seconds of a slot of the requests before it

        The position starts once work as that before it has ended, and a mean request more: the slot of the last is
        free then. Engines end requests of all models: the others that wait count by their share. Before the rate of
        ends is known, the waiting requests follow the running calls in rounds.
        """
        group, no_engine = self._scheduler.group, queues.no_engine_since_s is not None
        share = group.tally.waiting / queues.waiting if queues.waiting else 1.0
        wait_s = None if no_engine else group.drain_time_s(before_s * share, share)
        if wait_s is None and not no_engine:
            wait_s = self._after_running_s(position, queues)
        return QueuePosition(position, wait_s, no_engine)

    def _after_running_s(self, position: int, queues: ModelQueues) -> float | None:
        ends_s = sorted(self.remaining_s(self._engines.running_on(queues.model)))
        if not ends_s:
            return None
        rounds, number = divmod(position - 1, len(ends_s))
        if rounds and not queues.service.answers:  # how long an answer takes is not known
            return None
        return ends_s[number] + rounds * queues.service.tokens_mean * queues.service.seconds_per_token


def _seconds(queues: ModelQueues, queued: QueuedRequest) -> float:
    return queues.seconds(int(queued.guessed), 0.0 if queued.guessed else queued.likely_tokens, queued.prompt_s)


def in_turn(queues: ModelQueues, order: Order) -> list[QueuedRequest]:
    """A model's waiting requests in the order in which they would start now: the least served share is next, and within
    a share formed batches, then the bins.
    """
    formed = [queued for batch in queues.formed.batches() for queued in batch.requests.values()]
    turn = order.turn
    in_bins = [queued for queue in queues.bins for queued in queue]
    of_shares: dict[Share, list[QueuedRequest]] = {}
    for queued in (*formed, *sorted(in_bins, key=lambda queued: (turn(queued), queued.request.id))):
        of_shares.setdefault(queued.share, []).append(queued)
    return list(dealt(((share, iter(requests)) for share, requests in by_turn(of_shares)), queues.waiting))


def remaining_s(call: InFlightCall, service: ServiceTime, now_s: float) -> float:
    """Predicted seconds until a running call ends: the mean of its likely lengths above the tokens so far, less these.

    A stream goes on at its own speed. A body that comes whole shows no tokens, so their number follows from the time.
    An answer longer than all its likely lengths is expected to grow by a share of itself: a long overdue answer has
    more left than a short one (engines.OVERDUE_SHARE).
    service : times of its model's answers
    """
    request, per_token_s = call.request, service.seconds_per_token
    generated = call.generated_tokens(per_token_s, now_s)
    if call.call.wire.stream and generated > 0:
        per_token_s = call.ran_s(now_s) / generated
    expected = service.tokens_mean if request.expected_tokens is None else request.expected_tokens
    return per_token_s * remaining_tokens(request.quantiles, expected, generated)
