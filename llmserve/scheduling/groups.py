"""Serving groups: a scheduler for each, behind one scheduler's face (Shepherd, Section 3.2).

A plan (`ServingGroup`s; HERD makes them) says which workers and which requests belong together. Each group has a
scheduler of its own, so that a step costs what a group costs, however many groups there are, and a burst of one
group's requests delays no other's. What no group of the plan names is the fallback group's.

    where a request waits   in its own group if an engine there serves its model; else in any group where one does, the
                            least loaded first; else where one is about to; else in its own
    when the plan changes   what runs ends where it is; what waits goes to where it would wait had it come now, with its
                            arrival time, deadline and retries; a worker takes nothing more from the group that it
                            leaves, and joins the other one when nothing runs on it; a group that is no longer in the
                            plan is kept until it is empty

Like a scheduler, `Groups` reads no clock and does no I/O; one body drives either.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count

import msgspec

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.engine_state import EngineState
from llmserve.scheduling.group_rates import GroupRates
from llmserve.scheduling.lane import Lane
from llmserve.scheduling.layout import FALLBACK, Layout
from llmserve.scheduling.messages import (
    Action,
    AnswerBegan,
    BatchEnded,
    DispatchSolved,
    DrainRequested,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    PlanChanged,
    PlanGroups,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    ServingGroup,
    SolveDispatch,
    TimerFired,
)
from llmserve.scheduling.queues import ENTRIES_SPARE, Place, Ticket
from llmserve.scheduling.scheduler import Scheduler

# How well a group can serve a model.
SERVES, AWAITS, CANNOT = 2, 1, 0


class Group:
    """One group at run time.

    ready      its engines that take requests, by name
    coming     engines that will when what they run for another group has ended
    wake_at_s  of its scheduler, after its last step
    """

    __slots__ = ("coming", "name", "ready", "scheduler", "wake_at_s")

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self.name = name
        self.scheduler = scheduler
        self.ready: dict[str, EngineInfo] = {}
        self.coming: dict[str, EngineInfo] = {}
        self.wake_at_s: float | None = None

    def can(self, model: str) -> int:
        """SERVES, AWAITS (an engine that will) or CANNOT."""
        for info in self.ready.values():
            if info.serves(model):
                return SERVES
        return AWAITS if self.coming and any(info.serves(model) for info in self.coming.values()) else CANNOT

    @property
    def load(self) -> float:
        """Requests for each slot."""
        slots = sum([info.slots for info in self.ready.values()])
        return len(self.scheduler.requests) / slots if slots else float(len(self.scheduler.requests))

    @property
    def empty(self) -> bool:
        return not (self.ready or self.coming or self.scheduler.requests)


class Worker:
    """A GPU and its engines.

    group     whose requests it runs
    next      the group that it joins when these have ended; None: it stays
    engines   names of all that it has had
    up        those that take requests, as far as their body is concerned
    """

    __slots__ = ("engines", "group", "name", "next", "up")

    def __init__(self, name: str, group: Group) -> None:
        self.name = name
        self.group = group
        self.next: Group | None = None
        self.engines: set[str] = set()
        self.up: dict[str, EngineInfo] = {}

    @property
    def idle(self) -> bool:
        """Nothing runs on it."""
        states = self.group.scheduler.engines
        return not any(states[name].running for name in self.engines if name in states)


class Tickets(Mapping[int, Ticket]):
    """The requests of all groups, by id."""

    def __init__(self, homes: dict[int, Group]) -> None:
        self._homes = homes

    def __getitem__(self, request_id: int) -> Ticket:
        return self._homes[request_id].scheduler.requests[request_id]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._homes

    def __iter__(self) -> Iterator[int]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


class Groups:
    """See the module. What a Scheduler offers to its body, this offers, too.

    factory  makes the scheduler of a group: all by the same policies
    groups   the plan to begin with
    rates    when set, asks for another plan (PlanGroups) when arrivals have become others

    Limits are each group's own: queue_requests_max requests may wait in each. A worker that joins a group is known
    there as one that has just come up: with a circuit of its own.
    """

    def __init__(
        self,
        factory: Callable[[], Scheduler],
        groups: tuple[ServingGroup, ...] = (),
        *,
        rates: GroupRates | None = None,
    ) -> None:
        self.groups: dict[str, Group] = {}
        self.engines: dict[str, EngineState] = {}
        self._factory = factory
        self._rates = rates
        self._homes: dict[int, Group] = {}
        self.requests = Tickets(self._homes)
        self._workers: dict[str, Worker] = {}
        self._worker_of: dict[str, Worker] = {}  # by engine
        self._solving: dict[str, deque[tuple[Group, SolveDispatch]]] = {}  # by model; the first has been asked for
        self._wakes: list[tuple[float, str]] = []  # heap of (wake_at_s, group), and some that stand no more
        self._batch_ids = count(1)
        self._draining = False
        self._now_s = 0.0
        self._actions: list[Action] = []
        self._layout = Layout(groups)
        for name in sorted(self._layout.names):
            self._make(name)
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

    # ---- the scheduler's face -----------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event; return what must be done now, in order."""
        assert now_s >= self._now_s, f"time ran backwards: {now_s} after {self._now_s}"
        self._now_s = now_s
        actions: list[Action] = []
        self._actions = actions
        rates = self._rates.look(now_s) if self._rates is not None else None
        self._handlers[type(event)](event)
        if len(self.groups) > len(self._layout.names):
            self._drop_empty()
        if rates is not None:
            actions.append(PlanGroups(rates))
        return actions

    @property
    def wake_at_s(self) -> float | None:
        """When TimerFired is wanted at the latest; None: not before something happens."""
        wakes = self._wakes
        while wakes and not self._stands(wakes[0]):
            heapq.heappop(wakes)
        at_s = wakes[0][0] if wakes else None
        look_s = self._rates.look_at_s if self._rates is not None else None
        return look_s if at_s is None else at_s if look_s is None else min(at_s, look_s)

    @property
    def plan(self) -> tuple[ServingGroup, ...]:
        return self._layout.groups

    @property
    def waiting(self) -> int:
        return sum([group.scheduler.waiting for group in self.groups.values()])

    @property
    def preempts(self) -> bool:
        return self.groups[FALLBACK].scheduler.preempts

    @property
    def lanes(self) -> dict[str, Lane]:
        """By model: of the group whose requests of that model are; else of the first that has one."""
        found: dict[str, Lane] = {}
        for group in self.groups.values():
            for model, lane in group.scheduler.lanes.items():
                if model not in found or group.name == self._layout.group_of("", model):
                    found[model] = lane
        return found

    def lane(self, model: str) -> Lane:
        return self.groups[self._layout.group_of("", model)].scheduler.lane(model)

    # ---- requests -----------------------------------------------------------------------------------------------

    def _on_request_arrived(self, event: RequestArrived) -> None:
        request = event.request
        assert request.id not in self._homes, f"request {request.id} arrived twice"
        if self._rates is not None:
            self._rates.observe(request.stream, request.model)
        group = self._group_for(request)
        self._homes[request.id] = group  # a refusal takes it back
        self._tell(group, event)

    def _on_request_cancelled(self, event: RequestCancelled) -> None:
        group = self._homes.get(event.request_id)
        if group is not None:
            self._tell(group, event)
            self._forget(group, event.request_id)

    def _on_request_ended(self, event: RequestEnded) -> None:
        worker = self._worker_of.get(event.engine)
        if worker is None:
            return
        group = worker.group
        again = [event.request_id, *self._reserved(worker, event.engine)]
        self._tell(group, event)
        self._forget(group, event.request_id)
        self._place_again(group, again)
        self._join_if_idle(worker)

    def _on_answer_began(self, event: AnswerBegan) -> None:
        group = self._homes.get(event.request_id)
        if group is not None:
            self._tell(group, event)

    def _on_batch_ended(self, event: BatchEnded) -> None:
        worker = self._worker_of.get(event.engine)
        if worker is None:
            return
        group, ended = worker.group, self._running(worker, event.engine)
        again = self._reserved(worker, event.engine)
        self._tell(group, event)
        for request_id in ended:
            self._forget(group, request_id)
        self._place_again(group, again)
        self._join_if_idle(worker)

    def _forget(self, group: Group, request_id: int) -> None:
        """Unless its group still has it, or it lives in another one."""
        if self._homes.get(request_id) is group and request_id not in group.scheduler.requests:
            del self._homes[request_id]

    def _place_again(self, group: Group, ids: list[int]) -> None:
        """Who waits again after all, of these, does so by the plan of now."""
        tickets = [ticket for id_ in ids if (ticket := group.scheduler.requests.get(id_)) is not None]
        strays = {
            ticket.request.id
            for ticket in tickets
            if ticket.place is not Place.RUNNING and self._is_misplaced(group, ticket.request)
        }
        if strays:
            self._place(self._hand_over(group, lambda request: request.id in strays))

    # ---- engines ------------------------------------------------------------------------------------------------

    def _on_engine_ready(self, event: EngineReady) -> None:
        info = event.engine
        worker = self._worker_of.get(info.name)
        if worker is None:
            worker = self._worker_named(info.worker or info.name)
            worker.engines.add(info.name)
            self._worker_of[info.name] = worker
        worker.up[info.name] = info
        if worker.next is None:
            self._open(worker.group, info)
        else:
            self._announce(worker.next, info)
        self._settle()

    def _worker_named(self, name: str) -> Worker:
        if name not in self._workers:
            self._workers[name] = Worker(name, self.groups[self._layout.group_of_worker(name)])
        return self._workers[name]

    def _on_engine_closed(self, event: EngineClosed) -> None:
        worker = self._worker_of.get(event.engine)
        if worker is not None:
            worker.up.pop(event.engine, None)
            for group in (worker.group, worker.next):
                if group is not None:
                    self._close(group, event.engine)
            self._settle()

    def _on_engine_lost(self, event: EngineLost) -> None:
        worker = self._worker_of.get(event.engine)
        if worker is None:
            return
        worker.up.pop(event.engine, None)
        group, running = worker.group, self._running(worker, event.engine)
        group.ready.pop(event.engine, None)
        self._tell(group, event)
        for request_id in running:
            self._forget(group, request_id)
        if worker.next is not None:
            self._close(worker.next, event.engine)
            self._join_if_idle(worker)
        self._settle()

    def _running(self, worker: Worker, engine: str) -> list[int]:
        state = worker.group.scheduler.engines.get(engine)
        return list(state.running) if state is not None else []

    def _reserved(self, worker: Worker, engine: str) -> list[int]:
        """Whom a batch that runs there was told to make room for: these wait where they are until it has."""
        state = worker.group.scheduler.engines.get(engine)
        return list(state.worker.reserved[1].tickets) if state is not None and state.worker.reserved else []

    def _open(self, group: Group, info: EngineInfo) -> None:
        """The group may use this engine from now on."""
        group.ready[info.name] = info
        self._tell(group, EngineReady(info))
        self.engines[info.name] = group.scheduler.engines[info.name]

    def _announce(self, group: Group, info: EngineInfo) -> None:
        """The group will have this engine: it is ready, but without a slot, so that those who come can wait for it."""
        group.coming[info.name] = info
        self._tell(group, EngineReady(msgspec.structs.replace(info, slots=0, look_ahead=0)))
        self.engines.setdefault(info.name, group.scheduler.engines[info.name])

    def _close(self, group: Group, engine: str) -> None:
        """The group sends nothing more there."""
        group.ready.pop(engine, None)
        group.coming.pop(engine, None)
        self._tell(group, EngineClosed(engine))

    # ---- plans --------------------------------------------------------------------------------------------------

    def _on_plan_changed(self, event: PlanChanged) -> None:
        """Requests leave their old groups before workers move, and join their new ones after it, so that no worker
        starts what is no longer its group's.
        """
        self._layout = Layout(event.groups)
        for name in sorted(self._layout.names - set(self.groups)):
            self._make(name)
        moving = self._take_out(self._is_strange)
        for name in sorted(self._workers):
            self._move(self._workers[name], self.groups[self._layout.group_of_worker(name)])
        self._place(moving)
        self._settle()

    def _make(self, name: str) -> None:
        group = self.groups[name] = Group(name, self._factory())
        group.scheduler.batch_ids = self._batch_ids
        if self._draining:
            self._tell(group, DrainRequested())

    def _move(self, worker: Worker, group: Group) -> None:
        """The worker belongs to this group from now on, and joins it when it is idle."""
        before = worker.next or worker.group
        if group is before:
            return
        for name in sorted(worker.up):
            self._close(before, name)
        if group is worker.group:  # it has not left yet
            worker.next = None
            for _, info in sorted(worker.up.items()):
                self._open(group, info)
            return
        worker.next = group
        if worker.idle:
            self._join(worker, group)
            return
        for _, info in sorted(worker.up.items()):
            self._announce(group, info)

    def _join_if_idle(self, worker: Worker) -> None:
        if worker.next is not None and worker.idle:
            self._join(worker, worker.next)
            self._settle()

    def _join(self, worker: Worker, group: Group) -> None:
        """Nothing of the group that it leaves runs on it."""
        for name in sorted(worker.engines & set(worker.group.scheduler.engines)):
            self._tell(worker.group, EngineLost(name, planned=True))
        worker.group, worker.next = group, None
        for name, info in sorted(worker.up.items()):
            group.coming.pop(name, None)
            self._open(group, info)

    def _drop_empty(self) -> None:
        leaving = {worker.group.name for worker in self._workers.values()}
        for name in sorted(set(self.groups) - self._layout.names - leaving):
            if self.groups[name].empty:
                del self.groups[name]

    # ---- where requests wait ------------------------------------------------------------------------------------

    def _own(self, request: Request) -> Group:
        return self.groups[self._layout.group_of(request.stream, request.model)]

    def _is_strange(self, group: Group, request: Request) -> bool:
        return self._own(request) is not group

    def _group_for(self, request: Request) -> Group:
        """Where it waits if it comes now."""
        own = self._own(request)
        if not self._is_misplaced(own, request):
            return own
        best = self._best(request.model)
        able = [group for group in self.groups.values() if group.can(request.model) == best]
        return min(able, key=lambda group: (group.load, group.name))

    def _best(self, model: str) -> int:
        return max([group.can(model) for group in self.groups.values()])

    def _is_misplaced(self, group: Group, request: Request) -> bool:
        """Whether it waits where it would not wait had it come now."""
        own = self._own(request)
        if own is group and group.can(request.model) == SERVES:
            return False
        best = self._best(request.model)
        return own is not group if own.can(request.model) == best else group.can(request.model) < best

    def _settle(self) -> None:
        """Engines have come, gone or moved: those who wait where they no longer should go where they should."""
        self._place(self._take_out(self._is_misplaced))

    def _take_out(self, wanted: Callable[[Group, Request], bool]) -> list[Ticket]:
        taken: list[Ticket] = []
        for group in list(self.groups.values()):
            if group.scheduler.waiting:
                taken += self._hand_over(group, partial(wanted, group))
        return taken

    def _hand_over(self, group: Group, wanted: Callable[[Request], bool]) -> list[Ticket]:
        tickets = group.scheduler.hand_over(wanted)
        for ticket in tickets:
            del self._homes[ticket.request.id]
        if tickets:  # who waited behind them may be next
            self._tell(group, TimerFired())
        return tickets

    def _place(self, tickets: list[Ticket]) -> None:
        """Let them wait in their groups, in order of arrival."""
        by_group: dict[Group, list[Ticket]] = {}
        for ticket in sorted(tickets, key=lambda ticket: (ticket.arrived_at_s, ticket.request.id)):
            by_group.setdefault(self._group_for(ticket.request), []).append(ticket)
        for group, joining in by_group.items():
            for ticket in joining:
                self._homes[ticket.request.id] = group
            self._note(group, group.scheduler.adopt(joining, self._now_s))

    # ---- one group's step ---------------------------------------------------------------------------------------

    def _tell(self, group: Group, event: Event) -> None:
        self._note(group, group.scheduler.handle(event, self._now_s))

    def _note(self, group: Group, actions: list[Action]) -> None:
        """What a group's scheduler says after a step."""
        for action in actions:
            if type(action) is FailRequest:
                del self._homes[action.request_id]
            elif type(action) is SolveDispatch and not self._may_ask(group, action):
                continue
            self._actions.append(action)
        wake_at_s = group.scheduler.wake_at_s
        if wake_at_s != group.wake_at_s:
            group.wake_at_s = wake_at_s
            if wake_at_s is not None:
                self._set_wake(wake_at_s, group)

    def _set_wake(self, at_s: float, group: Group) -> None:
        heapq.heappush(self._wakes, (at_s, group.name))
        if len(self._wakes) > 2 * len(self.groups) + ENTRIES_SPARE:
            self._wakes = sorted({entry for entry in self._wakes if self._stands(entry)})

    def _stands(self, entry: tuple[float, str]) -> bool:
        group = self.groups.get(entry[1])
        return group is not None and group.wake_at_s == entry[0]

    def _on_timer_fired(self, event: TimerFired) -> None:
        for group in list(self.groups.values()):
            if group.wake_at_s is not None and group.wake_at_s <= self._now_s:
                self._tell(group, event)

    def _on_drain_requested(self, event: DrainRequested) -> None:
        self._draining = True
        for group in list(self.groups.values()):
            self._tell(group, event)

    def _may_ask(self, group: Group, action: SolveDispatch) -> bool:
        """A plan that comes says only for which model: groups that share one ask one after the other."""
        asking = self._solving.setdefault(action.model, deque())
        asking.append((group, action))
        return len(asking) == 1

    def _on_dispatch_solved(self, event: DispatchSolved) -> None:
        asking = self._solving[event.model]
        group, _ = asking.popleft()
        if asking:
            self._actions.append(asking[0][1])
        else:
            del self._solving[event.model]
        self._tell(group, event)

    # ---- promises -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant of the state: each scheduler's own, and those between them. O(requests)."""
        homes = 0
        for group in self.groups.values():
            group.scheduler.check()
            homes += len(group.scheduler.requests)
            reserved = [state.worker.reserved[1] for state in group.scheduler.engines.values() if state.worker.reserved]
            for request_id, ticket in group.scheduler.requests.items():
                assert self._homes.get(request_id) is group, f"request {request_id} is not at home in {group.name}"
                waits = ticket.place is not Place.RUNNING and ticket.formed not in reserved
                assert not waits or not self._is_misplaced(group, ticket.request), (
                    f"request {request_id} waits in the wrong group, {group.name}"
                )
            assert group.name in self._layout.names or not group.empty or self._leaves(group), f"{group.name} is over"
        assert homes == len(self._homes), "a request has no home"
        for worker in self._workers.values():
            self._check_worker(worker)
        wakes = {(group.wake_at_s, group.name) for group in self.groups.values() if group.wake_at_s is not None}
        assert wakes == set(filter(self._stands, self._wakes)), "a group's wake is lost"

    def _leaves(self, group: Group) -> bool:
        return any(worker.group is group for worker in self._workers.values())

    def _check_worker(self, worker: Worker) -> None:
        belongs = worker.next or worker.group
        assert belongs.name == self._layout.group_of_worker(worker.name), f"{worker.name} is in {belongs.name}"
        assert worker.next is None or not worker.idle, f"{worker.name} could join {belongs.name}"
        for group in self.groups.values():
            for name in worker.engines & set(group.scheduler.engines):
                state = group.scheduler.engines[name]
                assert not state.running or group is worker.group, f"{name} runs for {group.name}, too"
                assert state.ready == (group is belongs and name in worker.up), (
                    f"{name} is wrongly ready in {group.name}"
                )
                slots = worker.up[name].slots if group is worker.group and name in worker.up else 0
                assert not state.ready or state.info.slots == slots, f"{name} has {state.info.slots} slots"


Mind = Scheduler | Groups
"""What a body drives."""
