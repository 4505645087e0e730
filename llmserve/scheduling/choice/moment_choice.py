"""Which batch starts next, and on which engine, in one dispatch of a group by an order of the moment.

The order compares all candidates that a free engine could run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from llmserve.scheduling.choice.batch_times import Timetable
from llmserve.scheduling.choice.orders import Candidate, Key, MomentOrder, Running, is_overdue
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.fair import Share
from llmserve.scheduling.group import Forming, Group, Start
from llmserve.scheduling.memory import is_giant, is_large
from llmserve.scheduling.queues.deadline_queue import DeadlineQueue, FormedRow
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import FormedBatch, Run


class Whose(NamedTuple):
    """Whose requests a batch must hold: one of the share's, or as many as wait and have room in it (every)."""

    share: Share
    every: bool


class Candidates:
    """The candidates of one dispatch of a group.

    set_aside : shares whose large batches others may pass on this engine.  asks : whether releases may let bins wait
    """

    def __init__(self, group: Group, forming: Forming, times: Timetable, now_s: float, *, asks: bool) -> None:
        self._group, self._forming, self._times = group, forming, times
        self._now_s, self._asks = now_s, asks
        self.set_aside: set[Share] = set()

    def on(self, engine: EngineState, whose: Whose | None = None) -> Iterator[Candidate]:
        """Of all models, for this engine."""
        for queues in self._group.tally.queues.values():
            if engine.open_to(queues.model):
                most = min(self._forming.batch_size, engine.room_at_once)
                yield from self.of(engine, queues, most, (), whose, by_least=False)

    def of(
        self,
        engine: EngineState,
        queues: ModelQueues,
        most: int,
        runs: Sequence[Run],
        whose: Whose | None = None,
        *,
        by_least: bool,
    ) -> Iterator[Candidate]:
        """One candidate for each bin that its release lets go now, and one for each formed batch.

        whose : requests that the batch must hold; slots that refill take one of them at a time
        """
        shorter: tuple[DeadlineQueue, ...] = ()
        waiting, waits = 0, self._asks and queues.release.waits
        share = whose.share if whose is not None else None
        alone = share is not None and not engine.info.barrier
        most, within = (1, None) if alone else (most, share)
        held = whose.share.waiting if whose is not None and whose.every else 1
        formed = (
            [batch for batch in queues.formed.batches() if self._may_be_next(batch, share)] if queues.formed else []
        )
        for batch in formed:
            if batch.large:  # it has waited longer than the requests of its bin: among equals it comes first
                yield self.formed(engine, queues, batch, most, by_least=by_least)
        for bin_queue in queues.bins:
            assert isinstance(bin_queue, DeadlineQueue)
            queue = bin_queue.of_share(share) if alone and share is not None else bin_queue
            if queue is None or not queue.requests:
                continue
            waiting += len(queue)
            same = [run for run in runs if run.queued.bin <= queue.index] if runs else ()
            all_of_it = min(len(bin_queue), self._forming.batch_size)
            idle = bool(runs) or not engine.running
            released = self._forming.size(queues, bin_queue, self._now_s, idle) if waits else all_of_it
            times_s = self._batch_times(engine, queues, queue.index, by_least=by_least)
            if released >= all_of_it:
                candidate = Candidate(engine, queues.model, queue, times_s, most, waiting + len(same), shorter, same)
            elif released:  # the release limits the size, so no requests of shorter bins are added
                candidate = Candidate(engine, queues.model, queue, times_s, min(most, released), len(queue))
            if released:
                candidate.share, candidate.held = within, held
                yield candidate
            shorter = (queue, *shorter)
        for batch in formed:
            if not batch.large:
                yield self.formed(engine, queues, batch, most, by_least=by_least)

    def _may_be_next(self, batch: FormedBatch, share: Share | None) -> bool:
        """Whether a formed batch is a candidate. share : None: of any"""
        passed = batch.large and batch.share in self.set_aside
        return not batch.avoid and not passed and (share is None or batch.has(share))

    def formed(
        self, engine: EngineState, queues: ModelQueues, batch: FormedBatch, most: int, *, by_least: bool
    ) -> Candidate:
        row, times_s = FormedRow(batch), self._batch_times(engine, queues, batch.bin, by_least=by_least)
        return Candidate(engine, queues.model, row, times_s, min(most, len(times_s)), len(row), batch=batch)

    def _batch_times(
        self, engine: EngineState, queues: ModelQueues, bin_index: int, *, by_least: bool = False
    ) -> Sequence[float]:
        times = self._times.of(engine, queues.model, bin_index, queues.tokens(bin_index))
        return times.least if by_least else times.expected


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
        self._group = group
        self._pool = group.pool
        self._forming = forming
        self._order = order
        self._now_s = now_s
        self._wakes_s: list[float] = []
        self._candidates = Candidates(group, forming, times, now_s, asks=asks)
        self._alone = False  # nothing else can start there

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
        times_s = [self._order.wake_at_s(name, self._now_s), *[engine.recheck_at_s(self._now_s) for engine in engines]]
        times_s += [engine.circuit.suspects_from_s for engine in engines]
        times_s += [engine.turn.rests_until_s for engine in engines if self._candidates.set_aside]
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
        self._candidates.set_aside, self._alone = set(), False
        while (best := self.next(engines)) is not None:
            if self.may_start(best):
                return self._start(best)
            if not self.passes(best):
                return None
        return None

    def next(self, engines: Sequence[EngineState]) -> Candidate | None:
        """The best candidate that was not set aside, and if there is none, of those that were; None: none is left."""
        best = next(filter(None, map(partial(self._best_for, engines), self._shares(engines))), None)
        best = best or self._trial(engines)
        if best is None and self._candidates.set_aside and not self._alone:
            self._candidates.set_aside, self._alone = set(), True
            return self.next(engines)
        return best

    # ---- candidates that do not start ----

    def may_start(self, candidate: Candidate) -> bool:
        """Whether the engine's memory holds the candidate's first request, and is the request's now (memory.py)."""
        engine, first = candidate.engine, candidate.first(self._now_s)
        if not engine.fits(first, self._now_s, self._group.queues[candidate.model].service.seconds_per_token):
            return False
        if not is_giant(first, engine.info) or engine.turn.is_open_to(first, self._now_s):
            return True
        return self._alone and not engine.running

    def passes(self, candidate: Candidate) -> bool:
        """Set a candidate aside that cannot start now, with all large ones of its share: others may pass them.

        False: it blocks the engine, for it needs no more than its fair share of the memory, or has its turn there.
        """
        engine, first = candidate.engine, candidate.first(self._now_s)
        if not is_large(first, engine.info):
            return False
        formed = self._group.queues[candidate.model].formed
        batch, _ = self._batch_of(candidate)
        if candidate.batch is None:
            formed.push(batch)
        formed.set_apart_large(batch)
        self._candidates.set_aside.add(batch.share)
        elsewhere = [other for other in self._pool.free_for(candidate.model) if other is not engine]
        if any(other.turn.holder is first for other in elsewhere) or not engine.turn.is_open_to(first, self._now_s):
            return True
        engine.turn.wait(first, self._now_s)
        return False

    def _shares(self, engines: Sequence[EngineState]) -> Iterator[Share | None]:
        """The shares that compete for these engines, the least served first; (None,) while only one waits."""
        served = (queues for queues in self._group.tally.queues.values() if engines[0].serves(queues.model))
        fair = next((queues.fair for queues in served), None)
        return iter(fair) if fair is not None and fair.contended else iter((None,))

    def _best_for(self, engines: Sequence[EngineState], share: Share | None) -> Candidate | None:
        """The best candidate that holds requests of this share: all that have room, or one. share : None: of any"""
        options = [Whose(share, every) for every in (True, False)] if share is not None else [None]
        # by_least: a batch that is late with average answer lengths may be in time, for lengths differ.
        tries = (self._pick(engines, whose, by_least=by_least) for by_least in (False, True) for whose in options)
        return self._overdue(engines, options[-1]) or next(filter(None, tries), None)

    def _start(self, candidate: Candidate) -> Start:
        return candidate.engine, self._group.queues[candidate.model], *self.take(candidate)

    def take(self, candidate: Candidate) -> tuple[FormedBatch, int]:
        """Take the candidate's requests: the first `count` requests of a formed batch. Forms the batch if needed."""
        batch, count = self._batch_of(candidate)
        if candidate.batch is None:
            self._group.queues[batch.model].formed.hold(batch)
        return batch, count

    def _batch_of(self, candidate: Candidate) -> tuple[FormedBatch, int]:
        """The batch that the candidate's requests are in from now on, first of all; and how many they are."""
        queues, chosen = self._group.queues[candidate.model], candidate.take(self._now_s)
        if candidate.batch is None:
            return self._forming.form(queues, candidate.queue.index, chosen, self._now_s), len(chosen)
        candidate.batch.put_first(chosen)
        return candidate.batch, len(chosen)

    def _returned(self, engine: EngineState) -> Start | None:
        """The first returned batch of which some requests can be in time together, at least with short answers."""
        for queues in self._group.tally.queues.values():
            if not queues.formed or not engine.open_to(queues.model):
                continue
            for batch in queues.formed.returned:
                avoids = engine.info.name in batch.avoid and self._pool.others_work(batch.avoid, queues.model)
                if avoids or engine.circuit.refuses(batch, self._now_s):
                    continue
                for by_least in (False, True):
                    candidate = self._candidates.formed(engine, queues, batch, engine.room_at_once, by_least=by_least)
                    candidate.count = candidate.largest(self._now_s)
                    if candidate.count:
                        self.take(candidate)
                        if engine.fits(batch.first, self._now_s, queues.service.seconds_per_token):
                            return engine, queues, batch, candidate.count
                        break
        return None

    def _overdue(self, engines: Sequence[EngineState], whose: Whose | None) -> Candidate | None:
        """The candidate with the oldest overdue request of any model, from that request on; None: none is overdue.

        A request without a deadline is overdue after UNDATED_S. Without this rule it might wait for ever.
        """
        if not any(self._has_overdue(queues) for queues in self._group.tally.queues.values()):
            return None
        best: tuple[tuple[float, int], Candidate] | None = None
        for engine in engines:
            for candidate in self._candidates.on(engine, whose):
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
            for candidate in self._candidates.on(engine):
                model, queue = candidate.model, candidate.queue
                if engine.speed(model) is None or self._now_s < engine.proven_until_s(model):
                    continue
                candidate.batch_s, candidate.most = (0.0,), 1  # so that it counts as in time
                if self._key(candidate) is not None:
                    candidate.queue, candidate.shorter = queue, ()
                    candidate.count, candidate.place = 1, len(queue) - 1
                    return candidate
        return None

    def _pick(
        self, engines: Sequence[EngineState], whose: Whose | None = None, *, by_least: bool = False
    ) -> Candidate | None:
        """The candidate of the smallest key on these free engines. by_least : with the shortest answer lengths."""
        waiting = self._group.tally.queues.values()
        best: tuple[Key, Candidate] | None = None
        for engine in engines:
            best = self.best_of(engine, waiting, engine.room_at_once, best=best, by_least=by_least, whose=whose)
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
        whose: Whose | None = None,
    ) -> tuple[Key, Candidate] | None:
        """The candidate of the smallest key: the best so far, or a candidate of these queues on this engine.

        room : requests that the engine has or would have room for.  running : a batch on the engine that could be
        stopped.  at_least : smallest useful size of a batch, requests of `running` included.  whose : requests that
        the batch must hold
        """
        order, most = self._order, min(self._forming.batch_size, room)
        for queues in waiting:
            runs = running.runs if running is not None and running.runs[0].queued.request.model == queues.model else ()
            count = queues.waiting + len(runs)
            if count < at_least or not engine.open_to(queues.model):
                continue
            if best is not None and order.least_key(min(count, most)) > best[0]:
                continue
            for candidate in self._candidates.of(engine, queues, most, runs, whose, by_least=by_least):
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
        if not self._order.compose(candidate, self._now_s) or not candidate.may_hold(self._now_s):
            return None
        return self._order.key(candidate, self._now_s)

    def best_of_bin(self, engine: EngineState, queues: ModelQueues, bin_index: int) -> Start | None:
        """The best start on a free engine, of one bin or of the formed batches; None: nothing can start."""
        if not queues.waiting or not engine.open_to(queues.model):
            return None
        most = min(self._forming.batch_size, engine.room)
        candidates = list(self._candidates.of(engine, queues, most, (), by_least=False))
        own = [option for option in candidates if option.batch is not None or option.queue is queues.bins[bin_index]]
        keyed = [(key, place) for place, option in enumerate(own) if (key := self._key(option)) is not None]
        best = own[min(keyed)[1]] if keyed else None
        return self._start(best) if best is not None and self.may_start(best) else None

    def reserve(self, candidate: Candidate) -> FormedBatch:
        """Take the candidate's requests as a batch that is reserved for the candidate's engine."""
        batch, size = self.take(candidate)
        return self._group.queues[batch.model].formed.split(batch, size) if candidate.batch is not None else batch
