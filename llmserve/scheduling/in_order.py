"""Formed batches start in order: the seam between orders that are keys and the engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from llmserve.scheduling.engine_state import EngineState
from llmserve.scheduling.floor import Floor
from llmserve.scheduling.lane import Lane
from llmserve.scheduling.queues import BinQueue, FormedBatch
from llmserve.scheduling.release import Room

Form = Callable[[Lane, BinQueue, int], None]
"""Have so many requests of a bin form a batch."""
Start = Callable[[EngineState, Lane, FormedBatch, int], None]
"""Start the first so many requests of a formed batch."""
ReleaseSize = Callable[[Lane, BinQueue, Room], int]
"""Requests that a bin lets go now."""


class InOrder:
    """Starts formed batches by their order's key, and has batches formed for engines that would idle.

    Each model's batches keep their order among themselves. One that waits for an engine of its own keeps nobody from
    other engines; one that waits for room lets nothing past it on any engine that serves it, or large ones would wait
    for ever.
    """

    def __init__(
        self, floor: Floor, lanes: dict[str, Lane], *, form: Form, start: Start, release_size: ReleaseSize
    ) -> None:
        self._floor = floor
        self._lanes = lanes
        self._form = form
        self._start = start
        self._release_size = release_size
        self._blocked: set[str] = set()  # engines that a batch waits for room on, since the last dispatch
        self._rooms: list[tuple[frozenset[str], Room, Room]] = []  # see _free_rooms
        self._rooms_at = -1  # changes of the floor

    def dispatch(self, now_s: float) -> None:
        """Start formed batches, in order, until no engine takes the next one."""
        held: list[tuple[Lane, FormedBatch]] = []
        blocked = self._blocked = set()
        self._rooms_at = -1
        while self._floor.free:
            lane = self._next(blocked, now_s)
            if lane is None:
                break
            batch = lane.formed.first()
            if batch is None:
                if not self._form_for_free_engine(blocked, now_s):
                    break
                continue
            engine = self.engine_for(lane, batch, now_s, blocked)
            if engine is not None:
                self._start(engine, lane, batch, self._count(engine, batch))
            elif self.waits_for_another_engine(lane, batch):
                lane.formed.set_aside(batch)
                held.append((lane, batch))
            else:
                looks = [engine.look_again_at_s for engine in self._floor.free_for(lane.model)]
                # One that was not asked now may remember a refusal of long ago.
                later = [at_s for at_s in looks if at_s is not None and at_s > now_s]
                lane.look_again_at_s = min(later, default=None)
                blocked |= {engine.info.name for engine in self._floor.free_for(lane.model)}
                self._rooms_at = -1
        for lane, batch in held:
            lane.formed.put_back(batch)

    def _next(self, blocked: Collection[str], now_s: float) -> Lane | None:
        """The lane of the batch that is next, formed or to be formed; None: nothing can start."""
        open_ = self._open_lanes(blocked)
        if len(open_) <= 1:
            return open_[0] if open_ else None
        turns = [(turn, lane) for lane in open_ if (turn := lane.formed.turn()) is not None]
        if not turns:
            return open_[0]
        lane = min(turns, key=lambda pair: pair[0])[1]
        if len(open_) > len(turns):
            self._form_older(open_, lane, now_s)
            turns = [(turn, lane) for lane in open_ if (turn := lane.formed.turn()) is not None]
            lane = min(turns, key=lambda pair: pair[0])[1]
        return lane

    def _open_lanes(self, blocked: Collection[str]) -> list[Lane]:
        """Those that wait and whose requests a free engine may take."""
        return [lane for lane in self._lanes.values() if lane.waiting and self._floor.has_free(lane.model, blocked)]

    def _form_older(self, lanes: list[Lane], first: Lane, now_s: float) -> None:
        """A model that seldom fills a batch is not kept waiting by one that always does: who has waited since before
        the next batch formed goes, as soon as its release would let it.
        """
        batch = first.formed.first()
        assert batch is not None
        for lane in lanes:
            if lane.formed.turn() is None:
                for queue in lane.bins:
                    if len(queue) and queue.oldest_at_s < batch.formed_at_s:
                        size = self._release_size(lane, queue, self.room(lane))
                        if size:
                            self._form(lane, queue, size)

    def _form_for_free_engine(self, blocked: Collection[str], now_s: float) -> bool:
        """An engine would idle: offer it the bin of greatest urgency. True if one let go."""
        willing: list[tuple[tuple[float, float], int, Lane, BinQueue, int]] = []
        for lane in self._open_lanes(blocked):
            room = self.room(lane) if lane.release.fills else Room.NONE
            if room is Room.NONE:
                continue
            for queue in lane.bins:
                if size := self._release_size(lane, queue, room):
                    turn = (lane.release.urgency(queue, now_s), -queue.oldest_at_s)
                    willing.append((turn, -len(willing), lane, queue, size))
        if not willing:
            return False
        self._form(*max(willing, key=lambda entry: entry[:2])[2:])
        return True

    def room(self, lane: Lane) -> Room:
        """What engines have for a batch that would be formed now, which one before it would not take.

        What looks ahead is not idle; but where only idle engines wait for company, busy ones take all they can.
        """
        first = lane.formed.first()
        if first is not None and not (
            self.waits_for_another_engine(lane, first)
            and all(self.waits_for_another_engine(lane, batch) for batch in lane.formed.batches())
        ):
            return Room.NONE
        found = Room.NONE
        for models, room, planned in self._free_rooms():
            if not models or lane.model in models:
                here = planned if lane.release.plans else room
                if here is Room.JOIN:
                    return here
                if here is Room.IDLE:
                    found = here
        return found

    def _free_rooms(self) -> list[tuple[frozenset[str], Room, Room]]:
        """What engines have that are free and not blocked, by the models that they serve: for a release that does not
        plan, and for one that does. As many entries as there are different sets of models, however many models wait.
        """
        if self._rooms_at != self._floor.changes:
            self._rooms_at = self._floor.changes
            rooms: dict[frozenset[str], tuple[bool, bool, bool]] = {}
            for name, engine in self._floor.free.items():
                if name not in self._blocked:
                    joins, holds, idles = rooms.get(engine.models, (False, False, False))
                    has_room, runs = engine.room > 0, bool(engine.running)
                    rooms[engine.models] = joins or (runs and has_room), holds or runs, idles or has_room
            self._rooms = [
                (models, _room(joins, idles), _room(holds, idles)) for models, (joins, holds, idles) in rooms.items()
            ]
        return self._rooms

    def waits_for_another_engine(self, lane: Lane, batch: FormedBatch) -> bool:
        """Only the engine that has just failed it has room, and another works."""
        if batch.avoid is None or not self._floor.another_works(batch.avoid, lane.model):
            return False
        return not any(
            engine.room > 0 for engine in self._floor.free_for(lane.model) if engine.info.name != batch.avoid
        )

    def engine_for(
        self, lane: Lane, batch: FormedBatch, now_s: float, blocked: Collection[str] = ()
    ) -> EngineState | None:
        """Where the batch, or its first request, starts now; None: nowhere yet. Not on those that are blocked.

        Free slots come first, wherever they are; a place to wait in at a busy engine is used only while more wait here
        than there are other engines, so that a slot which becomes free elsewhere still finds one. Never the engine that
        failed this batch while another works.
        """
        engines = self._floor.free_for(lane.model)
        if blocked:
            engines = [engine for engine in engines if engine.info.name not in blocked]
        if batch.avoid is not None and self._floor.another_works(batch.avoid, lane.model):
            engines = [engine for engine in engines if engine.info.name != batch.avoid]
        free = [engine for engine in engines if engine.room > 0]
        if not free and len(lane.formed) > lane.others:
            free = engines
        ticket = next(iter(batch.tickets.values()))
        per_token_s = lane.service.seconds_per_token
        fitting = [engine for engine in free if engine.fits(ticket, now_s, per_token_s)]
        if lane.release.plans:  # what runs is joined, or an idle engine would not have waited for company
            fitting = [engine for engine in fitting if engine.running] or fitting
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        return self._floor.preferred(fitting, ticket.request.prefixes)

    def _count(self, engine: EngineState, batch: FormedBatch) -> int:
        """Requests of the batch that start at once: all that have a slot; where memory is scarce, one by one."""
        if engine.info.barrier or (engine.info.tokens_max is None and engine.circuit.closed):
            return max(1, engine.room)
        return 1

    def check(self, now_s: float) -> None:
        """Assert that nothing waits past its release while an engine that could run it is idle."""
        blocked: set[str] = set()
        for lane in self._lanes.values():
            for queue in lane.bins:
                released = self._release_size(lane, queue, Room.NONE)
                assert released == 0, f"bin {queue.index} of {lane.model!r} waits past its release"
        for lane in sorted(self._lanes.values(), key=lambda lane: lane.formed.turn() or (math.inf, 0)):
            for batch in lane.formed.batches() if self._floor.free_for(lane.model) else ():
                engine = self.engine_for(lane, batch, now_s, blocked)
                assert engine is None, f"batch {batch.id} waits while an engine is free"
                if not self.waits_for_another_engine(lane, batch):
                    # It waits for room, and all others for it.
                    blocked |= {engine.info.name for engine in self._floor.free_for(lane.model)}
                    break
        for lane in self._open_lanes(blocked):
            room = self.room(lane)
            for queue in lane.bins if room is not Room.NONE else ():
                size = self._release_size(lane, queue, room)
                assert size == 0, f"bin {queue.index} of {lane.model!r} waits while an engine is free"


def _room(joins: bool, idles: bool) -> Room:
    return Room.JOIN if joins else Room.IDLE if idles else Room.NONE
