"""Dispatch: the one way from queue to engine.

A batch is formed early, if its bin's release allows a batch although no engine is free, and waits in the queue of
formed batches; or it is formed for an engine that is free. Either way the batch is a candidate:

    candidates   of each model that a free engine serves: formed batches, and batches that the bins' releases allow now
    key          the order's key; the candidate of the smallest key is next
    start        on an engine whose memory holds the batch; a batch that waits for memory is not overtaken

Only a dispatch starts and stops batches; a Choice (choice.py) says which batch is next, and on which engine. A dispatch
by an order of the moment also preempts: preemption.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from llmserve.scheduling.choice.batch_times import Timetable
from llmserve.scheduling.choice.choice import Choice, Start
from llmserve.scheduling.choice.fixed_choice import FixedChoice
from llmserve.scheduling.choice.orders import FixedOrder, Order
from llmserve.scheduling.engines import EngineState, Worker
from llmserve.scheduling.group import Forming, Group
from llmserve.scheduling.messages import Action, StartBatch
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.scheduling.sharing import look_at, open_idle

OrderOf = Callable[[Mapping[str, str | float]], Order]


class Dispatch:
    """The starts of batches, by an order.

    order    which candidate is next
    forming  forms batches out of bins
    times    how long batches take
    actions  actions of the step in progress; starts and preemptions are appended
    """

    order: Order

    def __init__(self, order: Order, batch_size: int) -> None:
        self.order = order
        self.forming = Forming(batch_size)
        self.times = Timetable(batch_size)
        self.actions: list[Action] = []

    def choice(self, group: Group, now_s: float) -> Choice:
        raise NotImplementedError

    def tune(self, settings: Mapping[str, str | float], group: Group) -> None:
        """Change the order, and sort all waiting requests again.

        Raises ValueError if the present order, or the one of the settings, has no fixed keys; then nothing has changed.
        """
        raise ValueError(f"the order cannot change to {dict(settings)} while requests wait")

    def dispatch(self, group: Group, now_s: float) -> list[float]:
        """Start all that can start, after any event. Returns times at which more could start without an event."""
        dues_s: list[float | None] = []
        if group.tally.waiting:
            for queues in group.planned:  # a new plan or an arrival in one bin may change the release of others
                if queues.waiting:
                    self.forming.form_all_early(queues, now_s)
            deferred = group.tally.deferred
            if deferred:
                self.forming.form_deferred(group, now_s)
            choice = self._start_batches(group, now_s)
            while deferred and self.forming.form_deferred(group, now_s):  # the starts have left one share that waits
                choice = self._start_batches(group, now_s)
            if group.pool.sharing and open_idle(group.pool):
                choice = self._start_batches(group, now_s)
            if choice is not None and (recheck_at_s := choice.recheck_at_s) is not None:
                dues_s.append(recheck_at_s)
            if group.arrived_in:
                self._make_room(group, now_s)
            if group.timed:
                dues_s += self._dues_s(group, choice)
        group.arrived_in.clear()
        # An order of the moment may leave a batch that its release allows: a past time would wake it without end.
        least_s = now_s if self.order.by_times else -math.inf
        return [at_s for at_s in dues_s if at_s is not None and at_s > least_s] if dues_s else []

    def _start_batches(self, group: Group, now_s: float) -> Choice | None:
        choice = self.choice(group, now_s) if group.pool.free else None
        if choice is not None:
            for start in choice.starts():
                self._start(group, start, now_s)
        return choice

    def _dues_s(self, group: Group, choice: Choice | None) -> Iterator[float | None]:
        """Times at which releases may release more without an event."""
        for queues in group.timed:
            if queues.waiting:
                idle = choice.idle_after(queues) if choice is not None else None
                if idle is None and not self.forming.forms_early(queues):
                    continue
                for queue in queues.bins:
                    if len(queue):
                        yield queues.release.due_at_s(queue, idle)
                        if self.order.by_times and idle is not None:  # that time may be past, and a later one follow
                            yield queues.release.due_at_s(queue, None)

    def _start(self, group: Group, start: Start, now_s: float) -> None:
        """Start the first requests of a formed batch."""
        engine, queues, batch, size = start
        pool = group.pool
        turn = batch.key if engine.info.by_priority and not self.order.by_times else None
        started, requests = queues.start(batch, size, turn)
        for queued in requests:
            if queued.request.blocks:
                queued.cached_tokens = pool.residency.sent(engine.info.name, queued.request)
            if queued.turn is not None:
                group.started(queued, engine, now_s)
            queued.charge()
        engine.start(batch, requests, now_s)
        pool.starts += len(requests)
        if queues.prompts.mean_s and not engine.info.barrier:
            for queued in requests:
                prompt_s = queues.prompts.prefill_s(queued.request.prompt_tokens, queued.cached_tokens)
                if queues.is_long(prompt_s):
                    pool.compute(engine, queued.request.id, prompt_s, now_s)
        pool.refresh(engine, now_s)
        if engine.loaded is not None:
            look_at(engine, group.tally)
        self.actions.append(StartBatch(engine.info.name, started))

    def start_direct(self, group: Group, start: Start, now_s: float) -> None:
        """Start a batch from outside the queues, because no waiting request wants the engine."""
        _, queues, batch, _ = start
        queues.hold(batch)
        batch.key = self.order.batch_key(batch)
        self._start(group, start, now_s)

    def adopt(self, group: Group, queued: QueuedRequest, engine: EngineState, ran_s: float, now_s: float) -> None:
        """Count a request as running on an engine for so many seconds already."""
        queues = group.queues[queued.request.model]
        if queued.request.blocks:
            group.pool.residency.sent(engine.info.name, queued.request)
        if queued.turn is not None:
            group.started(queued, engine, now_s)
        queued.charge()
        engine.adopt(self.forming.form(queues, queued.bin, [queued], now_s), queued, ran_s, now_s)
        group.pool.refresh(engine, now_s)

    # ---- preemption ----

    def _make_room(self, group: Group, now_s: float) -> None:
        """Stop running batches for batches that are worth more, out of queues with new arrivals."""

    def start_reserved(self, group: Group, worker: Worker, now_s: float) -> None:
        """Start the batch for which a running batch was preempted, after the latter has ended."""
        raise NotImplementedError


class FixedDispatch(Dispatch):
    """Dispatch by an order with fixed keys, without preemption.

    order_of : makes an order by settings, for `tune`
    """

    order: FixedOrder

    def __init__(self, order: FixedOrder, batch_size: int, order_of: OrderOf) -> None:
        super().__init__(order, batch_size)
        self._order_of = order_of

    def choice(self, group: Group, now_s: float) -> FixedChoice:
        return FixedChoice(group, self.forming, now_s)

    def tune(self, settings: Mapping[str, str | float], group: Group) -> None:
        order = self._order_of(settings)
        if not isinstance(order, FixedOrder):
            super().tune(settings, group)  # which raises
            return
        self.order = order
        for queues in group.queues.values():
            queues.reorder(order)
