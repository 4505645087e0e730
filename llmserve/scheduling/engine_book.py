"""Engines that come, close, are lost or are expected, and the consequences for requests.

no engine of the model is up       a request waits if an engine is expected (started, restarted, lost), else is refused
an engine's models are not known   the engine may serve any: requests wait by the name of their model
the models become known            requests of models that no engine lists, and none may list yet, are refused
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from llmserve.request import EngineInfo
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.engines import EngineState, Worker
from llmserve.scheduling.group import Group
from llmserve.scheduling.messages import ReportCircuit
from llmserve.scheduling.queues.waiting import Run
from llmserve.scheduling.request_book import RequestBook

UNLISTED_MODELS_MAX = 256  # models that no engine has listed yet, and whose requests wait


class EngineBook:
    """The record of engines that come, close or are lost, with the consequences for requests.

    circuit : makes a circuit breaker for a new engine
    """

    def __init__(self, group: Group, book: RequestBook, circuit: Callable[[], Circuit]) -> None:
        self._group, self._book, self._new_circuit = group, book, circuit
        self._engines = group.pool.engines
        self._workers: dict[str, Worker] = {}

    def _new(self, info: EngineInfo) -> EngineState:
        """A new engine, on its worker."""
        name = info.worker or info.name
        worker = self._workers.setdefault(name, Worker(name))
        kinds = {engine.info.barrier for engine in worker.engines} | {info.barrier}
        assert len(kinds) == 1, f"worker {name} has both barrier and refill engines; {info.name} was added last"
        state = EngineState(info, self._new_circuit(), worker)
        worker.engines.append(state)
        return state

    def awaits(self, model: str) -> bool:
        """Whether a request of this model waits for an engine that is expected. The number of models that no engine
        has listed yet is bounded: clients invent names.
        """
        engines = self._engines.values()
        able = [engine for engine in engines if engine.expected and not engine.ready and engine.serves(model)]
        if model in self._group.queues or any(engine.known for engine in able):
            return bool(able)
        return bool(able) and len(self._group.without_engine) < UNLISTED_MODELS_MAX

    def expect(self, info: EngineInfo) -> None:
        """Record that an engine will be ready, for the first time or again. Has no effect on a ready engine."""
        state = self._engines.get(info.name)
        if state is None:
            state = self._new(msgspec.structs.replace(info, models=()))
            self._group.pool.join(state, self._book.now_s)
        state.expect()

    def ready(self, info: EngineInfo) -> None:
        """Record that an engine takes requests, or has another description."""
        group, state = self._group, self._engines.get(info.name)
        was_awaited = state is not None and not state.known
        if state is None:
            state = self._new(info)
            group.pool.join(state, self._book.now_s)
        no_longer = state.models - set(info.models)
        if not state.ready:  # the engine is new, or back: past faults no longer count
            state.new_circuit(self._new_circuit())
            group.pool.paused.pop(info.name, None)
            group.pool.resting.pop(info.name, None)
        state.open(info)
        group.pool.update(state, self._book.now_s)
        if no_longer:
            group.forget(no_longer)
        for model in info.models or ([] if group.queues else [""]):
            group.queues_of(model, self._book.now_s)
        self._changed()
        if was_awaited:
            self._fail_unlisted()

    def _fail_unlisted(self) -> None:
        """Fail requests of models that no engine lists, after the models of a further engine have become known."""
        for queues in list(self._group.without_engine):
            if not any(engine.serves(queues.model) for engine in self._engines.values()):
                for queued in queues.all_waiting():
                    queues.leave(queued)
                    self._book.fail(queued, "model_not_found")

    def close(self, state: EngineState, *, expected: bool) -> bool:
        """Send the engine no more requests; its running requests go on. True if it was ready."""
        was_ready = state.ready
        state.close(expected=expected)
        if was_ready:
            self._closed(state)
        if not expected:
            self._group.pool.residency.forget(state.info.name)  # else its prompts would count as warm for ever
        return was_ready

    def _closed(self, state: EngineState) -> None:
        pool = self._group.pool
        pool.paused.pop(state.info.name, None)
        pool.resting.pop(state.info.name, None)
        pool.update(state, self._book.now_s)
        self._changed()

    def lose(self, state: EngineState, answered: Collection[int], *, expected: bool) -> None:
        """Record that an engine and its runs are gone. answered : ids of requests whose clients have received bytes."""
        state.close(expected=expected)
        self._closed(state)
        self._group.pool.residency.forget(state.info.name)
        self._group.programs.lost(state.info.name)
        if state.loaded is not None:
            state.loaded.forget()
        again: dict[int, list[Run]] = {}  # by batch id, so that each batch runs again as one batch
        runs = list(state.running.values())
        state.remove(runs, self._book.now_s)
        for run in runs:
            if run.queued.cancelled:
                self._group.programs.gone(run.queued)
                self._book.forget([run.queued])
            elif run.queued.request.id in answered:
                self._book.fail(run.queued, "engine_lost")
            else:
                again.setdefault(run.batch_id, []).append(run)
        for unanswered in again.values():
            self._book.run_again(unanswered, "engine_lost", avoid=state.info.name)
        for run in runs:
            run.queued.refund()
        self._group.pool.refresh(state, self._book.now_s)  # engines that share its GPU may be free now
        self._changed()

    def report_circuit(self, name: str) -> None:
        """Report that the engine's circuit has opened, has been opened for longer, or has closed."""
        engine, pool = self._engines[name], self._group.pool
        until_s = engine.circuit.open_until_s
        pool.paused.pop(name, None)
        if until_s is not None:
            pool.paused[name] = engine
        self._book.actions.append(ReportCircuit(name, None if until_s is None else until_s - self._book.now_s))
        pool.refresh(engine, self._book.now_s)
        self._changed()

    def _changed(self) -> None:
        """Update the queues after engines have come or gone, or a circuit has opened or closed."""
        self._book.touch()
        self._book.invalidate()
        for queues in self._group.refresh_engines(self._book.now_s):
            self._book.watch_all(queues)
