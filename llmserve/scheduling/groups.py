"""Serving groups: which workers and which requests belong together (Shepherd, Section 3.2).

A plan (`ServingGroup`s; HERD makes them) names workers, models and streams. Each group has its own queues and engines:
the cost of a step does not grow with the number of groups, and a burst in one group delays no other group. The fallback
group gets every worker, model and stream that the plan does not name; without a plan, all.

    where a request waits   in its own group if an engine there serves its model; else in the least loaded group where
                            an engine does; else in a group that an engine for the model will join; else in its own
    when the plan changes   running requests end where they are; waiting requests move to where a new request would
                            wait, and keep their arrival time, deadline and retries; a worker takes no more requests of
                            the group that it leaves, and joins its next group when idle; former groups stay until empty
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.choice.batch_times import Deadlines, Timetable
from llmserve.scheduling.choice.orders import Order
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.engines import EngineState, Worker
from llmserve.scheduling.fair import FairShares
from llmserve.scheduling.group import SERVES, Forming, Group
from llmserve.scheduling.layout import Layout
from llmserve.scheduling.limits import Limits
from llmserve.scheduling.messages import Action, FailReason, FailRequest, ReportDue, ReportTrust, ServingGroup
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import FormedBatch, QueuedRequest, Run, turn_of_arrival

REFUSALS_MAX = 8  # engines that are asked for one request, so that a fleet that refuses all is not asked by each of all


class Groups:
    """The groups at run time, the workers and engines, and which group each belongs to.

    new_group  makes a group, by its name
    plan       the first plan
    by_name    groups of the plan, and older groups that are not empty yet; only : the group, if there is one group
    restless   groups that have a wake-up time or a paused engine, by name: only these are looked at in every step
    engines    all engines that were ever ready, by name
    """

    def __init__(self, new_group: Callable[[str], Group], plan: tuple[ServingGroup, ...] = ()) -> None:
        self.by_name: dict[str, Group] = {}
        self.restless: dict[str, Group] = {}
        self.only: Group | None = None
        self.engines: dict[str, EngineState] = {}
        self._workers: dict[str, Worker] = {}
        self._new_group, self._made = new_group, 0
        self.layout = Layout(plan)
        self._make_groups()

    def __iter__(self) -> Iterator[Group]:
        return iter(self.by_name.values())

    def _make_groups(self) -> None:
        for name in sorted(self.layout.names - set(self.by_name)):
            self.by_name[name] = group = self._new_group(name)
            self._made = group.number = self._made + 1
            group.restless = self.restless
        self.only = next(iter(self)) if len(self.by_name) == 1 else None

    # ---- requests ----

    def own(self, request: Request) -> Group:
        """The group that the plan gives this request to."""
        if self.only is not None:
            return self.only
        return self.by_name[self.layout.group_of(request.stream, request.model)]

    def group_for(self, request: Request) -> Group:
        """The group in which this request waits if it arrives now."""
        own = self.own(request)
        if not self.is_misplaced(own, request):
            return own
        best = self._best(request.model)
        able = [group for group in self if group.ability(request.model) == best]
        return min(able, key=lambda group: (group.load, group.name))

    def is_misplaced(self, group: Group, request: Request) -> bool:
        """Whether the request would wait in another group if it arrived now."""
        if self.only is not None:
            return False
        own = self.own(request)
        if own is group and group.ability(request.model) == SERVES:
            return False
        best = self._best(request.model)
        return own is not group if own.ability(request.model) == best else group.ability(request.model) < best

    def _best(self, model: str) -> int:
        return max([group.ability(model) for group in self])

    def models(self) -> dict[str, ModelQueues]:
        """`queues_of` of every model that has queues, by model."""
        names = {model: None for group in self for model in group.queues}
        return {model: queues for model in names if (queues := self.queues_of(model)) is not None}

    def queues_of(self, model: str) -> ModelQueues | None:
        """The model's queues in its own group; else in the first group that has some; None: no group has."""
        own = self.by_name[self.layout.group_of("", model)]
        candidates = [group.queues[model] for group in (own, *self) if model in group.queues]
        return candidates[0] if candidates else None

    def served(self) -> list[tuple[tuple[str, ...], dict[str, float]]]:
        """Weighted tokens by share that were served here since the last call, by the models that compete for engines.

        Models whose shares were served nothing are in the list, too: others may have served the shares.
        """
        models: dict[FairShares, list[str]] = {}
        for group in self:
            for model, queues in group.queues.items():
                models.setdefault(queues.fair, []).append(model)
        return [(tuple(names), fair.take_given()) for fair, names in models.items()]

    def serve_elsewhere(self, model: str, tokens: Mapping[str, float]) -> None:
        """Charge the shares that compete for the model's engines. tokens : weighted, by share"""
        for fair in {group.queues[model].fair for group in self if model in group.queues}:
            fair.serve_elsewhere(tokens)

    # ---- engines ----

    def group_of(self, engine: EngineState) -> Group:
        """The group that the engine's worker will join next; else the group that the worker belongs to."""
        if self.only is not None:
            return self.only
        return self.by_name[engine.worker.next or engine.worker.group]

    def place(self, info: EngineInfo, circuit: Circuit) -> EngineState:
        """Add a new engine to its worker; a new worker gets its group from the plan."""
        name = info.worker or info.name
        worker = self._workers.get(name)
        if worker is None:
            worker = self._workers[name] = Worker(name, self.layout.group_of_worker(name))
        kinds = {engine.info.barrier for engine in worker.engines} | {info.barrier}
        assert len(kinds) == 1, f"worker {name} has both barrier and refill engines; {info.name} was added last"
        state = self.engines[info.name] = EngineState(info, circuit, worker)
        worker.engines.append(state)
        return state

    # ---- plans ----

    def change(self, plan: tuple[ServingGroup, ...], now_s: float) -> list[Group]:
        """Move workers to the groups of a new plan. Returns the groups whose engines have changed."""
        self.layout = Layout(plan)
        self._make_groups()
        changed: dict[str, Group] = {}
        for _, worker in sorted(self._workers.items()):
            group = self.layout.group_of_worker(worker.name)
            if group != (worker.next or worker.group):
                for affected in self._move(worker, self.by_name[group], now_s):
                    changed[affected.name] = affected
        return list(changed.values())

    def _move(self, worker: Worker, group: Group, now_s: float) -> tuple[Group, Group]:
        """Give the worker to this group; the worker joins when it is idle. Returns the old and the new group."""
        before = self.by_name[worker.next or worker.group]
        for engine in worker.engines:
            before.pool.leave(engine)
        worker.next = None if group.name == worker.group else group.name
        if not worker.running:
            worker.group, worker.next = group.name, None
        for engine in worker.engines:
            group.pool.join(engine, now_s)
        group.rouse()
        if worker.next is None:
            group.make_queues(worker, now_s)
        return before, group

    def join(self, worker: Worker, now_s: float) -> Group:
        """Let a worker that has become idle join its next group."""
        assert worker.next is not None, f"worker {worker.name} has no next group"
        worker.group, worker.next = worker.next, None
        group = self.by_name[worker.group]
        for engine in worker.engines:
            group.pool.update(engine, now_s)
        group.make_queues(worker, now_s)
        return group

    def drop_empty(self) -> None:
        """Remove groups that are no longer in the plan and have no request and no ready engine left."""
        if len(self.by_name) == len(self.layout.names):
            return
        leaving = {worker.group for worker in self._workers.values()}
        for name in sorted(set(self.by_name) - self.layout.names - leaving):
            if self.by_name[name].empty:
                del self.by_name[name]
                self.restless.pop(name, None)
        self.only = next(iter(self)) if len(self.by_name) == 1 else None


