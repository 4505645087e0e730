"""Which batch starts next, and where: what one dispatch of a group finds, by an order with fixed keys or of the moment.

A fixed order looks at the first formed batch of each model, and has the most urgent bin form one where none is formed;
then it looks for an engine. An order of the moment looks at all candidates of an engine that is free.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from llmserve.scheduling.batch_times import Timetable
from llmserve.scheduling.deadline_queue import DeadlineQueue, FormedRow
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.model_queues import Forming, Group, ModelQueues
from llmserve.scheduling.orders import Candidate, Key, MomentOrder, Running, is_overdue
from llmserve.scheduling.queues import BinQueue, FormedBatch, Run

Start = tuple[EngineState, ModelQueues, FormedBatch, int]
"""The first so many requests of a formed batch shall start on this engine."""
First = tuple[ModelQueues, FormedBatch]


# ---- orders with a fixed key ---------------------------------------------------------------------------------------


class FixedChoice:
    """What starts in one dispatch of a group by a fixed order.

    Each model's batches keep their order among themselves. One that waits for an engine of its own keeps nobody from
    other engines; one that waits for room lets nothing past it on any engine that serves it, or large ones would wait
    for ever.
    """

    def __init__(self, group: Group, forming: Forming, now_s: float) -> None:
        self._group = group
        self._pool = group.pool
        self._forming = forming
        self._now_s = now_s
        self._blocked: frozenset[str] = frozenset()  # engines that a batch waits for room on
        self._aside: frozenset[FormedBatch] = frozenset()  # those that wait for another engine
        self._looks_s: dict[str, float] = {}  # by model: when its first batch may fit an engine's memory

    def starts(self) -> Iterator[Start]:
        """One after the other; each must have been started before the next is asked for."""
        while self._pool.free and (open_ := self._open()):
            first, unformed = self._first(open_)
            if first is not None and unformed and self._form_older(unformed, first[1]):
                first, _ = self._first(open_)
            if first is None:
                if not self._form_most_urgent(open_):
                    return
                continue
            queues, batch = first
            if (engine := self.engine_for(queues, batch, self._blocked)) is not None:
                yield engine, queues, batch, max(1, engine.room_at_once)
            elif self.waits_for_another_engine(queues, batch):
                self._aside |= {batch}
            else:
                self._block(queues.model)

    @property
    def look_again_at_s(self) -> float | None:
        return min(self._looks_s.values()) if self._looks_s else None

    def _block(self, model: str) -> None:
        free = self._pool.free_for(model)
        looks_s = [engine.look_again_at_s for engine in free]
        # One that was not asked now may remember a refusal of long ago.
        later_s = [at_s for at_s in looks_s if at_s is not None and at_s > self._now_s]
        if later_s:
            self._looks_s[model] = min(later_s)
        self._blocked |= {engine.info.name for engine in free}

    # ---- which batch ----

    def _open(self) -> list[ModelQueues]:
        """Those that wait and whose requests a free engine may take."""
        waiting = self._group.tally.queues.values()
        if not waiting:
            return []
        engines: Collection[EngineState] = self._pool.free.values()
        if self._blocked:
            engines = [engine for engine in engines if engine.info.name not in self._blocked]
        for engine in engines:
            if not engine.models:  # it serves whatever is asked for
                return list(waiting)
        return [queues for queues in waiting if any(queues.model in engine.models for engine in engines)]

    def _first(self, open_: Sequence[ModelQueues]) -> tuple[First | None, Sequence[ModelQueues]]:
        """Whose formed batch is next, and which, None if there is none; and those that have none."""
        best: First | None = None
        key, number, unformed = math.inf, 0, []
        for queues in open_:
            batch = queues.formed.first(self._aside)
            if batch is None:
                unformed.append(queues)
            elif best is None or batch.key < key or (batch.key == key and batch.id < number):
                best, key, number = (queues, batch), batch.key, batch.id
        return best, unformed

    def _form_older(self, unformed: Sequence[ModelQueues], next_: FormedBatch) -> bool:
        """A model that seldom fills a batch is not kept waiting by one that always does: who has waited since before
        the next batch formed goes, as soon as its release would let it. True if one does.
        """
        formed = False
        for queues in unformed:
            for queue in queues.bins:
                if queue.requests and queue.oldest_at_s < next_.formed_at_s:
                    size = self._forming.size(queues, queue, self._now_s, self.idle(queues))
                    if size:
                        self._forming.push(queues, queue, size, self._now_s)
                        formed = True
        return formed

    def _form_most_urgent(self, open_: Sequence[ModelQueues]) -> bool:
        """An engine would idle: offer it the bin of greatest urgency. True if one let go."""
        best: tuple[float, float] | None = None
        chosen: tuple[ModelQueues, BinQueue, int] | None = None
        for queues in open_:
            idle = self.idle(queues) if queues.release.fills else None
            if idle is None:
                continue
            for queue in queues.bins:
                if queue.requests and (size := self._forming.size(queues, queue, self._now_s, idle)):
                    turn = (queues.release.urgency(queue, self._now_s), -queue.oldest_at_s)
                    if best is None or turn > best:
                        best, chosen = turn, (queues, queue, size)
        if chosen is None:
            return False
        self._forming.push(*chosen, self._now_s)
        self._aside = frozenset()  # where more wait, a place to look ahead may be theirs
        return True

    # ---- which engine ----

    def idle(self, queues: ModelQueues) -> bool | None:
        """Whether engines on which a batch could start that is formed now, after all before it, run nothing.

        None: there is no such engine.

        What looks ahead is not idle; but where only idle engines wait for company, busy ones take all they can.
        """
        if queues.formed:
            others = [batch for batch in queues.formed.returned if batch not in self._aside]
            if queues.formed.fresh() or not all(self.waits_for_another_engine(queues, batch) for batch in others):
                return None
        idle = None
        for engine in self._pool.free_for(queues.model, self._blocked):
            has_room = engine.room > 0
            if engine.running and (has_room or queues.release.plans):
                return False
            if has_room:
                idle = True
        return idle

    def waits_for_another_engine(self, queues: ModelQueues, batch: FormedBatch) -> bool:
        """Only the engine that has just failed it has room, and another works."""
        if batch.avoid is None or not self._pool.another_works(batch.avoid, queues.model):
            return False
        others = [engine for engine in self._pool.free_for(queues.model) if engine.info.name != batch.avoid]
        return not any(engine.room > 0 for engine in others)

    def engine_for(self, queues: ModelQueues, batch: FormedBatch, blocked: Collection[str]) -> EngineState | None:
        """Where the batch, or its first request, starts now; None: nowhere yet. Not on those that are blocked.

        Free slots come first, wherever they are; a place to wait in at a busy engine is used only while more wait here
        than there are other engines, so that a slot which becomes free elsewhere still finds one. Never the engine that
        failed this batch while another works.
        """
        engines = self._pool.free_for(queues.model, blocked)
        if batch.avoid is not None and self._pool.another_works(batch.avoid, queues.model):
            engines = [engine for engine in engines if engine.info.name != batch.avoid]
        free = [engine for engine in engines if engine.room > 0]
        if not free and len(queues.formed) >= len(queues.engines):
            free = engines
        first, per_token_s = batch.first, queues.service.seconds_per_token
        fitting = [engine for engine in free if engine.fits(first, self._now_s, per_token_s)]
        if queues.release.plans:  # what runs is joined, or an idle engine would not have waited for company
            fitting = [engine for engine in fitting if engine.running] or fitting
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        return self._pool.preferred(fitting, first.request.prefixes)

    def idle_after(self, queues: ModelQueues) -> bool | None:
        """`idle`, when all that can start has been started."""
        self._aside = frozenset()
        return self.idle(queues)


# ---- orders of the moment ------------------------------------------------------------------------------------------


class MomentChoice:
    """What starts in one dispatch of a group by an order of the moment.

    Of an engine the first of these that there is: what another engine failed or lost, for it has waited longest; what
    has waited too long without a deadline; the candidate of the smallest key, of all that are in time if answers are as
    long as on average, else of all that are in time if they are short; and where nothing could be in time by what the
    engine was told to take, and nothing has shown lately whether it does, one request on trial.
    """

    def __init__(self, group: Group, forming: Forming, order: MomentOrder, times: Timetable, now_s: float) -> None:
        self._group = group
        self._pool = group.pool
        self._forming = forming
        self._order = order
        self._times = times
        self._now_s = now_s
        self._wakes_s: list[float] = []

    def starts(self) -> Iterator[Start]:
        """One after the other; each must have been started before the next is asked for."""
        for name in sorted(self._pool.free):
            while self._group.tally.waiting and (engines := self._sharing(name)):
                start = self._best(engines)
                if start is None:
                    self._note_wakes(engines, name)
                    break
                yield start

    @property
    def look_again_at_s(self) -> float | None:
        return min(self._wakes_s, default=None)

    def _note_wakes(self, engines: Sequence[EngineState], name: str) -> None:
        times_s = [self._order.wake_at_s(name, self._now_s), *[engine.look_again_at_s for engine in engines]]
        self._wakes_s += [at_s for at_s in times_s if at_s is not None and at_s > self._now_s]

    def _sharing(self, name: str) -> Sequence[EngineState]:
        """Engines one of which could begin something now, by the first one's name: of a GPU that runs one batch at a
        time all that are free, else one alone. () for a name that is not the first, or not free.
        """
        engine = self._pool.free.get(name)  # it may have gone with another that shares its GPU
        if engine is None or engine.room <= 0:
            return ()
        if not engine.info.barrier or len(engine.worker.engines) == 1:
            return (engine,)
        sharing = [each for each in engine.worker.engines if each.info.name in self._pool.free]
        return sharing if sharing[0] is engine else ()

    def idle_after(self, queues: ModelQueues) -> bool | None:
        """Whether the engines that are free for a model run nothing; None: there is none."""
        free = [engine for engine in self._pool.free_for(queues.model) if engine.room > 0]
        return not any(engine.running for engine in free) if free else None

    def _best(self, engines: Sequence[EngineState]) -> Start | None:
        """None: there is nothing for these engines."""
        for engine in engines:
            if (returned := self._returned(engine)) is not None:
                return returned
        # Answers differ in length: what would be late on average may be in time, and there is nothing better.
        found = self._overdue(engines) or self._pick(engines) or self._pick(engines, by_least=True)
        found = found or self._trial(engines)
        return self.started(found) if found is not None else None

    def started(self, candidate: Candidate) -> Start | None:
        """None while the engine's memory does not hold it: nothing that would overtakes it."""
        engine, queues = candidate.engine, self._group.queues[candidate.model]
        if not engine.fits(candidate.first(self._now_s), self._now_s, queues.service.seconds_per_token):
            return None
        return engine, queues, *self.take(candidate)

    def take(self, candidate: Candidate) -> tuple[FormedBatch, int]:
        """What the candidate is composed of: the first so many requests of a batch, which is formed if it was not."""
        queues, chosen = self._group.queues[candidate.model], candidate.take(self._now_s)
        batch = candidate.batch
        if batch is None:
            batch = self._forming.form(queues, candidate.queue.index, chosen, self._now_s)
            queues.formed.hold(batch)
        else:
            batch.put_first(chosen)
        return batch, len(chosen)

    def take_back(self, batch: FormedBatch) -> None:
        """Its requests wait in their bins again."""
        queues, requests = self._group.queues[batch.model], list(batch.requests.values())
        for queued in requests:
            queues.leave(queued)
        for queue in queues.take_back(requests):
            self._forming.form_early(queues, queue, self._now_s)

    def _returned(self, engine: EngineState) -> Start | None:
        """Of a batch that came back, all that can be in time together, at least if their answers are short."""
        for queues in self._group.tally.queues.values():
            if not queues.formed or not engine.serves(queues.model):
                continue
            for batch in queues.formed.returned:
                if batch.avoid == engine.info.name and self._pool.another_works(engine.info.name, queues.model):
                    continue
                for by_least in (False, True):
                    candidate = self._formed(engine, queues, batch, engine.room_at_once, by_least=by_least)
                    candidate.count = candidate.largest(self._now_s)
                    if candidate.count:
                        self.take(candidate)
                        if engine.fits(batch.first, self._now_s, queues.service.seconds_per_token):
                            return engine, queues, batch, candidate.count
                        break
        return None

    def _overdue(self, engines: Sequence[EngineState]) -> Candidate | None:
        """A request without a deadline waits no longer than UNDATED_S for others, or it might for ever. Of those that
        have, the one that came first goes first, whatever its model.
        """
        if not any(self._has_overdue(queues) for queues in self._group.tally.queues.values()):
            return None
        best: tuple[tuple[float, int], Candidate] | None = None
        for engine in engines:
            for candidate in self._all_candidates(engine):
                oldest = candidate.queue.oldest_undated()
                if oldest is not None and is_overdue(oldest, self._now_s):
                    turn = oldest.arrived_at_s, oldest.request.id
                    if best is None or turn < best[0]:
                        best = turn, candidate
        if best is None:
            return None
        _, found = best
        found.place = found.queue.first_at(math.inf)
        found.count = min(found.most, len(found.queue) - found.place)
        return found

    def _has_overdue(self, queues: ModelQueues) -> bool:
        oldest = [queue.oldest_undated() for queue in queues.bins if isinstance(queue, DeadlineQueue)]
        if queues.formed:
            oldest += [queued for batch in queues.formed.batches() for queued in batch.requests.values()]
        return any(queued is not None and is_overdue(queued, self._now_s) for queued in oldest)

    def _trial(self, engines: Sequence[EngineState]) -> Candidate | None:
        """The request with the latest deadline, alone on an engine that runs nothing. Else a profile that is too slow
        would have everything refused, and nothing would ever run that shows how wrong it is.
        """
        for engine in engines:
            if engine.running or not engine.info.speeds:
                continue
            for candidate in self._all_candidates(engine):
                model, queue = candidate.model, candidate.queue
                if engine.speed(model) is None or self._now_s < engine.proven_until_s(model):
                    continue
                candidate.batch_s, candidate.most = (0.0,), 1  # as if it took no time
                if self._key(candidate) is not None:
                    candidate.queue, candidate.shorter = queue, ()
                    candidate.count, candidate.place = 1, len(queue) - 1
                    return candidate
        return None

    def _all_candidates(self, engine: EngineState) -> Iterator[Candidate]:
        for queues in self._group.tally.queues.values():
            if engine.serves(queues.model):
                most = min(self._forming.batch_size, engine.room_at_once)
                yield from self._candidates(engine, queues, most, (), by_least=False)

    def _pick(self, engines: Sequence[EngineState], *, by_least: bool = False) -> Candidate | None:
        """The candidate of the smallest key, of these engines, which are free."""
        waiting = self._group.tally.queues.values()
        best: tuple[Key, Candidate] | None = None
        for engine in engines:
            best = self.best_of(engine, waiting, engine.room_at_once, best=best, by_least=by_least)
        return best[1] if best is not None else None

    def best_of(
        self,
        engine: EngineState,
        waiting: Collection[ModelQueues],
        room: int,
        *,
        best: tuple[Key, Candidate] | None = None,
        by_least: bool = False,
        running: Running | None = None,
        at_least: float = 1,
    ) -> tuple[Key, Candidate] | None:
        """The candidate of the smallest key: the best so far, or one of these queues that the engine could serve.

        room : requests that it has or would have room for.  running : that run on it, and would make room.  at_least :
        requests that a batch could hold, with those that run.
        """
        order, most = self._order, min(self._forming.batch_size, room)
        for queues in waiting:
            runs = running.runs if running is not None and running.runs[0].queued.request.model == queues.model else ()
            count = queues.waiting + len(runs)
            if count < at_least or not engine.serves(queues.model):
                continue
            if best is not None and order.least_key(min(count, most)) > best[0]:
                continue
            for candidate in self._candidates(engine, queues, most, runs, by_least=by_least):
                if candidate.waiting < at_least:
                    continue
                if best is not None and order.least_key(min(candidate.waiting, candidate.most)) > best[0]:
                    continue
                key = self._key(candidate)
                if key is not None and (best is None or key < best[0]):
                    best = key, candidate
        return best

    def _key(self, candidate: Candidate) -> Key | None:
        """The order's, once it has composed the candidate; None: it shall not run now."""
        return self._order.key(candidate, self._now_s) if self._order.compose(candidate, self._now_s) else None

    def _candidates(
        self, engine: EngineState, queues: ModelQueues, most: int, runs: Sequence[Run], *, by_least: bool
    ) -> Iterator[Candidate]:
        """Of each bin that its release lets go now, and of each batch that was formed."""
        shorter: tuple[DeadlineQueue, ...] = ()
        waiting, waits = 0, queues.release.waits
        for queue in queues.bins:
            if not queue.requests:
                continue
            assert isinstance(queue, DeadlineQueue)
            waiting += len(queue)
            same = [run for run in runs if run.queued.bin <= queue.index] if runs else ()
            all_of_it = min(len(queue), self._forming.batch_size)
            idle = bool(runs) or not engine.running
            let_go = self._forming.size(queues, queue, self._now_s, idle) if waits else all_of_it
            times_s = self._batch_times(engine, queues, queue.index, by_least=by_least)
            if let_go >= all_of_it:
                yield Candidate(engine, queues.model, queue, times_s, most, waiting + len(same), shorter, same)
            elif let_go:  # a release that lets go of less than there is wants no more in the batch
                yield Candidate(engine, queues.model, queue, times_s, min(most, let_go), len(queue))
            shorter = (queue, *shorter)
        if queues.formed:
            for batch in queues.formed.batches():
                if batch.avoid is None:
                    yield self._formed(engine, queues, batch, most, by_least=by_least)

    def best_of_bin(self, engine: EngineState, queues: ModelQueues, bin_index: int) -> Start | None:
        """The best batch of one bin, or of what was formed, on an engine that is free."""
        if not queues.waiting or not engine.serves(queues.model):
            return None
        most = min(self._forming.batch_size, engine.room)
        candidates = list(self._candidates(engine, queues, most, (), by_least=False))
        own = [each for each in candidates if each.batch is not None or each.queue is queues.bins[bin_index]]
        keyed = [(key, place) for place, each in enumerate(own) if (key := self._key(each)) is not None]
        return self.started(own[min(keyed)[1]]) if keyed else None

    def reserve(self, candidate: Candidate) -> FormedBatch:
        """What it is composed of waits from now on as a batch whose engine is known."""
        batch, size = self.take(candidate)
        return self._group.queues[batch.model].formed.split(batch, size) if candidate.batch is not None else batch

    def _formed(
        self, engine: EngineState, queues: ModelQueues, batch: FormedBatch, most: int, *, by_least: bool
    ) -> Candidate:
        row, times_s = FormedRow(batch), self._batch_times(engine, queues, batch.bin, by_least=by_least)
        return Candidate(engine, queues.model, row, times_s, min(most, len(times_s)), len(row), batch=batch)

    def _batch_times(
        self, engine: EngineState, queues: ModelQueues, bin_index: int, *, by_least: bool = False
    ) -> Sequence[float]:
        times = self._times.of(engine, queues.model, bin_index, queues.tokens(bin_index))
        return times.least if by_least else times.expected
