"""Engines that come, close, are lost or are expected, and what that means for the requests of their groups.

no engine of the model is up    a request waits if one is expected (started, restarted, lost), else it is refused
the models of it are not known  it may serve any: requests wait by the name of their model
its models become known         requests of models that no engine lists, and none may list yet, are refused
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from llmserve.request import EngineInfo
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.group import Group
from llmserve.scheduling.groups import Groups, RequestBook
from llmserve.scheduling.messages import ReportCircuit
from llmserve.scheduling.queues.waiting import Run

UNLISTED_MODELS_MAX = 256  # models that no engine has listed yet, and whose requests wait


class EngineBook:
    """Records engines that come, close or are lost, and updates the requests of their groups.

    circuit : makes a circuit breaker for a new engine
    """

    def __init__(self, groups: Groups, book: RequestBook, circuit: Callable[[], Circuit]) -> None:
        self._groups = groups
        self._book = book
        self._new_circuit = circuit

    def awaits(self, model: str, group: Group) -> bool:
        """Whether a request of this model waits for an engine that is expected. The number of models that no engine
        has listed yet is bounded: clients invent names.
        """
        engines = self._groups.engines.values()
        able = [engine for engine in engines if engine.expected and not engine.ready and engine.serves(model)]
        if model in group.queues or any(engine.known for engine in able):
            return bool(able)
        return bool(able) and len(group.without_engine) < UNLISTED_MODELS_MAX

    def expect(self, info: EngineInfo) -> None:
        """Record that an engine will be ready, for the first time or again. Has no effect on one that is."""
        state = self._groups.engines.get(info.name)
        if state is None:
            state = self._groups.place(msgspec.structs.replace(info, models=()), self._new_circuit())
            state.ready = state.known = False
            self._groups.group_of(state).pool.join(state, self._book.now_s)
        state.expected = not state.ready

    def ready(self, info: EngineInfo) -> None:
        """Record that an engine takes requests, or that its description has changed."""
        state = self._groups.engines.get(info.name)
        if state is None:
            state = self._groups.place(info, self._new_circuit())
            group = self._groups.group_of(state)
            group.pool.join(state, self._book.now_s)
        is_new, state.known = not state.known, True
        group = self._groups.group_of(state)
        if not state.ready:  # the engine is back: past faults no longer count
            state.new_circuit(self._new_circuit())
            group.pool.paused.pop(info.name, None)
            group.pool.resting.pop(info.name, None)
        no_longer = state.models - set(info.models)
        state.update(info)
        state.ready = True
        group.pool.update(state, self._book.now_s)
        if no_longer:
            group.forget(no_longer)
        for model in info.models or ([] if group.queues else [""]):
            group.queues_of(model, self._book.now_s)
        self.changed([group])
        if is_new:
            self._fail_unlisted()

    def _fail_unlisted(self) -> None:
        """Fail requests of models that no engine lists, now that the models of one more engine are known."""
        engines = self._groups.engines.values()
        for group in self._groups:
            for queues in list(group.without_engine):
                if not any(engine.serves(queues.model) for engine in engines):
                    for queued in queues.all_waiting():
                        queues.leave(queued)
                        self._book.fail(queued, "model_not_found")

    def close(self, state: EngineState, *, expected: bool) -> bool:
        """Send the engine no more requests; its running requests go on. True if it was ready."""
        was_ready, state.expected = state.ready, expected
        if was_ready:
            self.changed([self._close(state)])
        return was_ready

    def _close(self, state: EngineState) -> Group:
        group = self._groups.group_of(state)
        state.ready = False
        group.pool.paused.pop(state.info.name, None)
        group.pool.resting.pop(state.info.name, None)
        group.pool.update(state, self._book.now_s)
        self._circuits_changed(group)
        return group

    def lose(self, state: EngineState, answered: Collection[int], *, expected: bool) -> None:
        """Record that an engine and its runs are gone. answered : ids of requests whose clients have received bytes."""
        state.expected = expected
        group = self._close(state)
        group.pool.forget_prefixes(state)
        again: dict[int, list[Run]] = {}  # by batch id, so that each batch runs again as one batch
        runs = list(state.running.values())
        state.remove(runs, self._book.now_s)
        for run in runs:
            if run.queued.cancelled:
                self._book.forget([run.queued])
            elif run.queued.request.id in answered:
                self._book.fail(run.queued, "engine_lost")
            else:
                again.setdefault(run.batch_id, []).append(run)
        for unanswered in again.values():
            self._book.run_again(unanswered, "engine_lost", avoid=state.info.name)
        for run in runs:
            run.queued.refund()
        group.pool.refresh(state, self._book.now_s)  # engines that share its GPU may be free now
        self.changed([group])  # after the retried requests have been queued, so that they move too

    def report_circuit(self, name: str) -> None:
        """Report that the engine's circuit has opened, has been opened for longer, or has closed."""
        engine = self._groups.engines[name]
        group, until_s = self._groups.group_of(engine), engine.circuit.open_until_s
        group.pool.paused.pop(name, None)
        if until_s is not None:
            group.pool.paused[name] = engine
            group.rouse()
        self._book.actions.append(ReportCircuit(name, None if until_s is None else until_s - self._book.now_s))
        group.pool.refresh(engine, self._book.now_s)
        self._circuits_changed(group)

    def _circuits_changed(self, group: Group) -> None:
        self._book.touch(group)
        self._book.invalidate()
        for queues in group.refresh_engines(self._book.now_s):
            for queued in queues.all_waiting():
                self._book.helpless.watch(queued, self._book.now_s)

    def changed(self, groups: Iterable[Group]) -> None:
        """Update groups whose engines have come, gone or moved, and move the requests that are misplaced now."""
        for group in groups:
            self._circuits_changed(group)
        if len(self._groups.by_name) > 1:
            self._book.place_again(list(self._book.by_id.values()))
