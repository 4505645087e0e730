"""Dispatch: the one way from queue to engine.

A batch is formed early, if its bin's release allows a batch although no engine is free, and waits in the queue of
formed batches; or it is formed for an engine that is free. Either way the batch is a candidate:

    candidates   of each model that a free engine serves: formed batches, and batches that the bins' releases allow now
    key          the order's key; the candidate of the smallest key is next
    start        on an engine whose memory holds the batch; a batch that waits for memory is not overtaken

Preemption compares the same candidates with the running batches. Only this module starts and stops batches;
scheduling/choice/fixed_choice.py and scheduling/choice/moment_choice.py choose the next batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from llmserve.scheduling.choice.batch_times import Timetable
from llmserve.scheduling.choice.fixed_choice import FixedChoice
from llmserve.scheduling.choice.moment_choice import MomentChoice
from llmserve.scheduling.choice.orders import Candidate, FixedOrder, Key, MomentOrder, Order, Running, is_overdue
from llmserve.scheduling.engines import EngineState, Worker
from llmserve.scheduling.group import Forming, Group
from llmserve.scheduling.messages import Action, PreemptBatch, StartBatch
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import FormedBatch, QueuedRequest


class Dispatch:
    """order    which candidate is next; moment : whether the order is a MomentOrder
    order_of  makes an order by settings, for `tune`; None: the order stays
    forming  forms batches out of bins
    times    how long batches take
    actions  actions of the step in progress; starts and preemptions are appended
    """

    def __init__(
        self,
        order: Order,
        batch_size: int,
        order_of: Callable[[Mapping[str, str | float]], Order] | None = None,
        *,
        line_stops: float = 0.0,
    ) -> None:
        self.order = order
        self._order_of = order_of
        self.moment = isinstance(order, MomentOrder)
        self.forming = Forming(batch_size, line_stops)
        self.times = Timetable(batch_size)
        self.actions: list[Action] = []

    def tune(self, settings: Mapping[str, str | float], groups: Iterable[Group]) -> None:
        """Change the order, and sort all waiting requests again.

        Raises ValueError if the present order, or the one of the settings, has no fixed keys; then nothing has changed.
        """
        order = self._order_of(settings) if self._order_of is not None else None
        if not (isinstance(order, FixedOrder) and isinstance(self.order, FixedOrder)):
            raise ValueError(f"the order cannot change to {dict(settings)} while requests wait")
        self.order = order
        for group in groups:
            for queues in group.queues.values():
                queues.follow_load(order.follows_load)
                queues.sort_again(order.key, order.turn)

    def settle(self, group: Group, now_s: float) -> list[float]:
        """Start all that can start, after any event. Returns times at which more could start without an event."""
        dues_s: list[float | None] = []
        if group.tally.waiting:
            for queues in group.planned:  # a new plan or an arrival in one bin may change the release of others
                if queues.waiting:
                    self.forming.form_all_early(queues, now_s)
            self.forming.form_held_back(group, now_s)
            choice = self._start_batches(group, now_s)
            while self.forming.form_held_back(group, now_s):  # the starts have left one share that waits
                choice = self._start_batches(group, now_s)
            if choice is not None and choice.recheck_at_s is not None:
                dues_s.append(choice.recheck_at_s)
            if group.arrived_in:
                self._make_room(group, now_s)
            if group.timed:
                dues_s += self._dues_s(group, choice)
        group.arrived_in.clear()
        # An order of the moment may leave a batch that its release allows: a past time would wake it without end.
        least_s = now_s if self.moment else -math.inf
        return [at_s for at_s in dues_s if at_s is not None and at_s > least_s] if dues_s else []

    def _start_batches(self, group: Group, now_s: float) -> FixedChoice | MomentChoice | None:
        choice = self.choice(group, now_s) if group.pool.free else None
        if choice is not None:
            for engine, queues, batch, size in choice.starts():
                self._start(group, engine, queues, batch, size, now_s)
        return choice

    def choice(self, group: Group, now_s: float) -> FixedChoice | MomentChoice:
        if isinstance(self.order, FixedOrder):
            return FixedChoice(group, self.forming, now_s)
        return MomentChoice(group, self.forming, self.order, self.times, now_s)

    def _dues_s(self, group: Group, choice: FixedChoice | MomentChoice | None) -> Iterator[float | None]:
        """Times at which releases may release more without an event."""
        for queues in group.timed:
            if queues.waiting:
                idle = choice.idle_after(queues) if choice is not None else None
                if idle is None and not self.forming.forms_early(queues):
                    continue
                for queue in queues.bins:
                    if len(queue):
                        yield queues.release.due_at_s(queue, idle)
                        if self.moment and idle is not None:  # that time may have passed, and a later one may follow
                            yield queues.release.due_at_s(queue, None)

    def _start(
        self, group: Group, engine: EngineState, queues: ModelQueues, batch: FormedBatch, size: int, now_s: float
    ) -> None:
        """Start the first `size` requests of a formed batch."""
        turn = batch.key if engine.info.by_priority and isinstance(self.order, FixedOrder) else None
        started, requests = queues.start(batch, size, turn)
        engine.start(batch, requests, now_s)
        group.pool.served(requests, engine)
        group.pool.refresh(engine, now_s)
        self.actions.append(StartBatch(engine.info.name, started))

    def start_aside(
        self, group: Group, engine: EngineState, queues: ModelQueues, batch: FormedBatch, now_s: float
    ) -> None:
        """Start a batch that waited outside the queues, for no request that waits in them wants the engine."""
        queues.hold(batch)
        if isinstance(self.order, FixedOrder):
            batch.key = self.order.key(batch)
        self._start(group, engine, queues, batch, len(batch.requests), now_s)

    # ---- preemption ----

    def _make_room(self, group: Group, now_s: float) -> None:
        """Stop running batches for batches that are worth more, out of queues with new arrivals: the other queues were
        compared before.
        """
        order = self.order
        assert isinstance(order, MomentOrder), "only an order of the moment preempts"
        while victims := self._victims(group, order, now_s):
            choice = MomentChoice(group, self.forming, order, self.times, now_s)
            if not any(self._stop_for_more(group, order, choice, running, now_s) for running in victims):
                return

    def _victims(self, group: Group, order: MomentOrder, now_s: float) -> list[Running]:
        """Running batches that could be stopped, by the order's `victim_key`."""
        batches = group.pool.batches
        waiting = max([queues.waiting for queues in group.arrived_in.values()])
        sizes = [size for size in batches if order.may_stop(size, waiting, self.forming.batch_size)]
        engines = [engine for size in sizes for engine in batches[size].values() if can_stop(engine, now_s)]
        victims = [self._running(group, engine) for engine in engines]
        return sorted(victims, key=lambda running: (order.victim_key(running), running.engine.info.name))

    def _running(self, group: Group, engine: EngineState) -> Running:
        runs = list(engine.running.values())
        first = runs[0].queued
        tokens = group.queues[first.request.model].tokens(first.bin)
        expected_s = self.times.of(engine, first.request.model, first.bin, tokens).expected
        return Running(engine, runs, runs[0].started_at_s + expected_s[len(runs) - 1])

    def _stop_for_more(
        self, group: Group, order: MomentOrder, choice: MomentChoice, running: Running, now_s: float
    ) -> bool:
        """Stop the running batch if the best batch for an engine of the same GPU is worth that. True if stopped."""
        stopped, least = running.engine, order.least_worth(running)
        best: tuple[Key, Candidate] | None = None
        for engine in stopped.worker.engines:
            if engine.ready and engine.circuit.closed:
                beside = running if engine is stopped else None
                best = choice.best_of(
                    engine, group.arrived_in.values(), engine.info.slots, best=best, running=beside, at_least=least
                )
        if best is None or not order.stops(best[1], running, now_s):
            return False
        # Reserve the engine: otherwise the stopped requests would start at once and be stopped again, without end.
        stopped.worker.reserved = best[1].engine, choice.reserve(best[1])
        ids = stopped.stop()
        group.pool.refresh(stopped, now_s)
        self.actions.append(PreemptBatch(stopped.info.name, running.runs[0].batch_id, ids))
        return True

    def start_reserved(self, group: Group, worker: Worker, now_s: float) -> None:
        """Start the reserved batch after the preempted batch has ended. The batch is composed again, as large as it can
        be now; it may hold preempted requests. If the worker runs yet, the batch's requests only go back to their bins.
        """
        assert worker.reserved is not None, f"worker {worker.name} is not reserved"
        assert isinstance(self.order, MomentOrder), "only an order of the moment preempts"
        (engine, batch), worker.reserved = worker.reserved, None
        # What the release let go must not wait now beside an idle engine, for others were stopped for it.
        choices = [
            MomentChoice(group, self.forming, self.order, self.times, now_s, asks=asks) for asks in (True, False)
        ]
        requests = list(batch.requests.values())  # [] if all have been cancelled or have failed in between
        if requests:
            self._take_back(group.queues[batch.model], requests, now_s)
        if worker.running:
            return
        group.pool.refresh(engine, now_s)
        if requests and engine.info.name in group.pool.free:
            bin_index = max([queued.bin for queued in requests])
            starts = (choice.best_of_bin(engine, group.queues[batch.model], bin_index) for choice in choices)
            if (start := next(filter(None, starts), None)) is not None:
                self._start(group, *start, now_s)

    def _take_back(self, queues: ModelQueues, requests: list[QueuedRequest], now_s: float) -> None:
        """Put the requests of a formed batch back into their bins."""
        for queued in requests:
            queues.leave(queued)
        for queue in queues.take_back(requests):
            self.forming.form_early(queues, queue, now_s)


def can_stop(engine: EngineState, now_s: float) -> bool:
    """Whether the engine's batch can be preempted: nothing else is reserved, the worker does not move, no client has
    received a byte, no request is overdue, and not all are cancelled. engine : a barrier engine that runs a batch.
    """
    runs = engine.running.values()
    return (
        engine.worker.reserved is None
        and engine.worker.next is None
        and not any(run.began or run.stopping or is_overdue(run.queued, now_s) for run in runs)
        and not all(run.queued.cancelled for run in runs)
    )
