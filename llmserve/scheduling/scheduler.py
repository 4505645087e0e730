"""The scheduler: events and the time go in, actions come out.

The scheduler reads no clock, opens no socket and awaits nothing, so the live server, the simulator and the tests drive
the same object. A request goes predicted length -> bin -> formed batch -> engine:

    RequestArrived -> [bin queue] --release--> [formed queue] --order--> StartBatch -> RequestEnded | BatchEnded

Each model has its own queues. This module handles events; only dispatch.py starts and preempts batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from llmserve.scheduling import sharing
from llmserve.scheduling.admission import Admission
from llmserve.scheduling.choice.batch_lane import BatchLane
from llmserve.scheduling.choice.dispatch import Dispatch
from llmserve.scheduling.choice.orders import Order
from llmserve.scheduling.circuit import Circuit, Faults
from llmserve.scheduling.engine_book import EngineBook
from llmserve.scheduling.engines import EngineState, Worker
from llmserve.scheduling.group import Group
from llmserve.scheduling.limits import Limits
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    AnswerBegan,
    BatchEnded,
    CacheChanged,
    DispatchSolved,
    DrainRequested,
    EngineClosed,
    EngineExpected,
    EngineLost,
    EngineReady,
    Event,
    ForecastsRevised,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    ServedElsewhere,
    SolveDispatch,
    TimerFired,
    Tuned,
)
from llmserve.scheduling.programs.programs import Programs
from llmserve.scheduling.queues.model_queues import ModelQueues, Tally
from llmserve.scheduling.queues.waiting import FormedBatch, Run
from llmserve.scheduling.request_book import RequestBook


class Scheduler:
    """The state machine. All times are seconds on the caller's clock, which must never run backwards.

    wake_at_s  latest time for the next TimerFired; None: no timer is needed before the next event
    preempts   whether the order preempts, so that AnswerBegan events are needed

    new_queues  makes a model's queues
    dispatch    starts batches on engines, by an order
    circuit     makes a circuit breaker for a new engine
    programs    what is known of programs; None: nothing yet
    """

    def __init__(
        self,
        *,
        new_queues: Callable[[str, Tally], ModelQueues],
        dispatch: Dispatch,
        circuit: Callable[[], Circuit],
        limits: Limits,
        programs: Programs | None = None,
    ) -> None:
        self.group = Group(new_queues, programs or Programs())
        self.wake_at_s: float | None = None
        self.preempts = dispatch.order.preempts
        self._dispatch = dispatch
        self._book = RequestBook(self.group, dispatch.forming, dispatch.order, dispatch.times, limits)
        self.requests, self.engines = self._book.by_id, self.group.pool.engines
        self._engines = EngineBook(self.group, self._book, circuit)
        self._faults = Faults(lambda name: self.engines[name].circuit)
        self._admission = Admission(
            self.group, self._book, self._engines.awaits, dispatch.forming, self._faults, limits
        )
        self.batch_lane = BatchLane(self.group, self._book, dispatch, self._admission, limits.item_stops)
        self._solving: dict[str, deque[SolveDispatch]] = {}  # by model; the first of each is being solved
        self._now_s = 0.0
        self._actions: list[Action] = []
        self._handlers: dict[type, Callable[..., None]] = {
            RequestArrived: self._on_request_arrived,
            RequestAdopted: self._on_request_adopted,
            RequestCancelled: self._on_request_cancelled,
            RequestEnded: self._on_request_ended,
            AnswerBegan: self._on_answer_began,
            ForecastsRevised: self._on_forecasts_revised,
            BatchEnded: self._on_batch_ended,
            EngineExpected: lambda event: self._engines.expect(event.engine),
            EngineReady: self._on_engine_ready,
            EngineClosed: self._on_engine_closed,
            EngineLost: self._on_engine_lost,
            DrainRequested: self._on_drain_requested,
            TimerFired: self._on_timer_fired,
            DispatchSolved: self._on_dispatch_solved,
            ServedElsewhere: self._on_served_elsewhere,
            Tuned: self._on_tuned,
            CacheChanged: self._on_cache_changed,
        }

    @property
    def order(self) -> Order:
        return self._dispatch.order

    @property
    def waiting(self) -> int:
        return self.group.tally.waiting

    @property
    def models(self) -> dict[str, ModelQueues]:
        """Queues by model."""
        return self.group.queues

    def queues(self, model: str) -> ModelQueues:
        """The model's entry in `models`, made on first use."""
        return self.group.queues_of(model, self._now_s)

    def has(self, request_id: int) -> bool:
        """Whether the request waits or runs, as a batch item or online."""
        return request_id in self.requests or request_id in self.batch_lane.waiting

    def wants_first_token(self, request_id: int) -> bool:
        """Whether an AnswerBegan at the first token of a running request tells how long its engine loads models, or
        that its long prompt is computed.
        """
        pool = self.group.pool
        if not (pool.sharing or pool.computing):
            return False
        queued = self.requests.get(request_id)
        if queued is None or queued.run is None:
            return False
        return queued.run.engine in pool.sharing or request_id in self.engines[queued.run.engine].prefills

    # ---- entry point ------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event. Return the actions to carry out now, in order."""
        assert now_s >= self._now_s, f"time ran backwards: {now_s} after {self._now_s}"
        self._now_s = now_s
        actions = self._actions = self._dispatch.actions = []
        self._book.begin(now_s, actions)
        self._handlers[type(event)](event)
        self._reconcile()
        return actions

    def _reconcile(self) -> None:
        """After every event: fail late requests, start batches, ask for new plans, and set `wake_at_s`."""
        if self.batch_lane.waiting:
            self.batch_lane.promote_due()
        if self._book.deadlines.next_at_s is not None:
            self._book.fail_late()
        if self._book.touched:
            self._dispatch_all(self.group)
        self.wake_at_s = self._book.next_late_at_s()
        if (at_s := self.group.wake_at_s) is not None and (self.wake_at_s is None or at_s < self.wake_at_s):
            self.wake_at_s = at_s
        if self.batch_lane.waiting:
            self.wake_at_s = self.batch_lane.next_wake_s(self.wake_at_s)

    def _dispatch_all(self, group: Group) -> None:
        """Start requests, then items of batch jobs, ask for new plans, and set the group's wake-up time."""
        if group.pool.resting:
            group.pool.look_at_rests(self._now_s)
        if group.pool.sharing:
            sharing.look(group.pool, group.tally)
        dues_s = self._dispatch.dispatch(group, self._now_s)
        if self.batch_lane.waiting or group.tally.items:
            self.batch_lane.dispatch()
        if not group.present:
            group.idle()
        for queues in group.planned:
            self._ask_for_plan(queues)
        if dues_s or group.wake_at_s is not None or group.pool.paused or group.pool.resting:
            group.note_wake(dues_s, self._now_s)

    # ---- requests ---------------------------------------------------------------------------------------------

    def _on_request_arrived(self, event: RequestArrived) -> None:
        request = event.request
        assert request.id not in self.requests, f"request {request.id} arrived twice"
        waiting = len(self.batch_lane.waiting) if request.background else self.group.tally.waiting
        if (refusal := self._admission.refusal(request, waiting)) is not None:
            self._book.report_failed(request.id, refusal)
        elif request.background:
            self.batch_lane.arrive(request)
        else:
            self._admission.enter(request)

    def _on_request_adopted(self, event: RequestAdopted) -> None:
        """Count a request as running that no batch of this scheduler has started."""
        request, name = event.request, event.engine.name
        assert request.id not in self.requests, f"request {request.id} is adopted, but known"
        if name not in self.engines:
            self._engines.expect(event.engine)
        queued = self._admission.adopt(request)
        self._dispatch.adopt(self.group, queued, self.engines[name], event.ran_s, self._now_s)
        assert queued.run is not None
        queued.run.began = event.began
        self._book.touch()

    def _on_request_cancelled(self, event: RequestCancelled) -> None:
        queued = self.requests.get(event.request_id)
        if queued is None or queued.cancelled:
            self.batch_lane.remove(event.request_id)
            return  # the request ended or was refused before its cancellation arrived
        self._book.touch()
        if queued.run is not None:
            queued.cancelled = True
            self._actions.append(AbortRequest(queued.run.engine, event.request_id))
        else:
            self._book.queues_of(queued).leave(queued)
            self._book.drop(queued)

    def _on_answer_began(self, event: AnswerBegan) -> None:
        if (queued := self.requests.get(event.request_id)) is not None:
            self._book.touch()
            if queued.run is not None:
                queued.run.began = True
                self.engines[queued.run.engine].note_first_token(queued.run, self._now_s)

    def _on_request_ended(self, event: RequestEnded) -> None:
        engine = self.engines.get(event.engine)
        if engine is None:
            return
        pool, run = self.group.pool, engine.running.get(event.request_id)
        self._book.touch()
        if run is None:  # stale: the engine was lost in between, and the request was requeued or has ended
            return
        queued = run.queued
        if engine.loaded is not None and event.outcome == "completed" and event.output_tokens > 0 and not run.began:
            tokens_s = self._book.queues_of(queued).service.seconds_per_token * event.output_tokens
            engine.note_first_token(run, self._now_s - tokens_s)
        self._judge(event, engine, run)
        if event.rest_s is not None:
            engine.rests.refused(queued.request.model, event.rest_s, run.started_at_s, self._now_s)
            pool.resting[event.engine] = engine
        engine.remove((run,), self._now_s)
        pool.refresh(engine, self._now_s)
        if queued.turn is not None and event.outcome != "completed":
            self.group.programs.left(queued, event.engine)
        if queued.cancelled:
            self._finish(event, engine, run)
        elif event.retryable and (event.refused or event.fault):
            if event.refused:
                self._book.run_elsewhere(run)
            else:
                self._book.run_again([run], "engine_failed", avoid=event.engine)
            queued.refund()
        elif event.outcome == "cancelled" and run.stopping:
            waits = self.batch_lane if queued.request.background and not engine.info.barrier else self._book
            waits.wait_again(queued)
            queued.refund()
        else:
            self._finish(event, engine, run)
        self._freed(engine)

    def _judge(self, event: RequestEnded, engine: EngineState, run: Run) -> None:
        """Let the engine's circuit and rests learn how a request has ended."""
        if event.fault:
            self._report(self._faults.failed(event.engine, run.queued, self._now_s))
        elif event.outcome != "cancelled" and not event.refused:
            if changed := self._faults.answered(event.engine, (run.queued,), self._now_s):
                self._report(changed)
            if engine.rests:
                engine.rests.answered(run.queued.request.model, run.started_at_s)

    def _finish(self, event: RequestEnded, engine: EngineState, run: Run) -> None:
        """Forget a request that runs no more, and learn from its answer."""
        completed = event.outcome == "completed"
        if event.cached_tokens is not None:
            run.queued.cached_tokens = event.cached_tokens
        ran_s = math.inf if completed else self._now_s - run.started_at_s
        queued, queues = run.queued, self._book.queues_of(run.queued)
        queues.true_up(queued, event.output_tokens, ran_s)
        if queued.turn is not None:
            programs, tokens = self.group.programs, event.output_tokens or queued.likely_tokens
            if completed:
                programs.answered(queued, engine, queues, tokens, event.tools, self._now_s)
            else:
                programs.gone(queued)
        self._book.end((run,))
        if completed:
            if event.cached_tokens is not None and run.queued.request.blocks:
                self.group.pool.residency.ended(event.engine, run.hit_tokens, event.cached_tokens)
            self._book.record_answers((run,), {event.request_id: event.output_tokens}, event.decode_s)
            if engine.info.speeds:
                self._book.record_pace(engine, run, run.concurrency, event.output_tokens)

    def _report(self, changed: Iterable[str]) -> None:
        """Report the circuits that a fault or an answer has changed. changed : names of their engines"""
        for name in changed:
            self._engines.report_circuit(name)

    def _on_batch_ended(self, event: BatchEnded) -> None:
        engine = self.engines.get(event.engine)
        if engine is None:
            return
        ended = [run for run in engine.running.values() if run.batch_id == event.batch_id]
        self._report(self._faults.answered(event.engine, [run.queued for run in ended], self._now_s))
        if ended:
            if engine.rests:
                engine.rests.answered(ended[0].queued.request.model, ended[0].started_at_s)
            engine.remove(ended, self._now_s)
            for run in ended:
                self._book.queues_of(run.queued).true_up(
                    run.queued, event.output_tokens.get(run.queued.request.id, 0.0)
                )
                if run.queued.turn is not None:
                    self.group.programs.gone(run.queued)
            self._book.end(ended)
            self._book.record_answers(ended, event.output_tokens)
            if engine.info.speeds:
                longest = max(event.output_tokens.values(), default=0.0)
                self._book.record_pace(engine, ended[0], len(event.output_tokens), longest)
        self.group.pool.refresh(engine, self._now_s)
        self._freed(engine)

    def _freed(self, engine: EngineState) -> None:
        """After runs have left an engine: start the reserved batch."""
        self._book.touch()
        if engine.worker.reserved is not None:
            self._end_reservation(engine.worker)

    def _end_reservation(self, worker: Worker) -> None:
        end_reservation(worker, self.group, self._book, self._dispatch)

    # ---- engines ----------------------------------------------------------------------------------------------

    def _on_engine_ready(self, event: EngineReady) -> None:
        self._engines.ready(event.engine)
        self._end_reservation(self.engines[event.engine.name].worker)  # it may serve other models now

    def _on_engine_closed(self, event: EngineClosed) -> None:
        state = self.engines.get(event.engine)
        if state is not None and self._engines.close(state, expected=event.expected):
            self._end_reservation(state.worker)

    def _on_engine_lost(self, event: EngineLost) -> None:
        state = self.engines.get(event.engine)
        if state is not None:
            self._engines.lose(state, event.answered, expected=event.expected)
            self._freed(state)

    # ---- drain, timer, plans ----------------------------------------------------------------------------------

    def _on_drain_requested(self, event: DrainRequested) -> None:
        self._dispatch.forming.draining = True
        self.batch_lane.fail("draining")
        self._book.touch()
        for queues in self.group.queues.values():
            self._dispatch.forming.form_all_early(queues, self._now_s)

    def _on_forecasts_revised(self, event: ForecastsRevised) -> None:
        self._book.revise(event.changes)
        self.batch_lane.revise(event.changes)

    def _on_timer_fired(self, event: TimerFired) -> None:
        if self.batch_lane.waiting:  # the group's own wake-up time, if it has come, is noticed in every step
            self._book.touch()
        self._book.fail_without_engine()

    def _ask_for_plan(self, queues: ModelQueues) -> None:
        if queues.slots and (observed := queues.wants_plan(self._now_s)) is not None:
            pending = self._solving.setdefault(queues.model, deque())
            pending.append(SolveDispatch(observed, queues.model))
            if len(pending) == 1:  # one question per model at a time; queues that were made anew ask another
                self._actions.append(pending[0])

    def _on_dispatch_solved(self, event: DispatchSolved) -> None:
        if (pending := self._solving.pop(event.model, None)) is not None:
            pending.popleft()
            if pending:
                self._solving[event.model] = pending
                self._actions.append(pending[0])
        if (queues := self.group.queues.get(event.model)) is not None:  # else they were removed since the question
            self._book.touch()
            if queues.follow(event.plan):
                self._book.sort_into_queues(queues)

    def _on_served_elsewhere(self, event: ServedElsewhere) -> None:
        """Charge shares for service elsewhere. Another share may be next now, with a batch that fits an engine."""
        self.group.serve_elsewhere(event.model, event.tokens)
        self._book.touch()

    def _on_tuned(self, event: Tuned) -> None:
        self._dispatch.tune(event.settings, self.group)
        self._book.touch()

    def _on_cache_changed(self, event: CacheChanged) -> None:
        """Note what an engine tells of its cache. That starts nothing: a later start may choose another engine."""
        if event.engine in self.engines:
            self.group.pool.residency.changed(event.engine, event.stored, event.removed, cleared=event.cleared)


def end_reservation(worker: Worker, group: Group, book: RequestBook, dispatch: Dispatch) -> None:
    """Start the batch for which the worker is reserved, if it is idle; or give the batch up, if it would wait in vain.

    The requests that do not start wait in their bin.
    """
    if worker.reserved is None or (worker.running and not _is_in_vain(*worker.reserved)):
        return
    waiting = list(worker.reserved[1].requests.values())
    book.fail_late()
    dispatch.start_reserved(group, worker, book.now_s)
    for queued in [queued for queued in waiting if queued.run is None]:
        book.watch(queued)  # batch times may have changed since its arrival


def _is_in_vain(engine: EngineState, batch: FormedBatch) -> bool:
    """Whether the engine, reserved for the batch, takes no more requests of it."""
    return not (engine.ready and engine.circuit.closed and engine.serves(batch.model))
