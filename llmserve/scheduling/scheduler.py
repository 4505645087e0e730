"""The scheduler: told what happened and what time it is, it answers with what to do.

It reads no clock, opens no socket and awaits nothing, so the live server, the simulator and the tests drive this very
object. A request goes predicted length -> bin -> formed batch -> engine:

    RequestArrived -> [bin queue] --release--> [formed queue] --order--> StartBatch -> RequestEnded | BatchEnded

Each model's requests have queues of their own in each serving group (scheduling/groups.py; without a plan there is one
group). This module knows what becomes of each request; dispatch.py alone gives engines something to do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from llmserve.request import Request
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.deadlines import Deadlines
from llmserve.scheduling.dispatch import Dispatch
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.groups import Groups
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
    PlanChanged,
    PlanGroups,
    ReportCircuit,
    ReportTrust,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    ServingGroup,
    SolveDispatch,
    TimerFired,
)
from llmserve.scheduling.model_queues import Group, ModelQueues, Tally
from llmserve.scheduling.orders import MomentOrder, Order
from llmserve.scheduling.queues import FormedBatch, QueuedRequest, Run
from llmserve.scheduling.rates import GroupRates


class Scheduler:
    """See the module. All times are seconds on the caller's clock, which must never run backwards.

    wake_at_s  when it wants TimerFired at the latest; None: not before something happens
    preempts   whether it wants to be told when answers begin

    new_queues          makes a model's queues in a group
    order               which batch runs next
    batch_size          largest batch
    circuit             a fresh circuit breaker for each engine
    plan                serving groups to begin with; (): one group serves all
    rates               when set, asks for another plan (PlanGroups) when arrivals have become others
    queue_requests_max  requests that may wait in a group; one more is refused with `queue_full`
    retries_max         times that a request whose engine failed before its first byte runs again
    engine_wait_s       how long requests wait when no engine is up before they fail with `no_engine`
    """

    def __init__(
        self,
        *,
        new_queues: Callable[[str, str, Tally], ModelQueues],
        order: Order,
        batch_size: int,
        circuit: Callable[[], Circuit],
        plan: tuple[ServingGroup, ...] = (),
        rates: GroupRates | None = None,
        queue_requests_max: int = 100_000,
        retries_max: int = 2,
        engine_wait_s: float = 30.0,
    ) -> None:
        self.requests: dict[int, QueuedRequest] = {}
        self.groups = Groups(lambda name: Group(name, new_queues), plan)
        self.wake_at_s: float | None = None  # see the class
        self.preempts = isinstance(order, MomentOrder) and order.preempts
        self._dispatch = Dispatch(order, batch_size)
        self._deadlines = Deadlines(self._dispatch.times if self._dispatch.moment else None)
        self._rates = rates
        self._new_circuit = circuit
        self._queue_requests_max = queue_requests_max
        self._retries_max = retries_max
        self._engine_wait_s = engine_wait_s
        self._solving: dict[str, deque[tuple[Group, SolveDispatch]]] = {}  # by model; the first was asked
        self._touched: dict[str, Group] = {}  # by name, to be looked at before the step ends
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
            PlanChanged: self._on_plan_changed,
        }

    @property
    def engines(self) -> dict[str, EngineState]:
        return self.groups.engines

    @property
    def plan(self) -> tuple[ServingGroup, ...]:
        return self.groups.layout.groups

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum([group.tally.waiting for group in self.groups])

    @property
    def models(self) -> dict[str, ModelQueues]:
        """Queues by model: of the group whose requests of that model are; else of the first that has some."""
        names = {model: None for group in self.groups for model in group.queues}
        return {model: self.queues(model) for model in names}

    def queues(self, model: str) -> ModelQueues:
        """As `models` has them; made when there are none."""
        known = self.groups.queues_of(model)
        return known or self.groups.own(Request(-1, model=model)).queues_of(model, self._now_s)

    # ---- the one entrance -------------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event; return what must be done now, in order."""
        assert now_s >= self._now_s, f"time ran backwards: {now_s} after {self._now_s}"
        self._now_s = now_s
        actions = self._actions = self._dispatch.actions = []
        rates = self._rates.look(now_s) if self._rates is not None else None
        self._touched = self.groups.due(now_s) if self.groups.only is None else self.groups.alone(now_s)
        self._handlers[type(event)](event)
        self._settle()
        if rates is not None:
            actions.append(PlanGroups(rates))
        return actions

    def _settle(self) -> None:
        """After whatever happened: who is late fails, who can start does, who wants a plan asks for it."""
        if self._deadlines.next_at_s is not None:
            self._fail_late_requests()
        for group in self._touched.values():
            dues_s = self._dispatch.settle(group, self._now_s)
            if not group.present:
                group.rate.idle()
            for queues in group.planned:
                self._ask_for_plan(group, queues)
            group.wake_at_s = self._wake_of(group, dues_s) if group.tally.waiting else None
        if self.groups.only is None:
            self.groups.drop_empty()
        at_s = self._deadlines.next_at_s
        for group in self.groups.by_name.values():
            if group.wake_at_s is not None and (at_s is None or group.wake_at_s < at_s):
                at_s = group.wake_at_s
        if self._rates is not None and self._rates.look_at_s is not None:
            at_s = self._rates.look_at_s if at_s is None else min(at_s, self._rates.look_at_s)
        self.wake_at_s = at_s

    def _wake_of(self, group: Group, dues_s: list[float]) -> float | None:
        """When something of what waits in a group may change by time alone."""
        times_s = dues_s
        if group.pool.paused:
            pauses_s = [engine.circuit.open_until_s for engine in group.pool.paused.values()]
            times_s += [until_s for until_s in pauses_s if until_s is not None]
        for queues in group.without_engine:
            if queues.waiting and queues.no_engine_since_s is not None:
                times_s.append(queues.no_engine_since_s + self._engine_wait_s)
        return min(times_s) if times_s else None

    def _touch(self, group: Group) -> None:
        self._touched[group.name] = group

    # ---- requests ---------------------------------------------------------------------------------------------

    def _on_request_arrived(self, event: RequestArrived) -> None:
        request = event.request
        assert request.id not in self.requests, f"request {request.id} arrived twice"
        if self._rates is not None:
            self._rates.observe(request.stream, request.model)
        group = self.groups.only or self.groups.group_for(request)
        queues = group.queues.get(request.model)
        if queues is None and group.pool.serving(request.model):  # else it gets none: anyone could ask for anything
            queues = group.queues_of(request.model, self._now_s)
        self._touch(group)
        refusal = self._refusal(request, group, queues)
        if queues is None or refusal is not None:
            assert refusal is not None, "there is no engine for it"
            self._say_failed(request.id, refusal, group)
            return
        queued, queue = queues.admit(request, self._now_s)
        self.requests[request.id] = queued
        group.enter(queues)
        self._deadlines.watch(queued, queues, self._now_s)
        self._dispatch.forming.form_early(queues, queue, self._now_s)
        if self.preempts:
            group.grown[request.model] = queues

    def _refusal(self, request: Request, group: Group, queues: ModelQueues | None) -> FailReason | None:
        if self._dispatch.forming.draining:
            return "draining"
        if queues is None or not queues.engines:
            return "no_engine"
        if group.tally.waiting >= self._queue_requests_max:
            return "queue_full"
        if request.deadline_s is not None and request.deadline_s <= self._now_s:
            return "deadline_exceeded"
        return None

    def _on_request_cancelled(self, event: RequestCancelled) -> None:
        queued = self.requests.get(event.request_id)
        if queued is None or queued.cancelled:
            return  # it ended, or was refused, before the news of its client came
        self._touch(self._group_of(queued))
        if queued.run is not None:
            queued.cancelled = True
            self._actions.append(AbortRequest(queued.run.engine, event.request_id))
        else:
            self._queues_of(queued).leave(queued)
            self._forget(queued)

    def _on_answer_began(self, event: AnswerBegan) -> None:
        queued = self.requests.get(event.request_id)
        if queued is not None:
            self._touch(self._group_of(queued))
            if queued.run is not None:
                queued.run.began = True

    def _on_request_ended(self, event: RequestEnded) -> None:
        engine = self.engines.get(event.engine)
        run = engine.running.get(event.request_id) if engine is not None else None
        if engine is None or run is None:
            if engine is not None:
                self._touch(self.groups.group_of(engine))
            return  # stale: the engine was lost with it, and the request lives elsewhere or has ended
        queued, circuit, before_s = run.queued, engine.circuit, engine.circuit.open_until_s
        if event.fault:
            if queued.retries == 0:
                circuit.fault(event.request_id, self._now_s)
        elif event.outcome != "cancelled":
            circuit.success((event.request_id,))
        if circuit.open_until_s != before_s:
            self._say_circuit(engine)
        ran_s = self._now_s - run.started_at_s
        engine.let_go(run)
        self.groups.group_of(engine).pool.look_at(engine, self._now_s)
        if event.fault and event.retryable and not queued.cancelled:
            self._run_again([run], "engine_failed", avoid=event.engine)
        elif event.outcome == "cancelled" and run.stopping and not queued.cancelled:
            self._wait_again(queued)
        else:
            self._end(queued)
            if event.outcome == "completed":
                self._see_answer(queued, event.output_tokens, ran_s)
                # It began beside so many, and ends beside so many: it ran beside about the mean of both.
                beside = (run.concurrency + len(engine.running) + 2) // 2
                self._see_pace(engine, queued.request.model, beside, event.output_tokens, ran_s)
        self._freed(engine)

    def _on_batch_ended(self, event: BatchEnded) -> None:
        engine = self.engines.get(event.engine)
        if engine is None:
            return
        ended = [run for run in engine.running.values() if run.batch_id == event.batch_id]
        if not engine.circuit.closed:
            engine.circuit.success([run.queued.request.id for run in ended])
            if engine.circuit.closed:
                self._say_circuit(engine)
        else:
            engine.circuit.success(())
        for run in ended:
            engine.let_go(run)
            self._end(run.queued)
            tokens = event.output_tokens.get(run.queued.request.id, 0)
            self._see_answer(run.queued, tokens, self._now_s - run.started_at_s)
        if ended:
            ran_s = self._now_s - ended[0].started_at_s
            longest = max(event.output_tokens.values(), default=0.0)
            self._see_pace(engine, ended[0].queued.request.model, len(event.output_tokens), longest, ran_s)
        self.groups.group_of(engine).pool.look_at(engine, self._now_s)
        self._freed(engine)

    def _freed(self, engine: EngineState) -> None:
        """Something has left the engine: whoever room was made for begins, or the worker joins its next group."""
        worker = engine.worker
        self._touch(self.groups.group_of(engine))
        if worker.reserved is not None and not worker.busy:
            waiting = list(worker.reserved[1].requests.values())
            group = self.groups.by_name[waiting[0].group] if waiting else self.groups.group_of(engine)
            self._fail_late_requests()
            self._dispatch.start_reserved(group, worker, self._now_s)
            for queued in [queued for queued in waiting if queued.run is None]:
                self._deadlines.watch(queued, self._queues_of(queued), self._now_s)  # more is known than when it came
            self._place_again(waiting)
        if worker.next is not None and not worker.busy:
            self._engines_changed([self.groups.join(worker, self._now_s)])

    def _end(self, queued: QueuedRequest) -> None:
        self._forget(queued)
        self._group_of(queued).rate.observe(self._now_s)

    def _forget(self, queued: QueuedRequest) -> None:
        del self.requests[queued.request.id]
        group = self.groups.by_name[queued.group]
        group.leave(group.queues[queued.request.model])

    def _see_answer(self, queued: QueuedRequest, output_tokens: float, ran_s: float) -> None:
        if output_tokens <= 0:
            return
        queues = self._queues_of(queued)
        if queues.see_answer(queued, output_tokens, ran_s):
            r = queues.trust.rank_correlation
            self._actions.append(ReportTrust(queues.trust.trusted, None if math.isnan(r) else r, queues.model))
            self._sort_into_queues(queues)

    def _see_pace(self, engine: EngineState, model: str, together: int, output_tokens: float, ran_s: float) -> None:
        if not engine.info.speeds:
            return
        was_proven = self._now_s < engine.proven_until_s(model)
        changed = engine.took(model, together, output_tokens, ran_s, self._now_s)
        if changed or not was_proven:
            self._deadlines.look_again()
        if not was_proven and self._dispatch.moment:  # what waits may be known now to be late
            group = self.groups.group_of(engine)
            for queued in group.queues[model].dated() if model in group.queues else ():
                self._deadlines.watch(queued, group.queues[model], self._now_s)

    def _fail(self, queued: QueuedRequest, reason: FailReason) -> None:
        self._forget(queued)
        self._say_failed(queued.request.id, reason, self._group_of(queued))

    def _say_failed(self, request_id: int, reason: FailReason, group: Group) -> None:
        retry_after_s = None if reason == "deadline_exceeded" else group.rate.drain_time_s(group.tally.waiting)
        self._actions.append(FailRequest(request_id, reason, retry_after_s))

    def _fail_late_requests(self) -> None:
        """Requests that cannot be in time any more end at once while they wait; those that run are left to their
        engine.
        """
        for queued in self._deadlines.late(self.requests, self._queues_of, self._now_s):
            self._touch(self._group_of(queued))
            self._queues_of(queued).leave(queued)
            self._fail(queued, "deadline_exceeded")

    def _run_again(self, runs: list[Run], reason: FailReason, avoid: str) -> None:
        """Requests of one batch go back to its place among the formed batches; those tried too often fail."""
        first = runs[0]
        again = []
        for queued in [run.queued for run in runs]:
            if queued.retries >= self._retries_max:
                self._fail(queued, reason)
            else:
                queued.retries += 1
                again.append(queued)
        if not again:
            return
        queues = self._queues_of(again[0])
        self._touch(self._group_of(again[0]))
        longest = max([queued.bin for queued in again])  # a batch may have shorter ones along
        batch = FormedBatch(first.batch_id, longest, first.formed_at_s, again, queues.model)
        for queued in again:
            self._deadlines.watch(queued, queues, self._now_s)  # it may have been dropped while the request ran
        queues.take_back_batch(batch, avoid)
        self._place_again(again)

    def _wait_again(self, queued: QueuedRequest) -> None:
        """A request that made room for others waits again, as long as it can be in time.

        It stops nobody in its turn: those would stop others, without end.
        """
        queues = self._queues_of(queued)
        late_at_s = self._deadlines.late_at_s(queued, queues, self._now_s)
        if late_at_s is not None and late_at_s <= self._now_s:
            self._fail(queued, "deadline_exceeded")
            return
        self._dispatch.forming.form_early(queues, queues.take_back(queued), self._now_s)
        self._touch(self._group_of(queued))
        self._deadlines.watch(queued, queues, self._now_s)
        self._place_again([queued])

    # ---- where requests wait ----------------------------------------------------------------------------------

    def _group_of(self, queued: QueuedRequest) -> Group:
        return self.groups.by_name[queued.group]

    def _queues_of(self, queued: QueuedRequest) -> ModelQueues:
        return self.groups.by_name[queued.group].queues[queued.request.model]

    def _sort_into_queues(self, queues: ModelQueues) -> None:
        self._touch(self.groups.by_name[queues.group])
        queues.sort_into_queues()
        self._dispatch.forming.form_all_early(queues, self._now_s)

    def _place_again(self, candidates: Iterable[QueuedRequest]) -> None:
        """Those of them that wait where they would not wait had they come now go to where they would; but those for
        whom an engine is being emptied stay.
        """
        reserved = [engine.worker.reserved[1] for engine in self.engines.values() if engine.worker.reserved is not None]
        moving = [
            queued
            for queued in candidates
            if queued.run is None
            and self.requests.get(queued.request.id) is queued
            and queued.formed not in (reserved or ())
            and self.groups.is_misplaced(self._group_of(queued), queued.request)
        ]
        changed: dict[tuple[str, str], ModelQueues] = {}
        for queued in moving:
            self._touch(self._group_of(queued))
            self._queues_of(queued).leave(queued)
            self._group_of(queued).leave(self._queues_of(queued))
        for queued in sorted(moving, key=lambda queued: (queued.arrived_at_s, queued.request.id)):
            group = self.groups.group_for(queued.request)
            queues = group.queues_of(queued.request.model, self._now_s)
            queues.take_back(queued)
            group.enter(queues)
            self._deadlines.watch(queued, queues, self._now_s)
            self._touch(group)
            if self.preempts:
                group.grown[queues.model] = queues
            changed[queues.group, queues.model] = queues
        for queues in changed.values():
            self._sort_into_queues(queues)  # they may have come before those that wait here

    # ---- engines ----------------------------------------------------------------------------------------------

    def _on_engine_ready(self, event: EngineReady) -> None:
        state = self.engines.get(event.engine.name)
        if state is None:
            state = self.groups.place(event.engine, self._new_circuit())
            group = self.groups.group_of(state)
            group.pool.join(state, self._now_s)
        group = self.groups.group_of(state)
        if not state.ready:  # whatever was wrong with it, it has come back
            state.circuit = self._new_circuit()
            group.pool.paused.pop(event.engine.name, None)
        no_longer = state.models - set(event.engine.models)
        state.know(event.engine)
        state.ready = True
        group.pool.know(state, self._now_s)
        if no_longer:
            group.forget(no_longer)
        for model in event.engine.models or ([] if group.queues else [""]):
            group.queues_of(model, self._now_s)
        self._engines_changed([group])

    def _on_engine_closed(self, event: EngineClosed) -> None:
        state = self.engines.get(event.engine)
        if state is not None and state.ready:
            self._close(state)

    def _close(self, state: EngineState) -> None:
        group = self.groups.group_of(state)
        state.ready = False
        group.pool.paused.pop(state.info.name, None)
        group.pool.know(state, self._now_s)
        self._engines_changed([group])

    def _on_engine_lost(self, event: EngineLost) -> None:
        state = self.engines.get(event.engine)
        if state is None:
            return
        if state.ready:
            self._close(state)
        group = self.groups.group_of(state)
        group.pool.forget_prefixes(state)
        again: dict[int, list[Run]] = {}  # by batch, so that a barrier engine gets it back as one
        for run in state.let_all_go():
            if run.queued.cancelled:
                self._forget(run.queued)
            elif run.queued.request.id in event.answered:
                self._fail(run.queued, "engine_lost")
            else:
                again.setdefault(run.batch_id, []).append(run)
        for unanswered in again.values():
            self._run_again(unanswered, "engine_lost", avoid=event.engine)
        group.pool.look_at(state, self._now_s)  # for others that share its GPU
        self._freed(state)

    def _say_circuit(self, engine: EngineState) -> None:
        """Its circuit has opened, for longer than before or for the first time; or it has closed."""
        group, name, until_s = self.groups.group_of(engine), engine.info.name, engine.circuit.open_until_s
        if until_s is None:
            group.pool.paused.pop(name, None)
            self._actions.append(ReportCircuit(name, None))
        else:
            group.pool.paused[name] = engine
            self._actions.append(ReportCircuit(name, until_s - self._now_s))
        self._circuits_changed(group)

    def _circuits_changed(self, group: Group) -> None:
        self._touch(group)
        self._deadlines.look_again()
        group.see_engines(self._now_s)

    def _engines_changed(self, groups: Iterable[Group]) -> None:
        """Engines have come, gone or moved: those who wait where they no longer should go where they should."""
        for group in groups:
            self._circuits_changed(group)
        if len(self.groups.by_name) > 1:
            self._place_again(list(self.requests.values()))

    # ---- everything else --------------------------------------------------------------------------------------

    def _on_drain_requested(self, event: DrainRequested) -> None:
        self._dispatch.forming.draining = True
        for group in self.groups:
            self._touch(group)
            for queues in group.queues.values():
                self._dispatch.forming.form_all_early(queues, self._now_s)

    def _on_timer_fired(self, event: TimerFired) -> None:
        for group in self.groups:
            if group.wake_at_s is not None and group.wake_at_s <= self._now_s:
                self._touch(group)
                self._give_up_waiting_for_engines(group)

    def _give_up_waiting_for_engines(self, group: Group) -> None:
        for queues in group.without_engine:
            since_s = queues.no_engine_since_s
            assert since_s is not None, "it has an engine that works"
            if self._now_s < since_s + self._engine_wait_s:
                continue
            if queues.engines:  # one is on trial
                queues.wait_anew_for_engines(self._now_s)
            for queued in list(self.requests.values()) if queues.waiting else ():
                if queued.run is None and queued.group == group.name and queued.request.model == queues.model:
                    queues.leave(queued)
                    self._fail(queued, "no_engine")

    def _ask_for_plan(self, group: Group, queues: ModelQueues) -> None:
        if queues.slots and (observed := queues.wants_plan(self._now_s)) is not None:
            asking = self._solving.setdefault(queues.model, deque())
            asking.append((group, SolveDispatch(observed, queues.model)))
            if (
                len(asking) == 1
            ):  # groups that share a model ask one after the other: an answer says only for which model
                self._actions.append(asking[0][1])

    def _on_dispatch_solved(self, event: DispatchSolved) -> None:
        asking = self._solving[event.model]
        group, _ = asking.popleft()
        if asking:
            self._actions.append(asking[0][1])
        else:
            del self._solving[event.model]
        queues = group.queues.get(event.model)
        if self.groups.by_name.get(group.name) is group and queues is not None:  # else they have gone since
            self._touch(group)
            if queues.follow(event.plan):
                self._sort_into_queues(queues)

    def _on_plan_changed(self, event: PlanChanged) -> None:
        self._engines_changed(self.groups.change(event.groups, self._now_s))
        for group in self.groups:
            self._touch(group)
        self._place_again(list(self.requests.values()))
