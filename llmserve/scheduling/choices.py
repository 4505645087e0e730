"""Which batch starts next, and on which engine, in one dispatch of a group.

A fixed order takes the first formed batch of all models, or lets the most urgent bin form one; it chooses an engine. An
order of the moment compares all candidates that a free engine could run.
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

First = tuple[ModelQueues, FormedBatch]
Start = tuple[EngineState, ModelQueues, FormedBatch, int]  # the first `int` requests of the batch shall start

# ---- orders with a fixed key ---------------------------------------------------------------------------------------


class FixedChoice:
    """Chooses the batches that start in one dispatch of a group, by a fixed order.

    Each model's batches keep their order. A batch that must avoid an engine blocks no other batch. A batch that waits
    for room blocks all engines that serve its model, so that large batches do not wait for ever.
    """

    def __init__(self, group: Group, forming: Forming, now_s: float) -> None:
        self._group = group
        self._pool = group.pool
        self._forming = forming
        self._now_s = now_s
        self._blocked: frozenset[str] = frozenset()  # names of engines on which a batch waits for room
        self._set_aside: frozenset[FormedBatch] = frozenset()  # batches that avoid all engines with room
        self._rechecks_s: list[float] = []  # when a batch may fit an engine's memory

    def starts(self) -> Iterator[Start]:
        """Yield the starts in turn. The caller must carry out each start before it asks for the next."""
        while self._pool.free and (startable := self._startable()):
            first, unformed = self._first(startable)
            if first is not None and unformed and self._form_older(unformed, first[1]):
                first, _ = self._first(startable)
            if first is None:
                if not self._form_most_urgent(startable):
                    return
                continue
            queues, batch = first
            if (engine := self.engine_for(queues, batch, self._blocked)) is not None:
                yield engine, queues, batch, max(1, engine.room_at_once)
            elif self.waits_for_another_engine(queues, batch):
                self._set_aside |= {queues.formed.set_apart(batch)}
            else:
                self._block(queues.model)

    @property
    def recheck_at_s(self) -> float | None:
        waits = self._set_aside or self._blocked
        trials_s = [engine.circuit.suspects_from_s for engine in self._pool.free.values()] if waits else []
        return min([*self._rechecks_s, *[at_s for at_s in trials_s if at_s > self._now_s]], default=None)

    def _block(self, model: str) -> None:
        free = self._pool.free_for(model)
        times_s = [engine.recheck_at_s for engine in free]
        # An engine that was not checked in this dispatch may hold a time that has passed.
        self._rechecks_s += [at_s for at_s in times_s if at_s is not None and at_s > self._now_s]
        self._blocked |= {engine.info.name for engine in free}

    # ---- choice of a batch ----

    def _startable(self) -> list[ModelQueues]:
        """Queues with waiting requests that some free engine, which is not blocked, serves."""
        waiting = self._group.tally.queues.values()
        if not waiting:
            return []
        engines: Collection[EngineState] = self._pool.free.values()
        if self._blocked:
            engines = [engine for engine in engines if engine.info.name not in self._blocked]
        for engine in engines:
            if not engine.models:  # this engine serves every model
                return list(waiting)
        return [queues for queues in waiting if any(queues.model in engine.models for engine in engines)]

    def _first(self, startable: Sequence[ModelQueues]) -> tuple[First | None, Sequence[ModelQueues]]:
        """The next formed batch with its queues, None if no batch is formed; and the queues without a formed batch."""
        best: First | None = None
        key, number, unformed = math.inf, 0, []
        for queues in startable:
            if queues.unsorted:
                queues.sort_again()
            batch = queues.formed.first(self._set_aside)
            if batch is None:
                unformed.append(queues)
            elif best is None or batch.key < key or (batch.key == key and batch.id < number):
                best, key, number = (queues, batch), batch.key, batch.id
        return best, unformed

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
                        self._forming.push(queues, queue, size, self._now_s)
                        formed = True
        return formed

    def _form_most_urgent(self, startable: Sequence[ModelQueues]) -> bool:
        """Form a batch of the most urgent bin whose release allows one. True if a batch was formed."""
        best: tuple[float, float] | None = None
        chosen: tuple[ModelQueues, BinQueue, int] | None = None
        for queues in startable:
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
        self._set_aside = frozenset()  # with more formed requests, these batches may use look-ahead places
        return True

    # ---- choice of an engine ----

    def idle(self, queues: ModelQueues) -> bool | None:
        """Whether all engines on which a newly formed batch could start are idle; None: no such engine, or an earlier
        batch comes first.

        An engine that has look-ahead places only is ignored; but with a release that follows plans it counts as busy:
        then busy engines take all they can, and only idle engines wait for more requests.
        """
        if queues.formed:
            returned = [batch for batch in queues.formed.returned if batch not in self._set_aside]
            if queues.formed.fresh() or not all(self.waits_for_another_engine(queues, batch) for batch in returned):
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
        """Whether no engine has room but the one that failed the batch, while another works, and those on trial."""
        engines = [engine for engine in self._pool.free_for(queues.model) if engine.room > 0]
        willing = [engine for engine in engines if not engine.circuit.refuses(batch, self._now_s)]
        if batch.avoid is None or not self._pool.another_works(batch.avoid, queues.model):
            return bool(engines) and not willing
        return all(engine.info.name == batch.avoid for engine in willing)

    def engine_for(self, queues: ModelQueues, batch: FormedBatch, blocked: Collection[str]) -> EngineState | None:
        """The engine on which the batch, or its first request, starts now; None: no engine. blocked : engine names.

        Free slots come first. A look-ahead place at a busy engine is used only while at least as many formed requests
        wait as there are engines, so that a slot that becomes free elsewhere still gets a request. The engine that
        failed the batch is never chosen while another works.
        """
        engines = self._pool.free_for(queues.model, blocked)
        if batch.avoid is not None and self._pool.another_works(batch.avoid, queues.model):
            engines = [engine for engine in engines if engine.info.name != batch.avoid]
        engines = [engine for engine in engines if not engine.circuit.refuses(batch, self._now_s)]
        free = [engine for engine in engines if engine.room > 0]
        if not free and len(queues.formed) >= len(queues.engines):
            free = engines
        first, per_token_s = batch.first, queues.service.seconds_per_token
        fitting = [engine for engine in free if engine.fits(first, self._now_s, per_token_s)]
        if queues.release.plans:  # join running requests, for idle engines wait until the plan lets a batch start
            fitting = [engine for engine in fitting if engine.running] or fitting
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        return self._pool.preferred(fitting, first.request.prefixes)

    def idle_after(self, queues: ModelQueues) -> bool | None:
        """`idle` after all possible starts."""
        self._set_aside = frozenset()
        return self.idle(queues)


# ---- orders of the moment ------------------------------------------------------------------------------------------


class MomentChoice:
    """Chooses the batches that start in one dispatch of a group, by an order of the moment.

    For each free engine, the first of these that exists: a batch that another engine failed or lost, for it has waited
    longest; an overdue request without a deadline; the candidate of the smallest key among those in time with average
    answer lengths; the same with the shortest answer lengths; and, if no candidate is in time by the engine's profile
    and no recent answer has confirmed the profile, one request on trial.  asks : whether releases may let bins wait
    """

    def __init__(
        self, group: Group, forming: Forming, order: MomentOrder, times: Timetable, now_s: float, *, asks: bool = True
    ) -> None:
        self._asks = asks
        self._group = group
        self._pool = group.pool
        self._forming = forming
        self._order = order
        self._times = times
        self._now_s = now_s
        self._wakes_s: list[float] = []

    def starts(self) -> Iterator[Start]:
        """Yield the starts in turn. The caller must carry out each start before it asks for the next."""
        for name in sorted(self._pool.free):
            while self._group.tally.waiting and (engines := self._sharing(name)):
                start = self._best(engines)
                if start is None:
                    self._note_wakes(engines, name)
                    break
                yield start

    @property
    def recheck_at_s(self) -> float | None:
        return min(self._wakes_s, default=None)

    def _note_wakes(self, engines: Sequence[EngineState], name: str) -> None:
        times_s = [self._order.wake_at_s(name, self._now_s), *[engine.recheck_at_s for engine in engines]]
        times_s += [engine.circuit.suspects_from_s for engine in engines]
        self._wakes_s += [at_s for at_s in times_s if at_s is not None and at_s > self._now_s]

    def _sharing(self, name: str) -> Sequence[EngineState]:
        """The engines of which one may start a batch now. Free barrier engines that share a GPU come together, under
        the name of the first of them; any other engine comes alone. () for another name, or if not free.
        """
        engine = self._pool.free.get(name)  # None once another engine of its GPU has started a batch
        if engine is None or engine.room <= 0:
            return ()
        if not engine.info.barrier or len(engine.worker.engines) == 1:
            return (engine,)
        sharing = [other for other in engine.worker.engines if other.info.name in self._pool.free]
        return sharing if sharing[0] is engine else ()

    def idle_after(self, queues: ModelQueues) -> bool | None:
        """Whether all engines with room for the model run nothing; None: no engine has room."""
        free = [engine for engine in self._pool.free_for(queues.model) if engine.room > 0]
        return not any(engine.running for engine in free) if free else None

    def _best(self, engines: Sequence[EngineState]) -> Start | None:
        """The best start on one of these engines; None: nothing can start."""
        for engine in engines:
            if (returned := self._returned(engine)) is not None:
                return returned
        # by_least: a batch that is late with average answer lengths may be in time, for lengths differ.
        best = self._overdue(engines) or self._pick(engines) or self._pick(engines, by_least=True)
        best = best or self._trial(engines)
        return self.started(best) if best is not None else None

    def started(self, candidate: Candidate) -> Start | None:
        """The start of a candidate; None while the engine's memory cannot hold it. No smaller candidate overtakes."""
        engine, queues = candidate.engine, self._group.queues[candidate.model]
        if not engine.fits(candidate.first(self._now_s), self._now_s, queues.service.seconds_per_token):
            return None
        return engine, queues, *self.take(candidate)

    def take(self, candidate: Candidate) -> tuple[FormedBatch, int]:
        """Take the candidate's requests: the first `count` requests of a formed batch. Forms the batch if needed."""
        queues, chosen = self._group.queues[candidate.model], candidate.take(self._now_s)
        batch = candidate.batch
        if batch is None:
            batch = self._forming.form(queues, candidate.queue.index, chosen, self._now_s)
            queues.formed.hold(batch)
        else:
            batch.put_first(chosen)
        return batch, len(chosen)

    def _returned(self, engine: EngineState) -> Start | None:
        """The first returned batch of which some requests can be in time together, at least with short answers."""
        for queues in self._group.tally.queues.values():
            if not queues.formed or not engine.serves(queues.model):
                continue
            for batch in queues.formed.returned:
                avoids = batch.avoid == engine.info.name and self._pool.another_works(engine.info.name, queues.model)
                if avoids or engine.circuit.refuses(batch, self._now_s):
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
        """The candidate with the oldest overdue request of any model, from that request on; None: none is overdue.

        A request without a deadline is overdue after UNDATED_S. Without this rule it might wait for ever.
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
        _, chosen = best
        chosen.place = chosen.queue.first_at(math.inf)
        chosen.count = min(chosen.most, len(chosen.queue) - chosen.place)
        return chosen

    def _has_overdue(self, queues: ModelQueues) -> bool:
        oldest = [queue.oldest_undated() for queue in queues.bins if isinstance(queue, DeadlineQueue)]
        if queues.formed:
            oldest += [queued for batch in queues.formed.batches() for queued in batch.requests.values()]
        return any(queued is not None and is_overdue(queued, self._now_s) for queued in oldest)

    def _trial(self, engines: Sequence[EngineState]) -> Candidate | None:
        """The request with the latest deadline, alone on an idle engine. Without trials, a profile with too long times
        would make all requests late, and no run would ever correct the profile.
        """
        for engine in engines:
            if engine.running or not engine.info.speeds:
                continue
            for candidate in self._all_candidates(engine):
                model, queue = candidate.model, candidate.queue
                if engine.speed(model) is None or self._now_s < engine.proven_until_s(model):
                    continue
                candidate.batch_s, candidate.most = (0.0,), 1  # so that it counts as in time
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
        """The candidate of the smallest key on these free engines. by_least : with the shortest answer lengths."""
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
        """The candidate of the smallest key: the best so far, or a candidate of these queues on this engine.

        room : requests that the engine has or would have room for.  running : a batch on the engine that could be
        stopped.  at_least : smallest useful size of a batch, requests of `running` included.
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
        """Let the order compose the candidate, and return its key; None: the candidate shall not run now."""
        return self._order.key(candidate, self._now_s) if self._order.compose(candidate, self._now_s) else None

    def _candidates(
        self, engine: EngineState, queues: ModelQueues, most: int, runs: Sequence[Run], *, by_least: bool
    ) -> Iterator[Candidate]:
        """One candidate for each bin that its release lets go now, and one for each formed batch."""
        shorter: tuple[DeadlineQueue, ...] = ()
        waiting, waits = 0, self._asks and queues.release.waits
        for queue in queues.bins:
            if not queue.requests:
                continue
            assert isinstance(queue, DeadlineQueue)
            waiting += len(queue)
            same = [run for run in runs if run.queued.bin <= queue.index] if runs else ()
            all_of_it = min(len(queue), self._forming.batch_size)
            idle = bool(runs) or not engine.running
            released = self._forming.size(queues, queue, self._now_s, idle) if waits else all_of_it
            times_s = self._batch_times(engine, queues, queue.index, by_least=by_least)
            if released >= all_of_it:
                yield Candidate(engine, queues.model, queue, times_s, most, waiting + len(same), shorter, same)
            elif released:  # the release limits the size, so no requests of shorter bins are added
                yield Candidate(engine, queues.model, queue, times_s, min(most, released), len(queue))
            shorter = (queue, *shorter)
        if queues.formed:
            for batch in queues.formed.batches():
                if batch.avoid is None:
                    yield self._formed(engine, queues, batch, most, by_least=by_least)

    def best_of_bin(self, engine: EngineState, queues: ModelQueues, bin_index: int) -> Start | None:
        """The best start on a free engine, of one bin or of the formed batches; None: nothing can start."""
        if not queues.waiting or not engine.serves(queues.model):
            return None
        most = min(self._forming.batch_size, engine.room)
        candidates = list(self._candidates(engine, queues, most, (), by_least=False))
        own = [option for option in candidates if option.batch is not None or option.queue is queues.bins[bin_index]]
        keyed = [(key, place) for place, option in enumerate(own) if (key := self._key(option)) is not None]
        return self.started(own[min(keyed)[1]]) if keyed else None

    def reserve(self, candidate: Candidate) -> FormedBatch:
        """Take the candidate's requests as a batch that is reserved for the candidate's engine."""
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
