"""The engines, all together: who is there, who takes something now, and who takes what."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from llmserve.request import EngineInfo
from llmserve.scheduling.affinity import PrefixMemory
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.engine_state import EngineState, Worker

IMBALANCE = 0.25  # share of its slots by which an engine may be busier than another and still be preferred for a prefix


class Floor:
    """free: engines that take something now.  paused: those whose circuit's pause is not over.  Both by name.

    changes: how often one has begun or ended something, come or gone.
    """

    def __init__(self) -> None:
        self.engines: dict[str, EngineState] = {}
        self.workers: dict[str, Worker] = {}
        self.free: dict[str, EngineState] = {}
        self.paused: dict[str, EngineState] = {}
        self.changes = 0
        self._prefixes = PrefixMemory()

    def place(self, info: EngineInfo, circuit: Circuit) -> EngineState:
        """An engine that was not known before."""
        name = info.worker or info.name
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = Worker()
        kinds = {engine.info.barrier for engine in worker.engines} | {info.barrier}
        assert len(kinds) == 1, f"{info.name} would share {name} with engines of another kind"
        state = self.engines[info.name] = EngineState(info, circuit, worker)
        return state

    def serving(self, model: str) -> list[EngineState]:
        """Ready ones."""
        return [engine for engine in self.engines.values() if engine.ready and engine.serves(model)]

    def free_for(self, model: str) -> list[EngineState]:
        return [engine for engine in self.free.values() if not engine.models or model in engine.models]

    def has_free(self, model: str, blocked: Collection[str] = ()) -> bool:
        """Whether an engine that is not blocked takes a model's requests now."""
        for name, engine in self.free.items():
            if name not in blocked and (not engine.models or model in engine.models):
                return True
        return False

    def another_works(self, name: str, model: str) -> bool:
        return any(engine.info.name != name and engine.circuit.closed for engine in self.serving(model))

    def note(self, engine: EngineState, now_s: float) -> None:
        """Whether it, and those that share its GPU, take something now; after every change of what it runs."""
        self.changes += 1
        for each in engine.worker.engines:
            if each.takes(now_s):
                self.free[each.info.name] = each
            else:
                self.free.pop(each.info.name, None)

    def end_pauses(self, now_s: float) -> None:
        for name, engine in list(self.paused.items()):
            if engine.circuit.takes(now_s):
                del self.paused[name]
                self.note(engine, now_s)

    # ---- which one ----

    def preferred(self, engines: Iterable[EngineState], prefixes: tuple[int, ...]) -> EngineState:
        """The one with the most room; or one that has served the same prefix lately and is hardly busier."""
        best = min(engines, key=lambda engine: (-engine.room, engine.info.name))
        if not prefixes:
            return best
        near = {
            engine.info.name: engine for engine in engines if engine.room + IMBALANCE * engine.info.slots >= best.room
        }
        known = self._prefixes.among(prefixes, near)
        return min([near[name] for name in known], key=lambda engine: -engine.room, default=best)

    def served(self, prefixes: tuple[int, ...], engine: EngineState) -> None:
        if len(self.engines) > 1:
            self._prefixes.served(prefixes, engine.info.name)

    def forget(self, engine: EngineState) -> None:
        """It has lost its cache."""
        self._prefixes.forget(engine.info.name)
