"""The state of each request, from its arrival to its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from llmserve.request import Request
from llmserve.scheduling.choice.batch_times import Deadlines, Timetable
from llmserve.scheduling.choice.orders import Order
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.group import Forming, Group
from llmserve.scheduling.limits import Limits
from llmserve.scheduling.messages import Action, FailReason, FailRequest, ReportDue, ReportTrust
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import FormedBatch, QueuedRequest, Run

WATCHED_AT_ONCE = 512  # waiting requests that are watched anew in one step
WATCHED_EVERY_S = 0.001  # between steps that watch them, if nothing else happens
REFUSALS_MAX = 8  # engines asked for one request: where a large fleet refuses all, each request asks a few only


class RequestBook:
    """The record of each request, from its arrival to its end.

    by_id      all requests that wait or run
    deadlines  of the waiting requests
    engine_waits  ends of the waits for a working engine
    touched    whether a dispatch must follow before the step ends
    now_s, actions  time of the step in progress, and the actions decided so far

    forming      how bins release batches; order : which batch runs next; times : how long batches take
    """

    def __init__(self, group: Group, forming: Forming, order: Order, times: Timetable, limits: Limits) -> None:
        self.by_id: dict[int, QueuedRequest] = {}
        self.touched = False
        self.deadlines = Deadlines(self._late_at_s)
        self.engine_waits = Deadlines(self._gives_up_at_s)
        self._unwatched: list[QueuedRequest] = []  # requests that are still to be watched anew
        self._limits = limits
        self._group = group
        self._forming = forming
        self._preempts = order.preempts
        self._times = times if order.by_times else None
        self.now_s = 0.0
        self.actions: list[Action] = []

    def begin(self, now_s: float, actions: list[Action]) -> None:
        """Begin a step, with its time and list of actions. A dispatch follows if the wake-up time has come."""
        self.now_s, self.actions, group = now_s, actions, self._group
        if self._unwatched:
            self._watch_some()
        over = group.pool.paused and group.pool.end_pauses(now_s)
        self.touched = bool(over) or (group.wake_at_s is not None and group.wake_at_s <= now_s)

    def _late_at_s(self, queued: QueuedRequest, now_s: float) -> float | None:
        """When the request becomes late; None: never. With a fixed order, a request is late at its deadline."""
        if self._times is None or queued.request.deadline_s is None:
            return queued.request.deadline_s
        queues = self.queues_of(queued)
        return self._times.late_at_s(queued, queues.engines, queues.binning.tokens(queued.bin).least, now_s)

    def _gives_up_at_s(self, queued: QueuedRequest, now_s: float) -> float | None:
        """When the request has waited long enough for a working engine; None: an engine works."""
        since_s = self.queues_of(queued).no_engine_since_s
        return None if since_s is None else max(since_s, queued.arrived_at_s) + self._limits.engine_wait_s

    def next_late_at_s(self) -> float | None:
        """Earliest time at which a waiting request may fail, or more have to be watched; None: none can."""
        if self._unwatched:
            return self.now_s + WATCHED_EVERY_S
        if self.engine_waits.next_at_s is None:
            return self.deadlines.next_at_s
        if not any(queues.waiting for queues in self._group.without_engine):
            self.engine_waits.clear()
        times_s = (self.deadlines.next_at_s, self.engine_waits.next_at_s)
        return min([at_s for at_s in times_s if at_s is not None], default=None)

    def watch(self, queued: QueuedRequest) -> None:
        """Watch the deadline of a request that waits, and its wait for a working engine."""
        self.deadlines.watch(queued, self.now_s)
        self.engine_waits.watch(queued, self.now_s)

    def watch_all(self, queues: ModelQueues) -> None:
        """Watch all waiting requests of a model anew: WATCHED_AT_ONCE now, and the others in later steps."""
        self._unwatched += queues.in_no_order()
        self._watch_some()

    def _watch_some(self) -> None:
        for queued in self._unwatched[-WATCHED_AT_ONCE:]:
            if queued.run is None and queued.request.id in self.by_id:
                self.watch(queued)
        del self._unwatched[-WATCHED_AT_ONCE:]

    def invalidate(self) -> None:
        """Drop cached batch times. Call after engines have come, gone, or changed their models or speed."""
        if self._times is not None:
            self._times.invalidate()

    def touch(self) -> None:
        """Have a dispatch follow before the step ends."""
        self.touched = True

    def queues_of(self, queued: QueuedRequest) -> ModelQueues:
        return self._group.queues[queued.request.model]

    def enter(self, queued: QueuedRequest, queues: ModelQueues) -> None:
        """Count a request that has arrived, and waits in these queues."""
        self._group.enter(queues)
        if queued.request.deadline_s is not None or queues.no_engine_since_s is not None:
            self.watch(queued)
        if self._preempts:
            self._group.arrived_in[queues.model] = queues

    def end(self, runs: Sequence[Run]) -> None:
        """Forget the requests of one batch, and count their completions."""
        for run in runs:
            self._group.ended(run.queued, self.now_s)
        self.forget([run.queued for run in runs])

    def forget(self, requests: Sequence[QueuedRequest]) -> None:
        """Remove requests of one model."""
        for queued in requests:
            del self.by_id[queued.request.id]
            if queued.request.background:
                self.queues_of(queued).count_items(-1)
        self._group.leave(self.queues_of(requests[0]), len(requests))

    def drop(self, queued: QueuedRequest) -> None:
        """Forget a request that does not run, and the queues of its model if no engine lists the model."""
        if queued.turn is not None:
            self._group.programs.gone(queued)
        self.forget([queued])
        if self.queues_of(queued).no_engine_since_s is not None:
            self._group.forget((queued.request.model,))

    def fail(self, queued: QueuedRequest, reason: FailReason) -> None:
        self.drop(queued)
        self.report_failed(queued.request.id, reason)

    def report_failed(self, request_id: int, reason: FailReason) -> None:
        group = self._group
        retry_after_s = None if reason == "deadline_exceeded" else group.drain_time_s(group.waiting_s)
        self.actions.append(FailRequest(request_id, reason, retry_after_s))

    def fail_late(self) -> None:
        """Fail waiting requests that can no longer meet their deadline. Running requests go on."""
        for queued in self.deadlines.late(self.by_id, self.now_s):
            self.touch()
            self.queues_of(queued).leave(queued)
            self.fail(queued, "deadline_exceeded")

    def fail_without_engine(self) -> None:
        """Fail waiting requests that have waited for a working engine for long enough."""
        for queued in self.engine_waits.late(self.by_id, self.now_s):
            self.touch()
            self.queues_of(queued).leave(queued)
            self.fail(queued, "no_engine")

    def record_answers(
        self, runs: Sequence[Run], output_tokens: Mapping[int, float], decode_s: float | None = None
    ) -> None:
        """Record the answers of one batch. output_tokens : by request id; 0 where unknown.  decode_s : of a stream"""
        engine, queues = self._group.pool.engines[runs[0].engine], self.queues_of(runs[0].queued)
        for run in runs:
            request = run.queued.request
            if (tokens := output_tokens.get(request.id, 0.0)) <= 0:
                continue
            ran_s = engine.served_s(run, self.now_s)
            if request.background:
                queues.items.answered(self.now_s, ran_s, tokens)
            if queues.record_answer(run.queued, tokens, ran_s, decode_s):
                trust, r = queues.binning.trust, queues.binning.trust.rank_correlation
                self.actions.append(ReportTrust(trust.trusted, None if math.isnan(r) else r, queues.model))
                self.sort_into_queues(queues)

    def record_pace(self, engine: EngineState, run: Run, together: int, output_tokens: float) -> None:
        """together : size of a barrier engine's batch.  output_tokens : of the longest answer."""
        model = run.queued.request.model
        was_proven = self.now_s < engine.proven_until_s(model)
        changed = engine.record_run(run, together, output_tokens, self.now_s)
        if changed or not was_proven:
            self.invalidate()
        queues = self._group.queues.get(model)
        if was_proven or queues is None or self._times is None:
            return
        if all(self.now_s < other.proven_until_s(model) for other in queues.engines):
            self.watch_all(queues)  # the new pace changes when the requests become late

    def run_again(self, runs: list[Run], reason: FailReason, avoid: str) -> None:
        """Put a batch's requests back among the formed batches; fail those without retries left. avoid : the engine."""
        first = runs[0]
        again = []
        for queued in [run.queued for run in runs]:
            self.count_as_online(queued)
            if queued.retries >= self._limits.retries_max:
                self.fail(queued, reason)
            else:
                queued.retries += 1
                again.append(queued)
        self._wait_for_another(again, first, avoid)

    def run_elsewhere(self, run: Run) -> None:
        """Put a refused request back among the formed batches; fail it when every working engine, or REFUSALS_MAX
        engines, have refused it.
        """
        queued = run.queued
        self.count_as_online(queued)
        queued.refused_by |= {run.engine}
        pool = self._group.pool
        if len(queued.refused_by) >= REFUSALS_MAX or not pool.others_work(queued.refused_by, queued.request.model):
            self.fail(queued, "refused")
        else:
            self._wait_for_another([queued], run, run.engine)

    def _wait_for_another(self, again: list[QueuedRequest], first: Run, avoid: str) -> None:
        """Let requests of one batch wait for another engine, as one batch. first : of the runs of the batch"""
        if not again:
            return
        queues = self.queues_of(again[0])
        self.touch()
        longest = max([queued.bin for queued in again])  # a batch may also hold requests of shorter bins
        batch = FormedBatch(first.batch_id, longest, first.formed_at_s, again, queues.model)
        for queued in again:
            self.watch(queued)  # the entries may have been dropped while the request ran
        queues.take_back_batch(batch, avoid)

    def wait_again(self, queued: QueuedRequest) -> None:
        """Put a preempted request back into its bin, or fail the request if it is late.

        The request itself preempts nothing, for that could go on without end.
        """
        queues = self.queues_of(queued)
        self.count_as_online(queued)
        late_at_s = self._late_at_s(queued, self.now_s)
        if late_at_s is not None and late_at_s <= self.now_s:
            self.fail(queued, "deadline_exceeded")
            return
        for queue in queues.take_back([queued]):
            self._forming.form_early(queues, queue, self.now_s)
        self.touch()
        self.watch(queued)

    def count_as_online(self, queued: QueuedRequest) -> None:
        """Let a batch item that ran in vain wait as an online request, for it has begun once."""
        if queued.request.background:
            self.queues_of(queued).count_items(-1)
            queued.request, queued.charged = msgspec.structs.replace(queued.request, background=False), 0.0
            self.actions.append(ReportDue(queued.request.id))

    def revise(self, changes: Mapping[int, Callable[[Request], Request]]) -> None:
        """Change the forecasts of waiting requests, by id. They preempt nothing, which could go on without end."""
        waiting: dict[ModelQueues, list[tuple[QueuedRequest, Request]]] = {}
        for request_id, change in changes.items():
            if (queued := self.by_id.get(request_id)) is not None and queued.run is None:
                waiting.setdefault(self.queues_of(queued), []).append((queued, change(queued.request)))
        for queues, requests in waiting.items():
            self.touch()
            for queue in queues.revise(requests):
                self._forming.form_early(queues, queue, self.now_s)
            for queued, _ in requests:
                self.deadlines.watch(queued, self.now_s)

    def sort_into_queues(self, queues: ModelQueues) -> None:
        self.touch()
        queues.sort_into_queues()
        self._forming.form_all_early(queues, self.now_s)
