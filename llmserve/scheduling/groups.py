"""Serving groups: which workers, and which requests, belong together (Shepherd, Section 3.2).

A plan (`ServingGroup`s; HERD makes them) names workers, models and streams. A group's requests wait in queues of its
own and run on its engines only, so that a step costs what a group costs, however many groups there are, and a burst of
one group's requests delays no other's. What no group of the plan names is the fallback group's; without a plan that is
all.

    where a request waits   in its own group if an engine there serves its model; else in any group where one does, the
                            least loaded first; else where one is about to; else in its own
    when the plan changes   what runs ends where it is; what waits goes to where it would wait had it come now, with its
                            arrival time, deadline and retries; a worker takes nothing more from the group that it
                            leaves, and joins the other one when nothing runs on it; a group that is no longer in the
                            plan is kept until it is empty
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.engines import EngineState, Worker
from llmserve.scheduling.layout import Layout
from llmserve.scheduling.messages import ServingGroup
from llmserve.scheduling.model_queues import Group, ModelQueues

# How well a group can serve a model.
SERVES, AWAITS, CANNOT = 2, 1, 0


class Groups:
    """The groups at run time, the workers, and who belongs where.

    new_group  makes one
    plan       the groups to begin with
    by_name    those of the plan, and those that are not empty yet; only : the one, where there is one
    engines    all that were ever ready, by name
    """

    def __init__(self, new_group: Callable[[str], Group], plan: tuple[ServingGroup, ...] = ()) -> None:
        self.by_name: dict[str, Group] = {}
        self.only: Group | None = None
        self.engines: dict[str, EngineState] = {}
        self._workers: dict[str, Worker] = {}
        self._new_group = new_group
        self.layout = Layout(plan)
        self._make_groups()

    def __iter__(self) -> Iterator[Group]:
        return iter(self.by_name.values())

    def _make_groups(self) -> None:
        for name in sorted(self.layout.names - set(self.by_name)):
            self.by_name[name] = self._new_group(name)
        self._note_only()

    def _note_only(self) -> None:
        self.only = next(iter(self)) if len(self.by_name) == 1 else None

    def alone(self, now_s: float) -> dict[str, Group]:
        """The only group, by name: it is looked at whatever happens."""
        assert self.only is not None, "there are several"
        if self.only.pool.paused:
            self.only.pool.end_pauses(now_s)
        return self.by_name

    def due(self, now_s: float) -> dict[str, Group]:
        """Those of several that are to be looked at now whatever has happened, by name."""
        found = {}
        for group in self.by_name.values():
            over = group.pool.paused and group.pool.end_pauses(now_s)
            if over or (group.wake_at_s is not None and group.wake_at_s <= now_s):
                found[group.name] = group
        return found

    # ---- requests ----

    def own(self, request: Request) -> Group:
        """The group whose request this is."""
        if self.only is not None:
            return self.only
        return self.by_name[self.layout.group_of(request.stream, request.model)]

    def group_for(self, request: Request) -> Group:
        """Where it waits if it comes now."""
        own = self.own(request)
        if not self.is_misplaced(own, request):
            return own
        best = self._best(request.model)
        able = [group for group in self if _can(group, request.model) == best]
        return min(able, key=lambda group: (group.load, group.name))

    def is_misplaced(self, group: Group, request: Request) -> bool:
        """Whether it waits where it would not wait had it come now."""
        if self.only is not None:
            return False
        own = self.own(request)
        if own is group and _can(group, request.model) == SERVES:
            return False
        best = self._best(request.model)
        return own is not group if _can(own, request.model) == best else _can(group, request.model) < best

    def _best(self, model: str) -> int:
        return max([_can(group, model) for group in self])

    def queues_of(self, model: str) -> ModelQueues | None:
        """Of the group whose requests of that model are; else of the first that has some; None: there are none."""
        own = self.by_name[self.layout.group_of("", model)]
        with_some = [group.queues[model] for group in (own, *self) if model in group.queues]
        return with_some[0] if with_some else None

    # ---- engines ----

    def group_of(self, engine: EngineState) -> Group:
        """The group that its worker belongs to, or is about to join."""
        return self.by_name[engine.worker.next or engine.worker.group]

    def place(self, info: EngineInfo, circuit: Circuit) -> EngineState:
        """An engine that was not known before."""
        name = info.worker or info.name
        worker = self._workers.get(name)
        if worker is None:
            worker = self._workers[name] = Worker(name, self.layout.group_of_worker(name))
        kinds = {engine.info.barrier for engine in worker.engines} | {info.barrier}
        assert len(kinds) == 1, f"{info.name} would share {name} with engines of another kind"
        state = self.engines[info.name] = EngineState(info, circuit, worker)
        worker.engines.append(state)
        return state

    # ---- plans ----

    def change(self, plan: tuple[ServingGroup, ...], now_s: float) -> list[Group]:
        """Another plan holds; workers belong to its groups from now on. Returns those whose engines have changed."""
        self.layout = Layout(plan)
        self._make_groups()
        changed: dict[str, Group] = {}
        for _, worker in sorted(self._workers.items()):
            group = self.layout.group_of_worker(worker.name)
            if group != (worker.next or worker.group):
                for each in self._move(worker, self.by_name[group], now_s):
                    changed[each.name] = each
        return list(changed.values())

    def _move(self, worker: Worker, group: Group, now_s: float) -> tuple[Group, Group]:
        """The worker belongs to this group from now on, and joins it when it is idle."""
        before = self.by_name[worker.next or worker.group]
        for engine in worker.engines:
            before.pool.leave(engine)
        worker.next = None if group.name == worker.group else group.name
        if not worker.busy:
            worker.group, worker.next = group.name, None
        for engine in worker.engines:
            group.pool.join(engine, now_s)
        return before, group

    def join(self, worker: Worker, now_s: float) -> Group:
        """A worker that has run what it had of another group's joins its next one."""
        assert worker.next is not None, "it stays where it is"
        worker.group, worker.next = worker.next, None
        group = self.by_name[worker.group]
        for engine in worker.engines:
            group.pool.know(engine, now_s)
        return group

    def drop_empty(self) -> None:
        """Forget groups that are no longer in the plan, and have nothing left."""
        if len(self.by_name) == len(self.layout.names):
            return
        leaving = {worker.group for worker in self._workers.values()}
        for name in sorted(set(self.by_name) - self.layout.names - leaving):
            if self.by_name[name].empty:
                del self.by_name[name]
        self._note_only()


def _can(group: Group, model: str) -> int:
    """SERVES, AWAITS (an engine that will) or CANNOT."""
    serving = group.pool.serving(model)
    if any(engine.worker.next is None for engine in serving):
        return SERVES
    return AWAITS if serving else CANNOT