class RequestBook:
    """Records each request from its arrival to its end.

    by_id      all requests that wait or run
    deadlines  of the waiting requests
    helpless   until when the requests wait that no working engine can serve
    touched    groups to settle before the step ends, by name
    now_s, actions  time of the step in progress, and the actions decided in it

    forming      how bins release batches; order : which batch runs next; times : how long batches take
    """

    def __init__(self, groups: Groups, forming: Forming, order: Order, times: Timetable, limits: Limits) -> None:
        self.by_id: dict[int, QueuedRequest] = {}
        self.touched: dict[str, Group] = {}
        self.deadlines = Deadlines(self._late_at_s)
        self.helpless = Deadlines(self._gives_up_at_s)
        self._limits = limits
        self._groups = groups
        self._forming = forming
        self._preempts = order.preempts
        self._times = times if order.by_times else None
        self.now_s = 0.0
        self.actions: list[Action] = []

    def begin(self, now_s: float, actions: list[Action]) -> None:
        """Begin a step: note its time and its list of actions, and touch the groups whose wake-up time has come."""
        self.now_s, self.actions, self.touched = now_s, actions, {}
        restless = self._groups.restless
        for group in sorted(restless.values(), key=lambda group: group.number):
            over = group.pool.paused and group.pool.end_pauses(now_s)
            if over or (group.wake_at_s is not None and group.wake_at_s <= now_s):
                self.touch(group)
            elif group.wake_at_s is None and not group.pool.paused:
                del restless[group.name]

    def _late_at_s(self, queued: QueuedRequest, now_s: float) -> float | None:
        """When the request becomes late; None: never. With a fixed order, a request is late at its deadline."""
        if self._times is None or queued.request.deadline_s is None:
            return queued.request.deadline_s
        queues = self.queues_of(queued)
        return self._times.late_at_s(queued, queues.engines, queues.binning.tokens(queued.bin).least, now_s)

    def _gives_up_at_s(self, queued: QueuedRequest, now_s: float) -> float | None:
        """When the request has waited long enough for a working engine; None: it has one."""
        since_s = self.queues_of(queued).no_engine_since_s
        return None if since_s is None else max(since_s, queued.arrived_at_s) + self._limits.engine_wait_s

    def next_late_at_s(self) -> float | None:
        """Earliest time at which a waiting request may fail; None: none can."""
        if self.helpless.next_at_s is None:
            return self.deadlines.next_at_s
        groups = self._groups.by_name.values()
        if not any(queues.waiting for group in groups for queues in group.without_engine):
            self.helpless.clear()
        times_s = (self.deadlines.next_at_s, self.helpless.next_at_s)
        return min([at_s for at_s in times_s if at_s is not None], default=None)

    def watch(self, queued: QueuedRequest) -> None:
        """Watch the deadline of a request that waits, and its wait for a working engine."""
        self.deadlines.watch(queued, self.now_s)
        self.helpless.watch(queued, self.now_s)

    def invalidate(self) -> None:
        """Drop cached batch times. Call after engines have come, gone, or changed their models or speed."""
        if self._times is not None:
            self._times.invalidate()

    def touch(self, group: Group) -> None:
        self.touched[group.name] = group

    def group_of(self, queued: QueuedRequest) -> Group:
        return self._groups.by_name[queued.group]

    def queues_of(self, queued: QueuedRequest) -> ModelQueues:
        return self._groups.by_name[queued.group].queues[queued.request.model]

    def enter(self, queued: QueuedRequest, queues: ModelQueues) -> None:
        """Count a request that waits in these queues from now on: it has arrived, or moved from another group."""
        group = self._groups.by_name[queues.group]
        group.enter(queues)
        if queued.request.deadline_s is not None or queues.no_engine_since_s is not None:
            self.watch(queued)
        if self._preempts:
            group.arrived_in[queues.model] = queues

    def end(self, runs: Sequence[Run]) -> None:
        """Forget the requests of one batch (one group, one model), and count their completions."""
        group = self.forget([run.queued for run in runs])
        group.rate.observe(self.now_s, len(runs))

    def forget(self, requests: Sequence[QueuedRequest]) -> Group:
        """Remove requests of one group and one model. Returns the group."""
        for queued in requests:
            del self.by_id[queued.request.id]
            if queued.request.background:
                self.queues_of(queued).count_items(-1)
        group = self._groups.by_name[requests[0].group]
        group.leave(group.queues[requests[0].request.model], len(requests))
        return group

    def drop(self, queued: QueuedRequest) -> Group:
        """Forget a request that does not run, and the queues of its model if no engine lists the model."""
        group, model = self.forget([queued]), queued.request.model
        if group.queues[model].no_engine_since_s is not None:
            group.forget((model,))
        return group

    def fail(self, queued: QueuedRequest, reason: FailReason) -> None:
        self.report_failed(queued.request.id, reason, self.drop(queued))

    def report_failed(self, request_id: int, reason: FailReason, group: Group) -> None:
        retry_after_s = None if reason == "deadline_exceeded" else group.rate.drain_time_s(group.tally.waiting)
        self.actions.append(FailRequest(request_id, reason, retry_after_s))

    def fail_late(self) -> None:
        """Fail waiting requests that can no longer meet their deadline. Running requests go on."""
        for queued in self.deadlines.late(self.by_id, self.now_s):
            self.touch(self.group_of(queued))
            self.queues_of(queued).leave(queued)
            self.fail(queued, "deadline_exceeded")

    def fail_helpless(self) -> None:
        """Fail waiting requests that have waited for a working engine for long enough."""
        for queued in self.helpless.late(self.by_id, self.now_s):
            self.touch(self.group_of(queued))
            self.queues_of(queued).leave(queued)
            self.fail(queued, "no_engine")

    def record_answers(self, runs: Sequence[Run], output_tokens: Mapping[int, float]) -> None:
        """Record the answers of one batch. output_tokens : by request id; 0 where unknown."""
        engine, queues = self._groups.engines[runs[0].engine], self.queues_of(runs[0].queued)
        for run in runs:
            tokens = output_tokens.get(run.queued.request.id, 0.0)
            if run.queued.request.background and tokens > 0:
                queues.items.answered(self.now_s, engine.served_s(run, self.now_s), tokens)
            if tokens > 0 and queues.record_answer(run.queued, tokens, engine.served_s(run, self.now_s)):
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
        queues = self._groups.group_of(engine).queues.get(model)
        if was_proven or queues is None or self._times is None:
            return
        if all(self.now_s < other.proven_until_s(model) for other in queues.engines):
            for queued in queues.all_waiting():  # the new pace moves the times at which they become late
                self.deadlines.watch(queued, self.now_s)

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
        """Put a request that its engine has refused back among the formed batches; fail it when every engine that
        works has refused it, or REFUSALS_MAX have.
        """
        queued = run.queued
        self.count_as_online(queued)
        queued.refused_by |= {run.engine}
        pool = self.group_of(queued).pool
        if len(queued.refused_by) >= REFUSALS_MAX or not pool.others_work(queued.refused_by, queued.request.model):
            self.fail(queued, "refused")
        else:
            self._wait_for_another([queued], run, run.engine)

    def _wait_for_another(self, again: list[QueuedRequest], first: Run, avoid: str) -> None:
        """Let requests of one batch wait for another engine, as one batch. first : of the runs of the batch"""
        if not again:
            return
        queues = self.queues_of(again[0])
        self.touch(self.group_of(again[0]))
        longest = max([queued.bin for queued in again])  # a batch may also hold requests of shorter bins
        batch = FormedBatch(first.batch_id, longest, first.formed_at_s, again, queues.model)
        for queued in again:
            self.watch(queued)  # its times may have been dropped while the request ran
        queues.take_back_batch(batch, avoid)

    def wait_again(self, queued: QueuedRequest) -> None:
        """Put a preempted request back into its bin, or fail the request if it is late.

        The request preempts nothing in its turn, for that could go on without end.
        """
        queues = self.queues_of(queued)
        self.count_as_online(queued)
        late_at_s = self._late_at_s(queued, self.now_s)
        if late_at_s is not None and late_at_s <= self.now_s:
            self.fail(queued, "deadline_exceeded")
            return
        for queue in queues.take_back([queued]):
            self._forming.form_early(queues, queue, self.now_s)
        self.touch(self.group_of(queued))
        self.watch(queued)
        self.place_again([queued])

    def count_as_online(self, queued: QueuedRequest) -> None:
        """Let a line of a job that ran in vain wait as all others do, for it has begun once."""
        if queued.request.background:
            self.queues_of(queued).count_items(-1)
            queued.request, queued.charged = msgspec.structs.replace(queued.request, background=False), 0.0
            self.actions.append(ReportDue(queued.request.id))

    def revise(self, changes: Mapping[int, Callable[[Request], Request]]) -> None:
        """Change the forecasts of waiting requests, by id. They preempt nothing, for that could go on without end."""
        waiting: dict[ModelQueues, list[tuple[QueuedRequest, Request]]] = {}
        for request_id, change in changes.items():
            if (queued := self.by_id.get(request_id)) is not None and queued.run is None:
                waiting.setdefault(self.queues_of(queued), []).append((queued, change(queued.request)))
        for queues, requests in waiting.items():
            self.touch(self._groups.by_name[queues.group])
            for queue in queues.revise(requests):
                self._forming.form_early(queues, queue, self.now_s)
            for queued, _ in requests:
                self.deadlines.watch(queued, self.now_s)

    def sort_into_queues(self, queues: ModelQueues) -> None:
        self.touch(self._groups.by_name[queues.group])
        queues.sort_into_queues()
        self._forming.form_all_early(queues, self.now_s)

    def place_again(self, candidates: Iterable[QueuedRequest]) -> None:
        """Move misplaced waiting requests to the group where each would wait now, except those of reserved batches."""
        if self._groups.only is not None:
            return
        engines = self._groups.engines.values()
        reserved = [engine.worker.reserved[1] for engine in engines if engine.worker.reserved is not None]
        moving = [
            queued
            for queued in candidates
            if queued.run is None
            and self.by_id.get(queued.request.id) is queued
            and queued.formed not in reserved
            and self._groups.is_misplaced(self.group_of(queued), queued.request)
        ]
        changed: dict[tuple[str, str], ModelQueues] = {}
        for queued in moving:
            self.touch(self.group_of(queued))
            self.queues_of(queued).leave(queued)
            self.group_of(queued).leave(self.queues_of(queued))
        for queued in sorted(moving, key=turn_of_arrival):
            queues = self._groups.group_for(queued.request).queues_of(queued.request.model, self.now_s)
            bins = queues.take_back([queued])
            self.enter(queued, queues)
            self.touch(self.group_of(queued))
            for queue in bins:
                self._forming.form_early(queues, queue, self.now_s)
            changed[queues.group, queues.model] = queues
        for queues in changed.values():
            self.sort_into_queues(queues)  # a moved request may be older than the requests that wait already
