"""Dispatch by an order of the moment, which may preempt running batches for batches that are worth more.

Preemption compares the candidates of a free engine with the running batches. The engine of a stopped batch is reserved
for the better one, which starts when the last request of the stopped batch has left.
"""

from __future__ import annotations

from llmserve.scheduling.choice.candidates import Opening
from llmserve.scheduling.choice.dispatch import Dispatch
from llmserve.scheduling.choice.moment_choice import Best, MomentChoice
from llmserve.scheduling.choice.orders import MomentOrder, Running, is_overdue
from llmserve.scheduling.engines import EngineState, Worker
from llmserve.scheduling.group import Group
from llmserve.scheduling.messages import PreemptBatch
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import QueuedRequest


class MomentDispatch(Dispatch):
    """Dispatch by an order of the moment, with preemption."""

    order: MomentOrder

    def choice(self, group: Group, now_s: float, *, asks: bool = True) -> MomentChoice:
        return MomentChoice(group, self.forming, self.order, self.times, now_s, asks=asks)

    def _make_room(self, group: Group, now_s: float) -> None:
        """Stop running batches for batches that are worth more, out of queues with new arrivals: the other queues were
        compared before.
        """
        while victims := self._victims(group, now_s):
            choice = self.choice(group, now_s)
            if not any(self._stop_for_more(group, choice, running, now_s) for running in victims):
                return

    def _victims(self, group: Group, now_s: float) -> list[Running]:
        """Running batches that could be stopped, by the order's `victim_key`."""
        order, batches = self.order, group.pool.batches
        waiting = max([queues.waiting for queues in group.arrived_in.values()])
        sizes = [size for size in batches if order.may_stop(size, waiting, self.forming.batch_size)]
        engines = [engine for size in sizes for engine in batches[size].values() if can_stop(engine, now_s)]
        victims = [self._running(group, engine) for engine in engines]
        return sorted(victims, key=lambda running: (order.victim_key(running), running.engine.info.name))

    def _running(self, group: Group, engine: EngineState) -> Running:
        runs = list(engine.running.values())
        first = runs[0].queued
        tokens = group.queues[first.request.model].binning.tokens(first.bin)
        expected_s = self.times.of(engine, first.request.model, first.bin, tokens).expected
        return Running(engine, runs, runs[0].started_at_s + expected_s[len(runs) - 1])

    def _stop_for_more(self, group: Group, choice: MomentChoice, running: Running, now_s: float) -> bool:
        """Stop the running batch if the best batch for an engine of the same GPU is worth that. True if stopped."""
        stopped, least = running.engine, self.order.least_worth(running)
        best: Best | None = None
        for engine in stopped.worker.engines:
            if engine.ready and engine.circuit.closed:
                beside = running if engine is stopped else None
                opening = Opening(engine, engine.info.slots, running=beside, at_least=least)
                best = choice.best_of(opening, group.arrived_in.values(), best)
        if best is None or not self.order.stops(best[1], running, now_s):
            return False
        # Reserve the engine: otherwise the stopped requests would start at once and be stopped again, without end.
        stopped.worker.reserve(best[1].engine, choice.reserve(best[1]))
        ids = stopped.stop()
        group.pool.refresh(stopped, now_s)
        self.actions.append(PreemptBatch(stopped.info.name, running.runs[0].batch_id, ids))
        return True

    def start_reserved(self, group: Group, worker: Worker, now_s: float) -> None:
        """Start the reserved batch after the preempted batch has ended. The batch is composed again, as large as it can
        be now; it may hold preempted requests. If the worker still runs, the batch's requests only go back to their
        bins.
        """
        engine, batch = worker.end_reservation()
        # What the release let go must not wait now beside an idle engine, for others were stopped for it.
        choices = [self.choice(group, now_s, asks=asks) for asks in (True, False)]
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
                self._start(group, start, now_s)

    def _take_back(self, queues: ModelQueues, requests: list[QueuedRequest], now_s: float) -> None:
        """Put the requests of a formed batch back into their bins."""
        for queued in requests:
            queues.leave(queued)
        for queue in queues.take_back(requests):
            self.forming.form_early(queues, queue, now_s)


def can_stop(engine: EngineState, now_s: float) -> bool:
    """Whether the engine's batch can be preempted: nothing else is reserved, no client has received a byte, no request
    is overdue, and not all are cancelled. engine : a barrier engine that runs a batch.
    """
    runs = engine.running.values()
    return (
        engine.worker.reserved is None
        and not any(run.began or run.stopping or is_overdue(run.queued, now_s) for run in runs)
        and not all(run.queued.cancelled for run in runs)
    )
