"""Orders that take requests straight from the queues, whenever an engine is free: the batch is decided with its engine.

Nothing is released before that; what is known of batch times (scheduling/batch_times.py) says what can still be in
time. A request that cannot be, even alone and at once, fails at once and costs no engine anything.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmserve.scheduling.batch_times import Timetable
from llmserve.scheduling.deadline_queue import ROUNDING_S, DeadlineQueue, deadline_s, largest_feasible
from llmserve.scheduling.engine_state import EngineState, Worker
from llmserve.scheduling.floor import Floor
from llmserve.scheduling.lane import Lane
from llmserve.scheduling.order.edf import UNDATED_S
from llmserve.scheduling.queues import FormedBatch, Ticket

SURELY_LATE_S = 1e-6  # past the last moment: what could start in that very moment still can


@dataclass(slots=True)  # not frozen: one is made for each model that waits whenever an engine is free
class Waiting:
    """A bin that an engine could serve now, and what may ride along.

    engine   that could
    batch_s  seconds of batches of 1, 2, ... of its requests on that engine; empty_s: of a batch of none
    most     requests that the engine takes at once
    count    requests that wait in these bins, or run besides
    shorter  the model's bins of shorter answers, the longest first: their requests end before its own, and cost its
             batch nothing but a place
    besides  requests of these bins that run on the engine, and would run again in a batch that takes their place
    """

    engine: EngineState
    lane: Lane
    queue: DeadlineQueue
    batch_s: Sequence[float]
    empty_s: float
    most: int
    count: int
    shorter: Sequence[DeadlineQueue] = ()
    besides: Sequence[Ticket] = ()

    def largest(self, now_s: float, *, with_besides: bool = True) -> int:
        """Requests in the largest feasible batch."""
        besides = sorted(map(deadline_s, self.besides)) if with_besides and self.besides else ()
        return largest_feasible((self.queue, *self.shorter), now_s, self.batch_s, self.most, besides)


@dataclass(frozen=True, slots=True)
class Pick:
    """A batch.

    count  requests in it, those that run besides among them
    ids    those of its own bin that wait; None: all that are in time in a batch of `count`, its own bin's first
    """

    waiting: Waiting
    count: int
    ids: Sequence[int] | None = None


class DirectOrder(Protocol):
    """preemption_factor: a batch that runs is stopped for one so many times its size; None: never.
    only_if_needed: and only if more would be late if it were not.
    """

    @property
    def preemption_factor(self) -> float | None: ...

    @property
    def only_if_needed(self) -> bool: ...

    def pick(self, waiting: Sequence[Waiting], engine: str, now_s: float) -> Pick | None:
        """What runs next if it begins now; None: nothing. No queue is empty.

        engine : its name; of several that share a GPU, of which one can run at a time, the first one's that could.
        """
        ...

    def wake_at_s(self, engine: str, now_s: float) -> float | None:
        """When an engine that was given nothing is to be asked again although nothing happened."""
        ...


class Direct:
    """form    have these requests of a bin form a batch
    start   start it, whole
    preempt stop the batch that runs on an engine
    """

    def __init__(
        self,
        order: DirectOrder,
        floor: Floor,
        lanes: dict[str, Lane],
        *,
        batch_size: int,
        form: Callable[[Lane, DeadlineQueue, list[Ticket]], FormedBatch],
        start: Callable[[EngineState, Lane, FormedBatch, int], None],
        preempt: Callable[[EngineState], None],
    ) -> None:
        self._order = order
        self._floor = floor
        self._lanes = lanes
        self._batch_size = batch_size
        self._form = form
        self._start = start
        self._preempt = preempt
        self._times = Timetable(batch_size)
        self._alone: dict[str, set[tuple[float, float]]] = {}  # by model, of the engines that serve it
        self._wake_at_s: float | None = None

    @property
    def preempts(self) -> bool:
        return self._order.preemption_factor is not None

    @property
    def wake_at_s(self) -> float | None:
        return self._wake_at_s

    # ---- engines that are free ----

    def dispatch(self, now_s: float) -> None:
        """Give every engine that is free what the order picks for it."""
        wakes: list[float] = []
        for name in sorted(self._floor.free):
            while (engines := self._sharing(name)) and self._serve(engines, now_s):
                pass
            for engine in engines:
                times = (self._order.wake_at_s(name, now_s), engine.look_again_at_s)
                wakes += [time_s for time_s in times if time_s is not None and time_s > now_s]
        self._wake_at_s = min(wakes, default=None)

    def _sharing(self, name: str) -> Sequence[EngineState]:
        """Engines one of which could begin something now, by the first one's name: of a GPU that runs one batch at a
        time all that are free, else one alone. () for a name that is not the first, or not free.
        """
        engine = self._floor.free.get(name)  # it may have gone with another that shares its GPU
        if engine is None or engine.room <= 0:
            return ()
        if not engine.info.barrier or len(engine.worker.engines) == 1:
            return (engine,)
        sharing = [each for each in engine.worker.engines if each.info.name in self._floor.free]
        return sharing if sharing[0] is engine else ()

    def _serve(self, engines: Sequence[EngineState], now_s: float) -> bool:
        """Start something on one of them. False: there is nothing for them."""
        if any(self._run_again(engine, now_s) for engine in engines):
            return True
        name = engines[0].info.name
        pick = self._overdue(engines, now_s) or self._order.pick(self._for_free(engines), name, now_s)
        if pick is None:
            # Answers differ in length: what would be late on average may be in time, and there is nothing better.
            pick = self._order.pick(self._for_free(engines, by_least=True), name, now_s)
        return pick is not None and self._start_pick(pick, now_s)

    def _run_again(self, engine: EngineState, now_s: float) -> bool:
        """What another engine failed or lost has waited longest: of such a batch, all that can be in time together."""
        for lane in self._lanes.values():
            if not lane.formed or not engine.serves(lane.model):
                continue
            for batch in lane.formed.batches():
                if batch.avoid == engine.info.name and self._floor.another_works(engine.info.name, lane.model):
                    continue
                count = self._in_time(engine, lane, batch, now_s)
                if count and engine.fits(next(iter(batch.tickets.values())), now_s, lane.service.seconds_per_token):
                    self._start(engine, lane, batch, count)
                    return True
        return False

    def _in_time(self, engine: EngineState, lane: Lane, batch: FormedBatch, now_s: float) -> int:
        """How many of a formed batch the engine could run in time, at least if their answers are short; they are put
        first.
        """
        times = self._times.of(engine, lane, batch.bin)
        tickets = sorted(batch.tickets.values(), key=deadline_s)
        deadlines_s = [deadline_s(ticket) for ticket in tickets]
        for batch_s in (times.expected, times.least):
            count = largest_feasible((), now_s, batch_s, min(_room(engine), len(batch_s)), deadlines_s)
            if count:
                first = bisect_left(deadlines_s, now_s + batch_s[count - 1] - ROUNDING_S)
                chosen = tickets[first : first + count]
                batch.tickets = {ticket.request.id: ticket for ticket in (*chosen, *tickets)}
                return count
        return 0

    def _start_pick(self, pick: Pick, now_s: float) -> bool:
        """False when the engine's memory does not hold it yet: nothing that would overtakes it."""
        engine, lane = pick.waiting.engine, pick.waiting.lane
        batch = self._take(pick, now_s)
        first = next(iter(batch.tickets.values()))
        if not engine.fits(first, now_s, lane.service.seconds_per_token):
            self._take_back(lane, batch)
            return False
        self._start(engine, lane, batch, engine.room)
        return True

    def _take_back(self, lane: Lane, batch: FormedBatch) -> None:
        for ticket in list(batch.tickets.values()):
            lane.leave(ticket)
            lane.take_back(ticket)

    def _take(self, pick: Pick, now_s: float) -> FormedBatch:
        """Its requests leave their bins, as a batch whose engine is known."""
        waiting = pick.waiting
        if pick.ids is not None:
            tickets = waiting.queue.take_these(pick.ids)
        else:
            tickets, ends_s = [], now_s + waiting.batch_s[pick.count - 1]
            for queue in (waiting.queue, *waiting.shorter):
                if ids := queue.ids(queue.first_at(ends_s), pick.count - len(tickets)):
                    tickets += queue.take_these(ids)
        batch = self._form(waiting.lane, waiting.queue, tickets)
        waiting.lane.formed.hold(batch)
        return batch

    def _for_free(self, engines: Sequence[EngineState], *, by_least: bool = False) -> list[Waiting]:
        """Bins that these engines, which are free, could serve now."""
        lanes = [lane for lane in self._lanes.values() if lane.waiting]
        found: list[Waiting] = []
        for engine in engines:
            found += self._waiting(engine, lanes, _room(engine), by_least=by_least)
        return found

    def _waiting(
        self,
        engine: EngineState,
        lanes: Collection[Lane],
        room: int,
        *,
        by_least: bool = False,
        besides: Sequence[Ticket] = (),
        at_least: float = 1,
    ) -> list[Waiting]:
        """Bins of these lanes that the engine could serve.

        room : requests that it has or would have room for.  besides : requests of one model that run on it.  at_least :
        that a batch could hold, with those that run besides.
        """
        found = []
        most = min(self._batch_size, room)
        for lane in lanes:
            mine = besides if besides and besides[0].request.model == lane.model else ()
            if lane.waiting + len(mine) < at_least or not engine.serves(lane.model):
                continue
            shorter: tuple[DeadlineQueue, ...] = ()
            count = 0
            for queue in lane.bins:
                if not len(queue):
                    continue
                assert isinstance(queue, DeadlineQueue)
                count += len(queue)
                same = [ticket for ticket in mine if ticket.bin <= queue.index] if mine else ()
                if count + len(same) >= at_least:
                    times = self._times.of(engine, lane, queue.index)
                    batch_s = times.least if by_least else times.expected
                    found.append(
                        Waiting(engine, lane, queue, batch_s, times.empty, most, count + len(same), shorter, same)
                    )
                shorter = (queue, *shorter)
        return found

    def _overdue(self, engines: Sequence[EngineState], now_s: float) -> Pick | None:
        """A request without a deadline waits no longer than UNDATED_S for others, or it might for ever. Of those that
        have, the one that came first goes first, whatever its model.
        """
        found = []
        for lane in self._lanes.values():
            for queue in lane.bins if lane.waiting else ():
                assert isinstance(queue, DeadlineQueue)
                oldest = queue.oldest_undated()
                if oldest is not None and _is_overdue(oldest, now_s):
                    turn = oldest.arrived_at_s, oldest.request.id
                    found += [(turn, engine, lane, queue) for engine in engines if engine.serves(lane.model)]
        if not found:
            return None
        _, engine, lane, queue = min(found, key=lambda entry: entry[0])
        first, times = queue.first_at(math.inf), self._times.of(engine, lane, queue.index)
        count = min(self._batch_size, _room(engine), len(queue) - first)
        waiting = Waiting(engine, lane, queue, times.expected, times.empty, count, len(queue))
        return Pick(waiting, count, queue.ids(first, count))

    # ---- engines that are not ----

    def preempt(self, now_s: float, grown: Collection[Lane]) -> None:
        """Stop batches for others that are worth more: the smallest first, for it costs least.

        grown : of these requests have come; what waits of others is worth no more than before
        """
        factor = self._order.preemption_factor
        assert factor is not None, "only of an order that preempts"
        while True:
            most = max([lane.waiting for lane in grown])
            if most < factor - 1.0:  # not even one request, of their own model, would be stopped for them
                return
            targets = sorted(
                [
                    (len(engine.running), name)
                    for name, engine in self._floor.engines.items()
                    if engine.running
                    and len(engine.running) * factor <= self._batch_size
                    and len(engine.running) * (factor - 1.0) <= most
                    and _can_stop(engine, now_s)
                ]
            )
            if not any(self._preempt_for_more(self._floor.engines[name], grown, factor, now_s) for _, name in targets):
                return

    def _preempt_for_more(self, running: EngineState, grown: Collection[Lane], factor: float, now_s: float) -> bool:
        """Stop what runs if a batch of `factor` times its size could begin now on an engine of the same GPU."""
        stopped = list(running.running.values())
        least = factor * len(stopped)
        waiting: list[Waiting] = []
        for engine in running.worker.engines:
            if engine.ready and engine.circuit.closed:
                besides = stopped if engine is running else ()
                waiting += self._waiting(engine, grown, engine.info.slots, besides=besides, at_least=least)
        pick = self._order.pick(waiting, running.info.name, now_s) if waiting else None
        if pick is None or pick.count < least:
            return False
        if self._order.only_if_needed and not self._is_needed(running, pick, now_s):
            return False
        self._reserve(running, pick, now_s)
        return True

    def _is_needed(self, running: EngineState, pick: Pick, now_s: float) -> bool:
        """Whether more would be late if what runs went on to its end than if it is stopped.

        Where more wait than the next batch takes, every moment counts.
        """
        waiting, count = pick.waiting, len(running.running)
        if waiting.count > pick.count:
            return True
        first = next(iter(running.running.values()))
        times = self._times.of(running, self._lanes[first.request.model], first.bin)
        free_at_s = max(now_s, first.started_at_s + times.expected[count - 1])
        return pick.count > count + waiting.largest(free_at_s, with_besides=False)

    def _reserve(self, running: EngineState, pick: Pick, now_s: float) -> None:
        """The engine is kept for the batch that is worth more: else the one that leaves would begin again at once, and
        be stopped again, for ever.
        """
        running.worker.reserved = pick.waiting.engine, self._take(pick, now_s)
        self._preempt(running)

    def start_reserved(self, worker: Worker, now_s: float) -> None:
        """What ran has gone: the batch that it made room for begins, as large as it can be now, those that were
        stopped in it if they belong there.
        """
        assert worker.reserved is not None, "it is reserved for nobody"
        (engine, batch), worker.reserved = worker.reserved, None
        lane, tickets = self._lanes[batch.model], list(batch.tickets.values())
        self._take_back(lane, batch)
        self._floor.note(engine, now_s)
        if not tickets or engine.info.name not in self._floor.free:
            return
        queue = lane.bins[max(ticket.bin for ticket in tickets)]
        waiting = [each for each in self._waiting(engine, (lane,), engine.room) if each.queue is queue]
        pick = self._order.pick(waiting, engine.info.name, now_s) if waiting else None
        if pick is not None:
            self._start_pick(pick, now_s)

    # ---- who is late ----

    def late_at_s(self, ticket: Ticket, lane: Lane) -> float | None:
        """From when on it cannot be in time, even alone on the fastest engine that serves it; None: never."""
        due_s = ticket.request.deadline_s
        if due_s is None:
            return None
        least_s = self._least_s(ticket, lane)
        return min(due_s, due_s - least_s + SURELY_LATE_S)

    def _least_s(self, ticket: Ticket, lane: Lane) -> float:
        """Seconds that it takes alone on the fastest engine, if it is among the shortest of its bin, or as short as may
        be by its own prediction.
        """
        lines = self._alone.get(lane.model)
        if lines is None:
            engines = self._floor.serving(lane.model)
            lines = self._alone[lane.model] = {self._times.alone(engine, lane.model) for engine in engines}
        request, tokens = ticket.request, lane.tokens(ticket.bin).least
        own = request.quantiles[0] if request.quantiles else request.predicted_tokens
        if own is not None and own < tokens:
            tokens = own
        return min([prefill_s + tokens * step_s for prefill_s, step_s in lines], default=0.0)

    def look_again(self) -> None:
        """After a change of who serves what, and how fast."""
        self._alone.clear()

    # ---- promises ----

    def check(self, now_s: float) -> None:
        """Assert that no engine is idle that the order has something for."""
        for name in self._floor.free:
            engines = self._sharing(name)
            if any(engine.look_again_at_s is not None for engine in engines):
                continue
            for by_least in (False, True) if engines else ():
                pick = self._order.pick(self._for_free(engines, by_least=by_least), name, now_s)
                assert pick is None, f"{name} is idle while {pick.count if pick else 0} could be in time"


def _room(engine: EngineState) -> int:
    """Requests that it is given at once: on trial, and where memory is scarce, one by one."""
    if engine.info.barrier or (engine.circuit.closed and engine.info.tokens_max is None):
        return engine.room
    return min(1, engine.room)


def _can_stop(engine: EngineState, now_s: float) -> bool:
    """Its batch can: its engine runs one at a time, nobody has seen a byte of it, and nothing was decided already. Who
    has waited too long without a deadline is not put off again.
    """
    running = engine.running.values()
    return (
        engine.info.barrier
        and engine.worker.reserved is None
        and not any(ticket.began or ticket.preempted or _is_overdue(ticket, now_s) for ticket in running)
        and not all(ticket.cancelled for ticket in running)
    )


def _is_overdue(ticket: Ticket, now_s: float) -> bool:
    return ticket.request.deadline_s is None and ticket.arrived_at_s + UNDATED_S <= now_s
