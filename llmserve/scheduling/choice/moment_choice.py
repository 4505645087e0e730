"""Which batch starts next, and on which engine, in one dispatch by an order of the moment.

The order compares all candidates that a free engine could run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial

from llmserve.scheduling.choice.batch_times import Timetable
from llmserve.scheduling.choice.candidates import Candidates, Opening, Whose
from llmserve.scheduling.choice.choice import Choice, Start
from llmserve.scheduling.choice.orders import Candidate, Key, MomentOrder, is_overdue
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.fair import Share
from llmserve.scheduling.group import Forming, Group
from llmserve.scheduling.queues.deadline_queue import DeadlineQueue
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import FormedBatch

Best = tuple[Key, Candidate]


class MomentChoice(Choice):
    """The choice of the batches that start in one dispatch, by an order of the moment.

    For each free engine, the first of these that exists: a batch that another engine failed or lost, for it has waited
    longest; an overdue request without a deadline; the candidate of the smallest key among those in time with average
    answer lengths; the same with the shortest answer lengths; and, if no candidate is in time by the engine's profile
    and no recent answer has confirmed the profile, one request on trial.  asks : whether releases may let bins wait
    """

    def __init__(
        self, group: Group, forming: Forming, order: MomentOrder, times: Timetable, now_s: float, *, asks: bool = True
    ) -> None:
        super().__init__(group, forming, now_s)
        self._order = order
        self._wakes_s: list[float] = []
        self._holds = False  # whether requests that wait for memory hold others back on the engine asked last
        self._forms = False  # whether a batch has formed there that has not started
        self._candidates = Candidates(group, forming, times, now_s, asks=asks)

    def starts(self) -> Iterator[Start]:
        self._sort(self._group.tally.queues.values())
        names = deque(sorted(self._pool.free))
        held: list[str] = []  # engines on which requests that wait for memory hold others back
        left: list[str] = []  # engines on which no candidate is left
        while names:
            name = names.popleft()
            while self._group.tally.waiting and (engines := self._sharing(name)):
                start = self._best(engines)
                if self._forms:  # a release may hold back for idle engines what it lets go on others
                    names += left
                    left.clear()
                if start is None:
                    self._note_wakes(engines, name)
                    (held if self._holds else left).append(name)
                    break
                yield start
                names += held  # what held others back may have started, or may come later now
                held.clear()

    @property
    def recheck_at_s(self) -> float | None:
        return min(self._wakes_s, default=None)

    def _note_wakes(self, engines: Sequence[EngineState], name: str) -> None:
        times_s = [self._order.wake_at_s(name, self._now_s), *[engine.recheck_at_s(self._now_s) for engine in engines]]
        times_s += [engine.circuit.suspects_from_s for engine in engines]
        times_s += [engine.memory_token.rests_until_s for engine in engines if self._candidates.skipped]
        times_s += self._prompts_over_s
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

    def _best(self, engines: Sequence[EngineState]) -> Start | None:
        """The best start on one of these engines; None: nothing can start."""
        self._holds = self._forms = False
        for engine in engines:
            if (returned := self._returned(engine)) is not None:
                return returned
        self._candidates.skipped, self._alone = set(), False
        while (best := self.next(engines)) is not None:
            if self.may_start(best):
                return self._start(best)
            self._holds = True
            if not self.passes(best):
                return None
        return None

    def next(self, engines: Sequence[EngineState]) -> Candidate | None:
        """The best remaining candidate; the best skipped one once no other remains; None: none is left."""
        best = next(filter(None, map(partial(self._best_of_share, engines), self._shares(engines))), None)
        best = best or self._trial(engines)
        if best is None and self._candidates.skipped and not self._alone:
            self._candidates.skipped, self._alone = set(), True
            return self.next(engines)
        return best

    # ---- candidates that do not start ----

    def may_start(self, candidate: Candidate) -> bool:
        """Whether the engine's memory holds the candidate's first request (memory.py)."""
        queues, first = self._group.queues[candidate.model], candidate.first(self._now_s)
        return self._best_for(queues, first, (candidate.engine,)) is not None

    def passes(self, candidate: Candidate) -> bool:
        """Skip a candidate that cannot start now, with all large candidates of the same share: others may pass.

        False: the candidate blocks the engine: it needs no more than its fair share of the memory, or has the token.
        """
        engine, first, queues = candidate.engine, candidate.first(self._now_s), self._group.queues[candidate.model]
        if not self._lets_pass(queues, first, engine):
            return False
        formed = queues.formed
        batch, _ = self._batch_of(candidate)
        if candidate.batch is None:
            formed.push(batch)
            self._forms = True
        behind = self._comes_behind(queues, first, engine)
        if behind:
            formed.set_apart_behind(batch, "")
        else:
            formed.set_apart_large(batch)
        self._candidates.skipped.add((batch.share, behind))
        if behind:
            return True
        elsewhere = [other for other in self._pool.free_for(candidate.model) if other is not engine]
        if any(other.memory_token.holder is first for other in elsewhere) or not engine.memory_token.is_open_to(
            first, self._now_s
        ):
            return True
        engine.memory_token.wait(first, self._now_s)
        return False

    # ---- choice of a candidate ----

    def _shares(self, engines: Sequence[EngineState]) -> Iterator[Share | None]:
        """The shares that compete for these engines, the least served first; (None,) while only one waits."""
        served = (queues for queues in self._group.tally.queues.values() if engines[0].serves(queues.model))
        fair = next((queues.fair for queues in served), None)
        return iter(fair) if fair is not None and fair.contended else iter((None,))

    def _best_of_share(self, engines: Sequence[EngineState], share: Share | None) -> Candidate | None:
        """The best candidate that holds requests of this share: all that have room, or one. share : None: of any"""
        options = [Whose(share, every) for every in (True, False)] if share is not None else [None]
        # by_least: a batch that is late with average answer lengths may be in time, for lengths differ.
        tries = (self._pick(engines, whose, by_least=by_least) for by_least in (False, True) for whose in options)
        return self._overdue(engines, options[-1]) or next(filter(None, tries), None)

    def _returned(self, engine: EngineState) -> Start | None:
        """The first returned batch of which some requests can be in time together, at least with short answers."""
        for queues in self._group.tally.queues.values():
            if not queues.formed or not engine.open_to(queues.model):
                continue
            for batch in queues.formed.returned:
                if not self._willing(queues, batch, (engine,)):
                    continue
                count = self._in_time(queues, batch, engine)
                if count and engine.fits(batch.first, self._now_s, queues.service.seconds_per_token):
                    return engine, queues, batch, count
        return None

    def _in_time(self, queues: ModelQueues, batch: FormedBatch, engine: EngineState) -> int:
        """Number of requests of a returned batch that can be in time together; these are the batch's first from now
        on.
        """
        for by_least in (False, True):
            opening = Opening(engine, engine.room_at_once, by_least)
            candidate = self._candidates.formed(queues, batch, opening, opening.room)
            candidate.count = candidate.largest(self._now_s)
            if candidate.count:
                self.take(candidate)
                return candidate.count
        return 0

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
        best: Best | None = None
        for engine in engines:
            best = self.best_of(Opening(engine, engine.room_at_once, by_least, whose), waiting, best)
        return best[1] if best is not None else None

    def best_of(self, opening: Opening, waiting: Collection[ModelQueues], best: Best | None = None) -> Best | None:
        """The candidate of the smallest key: `best`, or a candidate of these queues for this opening."""
        order, at_least, most = self._order, opening.at_least, self._candidates.most(opening)
        for queues in waiting:
            count = queues.waiting + len(opening.runs_of(queues.model))
            if count < at_least or not opening.engine.open_to(queues.model):
                continue
            if best is not None and order.least_key(min(count, most)) > best[0]:
                continue
            for candidate in self._candidates.of(queues, opening):
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
        candidates = list(self._candidates.of(queues, Opening(engine, engine.room)))
        own = [option for option in candidates if option.batch is not None or option.queue is queues.bins[bin_index]]
        keyed = [(key, place) for place, option in enumerate(own) if (key := self._key(option)) is not None]
        best = own[min(keyed)[1]] if keyed else None
        return self._start(best) if best is not None and self.may_start(best) else None

    # ---- the chosen candidate ----

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

    def reserve(self, candidate: Candidate) -> FormedBatch:
        """Take the candidate's requests as a batch that is reserved for the candidate's engine."""
        batch, size = self.take(candidate)
        return self._group.queues[batch.model].formed.split(batch, size) if candidate.batch is not None else batch
