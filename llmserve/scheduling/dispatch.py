"""Dispatch: the one way from queue to engine.

A batch is formed early, where its bin's release lets it go although no engine is free, and waits in the queue of formed
batches; or it is formed for an engine that is free. Either way it is a candidate:

    candidates   of each model that a free engine serves: what was formed, and what the releases of its bins let go now
    key          the order's; the candidate of the smallest key is next
    start        on an engine whose memory holds it; nothing overtakes what waits for memory

Preemption puts one more question to the same candidates, with what runs beside them. Here alone batches are started and
stopped; scheduling/choices.py finds what is next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from llmserve.scheduling.batch_times import Timetable
from llmserve.scheduling.choices import FixedChoice, MomentChoice
from llmserve.scheduling.engines import EngineState, Worker
from llmserve.scheduling.messages import Action, PreemptBatch, StartBatch
from llmserve.scheduling.model_queues import Forming, Group, ModelQueues
from llmserve.scheduling.orders import Candidate, FixedOrder, Key, MomentOrder, Order, Running, is_overdue
from llmserve.scheduling.queues import FormedBatch


class Dispatch:
    """order    which candidate is next; moment : whether it decides when an engine is free
    forming  has bins let batches go
    times    how long batches take
    actions  of the step in progress: what is started and stopped is said here
    """

    def __init__(self, order: Order, batch_size: int) -> None:
        self.order = order
        self.moment = isinstance(order, MomentOrder)
        self.forming = Forming(batch_size, early_drain=not self.moment)
        self.times = Timetable(batch_size)
        self.actions: list[Action] = []

    def settle(self, group: Group, now_s: float) -> list[float]:
        """After whatever happened: what can start does. Returns times at which more could, though nothing happened."""
        dues_s: list[float | None] = []
        if group.tally.waiting:
            for queues in group.planned:  # what a plan or an arrival says of one bin may let another one go
                if queues.waiting:
                    self.forming.form_all_early(queues, now_s)
            choice = self.choice(group, now_s) if group.pool.free else None
            if choice is not None:
                for engine, queues, batch, size in choice.starts():
                    self._start(group, engine, queues, batch, size, now_s)
                if choice.look_again_at_s is not None:
                    dues_s.append(choice.look_again_at_s)
            if group.arrived_in:
                self._make_room(group, now_s)
            if group.timed:
                dues_s += self._dues_s(group, choice)
        group.arrived_in.clear()
        # What its release would let go by now, an order of the moment may have no use for.
        least_s = now_s if self.moment else -math.inf
        return [at_s for at_s in dues_s if at_s is not None and at_s > least_s] if dues_s else []

    def choice(self, group: Group, now_s: float) -> FixedChoice | MomentChoice:
        if isinstance(self.order, FixedOrder):
            return FixedChoice(group, self.forming, now_s)
        return MomentChoice(group, self.forming, self.order, self.times, now_s)

    def _dues_s(self, group: Group, choice: FixedChoice | MomentChoice | None) -> Iterator[float | None]:
        """When releases may let more go by time alone."""
        for queues in group.timed:
            if queues.waiting:
                idle = choice.idle_after(queues) if choice is not None else None
                for queue in queues.bins:
                    if len(queue):
                        yield queues.release.due_at_s(queue, idle)

    def _start(
        self, group: Group, engine: EngineState, queues: ModelQueues, batch: FormedBatch, size: int, now_s: float
    ) -> None:
        """Start the first so many requests of a formed batch."""
        started, requests = queues.start(batch, size)
        engine.start(batch, requests, now_s)
        group.pool.served(requests, engine)
        group.pool.look_at(engine, now_s)
        self.actions.append(StartBatch(engine.info.name, started))

    # ---- preemption ----

    def _make_room(self, group: Group, now_s: float) -> None:
        """Stop batches for others that are worth more, of queues to which requests have come: what waits of others is
        worth no more than before.
        """
        order = self.order
        assert isinstance(order, MomentOrder), "only an order of the moment preempts"
        while victims := self._victims(group, order, now_s):
            choice = MomentChoice(group, self.forming, order, self.times, now_s)
            if not any(self._stop_for_more(group, order, choice, running, now_s) for running in victims):
                return

    def _victims(self, group: Group, order: MomentOrder, now_s: float) -> list[Running]:
        """Batches that could make room for what waits, those first that the order would rather stop."""
        batches = group.pool.batches
        waiting = max([queues.waiting for queues in group.arrived_in.values()])
        sizes = [size for size in batches if order.may_stop(size, waiting, self.forming.batch_size)]
        engines = [engine for size in sizes for engine in batches[size].values() if can_stop(engine, now_s)]
        found = [self._running(group, engine) for engine in engines]
        return sorted(found, key=lambda running: (order.victim_key(running), running.engine.info.name))

    def _running(self, group: Group, engine: EngineState) -> Running:
        runs = list(engine.running.values())
        first = runs[0].queued
        tokens = group.queues[first.request.model].tokens(first.bin)
        expected_s = self.times.of(engine, first.request.model, first.bin, tokens).expected
        return Running(engine, runs, runs[0].started_at_s + expected_s[len(runs) - 1])

    def _stop_for_more(
        self, group: Group, order: MomentOrder, choice: MomentChoice, running: Running, now_s: float
    ) -> bool:
        """Stop what runs if the best that could begin instead on an engine of the same GPU is worth that."""
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
        # The engine is kept for it: else what leaves would begin again at once, and be stopped again, for ever.
        stopped.worker.reserved = best[1].engine, choice.reserve(best[1])
        ids = stopped.stop()
        group.pool.look_at(stopped, now_s)
        self.actions.append(PreemptBatch(stopped.info.name, running.runs[0].batch_id, ids))
        return True

    def start_reserved(self, group: Group, worker: Worker, now_s: float) -> None:
        """What ran has gone: the batch that it made room for begins, as large as it can be now, those that were
        stopped in it if they belong there.
        """
        assert worker.reserved is not None, "it is reserved for nobody"
        assert isinstance(self.order, MomentOrder), "only an order of the moment preempts"
        (engine, batch), worker.reserved = worker.reserved, None
        choice = MomentChoice(group, self.forming, self.order, self.times, now_s)
        requests = list(batch.requests.values())  # none, where all have left meanwhile
        if requests:
            choice.take_back(batch)
        group.pool.look_at(engine, now_s)
        if requests and engine.info.name in group.pool.free:
            bin_index = max([queued.bin for queued in requests])
            start = choice.best_of_bin(engine, group.queues[batch.model], bin_index)
            if start is not None:
                self._start(group, *start, now_s)


def can_stop(engine: EngineState, now_s: float) -> bool:
    """Its batch can make room: its engine runs one at a time, nobody has seen a byte of it, and nothing was decided
    already. Who has waited too long without a deadline is not put off again.
    """
    runs = engine.running.values()
    return (
        engine.worker.reserved is None
        and engine.worker.next is None
        and not any(run.began or run.stopping or is_overdue(run.queued, now_s) for run in runs)
        and not all(run.queued.cancelled for run in runs)
    )
