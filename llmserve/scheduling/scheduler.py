"""The scheduler: told what happened and what time it is, it answers with what to do.

It reads no clock, opens no socket and awaits nothing, so the live server, the simulator and the tests drive this
very object. Requests go predicted length -> bin -> formed batch -> engine:

    RequestArrived -> [bin queue] --release--> [formed queue] --order--> StartBatch -> RequestEnded | BatchEnded
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from bins.edges import OnlineEdges
from bins.risk import risk
from llmserve.request import Request
from llmserve.scheduling.affinity import PrefixMemory
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.engine_state import EngineState
from llmserve.scheduling.lengths import SeenLengths
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    BatchEnded,
    DispatchSolved,
    DrainRequested,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    FailReason,
    FailRequest,
    ReportCircuit,
    ReportTrust,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.planner import Planner
from llmserve.scheduling.queues import ENTRIES_SPARE, BinQueue, FormedBatch, FormedQueue, Place, Ticket
from llmserve.scheduling.rates import CompletionRate, ServiceTime
from llmserve.scheduling.release import Release, Room
from llmserve.scheduling.trust import Trust

IMBALANCE = 0.25  # share of its slots by which an engine may be busier than another and still be preferred for a prefix


class Scheduler:
    """See the module. All times are seconds on the caller's clock, which must never run backwards.

    release             when a bin lets a batch go (scheduling/release.py)
    order               key of a formed batch; the smallest runs next (scheduling/order/)
    edges               bins over the predictions' risk or median, fitted again as requests come in
    batch_size          largest batch that a bin forms
    trust               whether predictions rank answers; while they do not, one bin serves
    by_risk             bins by what a request does to its batch (bins/risk.py), not by its median
    queue_requests_max  requests that may wait; one more is refused with `queue_full`
    retries_max         times that a request whose engine failed before its first byte runs again
    engine_wait_s       how long requests wait when no engine is up before they fail with `no_engine`
    circuit             a fresh circuit breaker for each engine
    planner             asks for plans, where the release follows one
    seen                is told how long answers became, for edges and plans that go by it
    queue               of a bin, by its index: which of those that wait a batch takes
    """

    def __init__(
        self,
        *,
        release: Release,
        order: Callable[[FormedBatch], float],
        edges: OnlineEdges,
        batch_size: int,
        trust: Trust,
        circuit: Callable[[], Circuit],
        planner: Planner | None = None,
        seen: SeenLengths | None = None,
        queue: Callable[[int], BinQueue] = BinQueue,
        by_risk: bool = True,
        queue_requests_max: int = 100_000,
        retries_max: int = 2,
        engine_wait_s: float = 30.0,
    ) -> None:
        self.edges = edges
        self.trust = trust
        self.bins = [queue(index) for index in range(edges.bins)]
        self.formed = FormedQueue(order)
        self.engines: dict[str, EngineState] = {}
        self.requests: dict[int, Ticket] = {}
        self.waiting = 0  # requests in bins and in formed batches
        self._release = release
        self._planner = planner
        self._seen = seen
        self._batch_size = batch_size
        self._by_risk = by_risk
        self._queue_requests_max = queue_requests_max
        self._retries_max = retries_max
        self._engine_wait_s = engine_wait_s
        self._new_circuit = circuit
        self._free: dict[str, EngineState] = {}  # those that take something now
        self._open: dict[str, EngineState] = {}  # those whose circuit's pause is not over
        self._others = 0  # ready engines but one
        self._slots = 0  # of the ready engine that has least
        self._prefixes = PrefixMemory()
        self._service = ServiceTime()
        self._deadlines: list[tuple[float, int]] = []
        self._rate = CompletionRate()
        self._batches_formed = 0
        self._due_s: float | None = None  # when the next bin's release is due by time alone
        self._draining = False
        self._any_ready = False
        self._helpless_since_s: float | None = 0.0  # None while an engine is ready and its circuit closed
        self._look_again_at_s: float | None = None  # when the first batch may fit an engine's memory
        self._now_s = 0.0
        self._actions: list[Action] = []
        self._handlers: dict[type, Callable[..., None]] = {
            RequestArrived: self._on_request_arrived,
            RequestCancelled: self._on_request_cancelled,
            RequestEnded: self._on_request_ended,
            BatchEnded: self._on_batch_ended,
            EngineReady: self._on_engine_ready,
            EngineClosed: self._on_engine_closed,
            EngineLost: self._on_engine_lost,
            DrainRequested: self._on_drain_requested,
            TimerFired: self._on_timer_fired,
            DispatchSolved: self._on_dispatch_solved,
        }

    # ---- the one entrance -------------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event; return what must be done now, in order."""
        assert now_s >= self._now_s, f"time ran backwards: {now_s} after {self._now_s}"
        self._now_s = now_s
        actions: list[Action] = []
        self._actions = actions
        if self._open:
            self._end_pauses()
        self._handlers[type(event)](event)
        if self._deadlines:
            self._fail_late_requests()
        self._look_again_at_s = None
        if self.waiting:
            # What a plan or an arrival says of one bin may let another one go.
            if self._release.plans or (self._due_s is not None and now_s >= self._due_s):
                self._form_all()
            if self._free:
                self._dispatch()
        if self._release.timed:
            self._due_s = self._earliest_due_s()
        if not self.requests:
            self._rate.idle()
        if self._planner is not None and self._any_ready:
            trusted = self.trust.trusted
            if observed := self._planner.wants(now_s, self.edges, self._others + 1, self._slots, trusted=trusted):
                actions.append(SolveDispatch(observed))
        return actions

    @property
    def wake_at_s(self) -> float | None:
        """When the scheduler wants TimerFired at the latest; None: not before something happens."""
        at_s = self._deadlines[0][0] if self._deadlines else None
        if not self.waiting:
            return at_s
        due_s, look_s, helpless_s = self._due_s, self._look_again_at_s, self._helpless_since_s
        if due_s is None and look_s is None and helpless_s is None and not self._open:
            return at_s  # nearly always, and it is asked after every step
        times = [at_s, due_s, look_s, *[engine.circuit.open_until_s for engine in self._open.values()]]
        if helpless_s is not None:
            times.append(helpless_s + self._engine_wait_s)
        return min([time_s for time_s in times if time_s is not None], default=None)

    # ---- events -----------------------------------------------------------------------------------------------

    def _on_request_arrived(self, event: RequestArrived) -> None:
        request = event.request
        assert request.id not in self.requests, f"request {request.id} arrived twice"
        refusal = self._refusal(request)
        if refusal is not None:
            retry_after_s = None if refusal == "deadline_exceeded" else self._retry_after_s()
            self._actions.append(FailRequest(request.id, refusal, retry_after_s))
            return
        score = self._score_of(request)
        queue = self.bins[self._queue_for(self._bin_of(score))]
        service = self._service
        expected = request.expected_tokens if self.trust.trusted else None
        tokens = service.tokens_mean if expected is None else expected
        ticket = Ticket(
            request,
            queue.index,
            self._now_s,
            score,
            tokens=tokens,
            service_s=tokens * service.seconds_per_token,
            service_mean_s=service.tokens_mean * service.seconds_per_token,
        )
        ticket.alike = self._alike(ticket)
        self.requests[request.id] = ticket
        queue.append(ticket)
        self.waiting += 1
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.id))
        self._form(queue)

    def _score_of(self, request: Request) -> float | None:
        """What its bin goes by, tokens."""
        if self._by_risk and request.quantiles:
            return risk(request.quantiles, self._batch_size)
        return request.predicted_tokens

    def _alike(self, ticket: Ticket) -> float:
        """What its neighbours in a window go by, tokens; of all the same while predictions are not trusted."""
        if not self.trust.trusted:
            return 0.0
        return ticket.expected_tokens if ticket.score is None else ticket.score

    def _bin_of(self, score: float | None) -> int:
        if score is None:
            return 0
        self.edges.observe(score)
        return self.edges.bin_of(score)

    def _queue_for(self, bin_index: int) -> int:
        """Where a request that arrives in a bin waits; while predictions are not trusted, all wait together."""
        if self._planner is not None:
            self._planner.arrived(bin_index, self._now_s)
        if not self.trust.trusted:
            return 0
        return bin_index if self._planner is None else self._planner.queue_of(bin_index)

    def _refusal(self, request: Request) -> FailReason | None:
        if self._draining:
            return "draining"
        if not self._any_ready:
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
        self._list(engine)
        if event.fault and event.retryable and not ticket.cancelled:
            self._run_again([ticket], "engine_failed", avoid=event.engine)
            return
        del self.requests[event.request_id]
        self._rate.observe(self._now_s)
        if event.outcome == "completed":
            self._see_answer(ticket, event.output_tokens, ran_s)

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
        self._list(engine)

    def _on_engine_ready(self, event: EngineReady) -> None:
        name = event.engine.name
        state = self.engines.get(name)
        if state is None:
            state = self.engines[name] = EngineState(event.engine, self._new_circuit())
        if not state.ready:  # whatever was wrong with it, it has come back
            state.circuit = self._new_circuit()
            self._open.pop(name, None)
        state.info, state.ready = event.engine, True
        self._list(state)
        self._count_engines()

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
        self._prefixes.forget(event.engine)
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

    def _close(self, state: EngineState) -> None:
        state.ready = False
        self._list(state)
        self._open.pop(state.info.name, None)
        self._count_engines()

    def _on_drain_requested(self, event: DrainRequested) -> None:
        self._draining = True
        self._form_all()

    def _on_timer_fired(self, event: TimerFired) -> None:
        since_s = self._helpless_since_s
        if since_s is not None and self._now_s >= since_s + self._engine_wait_s:
            if self._any_ready:  # an engine is on trial: those who come from now on wait as long for it
                self._helpless_since_s = self._now_s
            for ticket in [ticket for ticket in self.requests.values() if ticket.place is not Place.RUNNING]:
                self._leave_queue(ticket)
                self._fail(ticket, "no_engine")

    def _on_dispatch_solved(self, event: DispatchSolved) -> None:
        assert self._planner is not None, "a plan that nobody asked for"
        merged = self._planner.follow(event.plan)
        if merged:
            self._sort_into_queues()

    # ---- release: bin -> formed batch -------------------------------------------------------------------------

    def _form(self, queue: BinQueue) -> None:
        """Let everything go that this bin's release lets go whether or not an engine is free."""
        while (size := self._release_size(queue, Room.NONE)) > 0:
            self._form_batch(queue, size)

    def _form_all(self) -> None:
        for queue in self.bins:
            self._form(queue)

    def _earliest_due_s(self) -> float | None:
        room = self._room()
        dues = [self._release.due_at_s(queue, room) for queue in self.bins if len(queue)]
        return min([due_s for due_s in dues if due_s is not None], default=None)

    def _release_size(self, queue: BinQueue, room: Room) -> int:
        if not len(queue):
            return 0
        if self._draining:
            return min(len(queue), self._batch_size)
        return self._release.size(queue, self._now_s, room)

    def _room(self) -> Room:
        """What engines have for a batch that would be formed now, which one before it would not take.

        What looks ahead is not idle; but where only idle engines wait for company, busy ones take all they can.
        """
        first = self.formed.first()
        if first is not None and not (
            self._waits_for_another_engine(first)
            and all(self._waits_for_another_engine(batch) for batch in self.formed.batches())
        ):
            return Room.NONE
        room = Room.NONE
        for engine in self._free.values():
            if engine.running and (engine.room > 0 or self._release.plans):
                return Room.JOIN
            if engine.room > 0:
                room = Room.IDLE
        return room

    def _form_batch(self, queue: BinQueue, size: int) -> None:
        tickets = queue.take(size)
        self._batches_formed += 1
        for ticket in tickets:
            ticket.place = Place.FORMED
            ticket.batch_id = self._batches_formed
            ticket.formed_at_s = self._now_s
        self.formed.push(FormedBatch(self._batches_formed, queue.index, self._now_s, tickets))

    def _form_for_free_engine(self) -> bool:
        """An engine would idle: offer it the bin of greatest urgency. True if one let go."""
        room = self._room() if self._release.fills else Room.NONE
        if room is Room.NONE:
            return False
        sizes = [(queue, self._release_size(queue, room)) for queue in self.bins]
        willing = [(queue, size) for queue, size in sizes if size > 0]
        if not willing:
            return False
        urgency = self._release.urgency
        self._form_batch(*max(willing, key=lambda pair: (urgency(pair[0], self._now_s), -pair[0].oldest_at_s)))
        return True

    # ---- order: formed batch -> engine ------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Start formed batches, in order, until no engine takes the next one."""
        held: list[FormedBatch] = []
        while self._free:
            batch = self.formed.first()
            if batch is None:
                if not self._form_for_free_engine():
                    break
                continue
            engine = self._engine_for(batch)
            if engine is not None:
                self._start(engine, batch)
            elif self._waits_for_another_engine(batch):
                self.formed.set_aside(batch)
                held.append(batch)
            else:  # it waits for room: nothing overtakes it, or large ones would wait for ever
                looks = [engine.look_again_at_s for engine in self._free.values()]
                # One that was not asked now may remember a refusal of long ago.
                later = [at_s for at_s in looks if at_s is not None and at_s > self._now_s]
                self._look_again_at_s = min(later, default=None)
                break
        for batch in held:
            self.formed.put_back(batch)

    def _waits_for_another_engine(self, batch: FormedBatch) -> bool:
        """Only the engine that has just failed it has room, and another works."""
        if batch.avoid is None or not self._another_works(batch.avoid):
            return False
        return not any(engine.room > 0 for name, engine in self._free.items() if name != batch.avoid)

    def _engine_for(self, batch: FormedBatch) -> EngineState | None:
        """Where the batch, or its first request, starts now; None: nowhere yet.

        Free slots come first, wherever they are; a place to wait in at a busy engine is used only while more wait here
        than there are other engines, so that a slot which becomes free elsewhere still finds one. Never the engine that
        failed this batch while another works.
        """
        engines = list(self._free.values())
        if batch.avoid is not None and self._another_works(batch.avoid):
            engines = [engine for engine in engines if engine.info.name != batch.avoid]
        free = [engine for engine in engines if engine.room > 0]
        if not free and len(self.formed) > self._others:
            free = engines
        ticket = next(iter(batch.tickets.values()))
        per_token_s = self._service.seconds_per_token
        fitting = [engine for engine in free if engine.fits(ticket, self._now_s, per_token_s)]
        if self._release.plans:  # what runs is joined, or an idle engine would not have waited for company
            fitting = [engine for engine in fitting if engine.running] or fitting
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        return self._preferred(fitting, ticket.request.prefixes)

    def _preferred(self, engines: list[EngineState], prefixes: tuple[int, ...]) -> EngineState:
        """The one with the most room; or one that has served the same prefix lately and is hardly busier."""
        best = min(engines, key=lambda engine: (-engine.room, engine.info.name))
        if not prefixes:
            return best
        near = {
            engine.info.name: engine for engine in engines if engine.room + IMBALANCE * engine.info.slots >= best.room
        }
        known = self._prefixes.among(prefixes, near)
        return min([near[name] for name in known], key=lambda engine: -engine.room, default=best)

    def _another_works(self, name: str) -> bool:
        return any(engine.ready and engine.circuit.closed for other, engine in self.engines.items() if other != name)

    def _start(self, engine: EngineState, batch: FormedBatch) -> None:
        started, tickets = self.formed.take(batch, self._count(engine, batch))
        for ticket in tickets:
            ticket.place = Place.RUNNING
            engine.start(ticket, self._now_s)
            if len(self.engines) > 1:
                self._prefixes.served(ticket.request.prefixes, engine.info.name)
        self.waiting -= len(tickets)
        self._list(engine)
        self._actions.append(StartBatch(engine.info.name, started))

    def _count(self, engine: EngineState, batch: FormedBatch) -> int:
        """Requests of the batch that start at once: all that have a slot; where memory is scarce, one by one."""
        if engine.info.barrier or (engine.info.tokens_max is None and engine.circuit.closed):
            return max(1, engine.room)
        return 1

    def _list(self, engine: EngineState) -> None:
        """Note whether an engine takes something now; after every change of what it runs."""
        if engine.takes(self._now_s):
            self._free[engine.info.name] = engine
        else:
            self._free.pop(engine.info.name, None)

    def _count_engines(self) -> None:
        """After every change of who is ready, and whose circuit is closed."""
        ready = [engine for engine in self.engines.values() if engine.ready]
        self._any_ready = bool(ready)
        self._others = max(0, len(ready) - 1)
        self._slots = min([engine.info.slots for engine in ready], default=0)
        if any(engine.circuit.closed for engine in ready):
            self._helpless_since_s = None
        elif self._helpless_since_s is None:
            self._helpless_since_s = self._now_s

    # ---- circuits ---------------------------------------------------------------------------------------------

    def _judge(self, engine: EngineState, tell: Callable[[Circuit], None]) -> None:
        """Tell its circuit something; say so when that opens or closes it."""
        before_s = engine.circuit.open_until_s
        tell(engine.circuit)
        until_s = engine.circuit.open_until_s
        if until_s == before_s:
            return
        if until_s is None:
            self._open.pop(engine.info.name, None)
            self._actions.append(ReportCircuit(engine.info.name, None))
        else:
            self._open[engine.info.name] = engine
            self._actions.append(ReportCircuit(engine.info.name, until_s - self._now_s))
        self._count_engines()

    def _end_pauses(self) -> None:
        for name, engine in list(self._open.items()):
            if engine.circuit.takes(self._now_s):
                del self._open[name]
                self._list(engine)

    # ---- leaving ----------------------------------------------------------------------------------------------

    def _see_answer(self, ticket: Ticket, output_tokens: float, ran_s: float) -> None:
        if output_tokens <= 0:
            return
        self._service.observe(ran_s, output_tokens)
        if self._seen is not None:
            self._seen.observe(ticket.score, output_tokens)
        if self._planner is not None:
            self._planner.answered()
        if ticket.score is None:
            return
        if self.trust.observe(ticket.request, ticket.score, output_tokens):
            r = self.trust.rank_correlation
            self._actions.append(ReportTrust(self.trust.trusted, None if math.isnan(r) else r))
            self._sort_into_queues()

    def _sort_into_queues(self) -> None:
        """Who waits in a bin goes to where it would wait had it come now, first come first served."""
        waiting = sorted(
            [ticket for queue in self.bins for ticket in queue.take_all()],
            key=lambda ticket: (ticket.arrived_at_s, ticket.request.id),
        )
        for ticket in waiting:
            index = self.edges.bin_of(ticket.score) if ticket.score is not None and self.trust.trusted else 0
            ticket.bin = index if self._planner is None else self._planner.queue_of(index)
            ticket.alike = self._alike(ticket)
            self.bins[ticket.bin].append(ticket)
        self._form_all()

    def _leave_queue(self, ticket: Ticket) -> None:
        if ticket.place is Place.BIN:
            self.bins[ticket.bin].remove(ticket)
        else:
            self.formed.remove(ticket)
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
        for ticket in tickets:
            ticket.retries += 1
            ticket.place = Place.FORMED
            ticket.engine = ""
            if ticket.request.deadline_s is not None:  # it may have been dropped while the request ran
                heapq.heappush(self._deadlines, (ticket.request.deadline_s, ticket.request.id))
        if tickets:
            self.waiting += len(tickets)
            batch = FormedBatch(tickets[0].batch_id, tickets[0].bin, tickets[0].formed_at_s, tickets)
            batch.avoid = avoid
            self.formed.push(batch)

    def _fail_late_requests(self) -> None:
        """Requests whose deadline has come while they wait end at once; those that run are left to their engine."""
        while self._deadlines:
            deadline_s, request_id = self._deadlines[0]
            ticket = self.requests.get(request_id)
            waits = ticket is not None and ticket.place is not Place.RUNNING
            if waits and deadline_s > self._now_s:
                break
            heapq.heappop(self._deadlines)  # come, or of no more concern
            if ticket is not None and waits:
                self._leave_queue(ticket)
                self._fail(ticket, "deadline_exceeded")
        if len(self._deadlines) > 2 * len(self.requests) + ENTRIES_SPARE:  # far ones of requests that are over
            alive = {id_: deadline_s for deadline_s, id_ in self._deadlines if id_ in self.requests}
            self._deadlines = [(deadline_s, id_) for id_, deadline_s in alive.items()]
            heapq.heapify(self._deadlines)

    def _retry_after_s(self) -> float | None:
        return self._rate.drain_time_s(self.waiting)

    # ---- promises ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant of the state (DESIGN's laws that one state can show). O(requests)."""
        in_bins = {ticket.request.id: ticket for queue in self.bins for ticket in queue}
        in_formed = {
            request_id: ticket for batch in self.formed.batches() for request_id, ticket in batch.tickets.items()
        }
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
        assert self.waiting == len(in_bins) + len(in_formed) == self._waiting_by_queue(), "waiting is miscounted"
        for engine in self.engines.values():
            self._check_engine(engine)
        self._check_nothing_idles()

    def _waiting_by_queue(self) -> int:
        return sum(len(queue) for queue in self.bins) + len(self.formed)

    def _check_engine(self, engine: EngineState) -> None:
        info, name = engine.info, engine.info.name
        if info.barrier:
            batches = {ticket.batch_id for ticket in engine.running.values()}
            assert len(batches) <= 1, f"barrier engine {name} runs batches {batches}"
        assert (name in self._free) == engine.takes(self._now_s), f"{name} is wrongly listed as free or busy"
        totals = sum(ticket.total_tokens for ticket in engine.running.values())
        assert engine.total_tokens == totals, f"{name} has {engine.total_tokens} tokens on account, not {totals}"
        trial = engine.circuit.trial
        assert trial is None or trial in engine.running, f"{name} waits for a trial that it does not run"

    def _check_nothing_idles(self) -> None:
        """Nothing waits past its release while an engine that could run it is idle."""
        for queue in self.bins:
            assert self._release_size(queue, Room.NONE) == 0, f"bin {queue.index} waits past its release"
        if not self._free:
            return
        for batch in self.formed.batches():
            assert self._engine_for(batch) is None, f"batch {batch.id} waits while an engine is free"
            if not self._waits_for_another_engine(batch):
                return  # it waits for room, and all others for it
        room = self._room()
        if room is not Room.NONE:
            for queue in self.bins:
                assert self._release_size(queue, room) == 0, f"bin {queue.index} waits while an engine is free"
