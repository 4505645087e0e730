"""Which batch starts next, and on which engine, in one dispatch by an order with fixed keys.

The order takes the first formed batch of all models, or lets the most urgent bin form one; then an engine is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from llmserve.scheduling.choice.choice import Choice, Start
from llmserve.scheduling.choice.placement import later
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.fair import FairShares, Share
from llmserve.scheduling.group import Forming, Group
from llmserve.scheduling.memory import is_large
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import BinQueue, FormedBatch, QueuedRequest

First = tuple[ModelQueues, FormedBatch]


class FixedChoice(Choice):
    """The choice of the batches that start in one dispatch, by an order with fixed keys.

    Each model's batches keep their order. A batch that must avoid an engine blocks no other batch. A batch that waits
    for room blocks all engines of the model, so that large batches do not wait for ever. A batch that needs more than a
    fair share of the memory blocks a single engine, and gets this engine's memory token (memory.py).
    """

    def __init__(self, group: Group, forming: Forming, now_s: float) -> None:
        super().__init__(group, forming, now_s)
        self._blocked: frozenset[str] = frozenset()  # names of engines on which a batch waits for room
        self._skipped: set[FormedBatch] = set()  # batches that others may pass
        self._formed = False  # whether a batch has formed since the last look for the first batch began
        self._lines: set[str] = set()  # names of engines on which a step of a program waits for room
        self._rechecks_s: list[float] = []  # when a batch may fit an engine's memory, or waits for a busy one no longer
        self._later: EngineState | None = None  # the busy engine for which the batch looked at last waits

    def starts(self) -> Iterator[Start]:
        startable = self._startable()
        self._sort(startable)
        while startable:
            self._formed = False
            first, unformed = self._first(startable)
            if first is not None and unformed and self._form_older(unformed, first[1]):
                first, _ = self._first(startable)
            if self._formed and (self._skipped or self._blocked):
                self._begin_again()
            elif first is None:
                if not self._form_most_urgent(startable) and not self._begin_alone():
                    return
            elif (engine := self.engine_for(*first, self._blocked)) is not None:
                yield engine, *first, max(1, engine.room_at_once)
                if not self._pool.free:
                    return
                self._begin_again()
            else:
                self.hold(*first)
            startable = self._startable()

    def _begin_again(self, *, alone: bool = False) -> None:
        """Forget what could not start before a batch formed or started: with more formed requests look-ahead places may
        be used, and after a start fewer batches wait in front.
        """
        self._skipped, self._blocked, self._alone = set(), frozenset(), alone
        self._lines.clear()

    def _begin_alone(self) -> bool:
        """Try the skipped batches once more, now that no other can start. True at the first time."""
        again = bool(self._skipped) and not self._alone
        if again:
            self._begin_again(alone=True)
        return again

    @property
    def recheck_at_s(self) -> float | None:
        if not (self._skipped or self._blocked or self._rechecks_s):
            return None
        times_s: list[float | None] = [*self._rechecks_s, *self._prompts_over_s]
        for engine in self._pool.free.values() if self._skipped or self._blocked else ():
            times_s.append(engine.circuit.suspects_from_s)
            if self._skipped:
                times_s += (engine.recheck_at_s(self._now_s), engine.memory_token.rests_until_s)
        return min([at_s for at_s in times_s if at_s is not None and at_s > self._now_s], default=None)

    # ---- batches that do not start ----

    def hold(self, queues: ModelQueues, batch: FormedBatch) -> None:
        """Skip a batch that cannot start now, or let it block engines, or both."""
        formed, model = queues.formed, queues.model
        if self._later is not None:
            formed.set_apart_behind(batch, self._later.info.name)
            self._skipped.add(batch)
            self._rechecks_s.append(batch.later_until_s)
            return
        if self.waits_for_another_engine(queues, batch):
            self._skipped.add(formed.set_apart(batch))
            return
        engines = self._willing(queues, batch, self._pool.free_for(model))
        first, programs = batch.first, self._group.programs
        homes = programs.home(first, engines) if first.turn is not None else engines
        behind = [engine for engine in homes if self._comes_behind(queues, first, engine)]
        if behind and len(behind) == len(homes):
            formed.set_apart_behind(batch, "")
            self._skipped.add(batch)
            return
        engines = [engine for engine in engines if engine not in behind]
        in_room = first.turn is not None and any(engine.room > 0 for engine in engines)
        if in_room and all(programs.counts(engine, first) for engine in engines):
            if formed.set_apart_large(batch):
                self._skipped.add(batch)
                self._wait_for_room(first, engines)
            return
        modest = [engine for engine in engines if not is_large(batch.first, engine.info)]
        if len(modest) == len(engines):
            self._block(model, engines if behind else self._pool.free_for(model))
            return
        if formed.set_apart_large(batch):
            self._skipped.add(batch)
            self._block(model, modest or self._token_for(batch.first, engines))

    def _has_room(self, queued: QueuedRequest, engine: EngineState) -> bool:
        if engine.info.name in self._lines and not self._group.programs.passes(queued, engine):
            return False
        return super()._has_room(queued, engine)

    def _wait_for_room(self, first: QueuedRequest, engines: Sequence[EngineState]) -> None:
        """Let no larger request pass this one, which waits for room in these engines."""
        if self._group.tally.items and not self._lines:
            self._group.programs.wait_for_room(first, [engine for engine in engines if engine.room > 0])
        for engine in engines:
            if engine.room > 0:
                self._lines.add(engine.info.name)
            if (at_s := self._group.programs.next_room_s(engine, self._now_s)) is not None:
                self._rechecks_s.append(at_s)

    def _token_for(self, first: QueuedRequest, engines: Sequence[EngineState]) -> list[EngineState]:
        """Give a request that waits for memory the token of one of these engines. Returns the engine; []: no token is
        free.
        """
        open_ = [engine for engine in engines if engine.memory_token.is_open_to(first, self._now_s)]
        held = [engine for engine in open_ if engine.memory_token.holder is first]
        others = [engine for engine in open_ if engine.info.name not in self._blocked]
        if not held and not others:
            return []
        chosen = min(held or others, key=lambda engine: (engine.room <= 0, engine.total_tokens, engine.info.name))
        chosen.memory_token.wait(first, self._now_s)
        return [chosen]

    def _block(self, model: str, engines: Sequence[EngineState]) -> None:
        """Let no later batch of any model start on these engines, which serve `model`."""
        times_s = [engine.recheck_at_s(self._now_s) for engine in engines]
        self._rechecks_s += [at_s for at_s in times_s if at_s is not None]
        self._blocked |= {engine.info.name for engine in engines}

    # ---- choice of a batch ----

    def _startable(self) -> list[ModelQueues]:
        """Queues with waiting requests that some free engine, which is not blocked, serves."""
        waiting = self._group.tally.queues.values()
        if not waiting:
            return []
        engines: Collection[EngineState] = self._pool.free.values()
        if self._blocked:
            engines = [engine for engine in engines if engine.info.name not in self._blocked]
        if self._pool.resting or self._pool.sharing:
            return [queues for queues in waiting if any(engine.open_to(queues.model) for engine in engines)]
        for engine in engines:
            if not engine.models:  # this engine serves every model
                return list(waiting)
        return [queues for queues in waiting if any(queues.model in engine.models for engine in engines)]

    def _first(self, startable: Sequence[ModelQueues]) -> tuple[First | None, Sequence[ModelQueues]]:
        """The next formed batch with its queues, None if no batch is formed; and the queues without a formed batch."""
        best: First | None = None
        key, number, unformed = math.inf, 0, []
        next_shares: dict[FairShares, Share] | None = None  # None: no shares compete
        for queues in startable:
            if next_shares is None and queues.fair.contended:
                next_shares = self._next_shares(startable)
            share = next_shares.get(queues.fair) if next_shares is not None else None
            only = queues.formed.only
            batch = only[0][3] if only and share is None else queues.formed.first(self._skipped, share)
            if batch is None:
                if share is None or queues.formed.first(self._skipped) is None:
                    unformed.append(queues)
            elif best is None or batch.key < key or (batch.key == key and batch.id < number):
                best, key, number = (queues, batch), batch.key, batch.id
        return best, unformed

    def _next_shares(self, startable: Sequence[ModelQueues]) -> dict[FairShares, Share]:
        """Of the shares that compete, the least served one for which a batch has formed, or can be formed now."""
        competing: dict[FairShares, list[ModelQueues]] = {}
        for queues in startable:
            if queues.fair.contended:
                competing.setdefault(queues.fair, []).append(queues)
        chosen: dict[FairShares, Share] = {}
        for fair, members in competing.items():
            for share in self._shares_in_order(fair, members):
                formed = any(queues.formed.first(self._skipped, share) is not None for queues in members)
                if formed or self._form_for(share, members):
                    chosen[fair] = share
                    break
        return chosen

    def _shares_in_order(self, fair: FairShares, members: Sequence[ModelQueues]) -> Iterator[Share]:
        """The shares that compete, the least served first. The share served last comes before these if its next prompt
        begins as the last did.
        """
        last = fair.last
        if last is not None and last.waiting and last.beginning:
            batches = [queues.formed.first(self._skipped, last) for queues in members]
            firsts = [batch.first.request for batch in batches if batch is not None]
            if any(last.goes_on(request.prompt_tokens, request.blocks) for request in firsts):
                yield last
        yield from fair

    def _form_for(self, share: Share, startable: Sequence[ModelQueues]) -> bool:
        """Form a batch with a request of the share, where the release allows as if no other batch had formed."""
        for queues in startable:
            idle = self._idle(queues, self._blocked, queues.release.plans)
            for queue in queues.bins if idle is not None else ():
                if queue.waits_here(share) and (size := self._forming.size(queues, queue, self._now_s, idle)):
                    self._form(queues, queue, size)
                    if queues.formed.fresh(share) is not None:
                        return True
        return False

    def _form_older(self, unformed: Sequence[ModelQueues], next_batch: FormedBatch) -> bool:
        """Form batches of bins whose oldest request is older than the next batch, where the release allows. Without
        this, a model that always fills its batches would starve the others. True if a batch was formed.
        """
        formed = False
        for queues in unformed:
            for queue in queues.bins:
                if queue.requests and queue.oldest_at_s < next_batch.formed_at_s:
                    size = self._forming.size(queues, queue, self._now_s, self.idle(queues))
                    if size:
                        self._form(queues, queue, size)
                        formed = True
        return formed

    def _form_most_urgent(self, startable: Sequence[ModelQueues]) -> bool:
        """Form a batch of the most urgent bin whose release allows one. True if a batch was formed."""
        best: tuple[float, float] | None = None
        chosen: tuple[ModelQueues, BinQueue, int] | None = None
        deferred = self._group.tally.deferred
        for queues in startable:
            may_form = queues.release.fills or queues.model in deferred  # else all that may form has formed early
            idle = self.idle(queues) if may_form else None
            if idle is None:
                continue
            for queue in queues.bins:
                if queue.requests and (size := self._forming.size(queues, queue, self._now_s, idle)):
                    turn = (queues.release.urgency(queue, self._now_s), -queue.oldest_at_s)
                    if best is None or turn > best:
                        best, chosen = turn, (queues, queue, size)
        if chosen is None:
            return False
        self._form(*chosen)
        self._begin_again()
        return True

    def _form(self, queues: ModelQueues, queue: BinQueue, size: int) -> None:
        self._forming.push(queues, queue, size, self._now_s)
        self._formed = True

    # ---- choice of an engine ----

    def idle(self, queues: ModelQueues) -> bool | None:
        """Whether all engines on which a newly formed batch could start are idle; None: no such engine, or an earlier
        batch comes first.

        An engine that has look-ahead places only is ignored; but with a release that follows plans it counts as busy:
        then busy engines take all they can, and only idle engines wait for more requests.
        """
        formed = queues.formed
        if formed:
            others = [batch for batch in (*formed.returned, *formed.passable) if batch not in self._skipped]
            if formed.has_fresh or not all(self._may_be_passed(queues, batch) for batch in others):
                return None
        return self._idle(queues, self._blocked, queues.release.plans)

    def idle_after(self, queues: ModelQueues) -> bool | None:
        self._skipped = set()
        return self.idle(queues)

    def waits_for_another_engine(self, queues: ModelQueues, batch: FormedBatch) -> bool:
        """Whether only engines on trial have room, or engines that failed the batch, while another works."""
        engines = [engine for engine in self._pool.free_for(queues.model) if engine.room > 0]
        if self._willing(queues, batch, engines):
            return False
        return bool(engines) or (bool(batch.avoid) and self._others_work(queues, batch))

    def _may_be_passed(self, queues: ModelQueues, batch: FormedBatch) -> bool:
        if self.waits_for_another_engine(queues, batch):
            return True
        engines = self._willing(queues, batch, self._pool.free_for(queues.model))
        return batch.first.turn is not None or any(self._lets_pass(queues, batch.first, engine) for engine in engines)

    def engine_for(self, queues: ModelQueues, batch: FormedBatch, blocked: Collection[str]) -> EngineState | None:
        """The engine on which the batch, or its first request, starts now; None: no engine. blocked : engine names.

        Free slots come first. A look-ahead place at a busy engine is used only while at least as many formed requests
        wait as there are engines, so that a slot that becomes free elsewhere still gets a request. No free slot is
        taken while it costs less to wait for a busy engine that has more of the prompt (placement.py).
        """
        self._later = None
        engines = self._willing(queues, batch, self._pool.free_for(queues.model, blocked))
        free: Sequence[EngineState] = [engine for engine in engines if engine.room > 0]
        if not free and len(queues.formed) >= len(queues.engines):
            free = engines
        first = batch.first
        best = self._best_for(queues, first, free)
        if best is None or not first.request.blocks or len(queues.engines) == 1:
            return best
        self._later = later(self._pool, queues, batch, best, self._now_s)
        return best if self._later is None else None
