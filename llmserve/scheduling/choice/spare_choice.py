"""Which items of batch jobs start next, and on which engine: in slots that no waiting request could take.

A barrier engine gets items of like lengths in a batch, the longest first: of many that wait, few end much earlier than
their batch, and a job does not end with its longest answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from llmserve.request import Request
from llmserve.scheduling.admission import Admission
from llmserve.scheduling.choice.choice import Choice, Start
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.group import Forming, Group
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.preemptible_queue import PreemptibleQueue, Row, forecast_tokens
from llmserve.scheduling.queues.waiting import FormedBatch, QueuedRequest

PASSED_MOST = 8  # items that a later one may pass because they do not fit an engine's memory


class SpareChoice(Choice):
    """The choice of the items that start in one dispatch, after the requests in the queues.

    An item starts in a free slot if no request waits that the slot's engine serves, and more slots are free than the
    reserve (reserve.py). Items that end more slowly than their windows ask for use the reserve, too: that costs online
    requests less than items that are due later. Of each model, the item whose window ends first is next.
    """

    def __init__(
        self, group: Group, forming: Forming, now_s: float, *, items: PreemptibleQueue, admission: Admission
    ) -> None:
        super().__init__(group, forming, now_s)
        self._items, self._admission = items, admission
        self._alone = True  # whoever else waits does not want these engines
        self._rooms_s: dict[str, float | None] = {}  # by engine: when what is kept there for programs may be dropped

    def starts(self) -> Iterator[Start]:
        while self._items.waiting and (start := self._next()) is not None:
            yield start

    def _next(self) -> Start | None:
        """The items that start next, as a batch; None: none can."""
        if any(engine.worker.reserved is not None for engine in self._pool.engines.values()):
            return None  # requests wait for an engine that makes room
        waited_for = self._group.tally.queues  # their engines are left to them
        free = [
            engine
            for engine in self._pool.free.values()
            if engine.room > 0 and not any(engine.serves(model) for model in waited_for)
        ]
        for model, row in self._items.by_window() if free else ():
            engines = [engine for engine in free if engine.open_to(model)]
            if engines:
                queues = self._group.queues_of(model, self._now_s)
                beyond = self._beyond_reserve(queues, engines)
                if beyond and (start := self._start_of(queues, beyond, row)) is not None:
                    return start
        return None

    def _beyond_reserve(self, queues: ModelQueues, engines: Sequence[EngineState]) -> Sequence[EngineState]:
        """Engines on which an item may start. A barrier engine gives all its slots at once."""
        reserve = self._admission.reserves.get(queues.fair)
        if reserve is None or queues.model in self._items.starved:
            return engines
        online, items = self._admission.held(queues)
        most = reserve.items_most(self._now_s, online, queues.all_slots, self._items.item_s(queues))
        return [engine for engine in engines if items + (engine.info.slots if engine.info.barrier else 1) <= most]

    def _start_of(self, queues: ModelQueues, engines: Sequence[EngineState], row: Row) -> Start | None:
        """A start of the model's next items on one of these engines; None: no engine takes any."""
        for *_, item in islice(row, PASSED_MOST):
            queued = self._queued(queues, item)
            willing = self._willing(queues, FormedBatch(0, queued.bin, self._now_s, [queued]), engines)
            engine = self._best_for(queues, queued, willing)
            if engine is not None:
                most = min(engine.room_at_once, self._forming.batch_size)
                items = self._alike(queues, row, most) if engine.info.barrier else [queued]
                batch = self._forming.form(queues, max([item.bin for item in items]), items, self._now_s)
                return engine, queues, batch, len(items)
        return None

    def _alike(self, queues: ModelQueues, row: Row, most: int) -> list[QueuedRequest]:
        """Items of like lengths for one batch: the longest of those with the first end of a window, then the next."""
        items = [item for *_, item in row]
        first_s = items[0].deadline_s
        same = [item for item in items if item.deadline_s == first_s]
        chosen = sorted(same, key=lambda item: (-forecast_tokens(queues, item), item.id))[:most]
        chosen += items[len(same) : len(same) + most - len(chosen)]
        return [self._queued(queues, item) for item in chosen]

    def _queued(self, queues: ModelQueues, item: Request) -> QueuedRequest:
        queued = queues.queued_apart(item, self._items.surplus, self._now_s)
        self._group.programs.item(queued, self._now_s)
        return queued

    def _has_room(self, queued: QueuedRequest, engine: EngineState) -> bool:
        has_room, name = super()._has_room(queued, engine), engine.info.name
        if not has_room and name not in self._rooms_s:
            self._rooms_s[name] = self._group.programs.next_room_s(engine, self._now_s)
        return has_room

    @property
    def recheck_at_s(self) -> float | None:
        return min([at_s for at_s in self._rooms_s.values() if at_s is not None], default=None)
