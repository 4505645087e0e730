"""The scheduler: told what happened and what time it is, it answers with what to do.

It reads no clock, opens no socket and awaits nothing, so the live server, the simulator and the tests drive this
very object. Each model's requests have a lane (scheduling/lane.py); all lanes share the engines. Requests go
predicted length -> bin -> formed batch -> engine:

    RequestArrived -> [bin queue] --release--> [formed queue] --order--> StartBatch -> RequestEnded | BatchEnded

Orders that are not a key of formed batches (flex) take them straight from the bins (scheduling/direct.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import count

from llmserve.request import Request
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.direct import Direct, DirectOrder
from llmserve.scheduling.engine_state import EngineState
from llmserve.scheduling.floor import Floor
from llmserve.scheduling.in_order import InOrder
from llmserve.scheduling.lane import Lane
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    AnswerBegan,
    BatchEnded,
    DispatchSolved,
    DrainRequested,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    FailReason,
    FailRequest,
    PreemptBatch,
    ReportCircuit,
    ReportTrust,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.queues import ENTRIES_SPARE, BinQueue, FormedBatch, Place, Ticket
from llmserve.scheduling.rates import CompletionRate
from llmserve.scheduling.release import Room


class Scheduler:
    """See the module. All times are seconds on the caller's clock, which must never run backwards.

    lane                a fresh lane for a model
    batch_size          largest batch
    direct              an order that takes requests straight from the bins; None: formed batches go by the lanes' key
    queue_requests_max  requests that may wait; one more is refused with `queue_full`
    retries_max         times that a request whose engine failed before its first byte runs again
    engine_wait_s       how long requests wait when no engine is up before they fail with `no_engine`
    circuit             a fresh circuit breaker for each engine
    """

    def __init__(
        self,
        *,
        lane: Callable[[str], Lane],
        batch_size: int,
        circuit: Callable[[], Circuit],
        direct: DirectOrder | None = None,
        queue_requests_max: int = 100_000,
        retries_max: int = 2,
        engine_wait_s: float = 30.0,
    ) -> None:
        self.lanes: dict[str, Lane] = {}
        self.requests: dict[int, Ticket] = {}
        self.waiting = 0  # requests in bins and in formed batches
        self._new_lane = lane
        self._batch_size = batch_size
        self._queue_requests_max = queue_requests_max
        self._retries_max = retries_max
        self._engine_wait_s = engine_wait_s
        self._new_circuit = circuit
        self._floor = Floor()
        self._in_order = InOrder(
            self._floor, self.lanes, form=self._form_batch, start=self._start, release_size=self._release_size
        )
        self._direct: Direct | None = None
        if direct is not None:
            self._direct = Direct(
                direct,
                self._floor,
                self.lanes,
                batch_size=batch_size,
                form=self._form_of,
                start=self._start,
                preempt=self._preempt,
            )
        # When those that wait are late (a heap; of those that have left, too).
        self._deadlines: list[tuple[float, int]] = []
        self._rate = CompletionRate()
        self.batch_ids: Iterator[int] = count(1)  # ascending; schedulers of one body share them
        self._draining = False
        self._grown: dict[str, Lane] = {}  # those to which requests have come in this step, under a direct order
        self._planned: list[Lane] = []  # those that want plans
        self._helpless: list[Lane] = []  # those without an engine that works
        self._now_s = 0.0
        self._actions: list[Action] = []
        self._handlers: dict[type, Callable[..., None]] = {
            RequestArrived: self._on_request_arrived,
            RequestCancelled: self._on_request_cancelled,
            RequestEnded: self._on_request_ended,
            AnswerBegan: self._on_answer_began,
            BatchEnded: self._on_batch_ended,
            EngineReady: self._on_engine_ready,
            EngineClosed: self._on_engine_closed,
            EngineLost: self._on_engine_lost,
            DrainRequested: self._on_drain_requested,
            TimerFired: self._on_timer_fired,
            DispatchSolved: self._on_dispatch_solved,
        }

    @property
    def engines(self) -> dict[str, EngineState]:
        return self._floor.engines

    @property
    def preempts(self) -> bool:
        """Whether it wants to be told when answers begin."""
        return self._direct is not None and self._direct.preempts

    def lane(self, model: str) -> Lane:
        """That of a model; made when it is first asked for."""
        lane = self.lanes.get(model)
        if lane is None:
            lane = self.lanes[model] = self._new_lane(model)
            if lane.planner is not None:
                self._planned.append(lane)
            lane.helpless_since_s = self._now_s
            self._count_engines()
        return lane

    # ---- the one entrance -------------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event; return what must be done now, in order."""
        self._begin(now_s)
        self._handlers[type(event)](event)
        return self._settle()

    def _begin(self, now_s: float) -> None:
        assert now_s >= self._now_s, f"time ran backwards: {now_s} after {self._now_s}"
        self._now_s = now_s
        self._actions = []
        if self._floor.paused:
            self._floor.end_pauses(now_s)

    def _settle(self) -> list[Action]:
        """After whatever happened: who is late fails, who can start does, who wants a plan asks for it."""
        now_s = self._now_s
        if self._deadlines:
            self._fail_late_requests()
        if self._direct is not None:
            self._settle_direct(self._direct)
        else:
            self._settle_in_order()
        if not self.requests:
            self._rate.idle()
        for lane in self._planned:
            if lane.slots:  # an engine that is yet to come from another group has none
                assert lane.planner is not None
                trusted = lane.trust.trusted
                if observed := lane.planner.wants(now_s, lane.edges, lane.ready, lane.slots, trusted=trusted):
                    self._actions.append(SolveDispatch(observed, lane.model))
        return self._actions

    def _settle_in_order(self) -> None:
        now_s = self._now_s
        if self.waiting:
            for lane in self.lanes.values():
                lane.look_again_at_s = None
                # What a plan or an arrival says of one bin may let another one go.
                if lane.release.plans or (lane.due_s is not None and now_s >= lane.due_s):
                    self._form_all(lane)
            if self._floor.free:
                self._in_order.dispatch(now_s)
        for lane in self.lanes.values():
            if lane.release.timed:
                lane.due_s = self._earliest_due_s(lane) if lane.waiting else None

    def _settle_direct(self, direct: Direct) -> None:
        if self.waiting:
            direct.dispatch(self._now_s)
        if self._grown:
            if self.waiting and direct.preempts:
                direct.preempt(self._now_s, self._grown.values())
            self._grown.clear()

    @property
    def wake_at_s(self) -> float | None:
        """When the scheduler wants TimerFired at the latest; None: not before something happens."""
        at_s = self._deadlines[0][0] if self._deadlines else None
        if not self.waiting:
            return at_s
        times = [engine.circuit.open_until_s for engine in self._floor.paused.values()]
        if self._direct is not None:
            times.append(self._direct.wake_at_s)
        else:
            for lane in self.lanes.values():
                if lane.due_s is not None or lane.look_again_at_s is not None:
                    times += (lane.due_s, lane.look_again_at_s)
        for lane in self._helpless:
            if lane.waiting and lane.helpless_since_s is not None:
                times.append(lane.helpless_since_s + self._engine_wait_s)
        if not times:
            return at_s  # nearly always, and it is asked after every step
        return min([time_s for time_s in (at_s, *times) if time_s is not None], default=None)

    # ---- events -----------------------------------------------------------------------------------------------

    def _on_request_arrived(self, event: RequestArrived) -> None:
        request = event.request
        assert request.id not in self.requests, f"request {request.id} arrived twice"
        lane = self.lanes.get(request.model)
        if lane is None and self._floor.serving(request.model):  # else it gets none: anyone could ask for anything
            lane = self.lane(request.model)
        refusal = self._refusal(request, lane)
        if lane is None or refusal is not None:
            assert refusal is not None, "there is no engine for it"
            retry_after_s = None if refusal == "deadline_exceeded" else self._retry_after_s()
            self._actions.append(FailRequest(request.id, refusal, retry_after_s))
            return
        ticket, queue = lane.admit(request, self._now_s)
        self.requests[request.id] = ticket
        self.waiting += 1
        self._watch_deadline(ticket, lane)
        self._form(lane, queue)
        if self._direct is not None:
            self._grown[lane.model] = lane

    def _watch_deadline(self, ticket: Ticket, lane: Lane) -> None:
        late_at_s = ticket.request.deadline_s if self._direct is None else self._direct.late_at_s(ticket, lane)
        if late_at_s is not None:
            heapq.heappush(self._deadlines, (late_at_s, ticket.request.id))

    def _refusal(self, request: Request, lane: Lane | None) -> FailReason | None:
        if self._draining:
            return "draining"
        if lane is None or not lane.ready:
            return "no_engine"
        if self.waiting >= self._queue_requests_max:
            return "queue_full"
        if request.deadline_s is not None and request.deadline_s <= self._now_s:
            return "deadline_exceeded"
        return None

    def _on_request_cancelled(self, event: RequestCancelled) -> None:
        ticket = self.requests.get(event.request_id)
        if ticket is None or ticket.cancelled:
            return  # it ended, or was refused, before the news of its client came
        if ticket.place is Place.RUNNING:
            ticket.cancelled = True
            self._actions.append(AbortRequest(ticket.engine, event.request_id))
        else:
            self._leave_queue(ticket)
            del self.requests[event.request_id]

    def _on_answer_began(self, event: AnswerBegan) -> None:
        ticket = self.requests.get(event.request_id)
        if ticket is not None:
            ticket.began = True

    def _on_request_ended(self, event: RequestEnded) -> None:
        engine = self.engines.get(event.engine)
        ticket = engine.running.get(event.request_id) if engine is not None else None
        if engine is None or ticket is None:
            return  # stale: the engine was lost with it, and the request lives elsewhere or has ended
        if event.fault:
            if ticket.retries == 0:
                self._judge(engine, lambda circuit: circuit.fault(event.request_id, self._now_s))
        elif event.outcome != "cancelled":
            self._judge(engine, lambda circuit: circuit.success([event.request_id]))
        ran_s = self._now_s - ticket.started_at_s
        engine.let_go(ticket)
        self._floor.note(engine, self._now_s)
        if event.fault and event.retryable and not ticket.cancelled:
            self._run_again([ticket], "engine_failed", avoid=event.engine)
        elif event.outcome == "cancelled" and ticket.preempted and not ticket.cancelled:
            self._wait_again(ticket)
        else:
            del self.requests[event.request_id]
            self._rate.observe(self._now_s)
            if event.outcome == "completed":
                self._see_answer(ticket, event.output_tokens, ran_s)
                self._see_pace(engine, ticket.request.model, ticket.together, event.output_tokens, ran_s)
        self._start_reserved(engine)

    def _on_batch_ended(self, event: BatchEnded) -> None:
        engine = self.engines.get(event.engine)
        if engine is None:
            return
        ended = [ticket for ticket in engine.running.values() if ticket.batch_id == event.batch_id]
        self._judge(engine, lambda circuit: circuit.success([ticket.request.id for ticket in ended]))
        for ticket in ended:
            engine.let_go(ticket)
            del self.requests[ticket.request.id]
            self._rate.observe(self._now_s)
            ran_s = self._now_s - ticket.started_at_s
            self._see_answer(ticket, event.output_tokens.get(ticket.request.id, 0), ran_s)
        if ended and self._direct is not None:
            ran_s = self._now_s - ended[0].started_at_s
            longest = max(event.output_tokens.values(), default=0.0)
            self._see_pace(engine, ended[0].request.model, len(event.output_tokens), longest, ran_s)
        self._floor.note(engine, self._now_s)
        self._start_reserved(engine)

    def _on_engine_ready(self, event: EngineReady) -> None:
        name = event.engine.name
        state = self.engines.get(name)
        if state is None:
            state = self._floor.place(event.engine, self._new_circuit())
        if not state.ready:  # whatever was wrong with it, it has come back
            state.circuit = self._new_circuit()
            self._floor.paused.pop(name, None)
        state.know(event.engine)
        state.ready = True
        self._floor.note(state, self._now_s)
        self._count_engines()
        for model in event.engine.models or ([] if self.lanes else [""]):
            self.lane(model)

    def _on_engine_closed(self, event: EngineClosed) -> None:
        state = self.engines.get(event.engine)
        if state is not None and state.ready:
            self._close(state)

    def _on_engine_lost(self, event: EngineLost) -> None:
        state = self.engines.get(event.engine)
        if state is None:
            return
        if state.ready:
            self._close(state)
        self._floor.forget(state)
        again: dict[int, list[Ticket]] = {}  # by batch, so that a barrier engine gets it back as one
        for ticket in state.let_all_go():
            if ticket.cancelled:
                del self.requests[ticket.request.id]
            elif ticket.request.id in event.answered:
                self._fail(ticket, "engine_lost")
            else:
                again.setdefault(ticket.batch_id, []).append(ticket)
        for unanswered in again.values():
            self._run_again(unanswered, "engine_lost", avoid=event.engine)
        self._floor.note(state, self._now_s)  # for others that share its GPU
        self._start_reserved(state)

    def _close(self, state: EngineState) -> None:
        state.ready = False
        self._floor.note(state, self._now_s)
        self._floor.paused.pop(state.info.name, None)
        self._count_engines()

    def _on_drain_requested(self, event: DrainRequested) -> None:
        self._draining = True
        for lane in self.lanes.values():
            self._form_all(lane)

    def _on_timer_fired(self, event: TimerFired) -> None:
        for lane in self._helpless:
            since_s = lane.helpless_since_s
            assert since_s is not None, "it has an engine that works"
            if self._now_s < since_s + self._engine_wait_s:
                continue
            if lane.ready:  # an engine is on trial: those who come from now on wait as long for it
                lane.helpless_since_s = self._now_s
            if not lane.waiting:
                continue
            for ticket in [ticket for ticket in self.requests.values() if ticket.request.model == lane.model]:
                if ticket.place is not Place.RUNNING:
                    self._leave_queue(ticket)
                    self._fail(ticket, "no_engine")

    def _on_dispatch_solved(self, event: DispatchSolved) -> None:
        lane = self.lanes[event.model]
        assert lane.planner is not None, "a plan that nobody asked for"
        merged = lane.planner.follow(event.plan)
        if merged:
            self._sort_into_queues(lane)

    # ---- release: bin -> formed batch -------------------------------------------------------------------------

    def _form(self, lane: Lane, queue: BinQueue) -> None:
        """Let everything go that this bin's release lets go whether or not an engine is free."""
        while (size := self._release_size(lane, queue, Room.NONE)) > 0:
            self._form_batch(lane, queue, size)

    def _form_all(self, lane: Lane) -> None:
        for queue in lane.bins:
            self._form(lane, queue)

    def _earliest_due_s(self, lane: Lane) -> float | None:
        room = self._in_order.room(lane)
        dues = [lane.release.due_at_s(queue, room) for queue in lane.bins if len(queue)]
        return min([due_s for due_s in dues if due_s is not None], default=None)

    def _release_size(self, lane: Lane, queue: BinQueue, room: Room) -> int:
        if not len(queue) or self._direct is not None:
            return 0
        if self._draining:
            return min(len(queue), self._batch_size)
        return lane.release.size(queue, self._now_s, room)

    def _form_batch(self, lane: Lane, queue: BinQueue, size: int) -> None:
        lane.formed.push(self._form_of(lane, queue, queue.take(size)))

    def _form_of(self, lane: Lane, queue: BinQueue, tickets: list[Ticket]) -> FormedBatch:
        """A batch of these, which have left their bin."""
        batch_id = next(self.batch_ids)
        for ticket in tickets:
            ticket.place = Place.FORMED
            ticket.batch_id = batch_id
            ticket.formed_at_s = self._now_s
        return FormedBatch(batch_id, queue.index, self._now_s, tickets, lane.model)

    def _sort_into_queues(self, lane: Lane) -> None:
        lane.sort_into_queues()
        self._form_all(lane)

    # ---- onto the engines -------------------------------------------------------------------------------------

    def _start(self, engine: EngineState, lane: Lane, batch: FormedBatch, count: int) -> None:
        """Start the first `count` requests of a formed batch."""
        started, tickets = lane.formed.take(batch, count)
        for ticket in tickets:
            ticket.place = Place.RUNNING
            ticket.began = ticket.preempted = False
            engine.start(ticket, self._now_s)
            self._floor.served(ticket.request.prefixes, engine)
        for ticket in tickets:
            ticket.together = len(engine.running)
        self.waiting -= len(tickets)
        lane.waiting -= len(tickets)
        self._floor.note(engine, self._now_s)
        self._actions.append(StartBatch(engine.info.name, started))

    def _preempt(self, engine: EngineState) -> None:
        """Stop the batch that runs there."""
        stopped = [ticket for ticket in engine.running.values() if not ticket.cancelled]
        for ticket in stopped:
            ticket.preempted = True
        ids = tuple([ticket.request.id for ticket in stopped])
        self._floor.note(engine, self._now_s)
        self._actions.append(PreemptBatch(engine.info.name, next(iter(engine.running.values())).batch_id, ids))

    def _start_reserved(self, engine: EngineState) -> None:
        """What was to make room has: the batch that it made room for goes first."""
        worker = engine.worker
        if self._direct is not None and worker.reserved is not None and not worker.busy:
            self._fail_late_requests()
            self._direct.start_reserved(worker, self._now_s)

    def _count_engines(self) -> None:
        """After every change of who is ready, whose circuit is closed, and who serves what."""
        if self._direct is not None:
            self._direct.look_again()
        for lane in self.lanes.values():
            ready = self._floor.serving(lane.model)
            lane.ready = len(ready)
            lane.slots = min([engine.info.slots for engine in ready if engine.info.slots], default=0)
            if any(engine.circuit.closed for engine in ready):
                lane.helpless_since_s = None
            elif lane.helpless_since_s is None:
                lane.helpless_since_s = self._now_s
        self._helpless = [lane for lane in self.lanes.values() if lane.helpless_since_s is not None]

    def _judge(self, engine: EngineState, tell: Callable[[Circuit], None]) -> None:
        """Tell its circuit something; say so when that opens or closes it."""
        before_s = engine.circuit.open_until_s
        tell(engine.circuit)
        until_s = engine.circuit.open_until_s
        if until_s == before_s:
            return
        if until_s is None:
            self._floor.paused.pop(engine.info.name, None)
            self._actions.append(ReportCircuit(engine.info.name, None))
        else:
            self._floor.paused[engine.info.name] = engine
            self._actions.append(ReportCircuit(engine.info.name, until_s - self._now_s))
        self._count_engines()

    # ---- leaving ----------------------------------------------------------------------------------------------

    def _see_answer(self, ticket: Ticket, output_tokens: float, ran_s: float) -> None:
        if output_tokens <= 0:
            return
        lane = self.lanes[ticket.request.model]
        if lane.see_answer(ticket, output_tokens, ran_s):
            r = lane.trust.rank_correlation
            self._actions.append(ReportTrust(lane.trust.trusted, None if math.isnan(r) else r, lane.model))
            self._sort_into_queues(lane)

    def _see_pace(self, engine: EngineState, model: str, together: int, output_tokens: float, ran_s: float) -> None:
        if self._direct is not None:
            pace = engine.pace
            engine.took(model, together, output_tokens, ran_s)
            if engine.pace != pace:
                self._direct.look_again()

    def _leave_queue(self, ticket: Ticket) -> None:
        self.lanes[ticket.request.model].leave(ticket)
        self.waiting -= 1

    def _fail(self, ticket: Ticket, reason: FailReason) -> None:
        del self.requests[ticket.request.id]
        retry_after_s = None if reason == "deadline_exceeded" else self._retry_after_s()
        self._actions.append(FailRequest(ticket.request.id, reason, retry_after_s))

    def _run_again(self, tickets: list[Ticket], reason: FailReason, avoid: str) -> None:
        """Requests of one batch go back to its place among the formed batches; those tried too often fail."""
        for ticket in [ticket for ticket in tickets if ticket.retries >= self._retries_max]:
            self._fail(ticket, reason)
            tickets.remove(ticket)
        if not tickets:
            return
        first = tickets[0]
        lane = self.lanes[first.request.model]
        for ticket in tickets:
            ticket.retries += 1
            ticket.place = Place.FORMED
            ticket.engine = ""
            self._watch_deadline(ticket, lane)  # it may have been dropped while the request ran
        self.waiting += len(tickets)
        lane.waiting += len(tickets)
        longest = max(ticket.bin for ticket in tickets)  # a batch may have shorter ones along
        batch = FormedBatch(first.batch_id, longest, first.formed_at_s, tickets, lane.model)
        batch.avoid = avoid
        lane.formed.push(batch)

    def _wait_again(self, ticket: Ticket) -> None:
        """A request that made room for others waits again, as long as it can be in time.

        It stops nobody in its turn: those would stop others, without end.
        """
        lane = self.lanes[ticket.request.model]
        assert self._direct is not None, "only a direct order preempts"
        late_at_s = self._direct.late_at_s(ticket, lane)
        if late_at_s is not None and late_at_s <= self._now_s:
            self._fail(ticket, "deadline_exceeded")
            return
        lane.take_back(ticket)
        self.waiting += 1
        self._watch_deadline(ticket, lane)

    def _fail_late_requests(self) -> None:
        """Requests that cannot be in time any more end at once while they wait; those that run are left to their
        engine.
        """
        while self._deadlines:
            late_at_s, request_id = self._deadlines[0]
            ticket = self.requests.get(request_id)
            waits = ticket is not None and ticket.place is not Place.RUNNING
            if waits and late_at_s > self._now_s:
                break
            heapq.heappop(self._deadlines)  # come, or of no more concern
            if ticket is None or not waits:
                continue
            if self._direct is not None:  # answers may have become shorter, or engines faster, since it came
                now_late_s = self._direct.late_at_s(ticket, self.lanes[ticket.request.model])
                if now_late_s is not None and now_late_s > self._now_s:
                    heapq.heappush(self._deadlines, (now_late_s, request_id))
                    continue
            self._leave_queue(ticket)
            self._fail(ticket, "deadline_exceeded")
        if len(self._deadlines) > 2 * len(self.requests) + ENTRIES_SPARE:  # far ones of requests that are over
            alive = {id_: late_at_s for late_at_s, id_ in self._deadlines if id_ in self.requests}
            self._deadlines = [(late_at_s, id_) for id_, late_at_s in alive.items()]
            heapq.heapify(self._deadlines)

    def _retry_after_s(self) -> float | None:
        return self._rate.drain_time_s(self.waiting)

    # ---- moving to another scheduler ---------------------------------------------------------------------------

    def hand_over(self, wanted: Callable[[Request], bool]) -> list[Ticket]:
        """Requests that wait and are wanted elsewhere leave, in order of arrival, and nobody is told. Those for which
        an engine is being emptied stay.
        """
        reserved = [worker.reserved[1] for worker in self._floor.workers.values() if worker.reserved is not None]
        leaving = [
            ticket
            for ticket in self.requests.values()
            if (ticket.place is Place.BIN or (ticket.place is Place.FORMED and ticket.formed not in reserved))
            and wanted(ticket.request)
        ]
        for ticket in leaving:
            self._leave_queue(ticket)
            del self.requests[ticket.request.id]
        return sorted(leaving, key=lambda ticket: (ticket.arrived_at_s, ticket.request.id))

    def adopt(self, tickets: list[Ticket], now_s: float) -> list[Action]:
        """They wait here from now on, as long as they have waited already."""
        self._begin(now_s)
        for ticket in tickets:
            lane = self.lane(ticket.request.model)
            self.requests[ticket.request.id] = ticket
            queue = lane.take_back(ticket)
            self.waiting += 1
            self._watch_deadline(ticket, lane)
            self._form(lane, queue)
        for lane in {ticket.request.model: self.lanes[ticket.request.model] for ticket in tickets}.values():
            self._sort_into_queues(lane)  # they may have come before those that wait here
            if self._direct is not None:
                self._grown[lane.model] = lane
        return self._settle()

    # ---- promises ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant of the state (DESIGN's laws that one state can show). O(requests)."""
        in_bins = {ticket.request.id: ticket for lane in self.lanes.values() for queue in lane.bins for ticket in queue}
        formed = [batch for lane in self.lanes.values() for batch in lane.formed.batches()]
        formed += [worker.reserved[1] for worker in self._floor.workers.values() if worker.reserved is not None]
        in_formed = {request_id: ticket for batch in formed for request_id, ticket in batch.tickets.items()}
        running = {
            request_id: ticket for engine in self.engines.values() for request_id, ticket in engine.running.items()
        }
        assert len(in_bins) + len(in_formed) + len(running) == len(self.requests), "a request is in two places"
        for place, tickets in (
            (Place.BIN, in_bins),
            (Place.FORMED, in_formed),
            (Place.RUNNING, running),
        ):
            for request_id, ticket in tickets.items():
                assert self.requests.get(request_id) is ticket, f"request {request_id} is not accounted for"
                assert ticket.place is place, f"request {request_id} is in {place}, its ticket says {ticket.place}"
        assert self.waiting == len(in_bins) + len(in_formed), "waiting is miscounted"
        for lane in self.lanes.values():
            waiting = sum(len(queue) for queue in lane.bins) + len(lane.formed)
            assert lane.waiting == waiting, f"{lane.model!r} has {waiting} waiting requests, not {lane.waiting}"
        for engine in self.engines.values():
            self._check_engine(engine)
        if self._direct is not None:
            self._direct.check(self._now_s)
        else:
            self._in_order.check(self._now_s)

    def _check_engine(self, engine: EngineState) -> None:
        info, name = engine.info, engine.info.name
        if info.barrier:
            batches = {ticket.batch_id for each in engine.worker.engines for ticket in each.running.values()}
            assert len(batches) <= 1, f"the barrier worker of {name} runs batches {batches}"
        assert (name in self._floor.free) == engine.takes(self._now_s), f"{name} is wrongly listed as free or busy"
        totals = sum(ticket.total_tokens for ticket in engine.running.values())
        assert engine.total_tokens == totals, f"{name} has {engine.total_tokens} tokens on account, not {totals}"
        trial = engine.circuit.trial
        assert trial is None or trial in engine.running, f"{name} waits for a trial that it does not run"
        if engine.worker.reserved is not None:
            assert engine.worker.busy, f"{name} is kept free for a batch that could run"
